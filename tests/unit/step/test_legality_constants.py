"""Tensors that a graph reads by name: edits keep them, failed ones give them back."""

import pytest
import torch
from torch import fx, nn

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import IterGraphModule, graph_optimization_pass
from torchspmd.step.graph.snapshot import Constants
from torchspmd.step.passes.runner import run_any

pytestmark = pytest.mark.unit

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
