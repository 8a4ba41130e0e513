"""Train a small GPT on several ranks, the whole step as one graph, beside eager DDP.

    torchrun --nproc-per-node 2 examples/train_gpt_compiled.py --steps 10

Prints both losses at each step and fails when they part, then how many times as fast as
DDP the compiled step is. Gradients are reduced in buckets, and each update waits for the
next step: reductions overlap with backward and with the next forward.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchspmd import compile

TIMED_STEPS = 10


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the sequence."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both parts to the stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm, a head tied to the embedding."""

    def __init__(self, vocab: int, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    # Clipped value by value. clip_grad_norm_ works too, but every update would need all
    # gradients then: none could wait for the next step, and overlap=True would warn.
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    return loss


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)


def seconds_per_step(
    run: Callable[[torch.Tensor], object], batch: torch.Tensor
) -> float:
    """The mean of some steps, until the last collective and update are done."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        run(batch)
    dist.barrier()
    return (time.perf_counter() - start) / TIMED_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(64, options.width, options.layers, length=32)
    ddp = DistributedDataParallel(copy.deepcopy(model))
    optim, ddp_optim = optimizer(model), optimizer(ddp)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each, options.steps)
        for each in (optim, ddp_optim)
    ]
    text = torch.arange(4096) ** 2 % 61  # something that can be learned
    # What is pending is made at the end of `with`, and before any state_dict().
    with compile(train_step, parallel="replicate", overlap=True) as compiled_step:
        for step in range(options.steps):
            starts = torch.randint(4000, (4 * size,))[4 * rank : 4 * rank + 4]
            batch = torch.stack([text[start : start + 33] for start in starts])
            loss = compiled_step(model, optim, batch)  # of this rank's batch
            eager = train_step(ddp, ddp_optim, batch).detach()
            if rank == 0:
                print(f"step {step}: compiled {loss:.5f}, DDP {eager:.5f}")
            torch.testing.assert_close(loss, eager, rtol=1e-3, atol=1e-3)
            for schedule in schedules:
                schedule.step()

        def run_compiled(batch: torch.Tensor) -> None:
            compiled_step(model, optim, batch)

        def run_ddp(batch: torch.Tensor) -> None:
            train_step(ddp, ddp_optim, batch)

        own, other = (
            seconds_per_step(run_compiled, batch),
            seconds_per_step(run_ddp, batch),
        )
    if rank == 0:
        print(compiled_step.explain())
        print(
            f"{other / own:.2f} times as fast as DDP: {own * 1e3:.1f} ms a step, DDP "
            f"{other * 1e3:.1f} ms"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
