"""Measured exposure of real steps: nothing is changed, and ranks stay in step."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import train

from torchspmd import _torch
from torchspmd.errors import AgreementError, SpmdError
from torchspmd.step import DataParallel, GraphModuleTransformation, compile

WIDTH, LAYERS = 64, 3
FORMS = {"captured": "whole", "overlapped": "steady"}


def build(kind):
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout())]
    model = nn.Sequential(*layers)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    transformation = None
    if kind != "captured":
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations=True, bucket_size_mb=0.02
        )
    mode = DataParallel("replicate")
    step = compile(gm_transformation=transformation, parallel_mode=mode)(train)
    return step, model, optim, torch.randn(8, WIDTH)


def follow(kind, measure):
    """Losses and parameters of some steps, and the measurements in between."""
    step, *call = build(kind)
    losses, reports = [], []
    for number in range(5):
        losses.append(step(*call))
        if measure and number > 1:
            pending, flying = step.programs[-1].is_pending, _torch.num_unwaited()
            reports.append(step.exposure(*call, runs=2))
            assert step.programs[-1].is_pending == pending
            assert _torch.num_unwaited() == flying
    step.flush()
    return [*losses, *call[0].state_dict().values()], reports


def compare(kind):
    found, reports = follow(kind, measure=True)
    expected, _ = follow(kind, measure=False)
    pairs = zip(found, expected, strict=True)
    dist.barrier()  # all ranks get here, with nothing left on the wire
    return all(torch.equal(mine, theirs) for mine, theirs in pairs), reports


@pytest.mark.parametrize("kind", FORMS)
def test_training_goes_on_as_if_nobody_had_measured(ranks2, kind):
    for rank, (is_same, reports) in enumerate(ranks2.run(compare, kind)):
        assert is_same
        assert len(reports) == 3
        for report in reports:
            assert (report.rank, report.form, report.runs) == (rank, FORMS[kind], 2)
            assert 0 < report.exposed_ms < report.step_ms
            assert json.loads(report.to_json())["program"].startswith("train, program")
            check_collectives(kind, report.collectives)


def check_collectives(kind, collectives):
    sent = sum(each.event.payload_bytes for each in collectives)
    assert sent == LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    for each in collectives:
        assert each.event.group.ranks == (0, 1) and each.simulated_ms is not None
        assert each.least is not None and each.least[1] <= each.exposed_ms
        assert each.is_hidden or each.reason
    if kind == "captured":
        assert len(collectives) == 2 * LAYERS
        names = [f"Sequential.{2 * n}" for n in reversed(range(LAYERS)) for _ in "wb"]
        assert [each.what for each in collectives] == names
        return
    # A layer's gradients and the next one's bias; their order is the pass's own choice.
    modules = {each.what: each.modules for each in collectives}
    assert modules["bucket of 3 gradients"] == ("Sequential.4", "Sequential.2")


def ask_for_other_runs():
    step, *call = build("captured")
    for _ in range(3):
        step(*call)
    try:
        step.exposure(*call, runs=1 + dist.get_rank())
    except SpmdError as error:
        refusal = str(error)
        assert isinstance(error, AgreementError)
    # The next measurement is not disturbed by the one that was refused.
    return refusal, step.exposure(*call, runs=1).runs


def test_ranks_that_ask_for_something_else(ranks2):
    for text, runs in ranks2.run(ask_for_other_runs):
        assert text == (
            "exposure of 'train': ranks do not ask for the same\n\n"
            "  * rank 0: 1 runs of program 0\n  * rank 1: 2 runs of program 0\n\n"
            "Every rank must call it at the same place, with the same runs."
        )
        assert runs == 1
