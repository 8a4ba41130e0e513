"""How much does recording communication add to an eager training step?

The same tensor-parallel step on a fake group (tp=8, one thread) runs plain, under
torchspmd's CommDebugMode (communication only, and with the operator listing), and under
torch's own. "anew" enters a new context for each step and counts that too; torch's can
only be used so, since it cannot trace two steps.
"""

import contextlib

import torch
from _harness import arguments, publish, summary, time_interleaved
from _models import MLPStack, Transformer, tensor_parallel
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from torchspmd import CommDebugMode
from torchspmd.testing import fake_mesh

WORKLOADS = {
    "12-layer MLP": (MLPStack, (8, 64)),
    "4-layer transformer": (Transformer, (2, 16, 64)),
}


def training_step(model, optimizer, inputs):
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    options = arguments(__doc__, rounds=30)
    torch.set_num_threads(1)
    rows = []
    for name, (build, shape) in WORKLOADS.items():
        with fake_mesh(8, ("tp",)) as mesh:
            rows += measure(name, tensor_parallel(build(), mesh), shape, options.rounds)
    publish("Added time of recording one training step", rows, options.json)


def measure(name, model, shape, rounds):
    inputs = torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        training_step(model, optimizer, inputs)

    def anew(context):
        def run():
            with context():
                step()

        return run

    variants = {
        "no recording": (contextlib.nullcontext, step),
        "torchspmd": (CommDebugMode, step),
        "torchspmd, anew": (contextlib.nullcontext, anew(CommDebugMode)),
        "torchspmd, operations": (lambda: CommDebugMode(operations=True), step),
        "torch, anew": (contextlib.nullcontext, anew(TorchCommDebugMode)),
    }
    times = time_interleaved(variants, rounds=rounds)
    medians = {label: summary(values)["median_ms"] for label, values in times.items()}
    base = medians["no recording"]
    torch_adds = medians["torch, anew"] - base
    return [
        {
            "workload": name,
            "recording": label,
            "step ms": median,
            "adds ms": median - base,
            "adds %": 100 * (median / base - 1),
            "of torch's": (median - base) / torch_adds,
        }
        for label, median in medians.items()
    ]


if __name__ == "__main__":
    main()
