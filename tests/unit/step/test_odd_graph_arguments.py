"""What is no graph, no node and no claim: refused by the functions that passes use."""

import math

import pytest
import torch
from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step import (
    IterGraphModule,
    Outcome,
    VirtualRanks,
    find_all_descendants,
    find_node,
    get_all_fused_optimizer_blocks,
    graph_optimization_pass,
    pass_reports,
)
from torchspmd.step.graph.collectives import build_ledger
from torchspmd.step.passes import split_fused_optimizer, split_optimizer

pytestmark = pytest.mark.unit

ORDERS = (
    "give a tuple of reduction orders out of 'rank', 'ring', 'tree', such as ('rank',), () "
    "where bits may change, or None for no claim"
)


def graph_module():
    return fx.symbolic_trace(lambda x, y: [x + y])


@pytest.mark.parametrize("claim", ["rank", ("bogus",), ["rank"], ("rank", 1), True, []])
def test_claims_that_cannot_be(claim):
    with pytest.raises(UsageError) as caught:
        Outcome(1, 1, keeps_bits=claim)
    assert str(caught.value) == f"Outcome: keeps_bits={claim!r}: {ORDERS}."


def test_claims_that_can():
    for claim in (None, (), ("rank",), ("rank", "ring", "tree")):
        assert Outcome(1, 0, keeps_bits=claim).keeps_bits == claim


def test_what_a_pass_says_is_checked_all_at_once():
    with pytest.raises(UsageError) as caught:
        Outcome("x", math.nan, "one line", (1,))
    assert str(caught.value).split("; ") == [
        "Outcome: matched='x': give a whole number, 0 or more",
        "changed=nan: give a whole number, 0 or more",
        "refused='one line': give a tuple of str, a line each",
        "detail=(1,): give a tuple of str, a line each.",
    ]
    for wrong in (None, -1, True, 1.5):
        with pytest.raises(UsageError, match=r"changed=.*: give a whole number"):
            Outcome(1, wrong)


NO_GRAPH = (
    "str has no fx.Graph. Pass a graph module, for instance step.programs[0].graph, or an "
    "IterGraphModule."
)
NO_NODES = (
    "str where nodes are taken. Pass a list of nodes of the graph (fx.Node), as find_node "
    "gives them."
)


NO_NODE = "pass a node of the graph (fx.Node), as find_node gives it."
LIST_OF_PASSES = (
    "Pass a list of functions that graph_optimization_pass declares, "
    "such as [fuse], or []."
)


def moved(method, nodes=None, target=None):
    graph = IterGraphModule(graph_module()).graph
    by_name = {node.name: node for node in graph.nodes}
    nodes = [by_name["add"]] if nodes is None else nodes
    getattr(graph, method)(nodes, target or by_name["output"])


def virtual(inputs):
    gm = graph_module()
    VirtualRanks.of(gm, ranks=2).run(gm, inputs)


REFUSED = [
    (
        lambda: IterGraphModule("x"),
        "IterGraphModule(main_gm=str): pass the fx.GraphModule of one iteration, as "
        "gm_transformation gets it.",
    ),
    (
        lambda: find_node(graph_module().graph, "x"),
        "find_node(predicate='x'): pass a function that takes a node and says whether to "
        "find it, such as lambda node: node.name == 'mm'.",
    ),
    (
        lambda: find_node(graph_module(), callable),
        "find_node(graph=...): <lambda> is no fx.Graph. Pass the graph of a graph module, "
        "for instance step.programs[0].graph.graph.",
    ),
    (
        lambda: find_all_descendants(graph_module(), "x"),
        f"find_all_descendants(parent_nodes=...): {NO_NODES}",
    ),
    (
        lambda: find_all_descendants("x", []),
        f"find_all_descendants(gm=...): {NO_GRAPH}",
    ),
    (
        lambda: get_all_fused_optimizer_blocks("x", "_fused_adam"),
        f"get_all_fused_optimizer_blocks(gm=...): {NO_GRAPH}",
    ),
    (
        lambda: graph_optimization_pass(prerequisites="x", apply_after=[]),
        "graph_optimization_pass(prerequisites=...): 'x' is no list of passes. "
        + LIST_OF_PASSES,
    ),
    (
        lambda: graph_optimization_pass(prerequisites=[], apply_after=["x", len]),
        "graph_optimization_pass(apply_after=...): 'x', len is no list of passes. "
        + LIST_OF_PASSES,
    ),
    (
        lambda: graph_optimization_pass(prerequisites=graph_module, apply_after=[]),
        "graph_optimization_pass(prerequisites=...): graph_module is no list of passes. "
        + LIST_OF_PASSES,
    ),
    (
        lambda: moved("move_to_next_iter_before", "x"),
        f"move_to_next_iter_before(subgraph=...): {NO_NODES}",
    ),
    (
        lambda: moved("move_to_next_iter_before", target="x"),
        f"move_to_next_iter_before(target_node='x'): {NO_NODE}",
    ),
    (lambda: moved("move_before", "x"), f"move_before(nodes=...): {NO_NODES}"),
    (
        lambda: moved("move_before", target="x"),
        f"move_before(target_node='x'): {NO_NODE}",
    ),
    (lambda: moved("move_after", "x"), f"move_after(nodes=...): {NO_NODES}"),
    (
        lambda: moved("move_after", target="x"),
        f"move_after(target_node='x'): {NO_NODE}",
    ),
    (
        lambda: moved("move_after", target=graph_module().graph.output_node()),
        "move_after: output: not of this graph. Pass nodes of the graph that they are "
        "moved in.",
    ),
    (lambda: build_ledger("x"), f"build_ledger(graph=...): {NO_GRAPH}"),
    (lambda: pass_reports("x"), f"pass_reports(gm=...): {NO_GRAPH}"),
    (
        lambda: split_optimizer(graph_module(), "x"),
        f"split_optimizer(gradients=...): {NO_NODES}",
    ),
    (
        lambda: split_optimizer(graph_module(), ["x", None]),
        f"split_optimizer(gradients=...): NoneType, {NO_NODES}",
    ),
    (
        lambda: split_fused_optimizer(graph_module(), "x", []),
        "split_fused_optimizer(optim_block=str): pass a block that "
        "get_all_fused_optimizer_blocks gives.",
    ),
    (
        lambda: virtual(None),
        "VirtualRanks.run(inputs=NoneType): pass a list with a list of inputs for each "
        "rank of 2 virtual ranks without communication, one value for each placeholder.",
    ),
    (
        lambda: virtual([torch.ones(2), None]),
        "VirtualRanks.run(inputs=list of NoneType, Tensor): pass a list with a list of "
        "inputs for each rank of 2 virtual ranks without communication, one value for each "
        "placeholder.",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[t for _, t in REFUSED])
def test_arguments_of_another_type(call, text):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == text


def test_gradients_of_a_block_that_are_no_nodes():
    graph = fx.Graph()
    lists = [[graph.placeholder(name)] for name in "pgm"]
    node = graph.call_function(torch.ops.aten._fused_sgd.default, tuple(lists))
    graph.output([node])
    gm = fx.GraphModule({}, graph)
    (block,) = get_all_fused_optimizer_blocks(gm, "_fused_sgd")
    with pytest.raises(UsageError, match=r"split_gradients=\.\.\.\): str where nodes"):
        split_fused_optimizer(gm, block, "x")
