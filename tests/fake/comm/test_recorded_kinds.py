"""From an operator that runs to its event: kinds, measure and topology together."""

import pytest
import torch
from torch.distributed import _functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx

from torchspmd import CommDebugMode, Kind
from torchspmd.testing import fake_mesh

_RANKS = [0, 1, 2, 3]
_legacy = torch.ops.c10d_functional


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("call", "kind", "payload", "wire"),
    [
        (lambda x: _legacy.all_reduce(x, "sum", "", _RANKS, 4), "all_reduce", 32, 48),
        (lambda x: _legacy.broadcast(x, 0, "", _RANKS, 4), "broadcast", 32, 24),
        (
            lambda x: _legacy.all_gather_into_tensor(x, "", _RANKS, 4),
            "all_gather",
            128,
            96,
        ),
        (
            lambda x: _legacy.reduce_scatter_tensor(x, "sum", "", _RANKS, 4),
            "reduce_scatter",
            32,
            24,
        ),
    ],
    ids=["all_reduce", "broadcast", "all_gather", "reduce_scatter"],
)
def test_legacy_operators_are_measured(mesh, inference, call, kind, payload, wire):
    with torch.inference_mode(inference), CommDebugMode() as mode:
        functional.wait_tensor(call(torch.ones(8)))
    (event,) = mode.ledger.events
    assert (event.kind, event.axis) == (kind, "tp")
    assert (event.payload_bytes, event.wire_bytes) == (payload, wire)


def test_an_operator_of_tomorrow_is_recorded_as_unknown(mesh):
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("torchspmd_test_whirl(Tensor x, str group_name) -> Tensor")
    library.impl("torchspmd_test_whirl", lambda x, group_name: x.clone(), "CPU")
    try:
        with CommDebugMode() as mode:
            name = mesh.get_group("tp").group_name
            torch.ops.c10d.torchspmd_test_whirl(torch.zeros(3, 2), name)
    finally:
        library._destroy()
    (event,) = mode.ledger.events
    assert (event.kind, event.op) == (Kind.UNKNOWN, "c10d.torchspmd_test_whirl")
    assert (event.shape, event.payload_bytes, event.axis) == ((3, 2), 24, "tp")


def test_a_trace_with_symbolic_shapes_is_recorded_in_numbers(mesh):
    group = mesh.get_group("tp").group_name

    def reduced(x):
        return functional.wait_tensor(functional.all_reduce(x, "sum", group)) + 1

    with CommDebugMode() as mode:
        graph = make_fx(reduced, tracing_mode="symbolic")(torch.ones(3, 2))
    (event,) = mode.ledger.events
    assert (event.shape, event.payload_bytes) == ((3, 2), 24)
    assert graph(torch.ones(5, 2)).shape == (5, 2)  # its shape is still free


def test_asking_a_mesh_for_its_group_is_no_communication(mesh):
    if not hasattr(torch.ops._dtensor, "mesh_get_process_group"):
        pytest.skip("this torch has no operator for it")
    with CommDebugMode() as mode:
        torch.ops._dtensor.mesh_get_process_group(mesh, 0)
    assert len(mode.ledger) == 0
