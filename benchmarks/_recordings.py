"""Recordings of rehearsed scripts, on disk: a change of prices rehearses nothing again.

A recording depends on the script, its arguments, its rank and the rooms that record; not on
prices. Each is made in a process of its own, and pickled.
"""

import hashlib
import os
import pickle
import runpy
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import torchspmd
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.ranking import Outcome
from torchspmd.predict.search import rehearse_call, run_candidates
from torchspmd.predict.space import Candidate
from torchspmd.rehearse.nodes import Nodes
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.world import World

PACKAGE = Path(torchspmd.__file__).parent
ROOMS = ("rehearse", "_torch")  # what a recording depends on, besides the script
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))


class Rehearsal(NamedTuple):
    """A script as one rank of a world."""

    script: Path
    words: tuple[str, ...]
    gpu: str
    world_size: int
    rank: int = 0
    gpus_per_node: int = 8

    @property
    def path(self) -> Path:
        """Where its recording is kept."""
        text = "\0".join(map(str, (*self, torch.__version__, _sources(self.script))))
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return FOLDER / "torchspmd" / "recordings" / f"{name}.pickle"

    def read(self) -> Recording:
        """The recording that ``record`` has made."""
        recording: Recording = pickle.loads(self.path.read_bytes())
        return recording

    def __str__(self) -> str:
        return f"{self.script.name} {' '.join(self.words)}, rank {self.rank}"


@lru_cache
def _sources(script: Path) -> str:
    digest = hashlib.sha256(script.read_bytes())
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def record(rehearsals: Sequence[Rehearsal], jobs: int) -> dict[Rehearsal, str]:
    """Rehearse those that are not on disk; why, for each that could not be."""
    missing = [each for each in dict.fromkeys(rehearsals) if not each.path.exists()]
    points = [Candidate({"rehearsal": str(place)}, ()) for place in range(len(missing))]
    predict = _Record(tuple(missing), tuple(each.path for each in missing))
    outcomes = run_candidates(points, predict, jobs=jobs, progress=_show(missing))
    problems = zip(missing, outcomes, strict=True)
    return {each: outcome.problem for each, outcome in problems if outcome.problem}


def _show(missing: Sequence[Rehearsal]) -> Any:
    def show(outcome: Outcome, done: int, total: int) -> None:
        what = missing[int(outcome.candidate.values["rehearsal"])]
        told = f": {outcome.problem}" if outcome.problem else ""
        print(f"{done} of {total}: {what}{told}", file=sys.stderr, flush=True)

    return show


class _Record(NamedTuple):
    rehearsals: tuple[Rehearsal, ...]
    paths: tuple[Path, ...]  # as of the sources when it began

    def __call__(self, candidate: Candidate) -> dict[str, Any]:
        place = int(candidate.values["rehearsal"])
        what, path = self.rehearsals[place], self.paths[place]
        world = World(what.world_size, what.rank, Nodes(what.gpus_per_node))
        arguments = [str(what.script), *what.words]

        def run() -> None:
            with mock.patch.object(sys, "argv", arguments):
                runpy.run_path(str(what.script), run_name="__main__")

        recording = rehearse_call(run, load_gpu(what.gpu), world)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(recording, protocol=pickle.HIGHEST_PROTOCOL))
        part.replace(path)
        return {}
