r"""Pretrain a decoder of any shape with DDP, FSDP2 or HSDP.

    torchrun --nproc-per-node 8 examples/predict/gpt.py --layers 32 --width 4096
    torchspmd predict examples/predict/gpt.py --world-size 64 --gpu a100 \
        -- --layers 30 --width 3072 --heads 32 --recompute

An ordinary script for GPUs: it knows nothing of rehearsals.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def rotation(options: argparse.Namespace, width: int) -> torch.Tensor:
    """Rotary positions, on the current device."""
    rates = 500000.0 ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(options.sequence).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn pairs of (batch, sequence, heads, width) by the angles."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention and an MLP, with GELU or SwiGLU."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, heads = options.width, options.heads
        kv_heads = options.kv_heads or heads
        self.head_width = options.head_width or width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=options.bias)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=options.bias)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=options.bias)
        self.o = nn.Linear(heads * self.head_width, width, bias=options.bias)
        hidden = options.hidden or 4 * width
        self.up = nn.Linear(width, hidden, bias=options.bias)
        self.down = nn.Linear(hidden, width, bias=options.bias)
        self.gate = nn.Linear(width, hidden, bias=False) if options.swiglu else None
        norm = nn.RMSNorm if options.swiglu else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.is_flash = options.flash
        self.q_norm = self.k_norm = nn.Identity()
        if options.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_width)
            self.k_norm = nn.RMSNorm(self.head_width)
        self.angles = rotation(options, self.head_width) if options.rotary else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the residual stream."""
        y = self.norm1(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, self.head_width))
            for linear in (self.q, self.k, self.v)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.angles is not None:
            q, k = rotate(q, self.angles), rotate(k, self.angles)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        with kernel if self.is_flash else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        if self.gate is not None:
            return x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x + self.down(F.gelu(self.up(y)))


class Decoder(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.recompute = options.recompute
        self.embed = nn.Embedding(options.vocabulary, options.width)
        self.positions = None
        if not options.rotary:
            self.positions = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        if options.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embed(tokens)
        if self.positions is not None:
            where = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.positions(where)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 24),
        ("width", 2048),
        ("heads", 16),
        ("kv-heads", 0),
        ("head-width", 0),
        ("hidden", 0),
        ("vocabulary", 51200),
        ("sequence", 2048),
        ("batch", 1),
        ("accumulate", 1),
        ("replicate", 1),
        ("steps", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in (
        "swiglu",
        "tied",
        "bias",
        "rotary",
        "qk-norm",
        "recompute",
        "compile",
        "flash",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--keep-gathered",
        action="store_true",
        help="shard gradients and states, and gather parameters once a step",
    )
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="fsdp")
    return parser.parse_args()


def shard(model: Decoder, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    """Lay the model out over the mesh."""
    if options.compile:
        for block in model.blocks:
            block.compile()
    if options.parallel == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        gathers_again = not options.keep_gathered
        for block in model.blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=gathers_again,
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
    elif options.parallel == "ddp":
        return DistributedDataParallel(model)
    return model


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    mesh = None
    if options.parallel != "none":
        dist.init_process_group("nccl")
        copies, ranks = options.replicate, dist.get_world_size()
        if copies > 1:  # HSDP: sharded within, copied between
            names = ("replicate", "dp")
            mesh = init_device_mesh(
                "cuda", (copies, ranks // copies), mesh_dim_names=names
            )
        else:
            mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
    with device:
        model: nn.Module = Decoder(options)
    if options.parallel != "fsdp":
        model = model.to(torch.bfloat16)
    if mesh is not None:
        model = shard(model, mesh, options)
    elif options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(options.steps):
        for _ in range(options.accumulate):
            shape = (options.batch, options.sequence + 1)
            tokens = torch.randint(options.vocabulary, shape, device=device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
