"""How long does it take to preview a plan for a 70B model on 1024 ranks?

Llama-shaped models of three sizes on the meta device, mesh dp=128, tp=8, batch 1, seq
4096. Each case runs in a fresh process: seconds for the plan and for the preview with
its text, and the peak memory of the process beyond what importing took.
"""

import json
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from _harness import arguments, publish
from torch import nn

from torchspmd.parallel.plan.auto import auto_plan

# name: layers, width, hidden, heads, key-value heads, vocabulary
SHAPES = {
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
}
MESH = {"dp": 128, "tp": 8}


class Attention(nn.Module):
    """Grouped-query attention on however many heads are local."""

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, key_value_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, key_value_heads * self.head_dim, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, gate, down."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, hidden: int, heads: int, key_value: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, heads, key_value)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then compute."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A Llama without positions, which have no parameters."""

    def __init__(self, layers, width, hidden, heads, key_value, vocabulary) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Block(width, hidden, heads, key_value) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def measure(name: str) -> dict[str, float | int | str]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = Llama(*SHAPES[name]).to(torch.bfloat16)
    start = time.perf_counter()
    plan = auto_plan(model)
    planned = time.perf_counter()
    preview = plan.preview(model, MESH, batch=1, seq=4096)
    text = str(preview)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert preview.ledger is not None
    return {
        "model": name,
        "ranks": preview.mesh.num_ranks,
        "parameters": sum(row.count for row in preview.rows),
        "auto_plan s": planned - start,
        "preview s": done - planned,
        "memory MiB": (peak - before) / 1024,
        "GiB on a rank": preview.bytes_on_rank(0) / 2**30,
        "collectives": preview.ledger.total().count,
        "lines": text.count("\n") + 1,
    }


def main() -> None:
    options = arguments(__doc__, rounds=3)
    rows = []
    for name in SHAPES:
        runs = [_fresh(name) for _ in range(options.rounds)]
        runs.sort(key=lambda row: row["preview s"])
        rows.append(runs[len(runs) // 2])
    publish("Preview of a plan on 1024 ranks (median run)", rows, options.json)


def _fresh(name: str) -> dict[str, float | int | str]:
    command = [sys.executable, __file__, "--case", name]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main()
