"""Measured exposure on a CUDA stream: what a wait takes from the stream that computes.

Also runs without pytest: ``python tests/gpu/run.py``.
"""

import torch
from torch import nn

from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import Ranks

WIDTH = 1024


def train(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def measure(overlap):
    """The exposure of a captured or an overlapped step; its steps go on as before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    transformation = None
    if overlap:
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations=True
        )
    mode = DataParallel("replicate")
    step = compile(gm_transformation=transformation, parallel_mode=mode)(train)
    batch = torch.randn(256, WIDTH, device="cuda")
    with step:
        for _ in range(3):
            step(model, optim, batch)
        before = [each.clone() for each in model[0]._parameters.values()]
        report = step.exposure(model, optim, batch)
        pairs = zip(before, model[0]._parameters.values(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        step(model, optim, batch)
    return report


def test_exposure_on_a_stream():
    with Ranks(2, backend="nccl") as ranks:
        for overlap, form in ((False, "whole"), (True, "steady")):
            for report in ranks.run(measure, overlap, timeout=300.0):
                assert (report.device, report.form) == ("cuda", form)
                assert 0 < report.exposed_ms < report.step_ms
                assert all(each.exposed_ms >= 0 for each in report.collectives)
                sent = sum(each.event.payload_bytes for each in report.collectives)
                assert sent == 4 * (WIDTH * WIDTH + WIDTH) * 4
