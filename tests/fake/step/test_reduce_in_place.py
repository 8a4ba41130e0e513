"""Reductions that work in the memory of what they reduce."""

import pytest
import torch
from comm_graphs import all_reduce, captured, ops

from torchspmd.step.graph.collectives import reduce_in_place
from torchspmd.testing import fake_world

pytestmark = pytest.mark.fake

X = torch.ones(4, 4)


def forms(function, *tensors):
    """The reductions of a function's graph, in their order."""
    with fake_world(2):
        gm = captured(function, *(tensors or (X,)))
        count = reduce_in_place(gm.graph)
        gm.graph.lint()
    found = [n.target for n in gm.graph.nodes if "all_reduce" in str(n.target)]
    assert count == found.count(ops.all_reduce_.default)
    return [target is ops.all_reduce_.default for target in found]


def test_a_gradient_that_nothing_else_reads():
    assert forms(lambda x: all_reduce(x * 2) + 1) == [True]


def test_a_bucket_and_the_views_of_its_result():
    def bucket(x):
        whole = all_reduce(torch.cat([(x * 2).flatten(), (x * 3).flatten()]))
        return [part.view(4, 4) for part in whole.split(16)]

    assert forms(bucket) == [True]


def test_one_behind_the_other():
    assert forms(lambda x: all_reduce(all_reduce(x * 2)) + 1) == [True, True]


def test_an_input_is_left_alone():
    assert forms(lambda x: all_reduce(x) + 1) == [False]
    assert forms(lambda x: all_reduce(x.view(16)) + 1) == [False]


def test_what_is_read_later_is_left_alone():
    def read(x):
        made = x * 2
        return all_reduce(made) + made

    def read_through_a_view(x):
        made = x * 2
        view = made.t()
        return all_reduce(made) + view

    def read_beside(x):
        made = x * 2
        start = ops.all_reduce(made, "sum", "0")
        other = made + 1
        return ops.wait_tensor(start), other

    def returned(x):
        made = x * 2
        return all_reduce(made), made

    for function in (read, read_through_a_view, read_beside, returned):
        assert forms(function) == [False]


def test_a_part_or_another_layout_is_left_alone():
    assert forms(lambda x: all_reduce((x * 2)[:2])) == [False]
    assert forms(lambda x: all_reduce((x * 2).t())) == [False]


# A collective that was started earlier reads until its wait.


def beside(wait_first, is_waited=True):
    """A gather and a reduction of the same memory."""

    def function(x):
        made = x * 2
        gather = ops.all_gather_into_tensor(made, 2, "0")
        if wait_first:
            gather = ops.wait_tensor(gather)
        reduced = ops.all_reduce(made, "sum", "0")
        if is_waited and not wait_first:
            gather = ops.wait_tensor(gather)
        return ops.wait_tensor(reduced), gather

    return function


def test_what_is_under_way_elsewhere_is_left_alone():
    assert forms(beside(wait_first=False)) == [False]
    assert forms(beside(wait_first=False, is_waited=False)) == [False]
    assert forms(beside(wait_first=True)) == [True]


def test_two_reductions_of_one_memory():
    def crossing(x):
        made = x * 2
        one = ops.all_reduce(made, "sum", "0")
        other = ops.all_reduce(made, "max", "0")
        return ops.wait_tensor(one), ops.wait_tensor(other)

    def one_after_the_other(x):
        made = x * 2
        one = ops.wait_tensor(ops.all_reduce(made, "sum", "0"))
        return one, ops.wait_tensor(ops.all_reduce(made, "max", "0"))

    assert forms(crossing) == [False, False]
    assert forms(one_after_the_other) == [False, True]


def test_a_coalesced_one_reads_until_all_its_waits():
    def function(x, *, wait_all):
        made = x * 2
        starts = ops.all_reduce_coalesced([made, x * 3], "sum", "0")
        waits = [ops.wait_tensor(starts[0])]
        if wait_all:
            waits.append(ops.wait_tensor(starts[1]))
        reduced = ops.wait_tensor(ops.all_reduce(made, "sum", "0"))
        if not wait_all:
            waits.append(ops.wait_tensor(starts[1]))
        return reduced, *waits

    def last_form(wait_all):
        return forms(lambda x: function(x, wait_all=wait_all))[-1]

    assert last_form(wait_all=True)
    assert not last_form(wait_all=False)


def test_one_that_is_left_under_way_for_the_next_step():
    assert forms(lambda x: ops.all_reduce(x * 2, "sum", "0")) == [True]
