"""Compiled code keeps the order in which a schedule put collectives."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import fake_world

pytestmark = pytest.mark.fake

WORDS = {"all_reduce": "S", "wait_tensor": "w", "mm": "m"}


def letters(calls):
    """Starts, waits and matrix products, in order."""
    found = (next((v for k, v in WORDS.items() if k in call), "") for call in calls)
    return "".join(found)


def in_code(code):
    call = re.compile(
        r"extern_kernels\.mm|all_reduce_?\.default\(|wait_tensor\.default\("
    )
    return letters(m.group() for m in call.finditer(code.split("def call")[-1]))


def test_starts_and_waits_stay_among_the_products():
    @compile(
        backend="inductor",
        parallel_mode=DataParallel("replicate"),
        gm_transformation=GraphModuleTransformation(
            enable_graph_optimization=True,
            overlap_iterations=True,
            bucket_size_mb=0.01,
        ),
    )
    def step(model, optim, batch):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    with fake_world(2):
        layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
        model = nn.Sequential(*(part for each in layers for part in (each, nn.ReLU())))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(32, 64)
        _, codes = run_and_get_code(lambda: step(model, optim, batch))
        steady = step.programs[-1].run.forms["steady"].graph
        step.flush()
    expected = letters(str(n.target) for n in steady.nodes if n.op == "call_function")
    # Products stand between waits and between starts, so an order could be lost.
    assert re.search("wm+w", expected) and re.search("Sm+S", expected)
    assert expected in map(in_code, codes)
