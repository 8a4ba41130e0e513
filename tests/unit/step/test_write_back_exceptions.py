"""Exceptions while an overlapped step copies its results: repeatable, or known as lost."""

import pytest
import torch
from test_deferral_in_place import LOOKS, Training, assert_equal, batches
from torch import nn
from training import train, train_keeping_gradients

from torchspmd import _torch
from torchspmd.errors import LostStateError
from torchspmd.step import IterGraphModule, program
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.deferral.state import State
from torchspmd.step.pending import LostStates

pytestmark = [
    # Some of these steps keep gradients, and exceptions come call after call.
    pytest.mark.filterwarnings("ignore:.*nothing overlaps")
]

FUNCTIONS = {"in place": train, "fresh": train_keeping_gradients}


@pytest.fixture(scope="module", params=FUNCTIONS)
def training(request):
    """With updates in place, or with fresh tensors because gradients stay."""
    made = Training("momentum", FUNCTIONS[request.param])
    made.is_in_place = request.param == "in place"
    made.references = {count: made.expected(count) for count in (1, 2)}
    made.load()
    for batch in batches(2):  # the second finds gradients, if they stay
        made.step(batch)
    made.compiled.flush()
    return made


@pytest.fixture
def fail(monkeypatch):
    """Let the next copying of results end after so many tensors; None: before all."""

    def copy_some(count):
        copy_all = _torch.copy_all

        def copy(targets, sources):
            copy_all(targets[:count], sources[:count])
            monkeypatch.undo()
            raise KeyboardInterrupt("the cable")

        monkeypatch.setattr(_torch, "copy_all", copy)

    def write_nothing(*arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt("the cable")

    def arm(count):
        if count is None:
            monkeypatch.setattr(program, "write_values", write_nothing)
        else:
            copy_some(count)

    return arm


def interrupted(call):
    with pytest.raises(KeyboardInterrupt, match="the cable"):
        call()


def start(training, form):
    """Go so far that the next step runs this form; that step."""
    training.load()
    first, second = batches(2)
    if form == "first":
        return lambda: training.step(first)
    training.step(first)
    is_last = form == "last"
    return lambda: training.step(second, last_train_step=is_last)


@pytest.mark.parametrize("count", [None, 1])
@pytest.mark.parametrize("form", ["first", "steady", "last"])
def test_a_step_whose_results_were_not_all_copied_is_lost(training, fail, form, count):
    step = start(training, form)
    fail(count)
    interrupted(step)
    for look in LOOKS:
        with pytest.raises(LostStateError, match="states of an overlapped step"):
            look(training)
    training.model.load_state_dict(training.saved[0])
    with pytest.raises(LostStateError) as caught:
        step()
    assert "momentum_buffer" in str(caught.value)
    assert "running_mean" not in str(caught.value)  # that was loaded
    training.load()
    first, second = batches(2)
    training.step(first)
    training.step(second, last_train_step=True)
    assert_equal(training.snapshot(), training.references[2])


def test_lost_states_may_be_written_by_whoever_holds_the_tensors(training, fail):
    """Without a method of the model or the optimizer that could notice it."""
    step = start(training, "steady")
    held = training.tensors()
    before = [tensor.detach().clone() for tensor in held]
    fail(1)
    interrupted(step)
    with torch.no_grad():
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
    training.compiled.flush()  # nothing is lost any more
    assert all(map(torch.equal, held, before))


def test_a_flush_whose_results_were_not_copied(training, fail):
    training.load()
    training.step(batches(1)[0])
    fail(None)
    interrupted(training.model.state_dict)
    if training.is_in_place:  # nothing was to be copied
        assert_equal(training.snapshot(), training.references[1])
        return
    with pytest.raises(LostStateError) as caught:
        training.compiled.flush()
    assert "running_mean" not in str(caught.value)  # written when the step ended
    training.load()
    training.step(batches(1)[0], last_train_step=True)
    assert_equal(training.snapshot(), training.references[1])


@pytest.mark.parametrize("form", ["first", "steady", "last"])
def test_before_the_first_copy_the_step_can_be_repeated(training, monkeypatch, form):
    step = start(training, form)
    forms = training.run._finished()
    run = forms.run

    def run_in_vain(*arguments):
        run(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt("the cable")

    monkeypatch.setattr(forms, "run", run_in_vain)
    interrupted(step)
    assert training.run.is_pending == (form != "first")
    step()
    count = 1 if form == "first" else 2
    assert_equal(training.snapshot(), training.references[count])


def test_the_first_call_that_leaves_updates_is_watched_from_its_start(monkeypatch):
    training = Training("momentum")
    first, second = batches(2)
    training.step(first, last_train_step=True)  # nothing is pending, nothing is watched
    assert "state_dict" not in vars(training.model)

    def out_of_memory(*arguments):
        assert "state_dict" in vars(training.model)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(training.run._finished(), "run", out_of_memory)
        with pytest.raises(MemoryError):
            training.step(second)
    assert "state_dict" not in vars(training.model)  # nor after one that leaves nothing
    training.step(second)
    training.compiled.flush()
    result = training.snapshot()
    assert_equal(result, training.expected(2))


def test_a_module_that_is_called_by_hand_hands_over_its_outputs():
    """Without anybody who writes there is nothing that can be half written."""
    module = IterGraphModule(torch.fx.symbolic_trace(lambda x: x + x))
    assert module(torch.ones(2)).tolist() == [2.0, 2.0]
    assert module.state is State.IDLE and module.lost == ()


# What must be loaded.


def lost_of(model, optim, name):
    inventory = take_inventory((model, optim), {}, lift_numbers=True)
    names = [each.name for each in (*inventory.slots, *inventory.numbers)]
    return LostStates(inventory, [names.index(name)])


def test_a_counter_that_is_a_number_must_be_loaded_too():
    model = nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight]["step"] = 3
    lost = lost_of(model, optim, "Linear.weight.step")
    with pytest.raises(LostStateError, match=r"1 states .* lost: Linear.weight.step\."):
        lost.check()
    optim.load_state_dict(optim.state_dict())
    lost.check()


def test_a_gradient_must_be_given_up():
    model = nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    lost = lost_of(model, optim, "Linear.weight.grad")
    text = r"lost: Linear.weight.grad\. .* Gradients: zero_grad\(\) of the optimizer"
    with pytest.raises(LostStateError, match=text):
        lost.check()
    optim.zero_grad()
    lost.check()
