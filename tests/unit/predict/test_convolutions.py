"""Convolutions and what stands around them: seconds as in profiles of an H200."""

import math

import pytest

from torchspmd.predict.byte_tables import ByteTables
from torchspmd.predict.compiled_regions import _read_again
from torchspmd.predict.convolutions import (
    Convolutions,
    filters_of,
    is_packed,
    measured_filters,
)
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.host import HostModel
from torchspmd.predict.operators import Pricer
from torchspmd.predict.products import Products
from torchspmd.rehearse.recording import Op, Phase, Site, TensorSpec

BOTH = (True, True, False)


@pytest.fixture(scope="module")
def pricer():
    return Pricer(Figures(load_gpu("h200")))


@pytest.fixture
def host():
    return HostModel(Figures(load_gpu("h200")))


def tensor(*shape, dtype="bfloat16", last=False):
    order = (0, *range(2, len(shape)), 1) if last else range(len(shape))
    strides, step = dict.fromkeys(range(len(shape)), 0), 1
    for at in reversed(order):
        strides[at] = step
        step *= shape[at]
    stride = tuple(strides[at] for at in range(len(shape)))
    return TensorSpec(shape, stride, dtype, "cuda", 0)


def operator(name, inputs, outputs, **scalars):
    phase = Phase.BACKWARD if "backward" in name else Phase.FORWARD
    site = Site("net.layer", phase, 0, "")
    return Op(
        0, f"aten.{name}.default", inputs, outputs, tuple(scalars.items()), 0, site
    )


def forward(x, w, outputs, *more, groups=1, transposed=False, stride=1):
    sizes = (
        [n * stride for n in x.shape[2:]]
        if transposed
        else [n // stride for n in x.shape[2:]]
    )
    last = x.stride[1] == 1 and x.shape[1] > 1
    y = tensor(x.shape[0], outputs, *sizes, dtype=x.dtype, last=last)
    facts = {"groups": groups, "transposed": transposed}
    return operator("convolution", (x, w, *more), (y,), **facts)


def backward(x, w, outputs, groups=1, asked=BOTH):
    y = tensor(x.shape[0], outputs, *x.shape[2:], dtype=x.dtype)
    facts = {"groups": groups, "output_mask": asked}
    return operator("convolution_backward", (y, x, w), (x, w), **facts)


# --- products and copies ------------------------------------------------------------


@pytest.mark.parametrize(
    "channels, side, expected, of_gradients",
    [(256, 28, 98e-6, 189e-6), (512, 14, 45e-6, 102e-6), (1024, 7, 33e-6, 68e-6)],
)
def test_groups_are_packed_into_tiles(pricer, channels, side, expected, of_gradients):
    x = tensor(64, channels, side, side, dtype="float16")
    w = tensor(channels, channels // 32, 3, 3, dtype="float16")
    once = pricer.price(forward(x, w, channels, groups=32)).seconds
    assert once == pytest.approx(expected, rel=0.25)
    both = pricer.price(backward(x, w, channels, groups=32)).seconds
    assert both == pytest.approx(of_gradients, rel=0.35)


def test_groups_of_a_tile_are_multiplied_with_each_other():
    x, w = tensor(64, 256, 28, 28), tensor(256, 8, 3, 3)
    packed = filters_of(forward(x, w, 256, groups=32))
    assert packed.product == (4, 64 * 28**2, 64, 64 * 9)
    assert is_packed(packed)
    alone = filters_of(forward(x, tensor(256, 128, 3, 3), 256, groups=2))
    assert alone.product == (2, 64 * 28**2, 128, 128 * 9)
    w = tensor(768, 48, 3, 3)
    assert not is_packed(
        filters_of(forward(tensor(64, 768, 28, 28), w, 768, groups=16))
    )


def test_filters_of_one_pixel_are_a_product_as_they_are(pricer):
    def seconds(taps):
        x = tensor(8, 64, 8192, dtype="float32")
        w = tensor(256, 64, taps, dtype="float32")
        return pricer.price(forward(x, w, 256)).seconds

    assert seconds(1) == pytest.approx(32e-6, rel=0.2)
    copied = 2 * 4 * 8 * 8192 * (64 + 256)
    assert seconds(2) > seconds(1) + copied / 4.8e12


@pytest.mark.parametrize("side, item, is_copied", [(28, 2, False), (14, 2, True)])
def test_rows_of_a_product_begin_at_multiples_of_16_bytes(side, item, is_copied):
    for direction in ("forward", "backward"):
        row = (64, 256, side, 256, 1, 1, 0)
        assert measured_filters(row, direction).is_copied(item) is is_copied
        assert not measured_filters((*row[:-1], 1), direction).is_copied(item)
    assert not measured_filters((64, 256, 14, 256, 1, 1, 0), "forward").is_copied(4)


@pytest.mark.parametrize(
    "channels, side, outputs, expected, of_gradients",
    [
        (32, 96, 32, 604e-6, 1455e-6),
        (64, 48, 64, 166e-6, 332e-6),
        (128, 24, 128, 66e-6, 117e-6),
        (256, 24, 128, 118e-6, 196e-6),
    ],
)
def test_volumes(pricer, channels, side, outputs, expected, of_gradients):
    x = tensor(2, channels, side, side, side, dtype="float16")
    w = tensor(outputs, channels, 3, 3, 3, dtype="float16")
    once = pricer.price(forward(x, w, outputs)).seconds
    assert once == pytest.approx(expected, rel=0.25)
    both = pricer.price(backward(x, w, outputs)).seconds
    assert both == pytest.approx(of_gradients, rel=0.45)


def test_each_pass_copies_its_tensors(pricer):
    x, w = tensor(2, 32, 48, 48, 48), tensor(32, 32, 3, 3, 3)
    once, both = filters_of(forward(x, w, 32)), filters_of(backward(x, w, 32))
    tables = ByteTables(pricer.figures)
    convolutions = Convolutions(tables, Products(tables))
    assert (once.passes, both.passes) == (1, 2)
    ideal = [
        convolutions.ideal(pricer.figures.gpu, "bfloat16", each)
        for each in (once, once._replace(last=True), both)
    ]
    nbytes = 2 * sum(once.elements)
    assert ideal[0] - ideal[1] == pytest.approx(
        2 * nbytes / (0.45 * 4.8e12) + 3 * pricer.floor
    )
    assert ideal[2] == pytest.approx(2 * ideal[0])
    weight_alone = filters_of(backward(x, w, 32, asked=(False, True, False)))
    assert weight_alone.passes == 1


def test_measured_cases_are_told_as_measured(pricer):
    x, w = tensor(64, 128, 28, 28), tensor(128, 128, 3, 3)
    assert pricer.price(forward(x, w, 128)).seconds == pytest.approx(57.6e-6, rel=0.01)
    half = [each._replace(dtype="float16") for each in (x, w)]
    assert pricer.price(forward(*half, 128)).seconds == pytest.approx(57.6e-6, rel=0.01)


def test_large_convolutions_reach_more_of_the_rate(pricer):
    x, w = tensor(48, 256, 32, 32), tensor(256, 256, 3, 3)
    seconds = pricer.price(forward(x, w, 256)).seconds
    assert seconds == pytest.approx(122e-6, rel=0.25)


def test_transposed_ones_are_the_gradient_of_another():
    x, w = tensor(2, 64, 48, 48), tensor(64, 32, 2, 2)
    up = filters_of(forward(x, w, 32, transposed=True, stride=2))
    y = tensor(2, 32, 96, 96)
    down = filters_of(forward(y, tensor(64, 32, 2, 2), 64, stride=2))
    assert up == down


def test_few_channels_do_not_mark_others():
    """Cases with the colors of an image are far from any with more channels."""
    colors = measured_filters((64, 3, 224, 64, 7, 2, 0), "forward")
    others = colors._replace(inputs=8)
    assert math.dist(colors.point, others.point) > 6


# --- biases and norms ---------------------------------------------------------------


def test_a_bias_is_added_by_elements(pricer):
    def bias(dtype):
        x, w = tensor(8, 64, 8192, dtype=dtype), tensor(256, 64, 1, dtype=dtype)
        plain, added = forward(x, w, 256), forward(x, w, 256, tensor(256, dtype=dtype))
        return pricer.price(added).seconds - pricer.price(plain).seconds

    assert bias("float32") == pytest.approx(54e-6, rel=0.3)
    assert bias("bfloat16") == pytest.approx(bias("float32"), rel=0.15)


def test_the_gradient_of_a_bias_is_a_sum_over_images_and_places(pricer):
    x, w = (tensor(*s, dtype="float16") for s in ((48, 256, 32, 32), (256, 256, 3, 3)))
    without, with_it = (
        pricer.price(backward(x, w, 256, asked=(True, True, asked))).seconds
        for asked in (False, True)
    )
    assert with_it - without == pytest.approx(22e-6, rel=0.2)


def norms(pricer, *shape, dtype, last=False):
    x, c = tensor(*shape, dtype=dtype, last=last), tensor(shape[1], dtype="float32")
    once = operator("native_batch_norm", (x, c, c, c, c), (x,))
    back = operator("native_batch_norm_backward", (x, x, c, c, c, c, c), (x, c, c))
    return pricer.price(once).seconds, pricer.price(back).seconds


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((64, 64, 112, 112), (590e-6, 1124e-6)),
        ((64, 128, 56, 56), (157e-6, 300e-6)),
        ((64, 256, 56, 56), (209e-6, 325e-6)),
        ((1, 64, 96, 96, 96), (577e-6, 1238e-6)),
    ],
)
def test_batch_norms_of_large_channels_take_their_time_by_elements(
    pricer, shape, expected
):
    assert norms(pricer, *shape, dtype="float16") == pytest.approx(expected, rel=0.3)
    half, whole = (norms(pricer, *shape, dtype=each) for each in ("float16", "float32"))
    assert half == pytest.approx(whole, rel=0.01)


def test_batch_norms_of_small_channels_are_read_once(pricer):
    half, whole = (
        norms(pricer, 64, 512, 14, 14, dtype=each) for each in ("float16", "float32")
    )
    assert half[0] < 0.7 * whole[0]
    assert half == pytest.approx((12e-6, 18e-6), rel=0.4)


def test_few_channels_leave_multiprocessors_idle(pricer):
    few, many = (
        norms(pricer, 64, c, 56, 256 * 56 // c, dtype="float32") for c in (32, 256)
    )
    assert few[1] > 3 * many[1]
    # A channel has a multiprocessor to itself, so that fewer of them are no quicker.
    for dtype in ("bfloat16", "float32"):
        fewer, more = (norms(pricer, 64, c, 56, 448, dtype=dtype) for c in (16, 64))
        assert fewer == pytest.approx(more, rel=0.05)
    # Not where channels are last: all read together.
    few = norms(pricer, 64, 32, 56, 448, dtype="float16", last=True)
    many = norms(pricer, 64, 256, 56, 56, dtype="float16", last=True)
    assert few == pytest.approx(many, rel=0.01)


def group_norms(pricer, dtype):
    x, c = tensor(48, 128, 64, 64, dtype=dtype), tensor(128, dtype=dtype)
    of_groups = tensor(48, 32, dtype=dtype)
    once = operator("native_group_norm", (x, c, c), (x, of_groups, of_groups))
    inputs = x, x, of_groups, of_groups, c
    back = operator("native_group_norm_backward", inputs, (x, c, c))
    return pricer.price(once).seconds, pricer.price(back).seconds


def test_group_norms_take_their_time_by_elements(pricer):
    whole = group_norms(pricer, "float32")
    assert whole == pytest.approx((140e-6, 190e-6), rel=0.05)
    assert group_norms(pricer, "bfloat16") == pytest.approx(whole, rel=0.05)


def test_pooling_over_volumes(pricer):
    x, y = (tensor(2, 32, n, n, n, dtype="float16") for n in (96, 48))
    op = operator("max_pool3d_with_indices", (x,), (y, y._replace(dtype="int64")))
    assert pricer.price(op).seconds == pytest.approx(162e-6, rel=0.15)


def test_padding_fills_and_copies(pricer):
    small, large = (tensor(8, 64, n, dtype="float32") for n in (8192, 8704))
    padded = pricer.price(operator("constant_pad_nd", (small,), (large,))).seconds
    cut = pricer.price(operator("constant_pad_nd", (large,), (small,))).seconds
    assert padded == pytest.approx(27e-6, rel=0.3)
    assert 3e-6 < padded - cut < 9e-6


# --- the host, and compiled regions -------------------------------------------------


def test_the_host_launches_the_copies(host):
    launch = host.figures.number("host_forward.no_grad_add") * 2 / 3
    w = tensor(128, 128, 3, 3)

    def seconds(op):
        host.seconds(op)
        return host.seconds(op)  # the second of its kind

    first, last = (tensor(64, 128, 28, 28, last=each) for each in (False, True))
    as_it_is = seconds(forward(last, w, 128))
    assert seconds(forward(first, w, 128)) == pytest.approx(as_it_is + 3 * launch)
    biased = forward(last, w, 128, tensor(128))
    assert seconds(biased) == pytest.approx(as_it_is + 2 * launch)
    of_one_pixel = tensor(128, 128, 1, 1)
    assert seconds(forward(first, of_one_pixel, 128)) == pytest.approx(as_it_is)
    one, both = (
        seconds(backward(first, w, 128, asked=asked))
        for asked in ((False, True, False), BOTH)
    )
    assert both == pytest.approx(one + 3 * launch)


def test_group_norms_launch_several_kernels(host):
    x, c = tensor(48, 128, 64, 64), tensor(128)
    norm = operator("native_group_norm", (x, c, c), (x, c, c))
    plain = operator("leaky_relu", (x,), (x,))
    host.seconds(norm), host.seconds(plain)
    more = 2 * host.figures.number("host_forward.no_grad_add")
    assert host.seconds(norm) - host.seconds(plain) == pytest.approx(more, rel=0.7)


def test_compiled_batch_norms_read_a_channel_before_its_result():
    x, c = tensor(64, 128, 28, 28), tensor(128, dtype="float32")
    whole = 2 * 64 * 128 * 28**2
    relu = operator("relu", (x,), (x,))
    once = operator("native_batch_norm", (x, c, c, c, c), (x, c, c))
    assert _read_again([once, relu]) == [whole, 0]
    back = operator("native_batch_norm_backward", (x, x, c, c, c, c, c), (x, c, c))
    assert _read_again([relu, back]) == [2 * whole, 0]
    rows = operator("native_layer_norm", (x, c, c), (x, c, c))
    assert _read_again([rows, relu]) == []
