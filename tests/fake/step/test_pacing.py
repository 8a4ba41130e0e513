"""Gradients that are computed behind more urgent ones; the size of buckets."""

import functools
from dataclasses import dataclass, field

import pytest
import torch
from comm_graphs import all_reduce, captured
from torch import fx, nn
from training import train_silently

from torchspmd.errors import UsageError
from torchspmd.step import DataParallel, IterGraphModule, compile
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.memory import LiveBytes
from torchspmd.step.graph.simulate import simulate, simulate_steady
from torchspmd.step.passes import baseline, defer_updates, pacing, schedule_comm_wait
from torchspmd.step.passes.pacing import Reduction, update_places
from torchspmd.step.passes.pipeline import choose_bucket_size
from torchspmd.step.passes.runner import observing_passes
from torchspmd.testing import fake_world

WIDTH, BATCH, LAYERS = 32, 64, 6
FLOPS = 1e9
MATMUL = 2 * BATCH * WIDTH * WIDTH / FLOPS
REDUCED = 2 * (4 - 1) / 4 * WIDTH * WIDTH * 4  # bytes that a rank of four sends


def cost(ratio, launch=0.0):
    """Reducing all gradients takes ``ratio`` times as long as their products."""
    wire = ratio * (3 * LAYERS - 1) * MATMUL
    return CostModel(FLOPS, 1e30, LAYERS * REDUCED / wire, launch, 0.0)


@dataclass
class Found:
    """What the pass said of a step, and what it made of it."""

    text: str
    worth: str
    gain: float
    seconds: float  # of a steady iteration, simulated
    peak: int  # bytes
    order: list[int]  # the layers whose gradients are reduced
    updates: list[tuple[int, str]]  # the layers that are updated, and where
    parameters: list[torch.Tensor] = field(default_factory=list)


def deferred(gm, costs, options):
    gm = IterGraphModule(gm)
    schedule_comm_wait(gm)
    report = defer_updates(gm, cost=costs, **options)
    steady = simulate_steady(gm.forms["steady"].graph, costs, gm.num_carried)
    return gm, Found(
        report.outcome.detail[0],
        report.outcome.detail[1],
        report.outcome.gain,
        steady.step_seconds,
        max(LiveBytes(gm.graph).now().values()),
        [_layer(node.name) for node in gm.graph.nodes if "all_reduce" in node.name],
        [
            (_layer(line.split(":")[0].split(" and ")[0]), line.split(" before ")[1])
            for line in report.outcome.detail
            if " nodes run before " in line
        ],
    )


def _layer(start):
    """Gradients are captured from the last layer to the first."""
    number = start.removeprefix("all_reduce").strip("_")
    return LAYERS - 1 - int(number or 0)


@functools.cache
def run(ratio, *, tied=False, launch=0.0, **options):
    """Three steps of a stack of layers with deferred updates.

    A tied stack uses the weight of the first layer in the last one too.
    """
    found = []

    def transformation(gm):
        module, made = deferred(gm, cost(ratio, launch), options)
        found.append(made)
        return module

    with fake_world(4):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        )
        if tied:
            model[-1].weight = model[0].weight
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(BATCH, WIDTH)

        step = compile(
            train_silently,
            gm_transformation=transformation,
            parallel_mode=DataParallel("replicate"),
        )
        for _ in range(3):
            step(model, optim, batch)
        step.flush()
        found[0].parameters = [p.detach() for p in model.parameters()]
    return found[0]


EARLY = "every gradient is computed as early as it can be"


def captured_stack():
    """The scheduled graph of a step of the same stack, in a world of four ranks."""
    kept = []

    def keep(gm):
        kept.append(IterGraphModule(gm))
        return gm

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optim = torch.optim.SGD(model.parameters(), lr=0.01)

    mode = DataParallel("replicate")
    step = compile(train_silently, gm_transformation=keep, parallel_mode=mode)
    step(model, optim, torch.randn(BATCH, WIDTH))
    schedule_comm_wait(kept[0])
    return kept[0]


@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_updates_are_deferred_only_if_that_is_simulated_to_be_faster(ratio):
    with fake_world(4), observing_passes(lambda *_: None):
        gm, always = captured_stack(), captured_stack()
        before = str(gm.graph)
        report = defer_updates(gm, cost=cost(ratio), only_if_faster=True)
        expected = defer_updates(always, cost=cost(ratio))
    assert report.outcome.gain == pytest.approx(expected.outcome.gain)
    if ratio == 1.0:
        assert report.outcome.gain > 1.01
        assert gm.graph.regions == always.graph.regions
        assert str(gm.graph) == str(always.graph)
        return
    assert 0.9 < report.outcome.gain < 1.01
    assert str(gm.graph) == before and not gm.graph.regions
    assert report.outcome.changed == 0 and report.proof == "proved equal"
    assert "left as it was: simulated to be 1.00 times" in str(report)


def test_what_python_costs_counts():
    """Ten small updates by themselves take longer than what they hide."""
    with fake_world(4), observing_passes(lambda *_: None):
        quick, slow = captured_stack(), captured_stack()
        worth = defer_updates(quick, cost=cost(1.0), only_if_faster=True)
        launch = MATMUL / 4  # of an operator: what splits and notes comes on top
        report = defer_updates(slow, cost=cost(1.0, launch), only_if_faster=True)
    assert worth.outcome.gain > 1.01 and quick.graph.regions
    assert report.outcome.gain < 1.01 and not slow.graph.regions


def test_updates_are_joined_where_splitting_costs_more(monkeypatch):
    costs = cost(1.0, MATMUL / 16)
    with fake_world(4), observing_passes(lambda *_: None):
        joined, apart = captured_stack(), captured_stack()
        outcome = defer_updates(joined, cost=costs).outcome
        monkeypatch.setattr(baseline, "_COUNTS", 1e9)
        split = defer_updates(apart, cost=costs).outcome
    assert len(apart.graph.regions) == LAYERS
    assert len(joined.graph.regions) == LAYERS / 2
    assert outcome.gain > split.gain > 1.01
    assert "6 reductions share 3 updates" in str(outcome)


def test_joined_updates_have_the_same_bits():
    joined, apart = run(1.0, launch=MATMUL / 16), run(1.0)
    assert len(joined.updates) < len(apart.updates) == LAYERS
    for one, other in zip(joined.parameters, apart.parameters, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0])
def test_the_gain_is_that_of_the_graph_that_runs(ratio, monkeypatch):
    monkeypatch.setattr(pacing, "_SLOWDOWNS", (1.0,))
    with fake_world(4), observing_passes(lambda *_: None):
        gm = captured_stack()
        before = simulate(gm.graph, cost(ratio)).step_seconds
        outcome = defer_updates(gm, cost=cost(ratio)).outcome
        steady = gm.forms["steady"].graph
        after = simulate_steady(steady, cost(ratio), gm.num_carried).step_seconds
    assert outcome.gain == pytest.approx(before / after)


def test_only_a_simulated_gain_is_compared():
    what = "only start='now' is simulated"
    with fake_world(4), pytest.raises(UsageError, match=what):
        defer_updates(captured_stack(), start="next", only_if_faster=True)


def test_balanced_steps_are_simulated_to_be_faster_and_equal_in_bits():
    usual = run(1.0, delay_gradients=False)
    assert usual.text == EARLY
    delayed = run(1.0, memory_budget_mb=1.0)
    assert "are computed last, beside more urgent reductions" in delayed.text
    assert delayed.seconds < 0.97 * usual.seconds
    for left, right in zip(delayed.parameters, usual.parameters, strict=True):
        assert torch.equal(left, right)


def test_what_overlapping_gains_is_told():
    plain = "times as fast as without this pass"
    assert run(1.0, memory_budget_mb=1.0).worth == f"simulated to be 1.16 {plain}"
    assert run(0.01).worth == (
        f"simulated to be 1.00 {plain}: hardly anything of the reductions was exposed, and "
        "overlap_iterations=False leaves nothing pending"
    )


def test_what_is_needed_late_is_what_is_delayed():
    before = run(1.0, delay_gradients=False).order
    after = run(1.0, memory_budget_mb=1.0).order
    assert sorted(after) == sorted(before) == list(range(LAYERS))
    assert after.index(0) < before.index(0)
    assert after[-1] == LAYERS - 1


def test_nothing_is_delayed_where_the_wire_is_the_limit():
    assert run(5.0, memory_budget_mb=1.0).text == EARLY


def test_nothing_is_delayed_where_the_wire_takes_no_time():
    assert run(0.01, memory_budget_mb=1.0).text == EARLY


def test_memory_is_not_spent_without_leave():
    usual = run(0.5, delay_gradients=False)
    assert run(0.5).peak <= usual.peak < run(0.5, memory_budget_mb=1.0).peak


def test_some_that_are_needed_earlier_keep_the_wire_busy():
    delayed = run(0.8)
    assert "the gradients of 2 reductions are computed last" in delayed.text
    assert sorted(delayed.order[-2:]) == [LAYERS - 3, LAYERS - 1]


def test_a_network_that_is_slower_beside_computation_is_reckoned_with(monkeypatch):
    """One gradient is enough for the network as measured; a slower one needs two."""
    chosen = run(0.35)
    monkeypatch.setattr(pacing, "_SLOWDOWNS", (1.0,))
    hasty = run.__wrapped__(0.35)
    assert "the gradients of 1 reduction are" in hasty.text
    assert "the gradients of 2 reductions are" in chosen.text
    assert chosen.order == run.__wrapped__(1.3 * 0.35).order


def test_a_part_of_a_gradient_waits_for_the_rest():
    """The last layer's part is known first, and read when the first layer's is."""
    usual = run(2.0, tied=True, delay_gradients=False)
    sunk = run(2.0, tied=True, memory_budget_mb=1.0)
    assert "4 operators wait for the rest of their gradient" in sunk.text
    assert sunk.seconds <= usual.seconds - 0.9 * MATMUL  # the last layer's part
    for left, right in zip(sunk.parameters, usual.parameters, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("order", "groups", "expected"),
    [
        ("a b late early", "xx", ["late a", "early a"]),
        ("a b early late", "xx", ["early a", "late b"]),
        ("a b late early", "xy", ["late b", "early a"]),  # wires of their own
        ("a early late", "xx", ["early a", "late b"]),  # b is not in the iteration
    ],
)
def test_an_update_is_made_where_a_later_reduction_is_waited_for(
    order, groups, expected
):
    graph = fx.Graph()
    node = {name: graph.placeholder(name) for name in ("a", "b", "early", "late")}
    reductions = [
        Reduction(node["early"], node["a"], groups[0], 1.0, 1.0, "early"),
        Reduction(node["late"], node["b"], groups[1], 1.0, 1.0, "late"),
    ]
    places = update_places([node[name] for name in order.split()], reductions)
    assert [f"{each.start} {place}" for each, place in places.items()] == expected


def test_updates_hide_the_most_urgent_reduction_where_they_take_time(monkeypatch):
    """The first layer's gradient is ready last and needed first."""
    monkeypatch.setattr(baseline, "_COUNTS", 1e9)  # updates are not joined
    usual = run(0.5, delay_gradients=False).updates
    assert [layer for layer, _ in usual] == list(range(LAYERS))
    assert len({place for _, place in usual}) == LAYERS
    early = run(0.5, launch=MATMUL / 2, delay_gradients=False).updates
    assert [layer for layer, _ in early] == list(reversed(range(LAYERS)))
    assert len({place for _, place in early}) == 1


WIRE = 64 * 2**20 / 1e9  # seconds of all gradients at 1 GB/s


def bucket_size(latency, network=1e9, computing=1.0):
    """For 16 gradients of 4 MiB, on 2 ranks, that ``computing`` seconds go into."""
    gradients = [torch.empty(2**20, device="meta") for _ in range(16)]

    def step(*sources):
        return [all_reduce(source.relu()) for source in sources]

    with fake_world(2):
        cost = CostModel(
            memory_bytes=1e30,
            network_bytes=network,
            launch_seconds=computing / 16,
            latency_seconds=latency,
        )
        return choose_bucket_size(captured(step, *gradients), cost)


def test_buckets_grow_with_the_latency():
    assert bucket_size(WIRE / 64) == 4.0
    assert bucket_size(WIRE / 16) == 8.0
    assert bucket_size(WIRE / 16, network=4e9) == 16.0


def test_buckets_are_larger_where_the_wire_is_the_limit():
    assert bucket_size(WIRE / 16, computing=WIRE * 2) == 8.0
    assert bucket_size(WIRE / 16, computing=WIRE / 4) == 32.0
    between = bucket_size(WIRE / 16, computing=WIRE * 0.75)
    assert 8.0 < between < 32.0


def test_buckets_grow_until_the_wire_would_wait_for_them():
    # By the roots alone 4 and 32 MiB.
    assert bucket_size(WIRE / 64, computing=WIRE) == 8.0
    assert bucket_size(WIRE / 64, computing=WIRE / 16) == 64.0  # all is there at once


def test_buckets_are_neither_tiny_nor_huge():
    assert bucket_size(0.0) == 1.0
    assert bucket_size(1e3) == 64.0
    assert bucket_size(WIRE, computing=0.0) == 64.0
