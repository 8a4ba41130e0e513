"""What a rank holds over time, by category, module and line; and whether it fits.

The recording's allocations go through the simulated allocator, together with what
libraries take. The rest is arithmetic on the curve that comes out: the peaks of
initialisation, first step and steady steps, and what was held there.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.curve import Curve, Failure, Run
from torchspmd.predict.fixed import FixedPart, Workspace
from torchspmd.predict.hardware import Hardware
from torchspmd.rehearse.recording import (
    NOWHERE,
    Category,
    Event,
    Mark,
    MarkKind,
    Phase,
    Recording,
    Site,
    StorageInfo,
)

__all__ = [
    "Fits",
    "Holder",
    "MemoryAccount",
    "Peak",
    "Period",
    "count_memory",
]

WORKSPACE = "workspace"  # what libraries keep of the caching allocator's memory
_RISK = 0.05  # of the reserved bytes: how wrong the reserved peak may be
_HOLDERS = 20  # of a peak that are listed
_POINTS = 1000  # of a curve that is shown


class Period(StrEnum):
    """A part of the run whose peak is told apart."""

    INITIALISATION = "initialisation"
    FIRST_STEP = "first step"
    STEADY_STEP = "steady step"


class Fits(StrEnum):
    """Whether the rank's memory is enough."""

    YES = "yes"
    AT_RISK = "at risk"
    NO = "no"


def verdict(margin: int, reserved: int) -> Fits:
    """Whether bytes of the device are left, and more than this prediction may be wrong."""
    if margin < 0:
        return Fits.NO
    return Fits.AT_RISK if margin < _RISK * reserved else Fits.YES


class Holder(NamedTuple):
    """Storages of one category, module and line that are live at a peak, added up."""

    nbytes: int
    storages: int
    category: str
    module: str
    line: str
    name: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was allocated, and the most that was reserved, in a period.

    Attributes:
        allocated: Bytes of live blocks, at the time when they were most.
        reserved: Bytes of segments, when they were most.
        row: Where the allocated bytes were most, a row of the curve.
        site: What was running there.
    """

    allocated: int
    reserved: int
    row: int
    site: Site


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """The memory of one rank over its run.

    Attributes:
        gpu: The device it was counted for.
        settings: Of the caching allocator.
        recording: What was counted.
        curve: Allocated and reserved bytes over time.
        periods: Rows of the curve at which a period begins.
        peaks: By period; those that have no row are not there.
        steady: Bytes that stay allocated between two steps, as the script leaves them.
        fixed: What is taken outside of the caching allocator, at the end.
        device_peak: The most bytes of the device that were in use, by everything.
        retries: How often the allocator gave its cache back because the device was full.
        failure: The first allocation without memory; everything after it is counted as if
            the device had more.
        workspaces: What libraries took of the caching allocator, by storage number.
    """

    gpu: Hardware
    settings: AllocatorSettings
    recording: Recording
    curve: Curve
    periods: dict[Period, range]
    peaks: dict[Period, Peak]
    steady: int
    fixed: tuple[FixedPart, ...]
    device_peak: int
    retries: int
    failure: Failure | None
    workspaces: dict[int, Workspace]

    @property
    def peak_period(self) -> Period:
        """The period of the largest allocated bytes."""
        return max(self.peaks, key=lambda period: self.peaks[period].allocated)

    @property
    def peak(self) -> Peak:
        """The peak of that period."""
        return self.peaks[self.peak_period]

    @property
    def reserved_peak(self) -> int:
        """The most bytes of segments, over all periods."""
        return max(peak.reserved for peak in self.peaks.values())

    @property
    def margin(self) -> int:
        """Bytes of the device that are left at the worst time; below 0: missing."""
        return self.gpu.nbytes("total") - self.device_peak

    @property
    def fits(self) -> Fits:
        """Whether it runs; at risk where only the error of this prediction decides."""
        if self.failure is not None:
            return Fits.NO
        if self.retries:
            return Fits.AT_RISK
        return verdict(self.margin, self.reserved_peak)

    @property
    def fragmentation(self) -> float:
        """Part of the most reserved bytes that not even the most allocated ones need."""
        return (
            1 - self.peak.allocated / self.reserved_peak if self.reserved_peak else 0.0
        )

    def category(self, storage: int) -> str:
        """What a storage of the curve was for."""
        if storage < 0:
            return WORKSPACE
        info = self.info(storage)
        if info.category is Category.TEMPORARY and info.saved:
            return Category.ACTIVATION.value
        if info.category is Category.TEMPORARY and info.site.phase is Phase.INIT:
            return Category.SETUP.value
        return info.category.value

    def info(self, storage: int) -> StorageInfo:
        """What is known of a storage of the curve."""
        if storage < 0:
            workspace = self.workspaces[storage]
            return StorageInfo(workspace.nbytes, name=workspace.name)
        return self.recording.storages.get(storage) or StorageInfo(0)

    def live(self, row: int) -> dict[int, int]:
        """Bytes of each storage that has a block after this row."""
        blocks: dict[int, int] = {}
        curve = self.curve
        for storage, change in zip(
            curve.storages[: row + 1], curve.changes[: row + 1], strict=True
        ):
            blocks[storage] = blocks.get(storage, 0) + change
        return {storage: nbytes for storage, nbytes in blocks.items() if nbytes}

    def by_category(self, row: int | None = None) -> dict[str, int]:
        """Allocated bytes by category, at the peak or another row; they add up to all."""
        totals: Counter[str] = Counter()
        for storage, nbytes in self.live(self.peak.row if row is None else row).items():
            totals[self.category(storage)] += nbytes
        return dict(totals.most_common())

    def holders(self, row: int | None = None, most: int = _HOLDERS) -> list[Holder]:
        """What holds memory at the peak, or at another row, the largest first."""
        groups: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for storage, nbytes in self.live(self.peak.row if row is None else row).items():
            info = self.info(storage)
            module = info.module or info.site.module
            name = info.name if storage < 0 or not module else ""
            key = (self.category(storage), module, info.site.line, name)
            groups[key].append(nbytes)
        holders = [
            Holder(sum(sizes), len(sizes), *key) for key, sizes in groups.items()
        ]
        return sorted(holders, reverse=True)[:most]

    def points(self, most: int = _POINTS) -> list[tuple[int, int, int]]:
        """Event, allocated and reserved bytes: the highest row of each stretch."""
        length = len(self.curve)
        width = max(1, -(-length // most))
        rows = (
            max(
                range(start, min(start + width, length)),
                key=self.curve.allocated.__getitem__,
            )
            for start in range(0, length, width)
        )
        curve = self.curve
        return [(curve.events[r], curve.allocated[r], curve.reserved[r]) for r in rows]

    def as_json(self) -> dict[str, Any]:
        """The figures, as plain data."""
        peak = self.peak
        return {
            "allocated_peak_bytes": peak.allocated,
            "reserved_peak_bytes": self.reserved_peak,
            "steady_bytes": self.steady,
            "peak_phase": self.peak_period.value,
            "peak_at": _site_json(peak.site),
            "by_category": self.by_category(),
            "holders": [holder._asdict() for holder in self.holders()],
            "periods": {
                period.value: {
                    "allocated_peak_bytes": each.allocated,
                    "reserved_peak_bytes": each.reserved,
                    "by_category": self.by_category(each.row),
                    "at": _site_json(each.site),
                }
                for period, each in self.peaks.items()
            },
            "device_bytes": self.gpu.nbytes("total"),
            "device_peak_bytes": self.device_peak,
            "margin_bytes": self.margin,
            "fragmentation": round(self.fragmentation, 4),
            "cache_flushes": self.retries,
            "fixed": [
                {"name": part.name, "bytes": part.nbytes, "source": part.source}
                for part in self.fixed
            ],
            "first_failure": self.failure and _failure_json(self.failure),
        }


def _site_json(site: Site) -> dict[str, Any]:
    return {
        "module": site.module,
        "phase": site.phase.value,
        "step": site.step,
        "line": site.line,
    }


def _failure_json(failure: Failure) -> dict[str, Any]:
    return {
        "bytes": failure.nbytes,
        "allocated_bytes": failure.allocated,
        "reserved_bytes": failure.reserved,
        "outside_bytes": failure.outside,
        "operator": failure.op,
        **_site_json(failure.site),
    }


def count_memory(
    recording: Recording, gpu: Hardware, settings: AllocatorSettings | None = None
) -> MemoryAccount:
    """Count what the recorded rank holds on this GPU, from its first to its last event.

    Args:
        recording: Of a rehearsal.
        gpu: The device, with its figures.
        settings: ``PYTORCH_CUDA_ALLOC_CONF``; None: torch's defaults.
    """
    run = Run(gpu, settings or AllocatorSettings())
    for place, event in enumerate(recording.events):
        run.take(place, event)
    run.settle(len(recording.events) - 1)
    periods = _periods(recording.events, run.curve)
    return MemoryAccount(
        gpu=gpu,
        settings=run.allocator.settings,
        recording=recording,
        curve=run.curve,
        periods=periods,
        peaks=_peaks(recording, run.curve, periods),
        steady=_steady(recording, run.curve),
        fixed=tuple(run.fixed.parts()),
        device_peak=run.device_peak,
        retries=run.allocator.retries,
        failure=run.failure,
        workspaces=run.workspaces,
    )


def _marks(events: Iterable[Event], *kinds: MarkKind) -> Iterator[tuple[int, Mark]]:
    for place, event in enumerate(events):
        if isinstance(event, Mark) and event.kind in kinds:
            yield place, event


def _periods(events: list[Event], curve: Curve) -> dict[Period, range]:
    """Rows of the curve: up to the first step, up to its end, and the rest."""
    length = len(curve)
    begin = next(_marks(events, MarkKind.INIT_END, MarkKind.STEP_BEGIN), None)
    end = next(_marks(events, MarkKind.STEP_END), None)
    first = length if begin is None else bisect_left(curve.events, begin[0])
    second = length if end is None else bisect_left(curve.events, end[0])
    return {
        Period.INITIALISATION: range(first),
        Period.FIRST_STEP: range(first, max(first, second)),
        Period.STEADY_STEP: range(max(first, second), length),
    }


def _peaks(
    recording: Recording, curve: Curve, periods: dict[Period, range]
) -> dict[Period, Peak]:
    peaks = {}
    for period, rows in periods.items():
        if not rows:
            continue
        row = max(rows, key=curve.allocated.__getitem__)
        event = recording.events[curve.events[row]]
        peaks[period] = Peak(
            allocated=curve.allocated[row],
            reserved=max(curve.reserved[rows.start : rows.stop]),
            row=row,
            site=getattr(event, "site", NOWHERE),
        )
    if not peaks:
        peaks[Period.INITIALISATION] = Peak(0, 0, -1, NOWHERE)
    return peaks


def _steady(recording: Recording, curve: Curve) -> int:
    """The least that is allocated between the last two steps; else after the last one.

    Where gradients are cleared at the beginning of a step, that is at the end of one.
    """
    ended: int | None = None
    gap: tuple[int, int] | None = None
    marks = _marks(recording.events, MarkKind.STEP_BEGIN, MarkKind.STEP_END)
    for place, mark in marks:
        if mark.kind is MarkKind.STEP_END:
            ended = place
        elif ended is not None:
            gap, ended = (ended, place), None
    if gap is None and ended is not None:
        gap = (ended, ended)
    if gap is not None and recording.clears_first:
        gap = (gap[0], gap[0])
    if gap is None:
        return curve.allocated[-1] if len(curve) else 0
    low, high = (bisect_left(curve.events, place) for place in gap)
    return min(curve.allocated[max(low - 1, 0) : high], default=0)
