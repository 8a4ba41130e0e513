"""A step that outlives its process groups says so."""

import pytest
import torch
from torch import nn
from training import train

from torchspmd.errors import UsageError
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


def test_a_step_whose_groups_were_destroyed():
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    overlapping = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    step = compile(
        train,
        parallel_mode=DataParallel("replicate"),
        gm_transformation=overlapping,
    )
    with fake_mesh(2, names=("data",)):
        for _ in range(3):
            step(model, optim, torch.ones(2, 4))
    for batch in (torch.ones(2, 4), torch.ones(3, 4)):  # known, and to be captured
        for use in (step, step.exposure):
            with pytest.raises(UsageError) as caught:
                use(model, optim, batch)
            assert str(caught.value) == (
                "train: this step was captured for the mesh data=2, whose process groups "
                "were destroyed since, so that it cannot be called any more. Call it "
                "before destroy_process_group(), or compile its function again behind "
                "init_process_group()."
            )
    step.close()  # what is pending needs no group any more
