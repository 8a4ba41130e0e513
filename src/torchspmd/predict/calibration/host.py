"""What the host needs: to issue an operator, for an optimizer, for hooks of wrappers."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchspmd.predict.calibration.meter import Call, Case, Limits, Measured, Meter

__all__ = ["compiled", "distributed", "host", "optimizers"]

# The host: seconds of one call in forward, and of what it becomes in backward


Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


_FLAT = (16, 64)  # of most calls: their results can be arguments of others


def _host_cases(meter: Meter) -> Iterator[tuple[str, Function, tuple[int, ...]]]:
    device, width = meter.device, 64
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(width, width, **made).requires_grad_()
    bias = torch.randn(width, **made).requires_grad_()
    linear = nn.Linear(width, width, **made)
    identity = nn.Identity()
    image_weight = torch.randn(8, 8, 1, 1, **made).requires_grad_()
    scale = torch.ones(8, device=device).requires_grad_()
    mean, variance = torch.zeros(8, device=device), torch.ones(8, device=device)
    heads = (1, 2, 16, width)
    flat = _FLAT
    image = (2, 8, 8, 8)
    yield "add", lambda x: x + x, flat
    yield "mul", lambda x: x * 1.0, flat
    yield "view", lambda x: x.view(8, -1).view(16, -1), flat
    yield "transpose", lambda x: x.transpose(0, 1).transpose(0, 1), flat
    yield "gelu", F.gelu, flat
    yield "silu", F.silu, flat
    yield "relu", F.relu, flat
    yield "mm", lambda x: F.linear(x, weight), flat
    yield "addmm", lambda x: F.linear(x, weight, bias), flat
    yield "module_linear", linear, flat
    yield "module", identity, flat
    yield "native_layer_norm", lambda x: F.layer_norm(x, (width,), bias, bias), flat
    yield "_fused_rms_norm", lambda x: F.rms_norm(x, (width,), bias), flat
    yield "native_dropout", lambda x: F.dropout(x, 0.1), flat
    yield "_softmax", lambda x: F.softmax(x, dim=-1), flat
    yield "to_copy", lambda x: x.float().bfloat16(), flat
    yield "cat", lambda x: torch.cat((x[:8], x[8:])), flat
    yield (
        "scaled_dot_product_attention",
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        heads,
    )
    rows = torch.arange(16, device=device)
    square = torch.randn(2, width, width, **made).requires_grad_()
    yield "index", lambda x: x[rows], flat
    yield "index_add", lambda x: torch.zeros_like(x).index_add(0, rows, x), flat
    yield "topk", lambda x: x.topk(width, dim=-1).values, flat
    yield "sort", lambda x: x.sort(dim=-1).values, flat
    yield "bmm", lambda x: torch.bmm(x, square), (2, 16, width)
    yield "max_pool2d_with_indices", lambda x: F.max_pool2d(x, 3, 1, 1), image
    yield "convolution", lambda x: F.conv2d(x, image_weight), image
    yield (
        "native_batch_norm",
        lambda x: F.batch_norm(x, mean, variance, scale, scale, training=True),
        image,
    )


def host(meter: Meter, limits: Limits) -> Iterator[Case]:
    """Issuing one operator of each kind, in forward and in backward."""
    cases = list(_host_cases(meter))
    for key, function, shape in cases:
        yield partial(_time_host, key, meter, limits.calls, function, shape)
    kinds = [function for _, function, shape in cases if shape == _FLAT]
    yield partial(_time_mixed, "kinds in turn", meter, limits.calls, kinds)
    x = meter.random(16)
    yield partial(_time_loss, "cross_entropy", meter, limits.calls)
    for key, call in (
        ("no_grad_add", lambda: x + x),
        ("empty", lambda: torch.empty_like(x)),
    ):
        yield partial(_time_host_call, key, meter, limits.calls, call)


def _time_host(
    key: str, meter: Meter, calls: int, function: Function, shape: Sequence[int]
) -> Measured:
    length = 40
    start = meter.random(*shape).requires_grad_()

    def chain() -> torch.Tensor:
        x = start * 1.0
        for _ in range(length):
            x = function(x)
        return x

    count = max(1, calls // length)
    yield f"host_forward.{key}", meter.host_seconds(chain, count) / length
    gradient = torch.randn_like(chain())
    times = []
    for _ in range(count + 2):
        result = chain()
        meter.synchronize()
        begin = time.perf_counter()
        torch.autograd.grad(result, start, gradient)
        times.append((time.perf_counter() - begin) / length)
        meter.synchronize()
    # The middle, as in forward: a step does not meet the host at its quickest.
    yield f"host_backward.{key}", statistics.median(times[2:])


def _time_mixed(
    label: str, meter: Meter, calls: int, functions: Sequence[Function]
) -> Measured:
    """Kinds in turn, over the same calls kind by kind; by turns, because hosts drift."""
    del label
    start = meter.random(*_FLAT).requires_grad_()
    length, rounds = 40, 8

    def seconds(order: Sequence[Function]) -> float:
        meter.synchronize()
        begin = time.perf_counter()
        x = start * 1.0
        for function in order:
            x = function(x)
        return time.perf_counter() - begin

    by_kind = [each for each in functions for _ in range(length)]
    in_turn = [*functions] * rounds
    pairs = [
        (seconds(in_turn), seconds(by_kind)) for _ in range(max(3, calls // length))
    ]
    turns, loops = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
    yield "host_mixed.forward", max(1.0, turns / rounds * length / loops)


def _time_loss(key: str, meter: Meter, calls: int) -> Measured:
    """An embedding and a loss have no chain: both in backward, once each."""
    table = meter.random(64, 64).requires_grad_()
    where = torch.zeros(16, dtype=torch.int64, device=meter.device)

    def lookup() -> torch.Tensor:
        return F.embedding(where, table)

    def loss() -> torch.Tensor:
        return F.cross_entropy(table[:16], where)

    for name, call in (("embedding", lookup), (key, loss)):
        count = max(1, calls // 3)
        forward = meter.host_seconds(call, count)
        gradient = torch.ones_like(call())

        def both(
            call: Callable[[], torch.Tensor] = call, gradient: torch.Tensor = gradient
        ) -> None:
            torch.autograd.grad(call(), table, gradient)

        yield f"host_forward.{name}", forward
        backward = meter.host_seconds(both, count) - forward
        yield f"host_backward.{name}", max(0.0, backward)


def _time_host_call(key: str, meter: Meter, calls: int, call: Call) -> Measured:
    with torch.no_grad():
        yield f"host_forward.{key}", meter.host_seconds(call, calls)


Maker: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def optimizers(meter: Meter, limits: Limits) -> Iterator[Case]:
    """A step of an optimizer, a gradient, a checkpointed region."""
    makers: dict[str, Maker] = {
        "adamw_fused": partial(torch.optim.AdamW, fused=True),
        "adamw_foreach": partial(torch.optim.AdamW, foreach=True),
        "sgd_foreach": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    }
    calls = max(1, limits.calls // 10)
    for name, make in makers.items():
        yield partial(_time_optimizer, name, meter, calls, make)
    yield partial(_time_gradients, "gradients", meter, calls)
    yield partial(_time_clipping, "clipping", meter, calls)
    yield partial(_time_checkpoint, "a checkpoint", meter, limits.calls)


def _time_optimizer(name: str, meter: Meter, calls: int, make: Maker) -> Measured:
    """The host: for each parameter, and for a step without any."""

    def seconds(count: int) -> float:
        params = [nn.Parameter(meter.random(64)) for _ in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        return meter.host_seconds(make(params).step, calls)

    few, many = seconds(8), seconds(208)
    each = max(0.0, (many - few) / 200)
    yield f"host_optimizer.{name}_parameter", each
    yield f"host_optimizer.{name}_step", max(0.0, few - 8 * each)


def _time_gradients(label: str, meter: Meter, calls: int) -> Measured:
    """The host: handing a gradient to a parameter, and forgetting it.

    Backward of a chain of products by parameters, less the same gradients without it.
    """
    del label
    count = 100
    params = [nn.Parameter(meter.random(8)) for _ in range(count)]
    gradient = torch.ones_like(params[0])
    optimizer = torch.optim.SGD(params)

    def seconds(backward: Callable[[torch.Tensor], object]) -> float:
        x: torch.Tensor = params[0]
        for factor in params[1:]:
            x = x * factor
        meter.synchronize()
        begin = time.perf_counter()
        backward(x)
        return time.perf_counter() - begin

    pairs = []
    for _ in range(max(3, calls)):
        without = seconds(lambda x: torch.autograd.grad(x, params, gradient))
        handed = seconds(lambda x: x.backward(gradient))
        begin = time.perf_counter()
        optimizer.zero_grad()
        pairs.append((handed + time.perf_counter() - begin, without))
    both, one = (statistics.median(each) for each in zip(*pairs, strict=True))
    yield "host_optimizer.accumulate", max(0.0, (both - one) / count)


def _time_clipping(label: str, meter: Meter, calls: int) -> Measured:
    """The host: the norm of all gradients, for each parameter and without any."""
    del label

    def seconds(count: int) -> float:
        params = [nn.Parameter(meter.random(8)) for _ in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        return meter.host_seconds(lambda: nn.utils.clip_grad_norm_(params, 1.0), calls)

    few, many = seconds(8), seconds(208)
    each = max(0.0, (many - few) / 200)
    yield "host_optimizer.clip_parameter", each
    yield "host_optimizer.clip_step", max(0.0, few - 8 * each)


def _time_checkpoint(label: str, meter: Meter, calls: int) -> Measured:
    """The host: one checkpointed region, forward and again in backward."""
    del label
    x = meter.random(16).requires_grad_()

    def plain() -> None:
        torch.autograd.grad((x * 1.0).sum(), x)

    def checkpointed() -> None:
        y = checkpoint(lambda x: x * 1.0, x, use_reentrant=False)
        torch.autograd.grad(y.sum(), x)

    without = meter.host_seconds(plain, calls)
    more = meter.host_seconds(checkpointed, calls) - without
    yield "launch.checkpoint", max(0.0, more)

    length = 40

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = F.silu(x)  # saves one tensor
        return x

    def again() -> None:
        torch.autograd.grad(checkpoint(chain, x, use_reentrant=False).sum(), x)

    calls = max(1, calls // length)
    forward = meter.host_seconds(lambda: chain(x), calls)
    both = meter.host_seconds(lambda: torch.autograd.grad(chain(x).sum(), x), calls)
    hooks = meter.host_seconds(again, calls) - both - forward - more
    yield "launch.checkpoint_tensor", max(0.0, hooks / length)


def compiled(meter: Meter, limits: Limits) -> Iterator[Case]:
    """A region of ``torch.compile``."""
    yield partial(_time_compiled, "torch.compile", meter, limits)


def _time_compiled(label: str, meter: Meter, limits: Limits) -> Measured:
    """The host: a compiled region, each tensor that it takes, and each kernel of it."""
    del label

    def seconds(layers: int, more: int = 0) -> tuple[float, float]:
        modules: list[nn.Module] = []
        for _ in range(layers):
            modules += [nn.Linear(64, 64), nn.GELU()]
        model = nn.Sequential(*modules).to(meter.device, torch.bfloat16)
        # All of these are one kernel, and have one gradient.
        added = [meter.random(64).requires_grad_() for _ in range(more)]

        def region(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = model(x)
            for each in added:
                result = result + each
            return result

        run = torch.compile(region)
        x = meter.random(16, 64).requires_grad_()
        gradient = torch.ones_like(run(x))
        wanted = [x, *model.parameters(), *added]

        def both() -> None:
            # Handing gradients to parameters counts by itself.
            torch.autograd.grad(run(x), wanted, gradient)

        calls = max(1, limits.calls // 4)
        both()
        forward = meter.host_seconds(lambda: run(x), calls)
        return forward, max(0.0, meter.host_seconds(both, calls) - forward)

    few, many, wide = seconds(2), seconds(18), seconds(2, more=32)
    # Two kernels for each layer: the product, and the rest fused. Backward has four.
    for place, (name, kernels) in enumerate((("forward", 32), ("backward", 64))):
        taken = max(0.0, (wide[place] - few[place]) / 32)
        each = max(0.0, (many[place] - few[place] - 32 * taken) / kernels)
        yield f"launch.compiled_{name}_input", taken
        yield f"launch.compiled_{name}_kernel", each
        region = max(0.0, few[place] - 5 * taken - each * kernels / 8)
        yield f"launch.compiled_{name}_region", region


def distributed(meter: Meter, limits: Limits) -> Iterator[Case]:
    """What DTensor and FSDP2 add."""
    yield partial(_time_distributed, "a process group of one rank", meter, limits)


def _time_distributed(label: str, meter: Meter, limits: Limits) -> Measured:
    """The host: DTensor's dispatch, hooks of FSDP2, and issuing a collective."""
    del label
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    if dist.is_initialized():
        return
    backend = "nccl" if meter.is_cuda else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(meter.device.type, (1,))
        x = meter.random(16)
        with torch.no_grad():
            spread = distribute_tensor(x, mesh, [Replicate()])
            plain = meter.host_seconds(lambda: x + x, limits.calls)
            calls = max(1, limits.calls // 3)
            dispatched = meter.host_seconds(lambda: spread + spread, calls)
            yield "launch.dtensor", max(0.0, dispatched - plain)
        yield "launch.collective", meter.host_seconds(lambda: dist.all_reduce(x), calls)

        def model(*, sharded: bool) -> nn.Module:
            blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
            blocks.to(meter.device)
            if sharded:
                for block in blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(blocks, mesh=mesh)
            return blocks

        rows = meter.random(16, 64, dtype=torch.float32)
        times = {}
        for sharded in (False, True):
            blocks = model(sharded=sharded)

            def step(blocks: nn.Module = blocks) -> None:
                blocks(rows).sum().backward()

            calls = max(1, limits.calls // 10)
            forward = meter.host_seconds(lambda: blocks(rows), calls)  # noqa: B023
            times[sharded] = forward, meter.host_seconds(step, calls) - forward
        for place, name in enumerate(("forward", "backward")):
            more = (times[True][place] - times[False][place]) / 9
            yield f"launch.fully_shard_{name}", max(0.0, more)
    finally:
        dist.destroy_process_group()
