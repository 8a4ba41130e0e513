"""Edits that leave ``meta["val"]`` as it was: what calls give is computed again."""

import operator

import pytest
import torch
from edit_graphs import GraphBuilder, aten, c10d
from torch import fx

from torchspmd import _torch
from torchspmd.errors import LegalityError
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.edit import NodeMaker, fake_result
from torchspmd.step.graph.metadata import Owner
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit

pytestmark = pytest.mark.unit

PROVED, UNPROVED = "proved equal", "checked: 1 of 1 outputs not proved: output 0"


def check(graph, edit):
    before, mapping = copy_graph(graph)
    edit()
    return str(check_edit(before, graph, mapping))


def refusal(graph, edit):
    with pytest.raises(LegalityError) as caught:
        check(graph, edit)
    return str(caught.value)


def option(node, **options):
    return lambda: setattr(node, "kwargs", {**node.kwargs, **options})


def built(make, *shapes):
    b = GraphBuilder()
    nodes = make(b, *[b.input(f"x{i}", *shape) for i, shape in enumerate(shapes)])
    b.graph.output([nodes[-1]])
    return b.graph, nodes


# Dtypes.


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        (aten.full_like.default, (0.1,)),
        (aten.ones_like.default, ()),
        (aten.zeros_like.default, ()),
        (aten.new_ones.default, ([4],)),
    ],
)
def test_another_dtype_of_a_filled_tensor(target, rest):
    def make(b, x):
        filled = b.call(target, x, *rest, dtype=torch.float64)
        return filled, b.call(aten.mul.Tensor, x, filled)

    graph, (filled, _) = built(make, (4,))
    assert check(graph, lambda: None) == PROVED
    text = refusal(graph, option(filled, dtype=torch.bfloat16))
    assert f"another number or option: {filled.name} was where {filled.name}" in text


def test_another_dtype_of_what_is_copied_into():
    def make(b, x):
        empty = b.call(aten.empty_like.default, x, dtype=torch.float64)
        return empty, b.call(aten.copy.default, empty, x)

    graph, (empty, copied) = built(make, (4,))
    assert check(graph, option(empty, dtype=torch.bfloat16)).startswith(UNPROVED)
    # Whoever reads the graph next is told the truth.
    assert [n.meta["val"].dtype for n in (empty, copied)] == [torch.bfloat16] * 2
    assert type(empty.meta["val"]) is torch.Tensor  # of no mode, like all others here


def test_another_dtype_a_few_calls_further_on():
    def make(b, x, y):
        like = b.call(aten.t.default, b.call(aten.neg.default, y))
        return like, b.call(aten.to.other, x, like)

    graph, (_, cast) = built(make, (3, 3), (3, 3))
    y = graph.find_nodes(op="placeholder")[1]

    def edit():
        with graph.inserting_after(y):
            half = graph.call_function(
                aten._to_copy.default, (y,), {"dtype": torch.bfloat16}
            )
        half.meta["val"] = y.meta["val"]  # as if nothing had happened
        y.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)

    assert check(graph, edit).startswith(UNPROVED)
    assert cast.meta["val"].dtype == torch.bfloat16


def test_a_kind_that_is_not_known():
    def opaque(x):
        return x.bfloat16()

    b = GraphBuilder()
    x = b.input("x", 4)
    like = b.call(aten.neg.default, x)
    cast = b.call(aten.to.other, x, like)
    b.graph.output([cast])

    def edit():
        like.target = opaque  # which is not called to see what it gives
        like.meta["val"] = x.meta["val"]

    assert check(b.graph, edit).startswith(UNPROVED)


# What is computed, and what is not.


def test_a_call_that_can_no_longer_run(caplog):
    def make(b, x):
        filled = b.call(aten.full.default, [3], 1.0, dtype=torch.float64, device="meta")
        return filled, b.call(aten.mul.Tensor, x, filled)

    graph, (filled, _) = built(make, (3,))
    text = refusal(graph, lambda: setattr(filled, "args", ([4], 1.0)))
    assert (
        "call: mul_tensor cannot run: it takes full_default as float64[4] (was "
        "float64[3]). Cast or reshape in front of a call whose operands get another dtype "
        "or shape." in text
    )
    assert not caplog.records


def test_values_that_were_not_written_down_are():
    graph, (one, two) = built(
        lambda b, x: (b.call(aten.neg.default, x), b.call(aten.mm.default, x, x)),
        (3, 3),
    )

    def edit():
        with graph.inserting_before(two):
            clone = graph.call_function(aten.clone.default, (two.args[0],))
        two.args = (clone, two.args[1])
        one.meta.pop("val")

    assert check(graph, edit) == PROVED
    assert two.args[0].meta["val"].shape == one.meta["val"].shape == (3, 3)


def test_what_only_moves_is_not_computed(monkeypatch):
    graph, (one, _, three) = built(
        lambda b, x, y: (
            b.call(aten.neg.default, x),
            b.call(aten.exp.default, y),
            b.call(aten.add.Tensor, x, y),
        ),
        (3,),
        (3,),
    )
    monkeypatch.setattr(_torch, "fake_result", lambda *_, **__: pytest.fail("computed"))

    def edit():
        three.append(one)
        three.args = three.args[::-1]  # of the same shape, dtype and strides

    assert check(graph, edit) == PROVED


def test_operators_in_place_leave_what_is_written_of_their_operands():
    graph, fake = fx.Graph(), _torch.FakeWorld().fake
    x = graph.placeholder("x")
    x.meta["val"] = fake(torch.empty(2, 3))
    clone = graph.call_function(aten.clone.default, (x,))
    clone.meta["val"] = fake(torch.empty(2, 3))
    out = graph.output([clone])

    def edit():
        with graph.inserting_before(out):
            out.args = ([graph.call_function(aten.t_.default, (clone,))],)

    assert "another shape: x was where t__default is now" in refusal(graph, edit)
    assert clone.meta["val"].shape == (2, 3)


def test_graphs_of_fake_tensors_stay_in_their_mode():
    world, graph = _torch.FakeWorld(), fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = world.fake(torch.empty(3))
    made = graph.call_function(aten.ones.default, ([3],))
    made.meta["val"] = world.fake(torch.empty(3))
    graph.output([graph.call_function(aten.mul.Tensor, (x, made))])
    assert check(graph, option(made, dtype=torch.float64)).startswith(UNPROVED)
    with world.mode:  # which refuses tensors of another one
        assert (made.meta["val"] + x.meta["val"]).dtype == torch.float64


def test_new_nodes_that_take_no_tensor_give_fake_ones():
    world, graph = _torch.FakeWorld(), fx.Graph()
    graph.placeholder("x").meta["val"] = world.fake(torch.empty(3))
    made = NodeMaker(graph, Owner()).call(aten.ones.default, [3]).meta["val"]
    assert made.fake_mode is world.mode


def test_a_collective_whose_arguments_are_given_by_name():
    b = GraphBuilder()
    x, gather = b.input("x", 2, 3), c10d.all_gather_into_tensor.default
    start = b.graph.call_function(gather, (x,), {"group_size": 4, "group_name": "0"})
    assert fake_result(start, {x: x.meta["val"]}).shape == (8, 3)


def test_padding_with_a_number_that_is_known_only_when_the_graph_runs():
    b = GraphBuilder()
    x, number = b.input("x", 3), b.graph.placeholder("number")
    pad = b.graph.call_function(aten.constant_pad_nd.default, (x, [0, 1], number))
    out = b.graph.output([pad])

    def edit():
        with b.graph.inserting_before(out):
            out.args = ([b.graph.call_function(aten.alias.default, (pad,))],)

    assert check(b.graph, edit).startswith(UNPROVED)


def test_tensors_with_values_are_not_touched():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    made = graph.call_function(aten.neg.default, (x,))
    made.meta["val"] = torch.ones(3)
    graph.output([made])
    refusal(graph, lambda: setattr(made, "target", aten.zero_.default))
    assert x.meta["val"].tolist() == [1, 1, 1]


# Layouts in front of fused optimizers.


def fused_step(turned=()):
    """A step of AdamW whose first state is made from the parameter."""
    b = GraphBuilder()
    p, g, v = (b.input(name, 3, 3) for name in "pgv")
    steps = b.input("steps")
    m = b.call(aten.zeros_like.default, p)
    options = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8,
        "amsgrad": False, "maximize": False,
    }  # fmt: skip
    lists = ([p], [g], [m], [v], [], [steps])
    made = b.graph.call_function(aten._fused_adamw.default, lists, options)
    made.meta["val"] = [[node.meta["val"] for node in each] for each in lists[:5]]
    b.graph.output([b.items(b.call(operator.getitem, made, 2))[0]])
    return b.graph, p, m


@pytest.mark.parametrize("updates_meta", [False, True])
def test_fused_optimizers_walk_through_memory(updates_meta):
    graph, p, m = fused_step()

    def edit():
        with graph.inserting_before(m):
            turned = graph.call_function(aten.t.default, (p,))
        turned.meta["val"] = p.meta["val"].t()
        m.args = (turned,)
        if updates_meta:
            m.meta["val"] = turned.meta["val"]

    assert check(graph, lambda: None) == PROVED
    assert check(graph, edit).startswith(UNPROVED)


def test_a_clone_that_lies_the_same_may_stand_before_them():
    graph, p, m = fused_step()

    def edit():
        with graph.inserting_before(m):
            m.args = (graph.call_function(aten.clone.default, (p,)),)

    assert check(graph, edit) == PROVED


# Arguments.


def test_a_node_inside_of_a_slice():
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    more = graph.call_function(operator.add, (n, 1))
    graph.output([graph.call_function(operator.getitem, (x, slice(None, more)))])
    assert check(graph, lambda: None) == PROVED
    text = refusal(graph, lambda: setattr(more, "args", (n, 2)))
    assert "another number or option: add was where add is now" in text


@pytest.mark.parametrize("wanted", [1, 0])
def test_a_memory_format_by_its_number(wanted):
    graph, (clone, _) = built(
        lambda b, x: (
            copy := b.call(aten.clone.default, b.call(aten.t.default, x)),
            b.call(aten.as_strided.default, copy, (4,), (1,)),
        ),
        (3, 4),
    )
    found = check(graph, option(clone, memory_format=wanted))
    assert found.startswith(PROVED if wanted else UNPROVED)  # 1 keeps the strides


def test_arguments_that_a_call_does_not_take():
    graph, (clone,) = built(lambda b, x: (b.call(aten.clone.default, x),), (3, 4))
    text = refusal(graph, option(clone, memory_format="dense"))
    assert (
        "call: clone_default cannot run: it takes other arguments than before" in text
    )


def test_writes_into_expanded_memory():
    graph, (clone, scaled) = built(
        lambda b, x: (
            copy := b.call(aten.clone.default, b.call(aten.expand.default, x, [2, 3])),
            b.call(aten.mul_.Tensor, copy, 2.0),
        ),
        (1, 3),
    )
    assert check(graph, lambda: None) == PROVED

    def edit():
        with graph.inserting_before(clone):
            one = graph.call_function(aten.clone.default, (clone.args[0].args[0],))
            wide = graph.call_function(aten.expand.default, (one, [2, 3]))
        scaled.args = (wide, 2.0)
        graph.eliminate_dead_code()

    text = refusal(graph, edit)
    assert (
        "state: mul__tensor writes into expand_default_1, whose elements share memory. "
        "Write into a clone: elements that share a place cannot each be written."
        in text
    )


def test_swapped_targets_of_inputs():
    graph, _ = built(lambda b, x, y: (x, b.call(aten.add.Tensor, x, y)), (3,), (3,))
    one, two = graph.find_nodes(op="placeholder")

    def swap():
        one.target, two.target = two.target, one.target

    text = refusal(graph, swap)
    assert "input: input 0 (x0) had the target 'x0' and has 'x1'. A pass keeps" in text


# Costs.


def test_the_cost_of_a_product_of_which_no_shape_is_known():
    _, (product,) = built(lambda b, x: (b.call(aten.mm.default, x, x),), (64, 64))
    cost = CostModel()
    known = cost.compute_seconds(product)
    value = product.args[0].meta.pop("val")
    assert cost.launch_seconds <= cost.compute_seconds(product) < known
    product.args[0].meta["val"] = value
    product.meta.pop("val")
    assert cost.launch_seconds <= cost.compute_seconds(product) < known
