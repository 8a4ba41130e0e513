"""How much does recording communication add to an eager training step?

The same tensor-parallel step on a fake group (tp=8, one thread) runs plain, under
torchspmd's CommDebugMode (communication only, and with the operator listing), and under
torch's own. Torch's is made anew for each step, since it cannot trace two.
"""

import torch
from _harness import arguments, publish, summary, time_interleaved
from _models import MLPStack, Transformer, tensor_parallel
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from torchspmd import CommDebugMode
from torchspmd.testing import fake_mesh

WORKLOADS = {
    "12-layer MLP 64/256": (MLPStack, (8, 64)),
    "4-layer transformer 64/256": (Transformer, (2, 16, 64)),
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
    contexts = {
        "torchspmd": CommDebugMode,
        "torchspmd, operations": lambda: CommDebugMode(operations=True),
        "torch CommDebugMode": TorchCommDebugMode,
    }

    def inside(context):
        def run():
            with context():
                training_step(model, optimizer, inputs)

        return run

    variants = {"no recording": lambda: training_step(model, optimizer, inputs)}
    variants |= {label: inside(context) for label, context in contexts.items()}
    times = time_interleaved(variants, rounds=rounds)
    medians = {label: summary(values)["median_ms"] for label, values in times.items()}
    base = medians["no recording"]
    torch_adds = medians["torch CommDebugMode"] - base
    return [
        {
            "workload": name,
            "variant": label,
            "step ms": median,
            "adds ms": median - base,
            "adds %": 100 * (median / base - 1),
            "of torch's": (median - base) / torch_adds,
        }
        for label, median in medians.items()
    ]


if __name__ == "__main__":
    main()
