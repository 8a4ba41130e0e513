"""Payload, shape and dtype of each form of argument, against sizes counted by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torchspmd.comm.kinds import TABLE, Kind, find_operator
from torchspmd.comm.measure import Measure, measure

_ALL_REDUCE = TABLE["_c10d_functional::all_reduce"]
_ALL_GATHER = TABLE["_c10d_functional::all_gather_into_tensor"]
_UNKNOWN = find_operator("c10d::brand_new_op")
_NOTHING = Measure("none", (), 0, 0)


def _real(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def _meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _fake(*shape, dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def _parameter(*shape, dtype=torch.float32):
    return torch.nn.Parameter(_real(*shape, dtype=dtype))


@pytest.mark.parametrize("make", [_real, _meta, _fake, _parameter])
def test_real_fake_and_meta_tensors_measure_alike(make):
    found = measure(_ALL_REDUCE, {"input": make(8, 4)}, group_size=4)
    assert found == Measure("float32", (8, 4), 128, 192)
    assert type(found.shape) is tuple


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        (torch.bool, "bool", 1),
        (torch.uint8, "uint8", 1),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
        (torch.bfloat16, "bfloat16", 2),
        (torch.int64, "int64", 8),
        (torch.complex64, "complex64", 8),
        (torch.complex128, "complex128", 16),
    ],
)
def test_dtypes(dtype, name, size):
    found = measure(_ALL_REDUCE, {"input": _meta(3, 5, dtype=dtype)}, group_size=3)
    assert found == Measure(name, (3, 5), 15 * size, 20 * size)


# The operator, its arguments, the size of the group, and what is found.
_CASES = {
    "a shard counts as the whole": (
        "_c10d_functional::all_gather_into_tensor",
        {"input": _meta(2, 8)}, 4, Measure("float32", (2, 8), 256, 192),
    ),
    "a scalar is one element": (
        "_c10d_functional::all_reduce",
        {"input": torch.tensor(1.0)}, 2, Measure("float32", (), 4, 4),
    ),
    "a view counts its own elements": (
        "_c10d_functional::all_reduce",
        {"input": _real(1, 1).expand(8, 8)}, 2, Measure("float32", (8, 8), 256, 256),
    ),
    "a list of one keeps its shape": (
        "c10d::allreduce_",
        {"tensors": [_meta(8, 4)]}, 4, Measure("float32", (8, 4), 128, 192),
    ),
    "a coalesced list is one buffer": (
        "_c10d_functional::all_reduce_coalesced",
        {"inputs": [_meta(8, 4), _meta(3), _meta(2, 2, 2)]}, 43,
        Measure("float32", (43,), 172, 2 * 42 * 4),
    ),
    "coalesced shards count as the whole": (
        "_c10d_functional::all_gather_into_tensor_coalesced",
        {"inputs": (_meta(2), _meta(4))}, 2, Measure("float32", (6,), 48, 24),
    ),
    "nested lists are flattened": (
        "c10d::reduce_scatter_",
        {
            "output_tensors": [_meta(5)],
            "input_tensors": [[_meta(5), _meta(5)], (_meta(5), _meta(5))],
        },
        4, Measure("float32", (20,), 80, 60),
    ),
    "mixed dtypes are named mixed and summed": (
        "c10d::allreduce_coalesced_",
        {"tensors": [_meta(4), _meta(4, dtype=torch.half), _meta(1, dtype=torch.long)]},
        2, Measure("mixed", (9,), 32, 32),
    ),
    "a gather counts all shares": (
        "c10d::gather_", {"input_tensors": [_meta(6)]}, 3,
        Measure("float32", (6,), 72, 16),
    ),
    "a scatter counts all shares": (
        "c10d::scatter_", {"output_tensors": [_meta(6)]}, 3,
        Measure("float32", (6,), 72, 16),
    ),
    "a fused all_gather moves the left factor": (
        "symm_mem::fused_all_gather_matmul",
        {"A": _meta(2, 4, 16), "Bs": [_meta(16, 8), _meta(16, 32)]}, 4,
        Measure("float32", (2, 4, 16), 2048, 1536),
    ),
    "a fused reduce_scatter moves the product": (
        "symm_mem::fused_matmul_reduce_scatter",
        {"A": _meta(8, 16), "B": _meta(16, 4)}, 4, Measure("float32", (8, 4), 128, 96),
    ),
    "an unknown operator may have a zero in its tensor": (
        "c10d::brand_new_op", {"x": torch.zeros(1)}, 4, Measure("float32", (1,), 4, 0),
    ),
    "no tensor": ("c10d::allreduce_", {"tensors": []}, 4, _NOTHING),
    "a list of no tensor": ("c10d::allreduce_", {"tensors": [[]]}, 4, _NOTHING),
    "None": ("c10d::allreduce_", {"tensors": None}, 4, _NOTHING),
    # Its `tensor` only says which device to use.
    "a barrier": ("c10d::barrier", {"tensor": _real(7)}, 4, _NOTHING),
    "a watched barrier": ("c10d::monitored_barrier_", {"tensor": _real(7)}, 4, _NOTHING),
    "unknown, without tensors": ("c10d::brand_new_op", {"tag": "x"}, 4, _NOTHING),
    "unknown, without arguments": ("c10d::brand_new_op", {}, 4, _NOTHING),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "size", "found"), _CASES.values(), ids=_CASES
)
def test_every_form_of_argument(name, arguments, size, found):
    assert measure(find_operator(name), arguments, size) == found


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3, 2)])
@pytest.mark.parametrize("operator", [_ALL_REDUCE, _ALL_GATHER])
def test_empty_tensors_send_nothing(operator, shape):
    found = measure(operator, {"input": _real(*shape)}, group_size=4)
    assert found == Measure("float32", shape, 0, 0)


@pytest.mark.parametrize(
    ("out_dtype", "expected"),
    [
        (torch.bfloat16, Measure("bfloat16", (2, 4, 8), 128, 64)),
        (None, Measure("float8_e4m3fn", (2, 4, 8), 64, 32)),
    ],
)
def test_fused_scaled_product_has_the_dtype_of_its_output(out_dtype, expected):
    arguments = {
        "A": _meta(2, 4, 16, dtype=torch.float8_e4m3fn),
        "B": _meta(16, 8, dtype=torch.float8_e4m3fn),
        "out_dtype": out_dtype,
    }
    operator = TABLE["symm_mem::fused_scaled_matmul_reduce_scatter"]
    assert measure(operator, arguments, group_size=2) == expected


def test_a_batch_sends_its_sending_half():
    arguments = {
        "op_list": ["isend", "irecv", "isend"],
        "peer_list": [1, 1, 2],
        "tag_list": [0, 0, 0],
        "tensors": [_meta(4), _meta(100), _meta(6, dtype=torch.float64)],
        "group_name": "0",
    }
    operator = TABLE["_c10d_functional::batch_p2p_ops"]
    assert operator.kind is Kind.SEND_RECV
    assert measure(operator, arguments, 4) == Measure("mixed", (110,), 464, 64)


@pytest.mark.parametrize("make", [_real, _meta, _fake])
def test_an_unknown_operator_shows_its_first_tensors(make):
    arguments = {"tag": "x", "tensors": [make(3, 2)], "other": make(9)}
    found = measure(_UNKNOWN, arguments, group_size=4)
    assert found == Measure("float32", (3, 2), 24, 0)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "broadcast"])
def test_legacy_spellings_measure_like_native_ones(name):
    legacy = getattr(torch.ops.c10d_functional, name).default
    first = legacy._schema.arguments[0].name
    found = measure(TABLE[f"c10d_functional::{name}"], {first: _meta(8)}, group_size=2)
    native = measure(TABLE[f"_c10d_functional::{name}"], {"input": _meta(8)}, 2)
    assert found == native


def test_symbolic_shapes_are_measured_as_numbers_without_a_guard():
    shape_env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    mode = FakeTensorMode(shape_env=shape_env)
    tensor = mode.from_tensor(torch.zeros(6, 4), symbolic_context=context)
    assert not isinstance(tensor.shape[0], int)  # a symbol
    found = measure(_ALL_REDUCE, {"input": tensor}, group_size=4)
    assert all(type(size) is int for size in found.shape)
    assert hash(found) == hash(Measure("float32", (6, 4), 96, 144))
    assert not shape_env.guards  # measuring must not fix a dynamic shape
