"""Train a small GPT with tensor and sequence parallelism.

On several devices:  torchrun --nproc-per-node 4 examples/train_gpt_tp.py
What it sends:       torchspmd trace examples/train_gpt_tp.py --world-size 8
With torch's styles: torchspmd trace examples/train_gpt_tp.py --world-size 8 -- --torch
"""

import argparse
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import torchspmd.parallel


class Attention(nn.Module):
    """Causal self-attention; works on however many heads its projections give it."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the sequence."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Up, gelu, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the two layers."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, head_dim)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both parts to the stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token embedding, blocks, a norm and a head."""

    def __init__(self, vocab: int, width: int, num_layers: int, head_dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, head_dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, mesh: DeviceMesh, styles: ModuleType) -> None:
    """Shard the projections over the mesh and the activations between them by token."""
    colwise, rowwise = styles.ColwiseParallel, styles.RowwiseParallel
    by_token = styles.SequenceParallel()
    gather = styles.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    plan = {
        "embed": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": by_token,
        "head": colwise(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.norm1": by_token,
        "layers.*.norm2": by_token,
        "layers.*.attention": gather,
        "layers.*.attention.[qkv]_proj": colwise(),
        "layers.*.attention.o_proj": rowwise(output_layouts=Shard(1)),
        "layers.*.mlp": gather,
        "layers.*.mlp.up": colwise(),
        "layers.*.mlp.down": rowwise(output_layouts=Shard(1)),
    }
    styles.parallelize_module(model, mesh, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--torch", action="store_true", help="torch's own styles")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = GPT(512, options.width, options.layers, head_dim=32).to(device)
    styles = torch.distributed.tensor.parallel if options.torch else torchspmd.parallel
    parallelize(model, mesh, styles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        tokens = torch.randint(512, (2, 65), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
