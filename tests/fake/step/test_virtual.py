"""``compile(verify=True)``: the passes of a captured step, run on virtual ranks."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import Replicate
from training import train

from torchspmd.errors import (
    LegalityError,
    PassWarning,
    VerificationError,
    VirtualRanksError,
)
from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.step import (
    CostModel,
    DataParallel,
    GraphModuleTransformation,
    Verification,
    compile,
    graph_optimization_pass,
    run_virtual,
)
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.deferral.forms import derive
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.passes import comm_fusion_with_concat
from torchspmd.step.virtual import run as pipelined
from torchspmd.step.virtual.ranks import lay_out
from torchspmd.testing import fake_mesh

c10d = torch.ops._c10d_functional
ADAMW = torch.ops.aten._fused_adamw.tensor_lr


def compiled(transformation=None, *, ranks=4, steps=1, verify=True, mode="replicate"):
    """A step on a mesh of any size, run so often."""
    with fake_mesh(ranks, ("dp",)) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 3))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step = compile(
            mesh=mesh,
            parallel_mode=DataParallel(mode),
            gm_transformation=transformation,
            verify=verify,
        )(train)
        for _ in range(steps):
            step(model, optim, torch.randn(4, 5))
        step.flush()
        return step


def fused(layout):
    return functools.partial(comm_fusion_with_concat, bucket_size_mb=1, layout=layout)


def orders(step, what):
    return [c.order for c in step.programs[-1].certificate.checks if c.what == what]


def test_the_default_passes_and_the_next_iteration():
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    step = compiled(transformation, steps=2)
    certificate = step.programs[-1].certificate
    names = [report.name for report in certificate.passes]
    assert "comm_fusion_with_concat" in names and "schedule_comm_wait" in names
    assert orders(step, "pass comm_fusion_with_concat") == ["rank"]
    assert orders(step, "pass schedule_comm_wait") == ["rank", "ring", "tree"]
    assert orders(step, "the form that writes in place") == ["rank"]
    moved = "work moved to the next iteration (regions: 1)"
    for what in (moved, f"{moved}, first and steady form in place"):
        assert orders(step, what) == ["rank"]
    assert {check.result for check in certificate.checks} == {"equal bits"}
    text = " ".join(str(certificate).split())
    assert "the captured graph was not compared with the eager step" in text
    assert "every virtual rank ran the graph of this rank" in text
    left = (
        "neither the last form nor the flush of an overlapped step was compared as it"
    )
    assert f"{left} writes in place" in text


def test_an_update_that_is_made_otherwise_a_step_later(monkeypatch):
    def careless(graph, regions):
        forms = derive(graph, regions)
        (optimizer,) = forms.steady.graph.find_nodes(op="call_function", target=ADAMW)
        optimizer.update_kwarg("weight_decay", 0.5)
        return forms

    monkeypatch.setattr(pipelined, "derive", careless)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    with pytest.raises(VerificationError) as caught:
        compiled(transformation, steps=2)
    text = str(caught.value)
    assert (
        "program 0: work moved to the next iteration (regions: 1) changed what 4 "
        in text
    )
    assert "arg0_1 (Sequential.0.weight)" in text


def test_a_rank_major_bucket_keeps_bits_in_a_ring():
    transformation = GraphModuleTransformation(passes=[fused("rank_major")])
    for ranks in (4, 6):
        step = compiled(transformation, ranks=ranks)
        assert orders(step, "pass comm_fusion_with_concat") == ["rank", "ring"]
        (ring,) = [c for c in step.programs[0].certificate.checks if c.order == "ring"]
        assert ring.ranks == f"{ranks} virtual ranks (dp={ranks})"


@graph_optimization_pass(prerequisites=[], apply_after=[])
def overclaiming(gm):
    """A plain bucket that says it keeps bits in a ring."""
    said = comm_fusion_with_concat.__wrapped__(gm, 1, layout="plain")
    return replace(said, keeps_bits=("rank", "ring"))


def test_a_plain_bucket_does_not():
    with pytest.raises(VerificationError) as caught:
        compiled(GraphModuleTransformation(passes=[overclaiming]))
    text = str(caught.value)
    assert "train, program 0: pass overclaiming changed what" in text
    assert "4 virtual ranks (dp=4), reduction order ring" in text
    assert "computed from nodes that were added: reshape_default" in text
    assert "overclaiming claims to keep bits under rank, ring; not under tree" in text


def test_a_mesh_of_two_cannot_show_a_ring():
    step = compiled(GraphModuleTransformation(passes=[overclaiming]), ranks=2)
    text = " ".join(str(step.programs[0].certificate).split())
    assert "ring order was run on 2 ranks along dp" in text
    assert "do not show every order" in text


def drop_wait(gm):
    """Uses a gradient that may not have arrived."""
    wait = gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[1]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    gm.recompile()
    return gm


def test_a_wait_lost_outside_of_the_passes():
    with pytest.raises(LegalityError) as caught:
        compiled(drop_wait)
    text = str(caught.value)
    assert text.startswith("compile(gm_transformation=drop_wait) would change what the")
    assert "wait: nothing waits for all_reduce_1" in text


def change_decay(gm):
    (optimizer,) = gm.graph.find_nodes(op="call_function", target=ADAMW)
    optimizer.update_kwarg("weight_decay", 0.5)
    gm.recompile()
    return IterGraphModule(gm)


def test_a_number_changed_outside_of_the_passes():
    with pytest.raises(LegalityError) as caught:
        compiled(change_decay)
    text = str(caught.value)
    assert text.startswith("compile(gm_transformation=change_decay) would change what")
    assert "arg0_1 (Sequential.0.weight)): another number or option" in text


def sine(gm):
    """Another function, of which legality cannot tell that it is wrong."""
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.tanh.default
    ):
        node.target = torch.ops.aten.sin.default
    return gm


def test_an_edit_outside_of_the_passes_that_is_not_proved_is_run():
    with pytest.raises(VerificationError) as caught:
        compiled(sine)
    text = str(caught.value)
    assert "pass sine changed what the step computes" in text
    assert "first node that differs: " in text


def test_fully_sharded_parameters():
    step = compiled(mode="fully_shard", steps=2)
    (check,) = step.programs[-1].certificate.checks
    assert check.ranks == "4 virtual ranks (dp=4)"
    assert check.vacuous == ()


def test_large_worlds_are_bounded():
    step = compiled(
        GraphModuleTransformation(passes=[fused("rank_major")]),
        ranks=64,
        verify=Verification(max_ranks=16),
    )
    assert orders(step, "pass comm_fusion_with_concat") == ["rank"]
    text = " ".join(str(step.programs[0].certificate).split())
    assert "ring order: 64 virtual ranks (dp=64) are more than 16" in text


def test_large_models_are_bounded():
    with pytest.warns(PassWarning, match="graphs are not compared"):
        step = compiled(verify=Verification(limit_bytes=1000))
    certificate = step.programs[0].certificate
    assert not certificate.is_verified
    assert certificate.not_checked[0].startswith("graphs were not compared: inputs and")


# ----------------------------------------------------------------------------
# A pass that ties a graph to a number of ranks, which virtual ranks then must have.


def train_step(model, optim, tokens):
    model(tokens).square().sum().backward()
    optim.step()
    optim.zero_grad()


def certificate(max_ranks):
    """Of a step whose captured graph runs on any number of ranks, but not what runs."""
    passes = GraphModuleTransformation(
        enable_graph_optimization=True,
        gather_embeddings=True,
        cost=CostModel(network_bytes=1e6, latency_seconds=1e-6),
    )
    model = nn.Embedding(200, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_mesh(8, ("dp",)):
        run = compile(
            gm_transformation=passes,
            parallel_mode=DataParallel("replicate"),
            verify=Verification(max_ranks=max_ranks),
        )(train_step)
        run(model, optim, torch.ones(2, 3, dtype=torch.long))
    return str(run.programs[-1].certificate)


def test_it_is_run_on_as_many_ranks_as_it_is_made_for():
    text = " ".join(certificate(8).split())
    assert "pass gather_embedding_gradients" in text
    assert "8 virtual ranks" in text
    assert "graphs were not compared" not in text


def test_more_ranks_than_may_be_run_are_said_to_be_unchecked():
    with pytest.warns(PassWarning, match="graphs are not compared. .*8"):
        text = certificate(4)
    assert "graphs were not compared" in text


# ----------------------------------------------------------------------------
# Virtual ranks for meshes: axes from groups, and the numbers of captured steps.


def graph_over(*groups, gather=()):
    """A graph with one all-reduce, or one all-gather, over each group."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for group in groups:
        name = group.group_name
        start = graph.call_function(c10d.all_reduce.default, (value, "sum", name))
        value = graph.call_function(c10d.wait_tensor.default, (start,))
    for group in gather:
        options = (value, group.size(), group.group_name)
        start = graph.call_function(c10d.all_gather_into_tensor.default, options)
        value = graph.call_function(c10d.wait_tensor.default, (start,))
    graph.output([value])
    return graph


@pytest.mark.parametrize("rank", [0, 7])
def test_axes_of_a_mesh(rank):
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp"), rank=rank) as mesh:
        dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
        layout = lay_out(graph_over(tp, dp), 3)
        assert str(layout) == "9 virtual ranks (dp=3, tp=3)"
        assert layout.teams(tp.group_name) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert layout.teams(dp.group_name) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
        layout = lay_out(graph_over(dp, gather=[tp]), {"dp": 5})
        assert str(layout) == "10 virtual ranks (dp=5, tp=2)"
        assert [axis.is_fixed for axis in layout.axes] == [False, True]
        assert [axis.real_size for axis in layout.axes] == [2, 2]


def test_a_group_of_several_axes():
    with fake_mesh((2, 3), ("dp", "tp")) as mesh:
        world, tp = dist.group.WORLD, mesh["tp"].get_group()
        layout = lay_out(graph_over(world, tp), 2)
        assert str(layout) == "4 virtual ranks (rest of ranks 0-5=2, tp=2)"
        assert layout.teams(world.group_name) == [[0, 1, 2, 3]]
        dp = mesh["dp"].get_group()
        layout = lay_out(graph_over(world, tp, dp), 2)
        assert str(layout) == "4 virtual ranks (dp=2, tp=2)"
        layout = lay_out(graph_over(tp, dp, gather=[world]), 4)
        assert layout.size == 6  # the gather fixes both axes


def test_groups_that_are_no_grid():
    with fake_mesh(6, ("dp",)):
        one, other = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 4])
        with pytest.raises(VirtualRanksError, match="which is no grid of axes"):
            lay_out(graph_over(one, other))


def test_two_axes_add_up_to_all_ranks():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        graph = graph_over(mesh["dp"].get_group(), mesh["tp"].get_group())
        run = run_virtual(
            graph, 2, inputs=lambda step, rank: [torch.tensor(10.0**rank)]
        )
    assert [value.item() for (value,) in run.outputs[0]] == [1111.0] * 4


class Vocabulary(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 10)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.embed(tokens))))


def train_step_mesh(model, optim, tokens, target):
    loss = F.cross_entropy(model(tokens), target)
    loss.backward()
    optim.step()
    return loss


def captured(rank, batch):
    """One rank's program of a tensor-parallel step, its inputs and its axes' sizes."""
    with fake_mesh((1, 2), ("dp", "tp"), rank=rank) as mesh:
        model = Vocabulary()
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        inventory = take_inventory((model, optim, *batch), {}, lift_numbers=True)
        flat = [
            value.detach().clone() if isinstance(value, torch.Tensor) else value
            for value in inventory.flat_inputs()
        ]
        mode = DataParallel("replicate", reduce="sum")
        step = compile(mesh=mesh["dp"], parallel_mode=mode)(train_step_mesh)
        step(model, optim, *batch)
        # Outside of the fake world nobody knows its axes: they go by their groups.
        sizes = {
            f"group {mesh[axis].get_group().group_name}": mesh[axis].size()
            for axis in ("dp", "tp")
        }
        return step.programs[0].graph, flat, sizes


def test_rank_dependent_constants_need_the_graph_of_each_rank():
    torch.manual_seed(1)
    batch = torch.randint(10, (7,)), torch.randint(10, (7,))
    found = [captured(rank, batch) for rank in range(2)]
    graphs, inputs, (sizes, _) = zip(*found, strict=True)
    reference = Vocabulary()
    optim = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = train_step_mesh(reference, optim, *batch)
    run = run_virtual(list(graphs), sizes, inputs=lambda step, rank: inputs[rank])
    for values in run.outputs[0]:
        assert torch.allclose(values[-1], expected, atol=1e-6)
    rows = [values[0] for values in run.inputs]
    assert torch.allclose(torch.cat(rows), reference.embed.weight, atol=1e-6)
    wrong = run_virtual(graphs[0], sizes, inputs=lambda step, rank: inputs[rank])
    assert not torch.allclose(wrong.outputs[0][0][-1], expected, atol=1e-3)
