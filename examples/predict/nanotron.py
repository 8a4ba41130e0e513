r"""Pretrain a Llama the way nanotron does: what it allocates, and when.

    torchrun --nproc-per-node 8 examples/predict/nanotron.py --tp 2 --pp 2 --zero
    torchspmd predict examples/predict/nanotron.py --world-size 64 --gpu h100 \
        -- --layers 32 --width 4096 --heads 32 --hidden 14336 --tp 4 --zero

Written after nanotron's public source of early 2025, with the settings of its scaling
benchmarks: sequence parallelism with asynchronous communication, gathered inputs that are
gathered again in backward, 1F1B, gradients that are added up in 32 bits, fused AdamW. Each
comment below that begins with "nanotron:" says what it does that others do not. An ordinary
script for GPUs: it knows nothing of rehearsals.
"""

import argparse
import math
import os
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

# ----------------------------------------------------------------------------
# Products of tensor parallel ranks. The sequence is the first dimension.

_buffers: dict[str, torch.Tensor] = {}


def buffer(name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """nanotron: what is gathered goes to buffers that stay, and only grow."""
    count = math.prod(shape)
    if name not in _buffers or _buffers[name].numel() < count:
        _buffers[name] = like.new_empty(count)
    return _buffers[name][:count].view(shape)


def gather_into(
    whole: torch.Tensor,
    part: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_async: bool = False,
) -> Any:
    part = part.contiguous()
    work = dist.all_gather_into_tensor(whole, part, group=group, async_op=is_async)
    used_by_nccl(whole, part)
    return work


def scatter_into(
    part: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_async: bool = False,
) -> Any:
    whole = whole.contiguous()
    work = dist.reduce_scatter_tensor(part, whole, group=group, async_op=is_async)
    used_by_nccl(whole, part)
    return work


@cache
def nccl_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def used_by_nccl(*tensors: torch.Tensor) -> None:
    """What torch 2.1, of its benchmarks, does to the tensors of every collective.

    When they are freed, their memory is not used again before the device is done with the
    collective; the host may be far ahead of it by then.
    """
    for tensor in tensors:
        tensor.record_stream(nccl_stream())


def start_gather(
    name: str, part: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    shape = (part.shape[0] * group.size(), *part.shape[1:])
    whole = buffer(name, shape, part)
    return whole, gather_into(whole, part, group, is_async=True)


def multiply(
    part: torch.Tensor,
    whole: torch.Tensor,
    weight: torch.Tensor,
    gathering: Any,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """nanotron: this rank's part first, while others are gathered; then what is around."""
    y = whole.new_empty((*whole.shape[:-1], weight.shape[1]))
    length, place = part.shape[0], dist.get_rank(group)
    own = slice(place * length, (place + 1) * length)
    torch.mm(part.flatten(0, 1), weight, out=y[own].flatten(0, 1))
    gathering.wait()
    for rows in (slice(0, own.start), slice(own.stop, None)):
        if whole[rows].numel():
            torch.mm(whole[rows].flatten(0, 1), weight, out=y[rows].flatten(0, 1))
    return y


class ColumnLinear(torch.autograd.Function):
    """A product with the whole sequence, of which this rank keeps its part."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Gather the sequence, and multiply."""
        ctx.save_for_backward(x, weight)
        ctx.group = group
        if group.size() == 1:
            return F.linear(x, weight)
        whole, gathering = start_gather("inputs", x, group)
        return multiply(x, whole, weight.t(), gathering, group)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Gather the sequence again, and sum its gradient up beside the weight's."""
        x, weight = ctx.saved_tensors
        is_alone = ctx.group.size() == 1
        if is_alone:
            whole, gathering = x, None
        else:
            whole, gathering = start_gather("inputs", x, ctx.group)
        of_x = grad.matmul(weight)
        grad = grad.contiguous()
        scattering = None
        if not is_alone:
            part = torch.empty_like(x)
            scattering = scatter_into(part, of_x, ctx.group, is_async=True)
        if gathering is not None:
            gathering.wait()
        of_weight = grad.flatten(0, 1).t().matmul(whole.flatten(0, 1))
        if scattering is None:
            return of_x, of_weight, None
        scattering.wait()
        return part, of_weight, None


class RowLinear(torch.autograd.Function):
    """A product that all ranks sum up; this rank keeps its part of the sequence."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Multiply, and sum up."""
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return scatter(F.linear(x, weight), group)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Gather the gradients, into a second buffer."""
        x, weight = ctx.saved_tensors
        if ctx.group.size() == 1:
            of_x = grad.matmul(weight)
        else:
            part = grad.contiguous()
            grad, gathering = start_gather("gradients", part, ctx.group)
            of_x = multiply(part, grad, weight, gathering, ctx.group)
        x = x.contiguous()  # nanotron: attention's result is transposed until here
        of_weight = grad.flatten(0, 1).t().matmul(x.flatten(0, 1))
        return of_x, of_weight, None


def scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return x
    part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    scatter_into(part, x, group)
    return part


class Scatter(torch.autograd.Function):
    """The sum of all ranks, of this rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum up, and keep this part."""
        ctx.group = group
        return scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients; not into a buffer."""
        whole = grad.new_empty((grad.shape[0] * ctx.group.size(), *grad.shape[1:]))
        gather_into(whole, grad, ctx.group)
        return whole, None


# ----------------------------------------------------------------------------
# The blocks of the model: what nanotron puts on stages, one after the other


class Rotate(torch.autograd.Function):
    """In the place of FlashAttention's rotary kernel: in place, and so its gradient.

    A query stays a part of the tensor that queries, keys and values were copied to, which
    is therefore kept for backward, with keys and values that are not used again.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        ctx.save_for_backward(angles)
        x.mul_(angles)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same gradient."""
        (angles,) = ctx.saved_tensors
        return grad.mul_(angles), None


class RotateKeys(torch.autograd.Function):
    """The same for keys, which lie beside values."""

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Change the keys."""
        ctx.save_for_backward(angles)
        kv[:, :, 0].mul_(angles)
        return kv

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Change their gradients."""
        (angles,) = ctx.saved_tensors
        grad[:, :, 0].mul_(angles)
        return grad, None


class Embedding(nn.Embedding):
    """A part of the words; others are masked, and added by other ranks."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__(options.vocabulary // options.tp, options.width)
        self.group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """To this rank's part of the sequence."""
        tokens = tokens.t()
        if self.group.size() == 1:
            return super().forward(tokens)
        local = tokens - self.num_embeddings * dist.get_rank(self.group)
        others = (local < 0) | (local >= self.num_embeddings)
        x = super().forward(local.masked_fill(others, 0))
        return Scatter.apply(x * ~others.unsqueeze(-1), self.group)


class Linear(nn.Linear):
    """A column or row parallel weight, as large as this rank's part of it."""

    def __init__(
        self, inputs: int, outputs: int, kind: Any, group: dist.ProcessGroup
    ) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.kind, self.group = kind, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        y: torch.Tensor = self.kind.apply(x, self.weight, self.group)
        return y


class Layer(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        width, hidden = options.width, options.hidden // options.tp
        self.heads = options.heads // options.tp
        self.head_width = width // options.heads
        part = self.heads * self.head_width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = Linear(width, 3 * part, ColumnLinear, group)
        self.o = Linear(part, width, RowLinear, group)
        self.gate_up = Linear(width, 2 * hidden, ColumnLinear, group)
        self.down = Linear(hidden, width, RowLinear, group)
        shape = (options.sequence, 1, self.head_width)
        self.register_buffer("angles", torch.ones(shape), persistent=False)
        mask = torch.ones(1, options.sequence, dtype=torch.bool)
        self.register_buffer("mask", mask, persistent=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Of (sequence, batch, width)."""
        qkv = self.qkv(x)
        length, batch, _ = qkv.shape
        # nanotron: one copy that brings the batch to the front; keys and values are
        # joined again, copied once more, and rotated in place, as are queries.
        shape = (length, batch, 3, self.heads, self.head_width)
        q, k, v = qkv.view(shape).permute(2, 1, 0, 3, 4).contiguous()
        kv = torch.cat([k.unsqueeze(0), v.unsqueeze(0)])
        kv = kv.permute(1, 2, 0, 3, 4).contiguous()
        q = Rotate.apply(q, self.angles)
        kv = RotateKeys.apply(kv, self.angles)
        k, v = (each.squeeze(2) for each in kv.split(1, dim=2))
        # nanotron: FlashAttention is given where sequences begin, twice, by each layer.
        for _ in range(2):
            begins = torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
            lengths = self.mask.expand(batch, -1).sum(-1, dtype=torch.int32)
            torch.cumsum(lengths, 0, out=begins[1:])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(
                *(each.transpose(1, 2) for each in (q, k, v)), is_causal=True
            )
        y = y.transpose(1, 2).contiguous().view(batch, length, -1).transpose(0, 1)
        return self.o(y)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Of (sequence, batch, width)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the residual stream."""
        x = self.attention(self.norm1(x)) + x
        return self.mlp(self.norm2(x)) + x


class Cast(nn.Module):
    """nanotron: logits in 32 bits are a block of their own, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """To 32 bits."""
        return x.float()


class CrossEntropy(torch.autograd.Function):
    """Where every rank has the logits of a part of the words."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """A second tensor of logits in 32 bits, which becomes the probabilities."""
        highest = logits.max(-1)[0]
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - highest.unsqueeze(-1)
        words = logits.shape[-1]
        local = target - dist.get_rank(group) * words
        others = (local < 0) | (local >= words)
        local = local.masked_fill(others, 0)
        chosen = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        chosen.masked_fill_(others, 0)
        dist.all_reduce(chosen, group=group)
        exps = logits.exp_()
        total = exps.sum(-1)
        dist.all_reduce(total, group=group)
        loss = total.log() - chosen
        exps.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exps, local, others)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """In the probabilities' place."""
        exps, local, others = ctx.saved_tensors
        ones = (others.to(exps.dtype) - 1).unsqueeze(-1)
        exps.scatter_add_(-1, local.unsqueeze(-1), ones)
        return exps.mul_(grad.unsqueeze(-1)), None, None


class Loss(nn.Module):
    """The last block; it is given the target beside the logits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean."""
        return CrossEntropy.apply(logits, target.t(), self.group).mean()


def split(options: argparse.Namespace) -> list[range]:
    """Blocks of each stage, by number: nanotron splits by products.

    The embedding is block 0, then come the layers; behind them are the norm, the head, the
    cast and the loss. Of these only layers and the head count. A block that reaches a
    stage's part still belongs to it; each block moves on by one stage at most, so that the
    cast and the loss can be on stages of their own, and stages behind the loss can have
    nothing at all.
    """
    width = options.width
    layer = 4 * width * width + 3 * width * options.hidden
    costs = [0, *[layer] * options.layers, 0, options.vocabulary * width, 0, 0]
    stages, begin, seen, total = [], 0, 0, sum(costs)
    for number, cost in enumerate(costs):
        seen += cost
        is_last = len(stages) == options.pp - 1
        if not is_last and seen >= total * ((len(stages) + 1) / options.pp):
            stages.append(range(begin, number + 1))
            begin = number + 1
    stages.append(range(begin, len(costs)))
    return stages + [range(0)] * (options.pp - len(stages))


def build(
    options: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> nn.ModuleList:
    """This stage's blocks."""
    group = mesh["tp"].get_group()
    layers = options.layers
    numbers = split(options)[mesh["pp"].get_local_rank()]
    kinds: dict[int, Callable[[], nn.Module]] = {
        0: lambda: Embedding(options, group),
        layers + 1: lambda: nn.RMSNorm(options.width),
        layers + 2: lambda: Linear(
            options.width, options.vocabulary // options.tp, ColumnLinear, group
        ),
        layers + 3: Cast,
        layers + 4: lambda: Loss(group),
    }
    with device:
        blocks = nn.ModuleList(
            kinds[number]() if number in kinds else Layer(options, group)
            for number in numbers
        )
    if options.tied and len(numbers) == layers + 5:  # all of them are here
        blocks[layers + 2].weight = blocks[0].weight
    return blocks.bfloat16()


# ----------------------------------------------------------------------------
# The pipeline


def send(x: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    dist.send(x, group=group, group_dst=peer)
    used_by_nccl(x)


def receive(x: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    dist.recv(x, group=group, group_src=peer)
    used_by_nccl(x)


class Send(torch.autograd.Function):
    """Send a tensor on, and keep nothing of it; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peer: int, group: Any) -> torch.Tensor:
        """Send."""
        send(x, peer, group)
        ctx.peer, ctx.group = peer, group
        ctx.like = (x.shape, x.dtype, x.device)
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Receive the gradient."""
        del grad
        shape, dtype, device = ctx.like
        x = torch.empty(shape, dtype=dtype, device=device)
        receive(x, ctx.peer, ctx.group)
        return x, None, None


class Received(torch.autograd.Function):
    """A tensor of the stage before, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradients: Any) -> torch.Tensor:
        """The tensor."""
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        """The gradient is sent later."""
        ctx.gradients.append(grad.contiguous())
        return None, None


class Stage:
    """One stage: forward and backward of a micro-batch."""

    def __init__(
        self, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device
    ) -> None:
        self.options, self.device = options, device
        self.blocks = build(options, mesh, device)
        self.place = mesh["pp"].get_local_rank()
        self.begin = split(options)[self.place].start
        self.group = mesh["pp"].get_group()
        self.gradients: deque[torch.Tensor] = deque()

    def receive(self) -> torch.Tensor:
        """What the stage before has made: of layers, of the head, or of the cast."""
        options = self.options
        behind = self.begin - 1 - options.layers
        words, length = options.vocabulary // options.tp, options.sequence
        shape = (length // options.tp, options.batch, options.width)
        if behind > 1:
            shape = (length, options.batch, words)
        dtype = torch.float32 if behind > 2 else torch.bfloat16
        x = torch.empty(shape, dtype=dtype, device=self.device, requires_grad=True)
        receive(x.detach(), self.place - 1, self.group)
        self.send_gradients()
        return Received.apply(x, self.gradients)

    def send_gradients(self) -> None:
        """nanotron: behind the next input, which the stage before sends first."""
        while self.gradients:
            send(self.gradients.popleft(), self.place - 1, self.group)

    def forward(self) -> torch.Tensor:
        """A micro-batch; what backward begins with."""
        options = self.options
        shape = (options.batch, options.sequence + 1)
        tokens = torch.randint(options.vocabulary, shape, device=self.device)
        x = tokens[:, :-1] if self.place == 0 else self.receive()
        for block in self.blocks:
            x = block(x, tokens[:, 1:]) if isinstance(block, Loss) else block(x)
        if isinstance(self.blocks[-1], Loss):
            return x
        return Send.apply(x, self.place + 1, self.group)

    def run(self, backward: Callable[[torch.Tensor, bool], None]) -> None:
        """1F1B: as many micro-batches are in flight as stages are behind, and one."""
        waiting: deque[torch.Tensor] = deque()
        last = self.options.accumulate - 1
        done = 0
        for number in range(self.options.accumulate):
            waiting.append(self.forward())
            if number >= self.options.pp - self.place - 1:
                backward(waiting.popleft(), done == last)
                done += 1
        self.send_gradients()
        while waiting:
            backward(waiting.popleft(), done == last)
            done += 1
            self.send_gradients()


# ----------------------------------------------------------------------------
# Gradients and the optimizer


class Optimizer:
    """Gradients in 32 bits in one tensor, and AdamW on weights in 32 bits.

    nanotron: gradients in 16 bits stay until a backward pass is over, and are then added
    to those in 32. Without ZeRO, DDP has buckets for all of them besides, and the last
    backward pass of a step adds them from there. With ZeRO all gradients are summed up at
    once, in place.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        mesh: DeviceMesh,
        options: argparse.Namespace,
        device: torch.device,
    ) -> None:
        self.parameters, self.group = parameters, mesh["dp"].get_group()
        self.model_group = mesh["pp", "tp"]._flatten("model").get_group()
        self.ranks = self.group.size()
        self.is_ddp = self.ranks > 1 and not options.zero
        self.is_sharded = options.zero and self.ranks > 1
        if self.is_ddp:
            self.buckets = {p: torch.empty_like(p) for p in parameters}
            for p in parameters:
                p.register_post_accumulate_grad_hook(self.to_bucket)
        sizes = [p.numel() for p in parameters]
        self.gradients = torch.zeros(sum(sizes), device=device)
        parts = zip(parameters, self.gradients.split(sizes), strict=True)
        self.places = {p: part.view_as(p) for p, part in parts}
        shares = [self.share(p) for p in parameters]
        sizes = [share.numel() for share in shares]
        flat = torch.empty(sum(sizes), device=device)
        self.masters = [nn.Parameter(part) for part in flat.split(sizes)]
        with torch.no_grad():
            for master, share in zip(self.masters, shares, strict=True):
                master.copy_(share)
        groups = [{"params": self.masters}]  # of a stage without parameters, too
        self.adam = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self.is_last = False
        self.pending: list[Any] = []

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter, or of its gradient.

        nanotron: every parameter is sharded by itself.
        """
        flat = x.detach().flatten()
        if not self.is_sharded:
            return flat
        if x.numel() % self.ranks:
            raise SystemExit(
                f"nanotron.py --zero: a parameter of {x.numel()} numbers is not divisible "
                f"by {self.ranks} data parallel ranks; choose a width that is."
            )
        return flat.chunk(self.ranks)[dist.get_rank(self.group)]

    def to_bucket(self, p: nn.Parameter) -> None:
        """DDP's hook of the last backward pass of a step."""
        if not self.is_last:
            return
        self.buckets[p].copy_(p.grad)
        place = self.places[p].add_(self.buckets[p])
        self.pending.append(dist.all_reduce(place, group=self.group, async_op=True))

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Of a micro-batch; then add its gradients up."""
        self.is_last = is_last
        loss.backward()
        for p, place in self.places.items():
            if not (self.is_ddp and is_last):
                place.add_(p.grad)
            p.grad = None

    def step(self) -> None:
        """Sum up over data parallel ranks, clip, update, and write back."""
        for work in self.pending:
            work.wait()
        self.pending.clear()
        if self.is_sharded:
            dist.all_reduce(self.gradients, group=self.group)
        self.clip()
        for master, place in zip(self.masters, self.places.values(), strict=True):
            master.grad = self.share(place)
        self.adam.step()
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad = None
            self.share(p).copy_(master.detach())
        if self.is_sharded and self.parameters:
            self.gather()
        self.gradients.zero_()

    @torch.no_grad()
    def clip(self) -> None:
        """To a norm of 1, over the whole model."""
        total = torch.zeros((), device=self.gradients.device)
        if self.places:
            norms = [torch.linalg.vector_norm(each) for each in self.places.values()]
            total = torch.stack(norms).square_().sum()
        dist.all_reduce(total, group=self.model_group)
        factor = (1 / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for each in self.places.values():
            each.mul_(factor)

    @torch.no_grad()
    def gather(self) -> None:
        """The new weights of all ranks.

        nanotron: shares of all parameters are joined, once for each rank; NCCL's gather
        into a list of tensors has one more tensor for all of them.
        """
        mine = torch.cat([self.share(p) for p in self.parameters])
        each = [torch.empty_like(mine) for _ in range(self.ranks)]
        whole = mine.new_empty(self.ranks * mine.numel())
        gather_into(whole, mine, self.group)
        torch._foreach_copy_(each, list(whole.chunk(self.ranks)))
        rows, begin = whole.view(self.ranks, -1), 0
        for p, master in zip(self.parameters, self.masters, strict=True):
            end = begin + master.numel()
            p.view(self.ranks, -1).copy_(rows[:, begin:end])
            begin = end


# ----------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 16),
        ("width", 2048),
        ("heads", 32),
        ("hidden", 8192),
        ("vocabulary", 131072),
        ("sequence", 4096),
        ("batch", 1),
        ("accumulate", 1),
        ("tp", 1),
        ("pp", 1),
        ("steps", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("tied", "zero"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if idle := [place for place, stage in enumerate(split(options)) if not stage]:
        raise SystemExit(
            f"nanotron.py: stages {idle} of {options.pp} have no blocks. nanotron logs the "
            "loss on the last of them, where there is none, and fails; take fewer stages."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = dist.get_world_size() // options.pp // options.tp
    mesh = init_device_mesh(
        "cuda", (options.pp, data, options.tp), mesh_dim_names=("pp", "dp", "tp")
    )
    stage = Stage(options, mesh, device)
    parameters = list(stage.blocks.parameters())
    optimizer = Optimizer(parameters, mesh, options, device)
    torch.cuda.empty_cache()  # nanotron: once, before the first step
    for _ in range(options.steps):
        stage.run(optimizer.backward)
        # nanotron: it logs peaks here, and starts them anew, in the first steps.
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        dist.barrier()  # nanotron: to time the step
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
