"""backend="auto" on ranks: all run one backend in the same call, and choose the same."""

import pytest
import torch
import torch.distributed as dist
from timed_backends import Timed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from training import train

from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.step import compile
from torchspmd.step.runtime import using_runtime
from torchspmd.step.trial import LAP_CALLS, ROUNDS, TRIAL_CALLS

MODES = {
    "replicas": {"parallel": "replicate", "overlap": False},
    "overlapped": {"parallel": "replicate", "overlap": True},
    "shards": {"parallel": "fully_shard"},
    "overlapped shards": {"parallel": "fully_shard", "overlap": True},
}
IN_TURN = ["graph"] * LAP_CALLS + ["inductor"] * LAP_CALLS


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(number, rows=3):
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    return torch.randn(rows, 4, generator=generator)


def whole(value):
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def train_beside_ddp(options, times, rows=lambda number: 3, checkpoints=()):
    """What was run, what was chosen, and whether every result was DDP's."""
    (model, optim), (expected, expected_optim) = make(), make()
    peer = DistributedDataParallel(expected)
    schedules = [StepLR(each, 5, 0.8) for each in (optim, expected_optim)]
    runtime = Timed(*times[dist.get_rank()])
    with using_runtime(runtime):
        step = compile(train, backend="auto", **options)
        for number in range(TRIAL_CALLS + 4):
            given = batch(number, rows(number))
            loss = step(model, optim, given)
            torch.testing.assert_close(loss, train(peer, expected_optim, given))
            for schedule in schedules:
                schedule.step()
            if number in checkpoints:
                model.state_dict()
    step.flush()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs.detach())
    found = [whole(each) for each in model.parameters()]
    sums = torch.stack([each.double().sum() for each in found])
    others = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(others, sums)
    assert all(torch.equal(each, sums) for each in others)  # replicas are alike
    return runtime.made, [each.choice for each in step.programs], step.explain()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("faster", "second"), [("graph", (1.5, 1.0)), ("inductor", (5.0, 3.0))]
)
def test_ranks_whose_clocks_disagree(ranks2, mode, faster, second):
    """The first rank finds the graph faster, the second Inductor: the slowest decides."""
    times = [(1.0, 2.0), second]
    found = ranks2.run(train_beside_ddp, MODES[mode], times, checkpoints=(8, 20))
    slowest = [max(each) for each in zip(*times, strict=True)]
    for made, (choice,), text in found:
        assert made == IN_TURN * ROUNDS + [faster] * 4
        assert choice.taken == faster
        assert list(choice.seconds.values()) == slowest
        assert f"backend='auto': {faster} taken" in text


def other_sizes(number):
    """The first rank has another batch in the second call, and later."""
    return 5 if number in (1, 20) and dist.get_rank() == 0 else 3


def later_sizes(number):
    """The first rank has others in Inductor's second turn, the second one at the end."""
    is_other = number == (3 * LAP_CALLS + 2, TRIAL_CALLS + 1)[dist.get_rank()]
    return 6 if is_other else 3


def train_with_sizes(options, rows):
    times = [(2.0, 1.0)] * 2
    return train_beside_ddp(options, times, rows)


@pytest.mark.parametrize("mode", ["replicas", "overlapped"])
def test_batches_of_other_sizes_from_the_start(ranks2, mode):
    for made, choices, text in ranks2.run(train_with_sizes, MODES[mode], other_sizes):
        assert set(made) == {"graph"}
        assert {each.taken for each in choices} == {"graph"}
        assert "not measured: another program that sends the same was built" in text


def sizes_while_timed(number):
    """The first rank has others in all of Inductor's turns."""
    is_other = IN_TURN[number % len(IN_TURN)] == "inductor" and number > LAP_CALLS
    return 5 if is_other and dist.get_rank() == 0 else 3


def test_a_rank_that_is_never_timed(ranks2):
    options = MODES["replicas"]
    for made, choices, text in ranks2.run(train_with_sizes, options, sizes_while_timed):
        assert made == IN_TURN * ROUNDS + ["graph"] * 4
        assert {each.taken for each in choices} == {"graph"}
        assert "not measured: a rank ran another program" in text


@pytest.mark.parametrize("mode", ["replicas", "overlapped"])
def test_a_batch_of_another_size_follows_the_others(ranks2, mode):
    """Within the trial it is made by whoever's turn it is, later by what was taken."""
    for made, choices, _ in ranks2.run(train_with_sizes, MODES[mode], later_sizes):
        assert made == IN_TURN * ROUNDS + ["inductor"] * 4
        assert [each.taken for each in choices] == ["inductor"] * 2


class Failing(Timed):
    """One rank has no compiler."""

    def compile_graph(self, graph, compiled):
        if dist.get_rank() == 1:
            raise RuntimeError("no space left on device")
        return super().compile_graph(graph, compiled)


def compile_on_one_rank():
    model, optim = make()
    with using_runtime(Failing(1.0, 1.0)):
        step = compile(train, backend="auto", parallel="replicate")
        for number in range(2 * LAP_CALLS):
            step(model, optim, batch(number))
    step.flush()
    return str(step.programs[0].choice)


def tensor_parallel(is_one_mesh):
    """One data axis of each rank; layers are split over both ranks."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    data = both["dp"]
    if not is_one_mesh:
        data = DeviceMesh.from_group(data.get_group(), "cpu", mesh_dim_names=("dp",))
    model, _ = make()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, both["tp"], plan)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = Timed(*[(1.0, 2.0), (5.0, 3.0)][dist.get_rank()])
    with using_runtime(runtime):
        step = compile(train, backend="auto", mesh=data, parallel="replicate")
        for _ in range(TRIAL_CALLS + 1):
            step(model, optim, torch.ones(3, 4))
    step.flush()
    return runtime.made[-1], str(step.programs[0].choice)


@pytest.mark.parametrize(
    ("is_one_mesh", "taken", "text"),
    [(True, "inductor", "graph 5000.00 ms"), (False, "graph", "outside of the mesh")],
)
def test_ranks_of_another_axis(ranks2, is_one_mesh, taken, text):
    for last, choice in ranks2.run(tensor_parallel, is_one_mesh):
        assert last == taken
        assert text in choice


def test_a_rank_that_cannot_compile(ranks2):
    why = "Inductor cannot compile it: no space left on device"
    text = "backend='auto': graph taken, not measured: "
    assert ranks2.run(compile_on_one_rank) == [
        f"{text}on another rank, {why}",
        text + why,
    ]
