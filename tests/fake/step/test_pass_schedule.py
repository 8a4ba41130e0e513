"""Starts as early and waits as late as dependencies and memory allow."""

import pytest
import torch
from comm_graphs import (
    all_gather,
    all_reduce,
    captured,
    names,
    ops,
    reduce_scatter,
)

from torchspmd.errors import PassWarning, UsageError
from torchspmd.step.graph.collectives import get_all_comm_blocks
from torchspmd.step.graph.memory import live_bytes
from torchspmd.step.graph.reports import ORDERS
from torchspmd.step.passes import comm_fusion_with_concat, schedule_comm_wait
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def mesh():
    with fake_mesh(4, ("dp",)) as mesh:
        yield mesh


def ones(*sizes):
    return [torch.ones(size) for size in sizes]


def compute_order(gm):
    """The nodes that belong to no collective, in order."""
    moving = {node for block in get_all_comm_blocks(gm) for node in block.nodes}
    return [node.name for node in gm.graph.nodes if node not in moving]


def late(x, y):
    """What is sent is there early, its result is read late; both ends can move."""
    sent = x * 2
    other = (y + 1).exp()
    result = all_reduce(sent) / 4
    other = other.cos().sin()
    return [result + other]


def test_it_fires():
    gm = captured(late, *ones(8, 8))
    before = compute_order(gm)
    outcome = schedule_comm_wait(gm).outcome
    assert names(gm, "") == [
        *("mul", "all_reduce", "add", "exp", "cos", "sin", "wait_tensor", "div"),
        "add_1",
    ]
    assert compute_order(gm) == before
    assert outcome.detail == (
        "all_reduce: starts 2 nodes earlier, waits 2 nodes later",
    )
    assert outcome.keeps_bits == ORDERS
    assert (outcome.matched, outcome.changed) == (1, 1)


def test_nothing_to_move():
    gm = captured(lambda x: [all_reduce(x * 2) + 1], *ones(8))
    with pytest.warns(PassWarning, match="schedule_comm_wait changed nothing"):
        schedule_comm_wait(gm)


@pytest.mark.parametrize(
    "send",
    [
        all_reduce,
        lambda x: all_gather(x, 4),
        lambda x: reduce_scatter(x, 4),
        lambda x: ops.wait_tensor(ops.broadcast(x, 0, "0")),
        lambda x: ops.wait_tensor(ops.all_to_all_single(x, [2] * 4, [2] * 4, "0")),
        lambda x: ops.wait_tensor(ops.all_reduce_coalesced([x], "sum", "0")[0]),
    ],
)
def test_all_kinds(send):
    """The original moved all-reduces only."""

    def function(x, y):
        sent = x.sigmoid()
        other = (y + 1).exp()
        result = send(sent)
        return [result.sum() + other.cos()]

    gm = captured(function, *ones(8, 8))
    schedule_comm_wait(gm)
    order = names(gm, "")
    (block,) = get_all_comm_blocks(gm)
    assert order.index(block.start.name) == 1
    assert order.index(block.wait.name) + 1 == order.index("sum_1")


def test_packing_and_unpacking_travel_along():
    def function(x, y, z):
        a, b = x * 2, y * 2
        other = (z + 1).exp()
        first, second = all_reduce(torch.cat([a, b])).split(8)
        return [first + other.cos(), second + 1]

    gm = captured(function, *ones(8, 8, 8))
    schedule_comm_wait(gm)
    order = names(gm, "")
    assert order[:4] == ["mul", "mul_1", "cat", "all_reduce"]
    assert order.index("wait_tensor") > order.index("cos")


def test_a_head_that_others_read_stays():
    def function(x, y):
        halves = x * 2
        other = (y + 1).exp()
        packed = torch.cat([halves, halves])
        return [all_reduce(packed) + 1, packed + other.sum()]

    gm = captured(function, *ones(8, 8))
    with pytest.warns(PassWarning):
        schedule_comm_wait(gm)
    assert names(gm, "exp", "cat") == ["exp", "cat"]


def test_starts_on_one_group_keep_their_order(mesh):
    other = torch.distributed.new_group([0, 1]).group_name

    def function(x, y, z):
        late = (x + 1).exp()
        results = [all_reduce(late), all_reduce(y * 1), all_reduce(z * 1, "sum", other)]
        return [sum(results)]

    gm = captured(function, *ones(8, 8, 8))
    schedule_comm_wait(gm)
    # The last one is there first, and has a group of its own.
    assert [block.start.name for block in get_all_comm_blocks(gm)] == [
        *("all_reduce_2", "all_reduce", "all_reduce_1")
    ]


def test_a_result_that_feeds_a_collective():
    def function(x, y):
        first = all_reduce(x * 2)
        other = y.exp()
        second = all_reduce(first * first)
        return [second + other.cos().sin(), first + 1]

    gm = captured(function, *ones(8, 8))
    schedule_comm_wait(gm)
    order = names(gm, "")
    assert order.index("mul_1") == order.index("wait_tensor") + 1
    assert order.index("all_reduce_1") == order.index("mul_1") + 1
    assert order.index("wait_tensor_1") > order.index("sin")


def test_a_result_that_nobody_reads():
    """The original failed on it with an assertion."""

    def function(x, y):
        all_reduce(x)
        return [y.exp().cos()]

    gm = captured(function, *ones(8, 8))
    schedule_comm_wait(gm)
    assert names(gm, "")[-1] == "wait_tensor"


def test_a_tail_with_its_own_late_number_stays_behind_it():
    def function(x, y):
        result = all_reduce(x)
        early = result + 1
        number = y.exp().sum()
        return [early, result * number]

    gm = captured(function, *ones(8, 8))
    with pytest.warns(PassWarning):
        schedule_comm_wait(gm)
    gm.graph.lint()


def test_gathers_of_inputs_do_not_all_start_at_once():
    def function(x, first, second):
        x = x * all_gather(first, 4)
        return [x.exp() * all_gather(second, 4)]

    gm = captured(function, *ones(8, 2, 2))
    with pytest.warns(
        PassWarning, match="and 1 more: they gather inputs and could all"
    ):
        schedule_comm_wait(gm)
    schedule_comm_wait(gm, memory_budget_mb=1)
    assert names(gm, "all_gather", "mul")[:2] == [
        *("all_gather_into_tensor", "all_gather_into_tensor_1")
    ]


def gathers(x, *shards):
    for shard in shards:
        x = (x * all_gather(shard, 4)).exp()
    return [x]


def test_the_memory_budget_holds():
    tensors = ones(4096, *[1024] * 6)
    peaks, starts = [], []
    for budget in (0, 16 / 1024, 32 / 1024):
        gm = captured(gathers, *tensors)
        before = max(live_bytes(gm).values())
        outcome = schedule_comm_wait(gm, memory_budget_mb=budget).outcome
        after = max(live_bytes(gm).values())
        assert after <= before + budget * 2**20
        peaks.append(after - before)
        starts.append(names(gm, "all_gather", "mul").index("mul"))
        held = [line for line in outcome.refused if "memory budget" in line]
        assert held, outcome
    assert peaks == sorted(peaks) and peaks[0] == 0 < peaks[-1]
    assert starts == sorted(starts) and starts[0] < starts[-1]


def test_the_budget_also_bounds_late_waits():
    def function(x):
        sent = x * 2  # held by the reduce-scatter until its wait
        result = reduce_scatter(sent, 4)
        big = x.exp()
        bigger = torch.cat([big, big, big])
        return [bigger.sum() + result]

    tensors = ones(4096)
    gm = captured(function, *tensors)
    outcome = schedule_comm_wait(gm, memory_budget_mb=0).outcome
    order = names(gm, "")
    assert order.index("exp") < order.index("wait_tensor") < order.index("cat")
    assert outcome.refused == (
        "reduce_scatter_tensor: is not waited for before add, but earlier: the memory "
        "budget is used up",
    )
    free = captured(function, *tensors)
    schedule_comm_wait(free)
    assert names(free, "wait", "sum") == ["sum_1", "wait_tensor"]


def test_refusals():
    gm = captured(lambda x: [all_reduce(x * 2) + 1, x.add_(1)], *ones(8))
    with pytest.warns(PassWarning, match="writes in place: schedule before new"):
        schedule_comm_wait(gm)
    with pytest.raises(UsageError, match=r"memory_budget_mb=-1\): use 0 or more"):
        schedule_comm_wait(captured(late, *ones(8, 8)), memory_budget_mb=-1)


def test_after_fusion():
    def function(x, y, z):
        first = all_reduce(x * 2) / 4
        second = all_reduce(y * 2) / 4
        other = z.exp().cos()
        return [first + 1, second + other]

    gm = captured(function, *ones(8, 8, 8))
    comm_fusion_with_concat(gm, 1)
    schedule_comm_wait(gm)
    order = names(gm, "")
    assert order.index("wait_tensor_default") > order.index("cos")
