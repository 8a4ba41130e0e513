"""Allocated and reserved bytes over time: a recording through the simulated allocator."""

from array import array
from dataclasses import dataclass, field

from torchspmd.predict.allocator import Allocator, AllocatorSettings, Block
from torchspmd.predict.fixed import FixedMemory, Workspace
from torchspmd.predict.hardware import Hardware
from torchspmd.rehearse.recording import (
    Alloc,
    Comm,
    Event,
    EventRecord,
    Free,
    Mark,
    MarkKind,
    Op,
    RecordStream,
    Site,
    Synchronize,
)

__all__ = ["Curve", "Failure", "Run"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The first allocation that finds no memory.

    Attributes:
        nbytes: What it asks for.
        allocated: Bytes of live blocks at that time.
        reserved: Bytes of segments at that time, after the cache was given back.
        outside: Bytes that CUDA, cuBLAS and NCCL had taken.
        site: Module, phase, step and line.
        op: The operator's name; "" outside of operators.
    """

    nbytes: int
    allocated: int
    reserved: int
    outside: int
    site: Site
    op: str


@dataclass(slots=True)
class Curve:
    """One row for each allocation and free, in columns.

    Attributes:
        storages: The storage; below 0 for a workspace.
        changes: Bytes of its block, negative for a free.
        allocated: Bytes of live blocks after it.
        reserved: Bytes of segments after it.
        events: The event of the recording that it belongs to.
    """

    storages: "array[int]" = field(default_factory=lambda: array("q"))
    changes: "array[int]" = field(default_factory=lambda: array("q"))
    allocated: "array[int]" = field(default_factory=lambda: array("q"))
    reserved: "array[int]" = field(default_factory=lambda: array("q"))
    events: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.storages)


class Run:
    """The recording's events, one after the other, through the allocator.

    Attributes:
        curve: What came of them so far.
        fixed: What libraries took.
        workspaces: Their blocks, by a storage number below 0.
        failure: The first allocation without memory.
        device_peak: The most bytes of the device that were in use, by everything.
    """

    def __init__(self, gpu: Hardware, settings: AllocatorSettings) -> None:
        total = gpu.nbytes("total")
        self.allocator = Allocator(settings, capacity=total, total=total)
        self.fixed = FixedMemory(gpu)
        self.curve = Curve()
        self.workspaces: dict[int, Workspace] = {}
        self.failure: Failure | None = None
        self.device_peak = 0
        self._blocks: dict[int, Block] = {}
        self._op: Op | None = None
        self._due: list[Workspace] = []
        self._event_streams: dict[int, int] = {}
        self._set_outside()

    def take(self, place: int, event: Event) -> None:
        """One event, and its place in the recording."""
        if self._due and not self._is_result(event):
            self.settle(place)
        match event:
            case Alloc():
                self._alloc(
                    place, event.storage, event.nbytes, event.stream, event.site
                )
            case Free():
                self._free(place, event.storage)
            case RecordStream() if event.storage in self._blocks:
                block = self._blocks[event.storage]
                self.allocator.record_stream(block, event.stream)
            case Op():
                self._after_op(event)
            case Comm():
                self.fixed.after_comm(event)
                self._set_outside()
            case _:
                self._order(event)

    def _order(self, event: Event) -> None:
        """What tells that streams are done with the blocks that they used."""
        match event:
            case EventRecord():
                self._event_streams[event.event] = event.stream
            case Synchronize():
                # The default stream waits for all others in each step.
                stream = event.stream or None
                if event.event is not None:
                    stream = self._event_streams.get(event.event, stream)
                self.allocator.complete(stream)
            case Mark(kind=MarkKind.STEP_END):
                # The host runs ahead of the device by less than a step.
                self.allocator.complete()
            case Mark(kind=MarkKind.EMPTY_CACHE):
                self.allocator.empty_cache()
            case Mark(kind=MarkKind.CAPTURE_BEGIN | MarkKind.CAPTURE_END, value=pool):
                self.allocator.graph_pool = pool

    def settle(self, place: int) -> None:
        """Take what libraries want for the last operator: after its results."""
        op, due, self._due = self._op, self._due, []
        for workspace in due:
            assert op is not None, "only operators have workspaces"
            storage = -1 - len(self.workspaces)
            self.workspaces[storage] = workspace
            self._set_outside()
            self._alloc(place, storage, workspace.nbytes, workspace.stream, op.site)

    def _is_result(self, event: Event) -> bool:
        op = self._op
        return isinstance(event, Alloc) and op is not None and event.op == op.number

    def _after_op(self, op: Op) -> None:
        self._op = op
        self._due = self.fixed.after_op(op)

    def _set_outside(self) -> None:
        self.allocator.outside = self.fixed.outside
        self._note_device()

    def _note_device(self) -> None:
        in_use = self.allocator.reserved + self.allocator.outside
        self.device_peak = max(self.device_peak, in_use)

    def _alloc(
        self, place: int, storage: int, nbytes: int, stream: int, site: Site
    ) -> None:
        if storage in self._blocks:  # resized without a free
            self._free(place, storage)
        if not nbytes:
            return
        block = self.allocator.malloc(nbytes, stream)
        if block is None:
            self._fail(nbytes, site)
            block = self.allocator.malloc(nbytes, stream)
            assert block is not None, "an allocator without a limit does not fail"
        self._blocks[storage] = block
        self._row(place, storage, block.size)
        self._note_device()

    def _free(self, place: int, storage: int) -> None:
        block = self._blocks.pop(storage, None)
        if block is not None:
            size = block.size
            self.allocator.free(block)
            self._row(place, storage, -size)

    def _fail(self, nbytes: int, site: Site) -> None:
        allocator = self.allocator
        op = self._op
        self.failure = Failure(
            nbytes=nbytes,
            allocated=allocator.allocated,
            reserved=allocator.reserved,
            outside=allocator.outside,
            site=site,
            op=op.name if op is not None and op.site == site else "",
        )
        allocator.lift_limits()

    def _row(self, place: int, storage: int, change: int) -> None:
        curve = self.curve
        curve.storages.append(storage)
        curve.changes.append(change)
        curve.allocated.append(self.allocator.allocated)
        curve.reserved.append(self.allocator.reserved)
        curve.events.append(place)
