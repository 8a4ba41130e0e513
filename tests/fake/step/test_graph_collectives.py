"""Collectives of a graph as blocks, found by operator and by who reads what."""

import pytest
import torch
from comm_graphs import all_gather, all_reduce, captured, ops

from torchspmd import _torch
from torchspmd.comm import Kind, Phase
from torchspmd.errors import LegalityError
from torchspmd.step.graph.collectives import get_all_comm_blocks, reduce_in_place
from torchspmd.step.graph.metadata import META_KEY, Owner, owner_of
from torchspmd.step.graph.nodes import NodeMaker, common_owner
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.testing import fake_mesh, fake_world


def names(nodes):
    return [node.name for node in nodes]


def test_a_block_has_its_head_and_its_tail():
    def function(x, y):
        sent = torch.cat([x.reshape(-1), y.reshape(-1)]).to(torch.bfloat16)
        first, second = all_reduce(sent).float().div(4).split([4, 6])
        return [first.view(2, 2) + 1, second]

    with fake_mesh(4, ("dp",)):
        gm = captured(function, torch.ones(2, 2), torch.ones(6))
        (block,) = get_all_comm_blocks(gm)
    assert block.kind is Kind.ALL_REDUCE and block.group.axis == "dp"
    assert block.event.payload_bytes == 20 and not block.problem
    assert names(block.head) == ["view", "view_1", "cat", "_to_copy"]
    assert names(block.sources()) == ["x_1", "y_1"]
    assert names(block.tail) == [
        *("_to_copy_1", "div", "split_with_sizes", "getitem", "getitem_1", "view_2")
    ]
    assert names(block.outputs) == ["getitem_1", "view_2"]
    assert sorted(names(block.readers())) == ["add", "output"]
    assert block.argument("reduce_op") == "sum" and block.argument("nothing") is None


def test_a_name_tells_nothing():
    """The original went by prefixes: a renamed collective was not seen, a lookalike was."""
    with fake_mesh(4, ("dp",)):
        gm = captured(lambda x: [all_reduce(x), x + 1], torch.ones(4))
        for node in gm.graph.nodes:
            if node.op == "call_function":
                is_add = node.target is torch.ops.aten.add.Tensor
                node._rename("all_reduce_lookalike" if is_add else "something")
        (block,) = get_all_comm_blocks(gm)
        assert block.start.name == "something" and block.wait.name == "something_1"


def test_a_long_chain_of_views_belongs_to_the_block():
    """The original gave up five nodes behind the collective."""

    def function(x):
        result = all_reduce(x)
        for _ in range(9):
            result = result.unsqueeze(0)
        return [result * result]

    with fake_mesh(4, ("dp",)):
        (block,) = get_all_comm_blocks(captured(function, torch.ones(4)))
    assert len(block.tail) == 9 and names(block.outputs) == ["unsqueeze_8"]


def test_a_node_of_two_blocks_belongs_to_none():
    def function(x, y):
        return [all_reduce(x) * all_reduce(y.sum())]

    with fake_mesh(4, ("dp",)):
        blocks = get_all_comm_blocks(captured(function, torch.ones(4), torch.ones(4)))
    assert [block.tail for block in blocks] == [(), ()]
    assert [names(block.readers()) for block in blocks] == [["mul"], ["mul"]]


def test_random_numbers_do_not_travel():
    def function(x):
        return [torch.ops.aten.native_dropout(all_reduce(x), 0.5, True)[0]]

    with fake_mesh(4, ("dp",)):
        (block,) = get_all_comm_blocks(captured(function, torch.ones(4)))
    assert block.tail == ()


def test_what_must_be_left_alone():
    def function(x):
        unwaited = ops.all_reduce(x, "sum", "0")
        raced = ops.all_reduce(x, "sum", "0")
        return [unwaited, raced + 1, ops.wait_tensor(raced)]

    with fake_mesh(4, ("dp",)):
        blocks = get_all_comm_blocks(captured(function, torch.ones(4)))
    assert [block.problem for block in blocks] == [
        "all_reduce: nothing waits for it",
        "all_reduce_1: add reads it without a wait",
    ]


def test_coalesced_collectives_have_several_waits():
    def function(x, y):
        both = ops.all_reduce_coalesced([x, y], "sum", "0")
        return [ops.wait_tensor(each) for each in both]

    with fake_mesh(4, ("dp",)):
        (block,) = get_all_comm_blocks(captured(function, *[torch.ones(4)] * 2))
    assert not block.problem and len(block.waits) == 2


def test_only_gathers_of_inputs():
    def function(x):
        return [all_gather(x.bfloat16(), 4), all_gather(x + 1, 4), all_reduce(x)]

    with fake_mesh(4, ("dp",)):
        gm = captured(function, torch.ones(4))
        blocks = get_all_comm_blocks(gm)
        assert len(get_all_comm_blocks(gm, ["all_gather"])) == 2
    assert [block.gathers_inputs() for block in blocks] == [True, False, False]


def test_new_nodes_have_values_and_owners():
    with fake_mesh(4, ("dp",)):
        gm = captured(lambda x: [x + 1], torch.ones(4, 2))
    add = gm.graph.output_node().prev
    add.meta[META_KEY] = Owner(Phase.BACKWARD, "Net.layer")
    with gm.graph.inserting_after(add):
        make = NodeMaker(gm.graph, common_owner([add]))
        gathered = make.call(_torch.ALL_GATHER, add, 4, "0")
    assert gathered.meta["val"].shape == (16, 2)
    assert _torch.is_fake(gathered.meta["val"])
    assert owner_of(gathered) == Owner(Phase.BACKWARD, "Net.layer")


# ----------------------------------------------------------------------------
# Reductions that work in the memory of what they reduce.


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


# ----------------------------------------------------------------------------
# A reduction may be dropped where its group is one rank, and nowhere else.


def without_its_reduction():
    gm = captured(lambda x: [all_reduce(x)], torch.ones(3))
    before, mapping = copy_graph(gm.graph)
    x, start, wait, _ = gm.graph.nodes
    wait.replace_all_uses_with(x)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)
    return str(check_edit(before, gm.graph, mapping))


def test_a_group_of_one():
    with fake_mesh(1, ("dp",)):
        assert without_its_reduction() == "proved equal"


def test_a_group_of_two():
    with (
        fake_mesh(2, ("dp",)),
        pytest.raises(LegalityError, match="all_reduce was where x_1 is now"),
    ):
        without_its_reduction()
