"""CUDA's caching allocator, simulated: which segments it would ask of the device.

The rules are those of ``c10::cuda::CUDACachingAllocator`` in torch 2.11 to 2.13. Nothing
is allocated: addresses are numbers, and the device is a number of bytes.
"""

import dataclasses
import enum
import os
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from torchspmd.errors import UsageError

__all__ = [
    "Allocator",
    "AllocatorSettings",
    "Block",
    "SegmentChange",
]

MIB = 1 << 20
MIN_BLOCK = 512  # every size is a multiple of it
SMALL_LIMIT = MIB  # blocks up to here come from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_LIMIT = 10 * MIB  # from here on a block gets a segment of its own
LARGE_ROUNDING = 2 * MIB
_INTERVALS = 16  # of sizes, for roundup_power2_divisions: 1 MiB, 2 MiB, ... 32 GiB
_ADDRESS_SPACE = 1 << 44  # more than any device has, for an expandable segment
_ADDRESS_CHUNK = 32 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` sets, in bytes.

    Attributes:
        expandable_segments: One growing segment for each pool and stream.
        max_split_size: Blocks of at least this size are not split; ``None``: no limit.
        roundup_power2_divisions: Steps between two powers of two, for sizes up to
            1 MiB, 2 MiB, and so on; 0: round to 512 bytes.
        max_non_split_rounding_size: How much larger than asked for a block may be that is
            not split.
        garbage_collection_threshold: Part of the allowed memory from which on unused
            segments are given back; works together with a memory fraction only.
        large_segment_size: A segment that several blocks of 1 to 10 MiB share.
        memory_fraction: ``set_per_process_memory_fraction``; ``None``: not set.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    max_non_split_rounding_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * MIB
    memory_fraction: float | None = None

    @classmethod
    def of_environment(cls) -> "AllocatorSettings":
        """Those that torch would read."""
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            if text := os.environ.get(name):
                return cls.parse(text)
        return cls()

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Settings in the words of ``PYTORCH_CUDA_ALLOC_CONF``.

        Keys that do not change which bytes are taken (``pinned_*``, ``backend:native``)
        are passed over.

        >>> AllocatorSettings.parse("max_split_size_mb:64").max_split_size
        67108864

        Raises:
            UsageError: A key or a value that is not known.
        """
        values: dict[str, object] = {}
        for key, value in _pairs(text):
            if key in _PASSED_OVER or (key, value) == ("backend", "native"):
                continue
            if key not in _READERS:
                raise UsageError(
                    f"PYTORCH_CUDA_ALLOC_CONF: {key}:{value} is not simulated. "
                    f"Known are {', '.join(sorted(_READERS))}."
                )
            name, read = _READERS[key]
            try:
                values[name] = read(value)
            except (ValueError, KeyError):
                raise UsageError(
                    f"PYTORCH_CUDA_ALLOC_CONF: {value!r} is no value of {key}."
                ) from None
        return cls(**values)  # type: ignore[arg-type]

    def rounded(self, nbytes: int) -> int:
        """The size of the block that a request of ``nbytes`` gets."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        step = MIN_BLOCK
        interval = max(0, nbytes.bit_length() - MIB.bit_length())
        divisions = self.roundup_power2_divisions[min(interval, _INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
        return -(-nbytes // step) * step

    def segment_size(self, size: int) -> int:
        """What ``cudaMalloc`` is asked for when no block of ``size`` is free."""
        if size <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if size < LARGE_LIMIT:
            return self.large_segment_size
        return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """``a:1,b:[x:1,y:2]`` as pairs; a list keeps its brackets."""
    depth, start = 0, 0
    text = "".join(text.split())
    for place, letter in enumerate([*text, ","]):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            if part := text[start:place]:
                key, _, value = part.partition(":")
                yield key, value
            start = place + 1


def _read_divisions(value: str) -> tuple[int, ...]:
    """One number for all sizes, or a list ``[256:1,512:2,>:4]`` of MiB and number."""
    if not value.startswith("["):
        return (_power_of_two(value),) * _INTERVALS
    result, last = [0] * _INTERVALS, -1
    for key, number in _pairs(value[1:-1]):
        divisions = _power_of_two(number)
        if key == ">":
            places = range(last + 1, _INTERVALS)
        else:
            place = min(_power_of_two(key).bit_length(), _INTERVALS) - 1
            # torch fills up to the first boundary, and leaves gaps between others
            places = range(place + 1) if last < 0 else range(place, place + 1)
            last = place
        for place in places:
            result[place] = divisions
    return tuple(result)


def _power_of_two(value: str) -> int:
    number = int(value)
    if number < 1 or number & (number - 1):
        raise ValueError(value)
    return number


def _read_mib(value: str) -> int:
    return int(value) * MIB


_READERS = {
    "expandable_segments": (
        "expandable_segments",
        {"True": True, "False": False}.__getitem__,
    ),
    "max_split_size_mb": ("max_split_size", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _read_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "large_segment_size_mb": ("large_segment_size", _read_mib),
    "per_process_memory_fraction": ("memory_fraction", float),
}
_PASSED_OVER = frozenset(
    {
        "pinned_use_cuda_host_register",
        "pinned_use_background_threads",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
        "graph_capture_record_stream_reuse",
    }
)


class SegmentChange(NamedTuple):
    """Memory taken from the device, or given back where negative."""

    nbytes: int
    stream: int


class _State(enum.Enum):
    """What may be done with a block."""

    LIVE = "a tensor has it"
    PENDING = "freed; another stream may still use it"
    FREE = "in the cache"
    UNMAPPED = "addresses of an expandable segment without memory"


class Block:
    """A piece of a segment; neighbours are linked, so that free ones can be joined."""

    __slots__ = (
        "address",
        "born",
        "next",
        "page",
        "pool",
        "prev",
        "requested",
        "size",
        "state",
        "stream",
        "uses",
    )

    def __init__(
        self, stream: int, pool: "_Pool", address: int, size: int, page: int = 0
    ) -> None:
        self.stream, self.pool, self.address, self.size = stream, pool, address, size
        self.page = page  # bytes that are mapped at once; 0: not expandable
        self.state = _State.FREE
        self.requested = 0
        self.born = 0  # for garbage collection: the search at which it became free
        self.uses: set[int] = set()  # other streams that were recorded
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.prev is not None or self.next is not None


class _Pool:
    """The free blocks of one size class: for each stream by size, then by address."""

    __slots__ = ("free", "searches", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: defaultdict[int, list[tuple[int, int, Block]]] = defaultdict(list)
        self.unmapped: defaultdict[int, list[tuple[int, Block]]] = defaultdict(list)
        self.searches = 0

    def add(self, block: Block) -> None:
        if block.state is _State.UNMAPPED:
            insort(self.unmapped[block.stream], (block.address, block))
        else:
            block.born = self.searches
            insort(self.free[block.stream], (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        if block.state is _State.UNMAPPED:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]
        else:
            free = self.free[block.stream]
            del free[bisect_left(free, (block.size, block.address))]

    def cached(self) -> list[Block]:
        """All free blocks, in the order in which they are given back."""
        return [block for _, free in sorted(self.free.items()) for *_, block in free]


class _Addresses:
    """Where the driver puts a segment, as far as it can be seen from outside.

    Of equally large free blocks the allocator takes the one with the lowest address, so
    the order of addresses matters. The driver reserves addresses downwards, in multiples
    of 32 MiB, and puts later segments into the lowest gap that is large enough.
    """

    __slots__ = ("_bottom", "_gaps")

    def __init__(self) -> None:
        self._bottom = 1 << 60
        self._gaps: list[tuple[int, int]] = []  # address and size, by address

    def take(self, nbytes: int) -> int:
        gaps = enumerate(self._gaps)
        place = next((place for place, gap in gaps if gap[1] >= nbytes), None)
        if place is not None:
            address, size = self._gaps.pop(place)
        else:
            size = -(-nbytes // _ADDRESS_CHUNK) * _ADDRESS_CHUNK
            address = self._bottom = self._bottom - size
        if size > nbytes:
            insort(self._gaps, (address + nbytes, size - nbytes))
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        place = bisect_left(self._gaps, (address,))
        if place < len(self._gaps) and self._gaps[place][0] == address + nbytes:
            nbytes += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == address:
            address, before = self._gaps.pop(place - 1)
            nbytes += before
        insort(self._gaps, (address, nbytes))


class Allocator:
    """The state of the allocator of one device, and what it counted.

    Args:
        settings: Of the environment.
        capacity: Bytes of the device that are there for it and for what is
            ``outside`` of it; ``None``: as many as it asks for.
        total: Bytes of the whole device, of which a memory fraction is a part.

    Attributes:
        graph_pool: The pool of CUDA graphs from which blocks come now; 0: that of all
            else. Segments of a graph's pool are its own, and are never given back.
        allocated: Bytes of live blocks; ``torch.cuda.memory_allocated()``.
        reserved: Bytes of segments; ``torch.cuda.memory_reserved()``.
        active: Live blocks, and freed ones that another stream may still use.
        requested: Bytes that were asked for, before rounding.
        outside: Bytes that others took of the same capacity, such as NCCL.
        retries: How often the whole cache was given back because the device was full.
        changes: Every segment that was taken or given back, in order.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        total: int | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.allocated = self.reserved = self.active = self.requested = 0
        self.outside = 0
        self.retries = 0
        self.changes: list[SegmentChange] = []
        self._allowed: int | None = None
        if self.settings.memory_fraction is not None and total is not None:
            self._allowed = int(self.settings.memory_fraction * total)
        self.graph_pool = 0
        self._pools: defaultdict[int, tuple[_Pool, _Pool]] = defaultdict(
            lambda: (_Pool(small=True), _Pool(small=False))
        )
        self._events: dict[int, deque[Block]] = {}
        self._pending: dict[Block, int] = {}  # events that have not happened yet
        self._addresses = _Addresses()

    # What a program does

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block of at least ``nbytes``; ``None`` when the device has no more memory."""
        size = self.settings.rounded(nbytes)
        small, large = self._pools[self.graph_pool]
        pool = small if size <= SMALL_LIMIT else large
        block = self._find(pool, stream, size)
        if block is None:
            self._collect_garbage()
            block = self._take(pool, stream, size)
        if block is None:
            return None
        if self._should_split(block, size):
            block = self._split(pool, block, size)
        block.state, block.requested = _State.LIVE, nbytes
        self.allocated += block.size
        self.active += block.size
        self.requested += nbytes
        return block

    def free(self, block: Block) -> None:
        """Give a live block back; other streams that use it delay that it is reused."""
        if block.state is not _State.LIVE:
            raise UsageError("Allocator.free: the block is not allocated.")
        self.allocated -= block.size
        if not block.uses:
            self._free(block)
            return
        block.state = _State.PENDING
        self._pending[block] = len(block.uses)
        for stream in sorted(block.uses):
            self._events.setdefault(stream, deque()).append(block)
        block.uses = set()

    def record_stream(self, block: Block, stream: int) -> None:
        """The block is used on another stream too."""
        if stream != block.stream:
            block.uses.add(stream)

    def complete(self, stream: int | None = None) -> None:
        """What was queued on ``stream``, or on all, has run: its blocks can be reused."""
        streams = list(self._events) if stream is None else [stream]
        for each in streams:
            for block in self._events.pop(each, ()):
                self._pending[block] -= 1
                if not self._pending[block]:
                    del self._pending[block]
                    self._free(block)

    def empty_cache(self) -> None:
        """Give back to the device whatever no block is in."""
        self.complete()
        for pool in reversed(self._pools[0]):
            for block in pool.cached():
                if block.page:
                    self._unmap(pool, block)
                elif not block.is_split:
                    self._release(pool, block)

    def lift_limits(self) -> None:
        """From now on the device has as much memory as is asked for."""
        self.capacity = self._allowed = None

    # Blocks of the cache

    def _find(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """The smallest free block that is large enough, and that may be used for it."""
        pool.searches += 1
        free = pool.free[stream]
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        block = free[place][2]
        if block.page:  # the one at the end counts as what it can grow to
            for _, _, other in free[place + 1 :]:
                if _growable(other) >= _growable(block):
                    break
                block = other
        limit = self.settings.max_split_size
        if limit is not None:
            if size < limit <= block.size:
                return None
            rounding = self.settings.max_non_split_rounding_size
            if size >= limit and block.size >= size + rounding:
                return None
        pool.remove(block)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        limit = self.settings.max_split_size
        return rest > SMALL_LIMIT and (limit is None or size < limit)

    def _split(self, pool: _Pool, rest: Block, size: int) -> Block:
        """The first ``size`` bytes of a block; the rest goes to the cache."""
        block = Block(rest.stream, rest.pool, rest.address, size, rest.page)
        _link(rest.prev, block)
        _link(block, rest)
        rest.address += size
        rest.size -= size
        pool.add(rest)
        return block

    def _free(self, block: Block) -> None:
        self.active -= block.size
        self.requested -= block.requested
        block.state, block.requested = _State.FREE, 0
        self._join(block)
        block.pool.add(block)

    def _join(self, block: Block) -> None:
        """Take in the neighbours that are in the same state."""
        for other in (block.prev, block.next):
            if other is None or other.state is not block.state:
                continue
            block.pool.remove(other)
            if other is block.prev:
                block.address = other.address
                _link(other.prev, block)
            else:
                _link(block, other.next)
            block.size += other.size

    # Segments of the device

    def _take(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """New memory, after giving back cached memory where there is too little."""
        block = self._new_block(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._new_block(pool, stream, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, stream, size)
        return block

    def _new_block(self, pool: _Pool, stream: int, size: int) -> Block | None:
        nbytes = self.settings.segment_size(size)
        if self._allowed is not None and self.reserved + nbytes > self._allowed:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        if not self._change(nbytes, stream):
            return None
        return Block(stream, pool, self._addresses.take(nbytes), nbytes)

    def _change(self, nbytes: int, stream: int) -> bool:
        """Take memory of the device, or give it back; whether there was enough."""
        if nbytes > 0 and self.capacity is not None:
            if self.reserved + self.outside + nbytes > self.capacity:
                return False
        self.reserved += nbytes
        self.changes.append(SegmentChange(nbytes, stream))
        return True

    def _release(self, pool: _Pool, block: Block) -> None:
        pool.remove(block)
        self._addresses.give_back(block.address, block.size)
        self._change(-block.size, block.stream)

    def _release_oversize(self, pool: _Pool, stream: int, size: int) -> bool:
        """Give back blocks that are never split, but only as many as are needed."""
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        free = pool.free[stream]
        place = bisect_left(free, (wanted,))
        if place < len(free):
            self._release(pool, free[place][2])
            return True
        released = 0
        while released < wanted and free and free[-1][0] >= limit:
            released += free[-1][0]
            self._release(pool, free[-1][2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back unused segments that nobody asked for in a long time."""
        threshold = self.settings.garbage_collection_threshold
        if self._allowed is None or threshold <= 0:
            return
        _, pool = self._pools[0]
        target = self.reserved - int(threshold * self._allowed)
        while target > 0:
            unused = [block for block in pool.cached() if not block.is_split]
            if not unused:
                return
            mean_birth = sum(block.born for block in unused) / len(unused)
            for block in unused:
                if block.born <= mean_birth:
                    target -= block.size
                    self._release(pool, block)

    # Expandable segments

    def _expand(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Map pages behind, or between, what is there, at the lowest address possible."""
        block = self._expandable(pool, stream, size)
        if block.state is _State.UNMAPPED and not self._map(pool, block, size):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, (
                "an expandable segment has room by construction"
            )
            if not self._map(pool, following, size - block.size):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, stream: int, size: int) -> Block:
        """Where the free and unmapped blocks begin that have room for ``size``."""
        for _, block in pool.unmapped[stream]:
            before = block.prev
            start = before if before and before.state is _State.FREE else block
            if _room(start, size):
                return start
        page = SMALL_SEGMENT if pool.small else self.settings.large_segment_size
        space = _ADDRESS_SPACE // page * page
        segment = Block(stream, pool, self._addresses.take(space), space, page)
        segment.state = _State.UNMAPPED
        pool.add(segment)
        return segment

    def _map(self, pool: _Pool, block: Block, size: int) -> bool:
        nbytes = min(-(-size // block.page) * block.page, block.size)
        if not self._change(nbytes, block.stream):
            return False
        pool.remove(block)
        if nbytes < block.size:
            rest = Block(
                block.stream,
                block.pool,
                block.address + nbytes,
                block.size - nbytes,
                block.page,
            )
            rest.state = _State.UNMAPPED
            _link(rest, block.next)
            _link(block, rest)
            block.size = nbytes
            pool.add(rest)
        block.state = _State.FREE
        self._join(block)
        pool.add(block)
        return True

    def _unmap(self, pool: _Pool, block: Block) -> None:
        """Give back the whole pages of a free block."""
        start = block
        while start.prev is not None:
            start = start.prev
        base = start.address
        low = base + -(-(block.address - base) // block.page) * block.page
        end = block.address + block.size
        high = base + (end - base) // block.page * block.page
        if low >= high:
            return
        pool.remove(block)
        for address, size, is_before in (
            (block.address, low - block.address, True),
            (high, end - high, False),
        ):
            if not size:
                continue
            part = Block(block.stream, block.pool, address, size, block.page)
            if is_before:
                _link(block.prev, part)
                _link(part, block)
            else:
                _link(part, block.next)
                _link(block, part)
            pool.add(part)
        block.address, block.size = low, high - low
        block.state = _State.UNMAPPED
        self._change(-block.size, block.stream)
        self._join(block)
        pool.add(block)


def _link(before: Block | None, after: Block | None) -> None:
    if before is not None:
        before.next = after
    if after is not None:
        after.prev = before


def _growable(block: Block) -> int:
    following = block.next
    if following is not None and following.state is _State.UNMAPPED:
        return block.size + following.size
    return block.size


def _room(block: Block | None, size: int) -> bool:
    while size > 0 and block is not None:
        if block.state not in (_State.FREE, _State.UNMAPPED):
            return False
        size -= block.size
        block = block.next
    return size <= 0
