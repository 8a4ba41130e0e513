"""Hybrid sharding: shards over one axis, replicas of them over another; beside FSDP2."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import train_in_float as train

from torchspmd.errors import ShadowError
from torchspmd.step import DataParallel, compile

LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Net(nn.Module):
    """Rows that divide by two ranks, and rows that do not."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 9), nn.LayerNorm(9)
        self.down = nn.Linear(9, 6, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))


def accumulate(model, optim, batch):
    for part in batch.chunk(2):
        model(part).float().square().mean().backward()
    optim.step()
    optim.zero_grad()
    return model.down.weight.detach().sum()


def batch_of(step):
    torch.manual_seed(10 + step + 100 * dist.get_rank())
    return torch.randn(6, 8)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def follow(policy):
    """Differences from FSDP2, and what is sent over which axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(**policy)
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    mode = DataParallel("fully_shard", mp_policy=policy)
    step = compile(train, parallel=mode, mesh=mesh, shadow=2)
    optims = adamw(ours), adamw(theirs)
    differences = []
    for number in range(3):
        batch = batch_of(number)
        got, wanted = step(ours, optims[0], batch), train(theirs, optims[1], batch)
        differences.append((got - wanted).abs().item())
        if number == 1:
            exchange((ours, optims[0]), (theirs, optims[1]))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.placements == q.placements and p.device_mesh == q.device_mesh
        states = optims[0].state[p], optims[1].state[q]
        for key in ("exp_avg", "exp_avg_sq"):
            differences.append(apart(states[0][key], states[1][key]))
        differences.append(apart(p, q))
    with step.full_parameters(ours):
        shape = tuple(ours.up.weight.shape)
    sent = step.programs[-1].ledger.total_by("kind", "axis")
    return max(differences), shape, set(sent), step.explain()


def exchange(ours, theirs):
    """Load each other's checkpoint; the next step then shows that nothing is missing."""
    for first, second in ((ours, theirs), (theirs, ours)):
        place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(place)
        dcp.save(states_of(first), checkpoint_id=place[0])
        state = states_of(second)
        dcp.load(state, checkpoint_id=place[0])
        set_state_dict(
            *second, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def states_of(pair):
    return dict(zip(("model", "optim"), get_state_dict(*pair), strict=True))


def apart(one, other):
    return (one.full_tensor() - other.full_tensor()).abs().max().item()


@pytest.mark.parametrize("policy", ({}, LOW))
def test_bits_and_checkpoints_of_fsdp2(ranks4, policy):
    for difference, shape, sent, told in ranks4.run(follow, policy):
        assert difference == 0.0
        assert shape == (9, 8)
        assert sent == {
            ("all_gather", "shard"),
            ("reduce_scatter", "shard"),
            ("all_reduce", "replicate"),
        }
        assert "shadow steps: 2 calls" in told


def run_micro_batches():
    """Once for all micro-batches, over both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = Net()
    mode = DataParallel("fully_shard", sync_each_backward=False)
    step = compile(accumulate, parallel=mode, mesh=mesh, shadow=1, passes=False)
    step(net, adamw(net), batch_of(0))
    sent = step.programs[-1].ledger.total_by("kind", "axis")
    return {key[0]: each.count for key, each in sent.items()}


def test_micro_batches_are_reduced_once(ranks4):
    for sent in ranks4.run(run_micro_batches):
        assert sent["reduce_scatter"] == sent["all_reduce"] == 5


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def draw(model):
    model.up.reset_parameters()
    nn.init.normal_(model.scale, 1.0, 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def train_and_draw(model, optim, batch):
    train(model, optim, batch)
    draw(model)


def drawn(axes):
    """Differences from one process, where every rank has its seed."""
    names = ("replicate", "shard")[-len(axes) :]
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Scaled()
    plain, batch = copy.deepcopy(model), torch.ones(6, 8)
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    step = compile(train_and_draw, parallel="fully_shard", mesh=mesh, shadow=2)
    for number in range(3):
        torch.manual_seed(number)
        step(model, optims[0], batch)
        torch.manual_seed(number)
        train_and_draw(plain, optims[1], batch)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a.full_tensor() - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("axes", [(4,), (2, 2)])
def test_draws_for_shards_are_those_of_one_process(ranks4, axes):
    assert max(ranks4.run(drawn, axes)) < 1e-6


def draw_apart(axes, *, in_step):
    """The error where ranks draw for parameters that they hold alike."""
    names = ("replicate", "shard")[-len(axes) :]
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
    torch.manual_seed(0)
    model, batch = Scaled(), torch.ones(6, 8)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    function = train_and_draw if in_step else train
    step = compile(function, parallel="fully_shard", mesh=mesh, shadow=3)
    step(model, optim, batch)
    torch.manual_seed(dist.get_rank())
    if not in_step:
        draw(model)
    try:
        step(model, optim, batch)
    except ShadowError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize(
    ("axes", "name"), [((4,), "Scaled.scale"), ((2, 2), "Scaled.")]
)
def test_replicas_that_drew_apart_are_found(ranks4, axes, in_step, name):
    for text in ranks4.run(draw_apart, axes, in_step=in_step):
        assert f"replicated parameter {name}" in text
        assert "has other values on rank" in text
