"""Shadow steps: the first calls of a compiled step are also made eagerly, and compared.

Each fault is planted into the compiled step, or hidden from its guards; the shadow step
must name it. Right steps must pass, and nothing of the user's may change.
"""

import copy
import json
import random
import warnings

import pytest
import torch
from torch import nn
from training import train, train_keeping_gradients

from torchspmd.errors import ShadowError, ShadowWarning, UsageError
from torchspmd.step import Override, compile
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.compiled import CompiledStep
from torchspmd.step.program import Program
from torchspmd.step.runtime import Runtime
from torchspmd.step.shadow import check

BATCH = torch.linspace(-1, 1, 12).view(3, 4)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def product_default(monkeypatch):
    """As users have it; the other tests run without shadow steps."""
    monkeypatch.delenv("TORCHSPMD_SHADOW", raising=False)
    monkeypatch.delenv("TORCHSPMD_CHECK", raising=False)


def make(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, optimizer(model.parameters(), lr=0.1, **options)


def planted(monkeypatch, change):
    """Change the inputs of every run after the first: ``change(program, flat, calls)``."""
    real, calls = Program._run_and_write, []

    def run(self, flat, inventory, *, last):
        calls.append(1)
        change(self, flat, inventory, len(calls))
        return real(self, flat, inventory, last=last)

    monkeypatch.setattr(Program, "_run_and_write", run)


# ----------------------------------------------------------------------------
# What must be found.


def without_guards(compiled, args, kwargs):
    inventory = take_inventory(args, kwargs, lift_numbers=True)
    return compiled._programs.kept[0], inventory


def frozen_lr(program, flat, inventory, call, value=0.1):
    place = [number.name for number in inventory.numbers].index("SGD.group0.lr")
    flat[len(inventory.slots) + place] = value


def test_a_frozen_learning_rate_is_found(monkeypatch):
    planted(monkeypatch, frozen_lr)
    model, optim = make()
    step = compile(train)
    step(model, optim, BATCH)
    optim.param_groups[0]["lr"] = 0.09
    with pytest.raises(ShadowError) as caught:
        step(model, optim, BATCH)
    text = str(caught.value)
    assert "(call 2, program 0)" in text
    assert "parameter Sequential.0.weight differs by 0.11 of what the step" in text
    assert (
        "a schedule that has no effect: since capture SGD.group0.lr 0.1 -> 0.09" in text
    )
    assert "since call 2; 1 calls before it were equal" in text
    assert "are as the compiled step left them" in text


def test_a_stale_value_behind_no_guard_is_found(tmp_path):
    file = tmp_path / "scale"
    file.write_text("1.0")

    def step(model, optim, batch):
        scale = float(file.read_text())
        loss = model(batch).square().mean() * scale
        loss.backward()
        optim.step()
        optim.zero_grad()
        return {"loss": loss}

    compiled, (model, optim) = compile(step), make()
    compiled(model, optim, BATCH)
    file.write_text("1.5")
    with pytest.raises(ShadowError) as caught:
        compiled(model, optim, BATCH)
    text = str(caught.value)
    assert "returned value ['loss'] differs by 0.33 of its size" in text
    assert (
        "a Python value that the step reads has changed since it was captured" in text
    )


def test_a_stale_value_with_guards_disabled_is_found(monkeypatch):
    scale = 1.0

    def step(model, optim, batch):
        return train(model, optim, batch * scale)

    compiled, (model, optim) = compile(step), make()
    compiled(model, optim, BATCH)
    monkeypatch.setattr(CompiledStep, "_look_up", without_guards)
    scale = 2.0
    with pytest.raises(ShadowError, match="has changed since it was captured"):
        compiled(model, optim, BATCH)


def test_a_random_draw_made_once_is_found():
    def step(model, optim, batch):
        return train(model, optim, batch + torch.randn(3, 4))

    compiled, (model, optim) = compile(step), make()
    compiled(model, optim, BATCH)
    program = compiled.programs[0]
    run = program.run

    def with_one_draw(*flat, **options):
        state = torch.get_rng_state()
        torch.manual_seed(3)
        try:
            return run(*flat, **options)
        finally:
            torch.set_rng_state(state)

    program.run = with_one_draw
    with pytest.raises(ShadowError) as caught:
        compiled(model, optim, BATCH)
    assert "random generator is in another state" in str(caught.value)
    assert "a random draw that is made once" in str(caught.value)


def test_a_state_that_is_not_written_is_found(monkeypatch):
    def copied(program, flat, inventory, call):
        place = [slot.name for slot in inventory.slots].index("Sequential.0.bias")
        flat[place] = flat[place].clone()

    model, optim = make()
    planted(monkeypatch, copied)
    with pytest.raises(ShadowError) as caught:
        compile(train)(model, optim, BATCH)
    text = str(caught.value)
    assert "parameter Sequential.0.bias differs by 1 of what the step changes" in text
    assert "a state that is not written: Sequential.0.bias" in text


def test_an_effect_that_comes_later_is_found(tmp_path):
    model, optim = make()
    seen, file = [], tmp_path / "now"
    model[0].register_forward_hook(lambda *_: seen.append(1) if file.exists() else None)
    compiled = compile(train)
    for _ in range(2):
        compiled(model, optim, BATCH)
        model.zero_grad()
    file.touch()
    with pytest.raises(ShadowError) as caught:
        compiled(model, optim, BATCH)
    assert "an effect that happens only at capture" in str(caught.value)
    assert "seen" in str(caught.value)
    assert not seen  # the eager call's was put back


def test_a_step_that_would_raise_now_is_found(tmp_path):
    file = tmp_path / "stop"

    def step(model, optim, batch):
        if file.exists():
            raise ValueError("enough")
        return train(model, optim, batch)

    compiled, (model, optim) = compile(step), make()
    compiled(model, optim, BATCH)
    file.touch()
    with pytest.raises(ShadowError, match="the eager step raises ValueError: enough"):
        compiled(model, optim, BATCH)


@pytest.mark.parametrize("read", ("next call", "flush", "last step"))
def test_a_frozen_learning_rate_of_a_pending_update_is_found(monkeypatch, alone, read):
    model, optim = make()
    step = compile(parallel="replicate", overlap=True)(train)
    step(model, optim, BATCH)
    assert step.programs[0].is_pending
    planted(monkeypatch, frozen_lr)
    optim.param_groups[0]["lr"] = 0.05
    with pytest.raises(ShadowError) as caught:
        if read == "last step":
            step(model, optim, BATCH, last_train_step=True)
        step(model, optim, BATCH)
        if read == "flush":
            step.flush()
        step(model, optim, BATCH)
    text = str(caught.value)
    assert "(call 2, program 0)" in text
    assert "SGD.group0.lr 0.1 -> 0.05" in text
    step.close()


# ----------------------------------------------------------------------------
# What must not be disturbed.


def tensors_of(model, optim):
    states = [v for s in optim.state.values() for v in s.values()]
    return [*model.parameters(), *model.buffers(), *states]


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("step", (train, train_keeping_gradients))
def test_steps_are_those_without_shadow(alone, step, overlap):
    found = []
    for shadow in (0, 9):
        model, optim = make(momentum=0.9)
        model.append(nn.BatchNorm1d(1)).append(nn.Dropout(0.5))
        optim.add_param_group({"params": list(model[3].parameters())})
        compiled = compile(parallel="replicate", overlap=overlap, shadow=shadow)(step)
        torch.manual_seed(1)
        losses = []
        for number in range(5):
            optim.param_groups[0]["lr"] = 0.1 / (1 + number)
            losses.append(compiled(model, optim, torch.randn(3, 4)))
        compiled.close()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([*losses, *tensors_of(model, optim), *gradients, torch.rand(3)])
        assert all(p.grad is None for p in model.parameters()) == (not gradients)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other)) and len(found[0]) == len(other)


def test_an_average_of_what_rounding_moves_is_no_difference(alone):
    """A bias behind a norm has no gradient but rounding, which the average follows."""
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2)
    )
    model[2] = nn.InstanceNorm1d(2, affine=True)
    average = copy.deepcopy(model)

    @compile(shadow=3)
    def step(model, optim, average, batch):
        loss = model(batch).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            pairs = zip(average.parameters(), model.parameters(), strict=True)
            for old, new in pairs:
                old.lerp_(new, 0.1)
        return loss.detach()

    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        step(model, optim, average, torch.randn(3, 4))
    assert "3 calls were also made eagerly" in step.explain()


def test_what_is_made_of_parameters_that_rounding_moves_is_no_difference(alone):
    """Adam makes whole steps of the gradient of a bias before a norm, which is rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    @compile(shadow=3)
    def step(model, optim, batch):
        model(batch).square().mul(batch).mean().backward()
        optim.step()
        optim.zero_grad()
        return model(batch).detach(), model[0].bias.detach().clone()

    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optim, torch.randn(3, 4))
    assert "3 calls were also made eagerly" in step.explain()


def run_between_norms(seed, schedule=()):
    """Norms before and after a layer leave of some gradients nothing but rounding."""
    torch.manual_seed(seed)
    parts = [nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()]
    norms = [nn.Sequential(*copy.deepcopy(parts)) for _ in range(2)]
    model = nn.Sequential(norms[0], nn.Linear(4, 4), nn.BatchNorm1d(4), norms[1])
    optim = torch.optim.SGD(model.parameters(), lr=0.05)

    @compile(shadow=3)
    def step(model, optim, batch):
        loss = model(batch).square().mul(batch).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    for number in range(3):
        optim.param_groups[0]["lr"] = dict(schedule).get(number, 0.05)
        step(model, optim, torch.randn(3, 4))
    assert "3 calls were also made eagerly" in step.explain()


@pytest.mark.parametrize("seed", (2, 8))
def test_rounding_that_the_step_amplifies_is_no_difference(alone, monkeypatch, seed):
    run_between_norms(seed)
    monkeypatch.setattr(check, "has_same_kernels", lambda *call: True)
    with pytest.raises(ShadowError):  # the second eager call is what tells
        run_between_norms(seed)


def test_memory_for_one_eager_call_alone_is_said(alone, monkeypatch):
    monkeypatch.setattr(check, "needed_bytes", lambda *call, calls=1: calls)
    monkeypatch.setattr(check, "free_bytes", lambda inventory: 1)
    step = run_calls(3)
    assert "3 calls were also made eagerly" in step.explain()
    assert "memory is short for a second eager call" in step.explain()


def test_a_frozen_rate_is_found_where_rounding_is_amplified(alone, monkeypatch):
    planted(monkeypatch, lambda *call: frozen_lr(*call, value=0.05))
    with pytest.raises(ShadowError, match="a schedule that has no effect"):
        run_between_norms(2, {1: 0.04})


def test_a_step_that_overflows_is_no_difference():
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(train, shadow=3)
    for scale in (1.0, 1e30, 1.0):
        step(model, optim, BATCH * scale)
    assert model.weight.isnan().any()
    assert "3 calls were also made eagerly" in step.explain()


def test_nothing_is_replaced():
    model, optim = make(torch.optim.AdamW)
    compiled = compile(train)
    compiled(model, optim, BATCH)
    before = [*map(id, tensors_of(model, optim)), id(optim.state), random.getstate()]
    versions = [each._version for each in tensors_of(model, optim)]
    compiled(model, optim, BATCH)
    compiled(model, optim, BATCH)
    after = [*map(id, tensors_of(model, optim)), id(optim.state), random.getstate()]
    assert before == after
    assert len(compiled.programs) == 1
    assert versions != [each._version for each in tensors_of(model, optim)]


def test_recurrent_layers_keep_their_own_weights():
    def step(model, optim, batch):
        loss = model(batch)[0].square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    seen = []
    for wrap in (lambda each: each, compile):
        torch.manual_seed(0)
        model = nn.LSTM(4, 4, dropout=0.1, num_layers=2)
        wrap(step)(model, torch.optim.SGD(model.parameters(), lr=1.0), BATCH)
        seen.append(model.eval()(BATCH)[0])  # reads a list of weights of its own
    assert torch.equal(*seen)


def test_an_exception_in_the_eager_call_loses_nothing(monkeypatch):
    def step(model, optim, batch):
        if state["stop"]:
            raise KeyboardInterrupt
        return train(model, optim, batch)

    state = {"stop": False}
    model, optim = make()
    compiled = compile(shadow=5)(step)
    compiled(model, optim, BATCH)
    before = copy.deepcopy(model.state_dict())
    state["stop"] = True
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CompiledStep, "_look_up", without_guards)
        compiled(model, optim, BATCH)
    state["stop"] = False
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    compiled(model, optim, BATCH)


def test_arguments_that_share_memory_share_it_in_the_copies():
    def step(model, optim, whole, rows):
        rows.mul_(2.0)
        return train(model, optim, whole)

    found = []
    for run in (step, compile(step)):
        model, optim = make()
        memory = torch.linspace(-1, 1, 24)
        try:
            found.append(run(model, optim, memory[:12].view(3, 4), memory[4:8]).item())
        except Exception as error:
            assert type(error).__name__ != "ShadowError"
            return
    assert found[0] == found[1]


# ----------------------------------------------------------------------------
# How many, and what is said.


def made(step):
    (line,) = [line for line in step.explain().splitlines() if "also made" in line]
    return int(line.split()[2])


def run_calls(count, **options):
    model, optim = make()
    step = compile(**options)(train)
    for _ in range(count):
        step(model, optim, BATCH)
    return step


def test_three_calls_by_default():
    step = run_calls(6)
    assert made(step) == 3
    assert "equal bits; they took" in step.explain()


def test_how_many_can_be_chosen(monkeypatch):
    assert made(run_calls(4, shadow=2)) == 2
    assert "shadow" not in run_calls(3, shadow=0).explain()
    assert made(run_calls(8, shadow=1, shadow_every=3)) == 3
    monkeypatch.setenv("TORCHSPMD_SHADOW", "1")
    assert made(run_calls(4)) == 1
    monkeypatch.setenv("TORCHSPMD_CHECK", "1")
    assert made(run_calls(5)) == 5
    monkeypatch.setenv("TORCHSPMD_SHADOW", "many")
    monkeypatch.delenv("TORCHSPMD_CHECK")
    with pytest.raises(UsageError, match="TORCHSPMD_SHADOW='many'; set a number"):
        compile(train)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"shadow": -1}, "compile(shadow=-1): pass how many calls after each capture"),
        ({"shadow": True}, "compile(shadow=True)"),
        ({"shadow_every": 0}, "compile(shadow_every=0): pass after how many calls"),
        ({"shadow": 0, "shadow_every": 5}, "nothing would be compared"),
    ),
)
def test_wrong_numbers(options, words):
    with pytest.raises(UsageError) as caught:
        compile(**options)(train)
    assert words in str(caught.value)


def test_a_pending_update_is_made_before_a_later_comparison(alone):
    model, optim = make()
    step = compile(parallel="replicate", overlap=True, shadow=2, shadow_every=6)(train)
    for _ in range(9):
        step(model, optim, BATCH)
    assert made(step) == 4
    step.close()


@pytest.mark.parametrize("number", (1, 2, 3))
def test_states_that_are_cleared_while_an_update_is_pending(alone, number):
    models = []
    for wrap in (lambda step: step, compile(parallel="replicate", overlap=True)):
        model, _ = make()
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = wrap(train)
        for call in range(5):
            if call == number:
                optim.state.clear()
            step(model, optim, BATCH)
        models.append(model)
    step.close()
    parameters = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(eager, ours) for eager, ours in parameters)
    assert made(step)


def test_what_does_not_fit_is_said_once(monkeypatch):
    monkeypatch.setattr(check, "free_bytes", lambda inventory: 100)
    with pytest.warns(ShadowWarning) as told:
        step = run_calls(3)
    assert len(told) == 1
    assert "copies and an eager call would take" in str(told[0].message)
    assert "run a few steps with fewer layers" in step.explain()


def test_an_eager_call_that_runs_out_of_memory_is_said(monkeypatch):
    full = [False]

    def step(model, optim, batch):
        if full[0]:
            raise torch.OutOfMemoryError("no more")
        return train(model, optim, batch)

    model, optim = make()
    compiled = compile(step)
    compiled(model, optim, BATCH)
    full[0] = True
    monkeypatch.setattr(CompiledStep, "_look_up", without_guards)
    with pytest.warns(ShadowWarning, match="an eager call ran out of memory"):
        compiled(model, optim, BATCH)
    assert "ran out of memory" in compiled.explain()


def test_code_that_is_written_for_shards_is_said(alone):
    def step(model, optim, batch):
        loss = model(batch).square().mean()
        loss.backward()
        norm = model[0].weight.grad.to_local().square().sum()  # a DTensor's method
        optim.step()
        optim.zero_grad()
        return loss, norm

    model, optim = make()
    compiled = compile(step, parallel="fully_shard")
    with pytest.warns(ShadowWarning, match="raises AttributeError on whole parameters"):
        compiled(model, optim, BATCH)
    assert "its code is written for shards" in compiled.explain()


def test_what_ranks_say_about_skipped_calls_is_kept():
    """A note that speaks of memory is no shortage of it: only that one warns."""
    shadow = check.Shadow("train", "0", train, check.ShadowPlan(3))
    told = [check.Skip("rank 1 lost 2 GiB of memory"), check.Skip("full", warns=True)]
    sent = [json.dumps(check._Told(each, "", ("sum",))) for each in told]
    with pytest.warns(ShadowWarning) as warned:
        for text in sent:
            shadow._skip(check._Told.read(text).void)
    assert [str(each.message) for each in warned] == [
        "train: calls are not compared with eager ones: full."
    ]
    assert [line.split(": ")[-1] for line in shadow.lines()] == [
        "rank 1 lost 2 GiB of memory",
        "full",
    ]


def test_inductor_and_random_numbers_are_not_compared():
    model, optim = make()
    model.append(nn.Dropout(0.5))
    step = compile(backend="inductor")(train)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShadowWarning)
        step(model, optim, BATCH)
    assert "Inductor draws other random numbers than eager code" in step.explain()


def test_stand_ins_are_not_compared():
    class Same(Override):
        def selects(self, fqn, module):
            return isinstance(module, nn.Tanh)

        def replacement(self, fqn, module):
            return nn.Tanh()

    model, optim = make()
    step = compile(module_override=[Same()])(train)
    step(model, optim, BATCH)
    assert "shadow steps: none, modules have stand-ins" in step.explain()


def test_a_learning_rate_frozen_by_the_lowering_is_found(monkeypatch, alone):
    """Fused, overlapped, compiled: the rate that is carried to the next step stays."""
    first, lower = {}, Runtime.compile_graph

    def frozen(rate):
        return first.setdefault("rate", rate.clone())

    def freeze(runtime, graph, compiled):
        for node in graph.graph.find_nodes(
            op="call_function", target=aten.clone.default
        ):
            if node.meta["val"].ndim == 0:
                node.target = frozen
        return lower(runtime, graph, compiled)

    monkeypatch.setattr(Runtime, "compile_graph", freeze)
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = compile(parallel="replicate", overlap=True, backend="inductor")(train)
    with pytest.raises(ShadowError) as caught:
        for number in range(5):
            optim.param_groups[0]["lr"] = 0.1 / (1 + number)
            step(model, optim, BATCH)
    assert "parameter Linear.weight differs" in str(caught.value)
    assert "a schedule that has no effect: since capture SGD.group0.lr" in str(
        caught.value
    )
    step.close()
