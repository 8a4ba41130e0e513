"""``torchspmd predict``: rehearse a script of any size, and say whether it fits."""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

from torchspmd._cli.other_ranks import OtherRanks
from torchspmd._cli.output import say_written, status_line, wrap, write_file
from torchspmd._cli.script import EndOfWindow, StepWindow, run_script
from torchspmd._cli.words import typed_command
from torchspmd.comm import format_count
from torchspmd.comm.storage import ledger_to_dict
from torchspmd.errors import UsageError
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.bounds import Bounds
from torchspmd.predict.clock import LiveClock
from torchspmd.predict.curve_json import curve_json
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.live import LiveMemory
from torchspmd.predict.memory import Fits, MemoryAccount, count_memory
from torchspmd.predict.prediction import TimePrediction, predict_time
from torchspmd.predict.rehearsed import rehearsed_gpu
from torchspmd.predict.stages import StagesDifferError
from torchspmd.predict.structure import ledger_json, mesh_json, modules_json
from torchspmd.predict.suggestions import Suggestion, suggest
from torchspmd.predict.text import describe_memory, size_text
from torchspmd.predict.time_suggestions import Gain, suggest_faster
from torchspmd.predict.time_text import describe_time
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World
from torchspmd.report import write_page, write_perfetto
from torchspmd.trace import CommDebugMode

_NOTHING = (
    "the script put no tensor on the GPU, so there is nothing to predict. Does it call its "
    'training, with model and data on "cuda"? What a script for CPUs sends, torchspmd '
    "trace shows."
)


def run(options: argparse.Namespace) -> int:
    """Rehearse the script and report; 1 when it does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        return _predict(options, OtherRanks(options, folder))


def _predict(options: argparse.Namespace, others: OtherRanks) -> int:
    gpu, network = options.hardware
    settings = _settings()
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
        line=line,
        rehearsed=recording,
    )
    device = rehearsed_gpu(gpu, network, world)
    memory = LiveMemory(recording, gpu, settings)
    stage = rehearsal(recording, world, device, memory, others)
    bounds = Bounds(gpu, settings, options.bound_rate, options.bound_seconds)
    is_candidate = bool(bounds.flops_rate or bounds.seconds) and not others.is_asked
    slower: list[str] = []  # one entry, where it need not go on

    def after_first_step() -> None:
        why = bounds.why_slower(recording)
        if why or bounds.is_too_large(recording):
            slower.append(why)
            raise EndOfWindow

    if is_candidate:
        window.after_first_step = after_first_step
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
    if any(slower):
        print(f"torchspmd predict: {slower[0]}", file=sys.stderr)
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
    account = count_memory(recording, gpu, settings)
    timed, met = (
        (predict_time(recording, gpu, network), [])
        if slower
        else _time(recording, others, gpu, network)
    )
    accounts = {each.rank: count_memory(each, gpu, settings) for each in met}
    worst = min((account, *accounts.values()), key=lambda each: each.margin)
    if not options.network and timed.crosses_nodes:
        recording.notes.append(
            f"No --network was given: {network.title} is taken to be between the nodes."
        )
    faster = [] if options.brief else suggest_faster(timed, room=account.margin)
    smaller = [] if options.brief else suggest(account)
    _report(account, worst, timed, smaller, faster)
    if options.json or options.html or options.perfetto:
        data = _as_json(options, account, timed, smaller, faster)
        data["ledger"] = ledger_to_dict(mode.ledger)
        data["fits"] = worst.fits.value
        if worst is not account:
            data["notes"].insert(0, _of_another(worst))
        data["stages"] = _stages(timed, {recording.rank: account, **accounts})
        _write(options, data)
    return 1 if worst.fits is Fits.NO else 0


def _stages(
    timed: TimePrediction, accounts: dict[int, MemoryAccount]
) -> dict[str, Any]:
    """Of a pipeline, what tells its stages apart; memory of those that were rehearsed."""
    told: dict[str, Any] = {}
    for stage in timed.stages:
        account = accounts.get(stage.rank)
        told[str(stage.rank)] = {
            "compute_seconds": stage.compute_seconds,
            "model_flops": stage.flops,
            "fits": account and account.fits.value,
            "memory": account and {**account.as_json(), "holders": []},
        }
    return told


def _time(
    recording: Recording, others: OtherRanks, gpu: Hardware, network: Hardware
) -> tuple[TimePrediction, list[Recording]]:
    """With the ranks that it waits for; and those: few of a long pipeline, if it can be."""
    some, ranks = others.few_stages(recording)
    if ranks:
        with contextlib.suppress(StagesDifferError):
            return predict_time(some, gpu, network, ranks=ranks), some[1:]
    every = others.stages(recording)
    return predict_time(every, gpu, network), every[1:]


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


def _settings() -> AllocatorSettings:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if text := os.environ.get(name):
            return AllocatorSettings.parse(text)
    return AllocatorSettings()


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


def _report(
    account: MemoryAccount,
    worst: MemoryAccount,
    timed: TimePrediction,
    smaller: list[Suggestion],
    faster: list[Gain],
) -> None:
    recording = account.recording
    parts = [describe_memory(account, smaller), describe_time(timed, faster)]
    if worst is not account:
        what = f"What follows is of rank {recording.rank}."
        parts[0] = f"{_of_another(worst)} {what}\n{parts[0]}"
    if not recording.steps:
        parts.insert(0, "The script made no optimizer step: no training is counted.")
    print("", *map(wrap, parts), sep="\n\n")
    notes = [*recording.notes, *timed.notes()]
    for title, texts in (("Notes", notes), ("Skipped", recording.skipped)):
        if texts:
            print(f"{title}:", *(wrap(f"  {text}") for text in texts), sep="\n")


def _of_another(worst: MemoryAccount) -> str:
    """Which stage of the pipeline needs more than the one that is told of."""
    rank = worst.recording.rank
    words = {Fits.NO: "DOES NOT FIT", Fits.AT_RISK: "is AT RISK", Fits.YES: "fits"}
    return (
        f"Rank {rank}, another stage of the pipeline, needs the most memory: "
        f"{size_text(worst.device_peak)} of {size_text(worst.gpu.nbytes('total'))}, and "
        f"{words[worst.fits]}. --rank {rank} tells what holds it."
    )


def _as_json(
    options: argparse.Namespace,
    account: MemoryAccount,
    timed: TimePrediction,
    smaller: list[Suggestion],
    faster: list[Gain],
) -> dict[str, Any]:
    recording = account.recording
    seconds = timed.as_json(timeline=not (options.no_timeline or options.brief))
    figures = seconds.pop("assumptions")
    return {
        "format": "torchspmd/prediction",
        "version": 1,
        "command": typed_command(options),
        "script": str(options.script),
        "world_size": recording.world_size,
        "rank": recording.rank,
        "gpus_per_node": recording.nodes.gpus_per_node,
        "nodes": list(recording.nodes.order),
        "gpu": account.gpu.name,
        "network": timed.figures.network and timed.figures.network.name,
        "steps": recording.steps,
        "fits": account.fits.value,
        "memory": {
            **account.as_json(),
            "curve": None if options.brief else curve_json(account),
        },
        **seconds,
        "suggestions": [
            *(
                {"what": g.text, "gain_seconds": g.seconds, "how": g.how}
                for g in faster
            ),
            *(
                {"what": each.text, "gain_bytes": each.saved_bytes, "of": each.of}
                for each in smaller
            ),
        ],
        "modules": modules_json(account, timed),
        "mesh": mesh_json(recording),
        "ledger": ledger_json(recording),
        "assumptions": [
            {"what": part.name, "value": size_text(part.nbytes), "source": part.source}
            for part in account.fixed
        ]
        + figures,
        "notes": [*recording.notes, *timed.notes()],
        "skipped": recording.skipped,
    }
