"""Bytes that an operator moves and floating-point operations that it does.

Counted from shapes alone, the same way for a recorded operator and for one that is
measured on a GPU: a table of seconds by bytes is only good for those who count alike.
"""

import math
from collections.abc import Mapping, Sequence

from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = [
    "base_name",
    "bytes_moved",
    "foreach_lists",
    "is_contiguous",
    "item_bytes",
    "matmul_shape",
    "op_flops",
    "real_dtype",
    "tensor_bytes",
]

_TORCHS = frozenset("aten prim prims fsdp inductor c10d _c10d_functional".split())

_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
_REAL_DTYPES = {
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
}
# Read only the rows that are asked for: indices, then a read and a write for each result.
_GATHERING = frozenset(
    """
    embedding _embedding_bag index index_select gather _unsafe_index take_along_dim
    """.split()
)
# Write into rows of a tensor that stays where it is.
_SCATTERING = frozenset(
    {
        "index_put_",
        "_index_put_impl_",
        "index_add_",
        "index_copy_",
        "scatter_",
        "scatter_add_",
    }
)
# Overwrite their first argument without reading it.
_OVERWRITING = frozenset(
    {
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "trunc_normal_",
        "arange",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "empty_like",
    }
)
# Where the overload does not say it.
_FOREACH_LISTS = {
    "_foreach_addcmul_": 3,
    "_foreach_addcdiv_": 3,
    "_foreach_lerp_": 2,
    "_foreach_copy_": 2,
}
# Parts of the arguments of a fused optimizer that it writes: all but the gradients.
_FUSED_WRITES = {
    "_fused_adam_": 3 / 4,
    "_fused_adamw_": 3 / 4,
    "_fused_sgd_": 2 / 3,
    "_fused_adagrad_": 2 / 3,
}


def base_name(name: str) -> str:
    """``aten.mm.default`` is ``mm``; what other libraries call so may be anything.

    >>> base_name("aten.mm.default"), base_name("mylib.mm.default")
    ('mm', '')
    """
    space, *rest = name.split(".")
    return rest[0] if rest and space in _TORCHS else ""


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of memory behind a tensor; a dimension of stride 0 is there once."""
    count = math.prod(spec.shape)
    if len(spec.stride) == len(spec.shape):  # no strides: not a strided layout
        pairs = zip(spec.shape, spec.stride, strict=True)
        count = math.prod(size for size, stride in pairs if stride or not size)
    return count * item_bytes(spec)


def item_bytes(spec: TensorSpec) -> int:
    """Bytes of one element."""
    return _ITEM_BYTES.get(spec.dtype, 4)


def real_dtype(dtype: str) -> str:
    """Of the two numbers of a complex one; empty for any other.

    >>> real_dtype("complex64"), real_dtype("float32")
    ('float32', '')
    """
    return _REAL_DTYPES.get(dtype, "")


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether the last dimension comes first in memory, and so on."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def bytes_moved(
    name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> int:
    """Bytes that the operator reads and writes, each argument once."""
    base = base_name(name)
    read = [tensor_bytes(spec) for spec in inputs]
    written = sum(map(tensor_bytes, outputs))
    if base in _GATHERING:
        return sum(read[1:]) + 2 * written
    if base in _SCATTERING:
        return 3 * sum(read[1:])
    if base in _OVERWRITING:
        return sum(read[1:]) + (written or sum(read[:1]))
    if base in _FUSED_WRITES:
        return int(sum(read) * (1 + _FUSED_WRITES[base]))
    if base.startswith("_foreach_") and base.endswith("_") and not outputs:
        return _foreach_bytes(name, inputs)
    return sum(read) + written


def foreach_lists(name: str) -> int:
    """How many lists of tensors a foreach operator takes.

    >>> foreach_lists("aten._foreach_mul_.Scalar"), foreach_lists("aten._foreach_add_.List")
    (1, 2)
    """
    return _FOREACH_LISTS.get(base_name(name), 2 if name.endswith(".List") else 1)


def _foreach_bytes(name: str, inputs: Sequence[TensorSpec]) -> int:
    """Of one that writes its first list.

    What is in two lists, such as a gradient that is squared, is read once.
    """
    lists = foreach_lists(name)
    count = len(inputs) // lists
    is_copy = base_name(name) == "_foreach_copy_"
    moved = 0
    for place in range(count):
        parts = inputs[place : lists * count : count]
        read = parts[is_copy:]
        known = {part for part in read if part.storage >= 0}
        unknown = [part for part in read if part.storage < 0]
        moved += sum(map(tensor_bytes, (*known, *unknown, parts[0])))
    return moved


# ----------------------------------------------------------------------------
# Floating-point operations


def matmul_shape(op: Op) -> tuple[int, int, int, int] | None:
    """Batch, rows, columns and depth of a matrix product; None for anything else."""
    base = base_name(op.name)
    if base == "_grouped_mm":
        return _grouped_shape(op)
    places = {"addmm": (1, 2), "_addmm_activation": (1, 2), "baddbmm": (1, 2)}
    if base not in ("mm", "bmm", "linear", "_scaled_mm", *places):
        return None
    first, second = places.get(base, (0, 1))
    if len(op.inputs) <= second:
        return None
    left, right = op.inputs[first].shape, op.inputs[second].shape
    if base == "linear":
        return 1, math.prod(left[:-1]), right[0], left[-1]
    if base in ("bmm", "baddbmm"):
        return left[0], left[1], right[2], left[2]
    return 1, left[0], right[1], left[1]


def _grouped_shape(op: Op) -> tuple[int, int, int, int] | None:
    """One product for each group: of rows, or in the gradient of weights, of the depth."""
    if len(op.inputs) < 3:
        return None
    left, right, ends = (spec.shape for spec in op.inputs[:3])
    groups = max(ends[0], 1)
    if len(left) == 2 and len(right) == 3:
        return groups, left[0] // groups, right[2], left[1]
    if len(left) == len(right) == 2:
        return groups, left[0], right[1], left[1] // groups
    return left[0], left[1], right[-1], left[2]


# By cuDNN's number of the kind: of a plain network, of an LSTM, of a GRU.
_GATES = (1, 1, 4, 3)


def recurrent_products(op: Op) -> tuple[int, list[tuple[int, int, int, int]]] | None:
    """Cells of recurrent layers over all time steps, and products; None for anything else.

    The first product is made once for each cell. The others, of the inputs and of the
    gradients of weights, are made once for each layer.
    """
    base = base_name(op.name)
    if base not in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return None
    facts = _scalars(op)
    mode, hidden, num_layers = (
        int(str(facts[name])) for name in ("mode", "hidden_size", "num_layers")
    )
    directions = 2 if facts.get("bidirectional") else 1
    *_, inputs = shape = op.inputs[0].shape
    rows, gates = math.prod(shape[:-1]), _GATES[mode] * hidden
    packed = facts.get("batch_sizes")  # of packed sequences, by time step
    steps = len(packed) if isinstance(packed, tuple) else shape[0]
    batch = -(-rows // max(steps, 1))
    backward = base.endswith("_backward")
    once: list[tuple[int, int, int]] = []
    for _ in range(num_layers):
        of_layer = [(rows, gates, inputs)]
        if backward:
            of_weights = [(gates, inputs, rows), (gates, hidden, rows)]
            of_layer = [(rows, inputs, gates), *of_weights]
        once += directions * of_layer
        inputs = directions * hidden
    each = (batch, hidden, gates) if backward else (batch, gates, hidden)
    cells = steps * num_layers * directions
    return cells, [(1, *each), *((1, *shape) for shape in once)]


def op_flops(op: Op) -> float:
    """Multiplications and additions of products, attention and convolutions; else 0.

    Causal attention does half of the work, and is counted so.
    """
    shape = matmul_shape(op)
    if shape is not None:
        return 2.0 * math.prod(shape) * (4 if real_dtype(op.inputs[-1].dtype) else 1)
    recurrent = recurrent_products(op)
    if recurrent is not None:
        cells, (each, *once) = recurrent
        return 2.0 * (cells * math.prod(each) + sum(map(math.prod, once)))
    base = base_name(op.name)
    if "attention" in base:
        return _attention_flops(op, backward="backward" in base)
    if base.startswith(("convolution", "cudnn_convolution")):
        return _convolution_flops(op, backward="backward" in base)
    return 0.0


def _scalars(op: Op) -> Mapping[str, object]:
    return dict(op.scalars)


def _attention_flops(op: Op, *, backward: bool) -> float:
    # Backward has the gradient of the result first.
    tensors = [spec for spec in op.inputs if len(spec.shape) == 4]
    if len(tensors) < 3 + backward:
        return 0.0
    query, key, value = tensors[backward : backward + 3]
    batch, heads, rows, width = query.shape
    columns, value_width = key.shape[2], value.shape[3]
    flops = 2.0 * batch * heads * rows * columns * (width + value_width)
    facts = _scalars(op)
    part = facts.get("part_of_scores", 0.5 if facts.get("is_causal") else 1.0)
    flops *= float(str(part))
    # Backward: scores again, and gradients of scores, values, queries and keys.
    return flops * 2.5 if backward else flops


def _convolution_flops(op: Op, *, backward: bool) -> float:
    if backward:
        if len(op.inputs) < 3:
            return 0.0
        result, weight = op.inputs[0].shape, op.inputs[2].shape
        asked = _scalars(op).get("output_mask")
        wanted = sum(map(bool, asked[:2])) if isinstance(asked, list | tuple) else 2
    else:
        if len(op.inputs) < 2 or not op.outputs:
            return 0.0
        result, weight, wanted = op.outputs[0].shape, op.inputs[1].shape, 1
    if _scalars(op).get("transposed"):
        spatial = op.inputs[1 if backward else 0].shape[2:]
        return 2.0 * wanted * result[0] * math.prod(spatial) * math.prod(weight)
    # A weight is (outputs, inputs / groups, ...): groups are in it.
    return 2.0 * wanted * result[0] * math.prod(result[2:]) * math.prod(weight)
