"""Layouts that a layer would mistake: it refuses them and names the way out."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchspmd.errors import LayoutError
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.parallel.redistribute import reduce_other_partials
from torchspmd.testing import fake_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(2, ("tp",)) as found:
        yield found


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.up.sum(0)


TOKENS = torch.arange(4)
WHOLE = {"input_layouts": Replicate()}
LAYERS = {
    "colwise": (nn.Linear(8, 6), ColwiseParallel(output_layouts=Replicate()), (3, 8)),
    "rowwise": (nn.Linear(8, 8, bias=False), RowwiseParallel(**WHOLE), (8, 4)),
    "rows of a table": (nn.Embedding(7, 4), RowwiseParallel(**WHOLE), (4, 4)),
    "columns of a table": (nn.Embedding(7, 4), ColwiseParallel(), (7, 2)),
    "experts": (Expert(), ExpertParallel(), (2, 8)),
}


@pytest.mark.parametrize("kind", ("plain", "replicated"))
@pytest.mark.parametrize("name", LAYERS)
def test_a_parameter_that_is_assigned_whole(
    name: str, kind: str, mesh: DeviceMesh
) -> None:
    layer, style, shape = LAYERS[name]
    parallel = parallelize_module(copy.deepcopy(layer), mesh, style)
    value: Any = TOKENS if isinstance(layer, nn.Embedding) else torch.randn(3, 8)
    parallel(value)  # the layer remembers shapes of inputs; it must still look
    state = layer.state_dict()
    if kind == "replicated":
        state = {
            key: DTensor.from_local(whole, mesh, (Replicate(),))
            for key, whole in state.items()
        }
    parallel.load_state_dict(state, assign=True)
    with pytest.raises(LayoutError) as caught:
        parallel(value)
    text = str(caught.value)
    (key, weight), *_ = layer.state_dict().items()
    assert f"{type(style).__name__} on the mesh tp=2: this rank's part of" in text
    assert f"{key!r} has shape {tuple(weight.shape)}, its layout gives {shape}" in text
    assert "load_state_dict(..., assign=True)" in text
    assert "full_state_dict=True" in text


def test_a_bias_in_another_layout(mesh: DeviceMesh) -> None:
    style = RowwiseParallel(input_layouts=Replicate())
    parallel = parallelize_module(nn.Linear(8, 2), mesh, style)
    # One element would spread over both features.
    parallel.bias = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, (Shard(0),)))
    with pytest.raises(LayoutError, match=r"'bias' has shape \(1,\).*gives \(2,\)"):
        parallel(torch.randn(3, 8))


def test_local_shards_in_the_place_of_parameters(mesh: DeviceMesh) -> None:
    parallel = parallelize_module(nn.Linear(8, 6), mesh, ColwiseParallel())
    shards = {name: p.to_local() for name, p in parallel.named_parameters()}
    output = torch.func.functional_call(parallel, shards, torch.randn(2, 8))
    assert output.shape == (2, 3)


UNEVEN = (
    r"shape \(2, 5, 8\); the 5 elements of dimension 1 do not divide over 2 ranks"
    r".*use_local_output=False, or pad the dimension to a multiple of 2"
)


@pytest.mark.parametrize(
    "layer, style, value",
    [
        (
            nn.Embedding(10, 8),
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            torch.arange(10).view(2, 5),
        ),
        (
            nn.Linear(8, 8),
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            torch.randn(2, 5, 8),
        ),
        (nn.LayerNorm(8), SequenceParallel(use_local_output=True), None),
        (nn.RMSNorm(8), SequenceParallel(use_local_output=True), None),
        (nn.Softmax(-1), SequenceParallel(use_local_output=True), None),
        (Expert(), ExpertParallel(output_layouts=Shard(1)), torch.randn(2, 5, 8, 8)),
        (
            nn.Identity(),
            PrepareModuleInput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(1),
                use_local_output=True,
            ),
            torch.randn(2, 5, 8),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_local_output_that_is_cut_unevenly(
    layer: nn.Module, style: Any, value: torch.Tensor | None, mesh: DeviceMesh
) -> None:
    if value is None:
        value = DTensor.from_local(torch.randn(2, 5, 8), mesh, (Replicate(),))
    parallel = parallelize_module(copy.deepcopy(layer), mesh, style)
    for _ in range(2):  # remembered calls too
        with pytest.raises(LayoutError, match=UNEVEN):
            parallel(value)


def test_uneven_parts_may_leave_as_a_dtensor(mesh: DeviceMesh) -> None:
    style = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    )
    embedding = parallelize_module(nn.Embedding(10, 8), mesh, style)
    norm = parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel())
    assert norm(embedding(torch.arange(10).view(2, 5))).shape == (2, 5, 8)


def test_a_part_that_is_larger_than_a_shard(mesh: DeviceMesh) -> None:
    parallel = parallelize_module(
        nn.Linear(8, 6), mesh, ColwiseParallel(input_layouts=Shard(0))
    )
    meta = torch.empty(4, 8, device="meta")
    wrong = DTensor.from_local(
        torch.randn(4, 8), mesh, (Shard(0),), shape=meta.shape, stride=meta.stride()
    )
    with pytest.raises(LayoutError, match=r"has 4 elements.*at most 2.*true layout"):
        parallel(wrong)


def test_a_term_of_a_sum_needs_no_settling(mesh: DeviceMesh) -> None:
    term = DTensor.from_local(torch.randn(2, 8), mesh, (Partial(),))
    assert reduce_other_partials(term) is term


def test_autocast_leaves_doubles_alone(mesh: DeviceMesh) -> None:
    parallel = parallelize_module(nn.Linear(8, 6).double(), mesh, ColwiseParallel())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = parallel(torch.randn(2, 8, dtype=torch.float64))
    assert output.dtype == torch.float64
