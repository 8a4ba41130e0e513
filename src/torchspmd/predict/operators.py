"""Seconds of one operator on the device.

An ideal time from rates of the chip (operations, bytes, waves of tiles over its
multiprocessors), times the ratio of measured to ideal seconds of similar cases in the
hardware file. What is not known is priced by its bytes, and listed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torchspmd import _torch
from torchspmd.predict.convolutions import (
    Filters,
    filters_of,
    is_packed,
    measured_filters,
)
from torchspmd.predict.figures import Correction, Figures, Line
from torchspmd.predict.forms import (
    COPIES,
    SECTOR,
    by_clock,
    clocks,
    converts,
    element_seconds,
    iterated,
    loops,
    norm_seconds,
    reduction_seconds,
    sectors,
    touched_bytes,
)
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.traffic import (
    base_name,
    bytes_moved,
    is_contiguous,
    matmul_shape,
    op_flops,
    real_dtype,
    recurrent_products,
    tensor_bytes,
)
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = ["LAUNCHES_NOTHING", "Cost", "Pricer", "factor_of", "is_known", "rate_name"]

# Rows and columns of an output tile, and the part of the best rate that it reaches.
_TILES = (
    (128, 256, 1.0),
    (128, 128, 0.9),
    (64, 128, 0.7),
    (64, 64, 0.5),
    (16, 512, 0.21),  # an H200's 512 products of 16 x 3072 x 1024: 314 us
)
_DEPTH = 32  # of a tile's steps
# Least part of a product's depth for a tile, where tiles are few. Without tensor cores, if
# the smallest tiles are too few for the chip: products of 128 rows and a depth of 1536 with
# 512 and 1280 columns took 13 and 21 us in 32 bits on an H200, a third of those not split.
_SPLIT_DEPTH, _SPLIT_DEPTH_SINGLE = 1024, 512
# cuDNN has others for few channels.
_TILES_OF_FILTERS = (*_TILES[:-1], (128, 64, 0.65), (256, 32, 0.4))
# cuBLAS has smaller ones of complex numbers. An H200's products of 576 x 32 x 64 x 64 and
# of 576 x 64 x 64 x 32, all of 32 x 32 tiles: 20.5 and 22.9 us.
_TILES_OF_PAIRS = (*_TILES[:-1], (32, 32, 0.65))
# Kernels beside the product: set memory to zero, add up what was split.
_BESIDE_FILTERS = 3
_CORNER = (
    1.5  # how sharp the corner of the roofline is; infinite would be the ideal one
)
_WIDTH = 64  # channels of a head: attention is no quicker with less
# Queries and keys of a tile of attention, which takes as long where it is not full. The
# memory-efficient kernels showed nothing of it, with 42 and 197 keys in 32 bits.
_ATTENTION_TILES = {"forward": 128, "backward": 64}
_ITEM = 2  # bytes of an element in most tables of hardware files
_ROW = 1024  # elements of a row in those of norms and of sums of columns
_EMBEDDINGS = 32000 * _ROW * _ITEM  # bytes of the table whose gradients are measured
_FFT_BITS = 12  # of the longest transform that one block of threads holds
_EDGE = 3  # as _CORNER, of computing places and moving bytes
_CAT_DIMS = 4  # more than these are concatenated by a copy of each part
_FEW_CHANNELS, _CHANNELS = 64, (512, 2048)  # of the batch norms in hardware files
_READ_ONCE = 2**17  # bytes of a channel that cuDNN's batch norm keeps while it runs
# How batch norms of few channels, which leave multiprocessors idle, quicken with more. In
# profiles of ResNeXt, ResNet-18 and a U-Net, 128 channels took 0.6 to 0.7 of the time.
_FILLING = 2 / 3

# Beside what torch says is pointwise.
_MOVES_BYTES = frozenset(
    """
    __and__ __or__ __xor__ _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
    _chunk_cat _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward
    _foreach_copy_ _index_put_impl_ _reshape_copy _thnn_fused_gru_cell
    _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
    _thnn_fused_lstm_cell_backward_impl _to_copy _unsafe_index arange bernoulli
    bernoulli_ cat complex constant_pad_nd contiguous copy_ diagonal_copy elu_backward
    embedding embedding_dense_backward empty empty_like empty_strided expand_copy
    exponential_ eye fill fill_ flip floor_divide full full_like gather glu glu_backward
    hardswish hardswish_backward hardtanh_backward index index_add index_add_ index_copy
    index_copy_ index_put index_put_ index_select leaky_relu_backward lift_fresh
    linear_backward log_sigmoid log_sigmoid_backward log_sigmoid_forward masked_fill_
    mish_backward native_dropout new_empty new_full new_ones new_zeros normal_ ones
    ones_like polar rand rand_like randint randn randn_like random_ repeat roll rot90
    scalar_tensor scatter scatter_ scatter_add scatter_add_ select_backward
    slice_backward softplus_backward split_copy split_with_sizes_copy stack
    take_along_dim tril triu unfold_backward uniform_ upsample_bilinear2d
    upsample_nearest2d view_as_real_copy zero_ zeros zeros_like
    """.split()
)
_REDUCING = frozenset(
    """
    all amax amin any argmax argmin aminmax cummax cumsum linalg_vector_norm logsumexp
    max mean min norm prod std sum var var_mean _safe_softmax topk sort argsort
    nll_loss_forward nll_loss_backward _softmax _softmax_backward_data _log_softmax
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward
    _fused_rms_norm _fused_rms_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward _native_batch_norm_legit
    _batch_norm_with_update batch_norm_backward _batch_norm_impl_index
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward mean_backward histc bincount
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

_NORMS = frozenset(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm_backward
    """.split()
)
_SUMS = frozenset("sum mean amax amin linalg_vector_norm".split())
# Error functions, exponentials and logarithms, which every kernel has to compute.
_ARITHMETIC = {
    "gelu": "gelu",
    "gelu_backward": "gelu_backward",
    "_log_softmax": "_log_softmax",
    "_log_softmax_backward_data": "_log_softmax",
}
# Reductions by torch's common kernel.
_RESULTS = _SUMS | frozenset("max min argmax argmin all any prod".split())
_ON_TENSOR_CORES = frozenset({"bfloat16", "float16", "float8", "tf32"})


# Seconds of a kernel by the bytes that it moves, by a GPU's figures.
Form: TypeAlias = Callable[[Figures, float], float]


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
        self._reshapes: dict[str, tuple[float, Line]] = {}
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
            seconds, filled = self._attention(op, flops)
            if busy:
                busy = self.figures.number("power.attention") * seconds * filled
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
        elements = _factors(shape) - _repeated(op)
        tiles = _TILES
        if real_dtype(factor_of(op).dtype):  # four real products for each complex one
            batch, m, n, k = shape
            shape, elements, tiles = (batch, m, n, 4 * k), 2 * elements, _TILES_OF_PAIRS
        if 1 in shape[1:]:  # with a vector, or of two: no tiles
            return self._by_bytes("reduce_rows", elements * rates.item)
        ideal = _ideal_matmul(rates, shape, tiles, elements)
        seconds = ideal * self._matmul_ratio(dtype, layout, shape)
        times = self._misaligned(op, shape) if dtype in _ON_TENSOR_CORES else 1.0
        if times > 1:  # the measured rows are of aligned products
            slower = rates._replace(achieved=rates.achieved / times)
            batch, m, n, k = shape
            shape = (batch, m, n, _DEPTH * math.ceil(k / _DEPTH))
            more = _ideal_matmul(slower, shape, elements=elements)
            seconds = max(seconds, more)
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

    def _attention(self, op: Op, flops: float) -> tuple[float, float]:
        """Seconds, and the part of its tiles that is filled: zeros draw no power."""
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
        if table not in self._corrections:
            self._corrections[table] = self._attention_table(table, direction, dtype)
        tile = _attention_tile(table, direction)
        sizes = _Sizes(rows, columns, width).in_tiles(tile)
        flops *= math.prod(sizes) / math.prod((rows, columns, width))
        filled = rows * columns / (sizes.rows * sizes.keys)
        rate = self._attention_rate(self.figures.gpu, direction, dtype)
        ideal = flops / rate * self._short(self.figures.gpu, dtype, sizes.keys)
        point = _attention_point(batch, heads, key.shape[1], sizes.rows, width, causal)
        seconds = ideal * self._corrections[table].at(point)
        if dict(op.scalars).get("dropout_p"):
            seconds *= self.figures.number(f"kernels.attention_dropout_{direction}")
        if kernel == "cudnn":  # torch takes it by this name where there is a mask
            seconds *= self.figures.number(f"kernels.attention_mask_{direction}")
        if kernel == "flash" and not may_choose:
            seconds *= self.figures.optional("attention.flash_times", 1.0)
        return max(self.floor, seconds), filled

    def _attention_name(self, kernel: str, rest: str, may_choose: bool) -> str:
        """Where torch chooses by itself, from Hopper on, it is cuDNN's that runs."""
        chosen = [kernel]
        is_new = float(self.figures.gpu.compute_capability or 0) >= 9
        if kernel in ("flash", "cudnn") and is_new and may_choose:
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
        tile = _attention_tile(table, direction)
        points, ratios = [], []
        for batch, heads, kv_heads, length, keys, width, causal, seconds in rows:
            sizes = _Sizes(length, keys, width).in_tiles(tile)
            flops = 4 * batch * heads * math.prod(sizes) / (2 if causal else 1)
            flops *= 2.5 if direction == "backward" else 1
            ideal = flops / rate * self._short(hardware, dtype, sizes.keys)
            points.append(
                _attention_point(
                    batch, heads, kv_heads, sizes.rows, width, bool(causal)
                )
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
            steps = tuple(int(place == 1) for place in range(len(result.shape)))
            added = result, result, result._replace(stride=steps)
            plain = self._by_bytes("elementwise_1", 2 * tensor_bytes(result))
            seconds += max(plain, self._at_places(added, converted=False))
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
        elements = image + result + weight  # read once, not unfolded
        once = _ideal_matmul(rates, filters.product, _TILES_OF_FILTERS, elements)
        kernels = _BESIDE_FILTERS
        if filters.is_copied(rates.item):
            rate = self.figures.number("kernels.channels_last") * rates.memory
            if rates.item > _ITEM:
                rate /= self.figures.number("kernels.transpose_4_bytes")
            once += 2 * rates.item * elements / rate
            kernels += 3
        return filters.passes * (once + kernels * self._shortest(hardware))

    # --- memory -----------------------------------------------------------------------

    def _memory_bound(self, op: Op, nbytes: int) -> float:
        key = memory_key(op, self._has)
        if key.startswith("batch_norm") and len(op.inputs[0].shape) > 1:
            return self._batch_norm(key, op, nbytes)
        if key.startswith("concatenate"):
            return self._concatenated(op)
        tensors = iterated(op)
        if tensors is not None:
            return self._elements(op, key, nbytes, tensors)
        base = base_name(op.name)
        if base in _NORMS:
            seconds = self._norm(key, op, nbytes)
        elif key == "reduce_columns" and base in _SUMS and op.inputs[0].stride:
            seconds = self._columns(op, nbytes)
        elif base in _BY_NAME:
            seconds = _BY_NAME[base](self, op, nbytes)
        else:
            seconds = self._by_bytes(key, nbytes)
        if base in _RESULTS:
            seconds = max(seconds, self._results(op))
        if base in _CONTIGUOUS_INSIDE:
            for spec in op.inputs[: 1 + ("backward" in base)]:
                if not is_contiguous(spec):
                    seconds += self._copy(spec, _contiguous(spec))
        return seconds

    def _results(self, op: Op) -> float:
        """Of a reduction of neighbours: several threads for each result, however few."""
        if not op.inputs or not op.outputs:
            return 0.0
        spec, results = op.inputs[0], math.prod(op.outputs[0].shape)
        dims = dict(op.scalars).get("dim", ())
        dims = dims if isinstance(dims, tuple) else (dims,)
        rank = len(spec.shape)
        if any(not isinstance(dim, int) for dim in dims) or results <= 1:
            return 0.0
        steps = [spec.stride[dim % rank] for dim in dims if spec.shape[dim % rank] > 1]
        if min(steps, default=0) != 1:
            return 0.0
        key = "reduction_result_index" if len(op.outputs) > 1 else "reduction_result"
        return self.floor + results * by_clock(self.figures, f"kernels.{key}")

    def _blocks(self, count: float) -> float:
        """Seconds to start blocks of threads that do little."""
        return self.floor + count * by_clock(self.figures, "kernels.block")

    def _gathered(self, op: Op, nbytes: int) -> float:
        """Rows of a table; a block for each, where they lie as 16 bytes do."""
        seconds = self._by_bytes(memory_key(op, self._has), nbytes)
        table, *indices = op.inputs
        row = tensor_bytes(op.outputs[0]) // max(1, math.prod(op.outputs[0].shape))
        row *= math.prod(table.shape[1:])
        if len(indices) != 1 or not is_contiguous(table) or row % 16:
            return seconds
        return max(seconds, self._blocks(math.prod(indices[0].shape)))

    def _scattered(self, op: Op, nbytes: int) -> float:
        """Each element is put into a sector of its own, which is read before."""
        target, *given = op.inputs
        count = max((math.prod(spec.shape) for spec in given), default=0)
        apart = 2 * count * SECTOR
        whole = 2 * tensor_bytes(target)
        read = sum(map(tensor_bytes, given))
        return self._by_bytes("elementwise_2", read + min(apart, whole))

    def _group_norm(self, op: Op, nbytes: int) -> float:
        """Of rows without places: a block for each group of one; then all elements.

        In backward, a block for 32 channels goes down all rows for the weights.
        """
        if dict(op.scalars).get("HxW") != 1:  # by elements: measured with four bytes
            nbytes = nbytes * 4 // tensor_bytes(_element(op.inputs[0]))
            return self._by_bytes(base_name(op.name), nbytes)
        rows, groups = (int(str(dict(op.scalars)[name])) for name in ("N", "group"))
        seconds = self._by_bytes("broadcast", nbytes) + self._blocks(rows * groups)
        if "backward" in op.name:
            seconds += rows * self.figures.number("kernels.group_norm_weights_row")
        return seconds

    def _adaptive_max_pool(self, op: Op, nbytes: int) -> float:
        """A thread for each result goes over its places, a block for each channel."""
        x, result = op.inputs[0], op.outputs[0]
        places = math.prod(x.shape[-2:]) / max(1, math.prod(result.shape[-2:]))
        blocks = math.prod(x.shape[:-2]) / (16 * self.figures.number("chip.sms"))
        alone = math.ceil(blocks) * places * self.figures.number("kernels.pool_place")
        return max(self._by_bytes("elementwise_1", nbytes), alone)

    def _adaptive_max_pool_backward(self, op: Op, nbytes: int) -> float:
        """Zeros, and one gradient for each result."""
        given = 3 * tensor_bytes(op.inputs[0])
        return self._zeros(op.outputs[0]) + self._by_bytes("elementwise_2", given)

    def _constant_pad(self, op: Op, nbytes: int) -> float:
        """The result is filled, and the argument copied into it; or a part is copied."""
        before, after = (tensor_bytes(each[0]) for each in (op.inputs, op.outputs))
        filled = self._by_bytes("fill", after) if after > before else 0.0
        return filled + self._by_bytes("strided", 2 * min(before, after))

    def _reshaped(self, key: str, nbytes: int, here: float, form: Form) -> float:
        """A closed form of a shape, corrected by what was measured of another one.

        Args:
            key: Of the table.
            nbytes: That are moved.
            here: Seconds by the form, beside those of the shortest kernel.
            form: The same of the measured shape with some bytes.
        """
        if key not in self._reshapes:
            hardware, rows = self.figures.table(f"operators.{key}")
            figures = Figures(hardware)
            shortest = min(seconds for _, seconds in rows)
            line = Line(
                [
                    (math.log2(size), seconds / (shortest + form(figures, size)))
                    for size, seconds in rows
                ]
            )
            self._reshapes[key] = shortest, line
        shortest, line = self._reshapes[key]
        return (shortest + here) * line.at(math.log2(max(nbytes, 1)))

    def _norm(self, key: str, op: Op, nbytes: int) -> float:
        backward = "backward" in op.name
        spec = op.inputs[backward]
        scalars = dict(op.scalars)
        asked, shape = (
            scalars.get(name) for name in ("output_mask", "normalized_shape")
        )
        width = math.prod(shape) if isinstance(shape, tuple) else spec.shape[-1]
        here = norm_seconds(
            self.figures,
            math.prod(spec.shape) / max(width, 1),
            width,
            tensor_bytes(_element(spec)),
            backward=backward,
            weights=not isinstance(asked, tuple) or any(asked[1:]),
        )

        def measured(figures: Figures, size: float) -> float:
            rows = size / ((2 + backward) * _ROW * _ITEM)
            return norm_seconds(
                figures, rows, _ROW, _ITEM, backward=backward, weights=True
            )

        return self._reshaped(key, nbytes, here, measured)

    def _columns(self, op: Op, nbytes: int) -> float:
        """Sums of columns."""
        spec = op.inputs[0]
        dims = dict(op.scalars).get("dim", ())
        dims = dims if isinstance(dims, tuple) else (dims,)
        rank = len(spec.shape)
        reduced = {int(str(dim)) % rank for dim in dims} or set(range(rank))

        def measured(figures: Figures, size: float) -> float:
            rows = max(1, round(size / (_ROW * _ITEM)) - 1)  # without the result
            matrix = spec._replace(
                shape=(rows, _ROW), stride=(_ROW, 1), dtype="bfloat16"
            )
            return reduction_seconds(figures, matrix, {0})

        here = reduction_seconds(self.figures, spec, reduced)
        return self._reshaped("reduce_columns", nbytes, here, measured)

    def _softmax_backward(self, op: Op, nbytes: int) -> float:
        """A product of the gradient and the result, and a kernel over rows of both.

        The latter takes as long by element in 32 bits as in 16, unless memory bounds it.
        """
        product = self._by_bytes("elementwise_2", nbytes)
        narrow = 3 * _ITEM * math.prod(op.inputs[0].shape)
        both = self._by_bytes("_softmax_backward_data", narrow)
        rows = both - self._by_bytes("elementwise_2", narrow)
        return product + max(product, rows)

    def _embedding_backward(self, op: Op, nbytes: int) -> float:
        """A table of zeros, to which rows are added: what that takes goes by elements."""
        count = math.prod(op.inputs[0].shape)
        measured = _EMBEDDINGS + _ITEM * count + 8 * count // _ROW
        zeros = self._by_bytes("fill", _EMBEDDINGS)
        adding = self._by_bytes("embedding_dense_backward", measured) - zeros
        return max(self.floor, adding) + self._zeros(op.outputs[0])

    def _bag_backward(self, op: Op, nbytes: int) -> float:
        least = self.figures.number("kernels.embedding_bag_backward")
        return max(least, self._by_bytes("elementwise_3", nbytes))

    def _part_backward(self, op: Op, nbytes: int) -> float:
        """Zeros, and a copy into the part of them that was taken in forward."""
        (gradient, *_), result = op.inputs, op.outputs[0]
        scalars = dict(op.scalars)
        dim, step = (int(str(scalars.get(name, 1))) for name in ("dim", "step"))
        steps = list(result.stride)
        if "select" in op.name:
            del steps[dim]
        else:
            steps[dim] *= step
        part = result._replace(shape=gradient.shape, stride=tuple(steps))
        return self._zeros(result) + self._copy(gradient, part)

    def _fft(self, op: Op, nbytes: int) -> float:
        """A pass over memory for each dimension, or 5 N log2 N operations.

        The pass of a dimension that one block cannot hold is made twice. Before, the
        argument of an inverse transform to real numbers is copied, as cuFFT overwrites it;
        afterwards the result is scaled.
        """
        source, result = op.inputs[0], op.outputs[0]
        scalars = dict(op.scalars)
        dims = scalars.get("dim")
        dims = dims if isinstance(dims, tuple) else (-1,)
        larger = max(source.shape, result.shape, key=math.prod)
        halves = [spec for spec in (source, result) if real_dtype(spec.dtype)]
        between = 2 * tensor_bytes(min(halves, key=tensor_bytes))
        lengths = [larger[int(dim)] for dim in dims]
        passes = sum(
            max(1, math.ceil(math.log2(max(n, 2)) / _FFT_BITS)) for n in lengths
        )
        rate = self.figures.number("kernels.fft") * self.figures.number(
            "bandwidth.memory"
        )
        moving = (nbytes + (passes - 1) * between) / rate
        count = math.prod(larger) * sum(math.log2(max(n, 2)) for n in lengths)
        times = 5.0 if len(halves) == 2 else 2.5  # of real numbers: half of it
        dtype = real_dtype(halves[0].dtype)
        computing = (
            times * count / self.figures.number(f"flops.{dtype}", "flops.float32")
        )
        seconds = max(passes * self.floor, moving, computing)
        if "c2r" in op.name and len(lengths) > 1:
            seconds += self._copy(source, _contiguous(source))
        if scalars.get("normalization"):
            seconds += self._by_bytes("elementwise_1", 2 * tensor_bytes(result))
        return seconds

    def _cell_backward(self, op: Op, nbytes: int) -> float:
        """Gradients of gates, and their sums for the biases: one, or a GRU's two."""
        gates = op.outputs[0]
        biases = sum(len(spec.shape) == 1 for spec in op.outputs)
        summed = reduction_seconds(self.figures, gates, {0})
        seconds = self._by_bytes("elementwise_3", nbytes)
        return seconds + biases * max(self.floor, summed)

    def _zeros(self, spec: TensorSpec) -> float:
        return self._by_bytes("fill", tensor_bytes(spec))

    def _roll(self, op: Op, nbytes: int) -> float:
        """A kernel for each dimension."""
        dims = dict(op.scalars).get("dims")
        count = math.prod(op.inputs[0].shape)
        once = self.floor + count * by_clock(self.figures, "kernels.roll_element")
        once = max(once, self._by_bytes("elementwise_1", nbytes))
        return once * (len(dims) if isinstance(dims, tuple) else 1)

    def _concatenated(self, op: Op) -> float:
        """One kernel for all parts; of many dimensions, a copy of each into its place."""
        result = op.outputs[0]
        parts = [spec for spec in op.inputs if math.prod(spec.shape)]
        if op.name.endswith(".out"):
            del parts[-1]
        dim = dict(op.scalars).get("dim", 0)
        dim = int(str(dim)) % max(len(result.shape), 1)
        stacked = base_name(op.name) == "stack"
        # A stack before the last dimension is a concatenation, seen otherwise.
        dims = len(result.shape) - (stacked and dim < len(result.shape) - 1)
        if dims > _CAT_DIMS:
            kept = result.stride
            kept = kept[:dim] + kept[dim + 1 :] if stacked else kept
            return sum(
                self._copy(spec, result._replace(shape=spec.shape, stride=kept))
                for spec in parts
            )
        moved = 2 * sum(map(tensor_bytes, parts))  # read and written
        if all(map(is_contiguous, parts)):
            return self._by_bytes("concatenate", moved)
        return self._by_bytes("concatenate_strided", moved)

    def _elements(
        self, op: Op, key: str, nbytes: int, tensors: Sequence[TensorSpec]
    ) -> float:
        """A pointwise operator or a copy."""
        is_copy = base_name(op.name) in COPIES
        converted = converts(op, tensors)
        if is_copy and converted and not loops(tensors):
            return self._by_bytes("cast", nbytes)
        if key in ("strided", "transpose", "broadcast"):
            key = (
                "elementwise_1"
                if is_copy
                else f"elementwise_{min(len(tensors), 4) - 1}"
            )
        plain = self._by_bytes(key, nbytes)
        return max(plain, self._at_places(tensors, converted))

    def _copy(self, source: TensorSpec, target: TensorSpec) -> float:
        plain = self._by_bytes("elementwise_1", 2 * tensor_bytes(source))
        return max(plain, self._at_places((target, source), converted=False))

    def _at_places(self, tensors: Sequence[TensorSpec], converted: bool) -> float:
        """Where elements do not lie in one row, their places are computed; else 0.

        What is measured: two arguments of 2 bytes, one of which has positions and heads
        swapped; and a row that is added to all others.
        """
        found = loops(tensors)
        if not found and not converted:
            return 0.0
        result = tensors[0]
        count = math.prod(result.shape)
        table, size, dims = "strided", 3, 3
        if any(0 in loop.strides for loop in found):
            table, size, dims = "broadcast", 2, 2
        of_element = element_seconds(self.figures, len(found), len(tensors), converted)
        ratio = of_element / element_seconds(self.figures, dims, 3, converted=False)
        measured = self._by_bytes(table, size * _ITEM * count)
        computing = self.floor + (measured - self.floor) * ratio
        for place, spec in enumerate(tensors[1:], 1):
            step = found[0].strides[place] if found else 0
            others = (loop.strides[place] for loop in found[1:])
            if step > 1 and any(0 < other < step for other in others):
                across = max(0.0, self._copied(spec) - computing)
                computing += across / sectors(found[0], spec)
        touched = touched_bytes(result, written=True)
        touched += sum(touched_bytes(spec, written=False) for spec in tensors[1:])
        moving = touched / reached_bandwidth(self.figures)
        return float((computing**_EDGE + moving**_EDGE) ** (1 / _EDGE))

    def _copied(self, spec: TensorSpec) -> float:
        """A copy of a tensor, in another order of its dimensions."""
        seconds = self._by_bytes("transpose", 2 * tensor_bytes(spec))
        return seconds * self._transposing(spec)

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

    def arithmetic(self, op: Op) -> float:
        """What an operator computes, in whatever kernel: not less than this.

        Tables are of two bytes an element, and of kernels that computing bounds.
        """
        key = _ARITHMETIC.get(base_name(op.name))
        if key is None or not op.inputs:
            return 0.0
        tensors = 3 if key.endswith("_backward") else 2
        elements = max(math.prod(spec.shape) for spec in op.inputs)
        return self._by_bytes(key, tensors * _ITEM * elements)

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
        computing *= clocks(self.figures, hardware)
        computing /= clocks(self.figures, self.figures.gpu)
        return float((computing**corner + here**corner) ** (1 / corner))

    def _ideal(self, hardware: Hardware, nbytes: float) -> float:
        return self._shortest(hardware) + nbytes / hardware.number("bandwidth.memory")

    def _shortest(self, hardware: Hardware) -> float:
        """Seconds of a kernel that does nothing."""
        floor = hardware.figures.get("launch.kernel")
        least = self.floor if floor is None else floor.value
        assert not isinstance(least, tuple)
        return least


_BY_NAME: Mapping[str, Callable[[Pricer, Op, int], float]] = {
    "_softmax_backward_data": Pricer._softmax_backward,
    "embedding_dense_backward": Pricer._embedding_backward,
    "_embedding_bag_backward": Pricer._bag_backward,
    "_embedding_bag_dense_backward": Pricer._bag_backward,
    "_thnn_fused_gru_cell_backward": Pricer._cell_backward,
    "_thnn_fused_lstm_cell_backward_impl": Pricer._cell_backward,
    "native_group_norm": Pricer._group_norm,
    "native_group_norm_backward": Pricer._group_norm,
    "index": Pricer._gathered,
    "index_select": Pricer._gathered,
    "embedding": Pricer._gathered,
    "scatter": Pricer._scattered,
    "scatter_": Pricer._scattered,
    "adaptive_max_pool2d": Pricer._adaptive_max_pool,
    "adaptive_max_pool2d_backward": Pricer._adaptive_max_pool_backward,
    "select_backward": Pricer._part_backward,
    "slice_backward": Pricer._part_backward,
    "roll": Pricer._roll,
    "constant_pad_nd": Pricer._constant_pad,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), Pricer._fft),
}


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
    if name.startswith("_fused_") and has(f"{name.rstrip('_')}_{op.inputs[0].dtype}"):
        return f"{name.rstrip('_')}_{op.inputs[0].dtype}"
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


def _contiguous(spec: TensorSpec) -> TensorSpec:
    sizes = spec.shape
    return spec._replace(
        stride=tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
    )


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
        or base in _BY_NAME
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
    split_depth: int = _SPLIT_DEPTH


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
        split_depth=_SPLIT_DEPTH if dtype in _ON_TENSOR_CORES else _SPLIT_DEPTH_SINGLE,
    )


def _factors(shape: tuple[int, int, int, int]) -> int:
    """Elements of two matrices and their product."""
    batch, m, n, k = shape
    return batch * (m * k + k * n + m * n)


def _repeated(op: Op) -> int:
    """Elements of matrices that all products of a batch share, but for the first."""
    return sum(
        (spec.shape[0] - 1) * math.prod(spec.shape[1:])
        for spec in op.inputs
        if len(spec.shape) == 3 and spec.stride[0] == 0 and spec.shape[0] > 1
    )


def _ideal_matmul(
    rates: _Rates,
    shape: tuple[int, int, int, int],
    tiles: Sequence[tuple[int, int, float]] = _TILES,
    elements: float | None = None,
) -> float:
    """A roofline: operations in whole waves of tiles, and bytes.

    Args:
        rates: Of the chip.
        shape: Batch, rows, columns and depth.
        tiles: That a kernel may have.
        elements: That are moved; None: those of all matrices.
    """
    batch, m, n, k = shape
    flops = 2.0 * batch * m * n * k
    nbytes = rates.item * (_factors(shape) if elements is None else elements)
    filled = 0.0
    smallest = batch * math.ceil(m / 64) * math.ceil(n / 64)
    split = rates.split_depth if smallest < rates.sms else _SPLIT_DEPTH
    for rows, columns, part in tiles:
        count = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(count / rates.sms)
        used = batch * m * n / (rows * columns) / (waves * rates.sms)
        if waves == 1:  # the depth is split where tiles are few
            used = max(used, min(1.0, used * max(1, k // split)))
        filled = max(filled, used * part)
    computing: float = flops / (rates.achieved * max(filled, 1e-3))
    moving: float = nbytes / rates.memory
    return float((computing**_CORNER + moving**_CORNER) ** (1 / _CORNER))


class _Sizes(NamedTuple):
    """Of one head of attention: queries, keys, and channels."""

    rows: float
    keys: float
    width: float

    def in_tiles(self, tile: int) -> "_Sizes":
        """What is computed: whole tiles, and no fewer channels than a tile has."""
        rows, keys = (tile * math.ceil(each / tile) for each in self[:2])
        return _Sizes(rows, keys, max(_WIDTH, self.width))


def _attention_tile(table: str, direction: str) -> int:
    return 1 if "efficient" in table else _ATTENTION_TILES[direction]


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
    dtype = real_dtype(dtype) or dtype
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
