"""Wrong use of check_parity is told in one sentence, before anything runs."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from torchspmd import local_map
from torchspmd._cli import main
from torchspmd.errors import UsageError, WorldError
from torchspmd.testing import Ranks, fake_world
from torchspmd.verify import (
    check_local_parity,
    check_parity,
    compare_recordings,
    record,
)
from torchspmd.verify.parity.run import explain_size, explain_world

BATCH = torch.linspace(-1, 1, 24).view(6, 4)


def build():
    return nn.Linear(4, 2)


def step(model, batch):
    return model(batch).square().mean()


def huge():
    return nn.Linear(2**25, 2**25)


def no_model():
    return "model"


def no_loss(model, batch):
    return None


def restless(model, batch):
    noise = torch.rand((), generator=restless.generator)
    return (model(batch) * noise).square().mean()


restless.generator = torch.Generator()


def test_functions_that_cannot_travel_are_all_named():
    with pytest.raises(UsageError) as caught:
        check_parity(
            lambda: nn.Linear(4, 2), step, BATCH, parallelize=lambda m, mesh: m
        )
    text = str(caught.value)
    assert "build_model (test_functions_that_cannot_travel_are_all_named" in text
    assert "; parallelize (" in text
    assert "define it with `def` at the top level of a module" in text


def test_a_partial_travels_if_its_function_does():
    def inner():
        return nn.Linear(4, 2)

    with pytest.raises(UsageError, match=r"build_model \(partial\) cannot be sent"):
        check_parity(functools.partial(inner), step, BATCH)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mesh": {}}, r"mesh=\{\}: every axis needs at least one rank"),
        ({"mesh": {"tp": 0}}, "every axis needs at least one rank"),
        ({"mesh": {"tp": 2}, "world_size": 4}, "but the mesh has 2 ranks"),
        (
            {"mesh": {"tp": 2}, "ranks": Ranks(4)},
            "ranks has 4 ranks, but the mesh has 2",
        ),
        ({"steps": 0}, "at least one step is needed"),
        ({"data_axes": ("dp",)}, "has no axis dp"),
        ({"mesh": {"dp": 4}}, r"a batch of 6 rows cannot be split evenly over 4 ranks"),
    ],
)
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(UsageError, match=words):
        check_parity(build, step, BATCH, **arguments)


def test_a_world_too_large_for_the_machine():
    with pytest.raises(UsageError, match=r"5000 ranks are too many for this machine"):
        check_parity(build, step, BATCH, world_size=5000)
    assert explain_world(4) is None


def test_a_model_that_does_not_fit_one_device():
    with pytest.raises(UsageError, match="the model does not fit one device") as caught:
        check_parity(huge, step, BATCH)
    assert "`torchspmd parity a b`" in str(caught.value)
    assert "TiB" not in str(caught.value)
    text = explain_size(2**50, 4)
    assert text is not None and "1.05e+06 GiB of parameters" in text
    assert explain_size(100, 4) is None


def test_a_step_that_is_not_deterministic():
    with pytest.raises(UsageError, match="the step is not deterministic") as caught:
        check_parity(build, restless, BATCH)
    assert "first in the loss of step 0" in str(caught.value)


def test_build_model_and_step_must_return_something():
    with pytest.raises(UsageError, match="build_model returned a str"):
        check_parity(no_model, step, BATCH)
    with pytest.raises(UsageError, match="step returned NoneType; return the loss"):
        check_parity(build, no_loss, BATCH)


def test_a_process_group_is_there_already():
    with (
        fake_world(2),
        pytest.raises(WorldError, match=r"use torchspmd\.verify\.record"),
    ):
        check_parity(build, step, BATCH)


def test_layouts_of_a_local_function_are_counted():
    with pytest.raises(UsageError, match="2 arguments, but 1 layouts"):
        check_local_parity(step, step, (1, 2), (None,), mesh={"tp": 2})


def test_a_local_function_that_cannot_travel_is_named_as_it_was_given():
    with pytest.raises(UsageError) as caught:
        check_local_parity(
            local_map(lambda x: x, out_placements=[Shard(0)]),
            lambda x: x,
            (BATCH,),
            ([Shard(0)],),
            mesh={"tp": 2},
        )
    text = str(caught.value)
    assert text.startswith("check_local_parity: function (test_a_local_function_")
    assert "; reference (test_a_local_function_" in text and "parallelize" not in text


# The command line.
def recorded(folder, lr=0.1):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with record(folder, model, optimizer) as recorder:
        for _ in range(2):
            loss = step(model, BATCH)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step(loss)
    return str(folder)


def test_exit_codes(tmp_path, capsys):
    one, same = recorded(tmp_path / "one"), recorded(tmp_path / "same")
    other = recorded(tmp_path / "other", lr=0.3)
    assert main(["parity", one, same, "--bitwise"]) == 0
    assert "agrees with one device" in capsys.readouterr().out
    assert main(["parity", one, other]) == 1
    assert "first difference: " in capsys.readouterr().out
    assert main(["parity", one, str(tmp_path / "none")]) == 2
    assert "holds no recording" in capsys.readouterr().err
    assert main(["parity", one, same, "--bitwise", "--tolerance", "0.1"]) == 2
    assert "not both" in capsys.readouterr().err


def test_verdict_as_json(tmp_path, capsys):
    import json

    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other", lr=0.3)
    assert main(["parity", one, other, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] is False
    assert verdict["first"]["cause"]["code"] == "update-factor"
    assert main(["parity", one, other, "--tolerance", "0.9"]) == 0


# ----------------------------------------------------------------------------
# Two dead models agree: that is a failure.


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
