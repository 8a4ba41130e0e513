"""Seconds of a convolution as cuDNN runs it: a product of unfolded image and weight.

Its kernels have channels last, whatever the number of dimensions; where tensors have
channels first, it copies them into that order and the result back, in each pass. Filters of
one pixel are a product as they are, where rows begin at multiples of 16 bytes.

Filters in groups are packed: a tile holds as many groups as have 64 channels together, and
multiplies all of them with each other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchspmd.predict.byte_tables import ITEM, ByteTables
from torchspmd.predict.elements import price_places, price_reordered
from torchspmd.predict.figures import Correction
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.products import TILES, Products, ideal_product
from torchspmd.predict.traffic import (
    is_contiguous,
    item_bytes,
    op_flops,
    tensor_bytes,
)
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = [
    "Convolutions",
    "Filters",
    "filters_of",
    "is_packed",
    "launches_beside",
    "measured_filters",
]

_BLOCK = 64  # channels of a tile that holds several groups
_ALIGNED = 16  # bytes
_COLORS = 3  # channels of an image, for which no gradient is measured
_THIN = 8  # fewer channels than a tensor core reads at once have kernels of their own
# cuDNN has others than products for few channels.
_TILES = (*TILES[:-1], (128, 64, 0.65), (256, 32, 0.4))
# Kernels beside the product: set memory to zero, add up what was split.
_BESIDE = 3


class Filters(NamedTuple):
    """What the seconds of a convolution depend on.

    Attributes:
        batch: Images.
        inputs: Channels of each.
        places: Of an image: pixels, samples of sound, voxels.
        outputs: Channels of the result.
        taps: Places of a filter.
        after: Places of the result.
        dims: Of an image.
        groups: Of filters.
        passes: 1 in forward; in backward, the gradients that are asked for.
        last: Whether channels are last.
        bias: Whether one is added; in backward, whether its gradient is asked for.
    """

    batch: int
    inputs: int
    places: int
    outputs: int
    taps: int
    after: int
    dims: int
    groups: int
    passes: int
    last: bool
    bias: bool

    @property
    def elements(self) -> tuple[int, int, int]:
        """Of the image, the result and the weight."""
        image = self.batch * self.inputs * self.places
        result = self.batch * self.outputs * self.after
        return image, result, self.outputs * self.inputs // self.groups * self.taps

    @property
    def product(self) -> tuple[int, int, int, int]:
        """Batch, rows, columns and depth."""
        inputs, outputs = self.inputs // self.groups, self.outputs // self.groups
        together = min(self.groups, max(1, _BLOCK // inputs))
        depth = together * inputs * self.taps
        rows = self.batch * self.after
        return self.groups // together, rows, together * outputs, depth

    def is_copied(self, item: int) -> bool:
        """Whether tensors are copied into channels last, with elements of these bytes."""
        is_product = self.taps == self.groups == 1 and self.places == self.after
        is_aligned = self.places * item % _ALIGNED == 0
        return not self.last and not (is_product and is_aligned)

    @property
    def point(self) -> tuple[float, ...]:
        """Coordinates among measured cases."""
        log = math.log2
        *_, depth = self.product
        stride = (self.places / max(1, self.after)) ** (1 / self.dims)
        return (
            0.5 * log(max(self.batch, 1)),
            log(max(depth / self.taps, 1)),
            log(max(self.places, 1)) / 2,
            log(max(self.outputs, 1)),
            2.0 * log(max(self.taps, 1)),
            2.0 * log(max(stride, 1)),
            4.0 * self.last,
            6.0 * (self.inputs < _THIN),
        )


def measured_filters(row: Sequence[float], direction: str) -> Filters:
    """Of a row of a hardware file: squares, without groups."""
    batch, inputs, side, outputs, kernel, stride, last = map(int, row)
    is_image = inputs <= _COLORS
    return Filters(
        batch=batch,
        inputs=inputs,
        places=side**2,
        outputs=outputs,
        taps=kernel**2,
        after=round((side / stride) ** 2),
        dims=2,
        groups=1,
        passes=1 if direction == "forward" or is_image else 2,
        last=bool(last),
        bias=False,
    )


def filters_of(op: Op) -> Filters:
    """Of an operator. A transposed one is the gradient of another for its image."""
    scalars = dict(op.scalars)
    backward = "backward" in op.name
    x, w = op.inputs[backward], op.inputs[1 + backward]
    result = op.inputs[0] if backward else op.outputs[0]
    last = _is_last(x) or _is_last(w)
    if scalars.get("transposed"):
        x, result = result, x
    passes, bias = 1, len(op.inputs) > 2
    if backward:
        asked = scalars.get("output_mask")
        wanted = asked if isinstance(asked, list | tuple) else (True, True, False)
        passes, bias = sum(map(bool, wanted[:2])), bool(wanted[2])
    groups = scalars.get("groups")
    return Filters(
        batch=x.shape[0],
        inputs=x.shape[1],
        places=math.prod(x.shape[2:]),
        outputs=result.shape[1],
        taps=math.prod(w.shape[2:]),
        after=math.prod(result.shape[2:]),
        dims=max(1, len(x.shape) - 2),
        groups=groups if isinstance(groups, int) else 1,
        passes=passes,
        last=last,
        bias=bias,
    )


def is_packed(filters: Filters) -> bool:
    """Whether tiles hold whole groups: then cuDNN has kernels for tensor cores."""
    inputs = filters.inputs // filters.groups
    return filters.groups == 1 or inputs % _BLOCK == 0 or _BLOCK % inputs == 0


class Convolutions:
    """Prices convolutions for one GPU."""

    def __init__(self, tables: ByteTables, products: Products) -> None:
        self._tables, self._figures, self._products = tables, tables.figures, products
        self._corrections: dict[str, Correction] = {}

    def price(self, op: Op, nbytes: int) -> float:
        """Seconds of a convolution that moves these bytes."""
        backward = "backward" in op.name
        filters = filters_of(op)
        direction = "backward" if backward else "forward"
        if filters.groups > 1 and not filters.last:
            if filters.inputs == filters.groups:
                return self._in_groups(op, "depthwise", direction)
            if not is_packed(filters):
                return self._in_groups(op, "grouped", direction)
        seconds = self._filters(op, nbytes, filters, direction)
        return seconds + self._beside(op, filters)

    def ideal(self, hardware: Hardware, dtype: str, filters: Filters) -> float:
        """Each pass is a product, and copies of what it reads and writes."""
        rates = self._products.rate(hardware, dtype)
        image, result, weight = filters.elements
        elements = image + result + weight  # read once, not unfolded
        once = ideal_product(rates, filters.product, _TILES, elements)
        kernels = _BESIDE
        if filters.is_copied(rates.item):
            rate = self._figures.number("kernels.channels_last") * rates.memory
            if rates.item > ITEM:
                rate /= self._figures.number("kernels.transpose_4_bytes")
            once += 2 * rates.item * elements / rate
            kernels += 3
        return filters.passes * (once + kernels * self._tables.shortest(hardware))

    def _in_groups(self, op: Op, kind: str, direction: str) -> float:
        """Without tensor cores.

        One filter a channel: torch's own kernels, with the bias inside. Others: cuDNN's, of
        each group by itself.
        """
        part = self._figures.number(f"kernels.{kind}_{direction}")
        rate = part * self._figures.number("flops.float32")
        return max(self._tables.floor, op_flops(op) / rate)

    def _beside(self, op: Op, filters: Filters) -> float:
        """Copies of torch into the order of the others, and what a bias adds."""
        backward = "backward" in op.name
        x = op.inputs[backward]
        result = op.inputs[0] if backward else op.outputs[0]
        seconds = 0.0
        if len(x.shape) == 4:
            for spec in (x, result) if backward else (x,):
                if not _lies_as(spec, last=filters.last):
                    seconds += price_reordered(self._tables, spec)
        if filters.bias and backward:
            # Over images and places: threads read far apart.
            elements = ITEM * math.prod(result.shape)
            seconds += self._tables.by_bytes("reduce_columns", elements)
        elif filters.bias:
            steps = tuple(int(place == 1) for place in range(len(result.shape)))
            added = result, result, result._replace(stride=steps)
            plain = self._tables.by_bytes("elementwise_1", 2 * tensor_bytes(result))
            seconds += max(plain, price_places(self._tables, added, converted=False))
        return seconds

    def _filters(self, op: Op, nbytes: int, filters: Filters, direction: str) -> float:
        dtype = op.inputs[0].dtype
        if dtype == "float32" and dict(op.scalars).get("allow_tf32", True):
            dtype = "tf32"
        if dtype == "float32" or not is_packed(filters):
            rates = self._products.rate(self._figures.gpu, dtype)
            ideal = op_flops(op) / rates.achieved
            other = self._figures.number("kernels.other_convolution")
            moving = self._tables.by_bytes("elementwise_2", nbytes)
            return max(self._tables.floor, other * ideal, moving)
        ideal = self.ideal(self._figures.gpu, dtype, filters)
        return max(self._tables.floor, ideal * self._ratio(dtype, direction, filters))

    def _ratio(self, dtype: str, direction: str, filters: Filters) -> float:
        # Kernels of the same form.
        measured = "bfloat16" if dtype == "float16" else dtype
        table = f"convolution.{direction}_{measured}"
        if table not in self._corrections:
            hardware, rows = self._figures.table(table)
            cases = [measured_filters(row[:-1], direction) for row in rows]
            ideal = [self.ideal(hardware, measured, case) for case in cases]
            self._corrections[table] = Correction(
                [case.point for case in cases],
                [row[-1] / each for row, each in zip(rows, ideal, strict=True)],
            )
        return self._corrections[table].at(filters.point)


def launches_beside(op: Op) -> int:
    """Kernels that the host launches beside the first of a pass."""
    filters = filters_of(op)
    of_bias = 2 * filters.bias  # an operator of torch
    if filters.is_copied(item_bytes(op.inputs[0])) and is_packed(filters):
        return of_bias + 3 * filters.passes
    return of_bias


def _is_last(spec: TensorSpec) -> bool:
    """Whether a convolution runs with channels last because of this argument."""
    return (
        len(spec.stride) >= 4
        and spec.stride[1] == 1
        and spec.shape[1] > 1
        # A filter of one pixel lies both ways.
        and not is_contiguous(spec)
    )


def _lies_as(spec: TensorSpec, *, last: bool) -> bool:
    """Whether images lie with channels last, or first."""
    if not last:
        return is_contiguous(spec)
    moved = (0, 2, 3, 1)
    return is_contiguous(
        spec._replace(
            shape=tuple(spec.shape[at] for at in moved),
            stride=tuple(spec.stride[at] for at in moved),
        )
    )
