"""Whole parameters of a fully sharded model inside a ``with`` block."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import train_detached as train

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step import DataParallel, compile


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)  # rows that two ranks share unevenly
        self.rnn = nn.GRU(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


def evaluated():
    """Outputs, averages and errors around training, beside those of one process."""
    x = torch.tensor([[0, 1], [2, 4]])
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    optims = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    step = compile(train, parallel_mode=DataParallel("fully_shard"))
    outputs, averages, errors = [], [AveragedModel(plain)], []
    for number in range(3):
        step(model, optims[0], x)
        train(plain, optims[1], x)
        shards = list(model.parameters())
        with step.full_parameters(model), torch.no_grad():
            outputs.append((model(x) - plain(x)).abs().max().item())
            assert model.head.weight is model.embed.weight
            if number == 0:
                averages.append(AveragedModel(model))
            averages[1].update_parameters(model)
            names = list(model.state_dict())
            try:
                step(model, optims[0], x)
            except CaptureError as error:
                errors.append(str(error))
        averages[0].update_parameters(plain)
        assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))
        assert names == list(model.state_dict())
    for each in (model, copy.deepcopy(model)):
        try:
            each(x)
        except UsageError as error:
            errors.append(str(error))
    try:
        with step.full_parameters(model), torch.no_grad():
            model.embed.weight.zero_()
    except UsageError as error:
        errors.append(str(error))
    pairs = zip(averages[0].parameters(), averages[1].parameters(), strict=True)
    return max(outputs), max((a - b).abs().max().item() for a, b in pairs), errors


def test_a_fully_sharded_model_is_evaluated_averaged_and_saved(ranks2):
    for off, averaged, errors in ranks2.run(evaluated):
        assert off < 1e-6
        assert averaged < 1e-6
        assert "embed.weight of argument args[0] is gathered for a while" in errors[0]
        assert "embed.weight was written inside of the block" in errors[-1]
        assert all("with step.full_parameters(model)" in text for text in errors[3:5])
        assert len(errors) == 6


def averaged_in_the_step(kind):
    """Of the shards, by a copy of the model from before the first step."""
    options = {
        "mean": {},
        "moving": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "own": {"avg_fn": lambda mean, new, count: 0.9 * mean + 0.1 * new},
    }[kind]

    def step(model, optim, average, x):
        train(model, optim, x)
        average.update_parameters(model)

    x = torch.tensor([[0, 1], [2, 4]])
    torch.manual_seed(0)
    models = [Tied()]
    models.append(copy.deepcopy(models[0]))
    averages = [AveragedModel(each, **options) for each in models]
    optims = [torch.optim.SGD(each.parameters(), lr=0.5) for each in models]
    compiled = compile(step, parallel_mode=DataParallel("fully_shard"))
    for _ in range(4):
        for each, *call in zip((compiled, step), models, optims, averages, strict=True):
            each(*call, x)
    pairs = zip(averages[0].parameters(), averages[1].parameters(), strict=True)
    off = max((a.full_tensor() - b).abs().max().item() for a, b in pairs)
    return off, int(averages[0].n_averaged), type(averages[0].module.rnn.bias_ih_l0)


@pytest.mark.parametrize("kind", ["mean", "moving", "own"])
def test_shards_are_averaged_in_the_step(ranks2, kind):
    for off, count, held in ranks2.run(averaged_in_the_step, kind):
        assert off < 1e-6
        assert count == 4
        assert held is DTensor


def pruned():
    """Training between pruning and its end, beside that of one process."""
    x = torch.ones(2, 4)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))]
    models.append(copy.deepcopy(models[0]))
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    step = compile(train, parallel_mode=DataParallel("fully_shard"))
    errors = []

    def train_both():
        step(models[0], optims[0], x)
        train(models[1], optims[1], x)

    train_both()
    for model in models:
        with step.full_parameters(model):
            prune.l1_unstructured(model[0], "weight", 0.3)
            prune.l1_unstructured(model[0], "bias", 0.5)
    train_both()
    train_both()
    try:
        with step.full_parameters(models[0]):
            prune.remove(models[0][0], "bias")
    except UsageError as error:
        errors.append(str(error))
    prune.remove(models[1][0], "bias")
    shards = models[0][0].weight_orig, models[0][0].bias
    masks = models[0][0].weight_mask, (models[1][0].bias != 0).float()
    with torch.no_grad():
        for shard, mask in zip(shards, masks, strict=True):
            shard.mul_(distribute_tensor(mask, shard.device_mesh, shard.placements))
    for model in models:
        with step.full_parameters(model):
            prune.remove(model[0], "weight")
    assert models[0][0].weight is shards[0]
    train_both()
    pairs = [dict(each.named_parameters()) for each in models]
    assert pairs[0].keys() == pairs[1].keys()
    off = [
        (pairs[0][name].full_tensor() - pairs[1][name]).abs().max() for name in pairs[1]
    ]
    return max(off).item(), errors


def test_parameters_are_pruned_while_they_are_whole(ranks2):
    for off, (error,) in ranks2.run(pruned):
        assert off < 1e-6
        assert "0.bias_orig was written inside of the block" in error
