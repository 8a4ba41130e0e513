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

from torchspmd.rehearse.recording import Op

__all__ = ["Filters", "filters_of", "is_packed", "measured_filters"]

_BLOCK = 64  # channels of a tile that holds several groups
_ALIGNED = 16  # bytes
_COLORS = 3  # channels of an image, for which no gradient is measured


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
        stride = (self.places / max(1, self.after)) ** (1 / self.dims)
        return (
            0.5 * log(max(self.batch, 1)),
            log(max(self.inputs, 1)),
            log(max(self.places, 1)) / 2,
            log(max(self.outputs, 1)),
            2.0 * log(max(self.taps, 1)),
            2.0 * log(max(stride, 1)),
            4.0 * self.last,
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
    )


def filters_of(op: Op, *, last: bool) -> Filters:
    """Of an operator. A transposed one is the gradient of another for its image."""
    scalars = dict(op.scalars)
    backward = "backward" in op.name
    x, w = op.inputs[backward], op.inputs[1 + backward]
    result = op.inputs[0] if backward else op.outputs[0]
    if scalars.get("transposed"):
        x, result = result, x
    passes = 1
    if backward:
        asked = scalars.get("output_mask")
        passes = sum(map(bool, asked[:2])) if isinstance(asked, list | tuple) else 2
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
    )


def is_packed(filters: Filters) -> bool:
    """Whether tiles hold whole groups: then cuDNN has kernels for tensor cores."""
    inputs = filters.inputs // filters.groups
    return filters.groups == 1 or inputs % _BLOCK == 0 or _BLOCK % inputs == 0
