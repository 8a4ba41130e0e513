"""Seconds of one operator on the device.

An ideal time from rates of the chip (operations, bytes, waves of tiles over its
multiprocessors), times the ratio of measured to ideal seconds of similar cases in the
hardware file. What is not known is priced by its bytes, and listed.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchspmd import _torch
from torchspmd.predict.convolutions import (
    Filters,
    filters_of,
    is_packed,
    measured_filters,
)
from torchspmd.predict.figures import Correction, Figures, Line
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.traffic import (
    base_name,
    bytes_moved,
    is_contiguous,
    matmul_shape,
    op_flops,
    recurrent_products,
    tensor_bytes,
)
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = ["LAUNCHES_NOTHING", "Cost", "Pricer", "factor_of", "is_known", "rate_name"]

# Rows and columns of an output tile, and the part of the best rate that it reaches.
_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
# cuDNN has more for few channels.
_TILES_OF_FILTERS = (*_TILES, (128, 64, 0.65), (256, 32, 0.4))
# Kernels beside the product: set memory to zero, add up what was split.
_BESIDE_FILTERS = 3
_CORNER = (
    1.5  # how sharp the corner of the roofline is; infinite would be the ideal one
)
_WIDTH = 64  # channels of a head: attention is no quicker with less
_ITEM = 2  # bytes of an element in most tables of hardware files
_FEW_CHANNELS, _CHANNELS = 64, (512, 2048)  # of the batch norms in hardware files
_READ_ONCE = 2**17  # bytes of a channel that cuDNN's batch norm keeps while it runs
# How batch norms of few channels, which leave multiprocessors idle, quicken with more. In
# profiles of ResNeXt, ResNet-18 and a U-Net, 128 channels took 0.6 to 0.7 of the time.
_FILLING = 2 / 3

# Beside what torch says is pointwise.
_MOVES_BYTES = frozenset(
    """
    __and__ __or__ __xor__ _amp_foreach_non_finite_check_and_unscale_
    _amp_update_scale_ _chunk_cat _embedding_bag _embedding_bag_backward
    _embedding_bag_dense_backward _foreach_copy_ _index_put_impl_ _reshape_copy
    _to_copy _unsafe_index arange bernoulli bernoulli_ cat complex constant_pad_nd
    contiguous copy_ diagonal_copy elu_backward embedding embedding_dense_backward
    empty empty_like empty_strided expand_copy exponential_ eye fill fill_ flip
    floor_divide full full_like gather glu glu_backward hardswish hardswish_backward
    hardtanh_backward index index_add index_add_ index_copy index_copy_ index_put
    index_put_ index_select leaky_relu_backward lift_fresh linear_backward log_sigmoid
    log_sigmoid_backward log_sigmoid_forward masked_fill_ mish_backward native_dropout
    new_empty new_full new_ones new_zeros normal_ ones ones_like polar rand rand_like
    randint randn randn_like random_ repeat roll rot90 scalar_tensor scatter scatter_
    scatter_add scatter_add_ select_backward slice_backward softplus_backward
    split_copy split_with_sizes_copy stack take_along_dim tril triu unfold_backward
    uniform_ upsample_bilinear2d upsample_nearest2d view_as_real_copy zero_ zeros
    zeros_like
    """.split()
)
_REDUCING = frozenset(
    """
    all amax amin any argmax argmin aminmax cummax cumsum linalg_vector_norm logsumexp max
    mean min norm prod std sum var var_mean _safe_softmax topk sort argsort nll_loss_forward
    nll_loss_backward _softmax _softmax_backward_data _log_softmax
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward
    _fused_rms_norm _fused_rms_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward cudnn_batch_norm
    cudnn_batch_norm_backward _native_batch_norm_legit _batch_norm_with_update
    batch_norm_backward _batch_norm_impl_index max_pool2d_with_indices
    max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward mean_backward histc bincount
    nonzero unique_dim _unique2 multinomial mse_loss mse_loss_backward dot
    binary_cross_entropy_with_logits binary_cross_entropy smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss _local_scalar_dense item equal
    """.split()
)
# Launch nothing, and are no views of their arguments to torch.
LAUNCHES_NOTHING = frozenset(
    """
    _reshape_alias _unsafe_view alias as_strided_ detach detach_ empty empty_like
    empty_strided lift_fresh new_empty new_empty_strided resize_ set_
    """.split()
)
# Figures under other names than the operator's.
_KEYS = {
    "zero_": "fill",
    "fill_": "fill",
    "zeros": "fill",
    "ones": "fill",
    "full": "fill",
    "zeros_like": "fill",
    "ones_like": "fill",
    "full_like": "fill",
    "new_zeros": "fill",
    "normal_": "random",
    "uniform_": "random",
    "randn": "random",
    "rand": "random",
    "randint": "random",
    "bernoulli_": "random",
    "cat": "concatenate",
    "stack": "concatenate",
    "index_put_": "index_put",
    "_index_put_impl_": "index_put",
    "index_add_": "index_add",
    "index_select": "index",
    "silu_": "silu",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "_batch_norm_impl_index": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "max_pool3d_with_indices": "max_pool2d_with_indices",
    "argsort": "sort",
    "_safe_softmax": "_softmax",
}


# Copy arguments that are not contiguous, before their kernels begin.
_CONTIGUOUS_INSIDE = frozenset(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    native_group_norm native_group_norm_backward
    """.split()
)

_ON_TENSOR_CORES = frozenset({"bfloat16", "float16", "float8", "tf32"})


class Cost(NamedTuple):
    """What an operator takes.

    Attributes:
        seconds: On the device.
        nbytes: That it moves.
        flops: Floating-point operations.
        kind: ``matmul``, ``attention``, ``convolution``, ``memory``, ``copy`` or ``view``.
        kernels: That it launches; those of torch's own operators count as one.
        busy: Seconds of a large product that would take as much energy; 0 without tensor
            cores.
    """

    seconds: float
    nbytes: int
    flops: float
    kind: str
    kernels: int = 1
    busy: float = 0.0


class Pricer:
    """Prices operators for one GPU.

    Attributes:
        figures: Of the GPU.
        floor: Seconds of the shortest kernel.
    """

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self._costs: dict[object, Cost] = {}
        self._corrections: dict[str, Correction] = {}
        self._lines: dict[str, tuple[Hardware, Line]] = {}
        self._rates: dict[tuple[str, str], _Rates] = {}
        self.floor = figures.number("launch.kernel")

    def price(self, op: Op) -> Cost:
        """The cost of an operator by itself."""
        if op.views:
            return Cost(0.0, 0, 0.0, "view")
        key = (
            op.name,
            op.scalars,
            tuple((s.shape, s.stride, s.dtype, s.device) for s in op.inputs),
            tuple((s.shape, s.dtype) for s in op.outputs),
        )
        try:
            cost = self._costs.get(key)
        except TypeError:  # a scalar that is a list
            key = repr(key)  # type: ignore[assignment]
            cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = self._price(op)
        return cost

    def _price(self, op: Op) -> Cost:
        nbytes = bytes_moved(op.name, op.inputs, op.outputs)
        base = base_name(op.name)
        shape = matmul_shape(op)
        if _copies_to_host(op):
            seconds = self.floor + nbytes / 2 / self.figures.number("bandwidth.host")
            return Cost(seconds, nbytes, 0.0, "copy")
        if base in LAUNCHES_NOTHING:
            return Cost(0.0, 0, 0.0, "view")
        flops = op_flops(op)
        busy = self._busy(op, flops) if flops else 0.0
        if shape is not None:
            seconds = self._matmul(op, shape)
            return Cost(seconds, nbytes, flops, "matmul", busy=busy)
        if flops and "attention" in base:
            seconds = self._attention(op, flops)
            if busy:
                busy = self.figures.number("power.attention") * seconds
            return Cost(seconds, nbytes, flops, "attention", busy=busy)
        if flops and "rnn" in base:
            seconds = self._recurrent(op)
            return Cost(seconds, nbytes, flops, "matmul", busy=busy)
        if flops:
            seconds = self._convolution(op, nbytes)
            return Cost(seconds, nbytes, flops, "convolution", busy=busy)
        return Cost(self._memory_bound(op, nbytes), nbytes, 0.0, "memory")

    def _busy(self, op: Op, flops: float) -> float:
        dtype = rate_name(op)
        if dtype not in _ON_TENSOR_CORES:
            return 0.0
        return flops / self._rate(self.figures.gpu, dtype).achieved

    # --- products ---------------------------------------------------------------------

    def _matmul(self, op: Op, shape: tuple[int, int, int, int]) -> float:
        if not all(shape):
            return self.floor
        dtype = rate_name(op)
        layout = _layout(op)
        rates = self._rate(self.figures.gpu, dtype)
        seconds = _ideal_matmul(rates, shape) * self._matmul_ratio(dtype, layout, shape)
        times = self._misaligned(op, shape) if dtype in _ON_TENSOR_CORES else 1.0
        if times > 1:  # the measured rows are of aligned products
            slower = rates._replace(achieved=rates.achieved / times)
            seconds = max(seconds, _ideal_matmul(slower, shape))
        return max(self.floor, seconds)

    def _recurrent(self, op: Op) -> float:
        """Layers of an LSTM: for each cell a small product and a pass over its gates.

        Layers come one after the other; cuDNN lets them overlap a little.
        """
        found = recurrent_products(op)
        assert found is not None
        cells, (each, *once) = found
        spec = op.inputs[0]
        dtype = "tf32" if spec.dtype == "float32" else spec.dtype  # cuDNN's default

        def product(shape: tuple[int, int, int, int]) -> float:
            ideal = _ideal_matmul(self._rate(self.figures.gpu, dtype), shape)
            return max(self.floor, ideal * self._matmul_ratio(dtype, 0, shape))

        _, batch, *sizes = each  # of hidden states and of gates
        nbytes = 3 * batch * max(sizes) * (4 if spec.dtype == "float32" else 2)
        cell = product(each) + self._by_bytes("elementwise_3", nbytes)
        return cells * cell + sum(map(product, once))

    def _misaligned(self, op: Op, shape: tuple[int, int, int, int]) -> float:
        """How much slower a product is whose matrices' rows begin at odd addresses."""
        item = tensor_bytes(_element(factor_of(op)))
        rows = [
            max(spec.stride[-2:])
            for spec in op.inputs
            if len(spec.shape) > 1 and min(spec.shape[-2:]) > 1  # no vectors
        ]
        step = math.gcd(16, *(item * each for each in (*rows, shape[2])))
        if step == 16:
            return 1.0
        return self.figures.number(f"kernels.misaligned_{step}")

    def _rate(self, hardware: Hardware, dtype: str) -> "_Rates":
        key = (hardware.title, dtype)
        if key not in self._rates:
            self._rates[key] = _rates(self.figures, hardware, dtype)
        return self._rates[key]

    def _matmul_ratio(
        self, dtype: str, layout: int, shape: tuple[int, int, int, int]
    ) -> float:
        key = f"matmul.{dtype}"
        if key not in self._corrections:
            hardware, rows = self.figures.table(key)
            measured = dtype
            if not rows and dtype in ("float16", "float8"):  # kernels of the same form
                measured, key = "bfloat16", "matmul.bfloat16"
                hardware, rows = self.figures.table(key)
            rates = self._rate(hardware, measured)
            points, ratios = [], []
            for at, batch, m, n, k, seconds in rows:
                sizes = (int(batch), int(m), int(n), int(k))
                points.append(_matmul_point(int(at), sizes))
                ratios.append(seconds / _ideal_matmul(rates, sizes))
            self._corrections[key] = Correction(points, ratios)
            self._corrections[f"matmul.{dtype}"] = self._corrections[key]
        return self._corrections[key].at(_matmul_point(layout, shape))

    def _attention(self, op: Op, flops: float) -> float:
        base = base_name(op.name)
        backward = "backward" in base
        tensors = [spec for spec in op.inputs if len(spec.shape) == 4]
        query, key, *_ = tensors[backward:]
        kernel = next(
            (name for name in ("efficient", "cudnn") if name in base), "flash"
        )
        dtype = query.dtype if query.dtype == "float32" else "bfloat16"
        direction = "backward" if backward else "forward"
        causal = bool(dict(op.scalars).get("is_causal"))
        batch, heads, rows, width = query.shape
        columns = key.shape[2]
        may_choose = dict(op.scalars).get("cudnn", True)
        table = self._attention_name(kernel, f"{direction}_{dtype}", bool(may_choose))
        rate = self._attention_rate(self.figures.gpu, direction, dtype)
        ideal = flops / rate * self._short(self.figures.gpu, dtype, columns)
        ideal *= _padded(width)
        if table not in self._corrections:
            self._corrections[table] = self._attention_table(table, direction, dtype)
        point = _attention_point(batch, heads, key.shape[1], rows, width, causal)
        seconds = ideal * self._corrections[table].at(point)
        if dict(op.scalars).get("dropout_p"):
            seconds *= self.figures.number(f"kernels.attention_dropout_{direction}")
        if kernel == "flash" and not may_choose:
            seconds *= self.figures.optional("attention.flash_times", 1.0)
        return max(self.floor, seconds)

    def _attention_name(self, kernel: str, rest: str, may_choose: bool) -> str:
        """Where torch chooses by itself, from Hopper on, it is cuDNN's that runs."""
        chosen = [kernel]
        is_new = float(self.figures.gpu.compute_capability or 0) >= 9
        if kernel == "flash" and is_new and may_choose:
            chosen = ["default", "cudnn", kernel]
        names = [f"attention.{name}_{rest}" for name in chosen]
        return next((name for name in names if self.figures.has(name)), names[-1])

    def _attention_rate(self, hardware: Hardware, direction: str, dtype: str) -> float:
        part = self.figures.number(f"attention.{direction}_efficiency")
        return part * hardware.number(f"flops.{dtype}")

    def _short(self, hardware: Hardware, dtype: str, keys: float) -> float:
        """How much slower few keys are: starting a tile takes as long at every rate."""
        rate = hardware.number(f"flops.{dtype}") / hardware.number("flops.bfloat16")
        half = self.figures.number("kernels.attention_keys")
        return 1 + half * rate / max(keys, 1)

    def _attention_table(self, table: str, direction: str, dtype: str) -> Correction:
        hardware, rows = self.figures.table(table)
        rate = self._attention_rate(hardware, direction, dtype) if rows else 1.0
        points, ratios = [], []
        for batch, heads, kv_heads, length, keys, width, causal, seconds in rows:
            flops = 4 * batch * heads * length * keys * width / (2 if causal else 1)
            flops *= 2.5 if direction == "backward" else 1
            ideal = flops / rate * self._short(hardware, dtype, keys)
            ideal *= _padded(width)
            points.append(
                _attention_point(batch, heads, kv_heads, length, width, bool(causal))
            )
            ratios.append(seconds / ideal)
        return Correction(points, ratios)

    def _convolution(self, op: Op, nbytes: int) -> float:
        backward = "backward" in op.name
        filters = filters_of(op)
        direction = "backward" if backward else "forward"
        if filters.groups > 1 and not filters.last:
            if filters.inputs == filters.groups:
                return self._in_groups(op, "depthwise", direction)
            if not is_packed(filters):
                return self._in_groups(op, "grouped", direction)
        seconds = self._filters(op, nbytes, filters, direction)
        return seconds + self._beside_filters(op, filters)

    def _in_groups(self, op: Op, kind: str, direction: str) -> float:
        """Without tensor cores.

        One filter a channel: torch's own kernels, with the bias inside. Others: cuDNN's, of
        each group by itself.
        """
        part = self.figures.number(f"kernels.{kind}_{direction}")
        rate = part * self.figures.number("flops.float32")
        return max(self.floor, op_flops(op) / rate)

    def _beside_filters(self, op: Op, filters: Filters) -> float:
        """Copies of torch into the order of the others, and what a bias adds."""
        backward = "backward" in op.name
        x = op.inputs[backward]
        result = op.inputs[0] if backward else op.outputs[0]
        seconds = 0.0
        if len(x.shape) == 4:
            for spec in (x, result) if backward else (x,):
                if not _lies_as(spec, last=filters.last):
                    seconds += self._copied(spec)
        if filters.bias and backward:
            # Over images and places: threads read far apart.
            elements = _ITEM * math.prod(result.shape)
            seconds += self._by_bytes("reduce_columns", elements)
        elif filters.bias:
            seconds += self._broadcast([result], 2 * tensor_bytes(result))
        return seconds

    def _filters(self, op: Op, nbytes: int, filters: Filters, direction: str) -> float:
        dtype = op.inputs[0].dtype
        if dtype == "float32" and dict(op.scalars).get("allow_tf32", True):
            dtype = "tf32"
        if dtype == "float32" or not is_packed(filters):
            ideal = op_flops(op) / self._rate(self.figures.gpu, dtype).achieved
            other = self.figures.number("kernels.other_convolution")
            moving = self._by_bytes("elementwise_2", nbytes)
            return max(self.floor, other * ideal, moving)
        ideal = self._ideal_filters(self.figures.gpu, dtype, filters)
        return max(self.floor, ideal * self._filters_ratio(dtype, direction, filters))

    def _filters_ratio(self, dtype: str, direction: str, filters: Filters) -> float:
        measured = (
            "bfloat16" if dtype == "float16" else dtype
        )  # kernels of the same form
        table = f"convolution.{direction}_{measured}"
        if table not in self._corrections:
            hardware, rows = self.figures.table(table)
            cases = [measured_filters(row[:-1], direction) for row in rows]
            ideal = [self._ideal_filters(hardware, measured, case) for case in cases]
            self._corrections[table] = Correction(
                [case.point for case in cases],
                [row[-1] / each for row, each in zip(rows, ideal, strict=True)],
            )
        return self._corrections[table].at(filters.point)

    def _ideal_filters(self, hardware: Hardware, dtype: str, filters: Filters) -> float:
        """Each pass is a product, and copies of what it reads and writes."""
        rates = self._rate(hardware, dtype)
        image, result, weight = filters.elements
        nbytes = rates.item * (image + result + weight)  # read once, not unfolded
        once = _ideal_matmul(rates, filters.product, _TILES_OF_FILTERS, nbytes)
        kernels = _BESIDE_FILTERS
        if filters.is_copied(rates.item):
            rate = self.figures.number("kernels.channels_last") * rates.memory
            if rates.item > _ITEM:
                rate /= self.figures.number("kernels.transpose_4_bytes")
            once += 2 * nbytes / rate
            kernels += 3
        return filters.passes * (once + kernels * self._shortest(hardware))

    # --- memory -----------------------------------------------------------------------

    def _memory_bound(self, op: Op, nbytes: int) -> float:
        key = memory_key(op, self._has)
        if key.startswith("batch_norm") and len(op.inputs[0].shape) > 1:
            return self._batch_norm(key, op, nbytes)
        if key.startswith("native_group_norm"):  # by elements: measured with four bytes
            nbytes = nbytes * 4 // tensor_bytes(_element(op.inputs[0]))
        seconds = self._by_bytes(key, nbytes)
        if key == "broadcast":
            seconds = self._broadcast(_large(op), nbytes)
        if key == "transpose":
            seconds *= self._transposing(op.inputs[-1])
        base = base_name(op.name)
        if base in _CONTIGUOUS_INSIDE:
            for spec in op.inputs[: 1 + ("backward" in base)]:
                if not is_contiguous(spec):
                    seconds += self._made_contiguous(spec)
        if key == "concatenate_strided":
            whole = [spec for spec in op.inputs if is_contiguous(spec)]
            part = 2 * sum(map(tensor_bytes, whole))  # read and written
            seconds = self._by_bytes(key, nbytes - part)
            seconds += self._by_bytes("concatenate", part) if part else 0.0
        if key in ("concatenate", "broadcast") or key.startswith("elementwise"):
            if any(not _is_dense(spec) for spec in _large(op)) or _is_strided(op):
                seconds *= self.figures.number("kernels.strided")
        if base == "constant_pad_nd":
            seconds = self._padded(op)
        return max(seconds, self._least(op))

    def _least(self, op: Op) -> float:
        """What rows and indices take, however few bytes they have."""
        base = base_name(op.name)
        if base == "native_layer_norm":
            row = self.figures.number("kernels.layer_norm_row")
            return row * math.prod(op.outputs[1].shape)
        if base in ("_embedding_bag_backward", "_embedding_bag_dense_backward"):
            return self.figures.number("kernels.embedding_bag_backward")
        return 0.0

    def _padded(self, op: Op) -> float:
        """The result is filled, and the argument copied into it; or a part is copied."""
        before, after = (tensor_bytes(each[0]) for each in (op.inputs, op.outputs))
        filled = self._by_bytes("fill", after) if after > before else 0.0
        return filled + self._by_bytes("strided", 2 * min(before, after))

    def _broadcast(self, large: Sequence[TensorSpec], nbytes: int) -> float:
        """Every element's place is computed: measured with two bytes each."""
        item = max(_ITEM, *(tensor_bytes(_element(spec)) for spec in large))
        computed = self._by_bytes("broadcast", nbytes * _ITEM // item)
        return max(computed, self._by_bytes("elementwise_1", nbytes))

    def _copied(self, spec: TensorSpec) -> float:
        """A copy of a tensor, in another order of its dimensions."""
        seconds = self._by_bytes("transpose", 2 * tensor_bytes(spec))
        return seconds * self._transposing(spec)

    def _made_contiguous(self, spec: TensorSpec) -> float:
        """A copy whose last dimension comes first in memory: rows may stay whole."""
        if spec.stride[-1] != 1:
            return self._copied(spec)
        return self._by_bytes("strided", 2 * tensor_bytes(spec))

    def _transposing(self, spec: TensorSpec) -> float:
        """Times the seconds of two bytes an element, at the same bytes."""
        if spec.dtype not in ("float32", "int32"):
            return 1.0
        return self.figures.number("kernels.transpose_4_bytes")

    def _batch_norm(self, key: str, op: Op, nbytes: int) -> float:
        """One block of threads for each channel, or where those come last, for several.

        cuDNN's kernels are taken for other types than bfloat16.
        """
        x = op.inputs["backward" in key]
        if x.dtype == "bfloat16":
            return self._native_batch_norm(key, x, nbytes)
        of_all = f"{key}_512_float32"
        if not is_contiguous(x):
            return self._by_bytes(of_all, nbytes)
        channels = x.shape[1]
        of_channel = tensor_bytes(x) // channels * (2 if "backward" in key else 1)
        if of_channel > _READ_ONCE:  # by elements: measured with four bytes each
            nbytes = nbytes * 4 // tensor_bytes(_element(x))
        of_few = self._by_bytes(f"{key}_float32", _as_few(nbytes, channels))
        return max(self._by_bytes(of_all, nbytes), of_few)

    def _native_batch_norm(self, key: str, x: TensorSpec, nbytes: int) -> float:
        if len(x.shape) == 4 and not is_contiguous(x):
            return self._by_bytes(f"{key}_last", nbytes)
        channels = x.shape[1]
        near = min(_CHANNELS, key=lambda count: abs(math.log(count / channels)))
        of_few = self._by_bytes(key, _as_few(nbytes, channels))
        return max(self._by_bytes(f"{key}_{near}", nbytes), of_few)

    def fused(self, nbytes: int) -> float:
        """A kernel of ``torch.compile`` that moves these bytes."""
        return self._by_bytes("elementwise_2", nbytes)

    def _has(self, key: str) -> bool:
        return self.figures.has(f"operators.{key}")

    def _by_bytes(self, key: str, nbytes: int) -> float:
        table = f"operators.{key}"
        if table not in self._lines:
            hardware, rows = self.figures.table(table)
            line = Line(
                [
                    (math.log2(max(size, 1)), seconds / self._ideal(hardware, size))
                    for size, seconds in rows
                ]
            )
            self._lines[table] = hardware, line
        hardware, line = self._lines[table]
        ratio = line.at(math.log2(max(nbytes, 1)))
        seconds = self._ideal(self.figures.gpu, nbytes) * ratio
        if hardware is not self.figures.gpu and ratio > 1:
            seconds = self._carried_over(hardware, nbytes, ratio)
        seconds = max(self.floor, seconds)
        is_cached = nbytes < self.figures.number("chip.l2_bytes") / 4
        if not is_cached and not key.startswith("nll_loss"):  # reads one of each row
            # What is measured over and over again comes from the cache; in a step, others
            # have used it meanwhile.
            seconds = max(seconds, nbytes / reached_bandwidth(self.figures))
        return seconds

    def _carried_over(self, hardware: Hardware, nbytes: int, ratio: float) -> float:
        """What takes longer elsewhere than its bytes: the rest is up to multiprocessors.

        A norm reaches a third of the memory's rate on a chip with much of it; on one with
        less memory for each multiprocessor it reaches more.
        """
        corner = _CORNER
        ideal, here = (
            self._ideal(each, nbytes) for each in (hardware, self.figures.gpu)
        )
        computing = ideal * (ratio**corner - 1) ** (1 / corner)
        computing *= self._clocks(hardware) / self._clocks(self.figures.gpu)
        return float((computing**corner + here**corner) ** (1 / corner))

    def _clocks(self, hardware: Hardware) -> float:
        """Clocks of all multiprocessors in a second."""
        if hardware is self.figures.gpu:
            return self.figures.number("chip.sms") * self.figures.number("chip.clock")
        return hardware.number("chip.sms") * hardware.number("chip.clock")

    def _ideal(self, hardware: Hardware, nbytes: float) -> float:
        return self._shortest(hardware) + nbytes / hardware.number("bandwidth.memory")

    def _shortest(self, hardware: Hardware) -> float:
        """Seconds of a kernel that does nothing."""
        floor = hardware.figures.get("launch.kernel")
        least = self.floor if floor is None else floor.value
        assert not isinstance(least, tuple)
        return least


def reached_bandwidth(figures: Figures) -> float:
    """Bytes a second that long simple kernels move."""
    return figures.number("kernels.memory") * figures.number("bandwidth.memory")


def memory_key(op: Op, has: Callable[[str], bool]) -> str:
    """The table that an operator is priced by: its own, or that of its like."""
    base = base_name(op.name)
    name = _KEYS.get(base, base)
    if name == "concatenate" and has("concatenate_strided"):
        if any(not is_contiguous(spec) for spec in op.inputs):
            return "concatenate_strided"
    if has(name):
        return name
    if base.startswith("_foreach_"):
        count = {"_foreach_addcmul_": 3, "_foreach_addcdiv_": 3}.get(base, 1)
        return f"foreach_{2 if count == 1 and op.name.endswith('.List') else count}"
    if base in ("_to_copy", "copy_", "clone", "contiguous") and op.inputs:
        target = op.outputs[0] if op.outputs else op.inputs[0]
        return _copy_key(op.inputs[-1], target, has)
    if base in _REDUCING:
        return _reduction_key(op)
    if has("strided") and _is_strided(op):
        return "strided"
    if base.endswith("_") and len(op.inputs) > 1:
        return "inplace_2"
    large = [spec for spec in op.inputs if _fills(spec, op.outputs)]
    if len(op.inputs) > len(large) > 0 and len(op.inputs) > 1:
        return "broadcast"
    return f"elementwise_{min(max(len(op.inputs), 1), 3)}"


def _is_strided(op: Op) -> bool:
    """Arguments of the result's shape that do not lie as the result does, or have gaps."""
    if not op.outputs:
        return False
    result = op.outputs[0]
    return any(
        spec.stride != result.stride or not _is_dense(spec)
        for spec in op.inputs
        if spec.shape == result.shape and math.prod(spec.shape) > 1
    )


def _large(op: Op) -> list[TensorSpec]:
    """Arguments that are not much smaller than the largest; caches hold the others."""
    size = max((math.prod(spec.shape) for spec in op.inputs), default=0)
    return [spec for spec in op.inputs if 8 * math.prod(spec.shape) >= size]


def _element(spec: TensorSpec) -> TensorSpec:
    return spec._replace(shape=(1,), stride=(1,))


def _is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory, in any order of the dimensions."""
    expected = 1
    pairs = zip(spec.stride, spec.shape, strict=False)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _fills_alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two tensors of a shape lie in the same order, gaps aside."""
    order = [
        sorted(range(len(spec.shape)), key=lambda at: -spec.stride[at])
        for spec in (one, other)
    ]
    return order[0] == order[1]


def _lies_as(spec: TensorSpec, *, last: bool) -> bool:
    """Whether images lie with channels last, or first."""
    if not last:
        return is_contiguous(spec)
    moved = (0, 2, 3, 1)
    return is_contiguous(
        spec._replace(
            shape=tuple(spec.shape[at] for at in moved),
            stride=tuple(spec.stride[at] for at in moved),
        )
    )


def _as_few(nbytes: int, channels: int) -> int:
    """Bytes of a batch norm of few channels that takes as long as one of more."""
    return int(nbytes * (_FEW_CHANNELS / channels) ** _FILLING)


def _fills(spec: TensorSpec, outputs: Sequence[TensorSpec]) -> bool:
    return not outputs or spec.shape == outputs[0].shape


def _copy_key(
    source: TensorSpec, target: TensorSpec, has: Callable[[str], bool]
) -> str:
    if source.stride != target.stride and source.shape == target.shape:
        if source.stride and target.stride and source.stride[-1:] != target.stride[-1:]:
            return "transpose"
        if has("strided") and not _fills_alike(source, target):
            return "strided"
    if source.dtype != target.dtype:
        wider = tensor_bytes(target) > tensor_bytes(source)
        return "cast" if wider else "cast_down"
    return "elementwise_1"


def _reduction_key(op: Op) -> str:
    if not op.outputs or not op.inputs:
        return "reduce"
    source, result = op.inputs[0].shape, op.outputs[0].shape
    if math.prod(result) <= 1:
        return "reduce"
    kept_last = bool(result) and bool(source) and result[-1] == source[-1]
    return "reduce_columns" if kept_last else "reduce_rows"


def is_known(name: str) -> bool:
    """Whether an operator has a price of its own; others are priced by their bytes."""
    base = base_name(name)
    return (
        base in _MOVES_BYTES
        or _torch.is_pointwise(name)
        or base in LAUNCHES_NOTHING
        or base in _REDUCING
        or base in _KEYS
        or base.startswith(("_foreach_", "_fused_", "convolution", "cudnn_convolution"))
        or name.startswith("fsdp.")  # copies into and out of its buffers
        or base
        in (
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "linear",
            "_scaled_mm",
            "_grouped_mm",
            "_addmm_activation",
            "_cudnn_rnn",
            "_cudnn_rnn_backward",
        )
        or "attention" in base
    )


def _copies_to_host(op: Op) -> bool:
    devices = {spec.device for spec in (*op.inputs, *op.outputs) if spec.shape}
    return devices == {"cpu", "cuda"} and "copy" in op.name


# ----------------------------------------------------------------------------
# Ideal times


class _Rates(NamedTuple):
    """Of one chip and element type: operations and bytes a second; multiprocessors."""

    achieved: float
    memory: float
    sms: int
    item: int


def _rates(figures: Figures, hardware: Hardware, dtype: str) -> _Rates:
    peak = hardware.number(f"flops.{dtype}")
    best = hardware.figures.get(f"flops.{dtype}_achieved")
    if best is None:
        part = hardware.number("flops.bfloat16_achieved") / hardware.number(
            "flops.bfloat16"
        )
        achieved = peak * part
    else:
        assert not isinstance(best.value, tuple)
        achieved = best.value
    if hardware is figures.gpu:  # what the prediction rests on
        figures.number(f"flops.{dtype}_achieved", f"flops.{dtype}")
        figures.number("bandwidth.memory")
    return _Rates(
        achieved=achieved,
        memory=hardware.number("bandwidth.memory"),
        sms=int(hardware.number("chip.sms")),
        item={"float8": 1, "float32": 4, "tf32": 4, "float64": 8}.get(dtype, 2),
    )


def _ideal_matmul(
    rates: _Rates,
    shape: tuple[int, int, int, int],
    tiles: Sequence[tuple[int, int, float]] = _TILES,
    nbytes: float | None = None,
) -> float:
    """A roofline: operations in whole waves of tiles, and bytes; else those of matrices."""
    batch, m, n, k = shape
    flops = 2.0 * batch * m * n * k
    if nbytes is None:
        nbytes = rates.item * batch * (m * k + k * n + m * n)
    filled = 0.0
    for rows, columns, part in tiles:
        count = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(count / rates.sms)
        used = batch * m * n / (rows * columns) / (waves * rates.sms)
        if waves == 1:  # the depth is split where tiles are few
            used = max(used, min(1.0, used * max(1, k // 1024)))
        filled = max(filled, used * part)
    computing: float = flops / (rates.achieved * max(filled, 1e-3))
    moving: float = nbytes / rates.memory
    return float((computing**_CORNER + moving**_CORNER) ** (1 / _CORNER))


def _padded(width: float) -> float:
    """How much more attention takes than its operations, with few channels in a head."""
    return max(1.0, _WIDTH / width)


def _matmul_point(layout: int, shape: tuple[int, int, int, int]) -> tuple[float, ...]:
    batch, m, n, k = (math.log2(max(size, 1)) for size in shape)
    return 1.5 * layout, batch, m, n, k


def _attention_point(
    batch: float, heads: float, kv_heads: float, rows: float, width: float, causal: bool
) -> tuple[float, ...]:
    return (
        0.5 * math.log2(max(batch * heads, 1)),
        math.log2(max(rows, 1)),
        3.0 * math.log2(max(width, 1)),
        0.5 * math.log2(max(heads / max(kv_heads, 1), 1)),
        3.0 * causal,
    )


def rate_name(op: Op) -> str:
    """Which rate of a GPU's file an operator's products run at."""
    dtype = factor_of(op).dtype if op.inputs else ""
    by_cudnn = (
        "convolution" in op.name or "_rnn" in op.name
    )  # it allows TF32 by default
    if dtype == "float32" and dict(op.scalars).get("allow_tf32", by_cudnn):
        return "tf32"
    return "float8" if dtype.startswith("float8") else dtype


def factor_of(op: Op) -> TensorSpec:
    """A tensor whose elements are multiplied: the last that has no integers."""
    base = base_name(op.name)
    if base == "_scaled_mm" or "attention" in base:  # scales and sums are behind it
        return op.inputs[min(1, len(op.inputs) - 1)]
    factors = [spec for spec in op.inputs if "int" not in spec.dtype] or op.inputs
    written = {spec.storage for spec in op.outputs}  # of ``out=``, the last argument
    read = (spec for spec in reversed(factors) if spec.storage not in written)
    return next(read, factors[-1])


def _layout(op: Op) -> int:
    """Which argument is transposed: 0 for none, 1 for the second, 2 for the first."""
    first = 1 if base_name(op.name) in ("addmm", "_addmm_activation") else 0
    if base_name(op.name) == "linear":
        return 1
    if len(op.inputs) <= first + 1:
        return 0
    left, right = op.inputs[first], op.inputs[first + 1]
    if len(left.stride) == 2 and left.stride[0] == 1 and left.shape[0] > 1:
        return 2
    if len(right.stride) == 2 and right.stride[0] == 1 and right.shape[0] > 1:
        return 1
    return 0
