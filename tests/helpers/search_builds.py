"""Training that a search runs in processes of its own: these import it by its name."""

import torch
from torch import nn


def train(layers, width):
    """Two steps of equal layers."""
    blocks = [nn.Linear(width, width, device="cuda") for _ in range(layers)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4096, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
