"""What torch does otherwise on CUDA than on a CPU, before a kernel is chosen.

Tensors of the rehearsed device are ``cpu`` to torch's C++ (see ``_torch.fake_device``), so
functions that look at the device there would take the CPU's way: attention, dropout, group
and RMS norm, recurrent layers, and autocast's lists. While this is in force, they take
CUDA's.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchspmd import _torch
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recurrent import META_KERNELS, recurrent_kernels

__all__ = ["cuda_autocast", "cuda_kernels"]

_aten = torch.ops.aten

# Of masks of flex_attention: about how many rows of blocks are looked at, and the part of
# scores up to which a kernel is as fast as a causal one.
_SAMPLED, _MOSTLY = 24, 0.75


@contextlib.contextmanager
def cuda_kernels(recorder: Recorder) -> Iterator[None]:
    """Choose among kernels as CUDA does.

    Args:
        recorder: Told what is taken for something else.
    """
    with contextlib.ExitStack() as stack:
        kernels = {
            "scaled_dot_product_attention": _attention,
            "dropout": _dropout,
            "group_norm": _group_norm,
            "ctc_loss.Tensor": _ctc_loss,
            "pixel_shuffle": _pixel_shuffle,
            "pixel_unshuffle": _pixel_unshuffle,
            **recurrent_kernels(),
        }
        if hasattr(_aten, "_fused_rms_norm"):
            kernels["rms_norm"] = _rms_norm
        _implement(stack, "AutogradCPU", kernels)
        _implement(stack, "Meta", META_KERNELS)
        stack.enter_context(cuda_autocast())
        stack.enter_context(_torch.flex_attention_by(_flex_attention(recorder)))
        # Weights of recurrent layers stay apart; as large as the buffer that CUDA has.
        stack.enter_context(
            mock.patch.object(torch.nn.RNNBase, "flatten_parameters", lambda self: None)
        )
        yield


def _implement(stack: contextlib.ExitStack, key: str, kernels: dict[str, Any]) -> None:
    """Replace kernels of torch until the stack is closed."""
    library = torch.library.Library("aten", "IMPL", key)
    stack.callback(_torch.remove_library, library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name, kernel in kernels.items():
            # Some of torch's own are from Python, which it protects from others.
            library.impl(name, kernel, allow_override=True)


def _autocast_of_cuda() -> dict[str, Any]:
    """What autocast does on CUDA by operator; each once, since torch refuses a second."""
    only_on_cpu = _torch.autocast_names("cpu") - _torch.autocast_names("cuda")
    kernels: dict[str, Any] = dict.fromkeys(
        only_on_cpu, torch.library.fallthrough_kernel
    )
    # Of cross entropy, for one, CUDA casts the second half only.
    for names, make in (
        (_SINGLE, _in_single),
        (_ONLY_ON_CPU, _passed_by),
        (_SINGLE_RESULT, _with_single_result),
    ):
        for name in names:
            operator = _torch.find_overload(name)
            if operator is not None:
                kernels[_torch.library_name(operator)] = make(operator)
    return kernels


# ----------------------------------------------------------------------------
# Attention, dropout, RMS norm


def _attention(  # noqa: PLR0913  # torch's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not _torch.is_device_tensor(query):
        return _aten.scaled_dot_product_attention.default.decompose(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if _flash_fits(query, key, value, attn_mask):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _cudnn_fits(query, key, value, attn_mask):
        return _cudnn(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if _efficient_fits(query, key, value, attn_mask):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _aten._scaled_dot_product_attention_math.default(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _flash_fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == 4
        and query.size(-1) == key.size(-1) == value.size(-1) <= 256
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.size(-1)
    if missing := -width % 8:  # the kernel wants a multiple of 8
        scale = scale or width**-0.5
        query, key, value = (
            torch.nn.functional.pad(x, (0, missing)) for x in (query, key, value)
        )
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result[..., :width] if missing else result


def _cudnn_fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> bool:
    """Whether cuDNN's kernel runs, which takes masks too; Hopper's and later GPUs have it.

    It has no gradient of a mask that is learned, such as T5's biases of positions.
    Without a mask it runs in place of ``_flash``: priced so, and as large in memory.
    """
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability()[0] >= 9
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == 4
        and query.size(-1) == key.size(-1) == value.size(-1) <= 128
        and query.size(-1) % 8 == 0
        and not (mask is not None and mask.requires_grad)
    )


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if mask is not None:
        mask = _added(mask, query.dtype)
    saves = _saves(query, key, value)
    result: torch.Tensor = _aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, mask, saves, dropout_p, is_causal, False, scale=scale
    )[0]
    return result


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores: 0 and -inf, for a mask of truth values."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(mask.logical_not(), float("-inf"))


def _saves(*tensors: torch.Tensor) -> bool:
    """Whether backward will need what forward computed."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _efficient_fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> bool:
    alignment = 16 // query.element_size()
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (mask is None or mask.stride(-1) == 1)
        and query.dim() == 4
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.size(1) == key.size(1) == value.size(1)
        and query.size(-1) % alignment == 0
        and value.size(-1) % alignment == 0
    )


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if mask is not None:
        mask = _added(mask, query.dtype)
        length = mask.size(-1)
        if missing := -length % 16:
            mask = torch.nn.functional.pad(mask, (0, missing))[..., :length]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), mask.size(-1))
    saves = _saves(query, key, value)
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, saves, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _flex_attention(recorder: Recorder) -> Callable[..., Any]:
    """The kernel that torch generates, taken for FlashAttention 2: about as fast."""

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: object,
        block_mask: Sequence[Any],
        scale: float | None,
        *others: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, ...]:
        with recorder.unrecorded():
            part = _part_computed(block_mask, query.size(2), key.size(2))
        is_half = part is None or part <= _MOSTLY
        if part is None:
            part, why = 0.5, "its mask could not be looked at"
        else:
            if is_half:
                part /= 1 + block_mask[-3] / query.size(2)
            why = "those of the blocks that its mask keeps"
        recorder.values.note(
            f"flex_attention is priced as a compiled FlashAttention 2, with {part:.1%} of "
            f"its scores: {why}."
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), recorder.attending(part):
            result = _flash(query, key, value, 0.0, is_half, scale)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return result, sums, sums

    return kernel


def _part_computed(block_mask: Sequence[Any], rows: int, columns: int) -> float | None:
    """The part of all scores that lies in blocks of a mask; None: it cannot be told."""
    _, _, partly, places, fully, *_, height, width, mask_mod = block_mask
    counts = [partly] if fully is None else [partly, fully]
    known = [real for each in counts if (real := _known(each)) is not None]
    if len(known) == len(counts):
        blocks = partly.numel() * places.size(-1)
        return min(1.0, sum(int(each.clamp_min(0).sum()) for each in known) / blocks)
    # Three rows of some blocks, and three columns of each.
    each = max(1, -(-rows // height) // _SAMPLED)
    row = _within(torch.arange(each // 2 * height, rows, each * height), height, rows)
    column = _within(torch.arange(0, columns, width), width, columns)
    one = torch.tensor(0)
    try:
        kept = _known(mask_mod(one, one, row[:, None], column[None, :]))
    except (
        Exception
    ):  # whatever a function of the user's raises for tensors of the host
        return None
    if kept is None:  # such as of numbers of documents
        return None
    kept = kept.broadcast_to(len(row), len(column)).bool()
    touched = kept.view(len(row) // 3, 3, len(column) // 3, 3).any(3).any(1)
    return float(touched.float().mean())


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    return _torch.known_tensor(tensor) if _torch.is_device_tensor(tensor) else tensor


def _within(starts: torch.Tensor, size: int, end: int) -> torch.Tensor:
    """The first, a middle and the last place of blocks that begin there."""
    parts = torch.tensor([0, size // 2, size - 1])
    return (starts[:, None] + parts).clamp_max(end - 1).flatten()


def _dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    if p == 0 or not train or not input.numel():
        return input  # torch's decomposition in Python makes a copy
    if p < 1 and _torch.is_device_tensor(input):
        return torch.native_dropout(input, p, train)[0]
    return _aten.dropout.default.decompose(input, p, train)


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if _torch.is_device_tensor(input):
        input = input.contiguous()  # CPUs keep channels last
    return _aten.group_norm.default.decompose(
        input, num_groups, weight, bias, eps, cudnn_enabled
    )


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    given = (log_probs, targets, input_lengths, target_lengths, blank)
    if not _torch.is_device_tensor(log_probs):
        return _aten.ctc_loss.Tensor.decompose(*given, reduction, zero_infinity)
    losses: torch.Tensor = _aten._ctc_loss.Tensor(*given, zero_infinity)[0]
    if reduction == 1:
        return (losses / target_lengths.to(losses.device).clamp_min(1)).mean()
    return losses.sum() if reduction == 2 else losses


def _pixel_shuffle(self: torch.Tensor, upscale_factor: int) -> Any:
    return _Shuffled.apply(self, upscale_factor, True)


def _pixel_unshuffle(self: torch.Tensor, downscale_factor: int) -> Any:
    return _Shuffled.apply(self, downscale_factor, False)


class _Shuffled(torch.autograd.Function):
    """CUDA copies over six dimensions, and the result has channels first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int, up: bool) -> torch.Tensor:
        ctx.factor, ctx.up = factor, up
        with _torch.below_autograd():
            return _shuffled(x, factor, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Shuffled.apply(grad, ctx.factor, not ctx.up), None, None


def _shuffled(x: torch.Tensor, factor: int, up: bool) -> torch.Tensor:
    *first, channels, height, width = x.shape
    kept = range(len(first) + 1)
    last = len(first) + 1
    if up:
        parts = x.reshape(*first, channels // factor**2, factor, factor, height, width)
        moved = parts.permute(*kept, last + 2, last, last + 3, last + 1)
        sizes = (channels // factor**2, height * factor, width * factor)
    else:
        parts = x.reshape(
            *first, channels, height // factor, factor, width // factor, factor
        )
        moved = parts.permute(*kept, last + 1, last + 3, last, last + 2)
        sizes = (channels * factor**2, height // factor, width // factor)
    copied = moved.clone(memory_format=torch.contiguous_format)
    return copied.view(*first, *sizes)


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    fused = weight is None or weight.dtype == input.dtype
    if fused and _torch.is_device_tensor(input):
        return _FusedRMSNorm.apply(input, list(normalized_shape), weight, eps)
    return _aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)


class _FusedRMSNorm(torch.autograd.Function):
    """The fused kernel, which torch has a derivative for on CUDA only."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        """The normalised tensor."""
        with _torch.below_autograd():
            result, rstd = _aten._fused_rms_norm.default(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradients of input and weight."""
        input, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a penalty on gradients, as CUDA's
            return _differentiable(grad, input, ctx.shape, weight, ctx.eps)
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        grad = grad.contiguous()
        with _torch.below_autograd():
            grads = _aten._fused_rms_norm_backward.default(
                grad, input, ctx.shape, rstd, weight, needed
            )
        return grads[0], None, grads[1], None


def _differentiable(
    grad: torch.Tensor,
    input: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, None, torch.Tensor | None, None]:
    """Gradients of input and weight that have gradients themselves."""
    dims = tuple(range(-len(shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    rstd = (input.square().mean(dims, keepdim=True) + eps).rsqrt()
    normed = input * rstd
    scaled = grad if weight is None else grad * weight
    mean = (scaled * normed).mean(dims, keepdim=True)
    of_weight = None if weight is None else (grad * normed).sum_to_size(weight.shape)
    return rstd * (scaled - normed * mean), None, of_weight, None


# ----------------------------------------------------------------------------
# Autocast: what runs in single precision on CUDA. What runs in lower precision is the
# same on both.

_SINGLE = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
""".split()
_SINGLE_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm sum sum.dim_IntList
""".split()


# On autocast's list of the CPU only; made of operators that are on CUDA's.
_ONLY_ON_CPU = ["cross_entropy_loss"]


def _passed_by(operator: Any) -> Any:
    """A kernel that leaves autocast to the operators inside."""
    return operator.decompose


def _in_single(operator: Any) -> Any:
    """A kernel that runs the operator on float32 copies of what is shorter."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _torch.no_autocast():
            return operator(
                *map(_to_single, args),
                **{name: _to_single(value) for name, value in kwargs.items()},
            )

    return kernel


def _with_single_result(operator: Any) -> Any:
    """A kernel that asks the operator for a float32 result, where it asks for none."""

    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_short(input) and kwargs.get("dtype") is None:
            names = _torch.argument_names(operator)
            place = names.index("dtype") - 1
            if place >= len(args) or args[place] is None:
                args = args[:place]
                kwargs = {**kwargs, "dtype": torch.float32}
        with _torch.no_autocast():
            return operator(input, *args, **kwargs)

    return kernel


def _is_short(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (
        torch.float16,
        torch.bfloat16,
    )


def _to_single(value: Any) -> Any:
    return value.float() if _is_short(value) else value


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """What is set for ``cuda`` holds for ``cpu`` too, which C++ takes the device for.

    CUDA's lists are in force from the first time on that a script asks for them: one that
    asks for autocast of the CPU keeps the CPU's.
    """
    enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    has_lists = False

    def enable_both(device: Any, enabled: bool | None = None) -> None:
        nonlocal has_lists
        if enabled is None:  # as in torch.set_autocast_enabled(True)
            device, enabled = "cuda", device
        enable(device, enabled)
        if device == "cuda":
            enable("cpu", enabled)
            if enabled and not has_lists:
                has_lists = True
                _implement(stack, "AutocastCPU", _autocast_of_cuda())

    def choose_both(device: str, dtype: torch.dtype) -> None:
        choose(device, dtype)
        if device == "cuda":
            choose("cpu", dtype)

    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(torch, "set_autocast_enabled", enable_both),
        mock.patch.object(torch, "set_autocast_dtype", choose_both),
    ):
        try:
            yield
        finally:
            enable("cpu", before[0])
            choose("cpu", before[1])
