"""The passes on captured steps: every edit is proved, and wrong ones are caught."""

import warnings

import pytest
import torch
from torch import fx, nn
from training import train

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import DataParallel, compile, graph_optimization_pass
from torchspmd.step.graph.metadata import output_values, written_state
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.step.lower.in_place import compute_in_place
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    default_passes,
    schedule_comm_wait,
    split_optimizer,
)
from torchspmd.step.passes.runner import observing_passes
from torchspmd.testing import fake_mesh

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}
MODES = {
    "one device": None,
    "replicate": DataParallel("replicate", reduce="avg"),
    "fully_shard": DataParallel("fully_shard", reduce="avg"),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(6, 7), nn.LayerNorm(7)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(7, 5)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))


@pytest.fixture(scope="module")
def captured():
    """Gives a copy of the graph of a second step, when the optimizer has its states."""
    with fake_mesh(4, ("dp",)) as mesh:
        kept = {}

        def capture(optimizer, mode):
            if (optimizer, mode) not in kept:
                kept[optimizer, mode] = _capture(optimizer, mode, mesh)
            module = kept[optimizer, mode]
            return fx.GraphModule(module, copy_graph(module.graph)[0])

        yield capture


def _capture(optimizer, mode, mesh):
    model = Net()
    optim = OPTIMIZERS[optimizer](model.parameters())
    compiled = compile(mesh=mesh, parallel_mode=MODES[mode])(train)
    for _ in range(2):
        compiled(model, optim, torch.randn(4, 6))
    return compiled.programs[-1].graph


@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        ("adamw", "one device"),
        ("adam", "replicate"),
        ("adam", "fully_shard"),
        ("sgd", "fully_shard"),
    ],
)
def test_every_pass_is_proved(optimizer, mode, captured):
    gm = captured(optimizer, mode)
    reports = []
    with observing_passes(lambda report, *graphs: reports.append(report)):
        for each in default_passes(bucket_size_mb=1.0):
            each(gm)
        gradient = next(n for n in gm.graph.nodes if n.name.startswith("wait"))
        split_optimizer(gm, [gradient])
    assert sum(report.outcome.changed > 0 for report in reports) >= 2
    for report in reports:
        assert report.proof.startswith("proved equal"), str(report)
    before, mapping = copy_graph(gm.graph)
    values = output_values(gm.graph)
    states = {values[i]: place for i, place in written_state(gm.graph).items()}
    compute_in_place(gm.graph, states)
    assert str(check_edit(before, gm.graph, mapping)) == "proved equal"


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
def test_rank_major_buckets_are_proved(mode, captured):
    gm = captured("adam", mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PassWarning)
        for report in (
            comm_fusion_with_concat(gm, 1.0, layout="rank_major"),
            schedule_comm_wait(gm),
        ):
            assert report.proof == "proved equal"


def _swap_pieces(gm):
    """A bucket's first two results of one size, the wrong way round."""
    items = [
        node
        for node in gm.graph.nodes
        if node.name.startswith("getitem") and "split_with_sizes" in node.args[0].name
    ]
    one, two = next(
        (a, b)
        for a in items
        for b in items
        if a is not b and a.meta["val"].shape == b.meta["val"].shape
    )
    one.args, two.args = two.args, one.args


def _lose_a_reduction(gm):
    start = next(n for n in gm.graph.nodes if n.name.startswith("all_reduce"))
    wait = next(iter(start.users))
    wait.replace_all_uses_with(start.args[0])


def _another_scale(gm):
    update = next(n for n in gm.graph.nodes if n.name.startswith("_fused_adam"))
    update.kwargs = {**update.kwargs, "beta1": 0.5}


@pytest.mark.parametrize("edit", [_swap_pieces, _lose_a_reduction, _another_scale])
def test_wrong_passes_are_refused(edit, captured):
    gm = captured("adam", "replicate")
    comm_fusion_with_concat(gm, 1.0)
    names = [node.name for node in gm.graph.nodes]
    wrong = graph_optimization_pass(prerequisites=[], apply_after=[])(edit)
    with pytest.raises(LegalityError, match=r"next value of arg\d+_1 \(Net\."):
        wrong(gm)
    assert [node.name for node in gm.graph.nodes] == names
