"""Inputs and parameters of unusual kinds, against one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from tp_parity import CLOSE, assert_same_gradients, full, tp_mesh

from torchspmd.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import Ranks


def pooled(how: str) -> None:
    """A mean or maximum over the sequence is a DTensor that is still to be reduced."""
    build = {"norm": nn.LayerNorm(8), "head": nn.Linear(8, 6)}
    reference = nn.ModuleDict(build).double()
    head = ColwiseParallel(output_layouts=Replicate())
    plan = {"norm": SequenceParallel(), "head": head}
    parallel = parallelize_module(copy.deepcopy(reference), tp_mesh(), plan)
    value = torch.randn(2, 4, 8, dtype=torch.float64)
    outputs = []
    for model, part in (
        (reference, value),
        (parallel, value.chunk(2, 1)[dist.get_rank()]),
    ):
        output = model["head"](getattr(model["norm"](part), how)(1))
        output.square().sum().backward()
        outputs.append(output)
    torch.testing.assert_close(full(outputs[1]), outputs[0], **CLOSE)
    assert_same_gradients(parallel, reference)


@pytest.mark.parametrize("how", ("mean", "amax"))
def test_pooling_between_parallel_layers(ranks2: Ranks, how: str) -> None:
    ranks2.run(pooled, how)


def means_into_styles() -> None:
    mesh = tp_mesh()
    value = torch.randn(2, 8, dtype=torch.float64)
    mean = DTensor.from_local(value, mesh, (Partial("avg"),))
    keep = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    for layer, style in (
        (nn.Identity(), PrepareModuleInput(**keep, use_local_output=True)),
        (nn.Linear(8, 8), ReplicateParallel()),
        (nn.Softmax(-1), SequenceParallel(sequence_dim=0)),
        (nn.Linear(8, 8), RowwiseParallel()),
    ):
        expected = layer.double()(value)
        parallel = parallelize_module(copy.deepcopy(layer), mesh, style)
        torch.testing.assert_close(full(parallel(mean)), expected, **CLOSE)


def test_a_mean_still_to_be_taken_into_every_style(ranks2: Ranks) -> None:
    ranks2.run(means_into_styles)


def complex_linear() -> None:
    for style in (
        ColwiseParallel(output_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate()),
    ):
        reference = nn.Linear(8, 6, dtype=torch.complex128)
        parallel = parallelize_module(copy.deepcopy(reference), tp_mesh(), style)
        value = torch.randn(3, 8, dtype=torch.complex128)
        inputs = [value.clone().requires_grad_() for _ in range(2)]
        for model, given in zip((reference, parallel), inputs, strict=True):
            model(given).abs().square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **CLOSE)
        assert_same_gradients(parallel, reference)


def test_gradients_of_a_complex_linear(ranks2: Ranks) -> None:
    ranks2.run(complex_linear)


def plain_norm_weight() -> None:
    reference = nn.RMSNorm(8).double()
    parallel = parallelize_module(
        copy.deepcopy(reference), tp_mesh(), SequenceParallel()
    )
    state = {name: value.clone() for name, value in reference.state_dict().items()}
    parallel.load_state_dict(state, assign=True)
    value = torch.randn(2, 4, 8, dtype=torch.float64)
    reference(value).square().sum().backward()
    parallel(value.chunk(2, 1)[dist.get_rank()]).square().sum().backward()
    assert_same_gradients(parallel, reference)


def test_a_norm_whose_weight_was_assigned(ranks2: Ranks) -> None:
    ranks2.run(plain_norm_weight)
