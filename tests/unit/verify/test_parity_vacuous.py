"""Two dead models agree: that is a failure."""

import pytest
import torch
from torch import nn

from torchspmd.verify import compare_recordings, record

pytestmark = pytest.mark.unit


def judge(folder, model, *, lr=0.1, loss_of=None, steps=2, **options):
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=lr
    )
    with record(folder, model, optimizer) as recorder:
        for _ in range(steps):
            x = torch.linspace(-1, 1, 12).view(3, 4)
            loss = model(x).square().sum() if loss_of is None else loss_of(model, x)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step(loss)
    return compare_recordings(folder, folder, **options)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_a_living_model(tmp_path):
    assert judge(tmp_path / "a", net()).vacuous == ()


def test_zero_gradients(tmp_path):
    verdict = judge(tmp_path / "a", net(), loss_of=lambda m, x: (m(x) * 0).sum())
    assert not verdict
    assert verdict.first is None
    assert verdict.vacuous == (
        "the loss is flat: equal in all 2 steps",
        "all gradients are zero",
        "no parameter was changed by any step",
    )
    assert "the agreement would mean nothing:" in str(verdict)


def test_a_learning_rate_of_zero(tmp_path):
    verdict = judge(tmp_path / "a", net(), lr=0.0)
    assert verdict.vacuous == (
        "the loss is flat: equal in all 2 steps",
        "no parameter was changed by any step",
    )


def test_one_parameter_with_a_zero_gradient(tmp_path):
    model = net()
    nn.init.zeros_(model[1].weight)
    verdict = judge(
        tmp_path / "a", model, loss_of=lambda m, x: m[1](m[0](x).detach() * 0).sum()
    )
    assert "the gradient is zero in every step: 1.weight" in verdict.vacuous


def test_a_parameter_that_never_got_a_gradient(tmp_path):
    model = net()
    model.extra = nn.Linear(2, 2)
    used = nn.Sequential.forward
    model.forward = lambda x: used(model[:2], x)
    verdict = judge(tmp_path / "a", model)
    assert verdict.vacuous[0].startswith(
        "never got a gradient: extra.weight, extra.bias; if that is meant, declare it "
        "with without_grad=('extra.weight',)"
    )
    folder = tmp_path / "a"
    assert compare_recordings(folder, folder, without_grad=["extra.*"])


def test_a_frozen_parameter_needs_no_declaration(tmp_path):
    model = net()
    model[0].requires_grad_(False)
    assert judge(tmp_path / "a", model)


def test_nan_is_not_equal_to_nan(tmp_path):
    verdict = judge(
        tmp_path / "a", net(), loss_of=lambda m, x: (m(x) * float("nan")).sum()
    )
    assert not verdict
    assert verdict.first is not None
    assert verdict.first.cause.code == "not-finite"
    assert any(line.startswith("not a finite number:") for line in verdict.vacuous)


def test_a_model_without_parameters(tmp_path):
    model = nn.Linear(4, 1).requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with record(tmp_path / "a", model, optimizer) as recorder:
        recorder.end_step(model(torch.ones(1, 4)).sum())
    verdict = compare_recordings(tmp_path / "a", tmp_path / "a")
    assert verdict.vacuous == ("the model has no parameter to train",)
