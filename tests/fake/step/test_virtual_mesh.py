"""Virtual ranks for meshes: axes from groups, and the numbers of captured steps."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import Replicate

from torchspmd.errors import VirtualRanksError
from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.step import DataParallel, compile, run_virtual
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.virtual.ranks import lay_out
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake

c10d = torch.ops._c10d_functional


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


def train_step(model, optim, tokens, target):
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
        step = compile(mesh=mesh["dp"], parallel_mode=mode)(train_step)
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
    expected = train_step(reference, optim, *batch)
    run = run_virtual(list(graphs), sizes, inputs=lambda step, rank: inputs[rank])
    for values in run.outputs[0]:
        assert torch.allclose(values[-1], expected, atol=1e-6)
    rows = [values[0] for values in run.inputs]
    assert torch.allclose(torch.cat(rows), reference.embed.weight, atol=1e-6)
    wrong = run_virtual(graphs[0], sizes, inputs=lambda step, rank: inputs[rank])
    assert not torch.allclose(wrong.outputs[0][0][-1], expected, atol=1e-3)
