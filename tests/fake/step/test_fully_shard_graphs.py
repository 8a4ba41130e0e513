"""The graph of a fully sharded step: where parameters are gathered, for how long."""

import copy
import gc
import operator
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from training import DoublesGradients, train_keeping_gradients
from training import train as step
from training import train_keeping_gradients as step_hooks

from torchspmd import CommDebugMode
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError, UsageError
from torchspmd.layout.retired import predecessor_id
from torchspmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.step import DataParallel, compile
from torchspmd.step.graph.collectives import is_communication
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.passes import comm_fusion_with_concat, schedule_comm_wait
from torchspmd.step.passes.pipeline import default_passes
from torchspmd.testing import fake_mesh

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
NEEDS_FILLED_SHARDS = pytest.mark.newer_torch(
    "its fake group leaves results of reduce_scatter as they were"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x)))) * self.scale


def train(mode=None, *, rank=0, function=step, model=None, optimizer=torch.optim.SGD):
    """A model, its optimizer and its program, after a step on a fake mesh of four."""
    with fake_mesh(4, ("dp",), rank=rank) as mesh:
        model = Net() if model is None else model
        optim = optimizer(model.parameters(), lr=0.1)
        mode = mode or DataParallel("fully_shard", reduce="sum")
        compiled = compile(parallel_mode=mode, mesh=mesh)(function)
        compiled(model, optim, torch.randn(3, 8))
        (program,) = compiled.programs
        return model, optim, program


def gathered(graph):
    """The phases in which each value is read that forward made of one gather alone."""
    of_one: dict = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or owner_of(node).phase is not Phase.FORWARD:
            continue
        if node.target is WAIT and node.args[0].target is GATHER:
            of_one[node] = node
        elif all(source in of_one for source in node.all_input_nodes):
            roots = {of_one[source] for source in node.all_input_nodes}
            if len(roots) == 1:
                of_one[node] = roots.pop()
    phases: dict = {root: set() for root in of_one.values()}
    for node, root in of_one.items():
        readers = [user for user in node.users if of_one.get(user) is not root]
        phases[root] |= {owner_of(reader).phase for reader in readers}
    return list(phases.values())


def test_what_a_shard_replaced_lives_as_long_as_the_shard():
    """Else a batch could get its identity, and be taken for it in the next capture."""
    model = Net()
    replaced = [weakref.ref(parameter) for parameter in model.parameters()]
    model = train(model=model)[0]
    gc.collect()
    assert all(each() is not None for each in replaced)
    del model
    gc.collect()
    assert all(each() is None for each in replaced)


def test_what_is_sent():
    _, _, program = train()
    ledger = program.ledger
    rows = ledger.total_by("module", "phase", "kind")
    forward = {key[0]: t.count for key, t in rows.items() if key[1] == "forward"}
    assert forward == {"Net.up": 2, "Net.norm": 2, "Net.down": 1}
    # No gradient flows into the batch, so backward needs no weight of `up`.
    again = {
        k[0]: t.count for k, t in rows.items() if k[1:] == ("backward", "all_gather")
    }
    assert again == {"Net.norm": 2, "Net.down": 1}
    scattered = ledger.total(kind="reduce_scatter", phase="backward")
    assert scattered.count == 5
    padded = 12 * 8 + 3 * 12 + 8 * 10  # ten rows on four ranks are three each
    assert scattered.payload_bytes == ledger.total(phase="forward").payload_bytes
    assert scattered.payload_bytes == padded * 4
    scalar = ledger.total(kind="all_reduce")
    assert (scalar.count, scalar.payload_bytes) == (1, 4)


def test_the_ledger_is_what_running_the_graph_sends():
    with fake_mesh(4, ("dp",)) as mesh:
        model = Net()
        mode = DataParallel("fully_shard")
        compiled = compile(parallel_mode=mode, mesh=mesh)(step)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(model, optim, torch.randn(3, 8))
        with CommDebugMode() as seen:
            compiled(model, optim, torch.randn(3, 8))
        by = ("kind", "dtype", "axis", "op")
        assert seen.ledger.total_by(*by) == compiled.programs[0].ledger.total_by(*by)


def test_gathered_values_die_before_backward():
    _, _, program = train()
    phases = gathered(program.graph)
    assert phases == [{Phase.FORWARD}] * 5


def test_gathered_values_stay_when_told_so():
    mode = DataParallel("fully_shard", reshard_after_forward=False)
    _, _, program = train(mode)
    assert {Phase.FORWARD, Phase.BACKWARD} in gathered(program.graph)
    kinds = program.ledger.total_by("kind", "phase")
    assert ("all_gather", "backward") not in kinds


def test_no_gathered_value_lives_from_one_backward_to_the_next():
    def accumulates(model, optim, batch):
        for scale in (1.0, 0.5):
            model(batch * scale).sum().backward()
        optim.step()

    _, _, program = train(model=nn.Linear(8, 8), function=accumulates)
    kinds = program.ledger.total_by("kind", "phase")
    assert kinds["all_gather", "forward"].count == 2 * 2
    assert kinds["reduce_scatter", "backward"].count == 2 * 2


def test_a_look_at_a_parameter_gathers_nothing():
    class Looks(nn.Linear):
        def forward(self, x):
            assert self.weight.mT.shape == (8, 10)
            return x * self.bias.sum()

    _, _, program = train(model=Looks(8, 10))
    assert program.ledger.total(kind="all_gather").count == 1  # the bias


def test_parameters_by_name_inside_of_forward():
    class ByName(nn.Linear):
        def forward(self, x):
            x = x.to(next(self.parameters()).dtype)
            found = dict(self.named_parameters())
            assert all(type(p) is not DTensor for p in found.values())
            doubled = {name: p * 2 for name, p in found.items()}
            return torch.func.functional_call(nn.Linear(8, 10), doubled, x)

    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ByName(8, 10)

        def forward(self, x):
            with torch.no_grad():
                zeros = {n: p * 0 for n, p in self.inner.named_parameters()}
                torch.func.functional_call(self.inner, zeros, x)
            return self.inner(x)

    model, _, program = train(model=Swaps())
    assert model.inner.weight.placements == (Shard(0),)
    assert program.ledger.total(kind="reduce_scatter").count == 2


def test_casts_are_done_again_too():
    def mixed(model, optim, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()

    _, _, program = train(function=mixed)
    graph = program.graph
    assert "bfloat16" in graph.code
    assert gathered(graph) == [{Phase.FORWARD}] * 5


def test_recomputation_shares_the_gathers_of_backward():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    _, _, program = train(model=Checkpointed())
    kinds = program.ledger.total_by("kind", "phase")
    assert kinds["all_gather", "forward"].count == 4
    # The recomputation stops before the last layer's result: its bias is not needed.
    assert kinds["all_gather", "backward"].count == 3
    assert kinds["reduce_scatter", "backward"].count == 4
    assert all(Phase.RECOMPUTE not in p for p in gathered(program.graph))


def test_every_rank_has_the_same_nodes():
    graphs = [train(rank=rank)[2].graph for rank in (0, 3)]
    first, last = ([(n.op, n.target) for n in g.graph.nodes] for g in graphs)
    assert first == last
    for graph in graphs:
        for node in graph.graph.find_nodes(op="call_function", target=GATHER):
            rows = node.args[0].meta["val"].shape[0]
            assert node.meta["val"].shape[0] == 4 * rows


def adversarial_step(generator, critic, optim, other, batch):
    made = generator(torch.randn(len(batch), 4))
    other.zero_grad()
    loss = F.softplus(-critic(batch)).mean() + F.softplus(critic(made.detach())).mean()
    loss.backward()
    other.step()
    optim.zero_grad()
    F.softplus(-critic(made)).mean().backward()
    optim.step()


def sent_by(rank):
    """What a step with a head of one row sends: the last rank has none of it."""
    with fake_mesh(2, ("dp",), rank=rank) as mesh:
        norm, tail = nn.BatchNorm1d(16), nn.Linear(16, 8)
        generator = nn.Sequential(nn.Linear(4, 16), norm, nn.ReLU(), tail)
        critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        optimizers = [torch.optim.Adam(n.parameters()) for n in (generator, critic)]
        step = compile(adversarial_step, parallel="fully_shard", mesh=mesh, shadow=0)
        step(generator, critic, *optimizers, torch.ones(4, 8))
        events = step.programs[0].ledger.events
        step.close()
    return [(each.kind, each.payload_bytes, each.phase, each.module) for each in events]


def test_ranks_whose_shards_differ_choose_alike():
    assert sent_by(0) == sent_by(1)


def test_what_the_user_holds_afterwards():
    model, optim, _ = train(rank=3, optimizer=torch.optim.AdamW)
    parameters = list(model.parameters())
    assert [id(p) for p in optim.param_groups[0]["params"]] == list(map(id, parameters))
    assert list(map(id, optim.state)) == list(map(id, parameters))
    assert all(isinstance(p, DTensor) and p.is_leaf for p in parameters)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in parameters)
    weight = model.up.weight
    assert weight.shape == (10, 8)
    assert weight.placements == (Shard(0),)
    assert weight.to_local().shape == (1, 8)  # three, three, three, one
    moment = optim.state[weight]["exp_avg"]
    assert moment.placements == (Shard(0),)
    assert moment.to_local().shape == (1, 8)
    assert type(optim.state[weight]["step"]) is torch.Tensor
    assert model.scale.placements == (Replicate(),)
    assert type(optim.state[model.scale]["step"]) is torch.Tensor
    assert isinstance(optim.state[model.scale]["exp_avg"], DTensor)


@NEEDS_FILLED_SHARDS
def test_shards_in_shared_memory_are_trained_there():
    def trained(shares):
        torch.manual_seed(0)
        model, batch = Net(), torch.ones(3, 8)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with fake_mesh(4, ("dp",)) as mesh:
            mode = DataParallel("fully_shard", reduce="sum")
            compiled = compile(parallel_mode=mode, mesh=mesh, passes=True)(step)
            compiled(model, optim, batch)
            if shares:
                model.share_memory()
            compiled(model, optim, batch)
            assert len(compiled.programs) == 1
        locals_ = [each.to_local() for each in model.parameters()]
        assert all(each.is_shared() == shares for each in locals_)
        return locals_

    assert all(map(torch.equal, trained(False), trained(True)))


def test_tied_weights_are_one_shard():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model, optim, program = train(model=model)
    assert model[1].weight is model[0].weight
    assert len(optim.param_groups[0]["params"]) == 1
    kinds = program.ledger.total_by("kind", "phase")
    assert {kind: total.count for kind, total in kinds.items()} == {
        ("all_gather", "forward"): 1,
        ("all_gather", "backward"): 1,
        ("reduce_scatter", "backward"): 1,
    }


def test_marks_and_frozen_parameters_stay():
    model = Net()
    model.up.requires_grad_(False)
    model.up.weight.is_special = True
    model, _, program = train(model=model)
    assert model.up.weight.is_special
    assert isinstance(model.up.weight, DTensor) and not model.up.weight.requires_grad
    totals = program.ledger.total_by("module", "kind")
    assert totals["Net.up", "all_gather"].count == 2
    assert ("Net.up", "reduce_scatter") not in totals


def test_shards_are_taken_as_they_are_over_the_same_ranks():
    def forward(model, batch):
        with torch.no_grad():
            return model(batch)

    with fake_mesh(4, ("dp",)) as mesh:
        model = nn.Linear(8, 10)
        for name, parameter in list(model.named_parameters()):
            shards = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            setattr(model, name, nn.Parameter(shards))
        before = list(model.parameters())
        # Without a mesh: all ranks, another name for the same axis.
        evaluate = compile(parallel_mode=DataParallel("fully_shard"))(forward)
        assert evaluate(model, torch.randn(3, 8)).shape == (3, 10)
        after = model.parameters()
        assert all(p is q for p, q in zip(before, after, strict=True))
        kinds = evaluate.programs[0].ledger.total_by("kind", "phase")
        assert {kind: total.count for kind, total in kinds.items()} == {
            ("all_gather", "forward"): 2
        }


def test_less_memory_than_replicas():
    modes = (
        DataParallel("fully_shard"),
        DataParallel("fully_shard", reshard_after_forward=False),
        DataParallel("replicate"),
    )
    resharded, kept, replicated = (
        train(mode, model=deep())[2].peak_memory.total_bytes for mode in modes
    )
    assert resharded < 0.7 * kept
    assert kept < 0.7 * replicated


def deep():
    return nn.Sequential(
        *(nn.Linear(8, 64) if n % 2 == 0 else nn.Linear(64, 8) for n in range(4))
    )


# ----------------------------------------------------------------------------
# Fully sharded micro-batches: reduced in each backward, or once for all of them.


class BatchesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale


def accumulate(model, optim, batches):
    for batch in batches:
        model(batch).square().mean().backward()
    optim.step()
    optim.zero_grad()


def train_batches(function=accumulate, *, shape=(4,), **options):
    with fake_mesh(shape, ("dp", "tp")[: len(shape)]) as mesh:
        model = BatchesNet()
        if len(shape) == 2:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        mode = DataParallel("fully_shard", **options)
        step = compile(parallel_mode=mode, mesh=mesh["dp"])(function)
        step(model, optim, [torch.randn(3, 8) for _ in range(3)])
        return step


def counts(step):
    totals = step.programs[0].ledger.total_by("kind", "phase")
    return {key: total.count for key, total in totals.items()}


def test_each_backward_reduces_by_default():
    found = counts(train_batches())
    assert found["reduce_scatter", "backward"] == 3 * 4
    assert found["all_gather", "forward"] == 3 * 4
    assert found["all_reduce", "backward"] == 1  # nothing is saved by keeping shards


@pytest.mark.parametrize("shape", ((4,), (2, 2)))
def test_one_reduction_for_all(shape):
    step = train_batches(shape=shape, sync_each_backward=False)
    found = counts(step)
    assert found["reduce_scatter", "backward"] == 4
    assert found["all_gather", "forward"] == 3 * 4
    assert "10 reductions of micro-batches joined" in step.explain()


def test_kept_parameters_are_gathered_once():
    found = counts(train_batches(sync_each_backward=False, reshard_after_forward=False))
    assert found == {
        ("all_gather", "forward"): 4,
        ("reduce_scatter", "backward"): 4,
        ("all_reduce", "backward"): 1,
    }


def test_what_is_read_in_between_is_reduced():
    def clips(model, optim, batches):
        for batch in batches:
            model(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()

    found = counts(train_batches(clips, sync_each_backward=False))
    assert found["reduce_scatter", "backward"] == 3 * 4


def test_a_parameter_that_changed_is_gathered_anew():
    def steps(model, optim, batches):
        for batch in batches:
            model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()

    found = counts(
        train_batches(steps, sync_each_backward=False, reshard_after_forward=False)
    )
    assert (
        found["all_gather", "forward"] + found.get(("all_gather", "optimizer"), 0) == 12
    )
    assert found["reduce_scatter", "backward"] == 12


def test_an_option_without_effect():
    with pytest.raises(UsageError, match="reduces micro-batches once by itself"):
        DataParallel("replicate", sync_each_backward=False)


# ----------------------------------------------------------------------------
# Fully sharded: hooks of our own styles pass, hooks on shards run, others are refused.


MODE = DataParallel("fully_shard")


class Linear(nn.Linear):
    """A type without a local form: DTensor runs it."""


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


class HooksNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = Linear(8, 12), Linear(12, 6), Scale()

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
}


def build(mesh):
    model = parallelize_module(HooksNet(), mesh["tp"], PLAN)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_hooks_of_our_styles():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model, optim = build(mesh)
        assert all(p._backward_hooks for p in model.parameters())  # else no test
        compiled = compile(parallel_mode=MODE, mesh=mesh["dp"])(step_hooks)
        compiled(model, optim, torch.randn(4, 8))
    names = {len(p.placements) for p in model.parameters()}
    assert names == {2}
    totals = compiled.programs[0].ledger.total_by("axis", "kind", "phase")
    assert totals["dp", "reduce_scatter", "backward"].count == 5
    # Of the norm's weight, whose gradient is a sum over the tokens of each rank.
    assert totals["tp", "all_reduce", "backward"].count == 1


def test_other_hooks_beside_ours():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model, optim = build(mesh)
        model.up.bias.register_hook(zero)
        before = list(model.parameters())
        with pytest.raises(CaptureError) as caught:
            compile(parallel_mode=MODE, mesh=mesh["dp"])(step_hooks)(
                model, optim, torch.randn(4, 8)
            )
        after = model.parameters()
        assert all(p is q for p, q in zip(before, after, strict=True))
    text = str(caught.value)
    assert text.count("gradient hook") == 1
    assert (
        "Net.up.bias has a gradient hook (zero), which its shard would not have: do that "
        "in the step, after backward"
    ) in text


def zero(gradient):
    return gradient * 0


@NEEDS_FILLED_SHARDS
def test_hooks_on_shards_run():
    with fake_mesh(2, ("dp",)) as mesh:
        model = nn.Linear(4, 4)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(parallel_mode=MODE, mesh=mesh)(step_hooks)
        for _ in range(2):
            compiled(model, optim, torch.randn(3, 4))
        model.weight.register_hook(zero)
        before = [p.to_local().clone() for p in model.parameters()]
        compiled(model, optim, torch.randn(3, 4))
        after = [p.to_local() for p in model.parameters()]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    reason = compiled.programs[-1].reason
    assert "gradient hooks of Linear.weight: absent -> zero" in reason


# ----------------------------------------------------------------------------
# Fully sharded steps that write between two uses, and the states that stay plain.


def forward_step_forward(model, optim, batch):
    before = model(batch).square().mean()
    optim.step()
    optim.zero_grad()
    after = model(batch).square().mean()
    after.backward()
    return before.detach(), after.detach()


@NEEDS_FILLED_SHARDS
@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_weights_are_gathered_again_after_an_update(optimizer, kind):
    torch.manual_seed(0)
    batch, model = torch.randn(4, 4), nn.Linear(4, 4)
    runs = []
    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        compiled = compile(mesh=mesh, parallel_mode=mode)(forward_step_forward)
        for step in (forward_step_forward, compiled):
            ours = copy.deepcopy(model)
            ours(batch).square().mean().backward()
            optim = optimizer(ours.parameters(), lr=0.1, **kind)
            runs.append([step(ours, optim, batch) for _ in range(3)])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    assert runs[0][0][0] != runs[0][0][1]


def test_lists_of_shards_are_gathered_again():
    def step(model, batch):
        before = model(batch).sum()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 2.0)
        return before.detach(), model(batch).sum().detach()

    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        compiled = compile(mesh=mesh, parallel_mode=mode)(step)
        before, after = compiled(nn.Linear(4, 4), torch.randn(4, 4))
    torch.testing.assert_close(after, before * 2)


WRITES = {
    "/=": lambda x: operator.itruediv(x, 2),
    "+=": lambda x: operator.iadd(x, 2),
    "&=": lambda x: operator.iand(x, 2),
    "|=": lambda x: operator.ior(x, 2),
    "^=": lambda x: operator.ixor(x, 2),
    "<<=": lambda x: operator.ilshift(x, 2),
    ">>=": lambda x: operator.irshift(x, 2),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_frozen_weight_is_written_as_a_shard(kind):
    def step(model, batch):
        WRITES[kind](model.kept)
        return model(batch)

    model = nn.Linear(4, 4)
    numbers = torch.arange(4.0) if kind in ("/=", "+=") else torch.arange(4)
    model.kept = nn.Parameter(numbers, requires_grad=False)
    WRITES[kind](wanted := numbers.clone())
    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        compile(mesh=mesh, parallel_mode=mode)(step)(model, torch.randn(3, 4))
        assert torch.equal(model.kept.to_local(), wanted)


@NEEDS_FILLED_SHARDS
@pytest.mark.parametrize("name", ["replicate", "fully_shard"])
def test_an_optimizer_gets_the_gradients_of_the_one_around_it(name):
    def step(model, outer, inner, batch):
        model(batch).sum().backward()
        outer.step()
        outer.zero_grad()

    torch.manual_seed(0)
    batch, eager = torch.randn(4, 4), nn.Linear(4, 4)
    model = copy.deepcopy(eager)
    with fake_mesh(1, ("dp",)) as mesh:
        compiled = compile(mesh=mesh, parallel_mode=DataParallel(name))(step)
        for function, each in ((step, eager), (compiled, model)):
            inner = torch.optim.SGD(each.parameters(), lr=0.1)
            function(each, DoublesGradients(inner), inner, batch)
        got = model.weight
        got = got.to_local() if isinstance(got, DTensor) else got
        assert torch.equal(got, eager.weight)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.linear(x) * self.scale


COUNTERS = {torch.optim.NAdam: {"step", "mu_product"}}
COUNTERS[torch.optim.ASGD] = {"step", "eta", "mu"}


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("optimizer", COUNTERS)
def test_counters_of_a_single_number_stay_plain(optimizer, is_warm):
    batch = torch.randn(3, 4)
    with fake_mesh(2, ("dp",)) as mesh:
        model = Scaled()
        optim = optimizer(model.parameters(), lr=0.1)
        if is_warm:
            train_keeping_gradients(model, optim, batch)
        step = compile(mesh=mesh, parallel_mode=DataParallel("fully_shard"))(
            train_keeping_gradients
        )
        for _ in range(2):
            step(model, optim, batch)
        for parameter in (model.scale, model.linear.weight):
            state = optim.state[parameter]
            plain = {k for k, v in state.items() if not isinstance(v, DTensor)}
            assert plain == COUNTERS[optimizer]


@NEEDS_FILLED_SHARDS
@pytest.mark.parametrize("is_kept", [False, True])
def test_recurrent_layers_and_lists_of_parameters(is_kept):
    def step(model, optim, batch):
        loss = model(batch)[0].square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    batch, model = torch.randn(4, 5, 4), nn.LSTM(4, 4)
    runs = []
    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        for wrap in (lambda step: step, compile(mesh=mesh, parallel_mode=mode)):
            ours = copy.deepcopy(model)
            if is_kept:
                ours.kept = list(ours.parameters())
            optim, compiled = torch.optim.Adam(ours.parameters()), wrap(step)
            runs.append([compiled(ours, optim, batch) for _ in range(3)])
    torch.testing.assert_close(runs[1], runs[0])
    assert all(map(operator.is_, ours._flat_weights, ours.parameters()))


# ----------------------------------------------------------------------------
# Buckets of blocks.


class Stack(nn.Module):
    """Three blocks between two layers of their own."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in "abc")
        )

    def forward(self, x):
        return self.leave(self.blocks(self.enter(x)))


def fused_events(shape=(4,), names=("dp",), size_mb=1e-4, **options):
    passes = [partial(comm_fusion_with_concat, bucket_size_mb=size_mb, **options)]
    passes.append(schedule_comm_wait)
    with fake_mesh(shape, names) as mesh:
        model = Stack()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(step, parallel="fully_shard", passes=passes, mesh=mesh)
        compiled(model, optim, torch.randn(3, 8))
        return compiled.programs[0]


def test_a_block_is_gathered_and_scattered_as_one():
    """Whatever the size of a bucket: its parameters are needed together."""
    events = fused_events(by_block=True).ledger.events
    block = 2 * (64 + 8) * 4
    for kind, phase in (
        ("all_gather", Phase.FORWARD),
        ("reduce_scatter", Phase.BACKWARD),
    ):
        sizes = [e.payload_bytes for e in events if (e.kind, e.phase) == (kind, phase)]
        assert sizes.count(block) == 3
        assert sorted(set(sizes)) == [
            32,
            256,
            block,
        ]  # the others are too large to join


def test_without_blocks_a_bucket_ends_where_it_is_full():
    events = fused_events(size_mb=300 / 2**20).ledger.events
    assert max(event.payload_bytes for event in events) <= 300


def test_a_size_that_was_asked_for_is_a_limit():
    passes = default_passes(bucket_size_mb=300 / 2**20)
    with fake_mesh(4, ("dp",)) as mesh:
        model = Stack()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(step, parallel="fully_shard", passes=passes, mesh=mesh)
        compiled(model, optim, torch.randn(3, 8))
    events = compiled.programs[0].ledger.events
    assert max(event.payload_bytes for event in events) <= 300


def test_what_replicas_hold_is_reduced_in_the_bucket_that_was_scattered():
    """And only when the next one is scattered: nothing waits for the first meanwhile."""
    program = fused_events((2, 2), ("replicate", "shard"), by_block=True)
    starts = [node for node in program.graph.graph.nodes if is_communication(node)]
    kinds = [str(node.target).split(".")[1] for node in starts]
    backward = kinds[kinds.index("reduce_scatter_tensor") :]
    reduced = [kind for kind in backward if not kind.startswith("all_gather")]
    assert reduced.count("all_reduce") == reduced.count("reduce_scatter_tensor")
    position = {node: place for place, node in enumerate(program.graph.graph.nodes)}
    blocks = [
        node
        for node in starts
        if "reduce" in str(node.target) and node.meta["val"].numel() in (144, 72)
    ]
    scatters = [n for n in blocks if "reduce_scatter" in str(n.target)]
    sums = [n for n in blocks if "all_reduce" in str(n.target)]
    assert len(scatters) == len(sums) == 3
    for scatter, total in zip(scatters[:-1], sums[:-1], strict=True):
        between = list(program.graph.graph.nodes)[position[scatter] : position[total]]
        assert any("mm" in str(node.target) for node in between)  # it computes


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_a_sharded_model_is_converted(dtype):
    with fake_mesh(2, ("dp",)):
        model = nn.Linear(4, 4)
        optim = torch.optim.AdamW(model.parameters(), foreach=True)
        compiled = compile(step, parallel="fully_shard", shadow=0)
        for _ in range(2):
            compiled(model, optim, torch.ones(2, 4))
        shards = list(model.parameters())
        model.to(dtype)
        assert all(map(operator.is_, model.parameters(), shards))
        assert model.weight.dtype is dtype
        batch = torch.ones(2, 4, dtype=dtype)
        if dtype is not torch.float32:
            with pytest.raises(
                CaptureError, match="state is of another dtype than its"
            ):
                compiled(model, optim, batch)
            optim = torch.optim.AdamW(model.parameters(), foreach=True)
        assert compiled(model, optim, batch).dtype is dtype


def test_copies_of_a_shard_know_nothing_of_what_it_replaced():
    with fake_mesh(2, ("dp",)):
        model = nn.Linear(4, 4)
        optim = torch.optim.SGD(model.parameters())
        compile(step, parallel="fully_shard", shadow=0)(model, optim, torch.ones(2, 4))
        assert predecessor_id(model.weight)
        copied = copy.deepcopy(model)
        assert (
            isinstance(copied.weight, DTensor) and predecessor_id(copied.weight) is None
        )
        state = vars(model.weight)["_torchspmd_predecessor"]
        assert pickle.loads(pickle.dumps(state)).parameter is None


def test_whole_values_for_shards_are_refused_by_name():
    with fake_mesh(2, ("dp",)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = copy.deepcopy(model.state_dict())
        compile(step, parallel="fully_shard", shadow=0)(model, optim, torch.ones(2, 4))
        for assign in (False, True):
            with pytest.raises(UsageError, match="3 more are whole") as told:
                model.load_state_dict(whole, assign=assign)
        assert "options=StateDictOptions(full_state_dict=True)" in str(told.value)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # of shards
