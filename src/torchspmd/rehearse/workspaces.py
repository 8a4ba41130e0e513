"""Memory that CUDA kernels take while they run, and that no tensor shows."""

from collections.abc import Callable
from math import prod

from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = ["workspace_bytes"]

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


def workspace_bytes(op: Op) -> int:
    """Bytes that the operator's kernels take for as long as they run."""
    rule = _RULES.get(op.name)
    return rule(op) if rule is not None else 0


def _nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * _SIZES.get(spec.dtype, 1)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(op: Op) -> int:
    """The gradient of queries in single precision, and a number for each row.

    Keys' and values' gradients for each query head, where several heads share them.
    """
    _, query, key, *_ = op.inputs
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    nbytes = 4 * rows * _up(width, 32) + 4 * rows
    if key.shape[1] != heads:
        nbytes += 2 * batch * heads * key.shape[2] * width * _SIZES[key.dtype]
    return nbytes


def _efficient_backward(op: Op) -> int:
    """A number for each row; the gradient of queries, where it is shorter than single."""
    _, query, *_ = op.inputs
    batch, heads, length, width = query.shape
    nbytes = 4 * batch * heads * length
    if query.dtype != "float32":
        nbytes += 4 * batch * heads * length * width
    return nbytes


def _embedding_backward(op: Op) -> int:
    """Indices are sorted; rows of one index are added up in parts."""
    grad, indices, *_ = op.inputs
    count, width = prod(indices.shape), grad.shape[-1]
    if count <= 3072:
        return 0
    weights = op.outputs[0].shape[0]
    segments = count // 10 + min(count, weights)
    return 4 * segments * width + 8 * count * 6


def _index_put(op: Op) -> int:
    """Linear indices, sorted."""
    return 8 * 4 * max((prod(s.shape) for s in op.inputs[1:-1]), default=0)


def _sort(op: Op) -> int:
    """A second buffer of keys and places."""
    return 2 * sum(map(_nbytes, op.inputs[:1])) + 8 * prod(op.inputs[0].shape)


_RULES: dict[str, Callable[[Op], int]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._index_put_impl_.default": _index_put,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
}
