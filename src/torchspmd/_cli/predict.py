"""``torchspmd predict``: rehearse a script of any size, and say whether it fits."""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torchspmd._cli.output import say_written, status_line, wrap, write_file
from torchspmd._cli.script import run_script
from torchspmd._cli.words import typed_command
from torchspmd.comm import format_count
from torchspmd.comm.storage import ledger_to_dict
from torchspmd.errors import UsageError
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.answer import Answer, answer
from torchspmd.predict.bounds import Bounds
from torchspmd.predict.clock import LiveClock
from torchspmd.predict.forks import Forks, serve
from torchspmd.predict.live import LiveMemory
from torchspmd.predict.memory import Fits
from torchspmd.predict.other_ranks import OtherRanks, Question
from torchspmd.predict.rehearsed import rehearsed_gpu
from torchspmd.predict.suggestions import Suggestion, suggest
from torchspmd.predict.text import describe_memory
from torchspmd.predict.time_suggestions import Gain, suggest_faster
from torchspmd.predict.time_text import describe_time
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.window import StepWindow
from torchspmd.rehearse.world import World
from torchspmd.report import write_page, write_perfetto
from torchspmd.trace import CommDebugMode

_SERVES = "TORCHSPMD_SERVES_RANKS"  # a process that forks for other ranks: its folder
_NOTHING = (
    "the script put no tensor on the GPU, so there is nothing to predict. Does it call its "
    'training, with model and data on "cuda"? What a script for CPUs sends, torchspmd '
    "trace shows."
)


def run(options: argparse.Namespace) -> int:
    """Rehearse the script and report; 1 when it does not fit."""
    if folder := os.environ.get(_SERVES):
        importlib.import_module("torchspmd.predict.preloaded")
        serve(Path(folder), partial(_as_another, options, Path(folder)))
    with tempfile.TemporaryDirectory() as folder, _forks(options, folder) as forks:
        at_once = 1 if options.candidate else None  # one of several processes already
        return _predict(options, OtherRanks(options.rank, forks, at_once=at_once))


def _forks(options: argparse.Namespace, folder: str) -> Forks:
    """Processes that rehearse other ranks."""
    if options.candidate and options.world_size > 1:
        work = partial(_as_another, options, Path(folder))
        return Forks.of_this_process(Path(folder), work)
    command = [sys.executable, "-m", "torchspmd", *options.words]
    return Forks(Path(folder), command, {**os.environ, _SERVES: folder})


def _as_another(options: argparse.Namespace, folder: Path, question: Question) -> str:
    """In a fork: rehearse a rank that another one waits for."""
    options.rank = question.rank
    others = OtherRanks(question.rank, Forks(folder), question)
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code = _predict(options, others)
    said = text.getvalue().strip().splitlines() or [f"exit code {code}"]
    return said[-1] if code > 1 else ""


def _predict(options: argparse.Namespace, others: OtherRanks) -> int:
    gpu, network = options.hardware
    settings = AllocatorSettings.of_environment()
    world = World(options.world_size, options.rank, options.nodes)
    recording = Recording(world.size, world.rank, world.nodes)
    mode = CommDebugMode()
    line = status_line(
        f"rehearsing {options.script} as rank {world.rank} of {world.size}"
    )
    window = StepWindow(
        mode,
        skip=options.skip,
        steps=options.steps,
        show=line.show,
        rehearsed=recording,
    )
    device = rehearsed_gpu(gpu, network, world)
    memory = LiveMemory(recording, gpu, settings)
    stage = rehearsal(recording, world, device, memory, others)
    bounds = Bounds(gpu, settings, options.bound_rate, options.bound_seconds)
    if not others.is_asked:
        window.after_first_step = partial(bounds.look, recording)
    clock = LiveClock(recording, gpu, network)
    timed_stage = _with_clock(stage, clock, virtual=options.virtual_clock)
    left: list[object] = []
    with line:
        succeeded = run_script(
            options.script,
            options.arguments,
            mode,
            window,
            timed_stage,
            module=options.module,
            left=left,
        )
    if not succeeded:
        _tell_invented(left, recording.notes)
        steps = format_count(recording.steps, "optimizer step")
        print(
            f"torchspmd predict: {options.script} failed after {steps}; nothing was "
            f"predicted.{_hint(left, world)}",
            file=sys.stderr,
        )
        return 2
    left.clear()
    if bounds.slower:
        print(f"torchspmd predict: {bounds.slower}", file=sys.stderr)
        return 2
    if others.is_asked:
        others.answer(recording)
        return 0
    if not recording.storages:
        raise UsageError(_NOTHING)
    if 1 < recording.steps < options.skip + options.steps:
        recording.notes.append(
            f"The script made {recording.steps} optimizer steps, and --skip {options.skip} "
            f"with --steps {options.steps} asks for {options.skip + options.steps}: its "
            "last one is taken to be steady."
        )
    met = None if bounds.is_reached else others
    told = answer(recording, met, gpu, network, settings)
    timed = told.timed
    if not options.network and timed.crosses_nodes:
        recording.notes.append(
            f"No --network was given: {network.title} is taken to be between the nodes."
        )
    room = told.account.margin
    faster = [] if options.brief else suggest_faster(timed, room=room)
    smaller = [] if options.brief else suggest(told.account)
    _report(told, smaller, faster)
    if options.json or options.html or options.perfetto:
        data = told.as_json(
            ledger_to_dict(mode.ledger),
            brief=options.brief,
            timeline=not options.no_timeline,
            smaller=smaller,
            faster=faster,
        )
        about = {"command": typed_command(options), "script": str(options.script)}
        _write(options, {**data, **about})
    return 1 if told.worst.fits is Fits.NO else 0


@contextlib.contextmanager
def _with_clock(
    stage: contextlib.AbstractContextManager[Recorder],
    clock: LiveClock,
    *,
    virtual: bool,
) -> Iterator[None]:
    """Events of CUDA tell predicted time; Python's clocks do where that is asked for."""
    names = ("perf_counter", "monotonic", "time") if virtual else ()
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(stage)
        recorder.elapsed = clock.elapsed
        for name in names:
            real = getattr(time, name)()
            tell = partial(_tell, clock, real)
            stack.enter_context(mock.patch.object(time, name, tell))
        yield


def _tell(clock: LiveClock, begin: float) -> float:
    return begin + clock.now()


def _write(options: argparse.Namespace, data: dict[str, Any]) -> None:
    if options.json is not None:
        write_file(options.json, json.dumps(data) + "\n")
        say_written("Prediction", options.json)
    if options.html is not None:
        write_page(data, options.html)
        say_written("Page", options.html)
    if options.perfetto is not None and not (data["timeline"] or {}).get("start"):
        print(f"No step was made: {options.perfetto} was not written.")
    elif options.perfetto is not None:
        write_perfetto(data, options.perfetto)
        say_written("Trace", options.perfetto)


def _tell_invented(left: list[object], notes: list[str]) -> None:
    """Which values a script that failed had been given, though they do not exist."""
    told = [each for each in notes if "given" in each or "chooses by values" in each]
    if told and left and not isinstance(left[-1], UsageError):
        print(
            "Values that it was given, which a rehearsal does not have:",
            file=sys.stderr,
        )
        print(*(wrap(f"  {each}") for each in told[-3:]), sep="\n", file=sys.stderr)


def _hint(left: list[object], world: World) -> str:
    error = left[-1] if left else None
    if isinstance(error, UsageError):
        return f" {error}"
    if isinstance(error, KeyError) and error.args[0] in World(2, 0).environment():
        return (
            f" torchrun sets {error.args[0]}: rehearse with --world-size 2 or more, or "
            f"set it for this command."
        )
    if isinstance(error, FileNotFoundError):
        return (
            f" It needs {error.filename}, which is not here: a rehearsal reads the "
            "script's own files; small ones of the same layout do."
        )
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f" It ended with exit code {error.code}."
    if isinstance(error, Exception):
        first = next(filter(None, map(str.strip, str(error).splitlines())), "")
        told = f" {type(error).__name__}: {first}"
        if world.size == 1 and re.search(r"\b(gpus?|devices)\b", str(error).lower()):
            told = (
                f"{told.rstrip('.')}. The script was shown one GPU: a run on N of them is "
                "rehearsed with --world-size N."
            )
        return told
    return ""


def _report(told: Answer, smaller: list[Suggestion], faster: list[Gain]) -> None:
    recording, timed = told.account.recording, told.timed
    parts = [describe_memory(told.account, smaller), describe_time(timed, faster)]
    if of_another := told.of_another():
        what = f"What follows is of rank {recording.rank}."
        parts[0] = f"{of_another} {what}\n{parts[0]}"
    if not recording.steps:
        parts.insert(0, "The script made no optimizer step: no training is counted.")
    print("", *map(wrap, parts), sep="\n\n")
    notes = [*recording.notes, *timed.notes()]
    for title, texts in (("Notes", notes), ("Skipped", recording.skipped)):
        if texts:
            print(f"{title}:", *(wrap(f"  {text}") for text in texts), sep="\n")
