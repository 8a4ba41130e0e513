"""Each rule of the legality check: what it catches, and the text that names the nodes."""

import operator
import random

import pytest
import torch
from edit_graphs import GROUP, OTHER, GraphBuilder, aten, c10d
from torch import fx, nn

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import IterGraphModule, graph_optimization_pass
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.graph.snapshot import Constants, copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.step.passes.runner import run_any

WAIT = c10d.wait_tensor.default


class Edited:
    """A graph of two reductions on one group and one on another, before an edit."""

    def __init__(self):
        self.builder = b = GraphBuilder()
        self.graph = b.graph
        self.x, self.y = b.input("x", 4), b.input("y", 4)
        self.x.meta["torchspmd_name"] = "Net.weight"
        self.first, self.second = b.reduced(self.x), b.reduced(self.y)
        self.third = b.reduced(self.y, group=OTHER)
        self.total = b.call(aten.sub.Tensor, self.first, self.second)
        self.graph.output([self.total, self.third])
        self.before, self.mapping = copy_graph(self.graph)

    def check(self, **options):
        return str(check_edit(self.before, self.graph, self.mapping, **options))

    def problems(self, **options):
        with pytest.raises(LegalityError) as caught:
            self.check(**options)
        head, *lines = str(caught.value).splitlines()
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        assert head == (
            f"the edit would change what the graph computes, and was not taken; {count}:"
        )
        return [line.strip() for line in lines]


@pytest.fixture
def edit():
    return Edited()


def test_nothing_changed(edit):
    assert edit.check() == "proved equal"


# Definitions, inputs, outputs.
def test_a_use_before_its_definition(edit):
    edit.first.prepend(edit.total)
    assert edit.problems() == [
        f"definition: sub_tensor uses {name}, which comes later. Insert a node behind the "
        "nodes that it takes."
        for name in ("wait_tensor_default", "wait_tensor_default_1")
    ]


def test_a_node_of_another_graph(edit):
    other = fx.Graph().placeholder("stranger")
    edit.total.args = (other, edit.second)
    assert "sub_tensor uses stranger, which is not in the graph" in edit.problems()[0]


def test_an_input_that_is_lost_added_or_moved(edit):
    rule = (
        "A pass keeps the placeholders, all and in their order: the caller gives them."
    )
    with edit.graph.inserting_before(edit.first):
        edit.graph.placeholder("z")
    assert edit.problems() == [f"input: the input z is new. {rule}"]
    edit = Edited()
    edit.x.prepend(edit.y)
    assert f"input: input 0 was x (Net.weight) and is y. {rule}" in edit.problems()
    edit = Edited()
    with edit.graph.inserting_before(edit.x):
        zero = edit.builder.call(aten.zeros.default, [4])
    edit.y.replace_all_uses_with(zero)
    edit.graph.erase_node(edit.y)
    assert f"input: the input y is gone. {rule}" in edit.problems()


def test_a_dropped_output(edit):
    edit.graph.output_node().args = ([edit.total],)
    assert edit.problems() == [
        "output: the graph had 2 outputs and has 1; output 1 (wait_tensor_default_2) is "
        "missing. A pass keeps the outputs, all and in their order: the caller unpacks "
        "them."
    ]
    edit.graph.output_node().args = ([edit.total, None],)
    (line,) = edit.problems()
    assert (
        "output 1 (wait_tensor_default_2) was wait_tensor_default_2 and is None" in line
    )


def test_swapped_outputs(edit):
    edit.graph.output_node().args = ([edit.third, edit.total],)
    assert [line[:90] for line in edit.problems()] == [
        "value: output 0 (sub_tensor): another value: sub_tensor was where "
        "all_reduce_default_2 is now"[:90],
        "value: output 1 (wait_tensor_default_2): another value: all_reduce_default_2 "
        "was where sub_tensor is now"[:90],
    ]


def test_changed_roles(edit):
    set_roles(
        edit.graph, [OutputRole(OutputKind.RESULT), OutputRole(OutputKind.CREATED)]
    )
    assert "output: the roles of the outputs changed" in edit.problems()[0]


# Waits.
def test_a_missing_wait(edit):
    start = edit.first.args[0]
    edit.first.replace_all_uses_with(start)
    edit.graph.erase_node(edit.first)
    assert edit.problems() == [
        "wait: nothing waits for all_reduce_default, and sub_tensor uses it. Each "
        "collective has one wait for each tensor that it gives."
    ]


def test_a_use_beside_the_wait(edit):
    with edit.graph.inserting_after(edit.first):
        view = edit.builder.call(aten.view.default, edit.first.args[0], [4])
    edit.total.args = (view, edit.second)
    assert edit.problems() == [
        "wait: sub_tensor uses all_reduce_default without its wait. Use the result of the "
        "wait."
    ]


@pytest.mark.parametrize("of_the_wait", [True, False])
def test_a_second_wait(edit, of_the_wait):
    source = edit.first if of_the_wait else edit.first.args[0]
    with edit.graph.inserting_after(edit.first):
        again = edit.builder.call(WAIT, source)
    edit.total.args = (again, edit.second)
    (line,) = edit.problems()
    if of_the_wait:
        assert "wait_tensor_default_3 waits for wait_tensor_default, which no" in line
    else:
        assert "wait_tensor_default and wait_tensor_default_3 both wait for" in line


def test_a_buffer_that_is_used_while_it_is_reduced_in_place():
    b = GraphBuilder()
    x = b.input("x", 4)
    buffer = b.call(aten.relu.default, x)
    start = b.graph.call_function(c10d.all_reduce_.default, (buffer, "sum", GROUP))
    wait = b.graph.call_function(WAIT, (start,))
    used = b.call(aten.neg.default, buffer)
    b.graph.output([used])
    before, mapping = copy_graph(b.graph)
    # As it is, the buffer is used without the wait: not the fault of an edit.
    assert str(check_edit(before, b.graph, mapping)) == "proved equal"
    used.args = (wait,)
    before, mapping = copy_graph(b.graph)
    used.args = (buffer,)
    with pytest.raises(
        LegalityError, match="neg_default uses all_reduce__default without"
    ):
        check_edit(before, b.graph, mapping)


# The order of collectives.
def test_a_changed_order_on_one_group(edit):
    one, two = edit.first.args[0], edit.second.args[0]
    one.prepend(two)
    assert edit.problems() == [
        "order: all_reduce_default_1 now starts before all_reduce_default on group '0'; it "
        "started after it. Keep the order of collectives on one group, or declare the pass "
        "with reorders_collectives=True."
    ]
    assert edit.problems(may_reorder={OTHER})
    for declared in (True, {GROUP}):
        assert edit.check(may_reorder=declared) == (
            "proved equal; order changed as declared: all_reduce_default_1 now starts "
            "before all_reduce_default on group '0'"
        )


def test_other_groups_may_be_overtaken(edit):
    edit.first.args[0].prepend(edit.third.args[0])
    assert edit.check() == "proved equal"


def test_a_collective_that_is_made_again_is_known_by_its_value(edit):
    with edit.graph.inserting_before(edit.first.args[0]):
        again = edit.builder.reduced(edit.y)
    edit.second.replace_all_uses_with(again)
    start = edit.second.args[0]
    edit.graph.erase_node(edit.second)
    edit.graph.erase_node(start)
    assert (
        "order: all_reduce_default_3 now starts before all_reduce_default"
        in (edit.problems()[0])
    )


# Memory.
def write_between(move=None):
    """x is read, written, and read again; with a node moved behind another one."""
    b = GraphBuilder()
    x = b.input("x", 4)
    view = b.call(aten.view.default, x, [2, 2])
    nodes = {
        "read": b.call(aten.neg.default, view),
        "write": b.graph.call_function(aten.add_.Tensor, (x, 1)),
        "again": b.call(aten.relu.default, view),
    }
    b.graph.output([nodes["read"], nodes["again"]])
    before, mapping = copy_graph(b.graph)
    if move is not None:
        nodes[move[1]].append(nodes[move[0]])
    return str(check_edit(before, b.graph, mapping))


def test_a_read_that_crosses_a_write_through_a_view():
    assert write_between() == "proved equal"
    with pytest.raises(LegalityError) as caught:
        write_between(("read", "write"))
    assert (
        "state: neg_default and add__tensor changed their order; both access x, and "
        "add__tensor writes it. Nodes that access the same memory keep their order when "
        "one of them writes."
    ) in str(caught.value)
    with pytest.raises(LegalityError, match="relu_default and add__tensor changed"):
        write_between(("write", "again"))


def test_a_write_into_what_a_collective_still_sends():
    b = GraphBuilder()
    x = b.input("x", 4)
    start = b.call(c10d.all_reduce.default, x, "sum", GROUP)
    wait = b.call(WAIT, start)
    write = b.graph.call_function(aten.zero_.default, (x,))
    b.graph.output([wait])
    before, mapping = copy_graph(b.graph)
    write.append(wait)
    with pytest.raises(LegalityError) as caught:
        check_edit(before, b.graph, mapping)
    assert "zero__default writes what all_reduce_default sends, before the wait" in str(
        caught.value
    )


def test_outputs_that_lie_in_memory_that_changes():
    def outputs(*kinds):
        b = GraphBuilder()
        x = b.input("x", 4)
        new = b.call(aten.add.Tensor, x, 1)
        copies = [b.call(aten.clone.default, x) for _ in range(2)]
        b.graph.output([new, *copies])
        set_roles(b.graph, [OutputRole(OutputKind.STATE, 0), *map(OutputRole, kinds)])
        return b.graph, new, x, copies

    graph, new, x, copies = outputs(OutputKind.RESULT, OutputKind.RESULT)
    before, mapping = copy_graph(graph)
    graph.output_node().args = ([new, x, copies[1]],)
    with pytest.raises(
        LegalityError, match=r"output 1 \(x\) now lies in the memory of x"
    ):
        check_edit(before, graph, mapping)
    graph, new, _, copies = outputs(OutputKind.CREATED, OutputKind.CREATED)
    before, mapping = copy_graph(graph)
    graph.output_node().args = ([new, copies[0], copies[0]],)
    with pytest.raises(LegalityError, match="now lie in the same memory"):
        check_edit(before, graph, mapping)


# All together.
def test_all_problems_at_once(edit):
    start = edit.first.args[0]
    edit.first.replace_all_uses_with(start)
    edit.graph.erase_node(edit.first)
    start.prepend(edit.second.args[0])
    edit.graph.output_node().args = ([edit.total],)
    checks = [line.partition(":")[0] for line in edit.problems()]
    assert checks == ["output", "wait", "order"]


def test_a_pass_that_goes_wrong_leaves_no_trace():
    edit = Edited()
    module = fx.GraphModule(nn.Module(), edit.graph)

    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def forgetful(gm):
        total = next(n for n in gm.graph.nodes if n.target is aten.sub.Tensor)
        total.args = (total.args[0], total.args[0])

    with pytest.raises(LegalityError) as caught:
        forgetful(module)
    assert str(caught.value).startswith(
        "forgetful would change what the graph computes"
    )
    assert "another value: all_reduce_default_1 was where all_reduce_default" in str(
        caught.value
    )
    total = next(n for n in module.graph.nodes if n.target is aten.sub.Tensor)
    assert total.args[0] is not total.args[1]


def test_many_problems_are_counted():
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", 2 + i) for i in range(30)]
    b.graph.output([b.call(aten.relu.default, x) for x in inputs])
    before, mapping = copy_graph(b.graph)
    values = b.graph.output_node().args[0]
    b.graph.output_node().args = ([*values[1:], values[0]],)
    with pytest.raises(LegalityError) as caught:
        check_edit(before, b.graph, mapping)
    assert "30 problems" in str(caught.value)
    assert str(caught.value).endswith("  and 10 more")


def test_a_graph_of_python_functions():
    graph = fx.symbolic_trace(lambda x, y: torch.sub(x, y) * 2).graph
    before, mapping = copy_graph(graph)
    sub = next(node for node in graph.nodes if node.op == "call_function")
    sub.args = sub.args[::-1]
    with pytest.raises(LegalityError, match="operands in another order"):
        check_edit(before, graph, mapping)


# ----------------------------------------------------------------------------
# New calls that are no operators, and write or draw by their name, are refused.


def tanh(x):
    return torch.ops.aten.tanh.default(x)


def scaled(value):
    return value


def edited(add):
    """A graph whose value is taken by one more call, with no reader of its own."""
    gm = fx.symbolic_trace(tanh)
    gm.add_submodule("relu", nn.ReLU(inplace=True))
    gm.add_submodule("plain", nn.ReLU())
    (value,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.tanh.default
    )
    for node in gm.graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    before, mapping = copy_graph(gm.graph)
    with gm.graph.inserting_after(value):
        add(gm.graph, value)
    return before, gm.graph, mapping


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda g, x: g.call_method("zero_", (x,)), "writes in place (zero_)"),
        (lambda g, x: g.call_function(operator.imul, (x, 0)), "writes in place (imul)"),
        (lambda g, x: g.call_function(torch.relu_, (x,)), "writes in place (relu_)"),
        (lambda g, x: g.call_module("relu", (x,)), "writes in place (relu)"),
        (lambda g, x: g.call_function(torch.rand, (5,)), "takes random numbers (rand)"),
        (
            lambda g, x: g.call_function(torch.manual_seed, (5,)),
            "takes random numbers (manual_seed)",
        ),
    ],
)
def test_calls_that_write_or_draw(add, words):
    with pytest.raises(LegalityError) as caught:
        check_edit(*edited(add))
    assert f"is new and {words}" in str(caught.value)


@pytest.mark.parametrize(
    "add",
    [
        lambda g, x: g.call_function(print, ("here",)),
        lambda g, x: g.call_function(scaled, (x,)),
        lambda g, x: g.call_function(random.random, ()),
        lambda g, x: g.call_function(nn.functional.normalize, (x,)),
        lambda g, x: g.call_method("detach", (x,)),
        lambda g, x: g.call_module("plain", (x,)),
        lambda g, x: g.call_function(torch.isfinite, (x,)),
    ],
)
def test_calls_that_only_look(add):
    assert str(check_edit(*edited(add))) == "proved equal"


# ----------------------------------------------------------------------------
# Tensors that a graph reads by name: edits keep them, failed ones give them back.


RULE = (
    "A pass keeps what get_attr reads: give another tensor another name, and read it with "
    "a node of its own."
)

LARGE = 300_000  # float32: more than is copied


def module(size=2):
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.register_buffer("scale", torch.full((size,), 3.0))
    root.act = nn.ReLU()
    graph = fx.Graph()
    x = graph.placeholder("x")
    scaled = graph.call_function(torch.mul, (x, graph.get_attr("inner.scale")))
    graph.output(graph.call_module("act", (scaled,)))
    return fx.GraphModule(root, graph)


def owner(gm):
    return getattr(gm, "main_gm", gm)


def replace(gm):
    owner(gm).inner.scale = torch.zeros_like(owner(gm).inner.scale)


def replace_by_parameter(gm):
    inner = owner(gm).inner
    inner.scale = nn.Parameter(torch.zeros_like(inner.scale))


def write(gm):
    owner(gm).inner.scale.zero_()


def write_past_the_counter(gm):
    owner(gm).inner.scale.data.zero_()


def resize(gm):
    owner(gm).inner.scale.resize_(1)


def remove(gm):
    del owner(gm).inner.scale


EDITS = [
    (replace, "was replaced"),
    (replace_by_parameter, "was replaced"),
    (write, "was written into"),
    (write_past_the_counter, "was written into"),
    (resize, "was written into"),
]


@pytest.mark.parametrize("make", [module, lambda: IterGraphModule(module())])
@pytest.mark.parametrize(("edit", "what"), EDITS)
def test_a_changed_tensor_is_refused_and_given_back(edit, what, make):
    gm = make()
    kept = owner(gm).inner.scale
    with pytest.raises(LegalityError) as caught:
        run_any(gm, edit)
    assert str(caught.value) == (
        f"{edit.__name__} would change what the graph computes, and was not taken; "
        "1 problem:\n"
        f"  constant: the tensor 'inner.scale', which inner_scale reads, {what}. {RULE}"
    )
    assert owner(gm).inner.scale.tolist() == [3.0, 3.0]
    assert "inner.scale" in owner(gm).state_dict()
    assert owner(gm).inner.scale is kept
    if isinstance(gm, fx.GraphModule):
        assert gm(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_changed_module_is_refused_and_given_back():
    gm = module()

    def swap(gm):
        gm.act = nn.Tanh()

    with pytest.raises(
        LegalityError, match="the attribute 'act', which act reads, was re"
    ):
        run_any(gm, swap)
    assert gm(torch.full((2,), -1.0)).tolist() == [0.0, 0.0]


def test_a_tensor_that_is_gone():
    gm = module()
    with pytest.raises(LegalityError, match="which inner_scale reads, is gone"):
        run_any(gm, remove)
    assert gm(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_pass_that_fails_gives_tensors_back():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def fail(gm):
        replace(gm)
        raise RuntimeError("half-way")

    gm = module()
    with pytest.raises(RuntimeError, match="half-way"):
        fail(gm)
    assert gm(torch.ones(2)).tolist() == [3.0, 3.0]


def add_all_kinds(gm):
    """Something new of each kind, on the module and on one below, and something less."""
    root = owner(gm)
    root.register_buffer("weights", torch.ones(2))
    root.register_parameter("bias", nn.Parameter(torch.ones(2)))
    root.constant = torch.ones(2)
    root.note, root.meta["note"] = "new", 1
    root.inner.register_buffer("passing", torch.ones(2), persistent=False)
    root.inner.block = nn.Linear(2, 2)
    root.act.register_forward_hook(lambda *_: None)
    del root.unread
    raise RuntimeError("half-way")


def held(module):
    """All that a module and those below hold, by name."""
    graph = ("_graph", "_code", "_lineno_map", "_prologue_start")
    return [
        (name, key, value.copy() if isinstance(value, (dict, set)) else value)
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if key not in graph
    ]


@pytest.mark.parametrize("make", [module, lambda: IterGraphModule(module())])
def test_what_a_failed_pass_added_to_the_module_is_gone(make):
    gm = make()
    owner(gm).register_buffer("unread", torch.zeros(2))
    before, names = held(owner(gm)), set(owner(gm).state_dict())
    with pytest.raises(RuntimeError, match="half-way"):
        run_any(gm, add_all_kinds)
    assert set(owner(gm).state_dict()) == names == {"inner.scale", "unread"}
    assert held(owner(gm)) == before
    owner(gm)(torch.ones(2))


def test_what_a_pass_adds_stays_where_it_is_taken():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def scale(gm):
        gm.register_buffer("copied", gm.inner.scale.clone())

    gm = module()
    with pytest.warns(PassWarning, match="changed nothing"):
        scale(gm)
    assert gm.copied.tolist() == [3.0, 3.0]


def test_a_function_that_runs_passes_is_seen_between_them():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def nothing(gm):
        pass

    def around(gm):
        nothing(gm)
        write(gm)
        nothing(gm)

    gm = module()
    with pytest.raises(LegalityError, match=r"^around would .*\n.*was written into"):
        run_any(gm, around)
    assert gm(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_large_tensor_is_known_by_its_version():
    gm = module(LARGE)
    with pytest.raises(
        LegalityError, match=r"written into \(it is too large to be put"
    ):
        run_any(gm, write)
    gm = module(LARGE)
    with pytest.raises(LegalityError, match=r"was replaced\. "):
        run_any(gm, replace)
    assert gm.inner.scale[0] == 3.0


def test_the_same_bits_are_no_change():
    gm = module()
    gm.inner.scale.fill_(float("nan"))
    constants = Constants.of(gm)
    gm.inner.scale = gm.inner.scale.clone()
    gm.inner.scale.mul_(1.0)
    assert constants.changes(gm) == []


def test_what_is_no_longer_read_may_go():
    def drop(gm):
        first = next(node for node in gm.graph.nodes if node.op == "get_attr")
        x = next(iter(gm.graph.nodes))
        mul = next(iter(first.users))
        mul.args = (x, 3.0)
        gm.graph.erase_node(first)
        del gm.inner.scale

    gm = module()
    with pytest.warns(PassWarning, match="^drop: 1 of 1 outputs could not be proved"):
        run_any(gm, drop)
    assert gm(torch.ones(2)).tolist() == [3.0, 3.0]
