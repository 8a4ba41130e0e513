"""Shadow steps on real ranks: right steps pass, one rank's fault stops all."""

import os
import pathlib
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchspmd.errors import ShadowError
from torchspmd.step import DataParallel, compile
from torchspmd.step.program import Program


def train(model, optim, batch):
    rows = model(batch)
    loss = rows.square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    return {"loss": loss, "rows": rows.detach()}


def make(optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 2)
    )
    return model, optimizer(model.parameters(), lr=0.01, **options)


def run(options):
    os.environ["TORCHSPMD_SHADOW"] = "3"
    model, optim = make()
    with compile(**options)(train) as step:
        torch.manual_seed(1)
        for number in range(6):
            optim.param_groups[0]["lr"] = 0.01 / (1 + number)
            if number == 4:
                model.state_dict()  # flushes
            step(model, optim, torch.randn(3, 4))
        text = step.explain()
    return [line for line in text.splitlines() if "shadow" in line]


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"parallel": "replicate", "overlap": True},
        {"parallel": DataParallel("replicate", reduce="sum"), "overlap": False},
        {"parallel": "fully_shard"},
    ),
    ids=("default", "overlap", "replicate", "fully_shard"),
)
def test_right_steps_pass(ranks, options):
    for lines in ranks.run(run, options):
        (line,) = lines
        assert "3 calls were also made eagerly" in line


def train_on(model, optim, batch):
    """Gradients are never cleared: each step adds to what the one before has clipped."""
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    return loss


def run_on():
    os.environ["TORCHSPMD_SHADOW"] = "3"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with compile(train_on, parallel="fully_shard", overlap=True) as step:
        for _ in range(5):
            step(model, optim, torch.randn(3, 4))
        return step.explain()


def test_gradients_that_are_kept_and_still_pending(ranks2):
    for text in ranks2.run(run_on):
        assert "calls were also made eagerly" in text


def run_fault(fault):
    os.environ["TORCHSPMD_SHADOW"] = "3"
    model, optim = make(torch.optim.SGD)
    step = compile(parallel="replicate", overlap=False)(train)
    step(model, optim, torch.randn(3, 4))
    real, rank = Program._run_and_write, dist.get_rank()

    def frozen(self, flat, inventory, *, last):
        place = [number.name for number in inventory.numbers].index("SGD.group0.lr")
        flat[len(inventory.slots) + place] = 0.01
        return real(self, flat, inventory, last=last)

    if fault == "other parameters" and rank == 1:
        with torch.no_grad():
            model[0].bias.add_(1e-3)
    optim.param_groups[0]["lr"] = 0.005
    run_and_write = frozen if fault == "frozen" and rank == 1 else real
    with mock.patch.object(Program, "_run_and_write", run_and_write):
        try:
            step(model, optim, torch.randn(3, 4))
        except ShadowError as error:
            return str(error)
    return "nothing was found"


def test_a_fault_of_one_rank_is_an_error_on_all(ranks2):
    first, second = ranks2.run(run_fault, "frozen")
    assert "rank 1: parameter Sequential.0.weight differs" in first
    assert "a schedule that has no effect: since capture SGD.group0.lr" in second


def test_parameters_that_differ_between_ranks_are_found(ranks2):
    for text in ranks2.run(run_fault, "other parameters"):
        assert (
            "replicated parameter Sequential.0.bias has other values on rank 0" in text
        )
        assert "something writes to the parameters of one rank alone" in text


def run_branch():
    """One rank's eager call would use another layer now than it was captured with."""
    os.environ["TORCHSPMD_SHADOW"] = "3"
    file = pathlib.Path(tempfile.mkdtemp()) / "layer"
    file.write_text("0")
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optim, batch):
        model[int(file.read_text())](batch).sum().backward()
        optim.step()
        optim.zero_grad()

    compiled = compile(parallel="replicate", overlap=False)(step)
    compiled(model, optim, torch.ones(2, 4))
    file.write_text(str(dist.get_rank()))
    try:
        compiled(model, optim, torch.ones(2, 4))
    except ShadowError as error:
        return str(error)
    return "nothing was found"


def test_ranks_whose_eager_calls_differ_do_not_hang(ranks2):
    for text in ranks2.run(run_branch):
        assert "ranks reduce other gradients in their eager calls" in text
