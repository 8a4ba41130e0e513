"""Does a compiled training step need more memory than the eager one?

The peak of all tensors alive during one step, state and gradients included, of a stack of
MLPs and a small transformer with four optimizers: eager, compiled, and what the graph
predicts. Counted operator by operator on CPU, so the figures do not depend on an allocator.
"""

from collections.abc import Callable

import torch
from _harness import arguments, publish
from _memory import MemoryCounter
from _models import MLPStack, Transformer
from torch import nn

from torchspmd.step import compile

MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (MLPStack(6, 128, 512), torch.randn(64, 128)),
    "transformer": lambda: (Transformer(4, 128, 512, 16), torch.randn(4, 64, 128)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
}


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    optim.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    return loss.detach()


def peak(step: Callable[..., object], *args: object) -> int:
    """The peak of one step, after three to warm up."""
    model, optim, batch = args
    assert isinstance(model, nn.Module) and isinstance(optim, torch.optim.Optimizer)
    assert isinstance(batch, torch.Tensor)
    for _ in range(3):
        step(model, optim, batch)
    states = [t for state in optim.state.values() for t in state.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    counter = MemoryCounter([*model.parameters(), *states, *gradients, batch])
    del states, gradients
    with counter:
        step(model, optim, batch)
    return counter.peak_bytes


def measure(model: str, optimizer: str) -> dict[str, object]:
    row: dict[str, object] = {"model": model, "optimizer": optimizer}
    peaks = {}
    compiled = compile(train_step, shadow=0)  # no copies of compared calls
    for name, step in (("eager", train_step), ("compiled", compiled)):
        torch.manual_seed(0)
        module, batch = MODELS[model]()
        optim = OPTIMIZERS[optimizer](module.parameters())
        peaks[name] = peak(step, module, optim, batch)
        row[f"{name} MiB"] = peaks[name] / 2**20
    predicted = compiled.programs[-1].peak_memory
    assert predicted is not None
    row["predicted MiB"] = predicted.total_bytes / 2**20
    row["compiled / eager"] = f"{peaks['compiled'] / peaks['eager']:.3f}"
    return row


def main() -> None:
    options = arguments(__doc__, rounds=1)
    torch.set_num_threads(1)
    rows = [measure(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
    publish("Peak memory of a training step", rows, options.json)


if __name__ == "__main__":
    main()
