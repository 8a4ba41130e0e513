"""A convolution as cuDNN runs it: a product of the unfolded image and the weight.

Its kernels have channels last, whatever the number of dimensions; where tensors have
channels first, it copies them into that order and the result back, in each pass. Filters of
one pixel are a product as they are, where rows begin at multiples of 16 bytes.

Filters in groups are packed: a tile holds as many groups as have 64 channels together, and
multiplies all of them with each other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchspmd.predict.traffic import is_contiguous, tensor_bytes
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = ["Filters", "filters_of", "is_packed", "launches_beside", "measured_filters"]

_BLOCK = 64  # channels of a tile that holds several groups
_ALIGNED = 16  # bytes
_COLORS = 3  # channels of an image, for which no gradient is measured
_THIN = 8  # fewer channels than a tensor core reads at once have kernels of their own


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


def launches_beside(op: Op) -> int:
    """Kernels that the host launches beside the first of a pass."""
    filters = filters_of(op)
    of_bias = 2 * filters.bias  # an operator of torch
    item = tensor_bytes(op.inputs[0]._replace(shape=(1,), stride=(1,)))
    if filters.is_copied(item) and is_packed(filters):
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
