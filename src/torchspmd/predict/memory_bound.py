"""Seconds of an operator that memory bounds.

By the bytes that it moves, unless its kernels are known to depend on more.
"""

import math
from collections.abc import Callable, Mapping

from torchspmd.predict.byte_tables import ITEM, ROW, ByteTables
from torchspmd.predict.elements import (
    price_concatenation,
    price_contiguous,
    price_padding,
    price_part_backward,
    price_pointwise,
    price_roll,
    price_zeros,
)
from torchspmd.predict.forms import SECTOR, blocks_seconds, iterated, reduction_seconds
from torchspmd.predict.memory_keys import memory_key
from torchspmd.predict.norms import (
    price_batch_norm,
    price_columns,
    price_group_norm,
    price_layer_norm,
    price_results,
    price_softmax_backward,
)
from torchspmd.predict.traffic import (
    base_name,
    is_contiguous,
    real_dtype,
    tensor_bytes,
)
from torchspmd.rehearse.recording import Op

__all__ = ["BY_NAME", "price_memory_bound"]

_EMBEDDINGS = 32000 * ROW * ITEM  # bytes of the table whose gradients are measured
_FFT_BITS = 12  # of the longest transform that one block of threads holds

# Copy arguments that are not contiguous, before their kernels begin.
_CONTIGUOUS_INSIDE = frozenset(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    native_group_norm native_group_norm_backward
    """.split()
)
_NORMS = frozenset(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm_backward
    """.split()
)
_SUMS = frozenset("sum mean amax amin linalg_vector_norm".split())
# Reductions by torch's common kernel.
_RESULTS = _SUMS | frozenset("max min argmax argmin all any prod".split())


def price_memory_bound(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Seconds of an operator that moves these bytes."""
    key = memory_key(op, tables.has)
    if key.startswith("batch_norm") and len(op.inputs[0].shape) > 1:
        return price_batch_norm(tables, key, op, nbytes)
    if key.startswith("concatenate"):
        return price_concatenation(tables, op)
    tensors = iterated(op)
    if tensors is not None:
        return price_pointwise(tables, op, key, nbytes, tensors)
    base = base_name(op.name)
    if base in _NORMS:
        seconds = price_layer_norm(tables, key, op, nbytes)
    elif key == "reduce_columns" and base in _SUMS and op.inputs[0].stride:
        seconds = price_columns(tables, op, nbytes)
    elif base in BY_NAME:
        seconds = BY_NAME[base](tables, op, nbytes)
    else:
        seconds = tables.by_bytes(key, nbytes)
    if base in _RESULTS:
        seconds = max(seconds, price_results(tables, op))
    if base in _CONTIGUOUS_INSIDE:
        for spec in op.inputs[: 1 + ("backward" in base)]:
            if not is_contiguous(spec):
                seconds += price_contiguous(tables, spec)
    return seconds


def _gathered(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Rows of a table; a block for each, where they lie as 16 bytes do."""
    seconds = tables.by_bytes(memory_key(op, tables.has), nbytes)
    table, *indices = op.inputs
    row = tensor_bytes(op.outputs[0]) // max(1, math.prod(op.outputs[0].shape))
    row *= math.prod(table.shape[1:])
    if len(indices) != 1 or not is_contiguous(table) or row % 16:
        return seconds
    blocks = math.prod(indices[0].shape)
    return max(seconds, blocks_seconds(tables.figures, blocks))


def _scattered(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Each element is put into a sector of its own, which is read before."""
    target, *given = op.inputs
    count = max((math.prod(spec.shape) for spec in given), default=0)
    apart = 2 * count * SECTOR
    whole = 2 * tensor_bytes(target)
    read = sum(map(tensor_bytes, given))
    return tables.by_bytes("elementwise_2", read + min(apart, whole))


def _adaptive_max_pool(tables: ByteTables, op: Op, nbytes: int) -> float:
    """A thread for each result goes over its places, a block for each channel."""
    x, result = op.inputs[0], op.outputs[0]
    places = math.prod(x.shape[-2:]) / max(1, math.prod(result.shape[-2:]))
    blocks = math.prod(x.shape[:-2]) / (16 * tables.figures.number("chip.sms"))
    alone = math.ceil(blocks) * places * tables.figures.number("kernels.pool_place")
    return max(tables.by_bytes("elementwise_1", nbytes), alone)


def _adaptive_max_pool_backward(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Zeros, and one gradient for each result."""
    given = 3 * tensor_bytes(op.inputs[0])
    return price_zeros(tables, op.outputs[0]) + tables.by_bytes("elementwise_2", given)


def _embedding_backward(tables: ByteTables, op: Op, nbytes: int) -> float:
    """A table of zeros, to which rows are added: what that takes goes by elements."""
    count = math.prod(op.inputs[0].shape)
    measured = _EMBEDDINGS + ITEM * count + 8 * count // ROW
    zeros = tables.by_bytes("fill", _EMBEDDINGS)
    adding = tables.by_bytes("embedding_dense_backward", measured) - zeros
    return max(tables.floor, adding) + price_zeros(tables, op.outputs[0])


def _bag_backward(tables: ByteTables, op: Op, nbytes: int) -> float:
    least = tables.figures.number("kernels.embedding_bag_backward")
    return max(least, tables.by_bytes("elementwise_3", nbytes))


def _cell_backward(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Gradients of gates, and their sums for the biases: one, or a GRU's two."""
    gates = op.outputs[0]
    biases = sum(len(spec.shape) == 1 for spec in op.outputs)
    summed = reduction_seconds(tables.figures, gates, {0})
    seconds = tables.by_bytes("elementwise_3", nbytes)
    return seconds + biases * max(tables.floor, summed)


def _fft(tables: ByteTables, op: Op, nbytes: int) -> float:
    """A pass over memory for each dimension, or 5 N log2 N operations.

    The pass of a dimension that one block cannot hold is made twice. Before, the
    argument of an inverse transform to real numbers is copied, as cuFFT overwrites it;
    afterwards the result is scaled.
    """
    source, result = op.inputs[0], op.outputs[0]
    scalars = dict(op.scalars)
    dims = scalars.get("dim")
    dims = dims if isinstance(dims, tuple) else (-1,)
    larger = max(source.shape, result.shape, key=math.prod)
    halves = [spec for spec in (source, result) if real_dtype(spec.dtype)]
    between = 2 * tensor_bytes(min(halves, key=tensor_bytes))
    lengths = [larger[int(dim)] for dim in dims]
    passes = sum(max(1, math.ceil(math.log2(max(n, 2)) / _FFT_BITS)) for n in lengths)
    figures = tables.figures
    rate = figures.number("kernels.fft") * figures.number("bandwidth.memory")
    moving = (nbytes + (passes - 1) * between) / rate
    count = math.prod(larger) * sum(math.log2(max(n, 2)) for n in lengths)
    times = 5.0 if len(halves) == 2 else 2.5  # of real numbers: half of it
    dtype = real_dtype(halves[0].dtype)
    computing = times * count / figures.number(f"flops.{dtype}", "flops.float32")
    seconds = max(passes * tables.floor, moving, computing)
    if "c2r" in op.name and len(lengths) > 1:
        seconds += price_contiguous(tables, source)
    if scalars.get("normalization"):
        seconds += tables.by_bytes("elementwise_1", 2 * tensor_bytes(result))
    return seconds


# Operators whose kernels depend on more than the bytes.
BY_NAME: Mapping[str, Callable[[ByteTables, Op, int], float]] = {
    "_softmax_backward_data": price_softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _bag_backward,
    "_embedding_bag_dense_backward": _bag_backward,
    "_thnn_fused_gru_cell_backward": _cell_backward,
    "_thnn_fused_lstm_cell_backward_impl": _cell_backward,
    "native_group_norm": price_group_norm,
    "native_group_norm_backward": price_group_norm,
    "index": _gathered,
    "index_select": _gathered,
    "embedding": _gathered,
    "scatter": _scattered,
    "scatter_": _scattered,
    "adaptive_max_pool2d": _adaptive_max_pool,
    "adaptive_max_pool2d_backward": _adaptive_max_pool_backward,
    "select_backward": price_part_backward,
    "slice_backward": price_part_backward,
    "roll": price_roll,
    "constant_pad_nd": price_padding,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _fft),
}
