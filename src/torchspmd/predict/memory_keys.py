"""Which table of a hardware file prices an operator that memory bounds."""

import math
from collections.abc import Callable, Sequence

from torchspmd.predict.traffic import (
    base_name,
    foreach_lists,
    is_contiguous,
    tensor_bytes,
)
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = ["has_key", "memory_key"]

_REDUCING = frozenset(
    """
    all amax amin any argmax argmin aminmax cummax cumsum linalg_vector_norm logsumexp
    max mean min norm prod std sum var var_mean _safe_softmax topk sort argsort
    nll_loss_forward nll_loss_backward _softmax _softmax_backward_data _log_softmax
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward
    _fused_rms_norm _fused_rms_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward _native_batch_norm_legit
    _batch_norm_with_update batch_norm_backward _batch_norm_impl_index
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward mean_backward histc bincount
    nonzero unique_dim _unique2 multinomial mse_loss mse_loss_backward dot
    binary_cross_entropy_with_logits binary_cross_entropy smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss _local_scalar_dense item equal
    """.split()
)

# Figures under other names than the operator's.
_KEYS = {
    "zero_": "fill",
    "fill_": "fill",
    "zeros": "fill",
    "ones": "fill",
    "full": "fill",
    "zeros_like": "fill",
    "ones_like": "fill",
    "full_like": "fill",
    "new_zeros": "fill",
    "normal_": "random",
    "uniform_": "random",
    "randn": "random",
    "rand": "random",
    "randint": "random",
    "bernoulli_": "random",
    "cat": "concatenate",
    "stack": "concatenate",
    "index_put_": "index_put",
    "_index_put_impl_": "index_put",
    "index_add_": "index_add",
    "index_select": "index",
    "silu_": "silu",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "_batch_norm_impl_index": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "max_pool3d_with_indices": "max_pool2d_with_indices",
    "argsort": "sort",
    "_safe_softmax": "_softmax",
}


def has_key(base: str) -> bool:
    """Whether an operator of this name reduces, or is in the table of its like."""
    return base in _REDUCING or base in _KEYS


def memory_key(op: Op, has: Callable[[str], bool]) -> str:
    """The table that an operator is priced by: its own, or that of its like."""
    base = base_name(op.name)
    name = _KEYS.get(base, base)
    if name == "concatenate" and has("concatenate_strided"):
        if any(not is_contiguous(spec) for spec in op.inputs):
            return "concatenate_strided"
    if name.startswith("_fused_") and has(f"{name.rstrip('_')}_{op.inputs[0].dtype}"):
        return f"{name.rstrip('_')}_{op.inputs[0].dtype}"
    if has(name):
        return name
    if base.startswith("_foreach_"):
        return f"foreach_{foreach_lists(op.name)}"
    if base in ("_to_copy", "copy_", "clone", "contiguous") and op.inputs:
        target = op.outputs[0] if op.outputs else op.inputs[0]
        return _copy_key(op.inputs[-1], target, has)
    if base in _REDUCING:
        return _reduction_key(op)
    if has("strided") and _is_strided(op):
        return "strided"
    if base.endswith("_") and len(op.inputs) > 1:
        return "inplace_2"
    large = [spec for spec in op.inputs if _fills(spec, op.outputs)]
    if len(op.inputs) > len(large) > 0 and len(op.inputs) > 1:
        return "broadcast"
    return f"elementwise_{min(max(len(op.inputs), 1), 3)}"


def _is_strided(op: Op) -> bool:
    """Arguments of the result's shape that do not lie as the result does, or have gaps."""
    if not op.outputs:
        return False
    result = op.outputs[0]
    return any(
        spec.stride != result.stride or not _is_dense(spec)
        for spec in op.inputs
        if spec.shape == result.shape and math.prod(spec.shape) > 1
    )


def _is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory, in any order of the dimensions."""
    expected = 1
    pairs = zip(spec.stride, spec.shape, strict=False)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _fills_alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two tensors of a shape lie in the same order, gaps aside."""
    order = [
        sorted(range(len(spec.shape)), key=lambda at: -spec.stride[at])
        for spec in (one, other)
    ]
    return order[0] == order[1]


def _fills(spec: TensorSpec, outputs: Sequence[TensorSpec]) -> bool:
    return not outputs or spec.shape == outputs[0].shape


def _copy_key(
    source: TensorSpec, target: TensorSpec, has: Callable[[str], bool]
) -> str:
    if source.stride != target.stride and source.shape == target.shape:
        if source.stride and target.stride and source.stride[-1:] != target.stride[-1:]:
            return "transpose"
        if has("strided") and not _fills_alike(source, target):
            return "strided"
    if source.dtype != target.dtype:
        wider = tensor_bytes(target) > tensor_bytes(source)
        return "cast" if wider else "cast_down"
    return "elementwise_1"


def _reduction_key(op: Op) -> str:
    if not op.outputs or not op.inputs:
        return "reduce"
    source, result = op.inputs[0].shape, op.outputs[0].shape
    if math.prod(result) <= 1:
        return "reduce"
    kept_last = bool(result) and bool(source) and result[-1] == source[-1]
    return "reduce_columns" if kept_last else "reduce_rows"
