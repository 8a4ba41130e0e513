"""Hundreds of steps of each mode: nothing is corrupted, and ranks stay equal."""

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import train_detached

from torchspmd import DataParallel, GraphModuleTransformation, _torch, compile
from torchspmd.step.graph.collectives import gather_into_memory, scatter_by_exchange

STEPS = 1000
ops = torch.ops._c10d_functional


def train(mode, overlap):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6))
    )
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    passes = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=overlap
    )

    mode = DataParallel(mode)
    with compile(train_detached, parallel=mode, gm_transformation=passes) as step:
        for _ in range(STEPS):
            loss = step(model, optim, torch.randn(8, 64))
    return loss.item()


@pytest.mark.parametrize(
    ("mode", "overlap"), [("replicate", True), ("fully_shard", False)]
)
def test_hundreds_of_steps(ranks2, mode, overlap):
    losses = ranks2.run(train, mode, overlap)
    assert all(loss < 1.0 for loss in losses)


def gather_twice():
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    shard.meta["val"] = torch.ones(1, 2)
    starts = [
        graph.call_function(ops.all_gather_into_tensor.default, (shard, 2, "0"))
        for _ in "12"
    ]
    for start in starts:
        start.meta["val"] = torch.empty(2, 2)
    graph.output(
        [graph.call_function(ops.wait_tensor.default, (each,)) for each in starts]
    )
    assert gather_into_memory(graph) == 2
    graph.lint()
    left = graph.find_nodes(
        op="call_function", target=ops.all_gather_into_tensor.default
    )
    return len(left), [
        each.tolist() for each in fx.GraphModule({}, graph)(torch.ones(1, 2))
    ]


def test_gathers_on_gloo_are_not_the_coalesced_ones(ranks2):
    """Those corrupt the heap where several are in flight, within some hundred steps."""
    ones = [[1.0, 1.0]] * 2
    assert ranks2.run(gather_twice) == [(0, [ones, ones])] * 2


class Names(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def gather_eagerly():
    with Names() as names:
        found = _torch.gather_now(torch.ones(1, 2), 2, "0")
    gathers = [name for name in names.seen if "all_gather" in name]
    return gathers, found.tolist()


def test_shadow_steps_gather_into_memory_on_gloo(ranks2):
    name = "_c10d_functional.all_gather_into_tensor_out.default"
    assert ranks2.run(gather_eagerly) == [([name], [[1.0, 1.0]] * 2)] * 2


def scatter_in_halves(num_ranks):
    """How many scatters are replaced, and whether a sum has the bits that gloo gives it."""
    torch.manual_seed(dist.get_rank())
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(2 * num_ranks, 3).to(dtype)
        graph = fx.Graph()
        given = graph.placeholder("whole")
        given.meta["val"] = whole
        target = ops.reduce_scatter_tensor.default
        start = graph.call_function(target, (given, "sum", num_ranks, "0"))
        wait = graph.call_function(ops.wait_tensor.default, (start,))
        start.meta["val"] = wait.meta["val"] = whole[:2]
        graph.output([wait])
        (expected,) = fx.GraphModule({}, graph)(whole)
        replaced = scatter_by_exchange(graph)
        graph.lint()
        (sum_of_all,) = fx.GraphModule({}, graph)(whole)
        found.append((replaced, torch.equal(sum_of_all, expected)))
    return found


def test_scatters_of_two_ranks_on_gloo_send_half_and_keep_their_bits(ranks2):
    assert ranks2.run(scatter_in_halves, 2) == [[(1, True)] * 2] * 2


def test_scatters_of_more_ranks_keep_the_order_of_their_sums(ranks4):
    assert ranks4.run(scatter_in_halves, 4) == [[(0, True)] * 2] * 4
