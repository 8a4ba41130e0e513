"""What shadow steps cost: the first calls of a compiled step with them and without.

    OMP_NUM_THREADS=1 python benchmarks/bench_shadow.py

A transformer encoder with AdamW on one CPU thread, CPU time of this process.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from torchspmd import compile


def make(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    return model, torch.optim.AdamW(model.parameters())


def train(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def times(shadow: int, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the first three calls, and the median of steady ones."""
    model, optim = make(args.layers, args.width)
    step = compile(train, shadow=shadow)
    batch = torch.randn(args.batch, args.tokens, args.width)
    taken = []
    for _ in range(args.calls):
        start = time.process_time()
        step(model, optim, batch)
        taken.append(time.process_time() - start)
    if shadow:
        print(
            "\n".join(line for line in step.explain().splitlines() if "shadow" in line)
        )
    return sum(taken[:3]), statistics.median(taken[4:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument(
        "--group",
        action="store_true",
        help="on one rank of gloo: the default mode makes each shadow call twice",
    )
    args = parser.parse_args()
    if args.group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    count = sum(p.numel() for p in make(args.layers, args.width)[0].parameters())
    without, steady = times(0, args)
    with_shadow, later = times(3, args)
    print(f"{count / 1e6:.1f} million parameters, CPU seconds")
    print(
        f"three calls, the first captures: {without:.2f}, with shadow {with_shadow:.2f}"
    )
    print(f"a steady call: {steady:.3f}, after shadow steps {later:.3f}")


if __name__ == "__main__":
    main()
