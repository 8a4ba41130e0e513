"""The order of passes, graph queries, and the default transformation."""

import json
from unittest.mock import MagicMock

import pytest
import torch
from torch import fx, nn
from training import train_sum

from torchspmd.errors import CaptureError, PassOrderError, PassWarning, UsageError
from torchspmd.step import (
    GraphModuleTransformation,
    IterGraphModule,
    Outcome,
    compile,
    find_all_descendants,
    find_node,
    get_all_fused_optimizer_blocks,
    graph_optimization_pass,
)

DONE = Outcome(matched=1, changed=1)


@graph_optimization_pass(prerequisites=[], apply_after=[])
def first(gm):
    return DONE


@graph_optimization_pass(prerequisites=[first], apply_after=[])
def builds_on_first(gm):
    return DONE


@graph_optimization_pass(prerequisites=[], apply_after=[first])
def later(gm):
    return DONE


def module():
    return fx.symbolic_trace(lambda x: abs(x) + 1)


@pytest.mark.parametrize(
    "make",
    (
        module,
        lambda: IterGraphModule(module()),
        lambda: MagicMock(spec=IterGraphModule),  # as the original's own test has it
    ),
)
def test_orders_that_are_allowed(make):
    for order in ([first, builds_on_first], [first, later], [later], [first, first]):
        gm = make()
        names = [each(gm).name for each in order]
        assert names == [each.__name__ for each in order]


def test_a_pass_returns_its_report():
    gm = module()
    first(gm)
    assert builds_on_first(gm).outcome == DONE


def test_prerequisite_is_missing():
    text = "first are the prerequisites of builds_on_first but are not applied"
    with pytest.raises(PassOrderError, match=text):
        builds_on_first(module())


def test_prerequisite_may_have_been_undone():
    gm = module()
    first(gm)
    later(gm)
    with pytest.raises(AssertionError, match="are the prerequisites of"):
        builds_on_first(gm)
    first_again = module()
    first(first_again)
    builds_on_first(first_again)
    builds_on_first(first_again)  # builds on it too, so it keeps it


def test_too_late():
    gm = module()
    later(gm)
    with pytest.raises(AssertionError, match="later must be applied after first"):
        first(gm)


def test_only_graphs():
    with pytest.raises(PassOrderError, match=r"must be either fx\.GraphModule or"):
        first(3)


def test_find_node_in_both_orders():
    graph = module().graph
    is_call = [find_node(graph, lambda n: n.op == "call_function", r) for r in (0, 1)]
    assert is_call[0] == is_call[1][::-1]
    assert len(is_call[0]) == 2
    assert find_node(graph, lambda n: False) == []


def test_descendants_of_many_diamonds_are_found_at_once():
    graph = fx.Graph()
    top = node = graph.placeholder("x")
    for _ in range(60):  # without a memory of what was seen: 2 ** 60 paths
        left, right = (
            graph.call_function(abs, (node,)),
            graph.call_function(abs, (node,)),
        )
        node = graph.call_function(max, (left, right))
    graph.output(node)
    gm = fx.GraphModule(nn.Module(), graph)
    assert len(find_all_descendants(gm, [top])) == 181


def test_descendants_of_nothing():
    with pytest.raises(UsageError, match="No parent nodes are given"):
        find_all_descendants(module(), [])


def fused_step(transformation):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    step = compile(train_sum, gm_transformation=transformation)
    for _ in range(3):
        step(model, optim, torch.ones(2, 4))
    return model.weight.detach(), step


def test_fused_optimizer_blocks():
    seen = []

    def transformation(gm):
        seen.extend(get_all_fused_optimizer_blocks(gm, "_fused_adam"))
        assert get_all_fused_optimizer_blocks(gm, ["_fused_sgd"]) == []
        return gm

    _, step = fused_step(transformation)
    assert len(step.programs) == 1
    (block,) = seen
    assert block.optim.optim_node.name == "_fused_adam"
    assert len(block.optim.optim_node.args[1]) == 2  # the gradients
    assert block.step.add_node.name == "_foreach_add"


def test_block_without_a_counter():
    graph = fx.Graph()
    x = graph.placeholder("x")
    operator = torch.ops.aten._fused_adam.default
    graph.call_function(operator, ([x], [x], [x], [x], [], [x]))
    gm = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(CaptureError, match="Cannot find step node"):
        get_all_fused_optimizer_blocks(gm, "_fused_adam")


def test_transformation_changes_nothing_and_dumps(tmp_path):
    plain, _ = fused_step(None)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, passes=(first,), dump_graphs=tmp_path / "graphs"
    )
    assert transformation.folder is None
    weight, step = fused_step(transformation)
    assert torch.equal(weight, plain)
    assert transformation.folder == tmp_path / "graphs"
    manifest = json.loads((tmp_path / "graphs" / "manifest_rank0.json").read_text())
    assert [row["name"] for row in manifest] == ["captured", "first"]
    for row in manifest:
        text = (tmp_path / "graphs" / row["graph"]).read_text()
        assert "_fused_adam" in text
        assert ("difference" in row) == (row["name"] == "first")
    assert repr(step.programs[0]).startswith("Program(0: ")
    assert len(repr(step.programs[0])) < 100


def test_default_passes_without_communication_warn():
    transformation = GraphModuleTransformation(enable_graph_optimization=True)
    with pytest.warns(PassWarning, match="Is there communication in this step"):
        transformation(module())
    names = [report.name for report in transformation.reports]
    assert names[0] == "dedupe_collectives" and "schedule_comm_wait" in names


@pytest.mark.parametrize(
    "options", [{"overlap_iterations": True}, {"bucket_size_mb": 4, "passes": [first]}]
)
def test_options_without_effect_are_refused(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))} would have no effect"):
        GraphModuleTransformation(**options)


def test_an_iterated_graph_finishes_by_itself():
    assert IterGraphModule(module())(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "add" in IterGraphModule(module()).print_readable(print_output=False)


def test_inductor_needs_a_graph():
    model = nn.Linear(4, 4)

    @compile(backend="inductor", gm_transformation=lambda gm: lambda *flat: flat)
    def step(model, batch):
        return model(batch)

    with pytest.raises(CaptureError, match=r"that returns an fx\.GraphModule"):
        step(model, torch.ones(2, 4))
