"""In whose memory the value of a node lies: one table for all kinds of nodes."""

import operator

import pytest
import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import fx, nn

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import compile
from torchspmd.step.graph.aliases import (
    find_aliases,
    is_view,
    memory_root,
    memory_sources,
    view_source,
)
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit

aten = torch.ops.aten
comm = torch.ops._c10d_functional


class Nodes:
    """A graph with two inputs, x and y, to which a row adds a node."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.y = self.graph.placeholder("y")

    def call(*given, **kwargs):  # also takes an argument called self
        nodes, target, *args = given
        return nodes.graph.call_function(target, tuple(args), kwargs)

    def method(self, name, *args, **kwargs):
        return self.graph.call_method(name, args, kwargs)

    def module(self, *args):
        return self.graph.create_node("call_module", "idle", args)

    def item(self, source, place):
        return self.call(operator.getitem, source, place)


def own_function(*values):
    return values[0]


def number(g):
    node = g.call(operator.mul, g.x, 2)
    node.meta["val"] = 6
    return node


def item_of_unknown(g):
    node = g.call(own_function, g.x, g.y)
    node.meta["val"] = [torch.ones(1), torch.ones(1)]
    return g.item(node, 1)


# name: (what makes the node, the root of its memory: an input or itself, is it a view)
KNOWN = {
    "view": (lambda g: g.call(aten.view.default, g.x, [-1]), "x", True),
    "transpose": (lambda g: g.call(aten.transpose.int, g.x, 0, 1), "x", True),
    "t": (lambda g: g.call(aten.t.default, g.x), "x", True),
    "expand": (lambda g: g.call(aten.expand.default, g.x, [3, 3]), "x", True),
    "as_strided": (lambda g: g.call(aten.as_strided.default, g.x, [2], [1]), "x", True),
    "detach": (lambda g: g.call(aten.detach.default, g.x), "x", True),
    "alias": (lambda g: g.call(aten.alias.default, g.x), "x", True),
    "slice": (lambda g: g.call(aten.slice.Tensor, g.x, 0, 0, 2), "x", True),
    "select": (lambda g: g.call(aten.select.int, g.x, 0, 0), "x", True),
    "reshape": (lambda g: g.call(aten.reshape.default, g.x, [-1]), "x", True),
    "_unsafe_view": (lambda g: g.call(aten._unsafe_view.default, g.x, [-1]), "x", True),
    "self=": (lambda g: g.call(aten.view.default, self=g.x, size=[-1]), "x", True),
    "view of a view": (
        lambda g: g.call(aten.t.default, g.call(aten.alias.default, self=g.x)),
        "x",
        True,
    ),
    "split": (lambda g: g.item(g.call(aten.split.Tensor, g.x, 2), 1), "x", True),
    "split(self=)": (
        lambda g: g.item(g.call(aten.split.Tensor, self=g.x, split_size=2), 1),
        "x",
        True,
    ),
    "unbind": (lambda g: g.item(g.call(aten.unbind.int, g.x), 0), "x", True),
    "chunk": (lambda g: g.item(g.call(aten.chunk.default, g.x, 2), 0), "x", True),
    "unsafe_split": (
        lambda g: g.item(g.call(aten.unsafe_split.Tensor, g.x, 2), 1),
        "x",
        True,
    ),
    "an index of a tensor": (lambda g: g.item(g.x, 0), "x", True),
    "an index of a result": (
        lambda g: g.item(g.call(aten.t.default, g.x), 0),
        "x",
        True,
    ),
    "method view": (lambda g: g.method("view", g.x, -1), "x", True),
    "method t": (lambda g: g.method("t", g.x), "x", True),
    "torch.transpose": (lambda g: g.call(torch.transpose, g.x, 0, 1), "x", True),
    "wait": (lambda g: g.call(comm.wait_tensor.default, g.x), "x", False),
    "in place": (lambda g: g.call(aten.add_.Tensor, g.x, g.y), "x", False),
    "in place, self=": (
        lambda g: g.call(aten.add_.Tensor, self=g.x, other=g.y),
        "x",
        False,
    ),
    "method in place": (lambda g: g.method("add_", g.x, g.y), "x", False),
    "out=": (lambda g: g.call(aten.relu.out, g.x, out=g.y), "y", False),
    "torch.add(out=)": (lambda g: g.call(torch.add, g.x, g.x, out=g.y), "y", False),
    "second out=": (
        lambda g: g.item(g.call(aten.max.dim_max, g.x, 0, max=g.x, max_values=g.y), 1),
        "y",
        True,
    ),
    "gather(out=)": (
        lambda g: g.call(comm.all_gather_into_tensor_out.default, g.x, 2, "0", out=g.y),
        "y",
        False,
    ),
    "all_reduce_": (
        lambda g: g.call(comm.all_reduce_.default, g.x, "sum", "0"),
        "x",
        False,
    ),
    "all_reduce_coalesced_": (
        lambda g: g.item(
            g.call(comm.all_reduce_coalesced_.default, [g.x, g.y], "sum", "0"), 1
        ),
        "y",
        True,
    ),
    "clone": (lambda g: g.call(aten.clone.default, g.x), "own", False),
    "relu": (lambda g: g.call(aten.relu.default, g.x), "own", False),
    "method add": (lambda g: g.method("add", g.x, g.y), "own", False),
    "torch.relu": (lambda g: g.call(torch.relu, g.x), "own", False),
    "item of a kernel": (
        lambda g: g.item(g.call(aten.sort.default, g.x), 1),
        "own",
        False,
    ),
    "item of a foreach": (
        lambda g: g.item(g.call(aten._foreach_mul.Scalar, [g.x, g.y], 2), 0),
        "own",
        False,
    ),
    "dropout": (  # outside of training it gives its input
        lambda g: g.call(aten.native_dropout.default, g.x, 0.1, False),
        "x",
        False,
    ),
    "torch.dropout": (lambda g: g.call(torch.dropout, g.x, 0.1, False), "x", False),
    "mask of a dropout": (
        lambda g: g.item(g.call(aten.native_dropout.default, g.x, 0.1, True), 1),
        "own",
        False,
    ),
    "all_reduce": (
        lambda g: g.call(comm.all_reduce.default, g.x, "sum", "0"),
        "own",
        False,
    ),
    "all_gather": (
        lambda g: g.call(comm.all_gather_into_tensor.default, g.x, 2, "0"),
        "own",
        False,
    ),
    "number": (number, "own", False),
}


# What nothing is known of: what it makes may lie in anything that it takes.
UNKNOWN = {
    "method": lambda g: g.method("no_such_method", g.x, g.y),
    "module": lambda g: g.module(g.x, g.y),
    "function": lambda g: g.call(own_function, g.x, g.y),
    "item of a function": item_of_unknown,
}


@pytest.mark.parametrize("name", KNOWN)
def test_where_values_lie(name):
    make, expected, is_one = KNOWN[name]
    g = Nodes()
    node = make(g)
    root = {"x": g.x, "y": g.y, "own": node}[expected]
    assert find_aliases(g.graph).root[node] is root
    assert memory_root(node) is root
    assert is_view(node) is is_one
    assert (view_source(node) is None) == (expected == "own")


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_may_lie_anywhere(name):
    g = Nodes()
    node = UNKNOWN[name](g)
    assert set(g.graph.find_nodes(op="placeholder")) <= find_aliases(g.graph).pinned
    assert memory_sources(node)
    assert view_source(node) is None
    assert not is_view(node)


def test_several_memories_are_pinned():
    g = Nodes()
    node = g.call(aten.max.dim_max, g.x, 0, max=g.x, max_values=g.y)
    aliases = find_aliases(g.graph)
    assert aliases.root[node] is g.x
    assert aliases.pinned == {g.x, g.y}


@pytest.mark.parametrize("name", ["method view", "self=", "unsafe_split"])
def test_an_output_may_not_become_a_view_of_what_is_written(name):
    g = Nodes()
    g.x.meta["val"] = torch.empty(4, device="meta")
    g.y.meta["val"] = torch.empty(4, device="meta")
    new = g.call(aten.add.Tensor, g.x, g.y)
    copy = g.call(aten.clone.default, g.x)
    output = g.graph.output([new, copy])
    roles = [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)]
    set_roles(g.graph, roles)
    before, copies = copy_graph(g.graph)
    with g.graph.inserting_before(output):
        view = KNOWN[name][0](g)
    output.args = ([new, view],)
    with pytest.raises(LegalityError, match=r"output 1 .* now lies in the memory of x"):
        check_edit(before, g.graph, copies)


# ----------------------------------------------------------------------------
# Methods and modules in a graph may hand out the memory of what they take.


def read_late(kind):
    """Reads the old weight behind its update, through what may be a view of it."""

    def read(gm):
        (total,) = gm.graph.find_nodes(op="call_function", target=aten.sum.default)
        weight = total.args[0]
        with gm.graph.inserting_before(total):
            if kind == "method":
                kept = gm.graph.call_method("detach", (weight,))
            else:
                gm.add_submodule("idle", nn.Identity())
                kept = gm.graph.call_module("idle", (weight,))
        with gm.graph.inserting_before(gm.graph.output_node()):
            late = gm.graph.call_function(aten.sum.default, (kept,))
        late.meta = dict(total.meta)
        total.replace_all_uses_with(late)
        gm.graph.erase_node(total)
        gm.recompile()
        return gm

    return read


def step(model, optim, batch):
    before = model.weight.detach().sum()
    (model(batch) ** 2).mean().backward()
    optim.step()
    optim.zero_grad()
    return before


def results(run):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return [run(model, optim, torch.ones(2, 4)).item() for _ in range(3)]


@pytest.mark.parametrize("kind", ["method", "module"])
def test_what_is_read_late_is_the_old_value(kind):
    with pytest.warns(PassWarning, match="could not be proved"):
        found = results(compile(step, gm_transformation=read_late(kind)))
    assert found == results(step)
