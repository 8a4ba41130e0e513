"""What a step returns stays what it was, whatever passes do with its states."""

import functools

import pytest
import torch
from torch import nn

from torchspmd.errors import LegalityError
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.step.passes import remove_copy_from_optimizer
from torchspmd.testing import fake_mesh

pytestmark = [pytest.mark.filterwarnings("ignore::torchspmd.errors.PassWarning")]

TRANSFORMATIONS = {
    "default": lambda: GraphModuleTransformation(enable_graph_optimization=True),
    "alone": lambda: GraphModuleTransformation(passes=[remove_copy_from_optimizer]),
    "overlapped": lambda: GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    ),
}


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x):
        return self.linear(x)


def average(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        new = torch.lerp(model.mean, batch[0], 0.1)
        model.mean.copy_(new)
    return loss, new


def average_in_place(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        model.mean.lerp_(batch[0], 0.1)
    return loss, model.mean.clone()


def train(mode, transformation, function=average):
    """Every step's result as it was returned, as it is in the end, and the rest."""
    with fake_mesh(2, ("dp",)) as mesh:
        torch.manual_seed(0)
        model = Averaged()
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        step = compile(
            mesh=mesh,
            parallel_mode=DataParallel(mode),
            gm_transformation=transformation,
        )(function)
        results, kept = [], []
        for _ in range(4):
            _, result = step(model, optim, torch.randn(4, 8))
            results.append(result)
            kept.append(result.clone())
        step.flush()
        return results, kept, model, step


@functools.cache
def train_plainly(mode):
    return train(mode, None)


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_result_is_not_the_buffer(name, mode):
    expected, _, reference, plain = train_plainly(mode)
    results, kept, model, step = train(mode, TRANSFORMATIONS[name]())
    assert all(map(torch.equal, results, expected))
    assert all(map(torch.equal, results, kept))
    results[-1].add_(1000)
    assert torch.equal(model.mean, reference.mean)
    assert step.programs[-1].is_deferring == (name == "overlapped")
    counts = [each.programs[-1].in_place.num_in_place for each in (plain, step)]
    assert counts[0] == counts[1] >= 4


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
def test_the_pass_says_what_it_left(mode):
    transformation = TRANSFORMATIONS["alone"]()
    train(mode, transformation)
    (report,) = transformation.reports
    assert report.outcome.changed == 0
    assert [line for line in report.outcome.refused if line.startswith("lerp")] == [
        "lerp for arg0_1 is handed out by the step (output 6, a result), which must not "
        "be the memory of a state"
    ]


def drop_copies(gm):
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.clone.default:
            node.replace_all_uses_with(node.args[0])


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
def test_a_pass_that_drops_a_returned_copy_is_refused(mode):
    transformation = GraphModuleTransformation(passes=[drop_copies])
    with pytest.raises(LegalityError) as caught:
        train(mode, transformation, average_in_place)
    text = str(caught.value)
    assert text.startswith("drop_copies would change what the graph computes")
    assert "(next value of arg0_1 (Averaged.mean)) and output " in text
    assert "now lie in the same memory. Keep the copy" in text
