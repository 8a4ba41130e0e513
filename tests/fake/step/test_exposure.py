"""Measured exposure over a wire that takes a known time, in one process."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from clock import Clock
from edit_graphs import GraphBuilder, aten, c10d
from torch import fx, nn
from training import train_sum

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.step import DataParallel, IterGraphModule, compile, measure_exposure
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.graph.simulate import simulate, simulate_steady
from torchspmd.step.measure.clock import Clocked, Stopwatch, read_runs
from torchspmd.step.passes import defer_updates, schedule_comm_wait
from torchspmd.testing import fake_world

MILLISECONDS = 30  # of any collective, one after the other


# All collectives take a second in the simulation, and computing nothing.
SLOW_PAPER = CostModel(1e30, 1e30, 1e30, launch_seconds=0.0, latency_seconds=1.0)
CLOCK = Clock()


class Wire:
    """Stands in for the collectives: one channel, the same time for each."""

    def __init__(self):
        self.free = 0.0
        self.ready = {}  # by result

    def start(self, keyset, tensor, *args):
        return self.start_in_place(keyset, tensor.clone())

    def start_in_place(self, keyset, tensor, *args):
        self.free = max(self.free, CLOCK.now) + MILLISECONDS / 1e3
        self.ready[tensor.data_ptr()] = self.free
        return tensor

    def wait(self, keyset, tensor):
        ready = self.ready.pop(tensor.data_ptr())
        CLOCK.sleep(max(0.0, ready - CLOCK.now))
        return tensor


@pytest.fixture
def wire(monkeypatch):
    monkeypatch.setattr(sys.modules[Stopwatch.__module__], "time", CLOCK)
    wire = Wire()
    with fake_world(4):
        in_place = _torch.reduction_in_place(_torch.ALL_REDUCE)
        kernels = {_torch.ALL_REDUCE: wire.start, in_place: wire.start_in_place}
        undo = _torch.observe({**kernels, _torch.WAIT: wire.wait})
        try:
            yield wire
        finally:
            undo()
    assert wire.ready == {}  # everything was waited for


def compute(tensor, milliseconds):
    CLOCK.sleep(milliseconds / 1e3)
    return tensor + 1


class Builder(GraphBuilder):
    """Adds starts and waits apart, and computation that takes a known time."""

    def start(self, node):
        return self.call(
            c10d.all_reduce.default, node, "sum", dist.group.WORLD.group_name
        )

    def wait(self, node):
        return self.call(c10d.wait_tensor.default, node)

    def compute(self, node, milliseconds):
        made = self.graph.call_function(compute, (node, milliseconds))
        made.meta["val"] = node.meta["val"]
        return made

    def double(self, node):
        return self.call(aten.mul.Tensor, node, 2.0)

    def module(self, *outputs):
        self.graph.output(list(outputs))
        return fx.GraphModule({}, self.graph)


def measured(module, *flat, **options):
    report = measure_exposure(module, flat, runs=3, **options)
    return report, {each.start: each for each in report.collectives}


def numbers(size=4):
    return torch.arange(float(size), dtype=torch.float64)


def test_time_goes_to_the_wait_that_takes_it(wire):
    b = Builder()
    x = b.input("x", 4)
    hidden = b.start(b.double(x))
    work = b.compute(x, 2 * MILLISECONDS)
    first = b.wait(hidden)
    second = b.wait(b.start(work))
    report, found = measured(b.module(first, second), numbers())
    early, late = found["all_reduce_default"], found["all_reduce_default_1"]
    assert early.is_hidden and early.distance_ms == pytest.approx(2 * MILLISECONDS)
    assert (early.exposed_ms, late.exposed_ms) == pytest.approx((0, MILLISECONDS))
    assert late.reason.startswith("its result is needed right after it starts")
    assert report.exposed_ms == pytest.approx(MILLISECONDS)
    assert report.step_ms == pytest.approx(3 * MILLISECONDS)
    assert (report.form, report.device, report.rank) == ("whole", "cpu", 0)


def test_one_that_waits_for_another_says_so(wire):
    b = Builder()
    x = b.input("x", 4)
    starts = [b.start(b.double(x)), b.start(b.compute(x, 1))]
    _, found = measured(b.module(*map(b.wait, starts)), numbers())
    reason = found["all_reduce_default_1"].reason
    assert "ms for earlier collectives of its group" in reason
    assert float(reason.split()[1]) == MILLISECONDS - 1
    assert found["all_reduce_default"].exposed_ms == pytest.approx(MILLISECONDS - 1)


def check_one_third(each):
    """A third of the wire's time is computed in, the rest is waited for."""
    assert each.distance_ms == pytest.approx(MILLISECONDS / 3)
    assert each.exposed_ms == pytest.approx(MILLISECONDS * 2 / 3)


def test_too_little_computation_in_between(wire):
    b = Builder()
    x = b.input("x", 4)
    start = b.start(b.double(x))
    work = b.compute(x, MILLISECONDS / 3)
    _, found = measured(b.module(b.wait(start), work), numbers())
    check_one_third(found["all_reduce_default"])
    assert (
        "ms of computation stand between start and use"
        in found["all_reduce_default"].reason
    )


def test_a_steady_form_waits_for_what_the_run_before_started(wire):
    b = Builder()
    x = b.input("x", 4)
    first = b.module(b.start(b.double(x)))
    b = Builder()
    x, carried = b.input("x", 4), b.input("carried_0", 4)
    # A third of it is hidden behind the end of the run that starts it.
    before = b.wait(carried)
    start = b.start(b.double(x))
    work = b.compute(x, MILLISECONDS / 3)
    steady = b.module(before, work, start)
    report, found = measured(steady, numbers(), first=first)
    assert report.form == "steady"
    check_one_third(found["all_reduce_default"])


def test_nothing_is_changed(wire):
    b = Builder()
    x, state = b.input("x", 4), b.input("state", 4)
    noise = b.call(aten.rand_like.default, x)
    reduced = b.wait(b.start(b.call(aten.add.Tensor, x, noise)))
    module = b.module(b.call(aten.add.Tensor, state, reduced), b.double(reduced))
    roles = OutputRole(OutputKind.STATE, 1), OutputRole(OutputKind.RESULT)
    set_roles(module.graph, roles)
    flat = numbers(), torch.zeros(4, dtype=torch.float64)
    code, generator = module.code, torch.get_rng_state()
    _, found = measured(module, *flat)
    assert torch.equal(flat[0], numbers()) and not flat[1].any()
    assert torch.equal(torch.get_rng_state(), generator)
    assert module.code == code and len(module.graph.find_nodes(op="output")) == 1
    assert list(found) == ["all_reduce_default"]


def test_where_the_simulation_says_otherwise(wire):
    b = Builder()
    x = b.input("x", 4)
    hidden = b.start(b.double(x))
    work = b.compute(x, 2 * MILLISECONDS)
    module = b.module(b.wait(hidden), b.wait(b.start(work)))
    report, found = measured(module, numbers(), cost=SLOW_PAPER)
    right = "its result is needed right after it starts"
    assert (
        found["all_reduce_default"].reason == f"hidden; simulated 1000.00 ms: {right}"
    )
    assert found["all_reduce_default_1"].reason == f"{right}; simulated 1000.00 ms"
    far = "2 of 2 differ from the simulation by more than half"
    assert report.notes == (far,)
    assert measured(module, numbers())[0].notes == (
        "2 of 2 differ from the simulation by more than half: its rates are a guess for "
        'the device, compile with cost="measure" to measure them',
    )


def test_inputs_that_do_not_fit(wire):
    b = Builder()
    module = b.module(b.double(b.input("x", 4)), b.input("carried_0", 4))
    with pytest.raises(
        UsageError, match=r"1 inputs are given, the graph takes 2\. Pass"
    ):
        measured(module, numbers())


def test_what_nothing_waits_for_is_told(wire):
    b = Builder()
    start = b.start(b.double(b.input("x", 4)))
    report, found = measured(b.module(start), numbers())
    wire.ready.clear()
    assert found == {} and report.exposed_ms == 0.0
    (note,) = report.notes
    assert note == (
        "all_reduce_default: nothing in the graph waits for 1 collective, so they have "
        "no figures"
    )


def test_the_clock_of_a_stream(monkeypatch):
    """Events on the stream are read once, after the last run."""
    moments = iter(range(0, 1000, 10))  # milliseconds
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            assert not calls
            self.at = next(moments)

        def elapsed_time(self, other):
            assert calls == ["synchronize"]
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    watch = Stopwatch(on_stream=True)
    for _ in range(3):
        watch.begin_run()
        for place in range(5):
            watch.mark(place)
    one = Clocked("all_reduce", "0", begun=1, waits=((2, 3),), is_carried=False)
    other = Clocked("all_reduce_1", "0", begun=4, waits=((0, 3),), is_carried=True)
    found = read_runs([one, other], watch.read(), warm=1)
    assert found["all_reduce"].exposed == pytest.approx(0.01)
    assert found["all_reduce"].distance == pytest.approx(0.01)
    assert found["all_reduce_1"].distance == pytest.approx(0.01)
    assert found["all_reduce_1"].exposed == pytest.approx(0.03)


def test_a_fake_group_has_nothing_to_measure():
    def train(model, batch):
        model(batch).sum().backward()

    with fake_world(2):
        step = compile(parallel_mode=DataParallel("replicate"))(train)
        call = torch.nn.Linear(4, 4), torch.ones(2, 4)
        for _ in range(3):
            step(*call)
        with pytest.raises(UsageError, match="a fake process group sends nothing"):
            step.exposure(*call)


# ----------------------------------------------------------------------------
# Simulated runs of a graph: what of its communication is hidden, and why.


WIDTH, BATCH, LAYERS = 64, 32, 6


# Only matrix products and bytes on the wire take time, so that it can be counted.
COST = CostModel(
    flops=1e9,
    memory_bytes=1e30,
    network_bytes=1e6,
    launch_seconds=0.0,
    latency_seconds=0.0,
)

MATMUL = 2 * BATCH * WIDTH * WIDTH / 1e9
REDUCED = 2 * (4 - 1) / 4 * WIDTH * WIDTH * 4 / 1e6  # an all-reduce on 4 ranks


@functools.cache
def timelines(cost, **deferral):
    """Of the captured step, after scheduling, and with deferred updates."""
    found = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        found.append(simulate(gm.graph, cost))
        schedule_comm_wait(gm)
        found.append(simulate(gm.graph, cost))
        defer_updates(gm, cost=cost, **deferral)
        steady = gm.forms["steady"].graph
        found.append(simulate_steady(steady, cost, gm.num_carried))
        return gm

    with fake_world(4):
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        mode = DataParallel("replicate")
        step = compile(train_sum, gm_transformation=transformation, parallel=mode)
        step(model, optim, torch.ones(BATCH, WIDTH), last_train_step=True)
    return found


def test_one_step_by_hand():
    captured, scheduled, deferred = timelines(COST)
    # The first layer needs no gradient of its input.
    compute = (3 * LAYERS - 1) * MATMUL
    for timeline in (captured, scheduled, deferred):
        assert timeline.compute_seconds == pytest.approx(compute)
        assert timeline.comm_seconds == pytest.approx(LAYERS * REDUCED)
    assert captured.step_seconds == pytest.approx(compute + LAYERS * REDUCED)
    first_gradient = LAYERS * MATMUL + MATMUL  # forward, and one product of backward
    assert scheduled.step_seconds == pytest.approx(first_gradient + LAYERS * REDUCED)
    # The wire never stands still: no schedule is faster.
    fastest = max(compute, LAYERS * REDUCED)
    assert deferred.step_seconds == pytest.approx(fastest, rel=0.02)
    assert deferred.step_seconds < scheduled.step_seconds < captured.step_seconds


def test_what_is_exposed_has_a_reason():
    captured, scheduled, deferred = timelines(COST)
    assert {each.reason for each in captured.exposures} == {
        "its result is needed right after it starts"
    }
    assert len(captured.exposures) == LAYERS
    queued = [each.reason for each in scheduled.exposures if each.reason]
    assert all("ms for earlier collectives of its group" in text for text in queued)
    assert queued
    assert captured.exposed_seconds > deferred.exposed_seconds


def test_a_fast_wire_is_hidden():
    fast = CostModel(1e9, 1e30, 1e9, launch_seconds=0.0, latency_seconds=0.0)
    _, scheduled, deferred = timelines(fast)
    # The last gradient has nothing to hide behind.
    assert scheduled.exposed_seconds > 0.0
    assert deferred.step_seconds <= scheduled.step_seconds
    assert all(each.exposed_seconds == 0 for each in deferred.exposures[1:])


def test_reductions_can_be_moved_as_a_whole():
    _, scheduled, moved = timelines(COST, start="next")
    # Each is started where it is needed: nothing overlaps.
    assert moved.exposed_seconds == pytest.approx(LAYERS * REDUCED)
    assert moved.step_seconds > scheduled.step_seconds


def test_costs_of_nodes():
    assert CostModel.for_device("cpu").network_bytes < CostModel().network_bytes
