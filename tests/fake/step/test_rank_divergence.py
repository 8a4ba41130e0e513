"""Values that differ between ranks must not reach what every rank holds alike."""

import pytest
import torch
from step_models import Heads
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_tp
from torch.fx.experimental.proxy_tensor import make_fx

import torchspmd
from torchspmd.errors import CaptureError
from torchspmd.parallel import (
    ColwiseParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.step import DataParallel, compile
from torchspmd.step.capture.rank_divergence import Sink, find_divergent
from torchspmd.step.graph.metadata import output_node, output_values
from torchspmd.testing import fake_mesh

OPS = torch.ops._c10d_functional
MODES = ("replicate", "fully_shard")


def written(own, same, groups):
    same.copy_(own)
    return same


def written_by_name(own, same, groups):
    torch.add(own, 1, out=same)
    return same


def read_before_the_write(own, same, groups):
    made = same + 1
    same.copy_(own)
    return made


def equal_memory_written_over(own, same, groups):
    view = own.view(-1)
    return torch.add(view, 1).copy_(OPS.all_reduce(own, "sum", groups["tp"]))


# What a step makes of a value that one rank has alone, and of one that all have: whether
# the result differs along tp.
FLOWS = {
    "computed": (lambda own, same, groups: own * 2 + same, True),
    "equal": (lambda own, same, groups: same * 2, False),
    "form": (lambda own, same, groups: torch.ones_like(own), False),
    "view": (lambda own, same, groups: own.view(2, 2).t(), True),
    "written": (written, True),
    "written by name": (written_by_name, True),
    "read before the write": (read_before_the_write, False),
    "memory of a value": (equal_memory_written_over, True),  # sooner too much than less
    "sum": (lambda own, same, g: OPS.all_reduce(own, "sum", g["tp"]), False),
    "sum over another axis": (
        lambda own, same, g: OPS.all_reduce(own, "sum", g["dp"]),
        True,
    ),
    "sum over the world": (
        lambda own, same, g: OPS.all_reduce(own, "sum", g["world"]),
        False,
    ),
    "gathered": (
        lambda own, same, g: OPS.all_gather_into_tensor(own, 2, g["tp"]),
        False,
    ),
    "scattered": (
        lambda own, same, g: OPS.reduce_scatter_tensor(own, "sum", 2, g["tp"]),
        True,
    ),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_flows(flow):
    function, differs = FLOWS[flow]
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        groups = {name: mesh.get_group(name).group_name for name in ("dp", "tp")}
        groups["world"] = torch.distributed.group.WORLD.group_name

        def step(own, same):
            return [function(own, same, groups)]

        graph = make_fx(step)(torch.ones(4), torch.ones(4)).graph
        (value,) = output_values(graph)
        own = graph.find_nodes(op="placeholder")[0]
        sink = Sink(output_node(graph), value, "result")
        found = find_divergent(graph, frozenset({0, 1}), {own}, [sink])
    assert found == (["result"] if differs else [])


class Tokens(nn.Module):
    """A norm behind the row-wise layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(8, 12),
            nn.Linear(12, 6),
            nn.LayerNorm(6),
        )

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def ours(model, axis):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, axis, plan)


def sequence_without_norm(model, axis):
    # torch's styles: the plan of ours is refused before anything is laid out.
    plan = {
        "up": torch_tp.ColwiseParallel(input_layouts=Shard(1)),
        "down": torch_tp.RowwiseParallel(output_layouts=Shard(1)),
    }
    return torch_tp.parallelize_module(model, axis, plan)


def sequence(model, axis):
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    return parallelize_module(model, axis, plan)


def replicated(model, axis):
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "norm": ReplicateParallel(),
    }
    return parallelize_module(model, axis, plan)


def step(model, optim, batch):
    model(batch).square().mean().backward()
    torchspmd.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()


LAYOUTS = [
    (Heads, ours, ["Heads.norm.weight"]),
    (Tokens, sequence_without_norm, ["Tokens.norm.weight", "Tokens.norm.bias"]),
    (Tokens, ours, []),
    (Tokens, sequence, []),
    (Tokens, replicated, []),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "lay_out", "names"), LAYOUTS)
def test_gradients_along_other_axes(kind, lay_out, names, mode):
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = lay_out(kind(), mesh["tp"])
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(parallel_mode=DataParallel(mode), mesh=mesh["dp"])(step)
        batch = torch.randn(3, 4, 8)
        if not names:
            compiled(model, optim, batch)
            return
        with pytest.raises(CaptureError) as caught:
            compiled(model, optim, batch)
    text = str(caught.value)
    assert "parameters that an axis replicates would get other gradients" in text
    lines = [line for line in text.splitlines() if "  * " in line]
    told = (
        ": along tp every rank has a gradient of its own part of the activations, and"
    )
    assert sorted(line.partition(told)[0][4:] for line in lines) == sorted(names)
    assert "SequenceParallel() for a norm" in text and "Nothing was changed" in text


def by_a_hook(model, group):
    model.norm.weight.register_hook(lambda g: OPS.wait_tensor(sum_over(g, group)))
    return step


def by_the_step(model, group):
    def reduces(model, optim, batch):
        model(batch).square().mean().backward()
        model.norm.weight.grad = OPS.wait_tensor(
            sum_over(model.norm.weight.grad, group)
        )
        optim.step()

    return reduces


def by_nobody(model, group):
    def norms(model, optim, batch):
        model(batch).square().mean().backward()
        squares = model.norm.weight.grad.square().sum()
        model.norm.weight.grad /= OPS.wait_tensor(sum_over(squares, group)).sqrt()
        optim.step()

    return norms


def sum_over(value, group):
    return OPS.all_reduce(value, "sum", group)


@pytest.mark.parametrize("reducing", [by_a_hook, by_the_step, by_nobody])
def test_gradients_that_users_reduce_themselves(reducing):
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = ours(Heads(), mesh["tp"])
        function = reducing(model, mesh["tp"].get_group().group_name)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        mode = DataParallel("replicate")
        compiled = compile(parallel_mode=mode, mesh=mesh["dp"])(function)
        if reducing is by_nobody:
            with pytest.raises(CaptureError, match="would get other gradients"):
                compiled(model, optim, torch.randn(3, 4, 8))
        else:
            compiled(model, optim, torch.randn(3, 4, 8))
            assert compiled.programs[0].ledger.total(axis="tp").count > 0
