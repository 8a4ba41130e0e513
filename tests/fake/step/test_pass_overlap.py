"""Starts as early and waits as late as dependencies and memory allow."""

import pytest
import torch
from comm_graphs import all_gather, all_reduce, captured, names, ops, reduce_scatter
from torch import nn
from training import train_silently

from torchspmd.comm import Phase
from torchspmd.errors import PassWarning, UsageError
from torchspmd.step import DataParallel, compile
from torchspmd.step.graph.collectives import get_all_comm_blocks
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.memory import LiveBytes
from torchspmd.step.graph.metadata import META_KEY, Owner
from torchspmd.step.graph.reports import ORDERS
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    dedupe_collectives,
    prefetch_gathers,
    remove_dead_code,
    schedule_comm_wait,
)
from torchspmd.step.passes.overlap import Transfer, plan_transfers, simulate_transfers
from torchspmd.testing import fake_mesh


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
        before = max(LiveBytes(gm.graph).now().values())
        outcome = schedule_comm_wait(gm, memory_budget_mb=budget).outcome
        after = max(LiveBytes(gm.graph).now().values())
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


# ----------------------------------------------------------------------------
# Gathers of parameters that start before an earlier layer computes.


def layers(x, *shards):
    """Each layer gathers a weight and a bias, and computes with them."""
    for pair in zip(shards[::2], shards[1::2], strict=True):
        weight, bias = [all_gather(each, 4) for each in pair]
        x = torch.addcmul(bias, x, weight)
    return [x]


def four_layers():
    return captured(layers, *[torch.ones(size) for size in (4096, *[1024] * 8)])


def stages(gm):
    """The starts and the layers, in order: G for a gather, L for a layer."""
    return "".join(
        "G" if "gather" in n else "L" for n in names(gm, "gather", "addcmul")
    )


@pytest.mark.parametrize(
    ("distance", "expected"),
    [(1, "GGGGLGGLGGLL"), (2, "GGGGGGLGGLLL"), (9, "GGGGGGGGLLLL")],
)
def test_prefetch_fires(distance, expected):
    gm = four_layers()
    assert stages(gm) == "GGLGGLGGLGGL"
    outcome = prefetch_gathers(gm, distance).outcome
    assert stages(gm) == expected
    assert (outcome.matched, outcome.changed) == (8, 6)
    assert outcome.detail[0] == "all_gather_into_tensor_2: starts before addcmul"
    with pytest.warns(PassWarning, match="prefetch_gathers changed nothing"):
        prefetch_gathers(gm, distance)


TRANSFERS = {  # gathers (seconds, needed), others (start, seconds) -> starts, step
    "just in time": ([(1, 4), (1, 5)], [], [3, 4], 5),
    "one behind the other": ([(2, 5), (2, 5)], [], [1, 3], 5),
    "the first cannot hide": ([(2, 0), (1, 5)], [], [0, 4], 7),
    "before what would be in its way": ([(1, 6)], [(4, 3)], [3], 10),
    "with those before it": ([(1, 5), (1, 6)], [(4, 3)], [2, 2], 10),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_gathers_start_as_late_as_nothing_waits_for_them(name):
    gathers, others, starts, seconds = TRANSFERS[name]
    planned = plan_transfers(
        [Transfer(needed, length, needed) for length, needed in gathers],
        [Transfer(start, length, 10) for start, length in others],
    )
    assert [each.start for each in planned] == starts
    assert simulate_transfers(planned, [Transfer(*o, 10) for o in others])[0] == seconds


@pytest.mark.parametrize(
    ("network", "expected"), [(1e12, "GGGGLGGLGGLL"), (1e6, "GGGGGGGGLLLL")]
)
def test_prefetch_by_cost(network, expected):
    gm = four_layers()
    cost = CostModel(network_bytes=network, latency_seconds=0.0)
    prefetch_gathers(gm, cost=cost)
    assert stages(gm) == expected


def test_it_leaves_other_collectives_alone():
    def function(x, shard):
        return [all_gather(x.exp(), 4) + reduce_scatter(shard, 4).sum()]

    gm = captured(function, torch.ones(8), torch.ones(8))
    with pytest.warns(PassWarning, match="it found nothing to work on"):
        prefetch_gathers(gm)


def test_parameters_overtake_gradients():
    """In backward the next layer's gather stands behind this layer's reduce-scatter."""

    def function(x, first, second):
        x = x * all_gather(first, 4)
        gradient = reduce_scatter(x.exp(), 4)
        return [x.exp() * all_gather(second, 4), gradient]

    gm = captured(function, torch.ones(8), torch.ones(2), torch.ones(2))
    prefetch_gathers(gm)
    assert names(gm, "gather", "scatter") == [
        *("all_gather_into_tensor", "all_gather_into_tensor_1"),
        "reduce_scatter_tensor",
    ]


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_bytes_in_flight_are_bounded(limit):
    size = 4096 * 4  # bytes of one gathered tensor
    gm = four_layers()
    outcome = prefetch_gathers(gm, 9, in_flight_mb=limit * size / 2**20).outcome
    assert _most_in_flight(gm) == limit * size
    assert f"{16 * (limit + 1)}.0 KiB would be on their way" in outcome.refused[0]


def _most_in_flight(gm):
    blocks = get_all_comm_blocks(gm)
    return max(
        sum(
            b.event.payload_bytes
            for b in blocks
            if not node < b.start and node < b.wait
        )
        for node in gm.graph.nodes
    )


def test_the_memory_budget_of_prefetch_holds():
    gm = four_layers()
    before = max(LiveBytes(gm.graph).now().values())
    budget = 4096 * 4 / 2**20
    outcome = prefetch_gathers(gm, 9, memory_budget_mb=budget).outcome
    after = max(LiveBytes(gm.graph).now().values())
    assert before < after <= before + budget * 2**20
    assert any("the memory budget is used up" in line for line in outcome.refused)


def test_refusals_of_prefetch():
    gm = four_layers()
    with pytest.raises(UsageError) as caught:
        prefetch_gathers(gm, 0, in_flight_mb=0)
    assert str(caught.value) == (
        "prefetch_gathers: distance=0: a gather starts 1 or more layers ahead, a "
        "whole number; in_flight_mb=0: use more than 0, a finite number of MiB, or None."
    )
    with pytest.raises(UsageError, match="both say when gathers start"):
        prefetch_gathers(gm, 2, cost=CostModel())
    writing = captured(lambda x: [all_gather(x, 4) + 1, x.add_(1)], torch.ones(8))
    with pytest.warns(PassWarning, match="writes in place: prefetch before new"):
        prefetch_gathers(writing)


def test_a_fully_sharded_step(mesh):
    outcomes, orders = [], []

    def transformation(gm):
        orders.append(names(gm, "gather", "mm"))
        outcomes.append(prefetch_gathers(gm).outcome)
        orders.append(names(gm, "gather", "mm"))
        return gm

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = DataParallel("fully_shard")
    compiled = compile(parallel_mode=mode, mesh=mesh, gm_transformation=transformation)
    compiled(train_silently)(model, optim, torch.randn(3, 8))
    # All but the first layer's weight and bias; in backward the weights of two layers.
    assert outcomes[0].matched == 8 and outcomes[0].changed == 6
    before, after = orders
    assert sorted(before) == sorted(after) and before != after
    assert after.index("all_gather_into_tensor_2") < after.index("addmm")


# ----------------------------------------------------------------------------
# Equal collectives sent once; results that nobody reads not sent at all.


def test_equal_collectives_become_one():
    def function(x):
        return [all_gather(x, 4) + 1, all_gather(x, 4) + 2, all_gather(x, 4) + 3]

    gm = captured(function, *ones(8))
    outcome = dedupe_collectives(gm).outcome
    assert names(gm, "gather", "wait") == ["all_gather_into_tensor", "wait_tensor"]
    assert (outcome.matched, outcome.changed) == (2, 2)
    assert outcome.keeps_bits == ORDERS
    assert outcome.detail[0] == (
        "all_gather_into_tensor_1 is all_gather_into_tensor: 128 B saved"
    )


def test_equal_views_of_one_value_are_equal():
    def function(x):
        one = all_reduce(torch.cat([x.view(-1), x.view(-1)]))
        return [one, all_reduce(torch.cat([x.view(-1), x.view(-1)])) + 1]

    gm = captured(function, *ones((2, 4)))
    assert dedupe_collectives(gm).outcome.changed == 1
    assert names(gm, "cat") == ["cat"]


@pytest.mark.parametrize(("keep_mb", "changed"), [(127 / 2**20, 0), (128 / 2**20, 1)])
@pytest.mark.filterwarnings("ignore:dedupe_collectives changed nothing")
def test_a_little_may_be_kept_between_phases(keep_mb, changed):
    outcome = dedupe_collectives(two_phases(), keep_mb=keep_mb).outcome
    assert (outcome.matched, outcome.changed) == (1, changed)


def test_two_outputs_keep_memory_of_their_own():
    gm = captured(lambda x: [all_reduce(x), all_reduce(x)], *ones(8))
    with pytest.warns(PassWarning, match="both are outputs of the step, which have"):
        assert dedupe_collectives(gm).outcome.changed == 0


def test_the_kept_wait_stands_before_all_readers():
    def function(x):
        first, second = ops.all_reduce(x, "sum", "0"), ops.all_reduce(x, "sum", "0")
        early = ops.wait_tensor(second) + 1
        return [early, ops.wait_tensor(first)]

    gm = captured(function, *ones(8))
    assert dedupe_collectives(gm).outcome.changed == 1
    gm.graph.lint()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [all_reduce(x), all_reduce(y)],
        lambda x, y: [all_reduce(x), all_reduce(x, "max")],
        lambda x, y: [all_reduce(x), all_gather(x, 4)],
        lambda x, y: [all_reduce(x.view(2, 4)), all_reduce(x.view(4, 2))],
        lambda x, y: [all_reduce(x), all_reduce(x * 2)],
    ],
)
def test_others_are_left_alone(function):
    gm = captured(function, *ones(8, 8))
    with pytest.warns(PassWarning, match="it found nothing to work on"):
        assert dedupe_collectives(gm).outcome.matched == 0


def test_other_groups_are_left_alone():
    other = torch.distributed.new_group([0, 1]).group_name
    gm = captured(lambda x: [all_reduce(x), all_reduce(x, "sum", other)], *ones(8))
    with pytest.warns(PassWarning):
        dedupe_collectives(gm)


def two_phases():
    gm = captured(lambda x: [all_gather(x, 4) + 1, all_gather(x, 4) + 2], *ones(8))
    starts = [node for node in gm.graph.nodes if "gather" in node.name]
    for start, phase in zip(starts, (Phase.FORWARD, Phase.BACKWARD), strict=True):
        start.meta[META_KEY] = Owner(phase)
    return gm


def test_a_parameter_that_is_gathered_again_stays_so():
    gm = two_phases()
    with pytest.warns(
        PassWarning, match="joining forward and backward keeps the result"
    ):
        dedupe_collectives(gm)
    outcome = dedupe_collectives(two_phases(), across_phases=True).outcome
    assert outcome.changed == 1


def test_what_must_not_be_joined():
    def function(x):
        unwaited = ops.all_reduce(x, "sum", "0")
        return [unwaited, all_reduce(x)]

    gm = captured(function, *ones(8))
    with pytest.warns(PassWarning, match="all_reduce: nothing waits for it"):
        dedupe_collectives(gm)
    writing = captured(lambda x: [all_reduce(x), x.add_(1)], *ones(8))
    with pytest.warns(PassWarning, match="writes in place: join collectives before"):
        dedupe_collectives(writing)


def test_results_that_nobody_reads():
    """Torch's removal of dead code keeps every wait, and so what it waits for."""

    def function(x):
        all_reduce((x * 2).view(-1)).view(2, 4)
        return [x + 1]

    gm = captured(function, *ones((2, 4)))
    plain = captured(function, *ones((2, 4)))
    plain.graph.eliminate_dead_code()
    assert names(plain, "all_reduce")
    outcome = remove_dead_code(gm).outcome
    assert names(gm, "") == ["add"]
    assert outcome.changed == 5 and outcome.detail == ("1 collective of 32 B",)


def test_random_numbers_stay():
    def function(x):
        torch.rand_like(x)
        x.exp()
        return [torch.rand_like(x)]

    gm = captured(function, *ones(8))
    assert remove_dead_code(gm).outcome.changed == 1
    assert names(gm, "") == ["rand_like", "rand_like_1"]


def test_nothing_is_dead():
    gm = captured(lambda x: [all_reduce(x)], *ones(8))
    with pytest.warns(PassWarning, match="remove_dead_code changed nothing"):
        remove_dead_code(gm)
