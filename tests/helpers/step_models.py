"""Models, optimizers and a reference for the tests of compiled steps."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Tied(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = x[:, :4].abs().mul(10).long() % 11
        return self.head(self.embed(tokens)).mean(1)


class Heads(nn.Module):
    """A norm for each head between column-wise and row-wise layers, as in Qwen3."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(8, 16),
            nn.RMSNorm(4),
            nn.Linear(16, 8),
        )

    def forward(self, x):
        heads = self.up(x).unflatten(-1, (-1, 4))
        return self.down(self.norm(heads).flatten(-2))


class Attention(nn.Module):
    """A pre-norm attention block on sequences of four."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        h = x[:, None, :].expand(-1, 4, -1)
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(h)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (h + self.out(mixed.transpose(1, 2).flatten(2))).mean(1)


class Partly(nn.Module):
    """One frozen layer, one that is never used."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.used = nn.Linear(8, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.used(F.relu(self.frozen(x)))


def linear():
    return nn.Linear(8, 4)


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def norm():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def drop():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 4))


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 3, 1),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


MODELS = {
    "mlp": mlp,
    "norm": norm,
    "drop": drop,
    "conv": convolution,
    "tied": Tied,
    "attention": Attention,
    "partly": Partly,
}


def two_groups(parameters):
    first, *rest = list(parameters)
    return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)


class Lion(torch.optim.Optimizer):
    """A custom optimizer that counts its steps with a Python number."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["average"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_(
                    state["average"].tanh(), alpha=-group["lr"] / state["step"]
                )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "momentum_without_decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum_fused": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True
    ),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.99)),
    "radam_foreach": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2.0),
    "asgd_foreach": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2.0, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adafactor_foreach": lambda p: torch.optim.Adafactor(
        p, lr=0.1, weight_decay=0.01, foreach=True
    ),
    "two_groups": two_groups,
    "lion": Lion,
}


def build(model, optimizer):
    """Two equal models, each with its own optimizer."""
    torch.manual_seed(0)
    first = linear() if model == "linear" else MODELS[model]()
    second = copy.deepcopy(first)
    return [
        (each, OPTIMIZERS[optimizer](p for p in each.parameters() if p.requires_grad))
        for each in (first, second)
    ]


def difference(ours, reference):
    """The largest absolute difference in parameters, buffers and optimizer state."""
    (model, optimizer), (other, other_optimizer) = ours, reference
    pairs = list(
        zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        states = optimizer.state.get(left, {}), other_optimizer.state.get(right, {})
        assert list(states[0]) == list(states[1]), (states[0].keys(), states[1].keys())
        pairs += [(states[0][key], states[1][key]) for key in states[0]]
        assert (left.grad is None) == (right.grad is None)
    return max(_distance(left, right) for left, right in pairs)


def _distance(left, right):
    if not isinstance(left, torch.Tensor):
        return abs(left - right)
    if hasattr(left, "full_tensor"):
        left = left.full_tensor()
    assert left.shape == right.shape and left.dtype == right.dtype
    return (left.double() - right.double()).abs().max().item() if left.numel() else 0.0
