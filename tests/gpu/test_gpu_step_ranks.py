"""Compiled data-parallel steps on NCCL ranks, against eager DDP and FSDP2's meaning.

Also runs without pytest: ``python tests/gpu/run.py``.
"""

import atexit
import copy
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.step.trial import TRIAL_CALLS
from torchspmd.testing import Ranks

STEPS = 6
RATE = 2**-7  # exact in single precision, in which a CUDA graph reads it


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(self.norm(x))))
        return x


def step(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def autocast_step(model, optim, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def batches():
    torch.manual_seed(100 + dist.get_rank())
    return [torch.randn(16, 64, device="cuda") for _ in range(STEPS)]


def train(step, model, optim, *, last=False):
    losses = []
    for number, batch in enumerate(batches()):
        ends = {"last_train_step": number == STEPS - 1} if last else {}
        optim.param_groups[0]["lr"] = RATE * 2 ** (number % 3)
        losses.append(step(model, optim, batch, **ends))
    return torch.stack(losses)


def pair(dropout=0.0):
    torch.manual_seed(0)
    model = Model(dropout).cuda()
    return model, copy.deepcopy(model)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def transformation(name):
    if name == "plain":
        return None
    return GraphModuleTransformation(
        enable_graph_optimization=True,
        overlap_iterations="overlapped" in name,
        bucket_size_mb=0.02,
    )


def against_ddp(name, backend, eager_step, exact):
    ours, theirs = pair()
    reference = DistributedDataParallel(theirs)
    expected = train(eager_step, reference, fused(reference))
    compiled = compile(
        parallel_mode=DataParallel("replicate"),
        gm_transformation=transformation(name),
        backend=backend,
    )(eager_step)
    found = train(compiled, ours, fused(ours), last=True)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    torch.testing.assert_close(found, expected, **tolerance)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, **tolerance)
    return [event.kind.value for event in compiled.programs[-1].ledger.events]


@functools.cache
def started(count):
    ranks = Ranks(count, backend="nccl")
    atexit.register(ranks.close)
    return ranks


def on_ranks(name, backend="graph", eager_step=step, exact=False, ranks=2):
    kinds = started(ranks).run(
        against_ddp, name, backend, eager_step, exact, timeout=240
    )
    assert kinds[0] == kinds[1] and "all_reduce" in kinds[0]
    return kinds[0]


def test_a_plain_step_is_ddp_bit_for_bit():
    assert len(on_ranks("plain", exact=True)) == 10


def test_the_default_passes_keep_the_bits_on_two_ranks():
    assert len(on_ranks("passes", exact=True)) < 10


def test_overlapped_iterations_keep_the_bits_on_two_ranks():
    on_ranks("overlapped", exact=True)


def test_overlapped_iterations_on_four_ranks():
    on_ranks("overlapped", ranks=4)


def test_a_step_under_autocast():
    on_ranks("passes", eager_step=autocast_step)


def test_inductor():
    on_ranks("plain", backend="inductor")


def test_inductor_with_overlapped_iterations():
    on_ranks("overlapped", backend="inductor")


def timed_backends():
    """Losses beside DDP's, and what this rank has chosen by which times."""
    ours, theirs = pair()
    reference = DistributedDataParallel(theirs)
    compiled = compile(step, parallel="replicate", overlap=True, backend="auto")
    optimizers = fused(ours), fused(reference)
    for _ in range(TRIAL_CALLS // STEPS + 1):
        found = train(compiled, ours, optimizers[0])
        expected = train(step, reference, optimizers[1])
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
    compiled.flush()
    choice = compiled.programs[-1].choice
    sums = [float(each.detach().double().sum()) for each in ours.parameters()]
    return choice.taken, dict(choice.seconds), sums


def test_backends_that_are_timed():
    first, second = started(2).run(timed_backends, timeout=240)
    assert first == second
    taken, seconds, _ = first
    assert seconds[taken] == min(seconds.values()) > 0


def test_a_replayed_step_with_collectives():
    on_ranks("plain", backend="cudagraph")


def test_a_replayed_step_with_passes():
    assert len(on_ranks("passes", backend="cudagraph")) < 10


def sharded():
    ours, theirs = pair()
    reference = DistributedDataParallel(theirs)
    expected = train(step, reference, fused(reference))
    compiled = compile(
        parallel_mode=DataParallel("fully_shard"),
        gm_transformation=transformation("passes"),
    )(step)
    torch.testing.assert_close(train(compiled, ours, fused(ours)), expected)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left.full_tensor(), right.data)


def test_a_fully_sharded_step():
    started(2).run(sharded, timeout=240)


def like_fsdp2(policy=None, shape=None, **options):
    """Losses and parameters of FSDP2, under a policy, on a mesh of one or two axes."""
    policy = MixedPrecisionPolicy(**policy or {})
    names = ("replicate", "shard")[-len(shape or (1,)) :]
    mesh = init_device_mesh(
        "cuda", shape or (dist.get_world_size(),), mesh_dim_names=names
    )
    ours, theirs = pair()
    for layer in (*theirs.layers, theirs):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    expected = train(low_step, theirs, fused(theirs))
    mode = DataParallel("fully_shard", mp_policy=policy)
    compiled = compile(low_step, parallel=mode, mesh=mesh, **options)
    found = train(compiled, ours, fused(ours))
    compiled.flush()
    is_low = policy.param_dtype is not None
    close = {"rtol": 2e-2, "atol": 2e-3} if is_low else {}
    torch.testing.assert_close(found, expected, **close)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left.full_tensor(), right.full_tensor(), **close)


def low_step(model, optim, batch):
    loss = model(batch).float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def test_mixed_precision_is_that_of_fsdp2():
    started(2).run(functools.partial(like_fsdp2, LOW), timeout=240)


def deferred_and_not():
    """Compiled code rounds elsewhere than FSDP2 in bfloat16; the same with and without."""
    mode = DataParallel("fully_shard", mp_policy=MixedPrecisionPolicy(**LOW))
    found = []
    for model, overlap in zip(pair(), (True, False), strict=True):
        compiled = compile(low_step, parallel=mode, overlap=overlap, backend="inductor")
        losses = train(compiled, model, fused(model))
        compiled.flush()
        found.append([losses, *(each.full_tensor() for each in model.parameters())])
    torch.testing.assert_close(*found)


def test_sharded_updates_that_wait_for_the_next_step():
    started(2).run(functools.partial(like_fsdp2, overlap=True), timeout=240)
    started(2).run(deferred_and_not, timeout=240)


def test_shards_and_replicas_of_them():
    hybrid = functools.partial(like_fsdp2, LOW, (2, 2))
    started(4).run(hybrid, timeout=240)


def one_meaning():
    ours, theirs = pair()
    compiled = compile(step)
    mine = batches()
    everyones = [torch.cat(_gathered(batch)) for batch in mine]
    optims = fused(ours), fused(theirs)
    for batch, whole in zip(mine, everyones, strict=True):
        found = compiled(ours, optims[0], batch)
        torch.testing.assert_close(found, step(theirs, optims[1], whole))
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def _gathered(batch):
    parts = [torch.empty_like(batch) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, batch)
    return parts


def test_the_meaning_of_one_device():
    started(2).run(one_meaning, timeout=240)
