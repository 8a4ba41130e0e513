"""How much longer does the host need for operators of many kinds in turn than for a loop?

    python benchmarks/measure_host.py

The same calls in several orders, by turns, so that a host that drifts is as quick for each:
milliseconds to issue all of them (small tensors: the device is never the limit), in forward
and in backward, with the shortest and the longest. ``loops`` are chains of 40 of one kind,
as ``torchspmd calibrate`` measures them.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _harness import publish

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = (1, 2, 16, 64)
EACH = 8  # calls of a kind in one chain
LOOP = 40
ROUNDS = 25
Function = Callable[[torch.Tensor], torch.Tensor]


def kinds() -> list[Function]:
    """Each takes a tensor of the shape, and gives one."""
    made: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    weight = (0.1 * torch.randn(64, 64, **made)).requires_grad_()
    bias = torch.randn(64, **made).requires_grad_()
    rows = torch.arange(16, device=DEVICE)
    ids = torch.zeros(SHAPE[:3], dtype=torch.int64, device=DEVICE)
    mask = torch.zeros(16, 64, device=DEVICE, dtype=torch.bool)
    return [
        lambda x: x + x,
        lambda x: x * 1.0,
        lambda x: -x,
        F.gelu,
        F.silu,
        F.relu,
        lambda x: F.linear(x, weight),
        lambda x: F.linear(x, weight, bias),
        lambda x: torch.matmul(x, weight),
        lambda x: x.view(2, 16, 64).view(SHAPE),
        lambda x: x.transpose(1, 2).transpose(1, 2),
        lambda x: x.transpose(1, 2).reshape(SHAPE),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).contiguous(),
        lambda x: x.float().bfloat16(),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.layer_norm(x, (64,), bias, bias),
        lambda x: F.embedding(ids, weight) + x,
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: torch.cat((x[..., :32], x[..., 32:]), -1),
        lambda x: x[:, :, rows],
        lambda x: F.dropout(x, 0.1),
        lambda x: torch.where(mask, 0.0, x),
        lambda x: x.pow(2),
        lambda x: torch.rsqrt(x.abs() + 1),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x.chunk(2, -1)[0].repeat(1, 1, 1, 2),
    ]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(order: Sequence[Function]) -> tuple[float, float]:
    """Of the host, in forward and in backward."""
    start = torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    synchronize()
    begin = time.perf_counter()
    x = start * 1.0
    for function in order:
        x = function(x)
    forward = time.perf_counter() - begin
    gradient = torch.ones_like(x)
    synchronize()
    begin = time.perf_counter()
    torch.autograd.grad(x, start, gradient)
    return forward, time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    every = kinds()
    shuffled = every * EACH
    random.Random(0).shuffle(shuffled)
    orders = {
        "kind by kind": [each for each in every for _ in range(EACH)],
        "in pairs": [each for _ in range(EACH // 2) for each in every for _ in "ab"],
        "shuffled": shuffled,
        "in turn": every * EACH,
    }
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, order in orders.items():
            times[name].append(seconds(order))
    loops = [
        [seconds([each] * LOOP) for _ in range(max(3, ROUNDS // 4))][1:]
        for each in every
    ]
    rows = []
    for place, phase in enumerate(("forward", "backward")):
        middles = (statistics.median(one[place] for one in loop) for loop in loops)
        loop = sum(middles) * EACH / LOOP
        for name, measured in times.items():
            each = [1e3 * one[place] for one in measured[1:]]
            middle = statistics.median(each)
            rows.append(
                {
                    "phase": phase,
                    "order": name,
                    "ms": middle,
                    "shortest": min(each),
                    "longest": max(each),
                    "of loops": middle / (1e3 * loop),
                }
            )
    title = f"{len(every) * EACH} calls of {len(every)} kinds on {DEVICE.type}, host"
    publish(title, rows, None)


if __name__ == "__main__":
    main()
