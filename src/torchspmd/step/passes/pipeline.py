"""Which passes run on a captured graph: the default ones in their order, or a list."""

import difflib
import functools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, final

import torch.distributed as dist
from torch import fx

from torchspmd.comm import CommEvent, Kind
from torchspmd.errors import PassWarning, UsageError
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.argument_checks import (
    check_bucket_size,
    check_flags,
    check_overlap,
)
from torchspmd.step.graph.collectives import events_of, get_all_comm_blocks
from torchspmd.step.graph.cost import CostModel, check_cost, device_of
from torchspmd.step.graph.memory import LiveBytes
from torchspmd.step.graph.reports import PassReport
from torchspmd.step.passes.bucket import comm_fusion_with_concat
from torchspmd.step.passes.dedupe import dedupe_collectives
from torchspmd.step.passes.defer import defer_updates
from torchspmd.step.passes.embedding_rows import gather_embedding_gradients
from torchspmd.step.passes.optimizer import remove_copy_from_optimizer
from torchspmd.step.passes.overlap import prefetch_gathers, schedule_comm_wait
from torchspmd.step.passes.runner import observing_passes, pass_reports, run_any

Pass = Callable[[IterGraphModule], Any]
Overlap = bool | Literal["auto"]

_SMALLEST_MB, _LARGEST_MB, _MORE = 1.0, 64.0, 2.0
_FIRST_MB = 1.0  # that close the first bucket
# Larger buckets that are tried, and what a step must come down to for one of them.
_FACTORS, _GAIN = (1.5, 2.0, 3.0, 4.0), 0.99
_IN_FLIGHT = 2  # buckets that are gathered where memory is at its peak
_KEPT = 0.01  # of what forward and backward make at most


def default_passes(
    *,
    bucket_size_mb: float | None = None,
    overlap_iterations: Overlap = False,
    gather_embeddings: bool = False,
    cost: CostModel | None = None,
) -> tuple[Pass, ...]:
    """The passes of ``GraphModuleTransformation(enable_graph_optimization=True)``.

    Args:
        bucket_size_mb: How much one fused collective carries at most; by default a part
            of all gradients, so that there is something to overlap with.
        overlap_iterations: Also leave updates for the next step (``defer_updates``);
            ``"auto"`` does so only where that is simulated to be faster.
        gather_embeddings: Also send embeddings' gradients as the rows that were looked
            up, where that is less (``gather_embedding_gradients``).
        cost: What the size of buckets and the order of deferred reductions are chosen by.

    >>> passes = default_passes()
    >>> len(default_passes(overlap_iterations=True)) > len(passes)
    True
    """
    check_bucket_size(bucket_size_mb, "default_passes")
    check_flags("default_passes", gather_embeddings=gather_embeddings)
    check_overlap("default_passes", overlap_iterations)
    check_cost(cost, "default_passes")
    passes: tuple[Pass, ...] = (
        _dedupe,  # the same bytes are not sent twice
        functools.partial(_fuse, bucket_size_mb=bucket_size_mb, cost=cost),
        # fully sharded parameters, before the layers that need them
        functools.partial(_prefetch, bucket_size_mb=bucket_size_mb, cost=cost),
        schedule_comm_wait,  # starts early, waits late
        remove_copy_from_optimizer,
    )
    if gather_embeddings:  # before any of them is in a bucket
        passes = (functools.partial(gather_embedding_gradients, cost=cost), *passes)
    if overlap_iterations:
        is_auto = overlap_iterations == "auto"
        passes += (functools.partial(defer_updates, cost=cost, only_if_faster=is_auto),)
    return passes


def _dedupe(gm: Any) -> PassReport:
    """Whole parameters that cost next to no memory are kept from forward to backward."""
    phases = {event.phase for _, event in events_of(gm.graph)}
    peak = 0.0
    if len(phases) > 1:  # else nothing would be kept from one to another
        live = LiveBytes(gm.graph, with_updates=False).now()
        peak = max(live.values(), default=0) / 2**20
    return dedupe_collectives(gm, keep_mb=_KEPT * peak)


def _or_guess(gm: Any, cost: CostModel | None) -> CostModel:
    return cost or CostModel.for_device(device_of(gm.graph))


def _prefetch(
    gm: Any, bucket_size_mb: float | None, cost: CostModel | None
) -> PassReport:
    """Two buckets may be on their way when memory is at its peak, as FSDP2 has them."""
    sizes = [
        block.event.payload_bytes / 2**20
        for block in get_all_comm_blocks(gm, (Kind.ALL_GATHER,))
        if block.gathers_inputs()
    ]
    size = bucket_size_mb or 0.0
    if sizes and bucket_size_mb is None:
        size = choose_bucket_size(gm, cost)
    size = max([size, *(each for each in sizes if each <= _LARGEST_MB)])
    return prefetch_gathers(
        gm, cost=_or_guess(gm, cost), memory_budget_mb=_IN_FLIGHT * size
    )


def _fuse(gm: Any, bucket_size_mb: float | None, cost: CostModel | None) -> PassReport:
    is_chosen = bucket_size_mb is None  # a size that was asked for is a limit
    size = choose_bucket_size(gm, cost) if bucket_size_mb is None else bucket_size_mb
    return comm_fusion_with_concat(
        gm, size, first_bucket_mb=_FIRST_MB, by_block=is_chosen
    )


def choose_bucket_size(gm: Any, cost: CostModel | None = None) -> float:
    """Megabytes for a bucket, between 1 and 64.

    What the next forward needs first is ready last: the smaller its bucket, the less of it
    is exposed. But each bucket costs the latency of a collective. With n buckets that take
    w seconds on the network and l seconds each to begin, w / n + n * l is least where n is
    the root of w / l; where computing takes longer, most of n * l is hidden, so there are
    twice as many. Where the network is the limit it is idle until the first bucket is
    computed: there computing counts instead of w. If gradients become ready faster than
    the network sends them, larger buckets may save latencies; they are simulated.
    """
    check_cost(cost, "choose_bucket_size")
    cost = _or_guess(gm, cost)
    events = [
        event
        for _, event in events_of(gm.graph)
        if event.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    ]
    links = list(map(cost.link_of, events))
    wire = sum(
        event.wire_bytes / link.network_bytes
        for event, link in zip(events, links, strict=True)
    )
    latency = max((link.latency_seconds for link in links), default=0.0)
    computing = sum(map(cost.compute_seconds, gm.graph.nodes))
    more = min(_MORE, max(1.0, _MORE * computing / max(wire, 1e-9)))
    shorter = min(wire, computing) / max(latency, 1e-9)
    count = max(1.0, more * math.sqrt(shorter))
    megabytes = sum(event.payload_bytes for event in events) / 2**20
    size = min(_LARGEST_MB, max(_SMALLEST_MB, megabytes / count))
    return _enlarged(size, _when_sent(gm.graph, cost), computing, cost)


def _when_sent(graph: fx.Graph, cost: CostModel) -> list[tuple[float, CommEvent]]:
    """Each all-reduce, and the seconds of computing in front of it.

    Nothing where more is sent: scatters share the network with gathers.
    """
    events = dict(events_of(graph))
    if any(event.kind is not Kind.ALL_REDUCE for event in events.values()):
        return []
    clock, found = 0.0, []
    for node in graph.nodes:
        if node in events:
            found.append((clock, events[node]))
        clock += cost.compute_seconds(node)
    return found


def _enlarged(
    megabytes: float,
    sent: Sequence[tuple[float, CommEvent]],
    computing: float,
    cost: CostModel,
) -> float:
    """The size, or a multiple of it with which a step is simulated to be faster."""

    def simulate(size: float) -> float:
        """Until the last bucket has come; each starts when all of it is computed."""
        free = ready = wire = held = latency = 0.0
        is_first = True  # that bucket is closed early, as in `comm_fusion_with_concat`
        for when, event in sent:
            if held and held + event.payload_bytes > size * 2**20:
                free = max(free, ready) + latency + wire
                wire = held = 0.0
            network_bytes, latency = cost.link_of(event)
            ready, held = when, held + event.payload_bytes
            wire += event.wire_bytes / network_bytes
            if is_first and held >= _FIRST_MB * 2**20:
                free, is_first = ready + latency + wire, False
                wire = held = 0.0
        rest = latency + wire if held else 0.0
        return max(computing, max(free, ready) + rest)

    best, seconds = megabytes, simulate(megabytes)
    for factor in _FACTORS:
        size = megabytes * factor
        if size <= _LARGEST_MB and (found := simulate(size)) < _GAIN * seconds:
            best, seconds = size, found
    return best


# ----------------------------------------------------------------------------
# Graphs on disk: numbered files with the rank in their names, and a manifest.


class Dumps:
    """Writes graphs into one folder, each with its difference to the one before."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="torchspmd-graphs-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._rows: list[dict[str, Any]] = []
        self._last: list[str] = []

    def write(self, name: str, gm: fx.GraphModule) -> None:
        """Write one graph; the first of a program has no difference."""
        if name == "captured":
            self._last = []
        sequence = len(self._rows)
        stem = f"{sequence:03d}_{name}_rank{self._rank}"
        lines = gm.print_readable(print_output=False).splitlines()
        (self.folder / f"{stem}.py.txt").write_text("\n".join(lines) + "\n")
        row = {"sequence": sequence, "name": name, "graph": f"{stem}.py.txt"}
        if self._last:
            change = difflib.unified_diff(
                self._last, lines, "before", "after", lineterm=""
            )
            (self.folder / f"{stem}.diff").write_text("\n".join(change) + "\n")
            row["difference"] = f"{stem}.diff"
        self._last = lines
        self._rows.append({**row, "nodes": len(gm.graph.nodes)})
        manifest = self.folder / f"manifest_rank{self._rank}.json"
        manifest.write_text(json.dumps(self._rows, indent=1) + "\n")


# ----------------------------------------------------------------------------
# What compile does to each captured graph.

_WHAT = "GraphModuleTransformation"


@final
class GraphModuleTransformation:
    """Turns a captured graph into the object that a program runs.

    Args:
        enable_graph_optimization: Run the passes of ``passes.default_passes``.
        enable_inductor: Compile the graph with Inductor.
        dump_graphs: Write the graphs to files: True for a folder of its own, printed in
            ``folder``, or the folder to write to.
        bucket_size_mb: How much one fused collective carries at most; chosen by the size
            of the gradients by default.
        overlap_iterations: Also leave updates for the next step, where they overlap with
            its forward; ``"auto"`` does so only where the simulation says that the step
            is faster by 5 %. End a run with ``last_train_step=True``, ``flush()``, or use
            the compiled step as a context manager.
        gather_embeddings: Also send embeddings' gradients as the rows that were looked
            up, where that is less. Sums are made in another order, and every rank must
            have a batch of the same shape.
        cost: What the size of buckets and the order of deferred reductions are chosen by;
            the same on all ranks. ``"measure"`` measures the network and the operators of
            the captured step on the ranks that compile it, which takes some seconds.
        passes: Passes to run instead of the default ones, each called with the
            ``IterGraphModule``. What a plain function edits is checked and reported too.

    Attributes:
        folder: Where the dumps are; None before the first.
        reports: What each pass did to the latest graph.
        notes: What else there is to say about it, a line each.
        cost: What was given or measured; None for a guess.
        measures_cost: Whether ``compile`` measures it.

    Example:
        >>> transformation = GraphModuleTransformation(dump_graphs=False)
        >>> transformation.enable_inductor
        False
    """

    def __init__(  # noqa: PLR0913 - one for each choice
        self,
        *,
        enable_graph_optimization: bool = False,
        enable_inductor: bool = False,
        dump_graphs: bool | str | os.PathLike[str] = False,
        bucket_size_mb: float | None = None,
        overlap_iterations: Overlap = False,
        gather_embeddings: bool = False,
        cost: CostModel | Literal["measure"] | None = None,
        passes: Sequence[Pass] | None = None,
    ) -> None:
        check_flags(
            _WHAT,
            enable_graph_optimization=enable_graph_optimization,
            enable_inductor=enable_inductor,
            gather_embeddings=gather_embeddings,
        )
        check_overlap(_WHAT, overlap_iterations)
        self._options: dict[str, Any] = {
            "bucket_size_mb": bucket_size_mb,
            "overlap_iterations": overlap_iterations,
            "gather_embeddings": gather_embeddings,
        }
        given = {**self._options, "cost": cost}
        unused = [name for name, value in given.items() if value not in (None, False)]
        if unused and (not enable_graph_optimization or passes is not None):
            raise UsageError(
                f"GraphModuleTransformation: {', '.join(unused)} would have no effect: for "
                "the default passes alone. Set enable_graph_optimization=True and leave "
                "out passes."
            )
        if cost != "measure":
            check_cost(cost, _WHAT, "'measure', or None for a guess")
        check_bucket_size(bucket_size_mb, _WHAT)
        if not isinstance(dump_graphs, (bool, str, os.PathLike)):
            raise UsageError(
                f"{_WHAT}(dump_graphs={dump_graphs!r}): pass True, False or a folder."
            )
        if passes is not None and not is_list_of_passes(passes):
            raise UsageError(
                f"{_WHAT}(passes={passes!r}): pass a list of functions, each called with "
                "the IterGraphModule."
            )
        self.enable_graph_optimization = enable_graph_optimization
        self.enable_inductor = enable_inductor
        self.dump_graphs = dump_graphs
        self.reports: tuple[PassReport, ...] = ()
        self.cost = None if isinstance(cost, str) else cost
        self.measures_cost = isinstance(cost, str)
        self._overlap = overlap_iterations
        self._passes = None if passes is None else tuple(passes)
        self._is_default = self._has_warned = False
        self.notes: tuple[str, ...] = ()
        self._dumps: Dumps | None = None

    @classmethod
    def by_default(
        cls, overlap: Overlap, cost: CostModel | Literal["measure"] | None
    ) -> Self:
        """What ``compile(passes=True)`` runs; does not warn where nothing can be done."""
        made = cls(
            enable_graph_optimization=True, overlap_iterations=overlap, cost=cost
        )
        made._is_default = True
        return made

    @property
    def folder(self) -> Path | None:
        """Where the dumps are; None before the first."""
        return None if self._dumps is None else self._dumps.folder

    def __call__(
        self, gm: fx.GraphModule, cost: CostModel | None = None
    ) -> IterGraphModule:
        """Transform one graph; ``compile`` hands in the cost that it measured for it."""
        if self.measures_cost and cost is None:
            raise UsageError(
                f"{_WHAT}(cost='measure'): compile measures the step that it captures, and "
                "does so for gm_transformation itself, not for one that another function "
                "calls. Pass it as gm_transformation=, or give the cost that "
                "measure_cost() found."
            )
        self.cost, self.notes = cost or self.cost, ()
        if self.dump_graphs is not False and self._dumps is None:
            asked = None if self.dump_graphs is True else Path(self.dump_graphs)
            self._dumps = Dumps(asked)
        self._dump("captured", gm)
        module = IterGraphModule(gm, enable_inductor=self.enable_inductor)
        if passes := self._choose_passes():
            self._run_passes(module, passes)
        return module

    def _choose_passes(self) -> Sequence[Pass]:
        if self._passes is not None:
            return self._passes
        if not self.enable_graph_optimization:
            return ()
        return default_passes(**self._options, cost=self.cost)

    def _run_passes(self, module: IterGraphModule, passes: Sequence[Pass]) -> None:
        def note(report: PassReport, before: fx.Graph, after: fx.Graph) -> None:
            self._dump(report.name, module.main_gm)

        with observing_passes(note):
            for each in passes:
                if self._passes is None:
                    each(module)
                else:
                    run_any(module, each)
        self.reports = reports = pass_reports(module)  # without what was undone
        if not any(report.outcome.changed for report in reports):
            names = ", ".join(report.name for report in reports)
            self._tell(
                f"GraphModuleTransformation: none of its passes changed anything ({names})"
                ". Is there communication in this step?",
                is_warning=not self._is_default or self._overlap is True,
            )
        elif self._overlap:
            self._tell_what_overlaps(reports[-1])

    def _tell_what_overlaps(self, report: PassReport) -> None:
        outcome = report.outcome
        if outcome.changed and outcome.gain is not None:
            told = (
                f"simulated to be {outcome.gain:.2f} times as fast as without overlap"
            )
            self._tell(f"updates wait for the next step: {told}", is_warning=False)
        if outcome.changed or not outcome.refused or self._has_warned:
            return
        is_warning = self._has_warned = self._overlap is True
        self._tell(
            "GraphModuleTransformation(overlap_iterations=True): no update can wait for "
            f"the next step, so nothing overlaps with it. {outcome.refused[0]}"
            if is_warning
            else f"overlap='auto': nothing is deferred: {outcome.refused[-1]}",
            is_warning=is_warning,
        )

    def _tell(self, text: str, *, is_warning: bool) -> None:
        if is_warning:
            warnings.warn(text, PassWarning, stacklevel=4)
        else:
            self.notes += (text,)

    def _dump(self, name: str, gm: fx.GraphModule) -> None:
        if self._dumps is not None:
            self._dumps.write(name, gm)


def is_list_of_passes(value: object) -> bool:
    """Whether a value is a list of functions."""
    return isinstance(value, Sequence) and all(map(callable, value))
