"""``torchspmd search``: which arguments of a script are fastest on GPUs that fit them."""

import argparse
import contextlib
import hashlib
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torchspmd
from torchspmd._cli.output import say_written, write_file
from torchspmd._cli.process import say
from torchspmd._cli.usage.common import find_module
from torchspmd._cli.words import typed_command
from torchspmd.errors import UsageError
from torchspmd.predict.hardware import hardware_text, load_gpu, load_network
from torchspmd.predict.ranking import Asked, Outcome, describe_search
from torchspmd.predict.repeated import FEW, Repeated
from torchspmd.predict.search import (
    best_rate,
    explore,
    kept,
    run_candidates,
    work_of,
)
from torchspmd.predict.space import (
    Candidate,
    Expression,
    Space,
    argument_name,
    read_space,
)
from torchspmd.report import write_page


def run(options: argparse.Namespace) -> int:
    """Search and print the table; 1 when nothing fits."""
    _check_cache(options)
    repeat, _, counts = (options.repeat or "").partition("=")
    space = read_space(options.arguments, also=repeat)
    repeat = argument_name(repeat)
    where = Expression(options.where, "--where") if options.where else None
    work = Expression(options.work, "--work") if options.work else None
    known = {**space.fixed, "world_size": options.world_size}
    candidates = [
        candidate
        for candidate in space.candidates()
        if where is None or where({**known, **candidate.values})
    ]
    if not candidates:
        raise UsageError(f"no combination passes --where {options.where!r}.")
    swept = ", ".join(
        f"{name} in {'/'.join(map(str, values))}"
        for name, values in space.swept.items()
    )
    count = f"{len(candidates)} candidate{'s' if len(candidates) > 1 else ''}"
    print(f"{count}: {swept}", file=sys.stderr, flush=True)
    space = Space(space.swept, known, space.template)
    for candidate in candidates if work else ():  # before anything runs
        work_of(candidate, space, work, {})

    def items(outcome: Outcome) -> float:
        return work_of(outcome.candidate, space, work, dict(outcome.prediction))

    def run_some(some: Sequence[Candidate]) -> list[Outcome]:
        return _outcomes(options, some, None if repeat else items)

    blocks = Repeated(repeat, space, _counts(counts, known)) if repeat else None
    unit = "item" if work else "TFLOP"
    result = explore(candidates, run_some, items, unit, blocks)
    result.asked = _asked(options)
    print(describe_search(result, most=options.top))
    if result.best is None and result.failed:
        failed = _predict_command(options, result.failed[0].candidate)
        print(f"The whole error of the first one: {failed}")
    if options.json is not None:
        text = json.dumps(result.as_json(), indent=1)
        write_file(options.json, text + "\n")
        say_written("Candidates", options.json)
    if options.html is not None:
        write_page(result.as_json(), options.html)
        say_written("Page", options.html)
    return 0 if result.best is not None else 1


def _asked(options: argparse.Namespace) -> Asked:
    return Asked(
        command=typed_command(options),
        script=str(options.script),
        world_size=options.world_size,
        gpu=options.gpu,
        rank=options.rank,
        gpus_per_node=options.gpus_per_node,
        nodes=options.nodes.order,
        network=options.network,
        device_bytes=load_gpu(options.gpu).nbytes("total"),
        of=partial(_predict_command, options),
    )


def _counts(
    text: str, known: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], tuple[int, int]]:
    """How many blocks are rehearsed, by the values of a candidate."""
    if not text:
        return lambda values: FEW
    parts = [Expression(part, "--repeat") for part in text.split(",")]
    if len(parts) != 2:
        raise UsageError(
            f"--repeat {text!r}: two numbers of blocks, as in --repeat layers=2,4 or "
            "--repeat 'layers=pp,2*pp'."
        )

    def counts(values: Mapping[str, Any]) -> tuple[int, int]:
        few, more = (int(part({**known, **values})) for part in parts)
        if not 0 < few < more:
            raise UsageError(
                f"--repeat {text!r}: {few} and {more} blocks; the first number must be "
                "at least 1, and less than the second."
            )
        return few, more

    return counts


def _check_cache(options: argparse.Namespace) -> None:
    """Go on without one where its folder cannot be written to."""
    if options.no_cache:
        return
    folder = _cache_folder(options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK) else "you may not write there"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        say(
            "search",
            f"predictions are not kept in {folder}: {problem}. Name another folder with "
            "--cache, or give --no-cache.",
        )
        options.no_cache = True


def _cache_folder(options: argparse.Namespace) -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(options.cache or default / "torchspmd" / "search")


def _outcomes(
    options: argparse.Namespace,
    candidates: Sequence[Candidate],
    work: Callable[[Outcome], float] | None = None,
) -> list[Outcome]:
    """Those of the cache, and those that are predicted now; in the given order.

    With ``work``, those that cannot be the best are not rehearsed to their end.
    """
    cache = _Cache(options)
    found = {c: cache.read(c) for c in map(_key, candidates)}
    missing = [each for each in candidates if found[_key(each)] is None]
    if len(missing) < len(candidates):
        known = len(candidates) - len(missing)
        print(
            f"{known} predicted before, from {cache.folder}",
            file=sys.stderr,
            flush=True,
        )
    predict = partial(predict_script, command=_command(options), script=options.script)
    if work is not None and options.work:
        predict = partial(predict, work={_key(c): work(Outcome(c)) for c in missing})
    for outcome in run_candidates(
        missing, predict, jobs=options.jobs, progress=_show_progress, work=work
    ):
        found[_key(outcome.candidate)] = dict(outcome.prediction) | (
            {"problem": outcome.problem} if outcome.problem else {}
        )
        cache.write(_key(outcome.candidate), found[_key(outcome.candidate)] or {})
    outcomes = []
    for candidate in candidates:
        answer = dict(found[_key(candidate)] or {})
        problem = str(answer.pop("problem", ""))
        outcomes.append(Outcome(candidate, answer, problem=problem))
    return outcomes


def _key(candidate: Candidate) -> tuple[str, ...]:
    return candidate.words


def _show_progress(outcome: Outcome, done: int, total: int) -> None:
    what = outcome.problem or (
        f"{outcome.seconds * 1e3:.1f} ms" if outcome.fits else "does not fit"
    )
    print(
        f"  {done} of {total}: {outcome.candidate}: {what}", file=sys.stderr, flush=True
    )


def _predict_command(options: argparse.Namespace, candidate: Candidate) -> str:
    """To predict this candidate by itself."""
    words = ["torchspmd", "predict", str(options.script), *_command(options), "--"]
    return shlex.join([*words, *candidate.words])


def _command(options: argparse.Namespace) -> list[str]:
    return [
        "--world-size",
        str(options.world_size),
        "--rank",
        str(options.rank),
        "--gpu",
        options.gpu,
        "--network",
        options.network,
        "--gpus-per-node",
        str(options.gpus_per_node),
        *(["--rank-order", options.rank_order] if options.nodes.order else []),
        *(["--module"] if options.module else []),
    ]


def predict_script(
    candidate: Candidate,
    *,
    command: list[str],
    script: Path,
    work: Mapping[tuple[str, ...], float] | None = None,
) -> dict[str, Any]:
    """In a process of its own: ``torchspmd predict`` with a candidate's words.

    Args:
        candidate: Whose words.
        command: Options of ``predict``.
        script: The script.
        work: Items of a step by words; None: model FLOPs count.
    """
    from torchspmd._cli import main

    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prediction.json"
        words = ["predict", str(script), *command, "--brief", "--candidate"]
        words += ["--json", str(path)]
        if best := best_rate():
            bound = work[_key(candidate)] / best if work else best
            words += ["--bound-seconds" if work else "--bound-rate", repr(bound)]
        with contextlib.redirect_stderr(output):
            code = main([*words, "--", *candidate.words])
        if not path.exists():
            return {"problem": _reason(output.getvalue(), code)}
        data = json.loads(path.read_text(encoding="utf-8"))
    return kept(data)


def _reason(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if "Error" in line.split(":")[0] or ": error: " in line  # argparse's
    ]
    reason = (errors or lines or [f"exit code {code}"])[-1]
    return reason.removeprefix("torchspmd predict: ")[:300]


class _Cache:
    """Answers by what they depend on, one file each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = _cache_folder(options)
        self.is_used = not options.no_cache
        self._base = hashlib.sha256("\0".join(_depends_on(options)).encode())

    def _path(self, words: tuple[str, ...]) -> Path:
        key = self._base.copy()
        key.update("\0".join(("", *words)).encode())
        return self.folder / f"{key.hexdigest()[:32]}.json"

    def read(self, words: tuple[str, ...]) -> dict[str, Any] | None:
        path = self._path(words)
        if not self.is_used or not path.exists():
            return None
        try:
            answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # half written: predicted again
        return answer

    def write(self, words: tuple[str, ...], answer: dict[str, Any]) -> None:
        if self.is_used and "problem" not in answer:
            path = self._path(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(answer), encoding="utf-8")


def _depends_on(options: argparse.Namespace) -> Iterator[str]:
    yield from (torchspmd.__version__, torch.__version__, *_command(options))
    yield str(options.nodes)
    yield hardware_text(load_gpu(options.gpu))
    yield hardware_text(load_network(options.network))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        yield os.environ.get(name, "")
    script = options.script.absolute()
    depth = 0
    if options.module:  # of a package, all modules count
        name = str(options.script)
        script = find_module(name) or script
        depth = max(0, name.count(".") - (script.name != "__main__.py"))
    yield str(script)
    for folder in (script.parents[depth], Path(torchspmd.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            yield f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}"
