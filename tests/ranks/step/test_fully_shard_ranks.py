"""Fully sharded steps on real ranks: sizes, uses of parameters, checkpoints, evaluation."""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from training import train_silently

from torchspmd import clip_grad_norm_
from torchspmd.errors import AgreementError
from torchspmd.step import DataParallel, compile

MODE = DataParallel("fully_shard", reduce="avg")


class Sizes(nn.Module):
    """A scalar, one row, two rows, no rows, five rows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.randn(1, 8))
        self.two = nn.Parameter(torch.randn(2))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.five = nn.Linear(8, 5)

    def forward(self, x):
        y = self.five(x + self.one) * self.scale
        return y * self.two.sum() + self.none.sum()


class Waves(nn.Module):
    """Three rows of complex numbers."""

    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(3, 5, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.waves.sum(0), n=8)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Uses(nn.Module):
    """Parameters that are used in every way but by their own module's forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 5, bias=False)
        self.inner = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = Product.apply(x, self.weight)
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        h = x[:, None, :].expand(-1, 3, -1)
        x = self.attention(h, h, h, need_weights=False)[0].mean(1)
        return F.linear(x, self.head.weight)

    def encode(self, x):
        return x @ self.weight.T


def clipped(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    norm = norm + nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optim.step()
    optim.zero_grad()
    return norm


def everything(model, optim, batch):
    with torch.no_grad():
        target = model(batch)
    for scale in (1.0, 0.5):  # two backwards
        loss = (model(batch * scale) * 2 - target).square().mean()
        loss = loss + model.encode(batch).square().mean()
        loss.backward()
    decay = 0.1 * sum(p.square().sum() for p in model.parameters())
    decay.backward()
    optim.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)  # stays for the next step
    return decay


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(number):
    """The whole batch, and this rank's part."""
    torch.manual_seed(100 + number)
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = torch.randn(3 * size, 8)
    return batch, batch[3 * rank : 3 * rank + 3].clone()


def pair(model, optimizer):
    """Two equal models, each with its own optimizer."""
    torch.manual_seed(0)
    first = model()
    second = copy.deepcopy(first)
    return [(each, optimizer(each.parameters())) for each in (first, second)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def worst(ours, reference):
    """The largest difference in parameters, gradients and state."""
    (model, optim), (other, other_optim) = ours, reference
    pairs = []
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        state, expected = optim.state[p], other_optim.state[q]
        assert list(state) == list(expected)
        assert (p.grad is None) == (q.grad is None)
        pairs += [(p, q), *((state[key], expected[key]) for key in state)]
        pairs += [(p.grad, q.grad)] if p.grad is not None else []
    wholes = [(full(p), q) for p, q in pairs]
    assert all(p.shape == q.shape for p, q in wholes)
    return max((p - q).abs().max().item() for p, q in wholes if q.numel())


def follow(function, model, optimizer, mode=MODE, *, steps=2):
    ours, reference = pair(model, optimizer)
    step = compile(parallel_mode=mode)(function)
    difference = 0.0
    for number in range(steps):
        whole, part = rows(number)
        got, expected = step(*ours, part), function(*reference, whole)
        difference = max(difference, (got - expected).abs().max().item())
    return max(difference, worst(ours, reference))


def run_sizes():
    return max(follow(clipped, Sizes, fused), follow(clipped, Waves, adamw))


def test_sizes_and_clipping(ranks4):
    for found in ranks4.run(run_sizes):
        assert found < 2e-5


def run_uses():
    kept = DataParallel("fully_shard", reshard_after_forward=False)
    both = follow(everything, Uses, sgd)  # the second step has gradients already
    return both, follow(everything, Uses, sgd, kept, steps=1)


def test_parameters_used_in_every_way(ranks2):
    for found in ranks2.run(run_uses):
        assert max(found) < 2e-5, found


def mlp():
    return nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))


def run_sum():
    """Gradients are summed: the mean over all rows, times the number of ranks."""

    def scaled(model, optim, batch):
        (model(batch).square().mean() * dist.get_world_size()).backward()
        optim.step()
        optim.zero_grad()

    ours, reference = pair(mlp, momentum)
    step = compile(parallel_mode=DataParallel("fully_shard", reduce="sum"))(
        train_silently
    )
    for number in range(2):
        whole, part = rows(number)
        step(*ours, part)
        scaled(*reference, whole)
    return worst(ours, reference)


def run_warm():
    """State and gradients that are there before the first compiled step."""
    ours, reference = pair(mlp, adamw)
    whole, part = rows(0)
    for each in (ours, reference):
        train_silently(*each, whole)
        each[0](whole).square().mean().backward()
    start = ours[0][0].weight.detach().clone()
    step = compile(parallel_mode=MODE)(train_silently)
    for _ in range(2):
        step(*ours, part)
        train_silently(*reference, whole)
    assert not torch.allclose(full(ours[0][0].weight), start)
    return worst(ours, reference)


def test_sums_and_a_warm_start(ranks2):
    for found in ranks2.run(run_sum) + ranks2.run(run_warm):
        assert found < 2e-5


def scaled(model, optim, scaler, batch):
    weights = torch.ones_like(batch[:, :4])
    weights[:, 3] = batch[:, 0]  # only the last row's gradient depends on it
    scaler.scale((model(batch[:, 1:]) * weights).mean()).backward()
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()


def run_scaler():
    """An infinity in the rows of one rank: every rank skips the step."""
    ours, reference = pair(lambda: nn.Linear(7, 4, bias=False), momentum)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0) for _ in range(2)]
    step = compile(parallel_mode=MODE)(scaled)
    for number in range(3):
        whole, part = rows(number)
        if number == 1:
            whole[:, 0] = part[:, 0] = float("inf")
        step(*ours, scalers[0], part)
        scaled(*reference, scalers[1], whole)
    scales = [scaler.get_scale() for scaler in scalers]
    return worst(ours, reference), scales


def test_a_skipped_step_is_skipped_on_every_rank(ranks2):
    for difference, scales in ranks2.run(run_scaler):
        assert difference < 2e-5
        assert scales == [1.0, 1.0]


def run_checkpoint():
    """Sharded and whole checkpoints, and evaluation by a second compiled step."""
    (model, optim), (other, _) = pair(mlp, adamw)
    step = compile(parallel_mode=MODE)(train_silently)
    step(model, optim, rows(0)[1])
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    dcp.save(
        dict(zip("mo", get_state_dict(model, optim), strict=True)),
        checkpoint_id=place[0],
    )
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)
    step(model, optim, rows(1)[1])
    moved = [full(p).clone() for p in model.parameters()]
    state = dict(zip("mo", get_state_dict(model, optim), strict=True))
    dcp.load(state, checkpoint_id=place[0])
    set_state_dict(
        model, optim, model_state_dict=state["m"], optim_state_dict=state["o"]
    )
    step(model, optim, rows(1)[1])
    again = [full(p) for p in model.parameters()]
    other.load_state_dict(whole)  # first: torch puts shards into the dict it is given
    set_model_state_dict(model, whole, options=options)
    evaluate = compile(parallel_mode=MODE)(lambda model, batch: model(batch))
    batch = rows(2)[1]
    return (
        all(torch.equal(p, q) for p, q in zip(moved, again, strict=True)),
        torch.equal(evaluate(model, batch), other(batch)),
        len(step.programs),
    )


def test_checkpoints_and_evaluation(ranks2):
    for found in ranks2.run(run_checkpoint):
        assert found == (True, True, 1)


def run_other_values():
    torch.manual_seed(dist.get_rank())
    model = mlp()
    before = list(model.parameters())
    try:
        compile(parallel_mode=MODE)(train_silently)(model, momentum(before), rows(0)[1])
    except AgreementError as error:
        same = [p is q for p, q in zip(before, model.parameters(), strict=True)]
        return str(error), all(same)
    return None


def test_ranks_with_other_values(ranks2):
    for text, unchanged in ranks2.run(run_other_values):
        assert "ranks hold other values of the same tensors" in text
        assert "values 0: rank 0 has Sequential.0.weight [7, 8] #" in text
        assert "would mix two models" in text and "the same seed" in text
        assert unchanged
