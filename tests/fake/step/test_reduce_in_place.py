"""Reductions that work in the memory of what they reduce."""

import pytest
import torch
from comm_graphs import all_reduce, captured, ops

from torchspmd.step.passes.in_place_reductions import reduce_in_place
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
