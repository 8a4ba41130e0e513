"""A pass that ties a graph to a number of ranks, which virtual ranks then must have."""

import pytest
import torch
from torch import nn

from torchspmd.errors import PassWarning
from torchspmd.step import (
    CostModel,
    DataParallel,
    GraphModuleTransformation,
    Verification,
    compile,
)
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


def train_step(model, optim, tokens):
    model(tokens).square().sum().backward()
    optim.step()
    optim.zero_grad()


def certificate(max_ranks):
    """Of a step whose captured graph runs on any number of ranks, but not what runs."""
    passes = GraphModuleTransformation(
        enable_graph_optimization=True,
        gather_embeddings=True,
        cost=CostModel(network_bytes=1e6, latency_seconds=1e-6),
    )
    model = nn.Embedding(200, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_mesh(8, ("dp",)):
        run = compile(
            gm_transformation=passes,
            parallel_mode=DataParallel("replicate"),
            verify=Verification(max_ranks=max_ranks),
        )(train_step)
        run(model, optim, torch.ones(2, 3, dtype=torch.long))
    return str(run.programs[-1].certificate)


def test_it_is_run_on_as_many_ranks_as_it_is_made_for():
    text = " ".join(certificate(8).split())
    assert "pass gather_embedding_gradients" in text
    assert "8 virtual ranks" in text
    assert "graphs were not compared" not in text


def test_more_ranks_than_may_be_run_are_said_to_be_unchecked():
    with pytest.warns(PassWarning, match="graphs are not compared. .*8"):
        text = certificate(4)
    assert "graphs were not compared" in text
