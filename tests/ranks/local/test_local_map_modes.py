"""Numbers under other ways to run: some axes only, compiled, checkpointed, modules."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from layouts import S0, S1, P, R, leaf
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from torchspmd.local import local_map


def mlp(x, up, down):
    return torch.nn.functional.gelu(x @ up) @ down


def mlp_reduced(x, up, down):
    return funcol.all_reduce(mlp(x, up, down), "sum", dist.group.WORLD)


def inputs():
    torch.manual_seed(0)
    shapes = ((8, 4), (4, 8), (8, 4))
    return [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]


def compare(mesh, layouts, call):
    """One square loss through a call, against one device."""
    fulls = inputs()
    expected = mlp(*fulls)
    expected.square().sum().backward()
    tensors = [leaf(f, mesh, la) for f, la in zip(fulls, layouts, strict=True)]
    result = call(*tensors)
    result.redistribute(placements=[R] * mesh.ndim).square().sum().backward()
    torch.testing.assert_close(result.full_tensor(), expected)
    for tensor, full in zip(tensors, fulls, strict=True):
        assert tensor.grad.placements == tensor.placements
        torch.testing.assert_close(tensor.grad.full_tensor(), full.grad)


ONE_AXIS = ([R], [S1], [S0])


def run_some_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for batch in (S0, R):
        layouts = ([batch, R], [R, S1], [R, S0])
        mapped = local_map(mlp, [P], ONE_AXIS, axes=("tp",), check=True)
        compare(mesh, layouts, mapped)
    # The same for weights that are cut over the axis that is left alone.
    layouts = ([S0, R], [S0, S1], [S1, S0])
    compare(mesh, layouts, local_map(mlp, [P], ONE_AXIS, axes=("tp",)))
    # The local axis may cut first, and the other one its pieces.
    layouts = ([R, S0], [S1, S1], [S0, S0])
    compare(mesh, layouts, local_map(mlp, [P], ONE_AXIS, axes=("dp",)))


def test_some_axes_only(ranks4: Any) -> None:
    ranks4.run(run_some_axes)


def run_compiled(backend):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    warnings.simplefilter("ignore")  # Dynamo's own
    partial = local_map(mlp, [P], ONE_AXIS)
    compare(mesh, ONE_AXIS, torch.compile(partial, backend=backend, fullgraph=True))
    declared = local_map(mlp_reduced, [R], ONE_AXIS, out_grad_placements=[P])
    compare(mesh, ONE_AXIS, torch.compile(declared, backend=backend, fullgraph=True))
    same = local_map(mlp, [R], ([R], [R], [R]), out_grad_placements=[R])
    whole = ([R], [R], [R])
    compare(mesh, whole, torch.compile(same, backend=backend, fullgraph=True))
    # What cannot be derived while tracing falls back to eager, and is right there; Dynamo
    # of torch 2.11 does not fall back, and the error says what to write.
    if torch.__version__ >= (2, 13):
        reduced = local_map(mlp_reduced, [R], ONE_AXIS)
        compare(mesh, ONE_AXIS, torch.compile(reduced, backend=backend))
    reduced = local_map(mlp_reduced, [R], ONE_AXIS)
    try:
        torch.compile(reduced, backend=backend, fullgraph=True)(
            *[leaf(f, mesh, la) for f, la in zip(inputs(), ONE_AXIS, strict=True)]
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")


def test_compiled(ranks2: Any) -> None:
    text = ranks2.run(run_compiled, "aot_eager", timeout=120)[0]
    assert text.startswith("Unsupported: ")
    if torch.__version__ >= (2, 13):
        assert "torch.compile is tracing, so a reduction inside cannot be seen" in text


def run_checkpointed(use_reentrant):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for body, out in ((mlp, [P]), (mlp_reduced, [R])):
        mapped = local_map(body, out, ONE_AXIS, check=True)
        compare(
            mesh,
            ONE_AXIS,
            lambda *args, f=mapped: checkpoint(f, *args, use_reentrant=use_reentrant),
        )

    def inner(x, up, down):
        return checkpoint(mlp, x, up, down, use_reentrant=False)

    compare(mesh, ONE_AXIS, local_map(inner, [P], ONE_AXIS, check=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant: bool, ranks2: Any) -> None:
    ranks2.run(run_checkpointed, use_reentrant)


class Mlp(torch.nn.Module):
    """The same two products as a module."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = torch.nn.Parameter(up), torch.nn.Parameter(down)

    def forward(self, x):
        return mlp(x, self.up, self.down)


def run_module():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    fulls = inputs()
    mlp(*fulls).square().sum().backward()
    x, up, down = (leaf(f, mesh, la) for f, la in zip(fulls, ONE_AXIS, strict=True))
    module = Mlp(up, down)
    mapped = local_map(lambda module, x: module(x), [P], (None, [R]), check=True)
    for _ in range(2):
        result = mapped(module, x)
        result.redistribute(placements=[R]).square().sum().backward()
    for tensor, full in zip((x, module.up, module.down), fulls, strict=True):
        torch.testing.assert_close(tensor.grad.full_tensor(), 2 * full.grad)


def test_module_arguments(ranks2: Any) -> None:
    ranks2.run(run_module)


def run_legacy_collectives():
    """torch.distributed.nn has exact transposes as well."""
    from torch.distributed.nn.functional import all_reduce

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    mapped = local_map(lambda *args: all_reduce(mlp(*args)), [R], ONE_AXIS, check=True)
    compare(mesh, ONE_AXIS, mapped)


def test_legacy_collectives(ranks3: Any) -> None:
    # Eight columns on three ranks: uneven.
    ranks3.run(run_legacy_collectives)
