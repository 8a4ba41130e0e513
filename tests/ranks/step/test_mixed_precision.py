"""Fully sharded steps under torch's mixed precision policy, beside FSDP2 under the same."""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import train_in_float as plain

from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.step import DataParallel, compile

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows that divide by two ranks, and rows that do not; a head that is used twice."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.head = nn.Linear(7, 7)

    def forward(self, x, scale):
        return self.head(torch.tanh(self.head(self.blocks(self.enter(x))))) * scale


def train(model, optim, batch, scale):
    out = model(batch, scale=scale)
    loss = out.float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach(), out.detach()


def accumulate(model, optim, batch, scale):
    for part in batch.chunk(2):
        model(part, scale=scale).float().square().mean().backward()
    optim.step()
    optim.zero_grad()
    return (model.head.weight.float().sum().detach(),)


def batch_of(step):
    torch.manual_seed(10 + step + 100 * dist.get_rank())
    return torch.randn(6, 6), torch.rand(())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def follow(policy, function=train, **options):
    """Differences from FSDP2, what shadow steps said, and what is sent in which dtype."""
    policy = MixedPrecisionPolicy(**policy)
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    for block in theirs.blocks:  # inside, results are not cast
        fully_shard(block, mp_policy=replace(policy, output_dtype=None))
    fully_shard(theirs, mp_policy=policy)
    mode = DataParallel("fully_shard", mp_policy=policy, **options)
    step = compile(function, parallel=mode, shadow=2)
    optims = adamw(ours), adamw(theirs)
    differences = []
    for number in range(3):
        batch = batch_of(number)
        got, wanted = step(ours, optims[0], *batch), train(theirs, optims[1], *batch)
        if function is train:
            assert [each.dtype for each in got] == [each.dtype for each in wanted]
            differences += [
                (a - b).abs().max().item() for a, b in zip(got, wanted, strict=True)
            ]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        states = optims[0].state[p], optims[1].state[q]
        for a, b in [(p, q), *((states[0][key], states[1][key]) for key in states[0])]:
            assert a.dtype is b.dtype is FP32
            differences.append((_whole(a) - _whole(b)).abs().max().item())
    sent = {key: each.count for key, each in _sent(step).items()}
    return max(differences), step.explain(), sent


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _sent(step):
    return step.programs[-1].ledger.total_by("kind", "dtype")


def run_policies():
    return [
        follow({"param_dtype": BF16}),
        follow({"param_dtype": BF16, "reduce_dtype": FP32}),
        follow(
            {"param_dtype": FP16, "output_dtype": FP32}, reshard_after_forward=False
        ),
    ]


def test_every_policy_has_the_bits_of_fsdp2(ranks2):
    wanted = [(BF16, BF16), (BF16, FP32), (FP16, FP16)]
    for found in ranks2.run(run_policies):
        for (difference, told, sent), dtypes in zip(found, wanted, strict=True):
            assert difference == 0.0
            # The shadow steps compute in this precision too.
            assert "equal bits" in told
            gathered, reduced = (str(each).removeprefix("torch.") for each in dtypes)
            assert {key[1] for key in sent if key[0] == "all_gather"} == {gathered}
            assert {key[1] for key in sent if key[0] == "reduce_scatter"} == {reduced}


def run_reduced_in_less():
    """Whole in float32, reduced in bfloat16, with three ranks and so other sums."""
    return follow({"reduce_dtype": BF16})


def test_a_reduction_in_less_than_the_parameters(ranks3):
    for difference, told, sent in ranks3.run(run_reduced_in_less):
        assert difference < 0.02  # one update of AdamW is 0.01
        assert "shadow steps: 2 calls" in told
        assert ("reduce_scatter", "bfloat16") in sent and (
            "all_gather",
            "float32",
        ) in sent


def run_micro_batches():
    """Gradients of micro-batches are added up in the dtype that they are reduced in."""
    policy = {"param_dtype": BF16, "reduce_dtype": FP32}
    return follow(policy, accumulate, sync_each_backward=False)


def test_micro_batches_are_reduced_once(ranks2):
    for _, told, sent in ranks2.run(run_micro_batches):
        assert sent["reduce_scatter", "float32"] == 1
        assert "equal bits" in told or "of a value's size at most" in told


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def run_beside_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    torch.manual_seed(0)
    ours, reference = Mlp(), Mlp()
    reference.load_state_dict(ours.state_dict())
    parallelize_module(ours, mesh["tp"], plan)
    step = compile(
        plain, parallel="fully_shard", mp_policy=policy, mesh=mesh["dp"], shadow=1
    )
    optims = adamw(ours), adamw(reference)
    torch.manual_seed(1)
    whole = torch.randn(6, 8)
    got = step(ours, optims[0], whole.chunk(2)[mesh.get_local_rank("dp")])
    dist.all_reduce(got, group=mesh.get_group("dp"))
    wanted = plain(reference, optims[1], whole)
    return (got / 2 - wanted).abs().item() / wanted.item(), _sent(step)


def test_beside_tensor_parallel(ranks4):
    for difference, sent in ranks4.run(run_beside_tensor_parallel):
        assert difference < 0.03  # of bfloat16 against float32
        assert ("all_gather", "bfloat16") in sent and (
            "all_gather",
            "float32",
        ) not in sent
