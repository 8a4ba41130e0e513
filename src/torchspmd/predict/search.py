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
from torchspmd.predict.repeated import (
    Repeated,
    how_far_off,
    key,
    of_worst_stage,
    unique,
)
from torchspmd.predict.space import Candidate, Expression, Space, Value
from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.nodes import GPUS_PER_NODE, Nodes, nodes_by_host
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World

__all__ = ["run_candidates", "search"]

# What a candidate's process gives back: keys of a prediction file, or a problem.
Answer: TypeAlias = dict[str, Any]
Predict: TypeAlias = Callable[[Candidate], Answer]
Progress: TypeAlias = Callable[[Outcome, int, int], None]
_PRELOAD = [
    "torch",
    "torchspmd._cli.predict",
    "torchspmd._cli.search",
    "torchspmd.predict.preloaded",
]


def search(  # noqa: PLR0913
    build: Callable[..., object],
    space: Mapping[str, Sequence[Value]],
    *,
    gpu: str,
    world_size: int = 1,
    gpus_per_node: int = GPUS_PER_NODE,
    rank_order: Sequence[str | int] = (),
    network: str = "ib-ndr400",
    where: Callable[..., bool] | None = None,
    work: Callable[..., float] | None = None,
    repeat: str = "",
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
        rank_order: The host of each rank, where they do not fill nodes in their order.
        network: Between nodes, by name or a TOML file.
        where: Which combinations are tried; called with the values.
        work: Items of a step; called with the values. Without it, model FLOPs count.
        repeat: The argument of build that is a number of equal blocks: it is called with
            two and four of them, and the difference is extended; the best candidate is
            also rehearsed whole, and the result has a note of how far that is off.
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
    if repeat and repeat not in space:
        names = ", ".join(space)
        raise UsageError(
            f"search(): repeat={repeat!r} is no argument: there are {names}."
        )
    nodes = Nodes(gpus_per_node)
    if rank_order:
        what = "search(): rank_order"
        nodes = nodes_by_host(rank_order, world_size, gpus_per_node, what)
    spanned = Space(dict_of_tuples(space), {}, ())
    points = [
        candidate
        for candidate in spanned.candidates()
        if where is None or where(**candidate.values)
    ]
    if not points:
        raise UsageError("search(): no combination of the space passes where().")
    predict = partial(
        predict_call,
        build=build,
        gpu=load_gpu(gpu),
        network=load_network(network),
        world=World(world_size, 0, nodes),
    )

    def items(outcome: Outcome) -> float:
        values = outcome.candidate.values
        return float(
            work(**values) if work else outcome.prediction.get("model_flops") or 0
        )

    def run(some: Sequence[Candidate]) -> list[Outcome]:
        return list(run_candidates(some, predict, jobs=jobs, work=items))

    unit = "item" if work else "TFLOP"
    blocks = Repeated(repeat, spanned) if repeat else None
    return explore(points, run, items, unit, blocks)


def explore(
    candidates: Sequence[Candidate],
    run: Callable[[Sequence[Candidate]], Sequence[Outcome]],
    work: Callable[[Outcome], float],
    unit: str,
    repeated: Repeated | None = None,
) -> SearchResult:
    """Predict all candidates and rank them.

    Args:
        candidates: Points of a space.
        run: Predicts some, in the given order.
        work: Of a step of one that was predicted.
        unit: Of the work.
        repeated: Blocks that are rehearsed with few of them; the best candidate is then
            rehearsed whole, and the result says how far that is off. One that does not
            fit then makes room for the next.
    """
    if repeated is None:
        outcomes = list(run(candidates))
    else:
        points = unique([p for each in candidates for p in repeated.rehearsed(each)])
        found = {key(each.candidate): each for each in run(points)}
        outcomes = [repeated.outcome(each, found) for each in candidates]
    for each in outcomes:
        if not each.problem:
            each.prediction = of_worst_stage(each.prediction)
            each.work = work(each)
    result = rank(outcomes, unit)
    notes: list[str] = []
    while repeated is not None and result.best is not None:
        extended = result.best
        (whole,) = run([extended.candidate])
        whole.prediction = of_worst_stage(whole.prediction)
        notes.append(how_far_off(extended, whole))
        if whole.fits or whole.problem:
            break
        outcomes[outcomes.index(extended)] = whole
        result = rank(outcomes, unit)
    result.notes.extend(notes)
    return result


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
    recording = Recording(world.size, world.rank, world.nodes)
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
    return expression.number({**space.fixed, **candidate.values})


# ----------------------------------------------------------------------------
# Processes


def run_candidates(
    candidates: Sequence[Candidate],
    predict: Predict,
    *,
    jobs: int | None = None,
    progress: Progress = lambda outcome, done, total: None,
    work: Callable[[Outcome], float] | None = None,
) -> Iterator[Outcome]:
    """Predict each in a process of its own, and give the outcomes in the given order.

    Args:
        candidates: What is predicted.
        predict: Of one of them.
        jobs: Processes at a time; None: one for each core.
        progress: Is told every outcome.
        work: Of a step; with it, processes know the best rate so far (``best_rate``).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    found: dict[int, Outcome] = {}
    count = min(jobs or os.cpu_count() or 1, max(len(candidates), 1))
    best = context.Value("d", 0.0)
    pool = ProcessPoolExecutor(
        count,
        mp_context=context,
        max_tasks_per_child=1,
        initializer=_know_best,
        initargs=(best,),
    )
    try:
        places: dict[Future[Answer], int] = {
            pool.submit(_quietly, predict, candidate): place
            for place, candidate in enumerate(candidates)
        }
        for future in _completed(places):
            place = places[future]
            outcome = _outcome(candidates[place], future)
            found[place] = outcome
            if work is not None and outcome.fits and outcome.seconds:
                best.value = max(best.value, work(outcome) / outcome.seconds)
            progress(outcome, len(found), len(candidates))
    except BaseException:  # as Ctrl-C: the others are not run, nor waited for
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    yield from (found[place] for place in sorted(found))


_shared: dict[str, Any] = {}  # in a candidate's process: the best rate so far


def _know_best(best: Any) -> None:
    _shared["best"] = best


def best_rate() -> float:
    """In a candidate's process: work a second of the best that fits; 0: none so far."""
    return float(_shared["best"].value) if _shared else 0.0


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
    with (
        _silent_descriptors(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            return predict(candidate)
        except BaseException as error:
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0] if text else ''}"
            return {"problem": reason}


@contextlib.contextmanager
def _silent_descriptors() -> Iterator[None]:
    """Loggers that were made before, and C++, write to the descriptors themselves."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)
