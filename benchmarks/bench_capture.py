"""How long until a training step runs at its steady speed, by depth and by phase?

Forward, loss, backward, gradient reduction and foreach AdamW of a GPT on a fake group of 8
ranks, with a cold optimizer: captured in the default mode, and with parallel="replicate",
overlap="auto" and overlap=True, up to the first steady step. Beside it, eager's first step
and that of DistributedDataParallel with torch.compile, a process of its own for each.
Totals are seconds of the processor, so that other work on the machine counts little; phases
are by the clock. Everything is imported and was used once, on a model of one layer.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _harness import publish
from _models import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchspmd.step import CompiledStep, compile
from torchspmd.testing import fake_mesh

DEPTHS = (3, 6, 12, 24, 48)
VARIANTS = ("default", "auto", "overlapped", "DDP", "DDP + torch.compile")
_FIRST, _STEADY = 4, 20  # calls: of them, those that a step is steady after
PHASES = ("capture", "functionalize", "passes", "proofs", "agreement", "lowering")


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    loss = model(tokens)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def first_steps(variant: str, num_layers: int) -> dict[str, Any]:
    """Processor seconds of the first step and of the one behind the steady form's first."""
    torch.manual_seed(0)
    model: nn.Module = GPT(num_layers, 64, 256, tied=False)
    step: Any = train_step
    if variant == "default":
        step = compile(train_step)
    elif variant in ("auto", "overlapped"):
        overlap = True if variant == "overlapped" else "auto"
        step = compile(train_step, parallel="replicate", overlap=overlap)
    else:
        model = DistributedDataParallel(model)
        if "compile" in variant:
            model.compile()
    optim = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(256, (2, 16))
    seconds = []
    for _ in range(_FIRST + _STEADY):
        start = time.process_time()
        step(model, optim, tokens)
        seconds.append(time.process_time() - start)
    steady = statistics.median(seconds[_FIRST:])
    found: dict[str, Any] = {
        "to steady s": sum(seconds[:_FIRST]) - 2 * steady,
        "steady ms": steady * 1e3,
    }
    if isinstance(step, CompiledStep):
        (program,) = step.programs
        found |= {"nodes": len(program.graph.graph.nodes)}
        found |= {name: program.phase_seconds.get(name, 0.0) for name in PHASES}
        step.flush()
    return found


def measure(variant: str, num_layers: int) -> dict[str, Any]:
    """The figures of one variant, from a process of its own."""
    command = [sys.executable, __file__, "--one", variant, "--layers", str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant}, {num_layers} layers:\n{done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=12, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        with fake_mesh(8):
            first_steps(options.one, 1)
        with fake_mesh(8):
            print(json.dumps(first_steps(options.one, options.layers)))
        return
    rows = []
    for depth in options.depths:
        found = {variant: measure(variant, depth) for variant in VARIANTS}
        ours, peer = found["overlapped"], found["DDP + torch.compile"]
        row: dict[str, Any] = {"layers": depth, "nodes": ours["nodes"]}
        row |= {f"{name} s": ours[name] for name in PHASES}
        row["overlapped, to steady s"] = ours["to steady s"]
        row["s a layer"] = ours["to steady s"] / depth
        row["default, to steady s"] = found["default"]["to steady s"]
        row["DDP + torch.compile, to steady s"] = peer["to steady s"]
        row |= {f"{name}, step ms": found[name]["steady ms"] for name in VARIANTS}
        rows.append(row)
    publish("Processor seconds until a GPT's step is steady", rows, options.json)


if __name__ == "__main__":
    main()
