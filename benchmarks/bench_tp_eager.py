"""How much host time do tensor-parallel styles add to an eager training step?

The same model on plain tensors of the local sizes, with torch's styles and with ours, on
a fake group of 8 ranks, one thread: what differs is host time only.

    python benchmarks/bench_tp_eager.py                  # CPU, fake group
    python benchmarks/bench_tp_eager.py --device cuda
    python benchmarks/bench_tp_eager.py --ranks 2        # real gloo ranks, step time
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
from _harness import publish, summary, time_interleaved
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import torchspmd.parallel as our_styles
from torchspmd.testing import fake_mesh, run_ranks

LAYERS, WIDTH, HIDDEN, HEADS, TOKENS, BATCH = 12, 64, 256, 8, 16, 8


class MLP(nn.Module):
    """``LAYERS`` residual blocks of two Linears."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN // size) for _ in range(LAYERS))
        self.down = nn.ModuleList(
            nn.Linear(HIDDEN // size, WIDTH) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The value after all blocks."""
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return x


class Block(nn.Module):
    """A transformer block whose layers have the sizes of one rank of ``size``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(size)
        self.mlp = Gate(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The value after attention and MLP."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Multi-head attention with separate projections."""

    def __init__(self, size: int) -> None:
        super().__init__()
        local = WIDTH // size
        self.q, self.k, self.v = (nn.Linear(WIDTH, local) for _ in range(3))
        self.out = nn.Linear(local, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention over the whole sequence, with this rank's heads."""
        heads = [
            p(x).unflatten(-1, (-1, WIDTH // HEADS)) for p in (self.q, self.k, self.v)
        ]
        q, k, v = (t.transpose(1, 2) for t in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Gate(nn.Module):
    """The MLP of a block."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN // size),
            nn.Linear(HIDDEN // size, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, activation, down."""
        return self.down(F.gelu(self.up(x)))


def build_transformer(size: int) -> nn.Module:
    return nn.Sequential(*(Block(size) for _ in range(LAYERS)))


def mlp_plan(styles: Any) -> dict[str, Any]:
    return {"up.*": styles.ColwiseParallel(), "down.*": styles.RowwiseParallel()}


def transformer_plan(styles: Any) -> dict[str, Any]:
    column, row = styles.ColwiseParallel(), styles.RowwiseParallel()
    return {
        "*.attn.[qkv]": column,
        "*.attn.out": row,
        "*.mlp.up": column,
        "*.mlp.down": row,
    }


def sequence_plan(styles: Any) -> dict[str, Any]:
    """Norms on a part of the sequence, gathered once before attention and MLP."""
    gather = styles.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    row = styles.RowwiseParallel(output_layouts=Shard(1))
    return {
        "*.norm[12]": styles.SequenceParallel(),
        "*.attn": gather,
        "*.mlp": gather,
        **dict.fromkeys(("*.attn.[qkv]", "*.mlp.up"), styles.ColwiseParallel()),
        **dict.fromkeys(("*.attn.out", "*.mlp.down"), row),
    }


# name -> (model for one rank of n, plan, is the input a part of the sequence)
MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[Any], Any], bool]] = {
    "mlp": (MLP, mlp_plan, False),
    "transformer": (build_transformer, transformer_plan, False),
    "transformer, sequence parallel": (build_transformer, sequence_plan, True),
}


def build(kind: str, name: str, mesh: DeviceMesh) -> nn.Module:
    """One model: plain with local sizes, or laid out by torch's or our styles."""
    make, plan, _ = MODELS[name]
    device = mesh.device_type
    if kind == "plain":
        return make(mesh.size()).to(device)
    styles = torch_styles if kind == "torch" else our_styles
    return styles.parallelize_module(make(1).to(device), mesh, plan(styles))


def make_step(
    model: nn.Module, value: torch.Tensor, optimizer: str
) -> Callable[[], None]:
    """Forward, backward, and an optimizer step or just dropping the gradients."""
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    update = None
    if optimizer != "none":
        update = kinds[optimizer](model.parameters(), lr=1e-3, foreach=False)
    parameters = list(model.parameters())

    def step() -> None:
        model(value).sum().backward()
        if update is not None:
            update.step()
        for parameter in parameters:
            parameter.grad = None

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of each step: the median, the variants taking turns."""
    variants = {name: (nullcontext, _synced(step)) for name, step in steps.items()}
    times = time_interleaved(variants, rounds=rounds)
    return {name: summary(values)["median_ms"] for name, values in times.items()}


def _synced(step: Callable[[], None]) -> Callable[[], None]:
    if not torch.cuda.is_available():
        return step

    def call() -> None:
        step()
        torch.cuda.synchronize()

    return call


def run_case(
    name: str, mesh: DeviceMesh, optimizer: str, rounds: int
) -> dict[str, Any]:
    is_part = MODELS[name][2]
    steps = {}
    for kind in ("plain", "torch", "ours"):
        rows = TOKENS // mesh.size() if is_part and kind != "plain" else TOKENS
        shape = (BATCH, WIDTH) if name == "mlp" else (BATCH, rows, WIDTH)
        value = torch.randn(shape, device=mesh.device_type)
        steps[kind] = make_step(build(kind, name, mesh), value, optimizer)
    found = measure(steps, rounds)
    added = {kind: found[kind] - found["plain"] for kind in ("torch", "ours")}
    return {
        "model": name,
        "optimizer": optimizer,
        "ranks": mesh.size(),
        "device": mesh.device_type,
        **{f"{kind} ms": round(value, 2) for kind, value in found.items()},
        "torch adds / ours adds": round(added["torch"] / added["ours"], 1),
        "torch / ours": round(found["torch"] / found["ours"], 1),
    }


def run_all(
    mesh: DeviceMesh, optimizers: list[str], rounds: int
) -> list[dict[str, Any]]:
    return [run_case(n, mesh, o, rounds) for n in MODELS for o in optimizers]


def run_on_rank(optimizers: list[str], rounds: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return run_all(mesh, optimizers, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=0, help="real gloo ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--optimizers", nargs="+", default=["none", "sgd"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ranks:
        rows = run_ranks(
            run_on_rank, options.ranks, options.optimizers, options.rounds, timeout=300
        )[0]
    else:
        with fake_mesh(8, ("tp",), device_type=options.device) as mesh:
            rows = run_all(mesh, options.optimizers, options.rounds)
    title = "Host time that tensor-parallel styles add to an eager step"
    publish(title, rows, options.json)


if __name__ == "__main__":
    main()
