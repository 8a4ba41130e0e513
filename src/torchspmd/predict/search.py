"""Predict every candidate of a space, each in a process of its own, and rank them."""

import contextlib
import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from typing import Any, TypeAlias

from torchspmd.errors import UsageError
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.hardware import Hardware, load_gpu, load_network
from torchspmd.predict.live import LiveMemory
from torchspmd.predict.memory import count_memory
from torchspmd.predict.prediction import predict_time
from torchspmd.predict.ranking import Outcome, SearchResult, rank
from torchspmd.predict.space import Candidate, Expression, Space, Value
from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World

__all__ = ["run_candidates", "search"]

# What a candidate's process gives back: keys of a prediction file, or a problem.
Answer: TypeAlias = dict[str, Any]
Predict: TypeAlias = Callable[[Candidate], Answer]
Progress: TypeAlias = Callable[[Outcome, int, int], None]
_PRELOAD = ["torch", "torchspmd._cli"]


def search(  # noqa: PLR0913
    build: Callable[..., object],
    space: Mapping[str, Sequence[Value]],
    *,
    gpu: str,
    world_size: int = 1,
    gpus_per_node: int = 8,
    network: str = "ib-ndr400",
    where: Callable[..., bool] | None = None,
    work: Callable[..., float] | None = None,
    jobs: int | None = None,
) -> SearchResult:
    """Rehearse ``build(**values)`` for every combination of values, and rank them.

    Args:
        build: Makes the model and runs two training steps or more, as a script would. A
            function of a module: each candidate runs in a process of its own.
        space: Values by the name of build's argument.
        gpu: By name, or a TOML file.
        world_size: Ranks.
        gpus_per_node: Ranks of a node.
        network: Between nodes, by name or a TOML file.
        where: Which combinations are tried; called with the values.
        work: Items of a step; called with the values. Without it, model FLOPs count.
        jobs: Processes at a time; None: one for each core.

    Raises:
        UsageError: ``build`` cannot be sent to another process, or the space is empty.
    """
    try:
        pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise UsageError(
            f"search(): {build!r} cannot be sent to another process: define it at the top "
            "of a module."
        ) from None
    points = [
        candidate
        for candidate in Space(dict_of_tuples(space), {}, ()).candidates()
        if where is None or where(**candidate.values)
    ]
    if not points:
        raise UsageError("search(): no combination of the space passes where().")
    predict = partial(
        predict_call,
        build=build,
        gpu=load_gpu(gpu),
        network=load_network(network),
        world=World(world_size, 0, gpus_per_node),
    )
    outcomes = list(run_candidates(points, predict, jobs=jobs))
    for each in outcomes:
        values = each.candidate.values
        each.work = float(
            work(**values) if work else each.prediction.get("model_flops") or 0
        )
    return rank(outcomes, "item" if work else "TFLOP")


def dict_of_tuples(
    space: Mapping[str, Sequence[Value]],
) -> dict[str, tuple[Value, ...]]:
    """The same space, that nobody changes."""
    return {name: tuple(values) for name, values in space.items()}


def predict_call(
    candidate: Candidate,
    *,
    build: Callable[..., object],
    gpu: Hardware,
    network: Hardware,
    world: World,
) -> Answer:
    """Rehearse one call in this process, and predict its memory and time."""
    settings = _settings()
    recording = rehearse_call(partial(build, **candidate.values), gpu, world)
    account = count_memory(recording, gpu, settings)
    timed = predict_time(recording, gpu, network)
    return {
        **timed.as_json(timeline=False),
        "fits": account.fits.value,
        "memory": account.as_json(),
        "notes": [*recording.notes, *timed.notes()],
    }


def rehearse_call(call: Callable[[], object], gpu: Hardware, world: World) -> Recording:
    """What a call does as one rank, in this process."""
    recording = Recording(world.size, world.rank, world.gpus_per_node)
    major, _, minor = gpu.compute_capability.partition(".")
    device = Gpu(gpu.title, gpu.nbytes("total"), (int(major or 9), int(minor or 0)))
    memory = LiveMemory(recording, gpu, _settings())
    with rehearsal(recording, world, device, memory):
        call()
    return recording


def _settings() -> AllocatorSettings:
    return AllocatorSettings.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def work_of(
    candidate: Candidate, space: Space, expression: Expression | None, answer: Answer
) -> float:
    """Items of a step by an expression, or model FLOPs."""
    if expression is None:
        return float(answer.get("model_flops") or 0.0)
    return float(expression({**space.fixed, **candidate.values}))


# ----------------------------------------------------------------------------
# Processes


def run_candidates(
    candidates: Sequence[Candidate],
    predict: Predict,
    *,
    jobs: int | None = None,
    progress: Progress = lambda outcome, done, total: None,
) -> Iterator[Outcome]:
    """Predict each in a process of its own, and give the outcomes in the given order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    found: dict[int, Outcome] = {}
    count = min(jobs or os.cpu_count() or 1, max(len(candidates), 1))
    with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1) as pool:
        places: dict[Future[Answer], int] = {
            pool.submit(_quietly, predict, candidate): place
            for place, candidate in enumerate(candidates)
        }
        for future in _completed(places):
            place = places[future]
            outcome = _outcome(candidates[place], future)
            found[place] = outcome
            progress(outcome, len(found), len(candidates))
    yield from (found[place] for place in sorted(found))


def _completed(futures: Iterable[Future[Answer]]) -> Iterator[Future[Answer]]:
    left = set(futures)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        yield from done


def _outcome(candidate: Candidate, future: Future[Answer]) -> Outcome:
    try:
        answer = future.result()
    except Exception as error:
        return Outcome(candidate, problem=f"{type(error).__name__}: {error}")
    return Outcome(
        candidate,
        {key: value for key, value in answer.items() if key != "problem"},
        problem=str(answer.get("problem", "")),
    )


def _quietly(predict: Predict, candidate: Candidate) -> Answer:
    """In a process of its own: what the script prints is only told when it fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            return predict(candidate)
        except BaseException as error:
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0] if text else ''}"
            return {"problem": reason}
