"""Predict every candidate of a space, each in a process of its own, and rank them."""

import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torchspmd.comm.storage import ledger_to_dict
from torchspmd.errors import UsageError
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.answer import answer
from torchspmd.predict.bounds import Bounds
from torchspmd.predict.clock import LiveClock
from torchspmd.predict.forks import Forks, quiet, short
from torchspmd.predict.hardware import (
    DEFAULT_NETWORK,
    Hardware,
    load_gpu,
    load_network,
)
from torchspmd.predict.live import LiveMemory
from torchspmd.predict.other_ranks import OtherRanks, Question
from torchspmd.predict.ranking import Asked, Outcome, SearchResult, rank
from torchspmd.predict.rehearsed import rehearsed_gpu
from torchspmd.predict.repeated import (
    Repeated,
    how_far_off,
    key,
    of_worst_stage,
    unique,
)
from torchspmd.predict.space import Candidate, Expression, Space, Value
from torchspmd.rehearse.nodes import GPUS_PER_NODE, Nodes, nodes_by_host
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.window import StepWindow, is_after_window
from torchspmd.rehearse.world import EndOfWindow, World
from torchspmd.trace import CommDebugMode

__all__ = ["kept", "run_candidates", "search"]

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


# What is kept of a prediction.
_KEYS = (
    "fits",
    "step_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_seconds",
    "host_seconds",
    "host_issue_seconds",
    "bubble_seconds",
    "optimizer_seconds",
    "step_error",
    "power",
    "stages",
    "model_flops",
    "mfu",
    "notes",
    "skipped",
    "exposed",
    "assumptions",
    "modules",
    "mesh",
    "ledger",
)
_MEMORY_KEYS = (
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "device_peak_bytes",
    "margin_bytes",
    "first_failure",
    "device_bytes",
    "by_category",
    "periods",
    "fixed",
)


def kept(prediction: Mapping[str, Any]) -> Answer:
    """What a search keeps of a prediction: without timeline and curve."""
    found = {key: prediction.get(key) for key in _KEYS}
    memory = prediction.get("memory") or {}
    found["memory"] = {key: memory.get(key) for key in _MEMORY_KEYS}
    if found["fits"] != "no" and not found["step_seconds"]:
        found["problem"] = "the script made no optimizer step"
    return found


# ----------------------------------------------------------------------------
# Over calls of a function


class Job(NamedTuple):
    """What candidates have in common.

    Attributes:
        build: Is called with the values of each.
        named: Objects among the values, by their names.
        gpu: The device.
        network: Between nodes.
        world: The ranks, and the one that is told of.
        work: Items of a step, by candidate; None: model FLOPs count.
    """

    build: Callable[..., object]
    named: Mapping[str, Mapping[str, object]]
    gpu: Hardware
    network: Hardware
    world: World
    work: Mapping[tuple[object, ...], float] | None

    def values(self, candidate: Candidate) -> dict[str, Any]:
        """What ``build`` is called with."""
        return {
            name: self.named[name][str(value)] if name in self.named else value
            for name, value in candidate.values.items()
        }


def search(  # noqa: PLR0913
    build: Callable[..., object],
    space: Mapping[str, Sequence[Value] | Mapping[str, object]],
    *,
    gpu: str,
    world_size: int = 1,
    rank: int = 0,
    gpus_per_node: int = GPUS_PER_NODE,
    rank_order: Sequence[str | int] = (),
    network: str = "ib-ndr400",
    where: Callable[..., bool] | None = None,
    work: Callable[..., float] | None = None,
    repeat: str = "",
    jobs: int | None = None,
    progress: Progress = lambda outcome, done, total: None,
) -> SearchResult:
    """Rehearse ``build(**values)`` for every combination of values, and rank them.

    Args:
        build: Trains, as a script would: makes process groups and the model, and runs two
            steps or more, of which those after the second are not made. A function of a
            module: each candidate runs in a process of its own.
        space: Values by the name of build's argument: numbers, texts, truth values and
            None as a list; other objects, such as plans, with a name each, as a dict.
        gpu: By name, or a TOML file.
        world_size: Ranks. Of a pipeline, those that ``rank`` waits for are rehearsed too.
        rank: The one that is told of.
        gpus_per_node: Ranks of a node.
        rank_order: The host of each rank, where they do not fill nodes in their order.
        network: Between nodes, by name or a TOML file.
        where: Which combinations are tried; called with the values.
        work: Items of a step; called with the values. Without it, model FLOPs count.
        repeat: The argument of build that is a number of equal blocks: it is called with
            two and four of them, and the difference is extended; the best candidate is
            also rehearsed whole, and the result has a note of how far that is off.
        jobs: Processes at a time; None: one for each core.
        progress: Is told every outcome, how many there are by then, and of how many.

    Raises:
        UsageError: Build or values cannot be sent to another process, a value needs a
            name, there is no such argument or rank, or the space is empty.
    """
    labels, named = _labels(space)
    for what, sent in (
        ("build", build),
        *((f"space[{n!r}]", o) for n, o in named.items()),
    ):
        _check_sent(what, sent)
    _check_arguments(build, labels, repeat)
    if not 0 <= rank < world_size:
        raise UsageError(f"search(): rank={rank}: it must be 0 to {world_size - 1}.")
    nodes = Nodes(gpus_per_node)
    if rank_order:
        what = "search(): rank_order"
        nodes = nodes_by_host(rank_order, world_size, gpus_per_node, what)
    spanned = Space(labels, {}, ())
    device, between = load_gpu(gpu), load_network(network)
    job = Job(build, named, device, between, World(world_size, rank, nodes), None)
    points = [
        candidate
        for candidate in spanned.candidates()
        if where is None or where(**job.values(candidate))
    ]
    if not points:
        raise UsageError("search(): no combination of the space passes where().")

    def items(outcome: Outcome) -> float:
        if work is None:
            return float(outcome.prediction.get("model_flops") or 0)
        return float(work(**job.values(outcome.candidate)))

    def run(some: Sequence[Candidate]) -> list[Outcome]:
        known = None if work is None else {key(c): items(Outcome(c)) for c in some}
        predict = partial(predict_call, job=job._replace(work=known))
        bounded = None if repeat else items
        return list(
            run_candidates(some, predict, jobs=jobs, progress=progress, work=bounded)
        )

    unit = "item" if work else "TFLOP"
    blocks = Repeated(repeat, spanned) if repeat else None
    result = explore(points, run, items, unit, blocks)
    name = getattr(build, "__qualname__", repr(build))
    result.asked = Asked(
        command=f"search({name}, ...)",
        script=f"{getattr(build, '__module__', '')}.{name}",
        world_size=world_size,
        gpu=gpu,
        rank=rank,
        gpus_per_node=gpus_per_node,
        nodes=nodes.order,
        network=network,
        device_bytes=device.nbytes("total"),
        of=partial(_call_text, name),
    )
    return result


def _labels(
    space: Mapping[str, Sequence[Value] | Mapping[str, object]],
) -> tuple[dict[str, tuple[Value, ...]], dict[str, dict[str, object]]]:
    """Values as they are told, and the objects among them by their names."""
    labels: dict[str, tuple[Value, ...]] = {}
    named: dict[str, dict[str, object]] = {}
    for argument, values in space.items():
        labels[argument] = tuple(values)
        if isinstance(values, Mapping):
            named[argument] = dict(values)
        for value in labels[argument]:
            if not isinstance(value, int | float | str | None):
                raise UsageError(
                    f"search(): space[{argument!r}] has a {type(value).__name__}: give "
                    f"such values names, as in {{{argument!r}: {{'name': value, ...}}}}."
                )
    return labels, named


def _check_sent(what: str, sent: object) -> None:
    try:
        pickle.dumps(sent)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"search(): {what} cannot be sent to another process: {error}. Define "
            "functions and classes at the top of a module, or let build make the object."
        ) from None


def _check_arguments(
    build: Callable[..., object], labels: Mapping[str, object], repeat: str
) -> None:
    """Refuse what no call would take, before any process is started."""
    main = getattr(sys.modules["__main__"], "__file__", "")
    if (
        getattr(build, "__module__", "") == "__main__"
        and not Path(main or "").is_file()
    ):
        raise UsageError(
            "search(): build is defined in a session that no other process can import: "
            "write it into a file, and import it from there."
        )
    if repeat and repeat not in labels:
        names = ", ".join(labels)
        raise UsageError(
            f"search(): repeat={repeat!r} is no argument: there are {names}."
        )
    try:
        inspect.signature(build).bind(**labels)
    except TypeError as error:
        raise UsageError(
            f"search(): build cannot be called with {', '.join(labels)}: {error}."
        ) from None


def _call_text(name: str, candidate: Candidate) -> str:
    told = ", ".join(f"{name}={value!r}" for name, value in candidate.values.items())
    return f"{name}({told})"


def predict_call(candidate: Candidate, *, job: Job) -> Answer:
    """In a process of its own: rehearse one call, and predict it."""
    settings = AllocatorSettings.of_environment()
    bounds = Bounds(job.gpu, settings)
    if best := best_rate():
        if job.work is None:
            bounds.flops_rate = best
        else:
            bounds.seconds = job.work[key(candidate)] / best
    call = partial(job.build, **job.values(candidate))
    world = job.world
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = partial(_as_another, call, job, folder)
        several = world.size > 1
        with Forks.of_this_process(folder, work) if several else Forks(folder) as forks:
            others = OtherRanks(world.rank, forks, at_once=1)
            mode = CommDebugMode()
            recording = rehearse_call(
                call,
                job.gpu,
                world,
                network=job.network,
                others=others,
                bounds=bounds,
                mode=mode,
            )
            if bounds.slower:
                return {"problem": bounds.slower}
            met = None if bounds.is_reached else others
            told = answer(recording, met, job.gpu, job.network, settings)
            return kept(told.as_json(ledger_to_dict(mode.ledger), brief=True))


def _as_another(
    call: Callable[[], object], job: Job, folder: Path, question: Question
) -> str:
    """In a fork: rehearse a rank that another one waits for."""
    world = replace(job.world, rank=question.rank)
    others = OtherRanks(question.rank, Forks(folder), question)
    others.answer(
        rehearse_call(call, job.gpu, world, network=job.network, others=others)
    )
    return ""


def rehearse_call(
    call: Callable[[], object],
    gpu: Hardware,
    world: World,
    *,
    network: Hardware | None = None,
    others: OtherRanks | None = None,
    bounds: Bounds | None = None,
    mode: CommDebugMode | None = None,
) -> Recording:
    """What a call does as one rank, in this process, until two steps are recorded.

    Args:
        call: Trains.
        gpu: The device.
        world: The ranks, and the one that is played.
        network: Between nodes; None: the one that is taken where nobody names one.
        others: Rehearse the ranks that it waits for; None: asking for one is refused.
        bounds: Behind which it need not go on.
        mode: Takes what it sends.
    """
    network = network or load_network(DEFAULT_NETWORK)
    mode = mode or CommDebugMode()
    recording = Recording(world.size, world.rank, world.nodes)
    device = rehearsed_gpu(gpu, network, world)
    memory = LiveMemory(recording, gpu, AllocatorSettings.of_environment())
    window = StepWindow(mode, skip=1, steps=1, rehearsed=recording)
    if bounds is not None:
        window.after_first_step = partial(bounds.look, recording)
    stage = rehearsal(recording, world, device, memory, others)
    try:
        with mode, window, stage as recorder:
            recorder.elapsed = LiveClock(recording, gpu, network).elapsed
            call()
    except EndOfWindow:
        pass
    except Exception as error:
        if not is_after_window(error):
            raise
    return recording


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
    """In a process of its own: what the script prints is not told."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with quiet():
        try:
            return predict(candidate)
        except BaseException as error:
            return {"problem": short(error)}
