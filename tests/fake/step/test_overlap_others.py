"""What else looks at, writes to or copies a model while a step has a pending update."""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch._C import _distributed_c10d as _c10d
from training import train as step

from torchspmd.errors import LostStateError, PassWarning, UsageError
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.flush_hooks import without_flushing
from torchspmd.testing import fake_world

pytestmark = [pytest.mark.filterwarnings("ignore::torchspmd.errors.PassWarning")]

X = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.fixture(autouse=True, scope="module")
def world():
    with fake_world(2):  # where a sum over ranks changes nothing
        yield


def overlapped(function):
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True, bucket_size_mb=1e-4
    )
    return compile(
        function,
        gm_transformation=transformation,
        parallel_mode=DataParallel("replicate", reduce="sum"),
    )


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def batches(count=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def captured(world):
    return overlapped(step)


@pytest.fixture
def pending(captured):
    """A model whose last update is pending, and the same after eager steps.

    The step is captured once for all tests; each has models of its own.
    """
    ours, theirs = build(), build()
    for batch in batches(3):
        captured(*ours, batch)
        step(*theirs, batch)
    yield captured, ours, theirs
    with contextlib.suppress(UsageError):  # what a test wrote is told, once
        captured.flush()
    captured.flush()


def weight_of(model, place=0, name="weight"):
    """A parameter, without a look that would flush."""
    with without_flushing():
        return getattr(model[place], name)


def test_two_steps_over_one_model():
    first, second = overlapped(step), overlapped(step)
    ours, theirs = build(), build()
    for number, batch in enumerate(batches(8)):
        found = (first, second)[number % 2](*ours, batch)
        assert torch.equal(found, step(*theirs, batch)), number


def test_two_models_that_train_each_other():
    def first_step(one, other, optim, batch):
        loss = one(other(batch).detach()).mean() - one(batch).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    def second_step(one, other, optim, batch):
        loss = -one(other(batch)).mean()
        loss.backward()
        optim.step()
        one.zero_grad()
        other.zero_grad()
        return loss

    def train(one_step, other_step):
        torch.manual_seed(0)
        one, other = nn.Linear(4, 1), nn.Linear(4, 4)
        optims = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (one, other)]
        found = []
        for batch in batches(6):
            found.append(one_step(one, other, optims[0], batch).item())
            found.append(other_step(one, other, optims[1], batch).item())
        return found

    expected = train(first_step, second_step)
    assert train(overlapped(first_step), overlapped(second_step)) == expected


def test_a_compiled_evaluation_sees_the_latest_weights():
    def evaluate(model, batch):
        return model(batch).square().mean()

    training, evaluation = overlapped(step), compile(evaluate)
    ours, theirs = build(), build()
    for batch in batches():
        training(*ours, batch)
        step(*theirs, batch)
        assert torch.equal(evaluation(ours[0], X), evaluate(theirs[0], X))


def test_steps_over_other_models_do_not_hurry_each_other(pending):
    compiled, (model, _), _ = pending
    weight = weight_of(model)
    before = weight.detach().clone()
    other = overlapped(step)
    other(*build(), X)
    assert torch.equal(weight, before)
    compiled.flush()
    assert not torch.equal(weight, before)


LOOKS = {
    "call": lambda model: model(X),
    "part": lambda model: model[0](X),
    "slice": lambda model: model[:2](X),
    "forward": lambda model: model.forward(X),
    "shared": lambda model: nn.Sequential(model[0], nn.ReLU())(X),
    "get": lambda model: model.get_parameter("0.weight"),
    "apply": lambda model: model.apply(lambda _: None)[0].weight,
    "double": lambda model: model.double()[0].weight,
}


def test_looks_that_flush(pending):
    compiled, ours, theirs = pending
    for name, look in LOOKS.items():
        assert torch.equal(look(ours[0]), look(theirs[0])), name
        if name != "double":  # which is another model
            compiled(*ours, X)
            step(*theirs, X)


def test_a_model_under_the_compiler_flushes_too(pending):
    compiled, ours, theirs = pending
    model = torch.compile(ours[0], backend="eager")
    for _ in range(2):
        assert torch.equal(model(X), theirs[0](X))
        compiled(*ours, X)
        step(*theirs, X)


def test_methods_keep_their_signature(pending):
    _, (model, _), (plain, _) = pending
    for name in ("forward", "state_dict"):
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (model, plain))
        assert ours == theirs


HOOKED = [(0, "state_dict"), (0, "load_state_dict")]
HOOKED += [(1, "state_dict"), (1, "load_state_dict"), (1, "step")]


@pytest.mark.parametrize(("owner", "method"), HOOKED)
def test_hooks_of_the_user_run_and_see_the_updates(pending, owner, method):
    """A flush removes what caused it; torch's tables of hooks must not notice."""
    _, ours, theirs = pending
    register, seen = getattr(ours[owner], f"register_{method}_pre_hook"), []
    for _ in range(2):
        register(lambda *_: seen.append(ours[0]._modules["0"].weight.detach().clone()))
    saved = [theirs[owner].state_dict()] if "load" in method else []
    expected = theirs[0][0].weight.detach().clone()
    getattr(ours[owner], method)(*saved)
    assert len(seen) == 2 and all(torch.equal(each, expected) for each in seen)


def test_a_write_between_steps_is_told_once(pending):
    compiled, (model, optim), _ = pending
    bias = weight_of(model, 2, "bias")
    with torch.no_grad():
        weight_of(model).mul_(0.5)
    for attempt in (lambda: compiled(model, optim, X), compiled.flush):
        with torch.no_grad():
            bias.mul_(0.5)
        with pytest.raises(UsageError) as error:
            attempt()
        text = str(error.value)
        assert "2.bias" in text
        assert "changed since the last step, which still has a pending update" in text
        assert "Call flush() of the step before you write" in text
    compiled.flush()  # on top of what was written, as the text says
    compiled(model, optim, X)


def test_other_memory_for_a_parameter_is_told(pending):
    compiled, (model, optim), _ = pending
    weight = weight_of(model)
    weight.data = torch.ones_like(weight)
    with pytest.raises(UsageError, match=r"0\.weight changed since the last step"):
        compiled(model, optim, X)


def test_a_parameter_is_written_after_the_update(pending):
    compiled, ours, theirs = pending
    for model, _ in (ours, theirs):
        model[0].weight.data.mul_(0.5)
    for batch in batches(2):
        assert torch.equal(compiled(*ours, batch), step(*theirs, batch))


def test_a_write_to_an_optimizer_state_is_told(pending):
    compiled, (model, optim), _ = pending
    optim.state[weight_of(model)]["exp_avg"].mul_(0.1)
    with pytest.raises(UsageError, match=r"0\.weight\.exp_avg changed since"):
        compiled(model, optim, X)


def pending_program(compiled):
    return next(program for program in compiled.programs if program.is_pending)


def lose_an_update(compiled, call):
    """As an exception does that comes while the update is made."""
    pending_program(compiled).run.marks.begin(0)


def lose_what_was_computed(compiled, call):
    """As an exception does that comes while results are copied at the end."""
    run = pending_program(compiled).run
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        inputs = take_inventory(call, {}, lift_numbers=True).flat_inputs()
        run.run_and_write(inputs, lambda outputs: 1 / 0, last_iter=False)


@pytest.mark.parametrize("lose", [lose_an_update, lose_what_was_computed])
def test_reductions_of_a_lost_update_are_waited_for(lose, pending):
    compiled, (model, optim), _ = pending
    before = _c10d._get_work_registry_size() - 2  # those of the update
    call = (model, optim, batches(1)[0])
    lose(compiled, call)
    with pytest.raises(LostStateError):
        compiled(*call)
    plain, fresh = build()
    step(plain, fresh, X)
    model.load_state_dict(plain.state_dict())
    optim.load_state_dict(fresh.state_dict())
    compiled(*call, last_train_step=True)
    assert _c10d._get_work_registry_size() == before


def test_writes_through_parameters_flush_first(pending):
    compiled, ours, theirs = pending
    for model, _ in (ours, theirs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
    found = compiled(*ours, X)
    assert torch.equal(found, step(*theirs, X))


def test_tensors_that_are_arguments_do_not_wait():
    def step_with_mean(model, optim, batch, means):
        loss = step(model, optim, batch)
        with torch.no_grad():
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        return loss

    compiled = overlapped(step_with_mean)
    ours, theirs = build(), build()
    lists = [
        [[p.detach().clone() for p in model.parameters()] for _ in range(2)]
        for model in (ours[0], theirs[0])
    ]
    for number, batch in enumerate(batches()):
        compiled(*ours, batch, lists[0][number % 2])
        step_with_mean(*theirs, batch, lists[1][number % 2])
        for mine, other in zip(*lists, strict=True):
            assert all(map(torch.equal, mine, other))
    refused = compiled.programs[-1].certificate.passes[-1].outcome.refused
    assert "is an argument of the step: the caller may read it" in refused[0]


def test_copies_flush(pending):
    compiled, ours, _ = pending
    for how in (copy.deepcopy, copy.copy, pickle.dumps):
        for it in ours:
            compiled(*ours, batches(1)[0])
            assert pending_program(compiled)
            how(it)
            assert not any(name.startswith("__") for name in vars(it))
            assert not any(program.is_pending for program in compiled.programs)


def test_copies_of_what_stands_for_methods_are_refused(pending):
    _, (model, _), _ = pending
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled while"):
            how(dict(vars(model)))


def test_a_norm_over_all_gradients_keeps_updates_from_waiting():
    def clipped_step(model, optim, batch):
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
        return loss

    compiled = overlapped(clipped_step)
    ours, theirs = build(), build()
    with pytest.warns(PassWarning, match="so nothing overlaps with it") as warned:
        for batch in batches():
            assert torch.equal(compiled(*ours, batch), clipped_step(*theirs, batch))
    assert sum("nothing overlaps" in str(each.message) for each in warned) == 1
    outcome = compiled.programs[-1].certificate.passes[-1].outcome
    assert outcome.changed == 0
    assert len(outcome.refused) == outcome.matched > 1
    assert "its update needs other reductions too, from" in outcome.refused[0]
    assert "a norm for clipping" in outcome.refused[0]


def scaled_step(model, optim, scaler, batch):
    loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("kind", "interval", "expected"),
    [
        (torch.optim.SGD, 1, [8.0, 16.0, 32.0, 64.0, 128.0]),
        (torch.optim.Adam, 2, [4.0, 8.0, 8.0, 16.0, 16.0]),
    ],
)
def test_the_scale_is_that_of_the_last_step(kind, interval, expected):
    """From the third call on a program is found by the guard fast path."""
    compiled = compile(scaled_step, parallel="replicate", overlap=True)
    found = []
    for function in (scaled_step, compiled):
        model, _ = build()
        optim = kind(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=interval)
        found.append([])
        for batch in batches():
            function(model, optim, scaler, batch)
            tracker = scaler.state_dict()["_growth_tracker"]
            found[-1].append((scaler.get_scale(), tracker))
    assert found[0] == found[1]
    assert [scale for scale, _ in found[0]] == expected
    # Else nothing waits.
    assert "pending updates are made in place" in compiled.explain()
