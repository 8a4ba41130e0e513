"""Equal collectives sent once; results that nobody reads not sent at all."""

import pytest
import torch
from comm_graphs import all_gather, all_reduce, captured, names, ops

from torchspmd.comm import Phase
from torchspmd.errors import PassWarning
from torchspmd.step.graph.metadata import META_KEY, Owner
from torchspmd.step.graph.reports import ORDERS
from torchspmd.step.passes import dedupe_collectives, remove_dead_code
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def mesh():
    with fake_mesh(4, ("dp",)) as mesh:
        yield mesh


def ones(*sizes):
    return [torch.ones(size) for size in sizes]


def test_equal_collectives_become_one():
    def function(x):
        return [all_gather(x, 4) + 1, all_gather(x, 4) + 2, all_gather(x, 4) + 3]

    gm = captured(function, *ones(8))
    outcome = dedupe_collectives(gm).outcome
    assert names(gm, "gather", "wait") == ["all_gather_into_tensor", "wait_tensor"]
    assert (outcome.matched, outcome.changed) == (2, 2)
    assert outcome.keeps_bits == ORDERS
    assert outcome.detail[0] == (
        "all_gather_into_tensor_1 is all_gather_into_tensor: 128 B saved"
    )


def test_equal_views_of_one_value_are_equal():
    def function(x):
        one = all_reduce(torch.cat([x.view(-1), x.view(-1)]))
        return [one, all_reduce(torch.cat([x.view(-1), x.view(-1)])) + 1]

    gm = captured(function, *ones((2, 4)))
    assert dedupe_collectives(gm).outcome.changed == 1
    assert names(gm, "cat") == ["cat"]


def test_two_outputs_keep_memory_of_their_own():
    gm = captured(lambda x: [all_reduce(x), all_reduce(x)], *ones(8))
    with pytest.warns(PassWarning, match="both are outputs of the step, which have"):
        assert dedupe_collectives(gm).outcome.changed == 0


def test_the_kept_wait_stands_before_all_readers():
    def function(x):
        first, second = ops.all_reduce(x, "sum", "0"), ops.all_reduce(x, "sum", "0")
        early = ops.wait_tensor(second) + 1
        return [early, ops.wait_tensor(first)]

    gm = captured(function, *ones(8))
    assert dedupe_collectives(gm).outcome.changed == 1
    gm.graph.lint()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [all_reduce(x), all_reduce(y)],
        lambda x, y: [all_reduce(x), all_reduce(x, "max")],
        lambda x, y: [all_reduce(x), all_gather(x, 4)],
        lambda x, y: [all_reduce(x.view(2, 4)), all_reduce(x.view(4, 2))],
        lambda x, y: [all_reduce(x), all_reduce(x * 2)],
    ],
)
def test_others_are_left_alone(function):
    gm = captured(function, *ones(8, 8))
    with pytest.warns(PassWarning, match="it found nothing to work on"):
        assert dedupe_collectives(gm).outcome.matched == 0


def test_other_groups_are_left_alone():
    other = torch.distributed.new_group([0, 1]).group_name
    gm = captured(lambda x: [all_reduce(x), all_reduce(x, "sum", other)], *ones(8))
    with pytest.warns(PassWarning):
        dedupe_collectives(gm)


def two_phases():
    gm = captured(lambda x: [all_gather(x, 4) + 1, all_gather(x, 4) + 2], *ones(8))
    starts = [node for node in gm.graph.nodes if "gather" in node.name]
    for start, phase in zip(starts, (Phase.FORWARD, Phase.BACKWARD), strict=True):
        start.meta[META_KEY] = Owner(phase)
    return gm


def test_a_parameter_that_is_gathered_again_stays_so():
    gm = two_phases()
    with pytest.warns(
        PassWarning, match="joining forward and backward keeps the result"
    ):
        dedupe_collectives(gm)
    outcome = dedupe_collectives(two_phases(), across_phases=True).outcome
    assert outcome.changed == 1


def test_what_must_not_be_joined():
    def function(x):
        unwaited = ops.all_reduce(x, "sum", "0")
        return [unwaited, all_reduce(x)]

    gm = captured(function, *ones(8))
    with pytest.warns(PassWarning, match="all_reduce: nothing waits for it"):
        dedupe_collectives(gm)
    writing = captured(lambda x: [all_reduce(x), x.add_(1)], *ones(8))
    with pytest.warns(PassWarning, match="writes in place: join collectives before"):
        dedupe_collectives(writing)


def test_results_that_nobody_reads():
    """Torch's removal of dead code keeps every wait, and so what it waits for."""

    def function(x):
        all_reduce((x * 2).view(-1)).view(2, 4)
        return [x + 1]

    gm = captured(function, *ones((2, 4)))
    plain = captured(function, *ones((2, 4)))
    plain.graph.eliminate_dead_code()
    assert names(plain, "all_reduce")
    outcome = remove_dead_code(gm).outcome
    assert names(gm, "") == ["add"]
    assert outcome.changed == 5 and outcome.detail == ("1 collectives of 32 B",)


def test_random_numbers_stay():
    def function(x):
        torch.rand_like(x)
        x.exp()
        return [torch.rand_like(x)]

    gm = captured(function, *ones(8))
    assert remove_dead_code(gm).outcome.changed == 1
    assert names(gm, "") == ["rand_like", "rand_like_1"]


def test_nothing_is_dead():
    gm = captured(lambda x: [all_reduce(x)], *ones(8))
    with pytest.warns(PassWarning, match="remove_dead_code changed nothing"):
        remove_dead_code(gm)
