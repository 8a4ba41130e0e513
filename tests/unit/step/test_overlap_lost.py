"""Overlapped steps that overlap with nothing say so."""

import warnings

import pytest
import torch
from torch import nn

from torchspmd.errors import PassWarning
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import fake_world


def train(clears_gradients, count):
    with fake_world(2):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)

        @compile(
            parallel_mode=DataParallel("replicate"),
            gm_transformation=GraphModuleTransformation(
                enable_graph_optimization=True, overlap_iterations=True
            ),
        )
        def step(model, optim, batch):
            optim.zero_grad()
            model(batch).sum().backward()
            optim.step()
            if clears_gradients:
                optim.zero_grad()

        with step:
            for _ in range(count):
                step(model, optim, torch.ones(2, 4))


def test_gradients_that_stay_keep_steps_from_overlapping():
    with pytest.warns(PassWarning, match="little or nothing overlaps") as caught:
        train(False, 16)
    (warning,) = [w for w in caught if "nothing overlaps" in str(w.message)]  # once
    text = str(warning.message)
    assert "(Linear.weight.grad, Linear.bias.grad; 2 in all)" in text
    assert "Clear gradients in the step (optim.zero_grad())" in text


def test_steps_that_overlap_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(True, 16)
