"""Save with two ranks, load with three and four: parameters and optimizer state."""

from pathlib import Path

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from tp_parity import CLOSE, assert_same_state, full, tp_mesh

from torchspmd.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import Ranks


class Model(nn.Module):
    """Every kind of layout: rows, columns, uneven, fused, replicated."""

    def __init__(self, vocabulary: int = 13, hidden: int = 7, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.norm = nn.LayerNorm(8)
        self.gate_up = nn.Linear(8, 2 * hidden)
        self.down = nn.Linear(hidden, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(self.embed(tokens))).chunk(2, -1)
        return self.head(self.down(F.silu(gate) * up))


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "gate_up": FusedColwiseParallel(parts=(7, 7)),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def build(**sizes: int) -> Model:
    torch.manual_seed(4)
    return Model(**sizes).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    tokens = torch.arange(10).reshape(2, 5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).square().sum().backward()
        optimizer.step()


def save(folder: str) -> None:
    model = parallelize_module(build(), tp_mesh(), PLAN)
    optimizer = make_optimizer(model)
    train(model, optimizer, 2)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_and_go_on(folder: str) -> None:
    reference = build()
    theirs = make_optimizer(reference)
    train(reference, theirs, 2)
    model = parallelize_module(build(), tp_mesh(), PLAN)
    optimizer = make_optimizer(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    assert_same_state(model, reference)
    train(reference, theirs, 2)
    train(model, optimizer, 2)
    assert_same_state(model, reference)


def test_save_with_two_ranks_load_with_three_and_four(
    ranks2: Ranks, ranks3: Ranks, ranks4: Ranks, tmp_path: Path
) -> None:
    ranks2.run(save, str(tmp_path))
    ranks3.run(load_and_go_on, str(tmp_path))
    ranks4.run(load_and_go_on, str(tmp_path))


def two_axes() -> None:
    """Full state in and out of a model that FSDP2 shards as well."""
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp")
    )
    # torch's own full-state loading refuses uneven shards on two axes.
    sizes = {"vocabulary": 16, "hidden": 8, "classes": 8}
    plan = {**PLAN, "gate_up": FusedColwiseParallel(parts=(8, 8))}
    model = parallelize_module(build(**sizes), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    reference = build(**sizes)
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(model, options=options)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, **CLOSE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, dict(found), options=options)
    train(reference, make_optimizer(reference), 1)
    train(model, make_optimizer(model), 1)
    tokens = torch.arange(10).reshape(2, 5)
    torch.testing.assert_close(full(model(tokens)), reference(tokens), **CLOSE)


def test_full_state_on_two_axes(ranks4: Ranks) -> None:
    ranks4.run(two_axes)


def sequence_parallel_state() -> None:
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {**PLAN, "embed": embed, "norm": SequenceParallel()}
    model = parallelize_module(build(), tp_mesh(), plan)
    assert_same_state(model, build())


def test_replicated_norms_are_saved_whole(ranks3: Ranks) -> None:
    ranks3.run(sequence_parallel_state)
