"""Memory that CUDA kernels take while they run, and that no tensor shows."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from torchspmd.rehearse.recording import Op, TensorSpec
from torchspmd.rehearse.reductions import reduction_buffers

__all__ = ["Processor", "allocation_order", "runs_cudnn_attention", "workspaces"]


class Processor(NamedTuple):
    """What kernels choose their launches by."""

    capability: tuple[int, int] = (9, 0)
    processors: int = 132


_CUDNN_BYTES = 256  # that its attention adds
# cuDNN's gradients of 1 x 1 weights, as an H200's allocator recorded them: partial sums in
# single precision, and the most that they take, for each byte of an element. With fewer
# places for each part it takes copies instead: 196 had parts, 49 had none, and the bound
# between them is a guess.
_PARTS = 64
_MOST_PARTS = 1 << 24
_PLACES_OF_A_PART = 128

_SIZES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
}


Blocks = tuple[int, ...]


def workspaces(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """Blocks that the operator's kernels take, one kernel after the other.

    Those of a kernel are freed before those of the next one are taken.
    """
    rule = _RULES.get(op.name)
    return rule(op, gpu) if rule is not None else ()


def allocation_order(op_name: str, count: int, *, is_cudnn: bool) -> Sequence[int]:
    """In which order a kernel makes its results, where it is not that of the results."""
    if op_name == "aten.native_dropout.default":
        return (1, 0)  # the mask first
    if is_cudnn and op_name == _FLASH:
        return (*range(2, count), 0, 1)  # seed and offset first
    return range(count)


def runs_cudnn_attention(op: Op, gpu: Processor) -> bool:
    """From Hopper on torch prefers cuDNN's kernel to FlashAttention's, where it may."""
    return gpu.capability >= (9, 0) and bool(dict(op.scalars).get("cudnn", True))


def _nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * _SIZES.get(spec.dtype, 1)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cudnn_forward(op: Op, gpu: Processor) -> Sequence[Blocks]:
    return [(_CUDNN_BYTES,)] if runs_cudnn_attention(op, gpu) else []


def _flash_backward(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """The gradient of queries in single precision, and a number for each row.

    Keys' and values' gradients for each query head, where several heads share them.
    FlashAttention rounds rows and columns up; cuDNN does not.
    """
    _, query, key, *_ = op.inputs
    batch, heads, length, width = query.shape
    is_cudnn = runs_cudnn_attention(op, gpu)
    rows = batch * heads * (length if is_cudnn else _up(length, 128))
    nbytes = 4 * rows * (width if is_cudnn else _up(width, 32)) + 4 * rows
    if key.shape[1] != heads:
        nbytes += 2 * batch * heads * key.shape[2] * width * _SIZES[key.dtype]
    return [(nbytes + _CUDNN_BYTES * is_cudnn,)]


def _efficient_backward(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """A number for each row, from a product; queries' gradient in tiles of 64 rows."""
    _, query, *_ = op.inputs
    batch, heads, length, width = query.shape
    rows = 4 * batch * heads * length
    tiles = batch * heads * _up(length, 64) // 64
    return [(rows * width, rows, rows), (rows, tiles * (4 * 64 * width + 16))]


def _embedding_backward(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """Indices are sorted; rows of one index are added up in parts of ten.

    Compiled code adds to a table in 32 bits, which is cast then: beside a result in 16 bits
    that is as much again.
    """
    grad, indices, *_ = op.inputs
    (table,) = op.outputs
    if op.region is not None:
        return [(2 * prod(table.shape),)] if _SIZES[table.dtype] == 2 else []
    count, width = prod(indices.shape), grad.shape[-1]
    if count <= 3072:
        return []
    parts = count // 10 + min(count, table.shape[0])
    places = [8 * count] * 3 + [8] + [8 * count] * 2 + [8]
    return [(*places, 8 * parts, 4 * parts * _up(width, 32))]


def _index_put(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """Linear indices and their places, sorted, where equal ones are added up."""
    if not dict(op.scalars).get("accumulate"):
        return []
    count = max((prod(spec.shape) for spec in op.inputs[1:-1]), default=0)
    return [(8 * count,) * 5]


def _sort(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """A second buffer of keys and places."""
    return [(2 * sum(map(_nbytes, op.inputs[:1])) + 8 * prod(op.inputs[0].shape),)]


def _reduce(op: Op, gpu: Processor) -> Sequence[Blocks]:
    (spec, *_) = op.inputs
    dims = dict(op.scalars).get("dim", ())
    dims = (dims,) if isinstance(dims, int) else dims
    assert isinstance(dims, tuple)
    rank = len(spec.shape)
    reduced = {int(dim) % rank for dim in dims} if rank else set()
    return _reduction(spec, reduced or set(range(rank)), gpu)


def _reduction(spec: TensorSpec, reduced: set[int], gpu: Processor) -> Sequence[Blocks]:
    if len(spec.stride) != len(spec.shape):
        return []
    itemsize = max(4, _SIZES.get(spec.dtype, 1))
    buffers = reduction_buffers(
        spec.shape, spec.stride, reduced, gpu.processors, itemsize
    )
    return [buffers] if buffers else []


def _convolution(op: Op, gpu: Processor) -> Sequence[Blocks]:
    input, weight, *_ = op.inputs
    if _is_product(op, weight):
        return []
    return _channels_last_copies(op, input, weight, op.outputs[0])


def _convolution_backward(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """As in forward, for each gradient; and the sum that is the gradient of the bias."""
    grad, input, weight, *_ = op.inputs
    wanted = dict(op.scalars).get("output_mask", ())
    assert isinstance(wanted, tuple)
    copies = _channels_last_copies(op, input, weight, grad)
    result: list[Blocks] = []
    if wanted[0] and not _is_product(op, weight):
        result += copies
    if wanted[1]:
        places = prod(grad.shape) // grad.shape[1]
        if _is_product(op, weight) and places >= _PARTS * _PLACES_OF_A_PART:
            most = _MOST_PARTS * _SIZES.get(weight.dtype, 4)
            result.append((min(_PARTS * 4 * prod(weight.shape), most),))
        else:
            result += copies
    if wanted[2]:
        result += _reduction(grad, set(range(len(grad.shape))) - {1}, gpu)
    if not _is_contiguous(grad) and not _is_channels_last(grad):
        result = [(_nbytes(grad), *blocks) for blocks in result]
    return result


def _is_product(op: Op, weight: TensorSpec) -> bool:
    """Convolutions of single places run as matrix products, on the layout that there is."""
    strides = _tuple(dict(op.scalars).get("stride", 1))
    return prod(weight.shape[2:]) == 1 and set(strides) <= {1}


def _recurrent(op: Op, gpu: Processor) -> Sequence[Blocks]:
    """The gates of one layer over all time steps, or their gradients.

    An H200 took as much in backward beside what is kept for it (three layers of an LSTM).
    """
    input, weight, *_ = op.inputs
    rows = prod(input.shape[:-1])
    return [(rows * weight.shape[0] * _SIZES.get(input.dtype, 4),)]


def _channels_last_copies(
    op: Op, input: TensorSpec, weight: TensorSpec, output: TensorSpec
) -> list[Blocks]:
    """Most of cuDNN's kernels want channels last, and as many as fill 16 bytes.

    Which kernel it chooses, and what else that one takes, is not known.
    """
    if _is_channels_last(input) or dict(op.scalars).get("groups", 1) != 1:
        return []
    filled = 16 // _SIZES.get(input.dtype, 4)
    copied = [input, output] + [weight] * (prod(weight.shape[2:]) > 1)
    nbytes = sum(
        _nbytes(spec) // spec.shape[1] * _up(spec.shape[1], filled) for spec in copied
    )
    return [(nbytes + 16,)]


def _tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_contiguous(spec: TensorSpec) -> bool:
    return _is_laid_out(spec, range(len(spec.shape)))


def _is_channels_last(spec: TensorSpec) -> bool:
    rank = len(spec.shape)
    return spec.shape[1] > 1 and _is_laid_out(spec, (0, *range(2, rank), 1))


def _is_laid_out(spec: TensorSpec, order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in this order."""
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] != 1 and spec.stride[dim] != expected:
            return False
        expected *= spec.shape[dim]
    return True


_FLASH = "aten._scaled_dot_product_flash_attention.default"
_RULES: dict[str, Callable[[Op, Processor], Sequence[Blocks]]] = {
    _FLASH: _cudnn_forward,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten._cudnn_rnn.default": _recurrent,
    "aten._cudnn_rnn_backward.default": _recurrent,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._index_put_impl_.default": _index_put,
    "aten.index_put.default": _index_put,
    "aten.index_put_.default": _index_put,
    "aten.linalg_vector_norm.default": _reduce,
    "aten.mean.default": _reduce,
    "aten.mean.dim": _reduce,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.sum.default": _reduce,
    "aten.sum.dim_IntList": _reduce,
}
