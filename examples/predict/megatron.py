r"""Pretrain a decoder the way Megatron-LM does: tensor, context, pipeline, data parallel.

    torchrun --nproc-per-node 8 examples/predict/megatron.py --tp 4 --pp 2
    torchspmd predict examples/predict/megatron.py --world-size 64 --gpu a100 \
        -- --layers 30 --width 3072 --heads 32 --tp 2 --recompute --attention unfused
    torchspmd predict examples/predict/megatron.py --world-size 64 --gpu h100 \
        -- --layers 80 --width 8192 --heads 64 --kv-heads 8 --hidden 28672 --mlp swiglu \
        --sequence 8192 --tp 4 --cp 2 --pp 4 --accumulate 64 --sequence-parallel --zero

Ranks that share tensors are next to each other, then come those that share sequences
(``--cp``), those of data parallelism, and the stages of the pipeline. Parameters are in 16
bits, gradients are summed up in 32 or 16, and the optimizer works on a copy in 32, whole or
sharded (``--zero``) over data parallel ranks. An ordinary script for GPUs: it knows nothing
of rehearsals.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------
# What tensor parallel ranks say to each other. The sequence is the first dimension.


class Copy(torch.autograd.Function):
    """The same on every rank; its gradients are summed up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Nothing happens."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradients up."""
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """The sum of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum up."""
        del ctx
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Nothing happens."""
        del ctx
        return grad, None


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole, _ = start_gather(x, group, is_async=False)
    return whole


def scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    part, _ = start_scatter(x, group, is_async=False)
    return part


def start_gather(
    x: torch.Tensor, group: dist.ProcessGroup, *, is_async: bool = True
) -> tuple[torch.Tensor, Any]:
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    work = dist.all_gather_into_tensor(
        whole, x.contiguous(), group=group, async_op=is_async
    )
    return whole, work


def start_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, *, is_async: bool = True
) -> tuple[torch.Tensor, Any]:
    part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = dist.reduce_scatter_tensor(
        part, x.contiguous(), group=group, async_op=is_async
    )
    return part, work


class Product(torch.autograd.Function):
    """A linear layer that knows what goes on beside its products.

    With a group, of the whole sequence, of which this rank keeps its part: backward gathers
    it again, beside the product for the input's gradient; and sums that up beside the
    product for the weight's. That product adds to ``main_grad``, where the weight has one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Gather the sequence, and multiply."""
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.weight, ctx.has_bias = group, weight, bias is not None
        return F.linear(x if group is None else gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Two products, each beside what the ranks say to each other."""
        x, weight = ctx.saved_tensors
        if ctx.group is None:
            of_x = grad.matmul(weight)
        else:
            whole, gathering = start_gather(x, ctx.group)
            of_whole = grad.matmul(weight)
            gathering.wait()
            x = whole
            of_x, scattering = start_scatter(of_whole, ctx.group)
        rows = grad.flatten(0, 1)
        of_weight = multiply(ctx.weight, rows.t(), x.flatten(0, 1))
        of_bias = rows.sum(0) if ctx.has_bias else None
        if ctx.group is not None:
            scattering.wait()
        return of_x, of_weight, of_bias, None


def multiply(
    weight: nn.Parameter, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of a weight; None where the product has added it to ``main_grad``."""
    main = getattr(weight, "main_grad", None)
    if main is None:
        return left.matmul(right)
    torch.addmm(main, left, right, out_dtype=main.dtype, out=main)
    weight.when_added()
    return None


def linear(
    layer: nn.Linear, x: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A product whose gradients are ours."""
    return Product.apply(x, layer.weight, layer.bias, group)


def column_parallel(
    layer: nn.Linear, x: torch.Tensor, options: Any, group: dist.ProcessGroup
) -> torch.Tensor:
    """A product that every rank has some columns of."""
    if options.tp == 1:
        return linear(layer, x)
    if options.sequence_parallel:
        return linear(layer, x, group)
    return linear(layer, Copy.apply(x, group))


class Scatter(torch.autograd.Function):
    """The sum of all ranks, of this rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum up, and keep this part."""
        ctx.group = group
        return scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients."""
        return gather(grad, ctx.group), None


class Split(torch.autograd.Function):
    """This rank's part of what all have; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Keep this part."""
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients."""
        return gather(grad, ctx.group), None


class Join(torch.autograd.Function):
    """The whole of what every rank has a part of; all have the same gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Gather."""
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Keep this part of the gradient."""
        group = ctx.group
        return grad.chunk(group.size())[group.rank()].clone(), None


class VocabularyLoss(torch.autograd.Function):
    """Cross entropy where every rank has the logits of a part of the words."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """The mean loss; three small sums over the ranks."""
        logits = logits.float()
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - highest.unsqueeze(-1)
        words = logits.shape[-1]
        local = (target - dist.get_rank(group) * words).clamp(0, words - 1)
        chosen = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        dist.all_reduce(chosen, group=group)
        exps = logits.exp_()
        total = exps.sum(-1)
        dist.all_reduce(total, group=group)
        exps.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exps, local)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Probabilities, less one for the right word."""
        exps, local = ctx.saved_tensors
        ones = torch.full_like(local.unsqueeze(-1), -1, dtype=exps.dtype)
        exps.scatter_add_(-1, local.unsqueeze(-1), ones)
        return exps.mul_(grad / local.numel()).to(torch.bfloat16), None, None


# ----------------------------------------------------------------------------
# The model, as large as this rank's part of it


@torch.compile
def swiglu(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@torch.compile
def squared_relu(y: torch.Tensor) -> torch.Tensor:
    return F.relu(y).square()


ACTIVATIONS = {"gelu": F.gelu, "relu2": squared_relu, "swiglu": swiglu}


class Block(nn.Module):
    """Attention and an MLP, with GELU, squared ReLU or SwiGLU."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.options, self.group = options, group
        width, tp, bias = options.width, options.tp, options.bias
        self.head_width = width // options.heads
        self.heads = options.heads // tp
        self.kv_heads = (options.kv_heads or options.heads) // tp
        hidden = (options.hidden or 4 * width) // tp
        rows = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = nn.Linear(width, rows, bias=bias)
        self.o = nn.Linear(self.heads * self.head_width, width, bias=bias)
        gated = options.mlp == "swiglu"
        self.up = nn.Linear(width, hidden * (2 if gated else 1), bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """After row parallel ones."""
        if self.options.tp == 1:
            return x
        kind = Scatter if self.options.sequence_parallel else Sum
        return kind.apply(x, self.group)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout, where there is some."""
        return F.dropout(x, self.options.dropout) if self.options.dropout else x

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Of (sequence, batch, width)."""
        width = self.head_width
        sizes = [self.heads * width, self.kv_heads * width, self.kv_heads * width]
        qkv = column_parallel(self.qkv, x, self.options, self.group)
        length, batch, _ = qkv.shape
        q, k, v = (
            part.unflatten(-1, (-1, width)).permute(1, 2, 0, 3)
            for part in qkv.split(sizes, -1)
        )
        if self.options.attention == "unfused":
            y = self.unfused(q, k, v)
        else:
            kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
            is_flash = self.options.attention == "flash"
            with kernel if is_flash else contextlib.nullcontext():
                y = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
                )
        return linear(self.o, y.permute(2, 0, 1, 3).reshape(length, batch, -1))

    def unfused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Scores, a softmax with its mask in one kernel, dropout, and their product."""
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        mask = torch.empty(1, 1, 1, device=q.device, dtype=q.dtype)
        scores = torch.baddbmm(
            mask, q, k.transpose(1, 2), beta=0, alpha=self.head_width**-0.5
        )
        parts = self.drop(torch.softmax(scores, -1))
        return torch.bmm(parts, v).unflatten(0, (-1, self.heads))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Of (sequence, batch, width)."""
        y = column_parallel(self.up, x, self.options, self.group)
        return linear(self.down, ACTIVATIONS[self.options.mlp](y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the residual stream."""
        x = x + self.drop(self.leave(self.attention(self.norm1(x))))
        return x + self.drop(self.leave(self.mlp(self.norm2(x))))


class Stage(nn.Module):
    """A part of the decoder: some blocks, with the embedding or the head at the ends."""

    def __init__(
        self, options: argparse.Namespace, group: dist.ProcessGroup, place: int
    ) -> None:
        super().__init__()
        self.options, self.group = options, group
        count = options.pp * options.interleave
        layers = options.layers // count
        words, width = options.vocabulary // options.tp, options.width
        self.is_split = splits(options)
        self.embed = self.head = self.norm = None
        if place == 0:
            self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(options, group) for _ in range(layers))
        if place == count - 1:
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)
            if options.tied and self.embed is not None:
                self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens, or what the stage before has made, to logits, or what comes next."""
        options = self.options
        if self.embed is not None:
            x = self.embed(x.t().remainder(self.embed.num_embeddings))
            if options.tp > 1:
                kind = Scatter if options.sequence_parallel else Sum
                x = kind.apply(x, self.group)
        elif self.is_split:
            x = Join.apply(x, self.group)
        for block in self.blocks:
            if options.recompute:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if self.head is None or self.norm is None:
            return Split.apply(x, self.group) if self.is_split else x
        return column_parallel(self.head, self.norm(x), options, self.group)


def splits(options: argparse.Namespace) -> bool:
    """Whether ranks that hold the same send a part each, and gather what they receive.

    Between nodes each rank has a port of its own; inside of a node, gathering is quick.
    """
    return options.pp > 1 and options.tp > 1 and not options.sequence_parallel


def loss_of(
    logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    return VocabularyLoss.apply(logits, target.t(), group)


# ----------------------------------------------------------------------------
# Gradients and the optimizer


class Bucket:
    """Parameters of a block in one buffer, with gradients and a copy in 32 bits."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        options: Any,
        *,
        is_tied: bool,
        ends: dist.ProcessGroup | None,
    ) -> None:
        self.group, self.options = group, options
        # The first and the last stage, who have the same embedding.
        self.ends = ends if is_tied else None
        ranks = self.group.size()
        self.parameters = parameters
        count = sum(p.numel() for p in self.parameters)
        count += -count % ranks
        device = self.parameters[0].device
        self.weights = torch.zeros(count, dtype=torch.bfloat16, device=device)
        dtype = torch.bfloat16 if options.half_gradients else torch.float32
        self.gradients = torch.zeros(count, dtype=dtype, device=device)
        self.places: dict[nn.Parameter, torch.Tensor] = {}
        at = 0
        for p in self.parameters:
            self.weights[at : at + p.numel()].copy_(p.detach().flatten())
            p.data = self.weights[at : at + p.numel()].view_as(p)
            self.places[p] = self.gradients[at : at + p.numel()].view_as(p)
            # Of a tied one, a part of the gradient comes later, and not from a product.
            if options.fuse_accumulation and not is_tied and p.ndim == 2:
                p.main_grad, p.when_added = self.places[p], self.count
            p.register_post_accumulate_grad_hook(self.take)
            at += p.numel()
        share = count // ranks if options.zero else count
        self.master = nn.Parameter(self.weights[:share].float())
        self.is_last = False
        self.missing = 0
        self.pending: Any = None

    def begin(self, *, passes: int, is_last: bool) -> None:
        """Before backward passes; the last one of a step sends."""
        self.is_last, self.missing = is_last, passes * len(self.parameters)

    def take(self, p: nn.Parameter) -> None:
        """Add a gradient."""
        if p.grad is None:  # a product has added it
            return
        self.places[p].add_(p.grad)
        p.grad = None
        self.count()

    def count(self) -> None:
        """One more gradient was added: with the last of them, the bucket is sent."""
        self.missing -= 1
        if self.is_last and self.options.overlap and not self.missing:
            self.send()

    def send(self) -> None:
        """Sum up over data parallel ranks."""
        if self.group.size() == 1:
            return
        if self.options.zero:
            part = self.gradients.new_empty(self.master.numel())
            self.pending = dist.reduce_scatter_tensor(
                part, self.gradients, group=self.group, async_op=True
            )
            self.part = part
        else:
            self.pending = dist.all_reduce(
                self.gradients, group=self.group, async_op=True
            )

    def finish(self) -> None:
        """Give the optimizer its gradients."""
        if not self.options.overlap:
            self.send()
        if self.pending is not None:
            self.pending.wait()
        is_part = self.options.zero and self.group.size() > 1
        gradients = self.part if is_part else self.gradients
        if self.ends is not None:
            dist.all_reduce(gradients, group=self.ends)
        self.master.grad = gradients.float()

    def publish(self) -> None:
        """Write the new weights back, and start with no gradients."""
        self.master.grad = None
        share = self.master.numel()
        if share < self.weights.numel():
            dist.all_gather_into_tensor(
                self.weights, self.master.detach().bfloat16(), group=self.group
            )
        else:
            self.weights.copy_(self.master.detach())
        self.gradients.zero_()


# ----------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 24),
        ("width", 2048),
        ("heads", 16),
        ("kv-heads", 0),
        ("hidden", 0),
        ("vocabulary", 51200),
        ("sequence", 2048),
        ("batch", 1),
        ("accumulate", 1),
        ("tp", 1),
        ("cp", 1),
        ("pp", 1),
        ("interleave", 1),
        ("steps", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("bias", "tied", "recompute", "sequence-parallel", "zero", "overlap"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--half-gradients", action="store_true", help="sum them up in 16 bits"
    )
    parser.add_argument(
        "--fuse-accumulation",
        action="store_true",
        help="products add to the gradients of weights, as in Megatron-Core",
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--mlp", choices=["gelu", "relu2", "swiglu"], default="gelu")
    parser.add_argument(
        "--attention", choices=["default", "flash", "unfused"], default="default"
    )
    return parser.parse_args()


def lay_out(options: argparse.Namespace) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """The mesh, and the ranks whose gradients are summed up."""
    data = dist.get_world_size() // options.pp // options.cp // options.tp
    if options.cp == 1:
        mesh = init_device_mesh(
            "cuda", (options.pp, data, options.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        return mesh, mesh["dp"].get_group()
    mesh = init_device_mesh(
        "cuda",
        (options.pp, data, options.cp, options.tp),
        mesh_dim_names=("pp", "dp", "cp", "tp"),
    )
    return mesh, mesh["dp", "cp"]._flatten("dp_cp").get_group()


def ends_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """This rank's stage and the other end of the pipeline; None in the middle."""
    stages = mesh.mesh.flatten(1)
    pairs = torch.stack([stages[0], stages[-1]], dim=1)
    group, _ = dist.new_subgroups_by_enumeration(pairs.tolist())
    return group


def build(
    options: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> list[Stage]:
    """This rank's stages."""
    group = mesh["tp"].get_group()
    mine = mesh["pp"].get_local_rank()
    places = [mine + options.pp * chunk for chunk in range(options.interleave)]
    with device:
        stages = [Stage(options, group, place) for place in places]
    return [stage.bfloat16() for stage in stages]


def pipeline(
    options: argparse.Namespace, stages: list[Stage], mesh: DeviceMesh, device: Any
) -> Any:
    """The schedule over the stages."""
    mine, count = mesh["pp"].get_local_rank(), options.pp * options.interleave
    parts = options.tp if options.sequence_parallel or splits(options) else 1
    length = options.sequence // options.cp
    tokens = torch.empty(options.batch, length, dtype=torch.long)
    middle = torch.empty(
        length // parts, options.batch, options.width, dtype=torch.bfloat16
    )
    words = options.vocabulary // options.tp
    logits = torch.empty(length, options.batch, words, dtype=torch.bfloat16)
    tokens, middle, logits = (x.to("meta") for x in (tokens, middle, logits))
    middle.requires_grad_()  # its gradient is sent back
    logits.requires_grad_()
    parts_of_pipeline = []
    for chunk, stage in enumerate(stages):
        place = mine + options.pp * chunk
        parts_of_pipeline.append(
            PipelineStage(
                stage,
                place,
                count,
                device,
                input_args=(tokens if place == 0 else middle,),
                output_args=(logits if place == count - 1 else middle,),
                group=mesh["pp"].get_group(),
            )
        )
    group = mesh["tp"].get_group()

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, target, group)

    if options.interleave > 1:
        return ScheduleInterleaved1F1B(parts_of_pipeline, options.accumulate, loss)
    if options.accumulate < options.pp:  # 1F1B wants one for each stage
        return ScheduleGPipe(parts_of_pipeline[0], options.accumulate, loss)
    return Schedule1F1B(parts_of_pipeline[0], options.accumulate, loss)


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    mesh, group = lay_out(options)
    stages = build(options, mesh, device)
    ends = ends_of(mesh) if options.tied and options.pp > 1 else None
    buckets = [
        Bucket(parameters, group, options, is_tied=is_tied, ends=ends)
        for stage in stages
        for parameters, is_tied in groups(stage)
    ]
    optimizer = torch.optim.AdamW([b.master for b in buckets], lr=1e-4, fused=True)
    schedule = pipeline(options, stages, mesh, device) if options.pp > 1 else None
    mine, last = mesh["pp"].get_local_rank(), options.pp - 1
    batch = options.batch * (options.accumulate if schedule else 1)
    shape = (batch, options.sequence)
    for _ in range(options.steps):
        for number in range(1 if schedule else options.accumulate):
            tokens, target = (
                torch.randint(options.vocabulary, shape, device=device)
                for _ in ("tokens", "target")
            )
            passes = options.accumulate if schedule else 1
            is_last = schedule is not None or number == options.accumulate - 1
            for bucket in buckets:
                bucket.begin(passes=passes, is_last=is_last)
            with splitting(options, mesh, tokens, target):
                if schedule is None:
                    logits = stages[0](tokens)
                    loss_of(logits, target, mesh["tp"].get_group()).backward()
                else:
                    schedule.step(
                        *((tokens,) if mine == 0 else ()),
                        target=target if mine == last else None,
                        return_outputs=False,
                    )
        for bucket in buckets:
            bucket.finish()
        optimizer.step()
        for bucket in buckets:
            bucket.publish()
    dist.destroy_process_group()


def splitting(
    options: argparse.Namespace, mesh: DeviceMesh, *batch: torch.Tensor
) -> contextlib.AbstractContextManager[Any]:
    """Inside, a rank has its part of each sequence, and attention goes round the ranks."""
    if options.cp == 1:
        return contextlib.nullcontext()
    return context_parallel(
        mesh["cp"],
        buffers=list(batch),
        buffer_seq_dims=[1] * len(batch),
        no_restore_buffers=set(batch),
    )


def groups(stage: Stage) -> Iterator[tuple[list[nn.Parameter], bool]]:
    """Parameters of each block, of the embedding and of the head; whether they are tied.

    Where the embedding and the head are on one stage, the tied one comes once.
    """
    taken: set[nn.Parameter] = set()
    for module in (*stage.blocks, stage.embed, stage.norm, stage.head):
        new = [p for p in module.parameters() if p not in taken] if module else []
        taken.update(new)
        if new:
            yield new, stage.options.tied and module in (stage.embed, stage.head)


if __name__ == "__main__":
    main()
