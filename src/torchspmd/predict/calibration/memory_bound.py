"""Operators that memory bounds, copies, and the shortest kernel."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from torchspmd.predict.calibration.meter import (
    Call,
    Case,
    Limits,
    Measured,
    Meter,
    shuffled,
)
from torchspmd.predict.traffic import bytes_moved
from torchspmd.rehearse.recording import TensorSpec

__all__ = ["launches", "memory_bound"]

# Operators that memory bounds: [bytes, seconds]


Arguments: TypeAlias = Callable[[Meter, int], tuple[Any, ...]]


class _Operator(NamedTuple):
    """The figure that it belongs to, and arguments for about this many elements."""

    key: str
    op: Callable[..., Any]
    arguments: Arguments

    @property
    def name(self) -> str:
        """As a recording has it; the bytes are counted by it."""
        if self.key.startswith("_fused_adamw_"):
            return "aten._fused_adamw_.default"
        return str(self.op)


def _operators() -> list[_Operator]:  # noqa: C901
    aten = torch.ops.aten
    f32 = torch.float32

    def x(meter: Meter, n: int, **kwargs: Any) -> torch.Tensor:
        return meter.random(n, **kwargs)

    def matrix(meter: Meter, n: int, width: int, **kwargs: Any) -> torch.Tensor:
        width = min(width, n)
        return meter.random(max(1, n // width), width, **kwargs)

    def indices(meter: Meter, count: int, bound: int) -> torch.Tensor:
        return torch.randint(bound, (max(1, count),), device=meter.device)

    def norm(meter: Meter, n: int) -> tuple[Any, ...]:
        a = matrix(meter, n, 1024)
        w = a.shape[1]
        return a, [w], x(meter, w), x(meter, w), 1e-5

    def norm_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        a, shape, weight, bias, eps = norm(meter, n)
        _, mean, scale = aten.native_layer_norm.default(a, shape, weight, bias, eps)
        mask = [True, True, True]
        return torch.randn_like(a), a, shape, mean, scale, weight, bias, mask

    def rms(meter: Meter, n: int) -> tuple[Any, ...]:
        a = matrix(meter, n, 1024)
        return a, [a.shape[1]], x(meter, a.shape[1]), 1e-5

    def rms_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        a, shape, weight, eps = rms(meter, n)
        _, scale = aten._fused_rms_norm.default(a, shape, weight, eps)
        return torch.randn_like(a), a, shape, scale, weight, [True, True]

    def softmax_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        y = matrix(meter, n, 1024).softmax(-1)
        return torch.randn_like(y), y, -1, y.dtype

    def log_softmax(meter: Meter, n: int) -> tuple[Any, ...]:
        return matrix(meter, n, 32000, dtype=f32), 1, False

    def log_softmax_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        y = matrix(meter, n, 32000, dtype=f32).log_softmax(1)
        return torch.randn_like(y), y, 1, f32

    def loss(meter: Meter, n: int) -> tuple[Any, ...]:
        y = matrix(meter, n, 32000, dtype=f32)
        return y, indices(meter, len(y), y.shape[1]), None, 1, -100

    def loss_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        y, target, *_ = loss(meter, n)
        total = torch.tensor(float(len(y)), device=meter.device)
        grad = torch.ones((), device=meter.device)
        return grad, y, target, None, 1, -100, total

    def embedding(meter: Meter, n: int) -> tuple[Any, ...]:
        return meter.random(32000, 1024), indices(meter, n // 1024, 32000)

    def embedding_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        rows = max(1, n // 1024)
        grad = meter.random(rows, 1024)
        return grad, indices(meter, rows, 32000), 32000, -1, False

    def images(
        meter: Meter,
        n: int,
        channels: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        order: torch.memory_format = torch.contiguous_format,
    ) -> torch.Tensor:
        side = 56 if channels == 64 else 14
        batch = max(1, n // (channels * side * side))
        made = meter.random(batch, channels, side, side, dtype=dtype)
        return made.to(memory_format=order)

    def batch_norm(meter: Meter, n: int, *kind: Any) -> tuple[Any, ...]:
        a = images(meter, n, *kind)
        state = [torch.ones(a.shape[1], device=meter.device) for _ in range(4)]
        return a, *state, True, 0.1, 1e-5, True

    def batch_norm_backward(meter: Meter, n: int, *kind: Any) -> tuple[Any, ...]:
        a, weight, bias, *state = batch_norm(meter, n, *kind)
        _, mean, scale, reserve, kind = aten._batch_norm_impl_index.default(
            a, weight, bias, *state
        )
        mask, running = [True, True, True], state[:2]
        grad = torch.randn_like(a)
        return kind, a, grad, weight, *running, mean, scale, True, 1e-5, mask, reserve

    def pool(meter: Meter, n: int) -> tuple[Any, ...]:
        return images(meter, n), [3, 3], [2, 2], [1, 1]

    def pool_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        a, *shape = pool(meter, n)
        y, where = aten.max_pool2d_with_indices.default(a, *shape)
        return torch.randn_like(y), a, *shape, [1, 1], False, where

    def dropout_backward(meter: Meter, n: int) -> tuple[Any, ...]:
        return x(meter, n), x(meter, n) > 0, 1.1

    def rows_of(meter: Meter, n: int) -> tuple[Any, ...]:
        a = matrix(meter, n, 512)
        return a, [indices(meter, len(a), len(a))]

    def add_rows(meter: Meter, n: int) -> tuple[Any, ...]:
        a = matrix(meter, n, 512)
        return a, 0, indices(meter, len(a), len(a)), torch.randn_like(a)

    def put_rows(meter: Meter, n: int) -> tuple[Any, ...]:
        a = matrix(meter, n, 512)
        return a, [indices(meter, len(a), len(a))], torch.randn_like(a), True

    def heads(meter: Meter, n: int) -> torch.Tensor:
        """As attention has them: positions and heads swapped, so not contiguous."""
        return meter.random(1, max(1, n // 1024), 16, 64).transpose(1, 2)

    def strided(meter: Meter, n: int) -> tuple[Any, ...]:
        a = heads(meter, n)
        return a, torch.randn_like(a, memory_format=torch.contiguous_format)

    def strided_halves(meter: Meter, n: int) -> tuple[Any, ...]:
        a = heads(meter, n)
        return [a[..., 32:], a[..., :32]], -1

    def lists(meter: Meter, n: int, count: int, **kwargs: Any) -> tuple[Any, ...]:
        part = max(1, n // 16)
        return tuple(
            [x(meter, part, **kwargs) for _ in range(16)] for _ in range(count)
        )

    def adamw(meter: Meter, n: int, dtype: torch.dtype = f32) -> tuple[Any, ...]:
        params, grads, first, second = lists(meter, n, 4, dtype=dtype)
        for each in second:
            each.abs_()
        steps = [torch.ones((), device=meter.device) for _ in params]
        return params, grads, first, second, [], steps

    def fused_adamw(*arguments: Any) -> Any:
        return aten._fused_adamw_.default(
            *arguments,
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    cells: list[tuple[str, Callable[..., Any], Arguments]] = [
        ("fill", aten.zero_.default, lambda m, n: (x(m, n),)),
        ("elementwise_1", aten.neg.default, lambda m, n: (x(m, n),)),
        ("elementwise_1_float32", aten.neg.default, lambda m, n: (x(m, n, dtype=f32),)),
        ("elementwise_2", aten.add.Tensor, lambda m, n: (x(m, n), x(m, n))),
        (
            "elementwise_3",
            aten.addcmul.default,
            lambda m, n: (x(m, n), x(m, n), x(m, n)),
        ),
        ("inplace_2", aten.add_.Tensor, lambda m, n: (x(m, n), x(m, n))),
        (
            "broadcast",
            aten.mul.Tensor,
            lambda m, n: (a := matrix(m, n, 1024), a[0].clone()),
        ),
        ("cast", _cast, lambda m, n: (x(m, n),)),
        ("cast_down", _cast_down, lambda m, n: (x(m, n, dtype=f32),)),
        ("transpose", _transposed, lambda m, n: (matrix(m, n, 1024),)),
        ("concatenate", aten.cat.default, lambda m, n: ([x(m, n), x(m, n)],)),
        ("strided", aten.add.Tensor, strided),
        ("concatenate_strided", aten.cat.default, strided_halves),
        ("random", aten.normal_.default, lambda m, n: (x(m, n),)),
        ("reduce", aten.sum.default, lambda m, n: (x(m, n),)),
        ("reduce_rows", aten.sum.dim_IntList, lambda m, n: (matrix(m, n, 1024), [1])),
        (
            "reduce_columns",
            aten.sum.dim_IntList,
            lambda m, n: (matrix(m, n, 1024), [0]),
        ),
        ("gelu", aten.gelu.default, lambda m, n: (x(m, n),)),
        ("gelu_backward", aten.gelu_backward.default, lambda m, n: (x(m, n), x(m, n))),
        ("silu", aten.silu.default, lambda m, n: (x(m, n),)),
        ("silu_backward", aten.silu_backward.default, lambda m, n: (x(m, n), x(m, n))),
        (
            "native_dropout",
            aten.native_dropout.default,
            lambda m, n: (x(m, n), 0.1, True),
        ),
        (
            "native_dropout_backward",
            aten.native_dropout_backward.default,
            dropout_backward,
        ),
        ("native_layer_norm", aten.native_layer_norm.default, norm),
        (
            "native_layer_norm_backward",
            aten.native_layer_norm_backward.default,
            norm_backward,
        ),
        ("_fused_rms_norm", aten._fused_rms_norm.default, rms),
        (
            "_fused_rms_norm_backward",
            aten._fused_rms_norm_backward.default,
            rms_backward,
        ),
        (
            "_softmax",
            aten._softmax.default,
            lambda m, n: (matrix(m, n, 1024), -1, False),
        ),
        (
            "_softmax_backward_data",
            aten._softmax_backward_data.default,
            softmax_backward,
        ),
        ("_log_softmax", aten._log_softmax.default, log_softmax),
        (
            "_log_softmax_backward_data",
            aten._log_softmax_backward_data.default,
            log_softmax_backward,
        ),
        ("nll_loss_forward", aten.nll_loss_forward.default, loss),
        ("nll_loss_backward", aten.nll_loss_backward.default, loss_backward),
        ("embedding", aten.embedding.default, embedding),
        (
            "embedding_dense_backward",
            aten.embedding_dense_backward.default,
            embedding_backward,
        ),
        ("batch_norm", aten._batch_norm_impl_index.default, batch_norm),
        (
            "batch_norm_last",
            aten._batch_norm_impl_index.default,
            lambda m, n: batch_norm(m, n, 512, torch.bfloat16, torch.channels_last),
        ),
        (
            "batch_norm_backward_last",
            aten._batch_norm_impl_index_backward.default,
            lambda m, n: batch_norm_backward(
                m, n, 512, torch.bfloat16, torch.channels_last
            ),
        ),
        (
            "batch_norm_512",
            aten._batch_norm_impl_index.default,
            lambda m, n: batch_norm(m, n, 512),
        ),
        (
            "batch_norm_backward_512",
            aten._batch_norm_impl_index_backward.default,
            lambda m, n: batch_norm_backward(m, n, 512),
        ),
        (
            "batch_norm_2048",
            aten._batch_norm_impl_index.default,
            lambda m, n: batch_norm(m, n, 2048),
        ),
        (
            "batch_norm_backward_2048",
            aten._batch_norm_impl_index_backward.default,
            lambda m, n: batch_norm_backward(m, n, 2048),
        ),
        (
            "batch_norm_float32",
            aten._batch_norm_impl_index.default,
            lambda m, n: batch_norm(m, n, 64, f32),
        ),
        (
            "batch_norm_backward_float32",
            aten._batch_norm_impl_index_backward.default,
            lambda m, n: batch_norm_backward(m, n, 64, f32),
        ),
        (
            "batch_norm_512_float32",
            aten._batch_norm_impl_index.default,
            lambda m, n: batch_norm(m, n, 512, f32),
        ),
        (
            "batch_norm_backward_512_float32",
            aten._batch_norm_impl_index_backward.default,
            lambda m, n: batch_norm_backward(m, n, 512, f32),
        ),
        (
            "batch_norm_backward",
            aten._batch_norm_impl_index_backward.default,
            batch_norm_backward,
        ),
        ("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, pool),
        (
            "max_pool2d_with_indices_backward",
            aten.max_pool2d_with_indices_backward.default,
            pool_backward,
        ),
        ("index", aten.index.Tensor, rows_of),
        ("index_add", aten.index_add.default, add_rows),
        ("index_put", aten.index_put_.default, put_rows),
        ("topk", aten.topk.default, lambda m, n: (matrix(m, n, 4096, dtype=f32), 64)),
        ("sort", aten.sort.default, lambda m, n: (matrix(m, n, 4096, dtype=f32),)),
        ("cumsum", aten.cumsum.default, lambda m, n: (matrix(m, n, 4096), 1)),
        ("where", aten.where.self, lambda m, n: (x(m, n) > 0, x(m, n), x(m, n))),
        ("_fused_adamw_", fused_adamw, adamw),
        (
            "_fused_adamw_bfloat16",
            fused_adamw,
            lambda m, n: adamw(m, n, torch.bfloat16),
        ),
        (
            "foreach_1",
            aten._foreach_mul_.Scalar,
            lambda m, n: (*lists(m, n, 1, dtype=f32), 0.9),
        ),
        ("foreach_2", aten._foreach_add_.List, lambda m, n: lists(m, n, 2, dtype=f32)),
        (
            "foreach_3",
            aten._foreach_addcmul_.Scalar,
            lambda m, n: (*lists(m, n, 3, dtype=f32), 0.1),
        ),
        (
            "_foreach_norm",
            aten._foreach_norm.Scalar,
            lambda m, n: lists(m, n, 1, dtype=f32),
        ),
        (
            "_foreach_sqrt",
            aten._foreach_sqrt.default,
            lambda m, n: lists(m, n, 1, dtype=f32),
        ),
    ]
    return [_Operator(*cell) for cell in cells]


def _cast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32)


def _cast_down(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _spec(tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), tensor.stride(), dtype, "cuda", -1)


def _specs(value: object) -> list[TensorSpec]:
    if isinstance(value, torch.Tensor):
        return [_spec(value)]
    if isinstance(value, tuple | list):
        return [spec for each in value for spec in _specs(each)]
    return []


def memory_bound(meter: Meter, limits: Limits) -> Iterator[Case]:
    """Seconds by the bytes that an operator moves."""
    sizes = [1 << power for power in range(13, 31, 3)]
    for operator, size in shuffled(itertools.product(_operators(), sizes)):
        if 6 * size <= limits.nbytes:
            yield partial(_time_operator, operator.key, meter, operator, size)


def _time_operator(key: str, meter: Meter, operator: _Operator, size: int) -> Measured:
    arguments = operator.arguments(meter, size)
    with torch.no_grad():
        result = operator.op(*arguments)
        nbytes = bytes_moved(operator.name, _specs(arguments), _specs(result))
        seconds = meter.device_seconds(lambda: operator.op(*arguments))
    yield f"operators.{key}", (nbytes, seconds)


def launches(meter: Meter, limits: Limits) -> Iterator[Case]:
    """The shortest kernel, and copies between host and device."""
    yield partial(_time_launch, "an empty kernel", meter)
    yield partial(_time_gap, "kernels of several kinds", meter)
    for power in range(12, 31, 3):
        if 1 << power <= limits.nbytes:
            yield partial(_time_copies, "copies", meter, 1 << power)


def _time_launch(label: str, meter: Meter) -> Measured:
    """The shortest kernel."""
    del label
    small = meter.random(16)
    out = torch.empty_like(small)
    yield "launch.kernel", meter.device_seconds(lambda: torch.neg(small, out=out))


def _time_gap(label: str, meter: Meter) -> Measured:
    """How much later kernels of different kinds follow each other than those of one."""
    del label
    x, weight = meter.random(2048, 1024), meter.random(1024, 1024)
    calls: list[Call] = [
        lambda: x + x,
        lambda: F.softmax(x, -1),
        lambda: F.layer_norm(x, (1024,)),
        lambda: x @ weight,
        lambda: F.gelu(x),
        lambda: x.sum(0),
    ]

    def together() -> None:
        for call in calls:
            call()

    alone = sum(map(meter.device_seconds, calls))
    gap = (meter.device_seconds(together) - alone) / len(calls)
    yield "kernels.gap", max(gap, 0.0)


def _time_copies(label: str, meter: Meter, nbytes: int) -> Measured:
    """Between host and device: [bytes, seconds]."""
    del label
    there = torch.empty(nbytes, dtype=torch.uint8, device=meter.device)
    here = torch.empty(nbytes, dtype=torch.uint8)
    pairs = {"to_device": (there, here)}
    if meter.is_cuda:
        pinned = here.pin_memory()
        pairs |= {
            "to_device_pinned": (there, pinned),
            "to_host_pinned": (pinned, there),
        }
    for key, (target, source) in pairs.items():

        def call(
            target: torch.Tensor = target, source: torch.Tensor = source
        ) -> torch.Tensor:
            return target.copy_(source, non_blocking=True)

        yield f"copies.{key}", (nbytes, meter.device_seconds(call))
