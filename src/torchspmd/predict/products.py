"""Seconds of matrix products.

An ideal time from rates of the chip (operations, bytes, waves of tiles over its
multiprocessors), times the ratio of measured to ideal seconds of similar products.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchspmd.predict.byte_tables import ByteTables, roofline
from torchspmd.predict.figures import Correction, Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.traffic import (
    base_name,
    item_bytes,
    real_dtype,
    recurrent_products,
)
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = ["TILES", "Products", "Rates", "factor_of", "ideal_product", "rate_name"]

Tiles = Sequence[tuple[int, int, float]]

# Rows and columns of an output tile, and the part of the best rate that it reaches.
TILES: Tiles = (
    (128, 256, 1.0),
    (128, 128, 0.9),
    (64, 128, 0.7),
    (64, 64, 0.5),
    (16, 512, 0.21),  # an H200's 512 products of 16 x 3072 x 1024: 314 us
)
_DEPTH = 32  # of a tile's steps
# Least part of a product's depth for a tile, where tiles are few. Without tensor cores, if
# the smallest tiles are too few for the chip: products of 128 rows and a depth of 1536 with
# 512 and 1280 columns took 13 and 21 us in 32 bits on an H200, a third of those not split.
_SPLIT_DEPTH = 1024
# cuBLAS has smaller ones of complex numbers. An H200's products of 576 x 32 x 64 x 64 and
# of 576 x 64 x 64 x 32, all of 32 x 32 tiles: 20.5 and 22.9 us.
_TILE_OF_PAIRS = (32, 32, 0.9)
_ON_TENSOR_CORES = frozenset({"bfloat16", "float16", "float8", "tf32"})
# Without them, smaller tiles lose less: 47 products in 32 bits on four H200.
_WITHOUT_TENSOR_CORES: dict[str, Any] = {
    "split_depth": 512,
    "tiles": (
        (128, 256, 1.0),
        (128, 128, 0.9),
        (64, 128, 0.9),
        (64, 64, 0.8),
        (32, 32, 0.5),
    ),
}


class Rates(NamedTuple):
    """Of one chip and element type: operations and bytes a second; multiprocessors.

    And the tiles that its kernels have.
    """

    achieved: float
    memory: float
    sms: int
    item: int
    split_depth: int = _SPLIT_DEPTH
    tiles: Tiles = TILES


class Products:
    """Prices products for one GPU."""

    def __init__(self, tables: ByteTables) -> None:
        self._tables, self._figures = tables, tables.figures
        self._rates: dict[tuple[str, str], Rates] = {}
        self._corrections: dict[str, Correction] = {}

    def price(self, op: Op, shape: tuple[int, int, int, int]) -> float:
        """Seconds of a product of this batch, rows, columns and depth."""
        if not all(shape):
            return self._tables.floor
        dtype = rate_name(op)
        layout = _layout(op)
        rates = self.rate(self._figures.gpu, dtype)
        elements = _factors(shape) - _repeated(op)
        tiles = rates.tiles
        if real_dtype(factor_of(op).dtype):  # four real products for each complex one
            batch, m, n, k = shape
            shape, elements = (batch, m, n, 4 * k), 2 * elements
            tiles = (*rates.tiles[:-1], _TILE_OF_PAIRS)
        if 1 in shape[1:]:  # with a vector, or of two: no tiles
            return self._tables.by_bytes("reduce_rows", elements * rates.item)
        ideal = ideal_product(rates, shape, tiles, elements)
        seconds = ideal * self._ratio(dtype, layout, shape)
        times = self._misaligned(op, shape) if dtype in _ON_TENSOR_CORES else 1.0
        if times > 1:  # the measured rows are of aligned products
            slower = rates._replace(achieved=rates.achieved / times)
            batch, m, n, k = shape
            shape = (batch, m, n, _DEPTH * math.ceil(k / _DEPTH))
            more = ideal_product(slower, shape, elements=elements)
            seconds = max(seconds, more)
        return max(self._tables.floor, seconds)

    def price_recurrent(self, op: Op) -> float:
        """Layers of an LSTM: for each cell a small product and a pass over its gates.

        Layers come one after the other; cuDNN lets them overlap a little.
        """
        found = recurrent_products(op)
        assert found is not None
        cells, (each, *once) = found
        spec = op.inputs[0]
        dtype = "tf32" if spec.dtype == "float32" else spec.dtype  # cuDNN's default

        def product(shape: tuple[int, int, int, int]) -> float:
            ideal = ideal_product(self.rate(self._figures.gpu, dtype), shape)
            return max(self._tables.floor, ideal * self._ratio(dtype, 0, shape))

        _, batch, *sizes = each  # of hidden states and of gates
        nbytes = 3 * batch * max(sizes) * (4 if spec.dtype == "float32" else 2)
        cell = product(each) + self._tables.by_bytes("elementwise_3", nbytes)
        return cells * cell + sum(map(product, once))

    def busy(self, op: Op, flops: float) -> float:
        """Seconds of a large product of as many operations; 0 without tensor cores."""
        dtype = rate_name(op)
        if dtype not in _ON_TENSOR_CORES:
            return 0.0
        return flops / self.rate(self._figures.gpu, dtype).achieved

    def rate(self, hardware: Hardware, dtype: str) -> Rates:
        """Of a chip and an element type."""
        key = (hardware.title, dtype)
        if key not in self._rates:
            self._rates[key] = _rates(self._figures, hardware, dtype)
        return self._rates[key]

    def _misaligned(self, op: Op, shape: tuple[int, int, int, int]) -> float:
        """How much slower a product is whose matrices' rows begin at odd addresses."""
        item = item_bytes(factor_of(op))
        rows = [
            max(spec.stride[-2:])
            for spec in op.inputs
            if len(spec.shape) > 1 and min(spec.shape[-2:]) > 1  # no vectors
        ]
        step = math.gcd(16, *(item * each for each in (*rows, shape[2])))
        if step == 16:
            return 1.0
        return self._figures.number(f"kernels.misaligned_{step}")

    def _ratio(
        self, dtype: str, layout: int, shape: tuple[int, int, int, int]
    ) -> float:
        key = f"matmul.{dtype}"
        if key not in self._corrections:
            hardware, rows = self._figures.table(key)
            measured = dtype
            if not rows and dtype in ("float16", "float8"):  # kernels of the same form
                measured, key = "bfloat16", "matmul.bfloat16"
                hardware, rows = self._figures.table(key)
            rates = self.rate(hardware, measured)
            points, ratios = [], []
            for at, batch, m, n, k, seconds in rows:
                sizes = (int(batch), int(m), int(n), int(k))
                points.append(_point(int(at), sizes))
                ratios.append(seconds / ideal_product(rates, sizes))
            self._corrections[key] = Correction(points, ratios)
            self._corrections[f"matmul.{dtype}"] = self._corrections[key]
        return self._corrections[key].at(_point(layout, shape))


def ideal_product(
    rates: Rates,
    shape: tuple[int, int, int, int],
    tiles: Tiles | None = None,
    elements: float | None = None,
) -> float:
    """A roofline: operations in whole waves of tiles, and bytes.

    Args:
        rates: Of the chip.
        shape: Batch, rows, columns and depth.
        tiles: That a kernel may have; None: those of the chip.
        elements: That are moved; None: those of all matrices.
    """
    batch, m, n, k = shape
    flops = 2.0 * batch * m * n * k
    nbytes = rates.item * (_factors(shape) if elements is None else elements)
    filled = 0.0
    smallest = batch * math.ceil(m / 64) * math.ceil(n / 64)
    split = rates.split_depth if smallest < rates.sms else _SPLIT_DEPTH
    for rows, columns, part in rates.tiles if tiles is None else tiles:
        count = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(count / rates.sms)
        used = batch * m * n / (rows * columns) / (waves * rates.sms)
        if waves == 1:  # the depth is split where tiles are few
            used = max(used, min(1.0, used * max(1, k // split)))
        filled = max(filled, used * part)
    computing: float = flops / (rates.achieved * max(filled, 1e-3))
    moving: float = nbytes / rates.memory
    return roofline(computing, moving)


def _rates(figures: Figures, hardware: Hardware, dtype: str) -> Rates:
    peak = hardware.number(f"flops.{dtype}")
    best = hardware.figures.get(f"flops.{dtype}_achieved")
    if best is None:
        part = hardware.number("flops.bfloat16_achieved") / hardware.number(
            "flops.bfloat16"
        )
        achieved = peak * part
    else:
        assert not isinstance(best.value, tuple)
        achieved = best.value
    if hardware is figures.gpu:  # what the prediction rests on
        figures.number(f"flops.{dtype}_achieved", f"flops.{dtype}")
        figures.number("bandwidth.memory")
    return Rates(
        achieved=achieved,
        memory=hardware.number("bandwidth.memory"),
        sms=int(hardware.number("chip.sms")),
        item={"float8": 1, "float32": 4, "tf32": 4, "float64": 8}.get(dtype, 2),
        **({} if dtype in _ON_TENSOR_CORES else _WITHOUT_TENSOR_CORES),
    )


def _factors(shape: tuple[int, int, int, int]) -> int:
    """Elements of two matrices and their product."""
    batch, m, n, k = shape
    return batch * (m * k + k * n + m * n)


def _repeated(op: Op) -> int:
    """Elements of matrices that all products of a batch share, but for the first."""
    return sum(
        (spec.shape[0] - 1) * math.prod(spec.shape[1:])
        for spec in op.inputs
        if len(spec.shape) == 3 and spec.stride[0] == 0 and spec.shape[0] > 1
    )


def _point(layout: int, shape: tuple[int, int, int, int]) -> tuple[float, ...]:
    batch, m, n, k = (math.log2(max(size, 1)) for size in shape)
    return 1.5 * layout, batch, m, n, k


def _layout(op: Op) -> int:
    """Which argument is transposed: 0 for none, 1 for the second, 2 for the first."""
    first = 1 if base_name(op.name) in ("addmm", "_addmm_activation") else 0
    if base_name(op.name) == "linear":
        return 1
    if len(op.inputs) <= first + 1:
        return 0
    left, right = op.inputs[first], op.inputs[first + 1]
    if len(left.stride) == 2 and left.stride[0] == 1 and left.shape[0] > 1:
        return 2
    if len(right.stride) == 2 and right.stride[0] == 1 and right.shape[0] > 1:
        return 1
    return 0


def rate_name(op: Op) -> str:
    """Which rate of a GPU's file an operator's products run at."""
    dtype = factor_of(op).dtype if op.inputs else ""
    # It allows TF32 by default.
    by_cudnn = "convolution" in op.name or "_rnn" in op.name
    dtype = real_dtype(dtype) or dtype
    if dtype == "float32" and dict(op.scalars).get("allow_tf32", by_cudnn):
        return "tf32"
    return "float8" if dtype.startswith("float8") else dtype


def factor_of(op: Op) -> TensorSpec:
    """A tensor whose elements are multiplied: the last that has no integers."""
    base = base_name(op.name)
    if base == "_scaled_mm" or "attention" in base:  # scales and sums are behind it
        return op.inputs[min(1, len(op.inputs) - 1)]
    factors = [spec for spec in op.inputs if "int" not in spec.dtype] or op.inputs
    written = {spec.storage for spec in op.outputs}  # of ``out=``, the last argument
    read = (spec for spec in reversed(factors) if spec.storage not in written)
    return next(read, factors[-1])
