"""The table from operator to kind covers all that the installed torch can send."""

import pytest
import torch
import torch.distributed._symmetric_memory
import torch.distributed.tensor

from torchspmd import _torch
from torchspmd.comm.kinds import NAMESPACES, SILENT, TABLE, Kind, find_operator
from torchspmd.trace.tables import packet

# Made by hand from the text of issue 2, so that the table is not its own witness.
_EXPECTED = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional_autograd::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast_": "broadcast",
    "_c10d_functional::isend": "send",
    "_c10d_functional::irecv": "recv",
    "_c10d_functional::batch_p2p_ops": "send_recv",
    "c10d_functional::all_gather_into_tensor": "all_gather",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "c10d::recv_any_source_": "recv",
    "c10d::monitored_barrier_": "barrier",
    "_dtensor::shard_dim_alltoall": "all_to_all",
    "symm_mem::fused_all_gather_matmul": "all_gather",
    "symm_mem::fused_matmul_reduce_scatter": "reduce_scatter",
}


def _installed():
    return list(_torch.registered_operators(NAMESPACES))


def _installed_in_torch():
    """Without what other tests of this process have defined by themselves."""
    return [op for op in _installed() if "torchspmd_test" not in op.name()]


@pytest.mark.parametrize(("name", "kind"), _EXPECTED.items())
def test_kind_of_well_known_operators(name, kind):
    assert TABLE[name].kind.value == kind


def test_every_installed_operator_is_known_or_silent():
    found = {_torch.packet_name(op) for op in _installed_in_torch()}
    assert len(found) > 60  # the enumeration itself works
    assert sorted(found - set(TABLE) - SILENT) == []


def test_every_buffer_is_an_argument_of_its_operator():
    wrong = {
        _torch.packet_name(op): (operator.buffer, _torch.argument_names(op))
        for op in _installed_in_torch()
        if (operator := find_operator(_torch.packet_name(op))) is not None
        and operator.buffer not in ("", "A @ B", *_torch.argument_names(op))
    }
    assert wrong == {}


def test_product_operators_have_both_factors():
    products = [
        _torch.argument_names(op)
        for op in _installed_in_torch()
        if (operator := find_operator(_torch.packet_name(op))) is not None
        and operator.buffer == "A @ B"
    ]
    assert products
    assert all({"A", "B"} <= set(names) for names in products)


def test_counted_as_is_a_packet_of_torch():
    # Older versions of torch have fewer operators than the table.
    registered = {
        _torch.packet_name(op) for op in _torch.registered_operators(NAMESPACES)
    }
    known = {name: row for name, row in TABLE.items() if name in registered}
    assert len(known) > 60
    for row in known.values():
        assert isinstance(packet(row.counted_as), torch._ops.OpOverloadPacket)


def test_silent_and_known_do_not_overlap():
    assert not SILENT & set(TABLE)


def test_silent_operators_are_found_as_none():
    assert [find_operator(name) for name in SILENT] == [None] * len(SILENT)


def test_every_row_lies_in_a_namespace():
    names = {*TABLE, *SILENT}
    assert {name.partition("::")[0] for name in names} == set(NAMESPACES)


def test_every_kind_but_unknown_is_in_the_table():
    assert {row.kind for row in TABLE.values()} == set(Kind) - {Kind.UNKNOWN}


def test_only_barriers_send_nothing():
    empty = {row.kind for row in TABLE.values() if not row.buffer}
    assert empty == {Kind.BARRIER}


def test_operator_defined_at_run_time_is_unknown_not_skipped():
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("torchspmd_test_swirl(Tensor x) -> Tensor")
    try:
        names = {_torch.packet_name(op) for op in _installed()}
        assert "c10d::torchspmd_test_swirl" in names
    finally:
        library._destroy()
    operator = find_operator("c10d::torchspmd_test_swirl")
    assert operator.kind is Kind.UNKNOWN
    assert operator.counted_as == "c10d.torchspmd_test_swirl"


@pytest.mark.parametrize("name", ["aten::mm", "c10d_extra::allreduce_", "mm", ""])
def test_other_namespaces_communicate_nothing(name):
    assert find_operator(name) is None
