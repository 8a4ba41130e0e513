"""Steps of torchspmd.compile in a rehearsal: the program that would run is recorded."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import train as step

import torchspmd
from torchspmd.comm import Group
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.memory import count_memory
from torchspmd.predict.prediction import predict_time
from torchspmd.predict.rehearsed import rehearsed_gpu
from torchspmd.predict.suggestions import suggest
from torchspmd.rehearse.recording import (
    Category,
    Comm,
    Mark,
    MarkKind,
    Op,
    Phase,
    Wait,
)
from torchspmd.rehearse.world import World

RANKS = 8
WIDTH = 512


def train(rehearse, *, size=RANKS, steps=3, compiled=True, width=WIDTH, **options):
    """The recording of some steps, and the compiled step's program."""
    with rehearse(size=size) as recording:
        if size > 1:
            dist.init_process_group("nccl")
        layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
        model = nn.Sequential(*layers).cuda()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        run = torchspmd.compile(step, **options) if compiled else step
        for _ in range(steps):
            run(model, optim, torch.randn(64, width, device="cuda")).item()
        program = run.programs[-1] if compiled else None
        ledger = program and program.ledger.total()
        sent = Counter()
        for event in program.ledger.events if program else ():
            sent[event.kind.value] += event.payload_bytes
    return recording, ledger, sent


def in_step(recording, number):
    """The events of one step."""
    marks = {
        (event.kind, event.value): place
        for place, event in enumerate(recording.events)
        if isinstance(event, Mark)
    }
    begin = marks[MarkKind.STEP_BEGIN, number]
    return recording.events[begin : marks[MarkKind.STEP_END, number]]


def sent_in(events):
    sent = Counter()
    for event in events:
        if isinstance(event, Comm):
            sent[event.kind] += event.payload_bytes
    return sent


@pytest.mark.parametrize("parallel", ["replicate", "fully_shard"])
def test_the_program_communicates_what_its_ledger_says(rehearse, parallel):
    recording, _, sent = train(rehearse, parallel=parallel)
    assert recording.steps == 3
    assert sent_in(in_step(recording, 2)) == sent
    assert sum(sent.values()) > 0


def test_operators_are_those_of_the_eager_step(rehearse):
    def products(recording):
        return Counter(
            event.site.phase
            for event in in_step(recording, 1)
            if isinstance(event, Op) and ".mm." in event.name
        )

    compiled, _, _ = train(rehearse, parallel="replicate", overlap=False)
    eager, _, _ = train(rehearse, compiled=False)
    assert products(compiled) == products(eager)
    modules = {e.site.module for e in in_step(compiled, 1) if isinstance(e, Op)}
    assert "Sequential.3" in modules


def test_parameters_and_states_are_one_share_of_each_rank(rehearse, live_bytes):
    whole = 4 * WIDTH * WIDTH * 4
    recording, _, _ = train(rehearse, parallel="fully_shard")
    held = live_bytes(recording, recording.events.index(in_step(recording, 2)[-1]))
    assert held["parameter"] == whole // RANKS
    assert 2 * whole // RANKS <= held["optimizer state"] < 2 * whole // RANKS + 512


@pytest.mark.parametrize("parallel", ["replicate", "fully_shard"])
def test_sharding_is_advised_where_it_is_not_done(rehearse, parallel):
    recording, _, _ = train(rehearse, parallel=parallel, width=1024)
    account = count_memory(recording, load_gpu("h100"))
    advice = " ".join(each.text for each in suggest(account))
    assert ("fully_shard" in advice) == (parallel == "replicate")
    gathered = account.by_category().get(Category.GATHERED_PARAMETER.value, 0)
    assert bool(gathered) == (parallel == "fully_shard")


def test_deferred_updates_wait_in_the_next_step(rehearse):
    recording, _, _ = train(rehearse, parallel="replicate", overlap=True)
    first, steady = in_step(recording, 0), in_step(recording, 2)
    started = [event.number for event in first if isinstance(event, Comm)]
    waited = {event.comm for event in first if isinstance(event, Wait)}
    assert set(started) - waited  # it leaves reductions under way
    phases = [e.site.phase for e in steady if isinstance(e, Op) and not e.views]
    assert phases.index(Phase.OPTIMIZER) < phases.index(Phase.BACKWARD)


def test_overlap_is_predicted_to_be_no_slower(rehearse):
    gpu = load_gpu("h100")
    seconds = {}
    for overlap in (True, False):
        recording, _, _ = train(
            rehearse, parallel="replicate", overlap=overlap, width=2048
        )
        seconds[overlap] = predict_time(recording, gpu).step_seconds
    assert seconds[True] <= seconds[False]


def test_thousand_ranks_need_no_more(rehearse):
    few, _, _ = train(rehearse, parallel="fully_shard", width=1024)
    many, _, _ = train(rehearse, parallel="fully_shard", width=1024, size=1024)
    count = [sum(isinstance(e, Op) for e in r.events) for r in (few, many)]
    assert count[0] == count[1]


def test_inductor_runs_as_regions(rehearse):
    recording, _, _ = train(rehearse, parallel="replicate", backend="inductor")
    regions = {e.region for e in in_step(recording, 2) if isinstance(e, Op)}
    assert regions - {None}
    assert any("backend='inductor'" in note for note in recording.notes)


def test_backends_are_not_timed(rehearse):
    recording, _, _ = train(rehearse, parallel="replicate", backend="auto")
    regions = {e.region for e in in_step(recording, 2) if isinstance(e, Op)}
    assert regions == {None}
    assert any("backend='auto'" in note for note in recording.notes)


def test_what_is_not_done_is_noted(rehearse, monkeypatch):
    monkeypatch.delenv("TORCHSPMD_SHADOW")  # as users have it
    recording, _, _ = train(
        rehearse, parallel="replicate", cost="measure", verify=True, overlap=False
    )
    for text in ("shadow=0", "verify=", "cost='measure'"):
        assert any(text in note for note in recording.notes), text


def test_networks_of_mesh_axes():
    """Shards in a node, replicas on two: the passes choose by both networks."""
    world = World(16, 0)
    gpu = rehearsed_gpu(load_gpu("h100"), load_network("ib-ndr400"), world)
    shards = Group("a", tuple(range(8)), "shard")
    replicas = Group("b", (0, 8), "replicate")
    axes = gpu.cost({"shard": shards, "replicate": replicas}).axes
    assert axes["shard"].network_bytes > 3 * axes["replicate"].network_bytes
    assert axes["shard"].latency_seconds < axes["replicate"].latency_seconds
    everyone = Group("c", tuple(range(16)), "dp")
    assert gpu.cost({"dp": everyone}).axes == {}


def test_what_nobody_asked_for_is_not_noted(rehearse):
    recording, _, _ = train(rehearse, parallel="replicate", shadow=0)
    assert not [note for note in recording.notes if "torchspmd.compile" in note]


def test_one_device_without_a_group(rehearse):
    recording, ledger, _ = train(rehearse, size=1)
    assert recording.steps == 3
    assert ledger.count == 0


def test_nothing_is_left_pending_at_the_end(rehearse, capfd):
    train(rehearse, parallel="replicate", overlap=True)
    assert "was not made" not in capfd.readouterr().err


def test_steps_run_for_real_again_afterwards(rehearse):
    train(rehearse, parallel="replicate", backend="inductor")

    @torchspmd.compile
    def step(model, batch):
        model(batch).sum().backward()

    model = nn.Linear(2, 2)
    step(model, torch.ones(1, 2))
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert step.programs[0].run is not None
