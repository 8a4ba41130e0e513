"""Edits that leave ``meta["val"]`` as it was: what calls give is computed again."""

import json
import operator

import pytest
import torch
from edit_graphs import GraphBuilder, aten, c10d
from torch import fx

from torchspmd import _torch
from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import graph_optimization_pass, pass_reports
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.metadata import Owner
from torchspmd.step.graph.nodes import NodeMaker, fake_result
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality import check
from torchspmd.step.legality.check import check_edit
from torchspmd.step.legality.edit import Edit
from torchspmd.step.passes.runner import run_any
from torchspmd.step.virtual.certificate import Certificate

PROVED, UNPROVED = "proved equal", "checked: 1 of 1 outputs not proved: output 0"


def check_values(graph, edit):
    before, mapping = copy_graph(graph)
    edit()
    return str(check_edit(before, graph, mapping))


def refusal(graph, edit):
    with pytest.raises(LegalityError) as caught:
        check_values(graph, edit)
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
    assert check_values(graph, lambda: None) == PROVED
    text = refusal(graph, option(filled, dtype=torch.bfloat16))
    assert f"another number or option: {filled.name} was where {filled.name}" in text


def test_another_dtype_of_what_is_copied_into():
    def make(b, x):
        empty = b.call(aten.empty_like.default, x, dtype=torch.float64)
        return empty, b.call(aten.copy.default, empty, x)

    graph, (empty, copied) = built(make, (4,))
    assert check_values(graph, option(empty, dtype=torch.bfloat16)).startswith(UNPROVED)
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

    assert check_values(graph, edit).startswith(UNPROVED)
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

    assert check_values(b.graph, edit).startswith(UNPROVED)


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

    assert check_values(graph, edit) == PROVED
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

    assert check_values(graph, edit) == PROVED


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
    assert check_values(graph, option(made, dtype=torch.float64)).startswith(UNPROVED)
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

    assert check_values(b.graph, edit).startswith(UNPROVED)


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

    assert check_values(graph, lambda: None) == PROVED
    assert check_values(graph, edit).startswith(UNPROVED)


def test_a_clone_that_lies_the_same_may_stand_before_them():
    graph, p, m = fused_step()

    def edit():
        with graph.inserting_before(m):
            m.args = (graph.call_function(aten.clone.default, (p,)),)

    assert check_values(graph, edit) == PROVED


# Arguments.
def test_a_node_inside_of_a_slice():
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    more = graph.call_function(operator.add, (n, 1))
    graph.output([graph.call_function(operator.getitem, (x, slice(None, more)))])
    assert check_values(graph, lambda: None) == PROVED
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
    found = check_values(graph, option(clone, memory_format=wanted))
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
    assert check_values(graph, lambda: None) == PROVED

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


def test_the_cost_of_attention_whose_heads_share_keys():
    def attends(heads):
        graph = fx.Graph()
        q, k = graph.placeholder("q"), graph.placeholder("k")
        operator = aten._scaled_dot_product_flash_attention.default
        node = graph.call_function(operator, (q, k, k))
        for each, count in ((q, 8), (k, heads), (node, 8)):
            each.meta["val"] = torch.empty(2, count, 512, 64, device="meta")
        return CostModel(flops=1e9).compute_seconds(node)

    assert attends(2) == pytest.approx(attends(8), rel=0.01)


# ----------------------------------------------------------------------------
# Edits that look like the graph before and compute something else.


# Functions.
def scaled_by(factor):
    def scale(x):
        return x * factor

    return scale


def test_another_function_of_the_same_name():
    b = GraphBuilder()
    node = b.graph.call_function(scaled_by(1.0), (b.input("x", 4),))
    b.graph.output([node])
    function = scaled_by(100.0)
    assert check_values(b.graph, lambda: None) == "proved equal"
    assert check_values(b.graph, lambda: setattr(node, "target", function)).startswith(
        UNPROVED
    )


# Layouts.
def read_by_place(x_shape, *between, reader=aten.as_strided.default, args=((4,), (1,))):
    """A graph that clones a transposed tensor and then reads it in the order of memory."""
    b = GraphBuilder()
    x = b.input("x", *x_shape)
    clone = node = b.call(aten.clone.default, b.call(aten.t.default, x))
    for target, *rest in between:
        node = b.call(target, node, *rest)
    read = b.call(reader, node, *args)
    b.graph.output([read])
    return b.graph, clone


@pytest.mark.parametrize("updates_meta", [False, True])
@pytest.mark.parametrize(
    "between",
    [
        pytest.param([], id="alone"),
        pytest.param([(aten.mul.Tensor, 2.0)], id="behind an operator"),
        pytest.param([(aten.slice.Tensor, 0, 1, 3), (aten.detach.default,)], id="view"),
        pytest.param([(aten.clone.default,)], id="behind another clone"),
    ],
)
def test_a_clone_in_another_memory_format(between, updates_meta):
    graph, clone = read_by_place((3, 4), *between)

    def edit():
        clone.kwargs = {"memory_format": torch.contiguous_format}
        if updates_meta:
            clone.meta["val"] = clone.meta["val"].contiguous()

    assert check_values(graph, lambda: None) == "proved equal"
    assert check_values(graph, edit).startswith(UNPROVED)


def test_random_numbers_are_given_out_in_the_order_of_memory():
    graph, clone = read_by_place((3, 4), reader=aten.rand_like.default, args=())
    assert check_values(graph, lambda: None) == "proved equal"
    assert check_values(
        graph, option(clone, memory_format=torch.contiguous_format)
    ).startswith(UNPROVED)


def test_a_format_that_is_the_same_is_proved():
    graph, clone = read_by_place((1, 4))  # one row lies like one column
    assert (
        check_values(graph, option(clone, memory_format=torch.contiguous_format))
        == "proved equal"
    )


def test_places_outside_of_a_view():
    """The part that is shown is the same; what lies behind it is not."""
    b = GraphBuilder()
    x, y, z = (b.input(name, 4) for name in "xyz")
    joined = b.call(aten.cat.default, [x, y])
    view = b.call(aten.slice.Tensor, joined, 0, 0, 4)
    b.graph.output([b.call(aten.as_strided.default, view, [8], [1])])
    edited = check_values(b.graph, lambda: setattr(joined, "args", ([x, z],)))
    assert edited.startswith(UNPROVED)


def test_layouts_that_nothing_reads_are_free():
    b = GraphBuilder()
    clone = b.call(aten.clone.default, b.call(aten.t.default, b.input("x", 3, 4)))
    b.graph.output([b.call(aten.tanh.default, clone)])
    assert (
        check_values(b.graph, option(clone, memory_format=torch.contiguous_format))
        == "proved equal"
    )


# Numbers.
def packed(pairs, numbers):
    """``_foreach_addcmul`` over some of two pairs, with its numbers in one tensor."""
    b = GraphBuilder()
    inputs = [b.input(name, 3) for name in "abcd"]
    scalars = b.input("s", 2)
    chosen = [(inputs[i], inputs[i + 2]) for i in pairs]
    if len(pairs) < 2:
        scalars = b.call(aten.slice.Tensor, scalars, 0, numbers, numbers + 1)
    lists = [[one for one, _ in chosen], *[[two for _, two in chosen]] * 2]
    made = b.graph.call_function(aten._foreach_addcmul.Tensor, (*lists, scalars))
    made.meta["val"] = [node.meta["val"] for node in lists[0]]
    return b, b.items(made)


def test_items_swapped_beside_a_tensor_of_numbers():
    graphs = []
    for order in ([0, 1], [1, 0]):
        b, items = packed(order, 0)
        b.graph.output([items[i] for i in order])
        graphs.append(b.graph)
    with pytest.raises(LegalityError, match=r"output 0 .*other elements"):
        check_edit(*graphs, {})


@pytest.mark.parametrize("number", [0, 1])
def test_an_item_taken_apart_from_the_others(number):
    both, items = packed([0, 1], 0)
    both.graph.output([items[1]])
    alone, (item,) = packed([1], number)
    alone.graph.output([item])
    if number == 1:
        assert str(check_edit(both.graph, alone.graph, {})) == "proved equal"
        return
    with pytest.raises(LegalityError, match="other elements"):
        check_edit(both.graph, alone.graph, {})


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), ()])
def test_numbers_that_are_not_one_for_each_item(shape):
    """The operator refuses them, though each item may find its own."""
    graphs = []
    for given in ((2,), shape):
        b, items = packed([0, 1], 0)
        b.graph.output(items)
        numbers = next(n for n in b.graph.nodes if n.name == "s")
        numbers.meta["val"] = torch.empty(given, dtype=torch.float64, device="meta")
        graphs.append(b.graph)
    with pytest.raises(LegalityError) as caught:
        check_edit(*graphs, {})
    assert f"takes numbers of shape {list(shape)} for 2 items" in str(caught.value)


def test_large_integers_keep_their_last_bits():
    b = GraphBuilder()
    full = b.call(aten.full.default, [2], 2**53 + 1, dtype=torch.int64)
    b.graph.output([full])
    with pytest.raises(LegalityError, match="another number or option: full_default"):
        check_values(b.graph, lambda: setattr(full, "args", ([2], 2**53)))


# What is not proved is told.
def double(gm):
    x, output = next(iter(gm.graph.nodes)), gm.graph.output_node()
    with gm.graph.inserting_before(output):
        new = [
            gm.graph.call_function(
                torch.neg, (gm.graph.call_function(torch.neg, (one,)),)
            )
            for one in output.args[0]
        ]
    output.args = (new,)
    return Outcome(matched=len(new), changed=len(new)) if x.users else None


declared = graph_optimization_pass(prerequisites=[], apply_after=[])(double)


@pytest.mark.parametrize("apply", [declared, lambda gm: run_any(gm, double)])
def test_outputs_that_are_not_proved_give_one_warning(apply):
    gm = fx.symbolic_trace(lambda x: [x + 1, x + 2, x + 3, x + 4])
    with pytest.warns(PassWarning) as caught:
        apply(gm)
    assert [str(each.message) for each in caught] == [
        "double: 4 of 4 outputs could not be proved equal to those before: output 0 (add), "
        "output 1 (add_1), output 2 (add_2) and 1 more. Nothing is known to be wrong; "
        "compile(verify=True) runs both graphs and compares them."
    ]
    (report,) = pass_reports(gm)
    assert report.unproved == 4
    certificate = Certificate("step, program 0", (report,), (), ())
    assert certificate.summary() == (
        "certificate: double (4 outputs not proved), not verified on virtual ranks"
    )
    assert json.loads(certificate.to_json())["passes"][0]["unproved"] == 4


# ----------------------------------------------------------------------------
# An edit that leaves a graph as it was is told apart without evaluating the graph.


def graph():
    """Two sums and a sum along dimensions, with a list and a dtype among arguments."""
    made = fx.Graph()
    x, y = made.placeholder("x"), made.placeholder("y")
    first = made.call_function(aten.add.Tensor, (x, y), {"alpha": 0.0})
    second = made.call_function(aten.add.Tensor, (y, x), {"alpha": 2})
    total = made.call_function(
        aten.sum.dim_IntList, (first, [0, 1]), {"dtype": torch.float32}
    )
    made.output((second, total))
    return made


def nodes(made):
    return {node.name: node for node in made.nodes}


def other_alpha(made):
    nodes(made)["add_tensor"].kwargs = {"alpha": -0.0}


def other_dimension(made):
    nodes(made)["sum_dim_int_list"].args = (nodes(made)["add_tensor"], [0, 0])


def other_operand(made):
    nodes(made)["add_tensor"].args = (nodes(made)["x"], nodes(made)["x"])


def other_operator(made):
    nodes(made)["add_tensor"].target = aten.sub.Tensor


def other_order(made):
    nodes(made)["add_tensor"].prepend(nodes(made)["add_tensor_1"])


def one_more(made):
    with made.inserting_before(made.output_node()):
        made.call_function(aten.neg.default, (nodes(made)["x"],))


def one_less(made):
    made.output_node().args = (
        (nodes(made)["add_tensor_1"], nodes(made)["add_tensor"]),
    )
    made.erase_node(nodes(made)["sum_dim_int_list"])


def replaced(made):
    """Another node that does the same under the same name."""
    old = nodes(made)["add_tensor_1"]
    with made.inserting_before(old):
        new = made.call_function(old.target, old.args, dict(old.kwargs))
    old.replace_all_uses_with(new)
    made.erase_node(old)


def test_nothing_was_done():
    made = graph()
    before, mapping = copy_graph(made)
    assert Edit.of(before, made, mapping).is_empty


@pytest.mark.parametrize(
    "change",
    [
        other_alpha,
        other_dimension,
        other_operand,
        other_operator,
        other_order,
        one_more,
        one_less,
        replaced,
    ],
)
def test_something_was_done(change):
    made = graph()
    before, mapping = copy_graph(made)
    change(made)
    assert not Edit.of(before, made, mapping).is_empty


def test_nothing_is_evaluated_for_nothing(monkeypatch):
    made = graph()
    before, mapping = copy_graph(made)
    monkeypatch.setattr(check, "Equivalence", None)
    proof = check_edit(before, made, mapping)
    assert str(proof) == "proved equal"
    assert proof.num_outputs == 2
