"""The training steps that most tests of compiled steps use."""

import torch
from torch import nn


def train(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def train_clipped(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    return loss


def train_detached(model, optim, batch):
    """Return a loss without its history."""
    return train(model, optim, batch).detach()


def train_in_float(model, optim, batch):
    """Compute the loss in float32, whatever the model computes in."""
    loss = model(batch).float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def train_own_loss(model, optim, batch):
    """Train a model that returns its loss."""
    loss = model(batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def train_sum(model, optim, batch):
    """Take the sum of the outputs for the loss, and return nothing."""
    model(batch).sum().backward()
    optim.step()
    optim.zero_grad()


def train_silently(model, optim, batch):
    """Return nothing."""
    model(batch).square().mean().backward()
    optim.step()
    optim.zero_grad()


def train_keeping_gradients(model, optim, batch):
    """Clear gradients first, so that those of the last step stay."""
    optim.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    return loss


def train_scaled(model, optim, scaler, batch):
    loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optim)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()
    return loss


class DoublesGradients(torch.optim.Optimizer):
    """Doubles the gradients and lets another optimizer step."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 2
        self.inner.step()
