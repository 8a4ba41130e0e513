"""Kernels that memory bounds, by the shapes of their tensors: what an H200 took.

Microseconds are those of profiles of training steps (torch 2.11, CUDA 13.0).
"""

import math

import pytest

from torchspmd.predict.figures import Figures
from torchspmd.predict.forms import Loop, by_clock, iterated, loops, touched_bytes
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.operators import Pricer
from torchspmd.rehearse.recording import Op, Phase, Site, TensorSpec
from torchspmd.rehearse.reductions import plan_reduction

SITE = Site("net.layer", Phase.FORWARD, 0, "")
MILLION = 1_000_000


def tensor(*shape, dtype="bfloat16", stride=None):
    if stride is None:
        stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return TensorSpec(shape, stride, dtype, "cuda", 0)


def full(*shape, stride=None):
    return tensor(*shape, dtype="float32", stride=stride)


@pytest.fixture(scope="module")
def microseconds():
    pricer = Pricer(Figures(load_gpu("h200")))

    def price(name, inputs, *outputs, **scalars):
        op = Op(0, f"aten.{name}", inputs, outputs, tuple(scalars.items()), 0, SITE)
        return 1e6 * pricer.price(op).seconds

    return price


def test_dimensions_that_lie_behind_each_other_are_one_loop():
    x = tensor(16, 512, 1024)
    assert loops((x, x)) == []
    assert loops((x, tensor(1024))) == [Loop(1024, (1, 1)), Loop(8192, (1024, 0))]
    swapped = tensor(16, 512, 1024, stride=(1024, 16384, 1))
    assert [loop.size for loop in loops((x, swapped))] == [1024, 512, 16]
    assert loops((swapped, swapped)) == []
    halves = tensor(16, 512, 512, stride=(512 * 1024, 1024, 1))
    assert [loop.size for loop in loops((tensor(16, 512, 512), halves))] == [512, 8192]


def test_a_scalar_on_the_host_is_no_tensor_of_a_kernel():
    x, scalar = tensor(8, 8), tensor()
    inputs = (x, scalar), (x, scalar._replace(device="cpu"))
    here, there = (Op(0, "aten.mul.Tensor", each, (x,), (), 0, SITE) for each in inputs)
    assert [len(iterated(op)) for op in (here, there)] == [3, 2]


def test_memory_moves_whole_sectors():
    assert touched_bytes(full(64), written=True) == 256
    assert touched_bytes(full(64, stride=(2,)), written=False) == 512
    assert touched_bytes(full(64, stride=(2,)), written=True) == 1024
    assert touched_bytes(full(64, stride=(100,)), written=False) == 64 * 32


@pytest.mark.parametrize(
    ("shape", "stride", "measured"),
    [
        ((3, 128, 64, 512), (512, 98304, 1536, 1), 29.7),
        ((3, 512, 16, 1024), (1024, 49152, 3072, 1), 62.6),
        ((6144, 3, 49, 32), (14112, 32, 288, 1), 81.4),
        ((6144, 49, 3, 3, 32), (4704, 32, 28901376, 1568, 1), 263.9),
    ],
)
def test_a_copy_into_another_order_takes_its_time_by_elements_and_dimensions(
    microseconds, shape, stride, measured
):
    x = tensor(*shape, stride=stride)
    taken = microseconds("clone.default", (x,), tensor(*shape))
    assert taken == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("inputs", "measured"),
    [
        ((tensor(512, 16, 1920), tensor(1920)), 36.4),
        ((full(128, 64, 512), full(512)), 11.8),
        ((full(6144, 3, 49, 49), full(1, 3, 49, 49)), 151.0),
        ((tensor(6144, 3, 49, 49), full(1, 3, 49, 49)), 194.4),
        ((full(96, 56, 56, 96), tensor(96, 56, 56, 96)), 105.4),
        ((full(4, 1024, 896), full(4, 1, 1)), 11.2),
    ],
    ids=["16 bits", "32 bits", "4 dimensions", "broadcast types", "types", "few rows"],
)
def test_broadcasting_and_conversions_take_their_time_by_elements(
    microseconds, inputs, measured
):
    dtype = "float32" if inputs[0] != inputs[1] else inputs[0].dtype
    dtypes = {spec.dtype for spec in inputs}
    result = tensor(*inputs[0].shape, dtype=dtype if len(dtypes) > 1 else dtypes.pop())
    assert microseconds("add.Tensor", inputs, result) == pytest.approx(
        measured, rel=0.2
    )


def test_an_operator_with_a_table_of_its_own_is_slower_on_a_part(microseconds):
    whole = tensor(1, 16384, 4096)
    part = tensor(1, 16384, 4096, stride=(8192 * 16384, 8192, 1))
    taken = microseconds("silu.default", (part,), whole)
    assert taken == pytest.approx(185, rel=0.25)
    assert taken > 1.8 * microseconds("silu.default", (whole,), whole)
    mask = tensor(64, 128, 512, dtype="bool", stride=(512, 32768, 1))
    x = tensor(64, 128, 512)
    taken = microseconds("native_dropout_backward.default", (x, mask), x)
    assert taken == pytest.approx(12.5, rel=0.25)


def test_short_rows_are_transposed_in_the_cache(microseconds):
    shape, stride = (6144, 3, 32, 49), (14112, 32, 1, 288)
    x = tensor(*shape, stride=stride)
    taken = microseconds("clone.default", (x,), tensor(*shape))
    assert taken == pytest.approx(83.8, rel=0.15)
    count = math.prod(shape)
    wide = tensor(count // 1024, 1024, stride=(1, count // 1024))
    assert microseconds("clone.default", (wide,), tensor(*wide.shape)) > 2 * taken


def test_gradients_of_parts_are_zeros_and_a_copy(microseconds):
    part, whole = full(96, 28, 28, 96), full(96, 28, 56, 96)
    scalars = {"dim": 2, "start": 0, "end": 1 << 62, "step": 2}
    taken = microseconds("slice_backward.default", (part,), whole, **scalars)
    zeros = microseconds("zeros_like.default", (whole,), whole)
    assert taken > zeros + 2 * 4 * math.prod(part.shape) / 4.8e6
    row, rows = tensor(128, 64, 512), tensor(3, 128, 64, 512)
    taken = microseconds("select_backward.default", (row,), rows, dim=0, index=1)
    assert taken == pytest.approx(8.4 + 5.5, rel=0.3)


def test_rolling_is_a_kernel_for_each_dimension(microseconds):
    x = tensor(96, 56, 56, 96)
    once = microseconds("roll.default", (x,), x, shifts=(3,), dims=(1,))
    twice = microseconds("roll.default", (x,), x, shifts=(3, 3), dims=(1, 2))
    assert twice == 2 * once
    assert once == pytest.approx(135, rel=0.1)


def test_one_part_with_gaps_makes_a_concatenation_slow(microseconds):
    whole, gaps = tensor(18432, 49, 32), tensor(18432, 49, 32, stride=(1568, 1, 49))
    result = tensor(3, 18432, 49, 32)
    dense = microseconds("stack.default", (whole,) * 3, result)
    mixed = microseconds("stack.default", (whole, gaps, whole), result)
    assert mixed == pytest.approx(3.86e-6 * math.prod(result.shape), rel=0.1)
    assert mixed > 3 * dense


def test_more_than_four_dimensions_are_concatenated_part_by_part(microseconds):
    x = full(1, 16384, 12, 64)
    pairs = microseconds("stack.default", (x, x), full(*x.shape, 2), dim=-1)
    assert pairs == pytest.approx(119.6, rel=0.1)
    rows = microseconds(
        "stack.default", (x, x), full(2, *x.shape)
    )  # one copy behind another
    assert rows < pairs / 2


@pytest.mark.parametrize(
    ("shape", "dtype", "measured"),
    [
        ((75264, 192), "bfloat16", 122.0),
        ((301056, 96), "bfloat16", 80.7),
        ((301056, 288), "bfloat16", 127.3),
        ((75264, 768), "bfloat16", 66.5),
        ((18816, 1536), "bfloat16", 36.4),
        ((8192, 640), "bfloat16", 17.9),
        ((8192, 2048), "bfloat16", 24.4),
        ((8192, 32000), "bfloat16", 138.2),
        ((9408, 128), "float32", 16.0),
    ],
)
def test_few_columns_wait_for_the_block_that_adds_the_parts_up(
    microseconds, shape, dtype, measured
):
    x, result = tensor(*shape, dtype=dtype), tensor(shape[1], dtype=dtype)
    taken = microseconds("sum.dim_IntList", (x,), result, dim=(0,))
    assert taken == pytest.approx(measured, rel=0.2)


def test_threads_of_a_sum_of_columns():
    plan = plan_reduction((75264, 192), (192, 1), {0}, 132)
    assert (plan.width, plan.height, plan.vector) == (32, 4, 4)
    assert (plan.grid, plan.blocks, plan.values) == (2, 1056, 18)
    assert plan_reduction((0, 192), (192, 1), {0}, 132) is None


@pytest.mark.parametrize(
    ("rows", "width", "forward", "backward"),
    [
        (301056, 96, 470.7, 308.6),
        (75264, 192, 132.4, 105.2),
        (75264, 384, 151.6, 154.1),
        (18816, 384, 39.4, 96.9),
        (8192, 640, 23.2, 60.1),
        (8192, 1024, 28.8, None),
        (9408, 128, 15.5, 38.1),
    ],
)
def test_a_norm_takes_its_time_by_rows_and_bytes(
    microseconds, rows, width, forward, backward
):
    x, row, of_row = full(rows, width), full(width), full(rows, 1)
    scalars = {"normalized_shape": (width,)}
    name = "native_layer_norm"
    taken = microseconds(f"{name}.default", (x, row, row), x, of_row, of_row, **scalars)
    assert taken == pytest.approx(forward, rel=0.15)
    if backward is None:
        return
    inputs = x, x, of_row, of_row, row, row
    scalars["output_mask"] = (True, True, True)
    taken = microseconds(f"{name}_backward.default", inputs, x, row, row, **scalars)
    assert taken == pytest.approx(backward, rel=0.25)
    scalars["output_mask"] = (True, False, False)
    assert microseconds(f"{name}_backward.default", inputs, x, **scalars) < taken


def test_what_multiprocessors_take_follows_their_number_and_clock():
    h200, a100 = Figures(load_gpu("h200")), Figures(load_gpu("a100"))
    key = "kernels.layer_norm_row"
    ratio = by_clock(a100, key) / by_clock(h200, key)
    assert ratio == pytest.approx(132 * 1.98 / (108 * 1.41))


def test_gradients_of_softmax_in_32_bits_are_bound_by_memory(microseconds):
    x = full(6144, 3, 49, 49)
    taken = microseconds("_softmax_backward_data.default", (x, x), x)
    assert taken == pytest.approx(123.2 + 123.9, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "width", "words", "dtype", "measured"),
    [
        (8192, 640, 32000, "float32", 152.7 + 20),
        (16384, 1536, 32000, "bfloat16", 424.4 + 25),
    ],
)
def test_gradients_of_embeddings_are_added_to_zeros(
    microseconds, rows, width, words, dtype, measured
):
    inputs = tensor(rows, width, dtype=dtype), tensor(rows, dtype="int64")
    result = tensor(words, width, dtype=dtype)
    taken = microseconds("embedding_dense_backward.default", inputs, result)
    assert taken == pytest.approx(measured, rel=0.25)


def test_a_fused_optimizer_in_16_bits_has_a_table_of_its_own(microseconds):
    states = 381 * MILLION
    many, few = (
        microseconds("_fused_adamw_.default", (tensor(count, dtype=dtype),) * 4)
        for count, dtype in ((states, "bfloat16"), (states // 2, "float32"))
    )
    assert many == pytest.approx(2037, rel=0.1)
    assert few < many  # of as many bytes


def test_a_matrix_that_all_products_share_is_read_once(microseconds):
    x, result = tensor(512, 16, 1024), tensor(512, 16, 3072)
    own = tensor(512, 1024, 3072)
    shared = tensor(512, 1024, 3072, stride=(0, 1, 1024))
    taken = microseconds("bmm.default", (x, shared), result)
    assert taken == pytest.approx(314, rel=0.4)
    assert taken < 0.6 * microseconds("bmm.default", (x, own), result)
