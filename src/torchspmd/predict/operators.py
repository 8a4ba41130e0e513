"""Seconds of one operator on the device.

Which kind of kernel it is; ``products.py``, ``attention.py``, ``convolutions.py`` and
``memory_bound.py`` price one kind each: an ideal time from rates of the chip, times the
ratio of measured to ideal seconds of similar cases in the hardware file. What is not known
is priced by its bytes, and listed.
"""

import math
from typing import NamedTuple

from torchspmd import _torch
from torchspmd.predict.attention import Attention
from torchspmd.predict.byte_tables import ITEM, ByteTables
from torchspmd.predict.convolutions import Convolutions
from torchspmd.predict.figures import Figures
from torchspmd.predict.memory_bound import BY_NAME, price_memory_bound
from torchspmd.predict.memory_keys import has_key
from torchspmd.predict.products import Products
from torchspmd.predict.traffic import base_name, bytes_moved, matmul_shape, op_flops
from torchspmd.rehearse.recording import Op

__all__ = ["LAUNCHES_NOTHING", "Cost", "Pricer", "is_known"]

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
# Launch nothing, and are no views of their arguments to torch.
LAUNCHES_NOTHING = frozenset(
    """
    _reshape_alias _unsafe_view alias as_strided_ detach detach_ empty empty_like
    empty_strided lift_fresh new_empty new_empty_strided resize_ set_
    """.split()
)
# Error functions, exponentials and logarithms, which every kernel has to compute.
_ARITHMETIC = {
    "gelu": "gelu",
    "gelu_backward": "gelu_backward",
    "_log_softmax": "_log_softmax",
    "_log_softmax_backward_data": "_log_softmax",
}


class Cost(NamedTuple):
    """What an operator takes.

    Attributes:
        seconds: On the device.
        nbytes: That it moves.
        flops: Floating-point operations.
        kind: ``matmul``, ``attention``, ``convolution``, ``memory``, ``foreign``,
            ``copy`` or ``view``.
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
        self._tables = ByteTables(figures)
        self._products = Products(self._tables)
        self._convolutions = Convolutions(self._tables, self._products)
        self.floor = self._tables.floor
        self._attention = Attention(figures, self.floor)

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

    def arithmetic(self, op: Op) -> float:
        """What an operator computes, in whatever kernel: not less than this.

        Tables are of two bytes an element, and of kernels that computing bounds.
        """
        key = _ARITHMETIC.get(base_name(op.name))
        if key is None or not op.inputs:
            return 0.0
        tensors = 3 if key.endswith("_backward") else 2
        elements = max(math.prod(spec.shape) for spec in op.inputs)
        return self._tables.by_bytes(key, tensors * ITEM * elements)

    def fused(self, nbytes: int) -> float:
        """A kernel of ``torch.compile`` that moves these bytes."""
        return self._tables.by_bytes("elementwise_2", nbytes)

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
        busy = self._products.busy(op, flops) if flops else 0.0
        if shape is not None:
            seconds = self._products.price(op, shape)
            return Cost(seconds, nbytes, flops, "matmul", busy=busy)
        if flops and "attention" in base:
            seconds, filled = self._attention.price(op, flops)
            if busy:
                busy = self.figures.number("power.attention") * seconds * filled
            return Cost(seconds, nbytes, flops, "attention", busy=busy)
        if flops and "rnn" in base:
            seconds = self._products.price_recurrent(op)
            return Cost(seconds, nbytes, flops, "matmul", busy=busy)
        if flops:
            seconds = self._convolutions.price(op, nbytes)
            return Cost(seconds, nbytes, flops, "convolution", busy=busy)
        seconds = price_memory_bound(self._tables, op, nbytes)
        # No compiler fuses what other libraries compute.
        return Cost(seconds, nbytes, 0.0, "memory" if base else "foreign")


def is_known(name: str) -> bool:
    """Whether an operator has a price of its own; others are priced by their bytes."""
    base = base_name(name)
    return (
        base in _MOVES_BYTES
        or _torch.is_pointwise(name)
        or base in LAUNCHES_NOTHING
        or has_key(base)
        or base in BY_NAME
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
