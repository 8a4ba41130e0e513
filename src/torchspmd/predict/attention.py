"""Seconds of attention, by the kernel that torch chooses."""

import math
from typing import NamedTuple

from torchspmd.predict.figures import Correction, Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.traffic import base_name
from torchspmd.rehearse.recording import Op

__all__ = ["Attention"]

_WIDTH = 64  # channels of a head: attention is no quicker with less
# Queries and keys of a tile of attention, which takes as long where it is not full. The
# memory-efficient kernels showed nothing of it, with 42 and 197 keys in 32 bits.
_TILES = {"forward": 128, "backward": 64}


class Attention:
    """Prices attention for one GPU."""

    def __init__(self, figures: Figures, floor: float) -> None:
        self._figures, self._floor = figures, floor
        self._corrections: dict[str, Correction] = {}

    def price(self, op: Op, flops: float) -> tuple[float, float]:
        """Seconds, and the part of its tiles that is filled: zeros draw no power."""
        base = base_name(op.name)
        backward = "backward" in base
        tensors = [spec for spec in op.inputs if len(spec.shape) == 4]
        query, key, *_ = tensors[backward:]
        kernel = next(
            (name for name in ("efficient", "cudnn") if name in base), "flash"
        )
        dtype = query.dtype if query.dtype == "float32" else "bfloat16"
        direction = "backward" if backward else "forward"
        causal = bool(dict(op.scalars).get("is_causal"))
        batch, heads, rows, width = query.shape
        columns = key.shape[2]
        may_choose = dict(op.scalars).get("cudnn", True)
        table = self._table_name(kernel, f"{direction}_{dtype}", bool(may_choose))
        if table not in self._corrections:
            self._corrections[table] = self._correction(table, direction, dtype)
        tile = _tile(table, direction)
        sizes = _Sizes(rows, columns, width).in_tiles(tile)
        flops *= math.prod(sizes) / math.prod((rows, columns, width))
        filled = rows * columns / (sizes.rows * sizes.keys)
        rate = self._rate(self._figures.gpu, direction, dtype)
        ideal = flops / rate * self._short(self._figures.gpu, dtype, sizes.keys)
        point = _point(batch, heads, key.shape[1], sizes.rows, width, causal)
        seconds = ideal * self._corrections[table].at(point)
        if dict(op.scalars).get("dropout_p"):
            seconds *= self._figures.number(f"kernels.attention_dropout_{direction}")
        if kernel == "cudnn":  # torch takes it by this name where there is a mask
            seconds *= self._figures.number(f"kernels.attention_mask_{direction}")
        if kernel == "flash" and not may_choose:
            seconds *= self._figures.optional("attention.flash_times", 1.0)
        return max(self._floor, seconds), filled

    def _table_name(self, kernel: str, rest: str, may_choose: bool) -> str:
        """Where torch chooses by itself, from Hopper on, it is cuDNN's that runs."""
        chosen = [kernel]
        is_new = float(self._figures.gpu.compute_capability or 0) >= 9
        if kernel in ("flash", "cudnn") and is_new and may_choose:
            chosen = ["default", "cudnn", kernel]
        names = [f"attention.{name}_{rest}" for name in chosen]
        return next((name for name in names if self._figures.has(name)), names[-1])

    def _rate(self, hardware: Hardware, direction: str, dtype: str) -> float:
        part = self._figures.number(f"attention.{direction}_efficiency")
        return part * hardware.number(f"flops.{dtype}")

    def _short(self, hardware: Hardware, dtype: str, keys: float) -> float:
        """How much slower few keys are: starting a tile takes as long at every rate."""
        rate = hardware.number(f"flops.{dtype}") / hardware.number("flops.bfloat16")
        half = self._figures.number("kernels.attention_keys")
        return 1 + half * rate / max(keys, 1)

    def _correction(self, table: str, direction: str, dtype: str) -> Correction:
        hardware, rows = self._figures.table(table)
        rate = self._rate(hardware, direction, dtype) if rows else 1.0
        tile = _tile(table, direction)
        points, ratios = [], []
        for batch, heads, kv_heads, length, keys, width, causal, seconds in rows:
            sizes = _Sizes(length, keys, width).in_tiles(tile)
            flops = 4 * batch * heads * math.prod(sizes) / (2 if causal else 1)
            flops *= 2.5 if direction == "backward" else 1
            ideal = flops / rate * self._short(hardware, dtype, sizes.keys)
            points.append(
                _point(batch, heads, kv_heads, sizes.rows, width, bool(causal))
            )
            ratios.append(seconds / ideal)
        return Correction(points, ratios)


class _Sizes(NamedTuple):
    """Of one head of attention: queries, keys, and channels."""

    rows: float
    keys: float
    width: float

    def in_tiles(self, tile: int) -> "_Sizes":
        """What is computed: whole tiles, and no fewer channels than a tile has."""
        rows, keys = (tile * math.ceil(each / tile) for each in self[:2])
        return _Sizes(rows, keys, max(_WIDTH, self.width))


def _tile(table: str, direction: str) -> int:
    return 1 if "efficient" in table else _TILES[direction]


def _point(
    batch: float, heads: float, kv_heads: float, rows: float, width: float, causal: bool
) -> tuple[float, ...]:
    return (
        0.5 * math.log2(max(batch * heads, 1)),
        math.log2(max(rows, 1)),
        3.0 * math.log2(max(width, 1)),
        0.5 * math.log2(max(heads / max(kv_heads, 1), 1)),
        3.0 * causal,
    )
