"""Work that is left for the next iteration: same results, or refused."""

import copy
import functools
import pickle

import pytest
import torch
from torch import fx, nn
from training import train as plain_step
from training import train_keeping_gradients as keep_gradients

from torchspmd.errors import DeferralError, PassWarning, UsageError
from torchspmd.step import IterGraphModule, compile, find_all_descendants, find_node
from torchspmd.step.flush_hooks import without_flushing
from torchspmd.step.passes import (
    defer_updates,
    iter_move_grads_and_optimizers,
    remove_copy_from_optimizer,
)
from torchspmd.step.passes.defer import isolate_update


def build():
    """Three layers and an optimizer that has made one step."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers)
    optim = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    plain_step(model, optim, torch.ones(2, 4))
    return model, optim


def named(gm, name):
    return find_node(gm.graph, lambda node: node.name == name)[0]


def defer_everything(gm):
    """The whole optimizer runs before the first node of the next iteration."""
    gm = IterGraphModule(gm)
    nodes = find_all_descendants(gm, [named(gm, "_foreach_add")])
    gm.graph.move_to_next_iter_before(nodes, named(gm, "t"), strict=True)
    return gm


def defer_two_regions(gm):
    """The last layer's update, and apart from it the second layer's."""
    gm = IterGraphModule(gm)
    for gradient, place in (("t_6", "t_2"), ("t_10", "t_1")):
        region = isolate_update(gm.graph, named(gm, gradient))
        gm.graph.move_to_next_iter_before(region, named(gm, place), strict=True)
    gm.finalize_setup()
    return gm


TRANSFORMATIONS = [defer_everything, defer_two_regions]


@pytest.fixture
def step_of():
    """A compiled step by its transformation, captured once; each test has its model."""
    yield captured
    for step in map(captured, TRANSFORMATIONS):
        step.flush()
        assert len(step.programs) <= 1  # or tests would see other programs than theirs
        for program in step.programs:
            program.num_early = 0  # each test reads early as often as it likes


@functools.cache
def captured(transformation):
    return compile(gm_transformation=transformation)(plain_step)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def assert_same(pair, reference):
    (model, optim), (other, other_optim) = pair, reference
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = optim.state_dict()["state"], other_optim.state_dict()["state"]
    for number, entries in theirs.items():
        for key, value in entries.items():
            assert torch.equal(mine[number][key], value), (number, key)


def eager(count):
    pair = build()
    losses = [plain_step(*pair, batch) for batch in batches(count)]
    return pair, losses


def is_stale(model, count):
    """Whether the model has not made its latest update."""
    with without_flushing():
        return not torch.equal(model[4].weight, eager(count)[0][0][4].weight)


# The original's failures (lost updates, TypeErrors, stale weights), and what happens here.


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_steps_with_the_last_one_flagged(transformation, count, step_of):
    step = step_of(transformation)
    pair = build()
    losses = [
        step(*pair, batch, last_train_step=index == count - 1)
        for index, batch in enumerate(batches(count))
    ]
    reference, expected = eager(count)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(pair, reference)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_updates_wait_and_flush_makes_them(transformation, step_of):
    step = step_of(transformation)
    pair = build()
    for count, batch in enumerate(batches(3), start=1):
        step(*pair, batch)
        assert is_stale(pair[0], count)
    assert step.programs[0].is_pending
    step.flush()
    assert not step.programs[0].is_pending
    assert_same(pair, eager(3)[0])
    step.flush()  # nothing is pending any more
    assert_same(pair, eager(3)[0])


def test_runs_again_after_the_last_step(step_of):
    step = step_of(defer_everything)
    pair = build()
    for index, batch in enumerate(batches(6)):
        step(*pair, batch, last_train_step=index in (1, 2, 5))
    assert_same(pair, eager(6)[0])


def test_no_step_at_all():
    with compile(gm_transformation=defer_everything)(plain_step) as step:
        step.flush()
    assert step.programs == ()


def test_moving_ends_with_finalize():
    def transformation(gm):
        gm = defer_two_regions(gm)
        with pytest.raises(
            RuntimeError, match="movement has been frozen for the given"
        ):
            gm.graph.move_to_next_iter_before([named(gm, "t")], named(gm, "addmm"))
        return gm

    compile(gm_transformation=transformation)(plain_step)(*build(), torch.ones(2, 4))


def test_one_value_for_each_gradient_is_carried():
    step = compile(gm_transformation=defer_two_regions)(plain_step)
    step(*build(), torch.ones(2, 4))
    run = step.programs[0].run
    assert run.num_carried == 3  # two gradients and the learning rate
    assert set(run.forms) == {"whole", "first", "steady", "last", "flush"}
    assert "2 updates are made in the next step, 3 values go" in step.explain()
    with pytest.raises(
        UsageError, match="cannot be edited while work of the iteration"
    ):
        run.recompile()
    step.flush()
    run.recompile()


# Everything that looks at the state from outside flushes.
LOOKS = {
    "state_dict": lambda model, optim: model.state_dict(),
    "state_dict of a part": lambda model, optim: model[0].state_dict(),
    "optimizer state_dict": lambda model, optim: optim.state_dict(),
    "eval": lambda model, optim: model.eval(),
    "parameters": lambda model, optim: list(model.parameters()),
    "eager call": lambda model, optim: model(torch.ones(2, 4)),
    "eager optimizer step": lambda model, optim: optim.step(),
    "load_state_dict": lambda model, optim: model.load_state_dict({}, strict=False),
}


@pytest.mark.filterwarnings("ignore:.*little or nothing overlaps")
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_look_from_outside_flushes(look, step_of):
    step = step_of(defer_everything)
    model, optim = build()
    before = [set(vars(module)) for module in (*model.modules(), optim)]
    for batch in batches(2):
        step(model, optim, batch)
    assert is_stale(model, 2)
    look(model, optim)
    assert not step.programs[0].is_pending
    model.train()
    after = [set(vars(module)) for module in (*model.modules(), optim)]
    assert before == after
    assert_same((model, optim), eager(2)[0])


def test_other_shapes_and_other_tensors_flush():
    step = compile(gm_transformation=defer_everything)(plain_step)
    pair, other = build(), build()
    first, second = batches(2)
    step(*pair, first)
    step(*other, first)
    assert not is_stale(pair[0], 1) and is_stale(other[0], 1)
    step(*pair, second)
    assert_same(other, eager(1)[0])
    step(*pair, torch.ones(3, 4))
    assert len(step.programs) == 2
    step.flush()
    reference = eager(2)[0]
    plain_step(*reference, torch.ones(3, 4))
    assert_same(pair, reference)


def test_leaving_the_context_flushes():
    pair = build()
    with compile(gm_transformation=defer_everything)(plain_step) as step:
        for batch in batches(3):
            step(*pair, batch)
    assert_same(pair, eager(3)[0])
    with pytest.raises(UsageError, match="was closed"):
        step(*pair, batches(1)[0])


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_checkpoint_between_any_two_steps(saved_after, step_of):
    all_batches = batches(4)
    model, optim = build()
    step = step_of(defer_two_regions)
    for batch in all_batches[:saved_after]:
        step(model, optim, batch)
    saved = copy.deepcopy((model.state_dict(), optim.state_dict()))
    fresh, fresh_optim = build()
    fresh.load_state_dict(saved[0])
    fresh_optim.load_state_dict(saved[1])
    with compile(gm_transformation=defer_two_regions)(plain_step) as resumed:
        for batch in all_batches[saved_after:]:
            resumed(fresh, fresh_optim, batch)
    assert_same((fresh, fresh_optim), eager(4)[0])


def test_an_exception_in_the_middle_loses_nothing(step_of):
    step = step_of(defer_everything)
    pair = build()
    first, second = batches(2)
    step(*pair, first)
    runs = step.programs[0].run._forms._runs
    working = runs["steady"]

    def fail_late(*args):
        working(*args)
        raise RuntimeError("the cable")

    runs["steady"] = fail_late
    with pytest.raises(RuntimeError, match="the cable"):
        step(*pair, second)
    runs["steady"] = working
    step(*pair, second, last_train_step=True)
    assert_same(pair, eager(2)[0])


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda pair: tuple(map(copy.copy, pair)),
        lambda pair: pickle.loads(pickle.dumps(pair)),
        lambda pair: copy.deepcopy(pair[::-1])[::-1],
        lambda pair: (copy.deepcopy(nn.Sequential(pair[0])), None),
    ],
)
def test_copies_have_the_pending_update(step_of, copied):
    step = step_of(defer_everything)
    model, optim = build()
    step(model, optim, batches(1)[0])
    (expected, _), _ = eager(1)
    assert is_stale(model, 1)
    found = copied((model, optim))[0].parameters()
    for weight, wanted in zip(found, expected.parameters(), strict=True):
        assert torch.equal(weight, wanted)
    step(model, optim, batches(2)[1], last_train_step=True)  # the copies are their own
    assert_same((model, optim), eager(2)[0])


def test_schedulers_and_gradients_that_stay():
    def train(step):
        model, optim = build()
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        for batch in batches(4):
            step(model, optim, batch)
            schedule.step()
        return model, optim

    with compile(gm_transformation=defer_everything)(keep_gradients) as step:
        pair = train(step)
        assert len(step.programs) == 2  # the first step finds no gradients
    reference = train(keep_gradients)
    assert_same(pair, reference)
    for mine, theirs in zip(
        pair[0].parameters(), reference[0].parameters(), strict=True
    ):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_cold_optimizer_is_run_whole_once():
    class OwnAdam(torch.optim.Adam):  # may do anything in its first step
        pass

    def train(step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        optim = OwnAdam(model.parameters(), lr=0.01, fused=True)
        for batch in batches(3):
            step(model, optim, batch)
        return model, optim

    def transformation(gm):
        gm = IterGraphModule(gm)
        region = isolate_update(gm.graph, named(gm, "t_2"))
        gm.graph.move_to_next_iter_before(region, named(gm, "t"))
        return gm

    with compile(gm_transformation=transformation)(plain_step) as step:
        pair = train(step)
        assert set(step.programs[0].run.forms) == {"whole"}
        assert "steady" in step.programs[1].run.forms
    assert_same(pair, train(plain_step))


def test_a_run_that_ends_unflushed_is_reported(capsys):
    step = compile(gm_transformation=defer_everything)(plain_step)
    step(*build(), torch.ones(2, 4))
    at_exit = step._pending._at_exit
    assert at_exit.atexit
    at_exit()
    text = capsys.readouterr().err
    assert "train ended with an update that was not made" in text
    assert "last_train_step=True" in text
    step.flush()


# What would change the results is refused.


def refusal(transformation, step=plain_step):
    with pytest.raises(DeferralError) as caught:
        compile(gm_transformation=transformation)(step)(*build(), torch.ones(2, 4))
    return str(caught.value)


def test_a_place_after_the_first_read_is_refused():
    def transformation(gm):
        gm = IterGraphModule(gm)
        remove_copy_from_optimizer(gm)
        iter_move_grads_and_optimizers(gm, "t_6", "tanh_2")

    text = refusal(transformation)
    assert "cannot run before tanh_2 of the next iteration: t_2 reads a state" in text
    assert "The latest legal place is before t_2" in text


def test_the_raw_move_goes_to_the_latest_legal_place():
    def transformation(gm):
        gm = IterGraphModule(gm)
        nodes = find_all_descendants(gm, [named(gm, "_foreach_add")])
        with pytest.warns(
            PassWarning, match="The latest legal place is before t. They"
        ):
            gm.graph.move_to_next_iter_before(nodes, named(gm, "tanh"))
        return gm

    pair = build()
    with compile(gm_transformation=transformation)(plain_step) as step:
        for batch in batches(3):
            step(*pair, batch)
    assert_same(pair, eager(3)[0])


def test_gradients_that_a_clip_needs_cannot_wait():
    def clipped(model, optim, batch):
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optim.step()
        optim.zero_grad()

    def transformation(gm):
        gm = IterGraphModule(gm)
        region = isolate_update(gm.graph, named(gm, "t_6"))
        only_last = [node for node in region if "norm" not in node.name]
        gm.graph.move_to_next_iter_before(only_last, named(gm, "t"))

    text = refusal(transformation, clipped)
    assert "must satisfy one of the following conditions" in text
    assert "t_6 is used in this iteration by linalg_vector_norm" in text


def test_wrong_nodes_are_all_named():
    def transformation(gm):
        gm = IterGraphModule(gm)
        inputs = gm.graph.find_nodes(op="placeholder")
        gm.graph.move_to_next_iter_before([inputs[0]], inputs[1])

    text = refusal(transformation)
    assert ".0.weight) is an input of the step" in text
    assert "is no place for them" in text


def test_a_region_is_moved_once_and_shares_no_state():
    def transformation(gm):
        gm = defer_everything(gm)
        nodes = find_all_descendants(gm, [named(gm, "_foreach_add")])
        gm.graph.move_to_next_iter_before(nodes, named(gm, "t"))

    assert "_foreach_add is moved already" in refusal(transformation)


@pytest.mark.parametrize("names", [("t_66", "t"), ("t_6", "tanhh")])
def test_unknown_names_get_a_suggestion(names):
    def transformation(gm):
        gm = IterGraphModule(gm)
        remove_copy_from_optimizer(gm)
        iter_move_grads_and_optimizers(gm, *names)

    wrong = names[0] if names[0] == "t_66" else names[1]
    text = refusal(transformation)
    assert f"Cannot find {wrong}: the graph has no node of this name" in text
    assert "Did you mean" in text


def test_what_updates_nothing_cannot_be_moved():
    def with_extra(model, optim, batch):
        plain_step(model, optim, batch)
        return batch.amax()

    def transformation(gm):
        gm = IterGraphModule(gm)
        remove_copy_from_optimizer(gm)
        iter_move_grads_and_optimizers(gm, "amax", "t")

    step = compile(gm_transformation=transformation)(with_extra)
    with pytest.raises(UsageError, match="amax is not used by any fused optimizer"):
        step(*build(), torch.ones(2, 4))


def test_nodes_that_a_later_pass_removed():
    def transformation(gm):
        gm = defer_everything(gm)
        gm.graph.regions[0] = type(gm.graph.regions[0])(("gone",), "t")
        return gm

    text = refusal(transformation)
    assert "  gone: moved, or the place of what is moved, and gone or replaced" in text


def test_an_error_in_the_block_is_not_hidden_by_a_flush_that_fails():
    step = compile(gm_transformation=defer_everything)(plain_step)
    with pytest.raises(KeyError) as caught, step:
        step(*build(), batches(1)[0])
        step.programs[0].run._forms._runs["flush"] = None  # cannot be called
        raise KeyError("the user's own")
    assert "the pending update could not be made" in caught.value.__notes__[0]


def test_words_of_defer_updates():
    gm = IterGraphModule(fx.symbolic_trace(lambda x: x + 1))
    with pytest.raises(UsageError, match="choose 'now' or 'next'"):
        defer_updates(gm, start="later")
    with pytest.raises(UsageError, match="pass an IterGraphModule, not"):
        defer_updates(fx.symbolic_trace(lambda x: x + 1))
