"""The one table from operator to kind of communication.

An operator is named ``namespace::name`` without its overload. Whatever these namespaces
hold that the table does not know is ``Kind.UNKNOWN``: recorded and shown, never skipped.
"""

import functools
from dataclasses import dataclass
from enum import StrEnum

NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "c10d",
    "_dtensor",
    "symm_mem",
)


class Kind(StrEnum):
    """What one communication does.

    >>> Kind("all_gather") is Kind.ALL_GATHER
    True
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    SEND_RECV = "send_recv"
    BARRIER = "barrier"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Operator:
    """How to read one operator: its kind and which argument is the payload.

    Attributes:
        kind: What it does.
        buffer: Name of the argument that holds the tensor or tensors that are sent;
            empty when nothing is sent.
        is_shard: The buffer is one rank's share; the payload is the whole, group-size
            times as large.
        counted_as: ``namespace.name`` of the packet under which ``get_comm_counts``
            counts it.
    """

    kind: Kind
    buffer: str
    is_shard: bool
    counted_as: str


# The legacy operators give the same tensor another name.
_LEGACY_BUFFERS = {
    "all_reduce": "self",
    "all_reduce_coalesced": "self",
    "all_gather_into_tensor": "shard",
    "all_gather_into_tensor_coalesced": "input",
    "broadcast": "self",
    "isend": "self",
    "irecv": "self",
}


def _functional() -> dict[str, Operator]:
    """Functional collectives: one native operator, several spellings, one count."""
    rows = (
        (Kind.ALL_REDUCE, "all_reduce", "input", False, ("", "_")),
        (Kind.ALL_REDUCE, "all_reduce_coalesced", "inputs", False, ("", "_")),
        (Kind.ALL_GATHER, "all_gather_into_tensor", "input", True, ("", "_out")),
        (Kind.ALL_GATHER, "all_gather_into_tensor_coalesced", "inputs", True, ("",)),
        (Kind.REDUCE_SCATTER, "reduce_scatter_tensor", "input", False, ("", "_out")),
        (
            Kind.REDUCE_SCATTER,
            "reduce_scatter_tensor_coalesced",
            "inputs",
            False,
            ("",),
        ),
        (Kind.ALL_TO_ALL, "all_to_all_single", "input", False, ("",)),
        (Kind.BROADCAST, "broadcast", "input", False, ("", "_")),
        (Kind.SEND, "isend", "tensor", False, ("",)),
        (Kind.RECV, "irecv", "tensor", False, ("",)),
        (Kind.SEND_RECV, "batch_p2p_ops", "tensors", False, ("",)),
    )
    namespaces = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
    return {
        f"{namespace}::{name}{suffix}": Operator(
            kind,
            _LEGACY_BUFFERS.get(name, buffer)
            if namespace == "c10d_functional"
            else buffer,
            is_shard,
            f"c10d_functional.{name}",
        )
        for kind, name, buffer, is_shard, suffixes in rows
        for suffix in suffixes
        for namespace in namespaces
    }


def _own_name(
    namespace: str, *rows: tuple[Kind, str, str, bool]
) -> dict[str, Operator]:
    """Operators that are counted under their own name."""
    return {
        f"{namespace}::{name}": Operator(kind, buffer, is_shard, f"{namespace}.{name}")
        for kind, name, buffer, is_shard in rows
    }


_IN_PLACE = _own_name(
    "c10d",
    (Kind.ALL_REDUCE, "allreduce_", "tensors", False),
    (Kind.ALL_REDUCE, "allreduce_coalesced_", "tensors", False),
    (Kind.ALL_GATHER, "allgather_", "input_tensors", True),
    (Kind.ALL_GATHER, "_allgather_base_", "input_tensor", True),
    (Kind.ALL_GATHER, "allgather_coalesced_", "input_list", True),
    (Kind.ALL_GATHER, "allgather_into_tensor_coalesced_", "inputs", True),
    (Kind.REDUCE_SCATTER, "reduce_scatter_", "input_tensors", False),
    (Kind.REDUCE_SCATTER, "_reduce_scatter_base_", "input_tensor", False),
    (Kind.REDUCE_SCATTER, "reduce_scatter_tensor_coalesced_", "inputs", False),
    (Kind.ALL_TO_ALL, "alltoall_", "input_tensors", False),
    (Kind.ALL_TO_ALL, "alltoall_base_", "input", False),
    (Kind.BROADCAST, "broadcast_", "tensors", False),
    (Kind.REDUCE, "reduce_", "tensors", False),
    (Kind.GATHER, "gather_", "input_tensors", True),
    (Kind.SCATTER, "scatter_", "output_tensors", True),
    (Kind.SEND, "send", "tensors", False),
    (Kind.RECV, "recv_", "tensors", False),
    (Kind.RECV, "recv_any_source_", "tensors", False),
    (Kind.BARRIER, "barrier", "", False),
    (Kind.BARRIER, "monitored_barrier_", "", False),
)

# The fused forms move one operand around a matrix product: A before an all-gather, the
# product (measured from A and B) before a reduce-scatter.
_SYMMETRIC_MEMORY = _own_name(
    "symm_mem",
    (Kind.ALL_REDUCE, "one_shot_all_reduce", "input", False),
    (Kind.ALL_REDUCE, "one_shot_all_reduce_out", "input", False),
    (Kind.ALL_REDUCE, "one_shot_all_reduce_copy", "local_input", False),
    (Kind.ALL_REDUCE, "one_shot_all_reduce_copy_out", "local_input", False),
    (Kind.ALL_REDUCE, "two_shot_all_reduce_", "input", False),
    (Kind.ALL_REDUCE, "two_shot_all_reduce_out", "input", False),
    (Kind.ALL_REDUCE, "multimem_all_reduce_", "input", False),
    (Kind.ALL_REDUCE, "multimem_one_shot_all_reduce", "input", False),
    (Kind.ALL_REDUCE, "multimem_one_shot_all_reduce_out", "input", False),
    (Kind.REDUCE, "multimem_one_shot_reduce_out", "input", False),
    (Kind.REDUCE, "tile_reduce", "in_tile", False),
    (Kind.REDUCE, "multi_root_tile_reduce", "in_tiles", False),
    (Kind.ALL_GATHER, "multimem_all_gather_out", "input", True),
    (Kind.ALL_GATHER, "_low_contention_all_gather", "tensor", True),
    (Kind.ALL_GATHER, "fused_all_gather_matmul", "A", True),
    (Kind.ALL_GATHER, "fused_all_gather_scaled_matmul", "A", True),
    (Kind.REDUCE_SCATTER, "_low_contention_reduce_scatter", "tensor", False),
    (Kind.REDUCE_SCATTER, "reduce_scatter_out", "input", False),
    (Kind.REDUCE_SCATTER, "nccl_reduce_scatter_offset", "input", False),
    (Kind.REDUCE_SCATTER, "fused_matmul_reduce_scatter", "A @ B", False),
    (Kind.REDUCE_SCATTER, "fused_scaled_matmul_reduce_scatter", "A @ B", False),
    (Kind.ALL_TO_ALL, "all_to_all_vdev", "input", False),
    (Kind.ALL_TO_ALL, "all_to_all_vdev_2d", "input", False),
    (Kind.ALL_TO_ALL, "all_to_all_vdev_2d_offset", "input", False),
    (Kind.ALL_TO_ALL, "nvshmem_all_to_all", "input", False),
    (Kind.BROADCAST, "nvshmem_broadcast", "input", False),
    (Kind.SEND, "nccl_put", "tensor", False),
    (Kind.SEND, "nccl_put_signal", "src", False),
    (Kind.SEND, "nccl_put_with_signal", "tensor", False),
    (Kind.SEND, "nvshmem_put", "tensor", False),
    (Kind.SEND, "nvshmem_put_with_signal", "tensor", False),
    (Kind.RECV, "nccl_get", "tensor", False),
    (Kind.RECV, "nvshmem_get", "tensor", False),
    (Kind.BARRIER, "_barrier", "", False),
)

_DTENSOR = _own_name(
    "_dtensor", (Kind.ALL_TO_ALL, "shard_dim_alltoall", "input", False)
)

TABLE: dict[str, Operator] = {
    **_functional(),
    **_IN_PLACE,
    **_SYMMETRIC_MEMORY,
    **_DTENSOR,
}

# Operators of the same namespaces that send nothing by themselves.
SILENT = frozenset(
    {
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
        "c10d_functional::wait_tensor",
        "_dtensor::mesh_get_process_group",
        "c10d::check_for_nan",
        "symm_mem::_async_input_mm",
        "symm_mem::_rendezvous",
        "symm_mem::get_remote_tensors",
        "symm_mem::memset32_",
        "symm_mem::nccl_wait_for_signal",
        "symm_mem::nccl_wait_signal",
        "symm_mem::nvshmem_wait_for_signal",
        "symm_mem::stream_write_value32_",
    }
)


@functools.cache
def find_operator(name: str) -> Operator | None:
    """The table's row for ``namespace::name``; None when it communicates nothing.

    >>> find_operator("c10d::allreduce_").kind
    <Kind.ALL_REDUCE: 'all_reduce'>
    >>> find_operator("c10d::brand_new_op").kind
    <Kind.UNKNOWN: 'unknown'>
    >>> find_operator("aten::mm") is None
    True
    """
    namespace, _, rest = name.partition("::")
    if namespace not in NAMESPACES or name in SILENT:
        return None
    known = TABLE.get(name)
    return known or Operator(Kind.UNKNOWN, "", False, f"{namespace}.{rest}")
