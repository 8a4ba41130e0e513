"""Seconds of norms and reductions.

Their tables are of few shapes each; closed forms (``forms.py``) carry them over to others.
"""

import math

from torchspmd.predict.byte_tables import ITEM, ROW, ByteTables
from torchspmd.predict.figures import Figures
from torchspmd.predict.forms import (
    blocks_seconds,
    by_clock,
    norm_seconds,
    reduction_seconds,
)
from torchspmd.predict.traffic import (
    base_name,
    is_contiguous,
    item_bytes,
    tensor_bytes,
)
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = [
    "price_batch_norm",
    "price_columns",
    "price_group_norm",
    "price_layer_norm",
    "price_results",
    "price_softmax_backward",
]

_FEW_CHANNELS, _CHANNELS = 64, (512, 2048)  # of the batch norms in hardware files
_READ_ONCE = 2**17  # bytes of a channel that cuDNN's batch norm keeps while it runs
# How batch norms of more channels quicken while these leave multiprocessors idle. In
# profiles of ResNeXt, ResNet-18 and a U-Net, 128 channels took 0.6 to 0.7 of the time.
_FILLING = 2 / 3


def price_layer_norm(tables: ByteTables, key: str, op: Op, nbytes: int) -> float:
    """A layer norm, or an RMS norm in backward."""
    backward = "backward" in op.name
    spec = op.inputs[backward]
    scalars = dict(op.scalars)
    asked, shape = (scalars.get(name) for name in ("output_mask", "normalized_shape"))
    width = math.prod(shape) if isinstance(shape, tuple) else spec.shape[-1]
    here = norm_seconds(
        tables.figures,
        math.prod(spec.shape) / max(width, 1),
        width,
        item_bytes(spec),
        backward=backward,
        weights=not isinstance(asked, tuple) or any(asked[1:]),
    )

    def measured(figures: Figures, size: float) -> float:
        rows = size / ((2 + backward) * ROW * ITEM)
        return norm_seconds(figures, rows, ROW, ITEM, backward=backward, weights=True)

    return tables.reshaped(key, nbytes, here, measured)


def price_group_norm(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Of rows without places: a block for each group of one; then all elements.

    In backward, a block for 32 channels goes down all rows for the weights.
    """
    if dict(op.scalars).get("HxW") != 1:  # by elements: measured with four bytes
        nbytes = nbytes * 4 // item_bytes(op.inputs[0])
        return tables.by_bytes(base_name(op.name), nbytes)
    rows, groups = (int(str(dict(op.scalars)[name])) for name in ("N", "group"))
    blocks = blocks_seconds(tables.figures, rows * groups)
    seconds = tables.by_bytes("broadcast", nbytes) + blocks
    if "backward" in op.name:
        seconds += rows * tables.figures.number("kernels.group_norm_weights_row")
    return seconds


def price_batch_norm(tables: ByteTables, key: str, op: Op, nbytes: int) -> float:
    """One block of threads for each channel, or where those come last, for several.

    cuDNN's kernels are taken for other types than bfloat16.
    """
    x = op.inputs["backward" in key]
    if x.dtype == "bfloat16":
        return _native_batch_norm(tables, key, x, nbytes)
    of_all = f"{key}_512_float32"
    if not is_contiguous(x):
        return tables.by_bytes(of_all, nbytes)
    channels = x.shape[1]
    of_channel = tensor_bytes(x) // channels * (2 if "backward" in key else 1)
    if of_channel > _READ_ONCE:  # by elements: measured with four bytes each
        nbytes = nbytes * 4 // item_bytes(x)
    of_few = tables.by_bytes(f"{key}_float32", _as_few(nbytes, channels))
    return max(tables.by_bytes(of_all, nbytes), of_few)


def _native_batch_norm(
    tables: ByteTables, key: str, x: TensorSpec, nbytes: int
) -> float:
    if len(x.shape) == 4 and not is_contiguous(x):
        return tables.by_bytes(f"{key}_last", nbytes)
    channels = x.shape[1]
    near = min(_CHANNELS, key=lambda count: abs(math.log(count / channels)))
    of_few = tables.by_bytes(key, _as_few(nbytes, channels))
    return max(tables.by_bytes(f"{key}_{near}", nbytes), of_few)


def _as_few(nbytes: int, channels: int) -> int:
    """Bytes of a batch norm of few channels that takes as long as one of these.

    With fewer channels than measured, each still has a multiprocessor to itself: what a
    channel takes does not depend on the others.
    """
    filling = _FILLING if channels > _FEW_CHANNELS else 1.0
    return int(nbytes * (_FEW_CHANNELS / channels) ** filling)


def price_columns(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Sums of columns."""
    spec = op.inputs[0]
    dims = dict(op.scalars).get("dim", ())
    dims = dims if isinstance(dims, tuple) else (dims,)
    rank = len(spec.shape)
    reduced = {int(str(dim)) % rank for dim in dims} or set(range(rank))

    def measured(figures: Figures, size: float) -> float:
        rows = max(1, round(size / (ROW * ITEM)) - 1)  # without the result
        matrix = spec._replace(shape=(rows, ROW), stride=(ROW, 1), dtype="bfloat16")
        return reduction_seconds(figures, matrix, {0})

    here = reduction_seconds(tables.figures, spec, reduced)
    return tables.reshaped("reduce_columns", nbytes, here, measured)


def price_results(tables: ByteTables, op: Op) -> float:
    """Of a reduction of neighbours: several threads for each result, however few."""
    if not op.inputs or not op.outputs:
        return 0.0
    spec, results = op.inputs[0], math.prod(op.outputs[0].shape)
    dims = dict(op.scalars).get("dim", ())
    dims = dims if isinstance(dims, tuple) else (dims,)
    rank = len(spec.shape)
    if any(not isinstance(dim, int) for dim in dims) or results <= 1:
        return 0.0
    steps = [spec.stride[dim % rank] for dim in dims if spec.shape[dim % rank] > 1]
    if min(steps, default=0) != 1:
        return 0.0
    key = "reduction_result_index" if len(op.outputs) > 1 else "reduction_result"
    return tables.floor + results * by_clock(tables.figures, f"kernels.{key}")


def price_softmax_backward(tables: ByteTables, op: Op, nbytes: int) -> float:
    """A product of the gradient and the result, and a kernel over rows of both.

    The latter takes as long by element in 32 bits as in 16, unless memory bounds it.
    """
    product = tables.by_bytes("elementwise_2", nbytes)
    narrow = 3 * ITEM * math.prod(op.inputs[0].shape)
    both = tables.by_bytes("_softmax_backward_data", narrow)
    rows = both - tables.by_bytes("elementwise_2", narrow)
    return product + max(product, rows)
