"""Stages that were not rehearsed are what they would have been, had they been."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleGPipe, get_schedule_class

from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.operators import Pricer
from torchspmd.predict.prediction import predict_time, simulate_programs
from torchspmd.predict.program import price_step
from torchspmd.predict.stages import StagesDifferError, doubled, fill_in, to_rehearse
from torchspmd.predict.time_suggestions import suggest_faster
from torchspmd.predict.timeline import simulate
from torchspmd.rehearse.recording import Comm

STAGES = 8
RANKS = [2 * stage for stage in range(STAGES)]  # two replicas; four stages on a node
GPU, NETWORK = load_gpu("h100"), load_network("ib-ndr400")


def train(stage, *, layers=2, width=1024, micro_batches=9, schedule=Schedule1F1B):
    dist.init_process_group("nccl")
    mesh = torch.distributed.init_device_mesh(
        "cuda", (STAGES, 2), mesh_dim_names=("pp", "dp")
    )
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()
    example = torch.empty(4096, width, device="meta", requires_grad=True)
    part = PipelineStage(
        model,
        stage,
        STAGES,
        torch.device("cuda"),
        input_args=(example,),
        output_args=(example,),
        group=mesh["pp"].get_group(),
    )
    steps = schedule(part, micro_batches, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        batch = torch.randn(micro_batches * 4096, width, device="cuda")
        steps.step(*((batch,) if stage == 0 else ()), target=batch)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        norm = torch.ones((), device="cuda")
        dist.all_reduce(norm, group=mesh["pp"].get_group())
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def rehearse_stages(rehearse):
    def run(stages, **options):
        recordings = {}
        for stage in stages:
            with rehearse(2 * STAGES, 2 * stage) as recording:
                train(stage, **options)
            recordings[stage] = recording
        return recordings

    return run


def price(recordings):
    figures = Figures(GPU, NETWORK)
    pricer = Pricer(figures)
    programs = {r.rank: price_step(r, pricer) for r in recordings.values()}
    return programs, figures


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [(Schedule1F1B, 8), (Schedule1F1B, 11), (ScheduleGPipe, 4)],
)
def test_they_are_what_a_rehearsal_of_each_gives(
    rehearse_stages, schedule, micro_batches
):
    recordings = rehearse_stages(
        range(STAGES), schedule=schedule, micro_batches=micro_batches
    )
    whole, figures = price(recordings)
    known = {RANKS[stage]: whole[RANKS[stage]] for stage in to_rehearse(STAGES)}
    filled = fill_in(known, RANKS, figures)
    assert to_rehearse(STAGES) == [0, 1, 2, 6, 7]
    for told, rehearsed in zip(filled, whole.values(), strict=True):
        # Work and links too: two of these stages send to another node, two do not.
        assert [(i.host, i.work, i.kind, i.link) for i in told.items] == [
            (i.host, i.work, i.kind, i.link) for i in rehearsed.items
        ]
        assert costs(told) == costs(rehearsed)
        assert [partners(i) for i in told.items] == [
            partners(i) for i in rehearsed.items
        ]
    one, _ = simulate_programs(filled, figures)
    other, _ = simulate_programs(list(whole.values()), figures)
    assert one.ends == other.ends


def costs(program):
    return [cost for cost in program.costs.values() if cost.kind != "view"]


def partners(item):
    comm = item.event
    if not isinstance(comm, Comm):
        return None
    return comm.peer if comm.peer >= 0 else comm.ranks


def test_a_prediction_of_a_pipeline_of_which_few_stages_are_recorded(rehearse_stages):
    recordings = list(rehearse_stages(range(STAGES)).values())
    whole = predict_time(recordings, GPU, NETWORK, of=1)
    few = [recordings[stage] for stage in (1, 0, 2, 6, 7)]
    told = predict_time(few, GPU, NETWORK, ranks=RANKS)
    assert told.recording is few[0]
    assert (told.rank, told.step_seconds) == (1, whole.step_seconds)
    assert told.account.parts == whole.account.parts


@pytest.mark.parametrize(
    ("stages", "count"), [([0, 1, 2, 6, 7], 12), (range(STAGES), 9)]
)
def test_more_micro_batches_gain_what_a_rehearsal_with_them_does(
    rehearse_stages, stages, count
):
    now, more = (
        predict_time(list(recordings.values()), GPU, NETWORK, ranks=RANKS)
        for recordings in (
            rehearse_stages(stages, micro_batches=each) for each in (count, 2 * count)
        )
    )
    (gain,) = (
        gain
        for gain in suggest_faster(now, most=20)
        if gain.text.startswith("twice as many micro-batches of this size in a step")
    )
    less = now.step_seconds - more.step_seconds / 2
    # But for what cuts the batch, and the first stage's one round among nine.
    assert gain.seconds == pytest.approx(less, rel=0.05)


def test_of_very_long_steps_fewer_changes_are_tried(rehearse_stages, monkeypatch):
    now = predict_time(list(rehearse_stages(range(STAGES)).values()), GPU, NETWORK)
    few = "only changes to the pipeline were tried"
    assert not any(few in note for note in now.notes())
    monkeypatch.setattr("torchspmd.predict.prediction._LONG", 1000)
    assert any(few in note for note in now.notes())
    (gain,) = suggest_faster(now, most=20)
    assert "micro-batches" in gain.text


def test_micro_batches_that_are_all_kept_are_not_doubled(rehearse_stages):
    """They would need twice the memory: GPipe."""
    recordings = rehearse_stages(range(STAGES), schedule=ScheduleGPipe)
    whole, figures = price(recordings)
    assert doubled(list(whole.values()), figures) == []


def test_uneven_stages_are_told_what_evens_them(rehearse_stages):
    recordings = rehearse_stages(range(STAGES - 1), layers=4, width=4096)
    recordings |= rehearse_stages([STAGES - 1], layers=12, width=4096)
    now = predict_time(list(recordings.values()), GPU, NETWORK)
    (gain,) = (g for g in suggest_faster(now, most=20) if "even stages" in g.text)
    assert gain.text == (
        "more even stages: of the blocks Sequential, give ranks 0, 2, 4, 6, 8, 10, 12 "
        "5 in place of 4, rank 14 5 in place of 12"
    )
    even = rehearse_stages(range(STAGES), layers=5, width=4096)
    after = predict_time(list(even.values()), GPU, NETWORK)
    less = now.step_seconds - after.step_seconds
    assert gain.seconds == pytest.approx(less, rel=0.05)


def run_schedule(rank, name, parts, micro_batches):
    """Each stage has as many equal layers, and only their products are of interest."""
    dist.init_process_group("nccl")
    last = 4 * parts - 1
    mine = [rank, last - rank] if name in IN_A_V else range(rank, last + 1, 4)
    example = torch.empty(16, 64, device="meta", requires_grad=True)
    shapes = {"input_args": (example,), "output_args": (example,)}
    stages = []
    for stage in mine:
        layers = [nn.Linear(64, 64, bias=False, device="cuda") for _ in range(2)]
        model, device = nn.Sequential(*layers), torch.device("cuda")
        stages.append(PipelineStage(model, stage, last + 1, device, **shapes))
    schedule = get_schedule_class(name)(
        stages if parts > 1 else stages[0],
        micro_batches,
        loss_fn=lambda out, _: out.sum(),
    )
    weights = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, 0.1)
    for _ in range(2):
        batch = torch.ones(micro_batches * 16, 64, device="cuda", requires_grad=True)
        schedule.step(*([batch] if 0 in mine else []), target=batch)
        optimizer.step()
        optimizer.zero_grad()


IN_A_V = ("ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize(
    ("name", "parts", "micro_batches", "bubble"),
    # In passes forward of one part of the model; backward is two of these, for the inputs
    # and for the weights. The formulas are those of the schedules' papers, for four ranks.
    [
        ("GPipe", 1, 8, 3 * 3),
        ("1F1B", 1, 8, 3 * 3),
        ("1F1B", 1, 16, 3 * 3),
        ("Interleaved1F1B", 2, 8, 3 * 3),
        ("Interleaved1F1B", 4, 8, 3 * 3),
        ("LoopedBFS", 2, 8, 3 * 3),
        ("InterleavedZeroBubble", 2, 8, 3 * (1 + 1 - 1)),
        ("ZBVZeroBubble", 2, 8, 3 * (1 + 1 - 2 * 1)),
        ("DualPipeV", 2, 8, 3 * (3 + 2 - 3 * 1)),
    ],
)
def test_the_bubble_of_each_schedule_is_that_of_its_formula(
    rehearse, name, parts, micro_batches, bubble
):
    programs = []
    for rank in range(4):
        with rehearse(4, rank) as recording:
            run_schedule(rank, name, parts, micro_batches)
        program = price_step(recording, Pricer(Figures(GPU, NETWORK)))
        flops = {place: cost.flops for place, cost in program.costs.items()}
        programs.append(
            [  # each product takes half a pass; nothing else takes time
                item._replace(host=0.0, work=0.5 * (flops.get(item.place, 0) > 0))
                for item in program.items
            ]
        )
    run = simulate(programs, rounds=3, of=0, ranks=range(4))
    ends = run.ends[0]
    assert ends[-1] - ends[-2] == 3 * parts * micro_batches + bubble


def test_stages_of_different_sizes_are_not_told_from_each_other(rehearse_stages):
    recordings = rehearse_stages([0, 1, 2, 7])
    recordings |= rehearse_stages([6], layers=3)
    known, figures = price(recordings)
    with pytest.raises(StagesDifferError, match="do not follow from each other"):
        fill_in(known, RANKS, figures)


def test_short_pipelines_are_rehearsed_whole(rehearse_stages):
    assert to_rehearse(5) == [0, 1, 2, 3, 4]
    assert to_rehearse(2) == [0, 1]
    known, figures = price(rehearse_stages([0, 1]))
    assert fill_in(known, RANKS[:2], figures) == list(known.values())
