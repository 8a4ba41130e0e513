"""Numbers, names and operators that cannot be: refused with the rule and the way out."""

import math
import warnings

import pytest
import torch
from torch import fx, nn

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step import (
    CostModel,
    GraphModuleTransformation,
    IterGraphModule,
    Link,
    Outcome,
    Override,
    Verification,
    VirtualRanks,
    compile,
    find_all_descendants,
    find_node,
    get_all_fused_optimizer_blocks,
    graph_optimization_pass,
    measure_cost,
    measure_exposure,
    pass_reports,
    run_virtual,
)
from torchspmd.step.graph.collectives import build_ledger
from torchspmd.step.graph.simulate import simulate, simulate_steady
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    dedupe_collectives,
    default_passes,
    defer_updates,
    iter_move_grads_and_optimizers,
    prefetch_gathers,
    remove_copy_from_optimizer,
    schedule_comm_wait,
    split_fused_optimizer,
    split_optimizer,
)
from torchspmd.step.passes.pipeline import choose_bucket_size


def graph_module():
    return fx.symbolic_trace(lambda x, y: [x + y])


@pytest.mark.parametrize("size", [math.inf, math.nan, "25", 0, -1, True, 10**400])
def test_bucket_sizes(size):
    with pytest.raises(UsageError) as caught:
        comm_fusion_with_concat(graph_module(), size, first_bucket_mb=size)
    text = str(caught.value)
    assert f"bucket_size_mb={size!r}: a bucket needs a size above 0, a finite" in text
    assert f"first_bucket_mb={size!r}: use more than 0, a finite number of MiB" in text


@pytest.mark.parametrize("size", [math.inf, math.nan, "1", -1])
@pytest.mark.parametrize(
    "change", [schedule_comm_wait, prefetch_gathers, defer_updates]
)
def test_memory_budgets(change, size):
    rule = f"memory_budget_mb={size!r}): use 0 or more, a finite number of MiB, "
    rule += "such as 0" if change is defer_updates else "or None for no limit"
    gm = graph_module()
    gm = IterGraphModule(gm) if change is defer_updates else gm
    with pytest.raises(UsageError) as caught:
        change(gm, memory_budget_mb=size)
    assert f"{change.__name__}({rule}" in str(caught.value)


def optimized(**options):
    return GraphModuleTransformation(enable_graph_optimization=True, **options)


TAKE_A_COST = {
    "defer_updates": lambda cost: defer_updates(
        IterGraphModule(graph_module()), cost=cost
    ),
    "default_passes": lambda cost: default_passes(cost=cost),
    "choose_bucket_size": lambda cost: choose_bucket_size(graph_module(), cost),
    "measure_exposure": lambda cost: measure_exposure(
        graph_module(), [torch.ones(1)] * 2, cost=cost
    ),
    "GraphModuleTransformation": lambda cost: optimized(cost=cost),
    "simulate": lambda cost: simulate(graph_module().graph, cost),
    "simulate_steady": lambda cost: simulate_steady(graph_module().graph, cost, 0),
}


@pytest.mark.parametrize("cost", ["x", 0, 5e10, CostModel])
@pytest.mark.parametrize("name", TAKE_A_COST)
def test_costs(name, cost):
    with pytest.raises(UsageError) as caught:
        TAKE_A_COST[name](cost)
    assert f"{name}(cost={cost!r}): give a CostModel" in str(caught.value)


def test_a_cost_may_be_left_out_where_there_is_a_guess():
    for name in ("simulate", "simulate_steady"):
        with pytest.raises(UsageError, match=r"\(cost=None\): give a CostModel\.$"):
            TAKE_A_COST[name](None)
    assert default_passes(cost=None) and optimized(cost=None).cost is None
    assert choose_bucket_size(graph_module()) == 1.0


def test_rates_that_no_device_has():
    with pytest.raises(UsageError) as caught:
        CostModel(0, "x", math.nan, -1.0, True, operators=3)
    assert str(caught.value).split("; ") == [
        "CostModel: flops=0: give a finite number above 0",
        "memory_bytes='x': give a finite number above 0",
        "network_bytes=nan: give a finite number above 0",
        "launch_seconds=-1.0: give seconds, 0 or more and finite",
        "latency_seconds=True: give seconds, 0 or more and finite",
        "operators=int: give a mapping of keys to seconds.",
    ]
    for endless in (math.inf, 10**400):
        with pytest.raises(UsageError, match=r"flops=.*: give a finite number above 0"):
            CostModel(flops=endless)
        with pytest.raises(
            UsageError, match=r"latency_.*: give seconds, 0 or more and"
        ):
            CostModel(latency_seconds=endless)


def test_measured_operators_that_cannot_be():
    with pytest.raises(UsageError) as caught:
        CostModel(operators={"mm": "fast", 3: 1.0, "add": math.nan, "mul": -1e-9})
    assert str(caught.value).split("; ") == [
        "CostModel: operators[3]: give keys as operator_key makes them, a str each",
        "operators['mm']='fast': give seconds, 0 or more and finite",
        "operators['add']=nan: give seconds, 0 or more and finite",
        "operators['mul']=-1e-09: give seconds, 0 or more and finite.",
    ]
    with pytest.raises(
        UsageError, match=r"operators\['5'\]=None: .*; and 4 more operat"
    ):
        CostModel(operators={str(n): None for n in range(10)})
    assert CostModel(operators={"mm": 0, "add": 1e-6}).operators["mm"] == 0


def test_networks_of_axes_that_cannot_be():
    with pytest.raises(UsageError) as caught:
        CostModel(axes={"dp": 1e9, "tp": (1e9, 0.0)})
    assert str(caught.value).split("; ") == [
        "CostModel: axes['dp']=1000000000.0: give a Link(network_bytes, latency_seconds)",
        "axes['tp']=(1000000000.0, 0.0): give a Link(network_bytes, latency_seconds).",
    ]
    with pytest.raises(
        UsageError, match=r"axes=7: give a mapping of names of mesh axes"
    ):
        CostModel(axes=7)
    with pytest.raises(UsageError) as caught:
        CostModel(axes={"dp": Link(0, -1.0)})
    assert str(caught.value).split("; ") == [
        "CostModel: axes['dp'].network_bytes=0: give a finite number above 0",
        "axes['dp'].latency_seconds=-1.0: give seconds, 0 or more and finite.",
    ]


def test_what_is_measured():
    with pytest.raises(UsageError) as caught:
        measure_cost("nope", dtype=torch.int64, group=3)
    assert str(caught.value).split("; ") == [
        "measure_cost: device='nope': pass a device, such as 'cpu' or 'cuda'",
        "dtype=torch.int64: pass a floating-point dtype of torch",
        "group=3: pass a ProcessGroup, or None for all ranks.",
    ]


def test_measuring_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="this process has no CUDA device"):
        measure_cost("cuda")


def moved_by_numbers():
    gm = IterGraphModule(graph_module())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no copies
        remove_copy_from_optimizer(gm)
    iter_move_grads_and_optimizers(gm, 1, "b")


REFUSED = [
    (
        lambda: defer_updates(IterGraphModule(graph_module()), delay_gradients="no"),
        "defer_updates(delay_gradients='no'): pass True or False.",
    ),
    (
        lambda: dedupe_collectives(graph_module(), across_phases=1),
        "dedupe_collectives(across_phases=1): pass True or False.",
    ),
    (
        lambda: dedupe_collectives(graph_module(), keep_mb=-1),
        "dedupe_collectives(keep_mb=-1): use 0 or more, a finite number of MiB, or leave "
        "it out.",
    ),
    (
        lambda: prefetch_gathers(graph_module(), "1", in_flight_mb=math.inf),
        "prefetch_gathers: distance='1': a gather starts 1 or more layers ahead, a whole "
        "number; in_flight_mb=inf: use more than 0, a finite number of MiB, or None.",
    ),
    (
        lambda: default_passes(bucket_size_mb="25"),
        "default_passes(bucket_size_mb='25'): use more than 0, a finite number of MiB, or "
        "None to have it chosen.",
    ),
    (
        lambda: default_passes(overlap_iterations="no"),
        "default_passes(overlap_iterations='no'): pass True, False or 'auto'.",
    ),
    (
        moved_by_numbers,
        "iter_move_grads_and_optimizers(target_comm_node=1): pass the name of a node, a "
        "str.",
    ),
    (
        lambda: get_all_fused_optimizer_blocks(graph_module(), 3),
        "get_all_fused_optimizer_blocks(optim_ops=3): pass the name of an operator, such "
        "as '_fused_adam', or a list of names.",
    ),
    (
        lambda: simulate(graph_module(), CostModel()),
        "simulate(graph=...): <lambda> is no fx.Graph. Pass the graph of a graph module, "
        "for instance step.programs[0].graph.graph.",
    ),
    (
        lambda: simulate_steady(graph_module().graph, CostModel(), 2),
        "simulate_steady(num_carried=2): the graph has 2 inputs and 1 outputs. Give how "
        "many of the last are its own of the run before.",
    ),
    (
        lambda: measure_exposure(graph_module(), [torch.ones(1)] * 2, runs=1.5),
        "measure_exposure(runs=1.5): pass a whole number, at least 1.",
    ),
    (
        lambda: measure_exposure(graph_module().graph, []),
        "measure_exposure(graph=...): Graph is no fx.GraphModule. Pass that of a program.",
    ),
    (
        lambda: measure_exposure(graph_module(), 3),
        "measure_exposure(flat=...): int is no list of the graph's inputs.",
    ),
    (
        lambda: GraphModuleTransformation(enable_inductor="no"),
        "GraphModuleTransformation(enable_inductor='no'): pass True or False.",
    ),
    (
        lambda: optimized(bucket_size_mb=0),
        "GraphModuleTransformation(bucket_size_mb=0): use more than 0, a finite number of "
        "MiB, or None to have it chosen.",
    ),
    (
        lambda: GraphModuleTransformation(dump_graphs=3),
        "GraphModuleTransformation(dump_graphs=3): pass True, False or a folder.",
    ),
    (
        lambda: GraphModuleTransformation(passes=[3]),
        "GraphModuleTransformation(passes=[3]): pass a list of functions, each called with "
        "the IterGraphModule.",
    ),
    (
        lambda: compile(gm_transformation=3),
        "compile(gm_transformation=3): pass a function of the captured graph module, or a "
        "GraphModuleTransformation.",
    ),
    (
        lambda: compile(mesh="dp"),
        "compile(mesh='dp'): pass a DeviceMesh, for instance of init_device_mesh(), or "
        "None for all ranks.",
    ),
    (
        lambda: compile(module_override=Override())(train_step),
        "compile(module_override=...): Override is no list. Pass a list of objects of "
        "subclasses of torchspmd.step.Override.",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[t for _, t in REFUSED])
def test_options_of_another_type(call, text):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"ranks": 2.5}, "(ranks=2.5): pass a whole number, at least 1."),
        ({"ranks": 0}, "(ranks=0): pass a whole number, at least 1."),
        ({"ranks": {"dp": "2"}}, "(ranks['dp']='2'): pass a whole number, at least 1."),
        ({"steps": 0}, "(steps=0): pass a whole number, at least 1."),
        ({"seed": "a"}, "(seed='a'): pass a whole number."),
        ({"inputs": []}, "(inputs=list of 0): the graph takes 2 inputs. Pass a list"),
        ({"inputs": 1}, "(inputs=int): the graph takes 2 inputs. Pass a list"),
    ],
)
def test_virtual_runs(given, rule):
    with pytest.raises(UsageError) as caught:
        run_virtual(graph_module(), **given)
    assert f"run_virtual{rule}" in str(caught.value)


def test_verifications():
    with pytest.raises(UsageError) as caught:
        Verification(ranks=4.5, seed=None)
    assert str(caught.value).splitlines() == [
        "Verification(ranks=4.5): pass a whole number.",
        "Verification(seed=None): pass a whole number.",
    ]
    with pytest.raises(UsageError) as caught:
        Verification(max_ranks=0, limit_bytes=-1)
    assert str(caught.value).splitlines() == [
        "Verification(max_ranks=0): pass a whole number, at least 1.",
        "Verification(limit_bytes=-1): pass a whole number, at least 1.",
    ]


def test_a_parameter_that_a_compiled_step_keeps_for_itself():
    def step(model, last_train_step=False): ...

    with pytest.raises(UsageError, match="Give your parameter another name"):
        compile(step)
    compile(lambda model, **kwargs: None)


def train_step(model, optim, batch):
    loss = model(batch).sum()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def test_a_scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        compile(train_step)(model, optim, torch.ones(2, 4))
    text = str(caught.value)
    assert "1 of argument args[0] is made by torch.jit" in text
    assert "Pass the Python module that it was made from" in text


def made_whole():
    return torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")


def made_in_place():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "path"), ((made_whole, "the module itself"), (made_in_place, "0"))
)
def test_a_module_that_torch_compiled(make, path):
    model = make()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        compile(train_step)(model, optim, torch.ones(2, 4))
    text = str(caught.value)
    assert f"{path} of argument args[0] is made by torch.compile" in text
    assert "backend='inductor' compiles the whole step" in text


def test_an_operator_that_only_has_an_effect():
    seen = []
    library = torch.library.Library("odd_arguments", "FRAGMENT")
    library.define("log(Tensor x) -> ()")
    library.impl("log", lambda x: seen.append(1), "CompositeExplicitAutograd")

    def logging_step(model, optim, batch):
        torch.ops.odd_arguments.log(train_step(model, optim, batch).detach())

    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    logging_step(model, optim, torch.ones(2, 4))
    assert seen == [1]
    with pytest.raises(CaptureError) as caught:
        compile(logging_step)(model, optim, torch.ones(2, 4))
    assert "the step calls odd_arguments.log.default, which returns" in str(
        caught.value
    )
    assert "call it after the step" in str(caught.value)


# ----------------------------------------------------------------------------
# What is no graph, no node and no claim: refused by the functions that passes use.


ORDERS = (
    "give a tuple of reduction orders out of 'rank', 'ring', 'tree', such as ('rank',), () "
    "where bits may change, or None for no claim"
)


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


ARGUMENTS_REFUSED = [
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


@pytest.mark.parametrize(
    ("call", "text"), ARGUMENTS_REFUSED, ids=[t for _, t in ARGUMENTS_REFUSED]
)
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
