r"""Pretrain a Llama with FSDP2: meta-device init, mixed precision, checkpointing, clipping.

    torchrun --nproc-per-node 8 examples/predict/llama_fsdp2.py --size 8b
    torchspmd predict examples/predict/llama_fsdp2.py --world-size 1024 --gpu h100 \
        -- --size 70b --sequence 8192
    torchspmd predict examples/predict/llama_fsdp2.py --world-size 64 --gpu h100 \
        -- --size 8b --recompute selective --replicate 8 --tp 2 --compile
    torchspmd predict examples/predict/llama_fsdp2.py --world-size 64 --gpu h100 \
        -- --size 8b --sequence 131072 --cp 8 --compile

An ordinary script for GPUs: it knows nothing of rehearsals.
"""

import argparse
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


@dataclass(frozen=True)
class Size:
    """How large a Llama is."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128256
    is_flash: bool = False  # FlashAttention 2, also where torch would choose cuDNN's
    is_composed: bool = False  # norms of many operators, as before torch had a kernel
    is_float8: bool = False  # products of layers in 8 bits

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """One of its products."""
        kind = Float8Linear if self.is_float8 else nn.Linear
        return kind(inputs, outputs, bias=False)

    def norm(self) -> nn.Module:
        """One of its norms."""
        return (ComposedNorm if self.is_composed else nn.RMSNorm)(self.width)


def to_float8(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """With one scale for the tensor, which its largest element gives."""
    scale = torch.finfo(dtype).max / torch.max(torch.abs(x)).float()
    return (x.float() * scale).to(dtype), scale.reciprocal()


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """The same matrix; products in 8 bits take their second one so."""
    return x.t().contiguous().t()


class Float8Product(torch.autograd.Function):
    """A product whose three matrix products are in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Cast, and multiply."""
        ctx.save_for_backward(x, weight)
        (a, scale), (b, other) = to_float8(x), to_float8(weight)
        return torch._scaled_mm(a, b.t(), scale, other, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast again: what is kept has 16 bits."""
        x, weight = ctx.saved_tensors
        g, scale = to_float8(grad.contiguous(), torch.float8_e5m2)
        (a, of_x), (b, of_weight) = to_float8(x), to_float8(weight)
        to_x = torch._scaled_mm(
            g, by_columns(b), scale, of_weight, out_dtype=grad.dtype
        )
        to_weight = torch._scaled_mm(
            g.t().contiguous(), by_columns(a), scale, of_x, out_dtype=grad.dtype
        )
        return to_x, to_weight


class Float8Linear(nn.Linear):
    """Products in 8 bits, with scales that follow the values (tensorwise, dynamic)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        y: torch.Tensor = Float8Product.apply(x.flatten(0, -2), self.weight)
        return y.unflatten(0, x.shape[:-1])


class ComposedNorm(nn.Module):
    """RMS norm, operator by operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """After the model has left the meta device."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


SIZES = {
    "debug": Size(4, 512, 8, 4, 1536, 32000),
    "1b": Size(16, 2048, 32, 8, 8192),
    "llama2-13b": Size(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": Size(80, 8192, 64, 8, 28672, 32000),
    "8b": Size(32, 4096, 32, 8, 14336),
    "70b": Size(80, 8192, 64, 8, 28672),
    "405b": Size(126, 16384, 128, 8, 53248),
}


def rotary(sequence: int, width: int) -> torch.Tensor:
    frequencies = 500000.0 ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(sequence).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.is_flash = size.is_flash
        self.head_width = size.width // size.heads
        kv_width = size.kv_heads * self.head_width
        self.wq = size.linear(size.width, size.width)
        self.wk = size.linear(size.width, kv_width)
        self.wv = size.linear(size.width, kv_width)
        self.wo = size.linear(size.width, size.width)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Run it."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width))
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, table), rotate(k, table)
        kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        with kernel if self.is_flash else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            )
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = size.linear(size.width, size.hidden)
        self.w2 = size.linear(size.hidden, size.width)
        self.w3 = size.linear(size.width, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = size.norm()
        self.attention = Attention(size)
        self.ffn_norm = size.norm()
        self.feed_forward = FeedForward(size)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Run it."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class KeepSome:
    """Selective checkpointing: attention and every second product are kept."""

    def __init__(self) -> None:
        self.products: Counter[bool] = Counter()

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What is done with the result of an operator."""
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.max.default
        if op is torch.ops.aten.mm.default:
            self.products[context.is_recompute] += 1
            keep = self.products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    """The contexts of one checkpointed layer."""
    return create_selective_checkpoint_contexts(KeepSome())


class Llama(nn.Module):
    """Tokens to logits."""

    def __init__(self, size: Size, sequence: int, *, recompute: str) -> None:
        super().__init__()
        self.size, self.sequence, self.recompute = size, sequence, recompute
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = size.norm()
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        self.register_buffer("table", self._table(), persistent=False)

    def _table(self) -> torch.Tensor:
        return rotary(self.sequence, self.size.width // self.size.heads)

    def init_weights(self, device: torch.device) -> None:
        """After the model has left the meta device."""
        with device:
            self.table = self._table()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm | ComposedNorm):
                module.reset_parameters()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run it."""
        x = self.tok_embeddings(tokens)
        again = partial(checkpoint, use_reentrant=False)
        if self.recompute == "selective":
            again = partial(again, context_fn=selective)
        for layer in self.layers:
            if self.recompute == "none":
                x = layer(x, self.table)
            else:
                x = again(layer, x, self.table)
        return self.output(self.norm(x))


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Column and row parallel projections, with sequence parallel norms."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1),  # cross entropy takes parts of the words
                use_local_output=False,
            ),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None),
                    desired_input_layouts=(Replicate(), None),
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def build(
    options: argparse.Namespace, device: torch.device
) -> tuple[Llama, DeviceMesh]:
    copies, cp, tp = options.replicate, options.cp, options.tp
    shards = dist.get_world_size() // copies // cp // tp
    names: tuple[str, ...] = ("dp", "tp")
    sizes: tuple[int, ...] = (shards, tp)
    if cp > 1:  # ranks with parts of the same sequences
        names, sizes = ("dp", "cp", "tp"), (shards, cp, tp)
    if copies > 1:  # HSDP: sharded within, copied between
        names, sizes = ("replicate", *names), (copies, *sizes)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    over = mesh["dp"]
    if cp > 1:
        over = mesh["dp", "cp"]._flatten("dp_cp")
    if copies > 1:
        over = mesh["replicate", "dp_cp" if cp > 1 else "dp"]
    with torch.device("meta"):
        model = Llama(size_of(options), options.sequence, recompute=options.recompute)
    if options.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    if options.compile:
        for layer in model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for layer in model.layers:
        fully_shard(layer, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights(device)
    return model, mesh


def splitting(
    options: argparse.Namespace, mesh: DeviceMesh, *parts: torch.Tensor
) -> contextlib.AbstractContextManager[Any]:
    """Inside, a rank has its part of each sequence, and attention goes round the ranks."""
    if options.cp == 1:
        return contextlib.nullcontext()
    inputs, target, table = parts
    return context_parallel(
        mesh["cp"],
        buffers=[inputs, target, table],
        buffer_seq_dims=[1, 1, 0],
        no_restore_buffers={inputs, target},
    )


def size_of(options: argparse.Namespace) -> Size:
    size = SIZES[options.size]
    return replace(
        size,
        layers=options.layers or size.layers,
        is_flash=options.flash,
        is_composed=options.composed_norms,
        is_float8=options.float8,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context parallel ranks")
    parser.add_argument("--replicate", type=int, default=1, help="copies, for HSDP")
    parser.add_argument("--layers", type=int, help="instead of those of the size")
    parser.add_argument(
        "--recompute", choices=["full", "selective", "none"], default="full"
    )
    parser.add_argument("--flash", action="store_true", help="FlashAttention 2")
    parser.add_argument("--composed-norms", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--float8", action="store_true", help="products of layers in 8 bits"
    )
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    model, mesh = build(options, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 2000)
    )
    vocabulary = SIZES[options.size].vocabulary
    for step in range(options.steps):
        begin = time.perf_counter()
        tokens = torch.randint(vocabulary, (options.batch, options.sequence + 1))
        tokens = tokens.to(device, non_blocking=True)
        inputs, target = (x.contiguous() for x in (tokens[:, :-1], tokens[:, 1:]))
        with splitting(options, mesh, inputs, target, model.table):
            logits = model(inputs)
            with loss_parallel() if options.tp > 1 else contextlib.nullcontext():
                loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
                loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        mean = mean.to_local() if isinstance(mean, DTensor) else mean
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        if dist.get_rank() == 0:
            memory = torch.cuda.max_memory_reserved() / 2**30
            print(
                f"step {step} loss {mean.item():.3f} norm {float(norm):.2f} "
                f"memory {memory:.1f} GiB {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
