"""Compare a parallel module with the same module on one device, inside a rank."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchspmd.parallel import parallelize_module

# Everything runs in float64: what remains is the order of a few additions.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def part(tensor: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole tensor, by DTensor's own rules."""
    if isinstance(layout, Partial):
        return tensor * (mesh.get_local_rank() + 1) / sum(range(1, mesh.size() + 1))
    placed = distribute_tensor(tensor, mesh, (layout,), src_data_rank=None)
    return placed.to_local().clone()


def whole(
    tensor: torch.Tensor, layout: Placement, mesh: DeviceMesh, shape: torch.Size
) -> torch.Tensor:
    """The whole tensor from the parts, by DTensor's own rules."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    meta = torch.empty(shape, device="meta")
    return DTensor.from_local(
        tensor, mesh, (layout,), shape=meta.shape, stride=meta.stride()
    ).full_tensor()


def gradient_of(layout: Placement) -> Placement:
    return Replicate() if isinstance(layout, Partial) else layout


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_gradients(parallel: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    for name, parameter in parallel.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is None:
            continue
        assert isinstance(parameter, DTensor) == isinstance(parameter.grad, DTensor)
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(
            full(parameter.grad), expected, **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_state(parallel: nn.Module, reference: nn.Module) -> None:
    expected = reference.state_dict()
    found = parallel.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            full(value), expected[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_layer(
    module: nn.Module,
    style: Any,
    given: Placement,
    wanted: Placement,
    value: torch.Tensor,
    *,
    as_dtensor: bool = False,
) -> None:
    """Forward, every gradient and one optimizer step of one layer."""
    mesh = tp_mesh()
    reference = module.double()
    parallel = parallelize_module(copy.deepcopy(reference), mesh, style)
    expected_input = value.clone().requires_grad_(value.is_floating_point())
    expected = reference(expected_input)
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    expected.backward(weights)

    local = part(value, given, mesh).requires_grad_(value.is_floating_point())
    argument: torch.Tensor = local
    if as_dtensor:
        meta = torch.empty(value.shape, device="meta")
        argument = DTensor.from_local(
            local, mesh, (given,), shape=meta.shape, stride=meta.stride()
        )
    output = parallel(argument)
    torch.testing.assert_close(
        whole(output, wanted, mesh, expected.shape), expected, **CLOSE
    )
    output_weights = part(weights, gradient_of(wanted), mesh)
    if isinstance(output, DTensor):
        output = output.to_local()
    output.backward(output_weights)
    if expected_input.grad is not None:
        assert local.grad is not None
        found = whole(local.grad, gradient_of(given), mesh, value.shape)
        torch.testing.assert_close(found, expected_input.grad, **CLOSE)
    finish_step(parallel, reference)


def finish_step(parallel: nn.Module, reference: nn.Module) -> None:
    """Compare the gradients, take one optimizer step, compare the parameters."""
    assert_same_gradients(parallel, reference)
    for model in (parallel, reference):
        if any(p.requires_grad for p in model.parameters()):
            torch.optim.AdamW(
                model.parameters(), lr=0.1, eps=1e-3, foreach=False
            ).step()
    assert_same_state(parallel, reference)


def check_model(
    build: Callable[[], nn.Module],
    plan: Any,
    inputs: tuple[torch.Tensor, ...],
    *,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> nn.Module:
    """A whole model with whole inputs and a whole output on every rank."""
    torch.manual_seed(1)
    reference = build().double()
    parallel = prepare(parallelize_module(copy.deepcopy(reference), tp_mesh(), plan))
    outputs = []
    for model in (reference, parallel):
        torch.manual_seed(2)
        output = model(*inputs)
        output.square().sum().backward()
        outputs.append(full(output).detach())
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
    finish_step(parallel, reference)
    return parallel


__all__ = ["Replicate", "Shard"]
