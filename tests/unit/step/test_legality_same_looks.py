"""Edits that look like the graph before and compute something else."""

import json

import pytest
import torch
from edit_graphs import GraphBuilder, aten
from torch import fx

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import graph_optimization_pass, pass_reports
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.step.passes.runner import run_any
from torchspmd.step.virtual.certificate import Certificate

pytestmark = pytest.mark.unit

UNPROVED = "checked: 1 of 1 outputs not proved: output 0"


def check(graph, edit):
    before, mapping = copy_graph(graph)
    edit()
    return str(check_edit(before, graph, mapping))


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
    assert check(b.graph, lambda: None) == "proved equal"
    assert check(b.graph, lambda: setattr(node, "target", function)).startswith(
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

    assert check(graph, lambda: None) == "proved equal"
    assert check(graph, edit).startswith(UNPROVED)


def test_random_numbers_are_given_out_in_the_order_of_memory():
    graph, clone = read_by_place((3, 4), reader=aten.rand_like.default, args=())
    wanted = {"memory_format": torch.contiguous_format}
    assert check(graph, lambda: None) == "proved equal"
    assert check(graph, lambda: setattr(clone, "kwargs", wanted)).startswith(UNPROVED)


def test_a_format_that_is_the_same_is_proved():
    graph, clone = read_by_place((1, 4))  # one row lies like one column
    wanted = {"memory_format": torch.contiguous_format}
    assert check(graph, lambda: setattr(clone, "kwargs", wanted)) == "proved equal"


def test_places_outside_of_a_view():
    """The part that is shown is the same; what lies behind it is not."""
    b = GraphBuilder()
    x, y, z = (b.input(name, 4) for name in "xyz")
    joined = b.call(aten.cat.default, [x, y])
    view = b.call(aten.slice.Tensor, joined, 0, 0, 4)
    b.graph.output([b.call(aten.as_strided.default, view, [8], [1])])
    edited = check(b.graph, lambda: setattr(joined, "args", ([x, z],)))
    assert edited.startswith(UNPROVED)


def test_layouts_that_nothing_reads_are_free():
    b = GraphBuilder()
    clone = b.call(aten.clone.default, b.call(aten.t.default, b.input("x", 3, 4)))
    b.graph.output([b.call(aten.tanh.default, clone)])
    wanted = {"memory_format": torch.contiguous_format}
    assert check(b.graph, lambda: setattr(clone, "kwargs", wanted)) == "proved equal"


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
        check(b.graph, lambda: setattr(full, "args", ([2], 2**53)))


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
