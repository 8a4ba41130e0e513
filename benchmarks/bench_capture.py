"""How long does it take to capture a transformer's training step, by depth?

Forward, loss, backward, gradient reduction and foreach AdamW of a transformer on a fake
group of 8 ranks, captured as one functional graph in the default mode (DTensor rules) and
in DataParallel mode (plain tensors). The step of the captured graph is timed beside eager,
on one device, without a process group.
"""

from contextlib import nullcontext

import torch
from _harness import arguments, publish, summary, time_interleaved
from _models import Transformer
from torch import nn

from torchspmd.step import CompiledStep, DataParallel, compile
from torchspmd.testing import fake_mesh

DEPTHS = (3, 6, 12, 24)


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def build(num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = Transformer(num_layers)
    optim = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(2, 16, 64)
    train_step(model, optim, batch)  # so that there is optimizer state
    return model, optim, batch


def capture_seconds(num_layers: int, mode: DataParallel | None) -> CompiledStep:
    model, optim, batch = build(num_layers)
    step = compile(parallel_mode=mode)(train_step)
    step(model, optim, batch)
    return step


def step_times(num_layers: int, rounds: int) -> dict[str, float]:
    model, optim, batch = build(num_layers)
    step = compile(train_step)
    step(model, optim, batch)
    times = time_interleaved(
        {
            "eager": (nullcontext, lambda: train_step(model, optim, batch)),
            "compiled": (nullcontext, lambda: step(model, optim, batch)),
        },
        rounds=rounds,
    )
    return {name: summary(values)["median_ms"] for name, values in times.items()}


def main() -> None:
    options = arguments(__doc__, rounds=5)
    torch.set_num_threads(1)
    with fake_mesh(8):
        capture_seconds(1, None)  # imports of the tracer are not part of a capture
    rows = []
    for num_layers in DEPTHS:
        row: dict[str, object] = {"layers": num_layers}
        with fake_mesh(8):
            for name, mode in (("default", None), ("replicate", DataParallel())):
                (program,) = capture_seconds(num_layers, mode).programs
                row[f"{name} nodes"] = len(program.graph.graph.nodes)
                row[f"{name} s"] = program.capture_seconds
                row[f"{name} ms/layer"] = program.capture_seconds * 1e3 / num_layers
        for name, milliseconds in step_times(num_layers, options.rounds).items():
            row[f"{name} step ms"] = milliseconds
        rows.append(row)
    publish("Capture of a transformer's step", rows, options.json)


if __name__ == "__main__":
    main()
