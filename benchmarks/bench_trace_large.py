"""How long does it take to trace a 70B-shaped step on 1024 simulated ranks, on one CPU?

32 blocks of Llama-70B's width (8192 wide, 28672 hidden, 64 heads) on 128 x 8 ranks:
tensor-parallel over tp, gradients reduced over dp as soon as they are there. Tensors are
on the meta device: shapes without memory.
"""

import resource
import time

import torch
import torch.distributed as dist
from _harness import arguments, publish
from _models import Transformer, tensor_parallel
from torch import nn
from torch.distributed.tensor import DTensor

from torchspmd import CommDebugMode
from torchspmd.report import format_bytes
from torchspmd.testing import fake_mesh


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    def reduce(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(local, group=group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)


def main() -> None:
    options = arguments(__doc__, rounds=1)
    torch.set_num_threads(1)
    rows = []
    with fake_mesh((128, 8), ("dp", "tp")) as mesh, torch.device("meta"):
        memory, start = peak_bytes(), time.perf_counter()
        torch.set_default_dtype(torch.bfloat16)
        model = Transformer(32, 8192, 28672, head_dim=128)
        tensor_parallel(model, mesh["tp"])
        reduce_gradients(model, mesh.get_group("dp"))
        built = time.perf_counter()
        inputs = torch.empty(1, 4096, 8192)
        with CommDebugMode() as mode:
            model(inputs).sum().backward()
        traced = time.perf_counter()
    for axis in ("tp", "dp"):
        for phase in ("forward", "backward"):
            total = mode.ledger.total(axis=axis, phase=phase)
            rows.append(
                {
                    "axis": axis,
                    "phase": phase,
                    "communications": total.count,
                    "payload": format_bytes(total.payload_bytes),
                    "wire/rank": format_bytes(total.wire_bytes),
                }
            )
    title = (
        f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} G parameters, 1024 ranks: "
        f"built in {built - start:.1f} s, one step traced in {traced - built:.1f} s, "
        f"{format_bytes(peak_bytes() - memory)} more memory at its peak"
    )
    publish(title, rows, options.json)


if __name__ == "__main__":
    main()
