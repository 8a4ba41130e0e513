"""What does the wrapper cost on the host, against torch's own ``local_map``?

Both wrap the same tiny function and run in turns in one process on a fake group, so
only the wrapper is timed: taking arguments apart, crossing the border, wrapping.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _harness import arguments, publish
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map as torch_local_map

from torchspmd.local import local_map
from torchspmd.testing import fake_mesh

R, P, S0 = Replicate(), Partial(), Shard(0)
CALLS = 300  # in one round; long against the clock, short against a scheduler's slice


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call."""

    name: str
    layouts: tuple[list[Any], ...]
    out: list[Any]
    needs_grad: bool
    backward: bool = False
    num_ops: int = 1  # inside the function


CASES = (
    Case("forward, no gradient, 2 args", ([S0], [R]), [S0], False),
    Case("forward, gradient, 2 args", ([S0], [R]), [S0], True),
    Case("forward, gradient, replicated output", ([R], [R]), [R], True),
    # Here the recorded graph is read on every call, so each operator inside costs.
    Case("the same, 100 operators inside", ([R], [R]), [R], True, num_ops=100),
    Case("forward, gradient, 8 args", ([S0],) + ([R],) * 7, [S0], True),
    Case("forward and backward, sharded args", ([S0], [S0]), [S0], True, True),
    Case("forward and backward, partial output", ([S0], [S0]), [P], True, True),
)


def make_body(num_ops: int) -> Callable[..., torch.Tensor]:
    def body(first: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for _ in range(num_ops):
            first = first * 2
        return first

    return body


def make_call(
    which: Callable[..., Any], case: Case, tensors: list[Any], grad: Any
) -> Any:
    mapped = which(make_body(case.num_ops), case.out, case.layouts)
    if not case.backward:
        return lambda: mapped(*tensors)
    return lambda: torch.autograd.grad(mapped(*tensors), tensors[0], grad)


def time_round(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(case: Case, mesh: Any, rounds: int) -> dict[str, Any]:
    tensors = [
        distribute_tensor(torch.randn(16, 16), mesh, layout, src_data_rank=None)
        for layout in case.layouts
    ]
    for tensor in tensors:
        tensor.requires_grad_(case.needs_grad)
    grad = None
    if case.backward:
        entering = R if case.out == [P] else case.out[0]
        size = 16 if case.out == [S0] else 4
        whole = torch.ones(size, 16)
        grad = distribute_tensor(whole, mesh, [entering], src_data_rank=None)
    calls = [make_call(f, case, tensors, grad) for f in (torch_local_map, local_map)]
    for call in calls:
        time_round(call)  # warm-up: caches, allocator
    # The two take turns, so that a busy moment of the machine hits both.
    pairs = [(time_round(calls[0]), time_round(calls[1])) for _ in range(rounds)]
    ratios = sorted(ours / upstream for upstream, ours in pairs)
    return {
        "call": case.name,
        "torch us": statistics.median(upstream for upstream, _ in pairs),
        "ours us": statistics.median(ours for _, ours in pairs),
        "ours / torch": statistics.median(ratios),
        "spread": ratios[-1] - ratios[0],
    }


def main() -> None:
    options = arguments(__doc__, rounds=15)
    torch.set_num_threads(1)
    with fake_mesh(4, ("tp",)) as mesh:
        rows = [measure(case, mesh, options.rounds) for case in CASES]
    publish("Host time of one call, wrapper only", rows, options.json)


if __name__ == "__main__":
    main()
