"""Seconds of the host between two events: what Python and the dispatcher take to issue one.

An eager script issues each operator by itself, and pays for its Python calls beside them;
backward runs in autograd's engine, an optimizer pays for each parameter. A compiled region
pays once to enter, for each tensor that it takes, and a little for each kernel. Figures are
of loops of one kind; a step has many kinds in turn, which is slower, except in backward:
there, what starting the engine adds to a short loop makes up for it.
"""

import math
from collections.abc import Mapping
from functools import cached_property

from torchspmd.predict.convolutions import launches_beside
from torchspmd.predict.figures import Figures
from torchspmd.predict.memory_keys import memory_key
from torchspmd.predict.operators import LAUNCHES_NOTHING
from torchspmd.predict.traffic import base_name, recurrent_products
from torchspmd.rehearse.recording import (
    OF_PROGRAM,
    Comm,
    Event,
    EventRecord,
    EventWait,
    Node,
    Op,
    Phase,
    StreamWait,
    Wait,
)

__all__ = ["HostModel"]

# While recomputing: one for each tensor that is kept for backward.
_SAVED = "detach"
_MANY = 15  # kinds of operators in turn: more are no slower
_SEVERAL = 5  # times the shortest kernel: it is more than one
# A cell of a recurrent layer: its product and its gates, in backward also memory that is
# set to zero. An H200's host launched 4,170 of these in 30 ms, and took 10.8 us for an
# operator without autograd.
_CELL_KERNELS = {"_cudnn_rnn": 2, "_cudnn_rnn_backward": 3}
_LAUNCH = 2 / 3
# A step is measured whole: the tensors that it hands to operators for each parameter, and
# its operators.
_FOREACH = {"adamw": (13, 8), "sgd": (5, 3)}
_FUSED_STEP = "host_optimizer.adamw_fused_step"
_OF_SGD = "aten._foreach_add_.List"
# Clipping multiplies by the norm, and is measured with it.
_WITH_ANOTHER = frozenset({"aten._foreach_mul_.Tensor"})
# Operators whose figure has another name.
_KEYS = {
    "_to_copy": "to_copy",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "bmm": "mm",
    "baddbmm": "addmm",
    "cudnn_batch_norm": "native_batch_norm",
    "_batch_norm_with_update": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
    "_softmax_backward_data": "_softmax",
    "_log_softmax": "_softmax",
    "_log_softmax_backward_data": "_softmax",
    "threshold_backward": "relu",
    "batch_norm": "native_batch_norm",
    "nll_loss_forward": "cross_entropy",
    "index_put": "index",
    "scatter": "topk",
    "index_select": "index_add",
    "embedding_dense": "embedding",
}
# Kernels beside the first.
_BESIDE = {
    # Fill a tensor with zeros, and copy a gradient into a part of it.
    "select_backward": 1,
    "slice_backward": 1,
    "diagonal_backward": 1,
    # Moments, what follows from them for each channel, and the result.
    "native_group_norm": 2,
    "native_group_norm_backward": 4,
    # Finds rows of which all is masked, and puts zeros there.
    "_safe_softmax": 5,
    # Sums of the gradients of biases.
    "_thnn_fused_gru_cell_backward": 2,
    "_thnn_fused_lstm_cell_backward_impl": 1,
}
# What compiled code calls instead of kernels of its own.
_CALLED = frozenset({"mm", "addmm", "convolution", "scaled_dot_product_attention"})
# A call that was measured makes more operators than the one it is named after.
_CALLS = {"to_copy": 2, "cat": 3}


class HostModel:
    """Adds up while it goes through a recording, event by event.

    Args:
        figures: Of the machine's host, as measured with the GPU.
        taken: How many tensors each compiled region takes; without it, none.
    """

    def __init__(
        self, figures: Figures, taken: Mapping[int, int] | None = None
    ) -> None:
        self.figures = figures
        self._taken = taken or {}
        self._phase = Phase.INIT
        self._region: int | None = None
        self._in_program = False  # whether a compiled step is run
        self._shards = False  # fully_shard has just filled a buffer to send
        self._cache: dict[tuple[str, Phase], float] = {}
        self._kinds: dict[str, None] = {}  # of forward, by when they were issued last

    def seconds(self, event: Event, kernels: int = 1) -> float:
        """Before this event is issued; ``kernels`` that it launches."""
        match event:
            case Op():
                self._shards = event.name.startswith("fsdp.")
                self._in_program = event.through in OF_PROGRAM
                return (
                    self._change(event) + self._python(event) + self._op(event, kernels)
                )
            case Comm():
                return self._change(event) + self._comm(event)
            case Wait() | EventRecord() | EventWait() | StreamWait():
                return 0.5e-6
        return 0.0

    def _change(self, event: Op | Comm) -> float:
        """What happens between phases."""
        if self._in_program:
            return 0.0
        before, self._phase = self._phase, event.site.phase
        if before is self._phase or self._phase is not Phase.RECOMPUTE:
            return 0.0
        if isinstance(event, Op) and event.region is not None:
            return 0.0  # in the compiled backward
        return self.figures.number("launch.checkpoint")

    def _gradient(self, op: Op) -> float:
        """Handing a gradient to a parameter, and forgetting it.

        One that is added to those before is an operator more.
        """
        seconds = self.figures.number("host_optimizer.accumulate") * self._once
        return seconds + (0.0 if op.views else self._own(op, backward=True))

    def _python(self, op: Op) -> float:
        """Calls of modules, and other Python beside operators."""
        if not op.calls or self._in_program:
            return 0.0
        module = self.figures.number("host_forward.module")
        return op.calls * module * self.figures.number("host_python.call")

    def _op(self, op: Op, kernels: int) -> float:
        if op.through == "graph":
            return self.figures.number("launch.graph") * kernels
        if op.region is not None:
            return self._compiled(op, op.region, kernels)
        if op.node is Node.GRADIENT:
            return self._gradient(op)
        self._region = None
        if op.site.phase is Phase.OPTIMIZER:
            seconds = self._optimizer(op) * self._once
        else:
            seconds = self._eager(op)
        if op.through == "dtensor":
            seconds += self.figures.number("launch.dtensor")
        return seconds

    def _compiled(self, op: Op, region: int, kernels: int) -> float:
        way = "forward" if op.site.phase is Phase.FORWARD else "backward"
        if op.through == "replay":
            loop = kernels * self.figures.number("launch.graph")
        else:
            loop = kernels * self._fused
        # Pieces of a compiled step are called without guards and autograd.
        if region != self._region and op.through != "compiled":
            taken = self._taken.get(region, 0)
            loop += self.figures.number(f"launch.compiled_{way}_region")
            loop += taken * self.figures.number(f"launch.compiled_{way}_input")
        seconds = loop * self._once
        if op.through != "replay":
            seconds += self._beside_fused(op)
        self._region = region
        return seconds

    @cached_property
    def _fused(self) -> float:
        """A kernel of fused code. Of those that were measured, half are products."""
        number = self.figures.number
        forward, backward = (
            number(f"launch.compiled_{way}_kernel") for way in ("forward", "backward")
        )
        product = number("host_forward.mm") - number("host_forward.add")
        each = (forward + 2 * backward) / 3  # backward has twice as many
        return max(each - product / 2, each / 2)

    def _beside_fused(self, op: Op) -> float:
        """What calling an operator of torch adds to launching a kernel."""
        name = base_name(op.name)
        base = name.removesuffix("_backward")
        if _KEYS.get(base, base) not in _CALLED:
            return 0.0
        backward = name != base
        other = self.figures.number(f"host_{'backward' if backward else 'forward'}.add")
        own = self._own(op, backward=backward) + (self._node() if backward else 0.0)
        return max(0.0, own - other)

    def _eager(self, op: Op) -> float:
        if (recurrent := recurrent_products(op)) is not None:
            kernels = recurrent[0] * _CELL_KERNELS[base_name(op.name)]
            return kernels * self._launch()
        backward = op.site.phase is Phase.BACKWARD
        key = (op.name, op.site.phase)
        if key not in self._cache:
            self._cache[key] = self._own(op, backward=backward)
        own = self._cache[key] * (1.0 if backward else self._mixed(op))
        if "convolution" in op.name:  # measured with filters of one pixel
            own += launches_beside(op) * self._launch()
        return own + (self._node() if op.node else 0.0)

    def _launch(self) -> float:
        """One more kernel of an operator."""
        return _LAUNCH * self.figures.number("host_forward.no_grad_add")

    def _node(self) -> float:
        """A node of autograd, without its operators."""
        number = self.figures.number
        views = number("host_backward.view") - number("host_forward.view")
        return max(0.0, views / 2)

    def _mixed(self, op: Op) -> float:
        """How much longer than in a loop: others have driven its code out of the caches."""
        if op.views and base_name(op.name) == _SAVED:
            return self._once  # hooks of a checkpoint, which run between all others
        others = _MANY  # since it ran in the step before
        if op.name in self._kinds:
            kinds = reversed(self._kinds)
            others = next(place for place, name in enumerate(kinds) if name == op.name)
            del self._kinds[op.name]
        self._kinds[op.name] = None
        return self._after(others)

    @cached_property
    def _once(self) -> float:
        """The same of what runs once in a step, or so that all else comes between."""
        return self._after(_MANY)

    def _after(self, others: int) -> float:
        """The same by how many others: none of it without any, all of it after many."""
        share = min(1.0, math.log2(1 + others) / math.log2(1 + _MANY))
        return 1 + share * (self.figures.number("host_mixed.forward") - 1)

    def _own(self, op: Op, *, backward: bool) -> float:
        """An operator, without the node of autograd that it is in."""
        number, name = self.figures.number, base_name(op.name)
        view = number("host_forward.view") / 2
        if op.views and name == _SAVED and op.site.phase is Phase.RECOMPUTE:
            return number("launch.checkpoint_tensor")
        if op.views and name == _SAVED and backward:
            return 0.0
        if op.views or name in LAUNCHES_NOTHING:
            return view
        base = name.removesuffix("_backward").removesuffix("_")
        base = _KEYS.get(base, base)
        table = "host_backward" if backward else "host_forward"
        node = self._node() if backward else 0.0
        if base in ("mm", "addmm"):  # measured with a view
            measured = number(f"{table}.{'mm' if backward else base}") - view
        elif self.figures.has_number(f"{table}.{base}"):
            measured = number(f"{table}.{base}") / _CALLS.get(base, 1)
        else:
            more = _BESIDE.get(name) or self._more_kernels(op)
            measured = number(f"{table}.{'mul' if backward else 'add'}")
            measured += more * number("host_forward.no_grad_add")
        return max(0.0, measured - node)

    def _more_kernels(self, op: Op) -> int:
        """Those that an operator launches beside the first, by its shortest time."""
        key = memory_key(op, lambda key: self.figures.has(f"operators.{key}"))
        _, rows = self.figures.table(f"operators.{key}")
        if not rows:
            return 0
        kernels = min(row[-1] for row in rows) / self.figures.number("launch.kernel")
        return int(kernels) - 1 if kernels > _SEVERAL else 0

    def _optimizer(self, op: Op) -> float:
        base = base_name(op.name)
        number = self.figures.number
        if base.startswith("_fused_"):
            count = len(op.inputs) / 5
            each = number("host_optimizer.adamw_fused_parameter")
            # A compiled step calls the operator, and no optimizer's step().
            once = "host_forward.no_grad_add" if self._in_program else _FUSED_STEP
            return count * each + number(once)
        if base == "_foreach_norm":  # of clip_grad_norm_, with what follows it
            each = number("host_optimizer.clip_parameter")
            return len(op.inputs) * each + number("host_optimizer.clip_step")
        if op.name in _WITH_ANOTHER:
            return 0.0
        if base.startswith("_foreach_"):
            name = "sgd" if op.name == _OF_SGD else "adamw"
            tensors, ops = _FOREACH[name]
            each = number(f"host_optimizer.{name}_foreach_parameter") / tensors
            step = number(f"host_optimizer.{name}_foreach_step") / ops
            return len(op.inputs) * each + step
        return number("host_forward.no_grad_add")

    def _comm(self, comm: Comm) -> float:
        seconds = self.figures.number("launch.collective")
        if self._shards:
            if comm.kind == "all_gather":
                seconds += self.figures.number("launch.fully_shard_forward")
            elif comm.kind == "reduce_scatter":
                seconds += self.figures.number("launch.fully_shard_backward")
        return seconds
