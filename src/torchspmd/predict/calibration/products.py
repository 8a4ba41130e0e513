"""Matrix products, attention and convolutions, by shape."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchspmd.predict.calibration.meter import (
    DTYPES,
    Call,
    Case,
    Limits,
    Measured,
    Meter,
    shuffled,
)

__all__ = ["attention", "convolutions", "matmuls", "sustained"]

# ----------------------------------------------------------------------------
# Matrix products: [layout, batch, rows, columns, depth, seconds]

LAYOUTS = ("nn", "tn", "nt")  # as of dX = dY W; Y = X Wt; dW = dYt X


def _matmul_cases() -> Iterator[tuple[str, int, int, int, int, int]]:
    rows = (128, 512, 2048, 8192, 32768)
    for layout, m, n, k in itertools.product(
        range(3), rows, (512, 1024, 4096, 14336), (512, 1024, 4096, 14336)
    ):
        shape = (n, k, m) if LAYOUTS[layout] == "nt" else (m, n, k)
        yield "bfloat16", layout, 1, *shape
    # widths of common models, rows that no tile divides, vocabularies
    for layout, (m, n, k) in itertools.product(
        range(3),
        (
            (8192, 768, 768),
            (8192, 2304, 768),
            (8192, 3072, 768),
            (8192, 768, 3072),
            (12608, 768, 768),
            (12608, 3072, 768),
            (8192, 5120, 5120),
            (3000, 3000, 3000),
            (8192, 50304, 768),
            (8192, 32000, 1024),
            (4096, 128256, 4096),
        ),
    ):
        shape = (n, k, m) if LAYOUTS[layout] == "nt" else (m, n, k)
        yield "bfloat16", layout, 1, *shape
    for b, (m, n, k) in itertools.product(
        (8, 96), ((1024, 2048, 512), (1024, 512, 2048), (512, 64, 512), (256, 256, 64))
    ):
        yield "bfloat16", 0, b, m, n, k
        yield "float32", 0, b, m, n, k
    sizes = (512, 2048, 8192)
    for m, n, k in itertools.product(sizes, (768, 3072), (768, 3072)):
        yield from (("float16", 1, 1, m, n, k), ("float16", 2, 1, n, k, m))
        for dtype in ("tf32", "float32"):
            yield from ((dtype, 0, 1, m, n, k), (dtype, 1, 1, m, n, k))
            yield dtype, 2, 1, n, k, m
    for m, n, k in ((12608, 3072, 768), (8192, 50304, 768), (4096, 4096, 4096)):
        for layout, dtype in itertools.product(range(3), ("tf32", "float32")):
            yield dtype, layout, 1, m, n, k


def matmuls(meter: Meter, limits: Limits) -> Iterator[Case]:
    """Over a grid of sizes, and of sizes of common models."""
    for name, layout, *shape in shuffled(_matmul_cases()):
        batch, m, n, k = shape
        nbytes = DTYPES[name].itemsize * batch * (m * k + k * n + m * n)
        if 2 * math.prod(shape) <= limits.flops and nbytes <= limits.nbytes:
            yield partial(_time_matmul, name, meter, layout, (batch, m, n, k))


def _time_matmul(
    name: str, meter: Meter, layout: int, shape: tuple[int, int, int, int]
) -> Measured:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        seconds = meter.device_seconds(_matmul(meter, DTYPES[name], layout, shape))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    yield f"matmul.{name}", (layout, *shape, seconds)


def _matmul(
    meter: Meter, dtype: torch.dtype, layout: int, shape: tuple[int, int, int, int]
) -> Call:
    batch, m, n, k = shape
    if batch > 1:
        left = meter.random(batch, m, k, dtype=dtype)
        right = meter.random(batch, k, n, dtype=dtype)
        return lambda: torch.bmm(left, right)
    left_t, right_t = LAYOUTS[layout] == "nt", LAYOUTS[layout] == "tn"
    left = (
        meter.random(k, m, dtype=dtype).t()
        if left_t
        else meter.random(m, k, dtype=dtype)
    )
    right = (
        meter.random(n, k, dtype=dtype).t()
        if right_t
        else meter.random(k, n, dtype=dtype)
    )
    return lambda: torch.mm(left, right)


def sustained(meter: Meter, limits: Limits) -> Iterator[Case]:
    """The rate of a large product, at once and after seconds of it."""
    yield partial(_time_sustained, "a large product", meter, limits)


def _time_sustained(label: str, meter: Meter, limits: Limits) -> Measured:
    """A large product for seconds: what is left when the chip is hot."""
    del label
    side = 8192
    while 2 * side**3 > limits.flops:
        side //= 2
    left, right = meter.random(side, side), meter.random(side, side)

    def rate(seconds: float) -> float:
        count = 0
        start = time.perf_counter()
        while time.perf_counter() < start + seconds:
            for _ in range(10):
                torch.mm(left, right)
            meter.synchronize()
            count += 10
        return 2 * side**3 * count / (time.perf_counter() - start)

    seconds = 1.0 if meter.is_cuda else 0.01
    short = 2 * side**3 / meter.device_seconds(lambda: torch.mm(left, right))
    yield "flops.bfloat16_achieved", short
    rate(1.5 * seconds)
    yield "flops.bfloat16_sustained", rate(seconds)


# ----------------------------------------------------------------------------
# Attention: [batch, heads, key heads, queries, keys, width, causal, seconds]

# The first one is what torch chooses by itself.
_KERNELS: dict[str, Any] = {
    "default": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def _attention_cases() -> Iterator[tuple[str, str, int, int, int, int, int, int]]:
    for length, width, causal in itertools.product(
        (256, 512, 1024, 2048, 4096, 8192, 16384), (64, 128), (0, 1)
    ):
        for heads, tokens in ((2048 // width, 16384), (1024 // width, 4096)):
            batch = max(1, tokens // length)
            for groups in (1, 4):
                kv_heads = heads // groups
                yield (
                    "default",
                    "bfloat16",
                    batch,
                    heads,
                    kv_heads,
                    length,
                    width,
                    causal,
                )
    for batch, heads, length, causal in (
        (4704, 12, 8, 0),  # as in a video: a patch attends to its past and future
        (64, 12, 197, 0),
        (8, 12, 1024, 1),
        (4, 16, 2048, 1),
    ):
        yield "default", "bfloat16", batch, heads, heads, length, 64, causal
        yield "flash", "bfloat16", batch, heads, heads, length, 64, causal
        for kernel, dtype in (
            ("efficient", "bfloat16"),
            ("efficient", "float32"),
            ("cudnn", "bfloat16"),
        ):
            yield kernel, dtype, batch, heads, heads, length, 64, causal
    for batch, length, causal in ((8, 1024, 1), (8, 512, 0), (2, 4096, 1)):
        yield "efficient", "float32", batch, 16, 16, length, 64, causal
        yield "cudnn", "bfloat16", batch, 16, 16, length, 128, causal


def attention(meter: Meter, limits: Limits) -> Iterator[Case]:
    """Forward and backward, by kernel; first those that have few cases."""
    cases = shuffled(_attention_cases())
    cases.sort(key=lambda case: case[0] == "default")
    for kernel, dtype, *shape in cases:
        batch, heads, _, length, width, _ = shape
        if 4 * batch * heads * length**2 * width <= limits.flops:
            yield partial(_time_attention, f"{kernel} {dtype}", meter, shape)


def _time_attention(label: str, meter: Meter, shape: Sequence[int]) -> Measured:
    kernel, dtype = label.split()
    batch, heads, kv_heads, length, width, causal = shape
    q, k, v = (
        meter.random(batch, count, length, width, dtype=DTYPES[dtype]).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=bool(causal), enable_gqa=heads != kv_heads
        )

    with sdpa_kernel(_KERNELS[kernel] if meter.is_cuda else SDPBackend.MATH):
        forward = meter.device_seconds(call)
        result = call()
    gradient = torch.randn_like(result)
    backward = meter.device_seconds(
        lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True)
    )
    row = (batch, heads, kv_heads, length, length, width, causal)
    yield f"attention.{kernel}_forward_{dtype}", (*row, forward)
    yield f"attention.{kernel}_backward_{dtype}", (*row, backward)


# ----------------------------------------------------------------------------
# Convolutions: [batch, inputs, side, outputs, kernel, stride, channels last, seconds]


def _convolution_cases() -> Iterator[tuple[str, int, int, int, int, int, int, int]]:
    shapes = (
        (3, 224, 64, 7, 2),
        (64, 56, 64, 1, 1),
        (64, 56, 64, 3, 1),
        (64, 56, 256, 1, 1),
        (256, 56, 64, 1, 1),
        (256, 56, 128, 1, 1),
        (128, 56, 128, 3, 2),
        (128, 28, 128, 3, 1),
        (128, 28, 512, 1, 1),
        (512, 28, 128, 1, 1),
        (256, 56, 512, 1, 2),
        (512, 28, 256, 1, 1),
        (256, 28, 256, 3, 2),
        (256, 14, 256, 3, 1),
        (256, 14, 1024, 1, 1),
        (1024, 14, 256, 1, 1),
        (512, 14, 512, 3, 2),
        (512, 7, 512, 3, 1),
        (512, 7, 2048, 1, 1),
        (2048, 7, 512, 1, 1),
        (3, 224, 768, 16, 16),
        (128, 64, 128, 3, 1),  # of a U-Net: larger ones reach more of the rate
        (256, 32, 256, 3, 1),
    )
    for dtype, (inputs, side, outputs, kernel, stride) in itertools.product(
        ("bfloat16", "tf32"), shapes
    ):
        for batch, last in ((64, 0), (16, 0), (64, 1)):
            yield dtype, batch, inputs, side, outputs, kernel, stride, last


def convolutions(meter: Meter, limits: Limits) -> Iterator[Case]:
    """Forward and backward, those of image models."""
    for name, *shape in shuffled(_convolution_cases()):
        batch, inputs, side, outputs, kernel, stride, _ = shape
        flops = 2 * batch * inputs * outputs * (side * kernel / stride) ** 2
        if flops <= limits.flops:
            yield partial(_time_convolution, name, meter, shape)


def _time_convolution(name: str, meter: Meter, shape: Sequence[int]) -> Measured:
    batch, inputs, side, outputs, kernel, stride, last = shape
    layout = torch.channels_last if last else torch.contiguous_format
    x = meter.random(batch, inputs, side, side, dtype=DTYPES[name])
    w = meter.random(outputs, inputs, kernel, kernel, dtype=DTYPES[name])
    x, w = (each.to(memory_format=layout) for each in (x, w))
    padding = 0 if stride == kernel else kernel // 2
    rest = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    forward = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    seconds = meter.device_seconds(lambda: forward(x, w, None, *rest))
    yield f"convolution.forward_{name}", (*shape, seconds)
    g = torch.randn_like(forward(x, w, None, *rest))
    mask = [inputs > 3, True, False]  # images need no gradient
    seconds = meter.device_seconds(lambda: backward(g, x, w, None, *rest, mask))
    yield f"convolution.backward_{name}", (*shape, seconds)
