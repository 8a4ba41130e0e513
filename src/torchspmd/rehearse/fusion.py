"""Take out of a recording what ``torch.compile`` would not allocate.

A compiler writes one kernel for a chain of elementwise operators, norms and reductions:
what they hand on to each other is never in memory. In backward it computes again what it
can get from tensors that are kept anyway. So a storage that such an operator made inside
of a compiled region is kept only as long as matrix products, attention and other kernels
of their own read it; where a chain begins with something smaller than its end, the
beginning is kept for backward, and not the end.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

from torchspmd.rehearse.recording import (
    Alloc,
    Category,
    Event,
    Free,
    Op,
    Phase,
    Recording,
)

__all__ = ["fuse_regions"]

_FUSED = frozenset(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    nll_loss_forward nll_loss_backward native_dropout native_dropout_backward
    native_batch_norm native_batch_norm_backward cudnn_batch_norm _to_copy clone copy_
    embedding sum mean amax amin var_mean cat stack where zeros zeros_like ones ones_like
    full full_like new_zeros fill_ zero_ empty empty_like slice_backward select_backward
    arange threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward
    constant_pad_nd repeat tril triu scalar_tensor
    """.split()
)
# Views that torch does not call so.
_VIEWS = frozenset({"aten._unsafe_view.default", "aten._reshape_alias.default"})
_CAST = "aten._to_copy.default"
_SMALL = 1 << 16  # results of reductions stay
_DEPTH = 40  # of a chain


@cache
def _is_fused(name: str) -> bool:
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return False
    if parts[1] in _FUSED:
        return True
    operator = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None)
    return operator is not None and torch.Tag.pointwise in operator.tags


def _is_view(op: Op) -> bool:
    return op.views or op.name in _VIEWS


@dataclass(slots=True)
class _Life:
    """One storage that a compiled region made."""

    storage: int
    nbytes: int
    begin: int  # places in the events
    maker: Op
    end: int | None = None
    last: int = -1  # where the last copy of the same is freed
    readers: list[tuple[int, Op]] = field(default_factory=list)


class _Fusion:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lives: dict[int, _Life] = {}
        self._dropped: set[int] = set()
        self._kept_until: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # other places of frees than the recorded ones
        self._copies: dict[object, int] = {}  # storages of copies, by what they are of
        self._same: dict[int, int] = {}  # the first copy, of those that are made again
        # Of each region: places and operators of forward that read a storage.
        self._readers: defaultdict[tuple[int, int], list[tuple[int, Op]]]
        self._readers = defaultdict(list)
        self._kernels: dict[tuple[int, int], float] = {}  # see _first_kernel
        # Events to put behind those of a place.
        self.after: defaultdict[int, list[Event]] = defaultdict(list)
        self.removed: set[int] = set()

    def read(self) -> None:
        """Find the storages of regions, and who reads them."""
        operators: dict[int, Op] = {}
        several: set[int] = set()
        for place, event in enumerate(self._recording.events):
            match event:
                case Op(repeats=-1):  # a replay uses what its capture has left
                    operators[event.number] = event
                    self._note_reader(place, event)
                    self._note_copy(event)
                    for spec in event.inputs:
                        life = self._lives.get(self._first(spec.storage))
                        if life is not None and not _is_view(event):
                            life.readers.append((place, event))
                case Alloc() | Free() if event.storage in self._same:
                    self.removed.add(place)
                    life = self._lives[self._same[event.storage]]
                    if isinstance(event, Free) and life.end is not None:
                        life.last = max(life.last, place)
                case Alloc(workspace=False):
                    maker = operators.get(event.op)
                    if event.storage in self._lives:
                        several.add(event.storage)
                    elif maker is not None and maker.region is not None:
                        self._lives[event.storage] = _Life(
                            event.storage, event.nbytes, place, maker
                        )
                case Free() if event.storage in self._lives:
                    self._lives[event.storage].end = place
        for storage in several:
            del self._lives[storage]

    def _first(self, storage: int) -> int:
        return self._same.get(storage, storage)

    def _note_copy(self, op: Op) -> None:
        """Whole tensors that are cast for several products, as under autocast: once."""
        if op.region is None or op.name != _CAST or op.site.phase is Phase.BACKWARD:
            return
        (source, *_), (result, *_) = op.inputs, op.outputs
        first = self._first(source.storage)
        life = self._lives.get(first)
        if life is None or len({life.maker.outputs[0].shape, source.shape}) > 1:
            return  # perhaps a part of it
        key = (op.region, first, source.shape, source.stride, result.dtype)
        known = self._copies.setdefault(key, result.storage)
        storages = self._recording.storages
        if known not in self._lives or storages[result.storage].returned:
            return
        self._same[result.storage] = known
        storages[known].saved |= storages[result.storage].saved

    def _note_reader(self, place: int, op: Op) -> None:
        if op.region is None or _is_view(op) or op.site.phase is Phase.BACKWARD:
            return
        for spec in op.inputs:
            self._readers[op.region, self._first(spec.storage)].append((place, op))

    def drop_workspaces(self) -> None:
        """Fused code takes nothing for itself of what the kernels that it replaces take."""
        inside: set[int] = set()  # operators
        dropped: set[int] = set()
        for place, event in enumerate(self._recording.events):
            if isinstance(event, Op):
                if event.region is not None and _is_fused(event.name):
                    inside.add(event.number)
            elif isinstance(event, Alloc):
                if event.workspace and event.op in inside:
                    dropped.add(event.storage)
                    self.removed.add(place)
            elif isinstance(event, Free) and event.storage in dropped:
                self.removed.add(place)

    def decide(self) -> None:
        """What stays, for how long."""
        for life in self._lives.values():
            if not self._is_inside(life):
                continue
            if life.maker.site.phase is Phase.BACKWARD:
                if not self._hard(life):
                    self._remove(life)
                continue
            if self._recording.storages[life.storage].saved and not self._recompute(
                life
            ):
                continue
            self._shorten(life)

    def _is_inside(self, life: _Life) -> bool:
        """Whether nobody but fused code of compiled regions needs to know of it."""
        info = self._recording.storages[life.storage]
        return (
            _is_fused(life.maker.name)
            and life.end is not None
            and life.nbytes > _SMALL
            and info.category is Category.TEMPORARY
            and not info.returned
            and all(reader.region == life.maker.region for _, reader in life.readers)
        )

    def _hard(self, life: _Life) -> list[tuple[int, Op]]:
        return [(place, op) for place, op in life.readers if not _is_fused(op.name)]

    def _recompute(self, life: _Life) -> bool:
        """Whether backward gets it from other things; those are kept if they are less."""
        assert life.end is not None
        if any(op.site.phase is Phase.BACKWARD for _, op in self._hard(life)):
            return False  # it would be written to memory there: nothing is won
        if self._reads_far_apart(life):
            return False
        needed = self._sources(life.maker, _DEPTH)
        if needed is None or sum(each.nbytes for each in needed.values()) > life.nbytes:
            return False
        for source in needed.values():
            until = max(self._kept_until.get(source.storage, 0), life.end)
            self._kept_until[source.storage] = until
            self._bring_back(source)
        return True

    def _reads_far_apart(self, life: _Life) -> bool:
        """Whether it is made from what a product in front of it was made from, too.

        Such is the sum of a residual connection. Torch's partitioner computes none of these
        again (``ban_recompute_used_far_apart``): each would need the one before, and the
        first of a model would be computed again for all.
        """
        region = life.maker.region
        return region is not None and any(
            self._first_kernel(region, spec.storage) < life.begin
            for spec in life.maker.inputs
        )

    def _first_kernel(self, region: int, storage: int) -> float:
        """Place of the first operator behind a storage that is not fused."""
        key = (region, storage)
        if key not in self._kernels:
            self._kernels[key] = math.inf  # an operator that writes over its argument
            self._kernels[key] = min(
                (
                    self._first_kernel_of(region, place, op)
                    for place, op in self._readers[key]
                ),
                default=math.inf,
            )
        return self._kernels[key]

    def _first_kernel_of(self, region: int, place: int, reader: Op) -> float:
        if not _is_fused(reader.name):
            return place
        written = (spec.storage for spec in reader.outputs)
        return min(
            (self._first_kernel(region, each) for each in written), default=math.inf
        )

    def _sources(self, maker: Op, depth: int) -> dict[int, _Life] | None:
        """What is not kept and has to be, to compute again; None: too much."""
        if not depth or maker.name.startswith("aten.native_dropout."):
            return None
        needed: dict[int, _Life] = {}
        for spec in maker.inputs:
            life = self._lives.get(spec.storage)
            if life is None or life.nbytes <= _SMALL or life.maker is maker:
                continue
            is_saved = self._recording.storages[life.storage].saved
            if life.storage in self._kept_until:
                continue
            if is_saved and life.storage not in self._dropped:
                continue
            if not _is_fused(life.maker.name):
                needed[life.storage] = life
                continue
            if self._reads_far_apart(life):
                needed[life.storage] = life
                continue
            further = self._sources(life.maker, depth - 1)
            if further is None:
                return None
            needed |= further
        return needed

    def _shorten(self, life: _Life) -> None:
        self._dropped.add(life.storage)
        places = [place for place, _ in self._hard(life)]
        if places:
            self._ends[life.storage] = max(places)
        else:
            self._remove(life)

    def _bring_back(self, life: _Life) -> None:
        """It was let go before something was found to be computed from it."""
        self._dropped.discard(life.storage)
        self._ends.pop(life.storage, None)
        self.removed -= {life.begin, life.end}

    def _remove(self, life: _Life) -> None:
        assert life.end is not None
        self.removed |= {life.begin, life.end}

    def place_frees(self) -> None:
        """Frees where the last kernel reads; before a kernel that writes over its input."""
        for storage, life in self._lives.items():
            if life.last > (life.end or 0) and life.begin not in self.removed:
                self._ends.setdefault(storage, life.last)
        for storage, until in self._kept_until.items():
            life = self._lives[storage]
            if life.end is not None and life.end < until:
                self._ends[storage] = until
                self._recording.storages[storage].saved = True
        self._hold_inputs()
        self._reuse()
        for storage, place in self._ends.items():
            end = self._lives[storage].end
            assert end is not None, "only what is freed gets another end"
            if place == end:
                continue
            self.removed.add(end)
            self.after[place].append(Free(storage))

    def _hold_inputs(self) -> None:
        """What a fused kernel reads is in memory when its result is allocated."""
        for life in self._lives.values():
            if life.begin in self.removed or not _is_fused(life.maker.name):
                continue
            for source in self._read_by(life.maker):
                end = self._ends.get(source.storage, source.end)
                if end is not None and source.begin < life.begin and end < life.begin:
                    self._ends[source.storage] = life.begin

    def _read_by(self, maker: Op) -> Iterator[_Life]:
        """What the kernel that an operator became a part of reads."""
        seen, makers = {maker.number}, [maker]
        while makers:
            operator = makers.pop()
            for spec in operator.inputs:
                life = self._lives.get(spec.storage)
                if life is None or life.maker.number in seen:
                    continue
                if life.begin in self.removed or self._is_computed_again(life, maker):
                    seen.add(life.maker.number)
                    makers.append(life.maker)
                else:
                    yield life

    def _is_computed_again(self, life: _Life, reader: Op) -> bool:
        return (
            life.storage in self._dropped
            and life.maker.site.phase is not Phase.BACKWARD
            and reader.site.phase is Phase.BACKWARD
        )

    def _reuse(self) -> None:
        """A fused kernel writes over an input of the same size that nobody reads later.

        But not over what the region gave to its caller, who may still read it.
        """
        hard = [
            place
            for place, event in enumerate(self._recording.events)
            if isinstance(event, Op)
            and not _is_view(event)
            and not _is_fused(event.name)
        ]
        ends: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for life in self._lives.values():
            end = self._ends.get(life.storage, life.end)
            is_returned = self._recording.storages[life.storage].returned
            if end is not None and life.begin not in self.removed and not is_returned:
                ends[life.nbytes].append((end, life.storage))
        for of_size in ends.values():
            of_size.sort()
        used: set[int] = set()
        for life in self._lives.values():
            if life.begin in self.removed or not _is_fused(life.maker.name):
                continue
            following = bisect_right(hard, life.begin)
            limit = hard[following] if following < len(hard) else life.begin
            candidates = ends[life.nbytes]
            place = bisect_left(candidates, (life.begin, -1))
            while place < len(candidates) and candidates[place][0] < limit:
                end, storage = candidates[place]
                place += 1
                older = self._lives[storage]
                if storage in used or older.begin >= life.begin:
                    continue
                used.add(storage)
                # In front of the operator, whose own event stands before its results.
                self._ends[storage] = life.begin - 1
                break


def fuse_regions(recording: Recording) -> None:
    """Change the allocations of compiled regions to those of fused kernels."""
    fusion = _Fusion(recording)
    fusion.read()
    fusion.drop_workspaces()
    fusion.decide()
    fusion.place_frees()
    events: list[Event] = []
    for place, event in enumerate(recording.events):
        if place not in fusion.removed:
            events.append(event)
        events += fusion.after.get(place, ())
    recording.events[:] = events
