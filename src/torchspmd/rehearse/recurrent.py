"""Recurrent layers as cuDNN runs them: one operator for all layers and time steps.

On a CPU torch writes them out, layer by layer or operator by operator for each time step;
cells too, whose gates are one kernel on CUDA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchspmd import _torch

__all__ = ["META_KERNELS", "recurrent_kernels"]

_aten = torch.ops.aten

# cuDNN's number of each kind, and what it keeps of a cell for backward, in hidden states:
# gates, and an LSTM's cell or a GRU's product with the state.
_MODES = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 5), "gru": (3, 4)}


def recurrent_kernels() -> dict[str, Callable[..., Any]]:
    """What replaces torch's operators of recurrent layers, by name."""
    return {
        **{f"{name}.input": _kernel(name) for name in _MODES},
        **{f"{name}.data": _packed_kernel(name) for name in _MODES},
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
    }


def _kernel(name: str) -> Callable[..., Any]:
    def kernel(
        input: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], *rest: Any
    ) -> Any:
        if not _torch.is_device_tensor(input):
            operator = getattr(_aten, name).input
            return operator.decompose(input, hx, params, *rest)
        *options, batch_first = rest
        x = input.transpose(0, 1) if batch_first else input
        output, *last = _run(name, x, (), hx, params, *options)
        return (output.transpose(0, 1) if batch_first else output, *last)

    return kernel


def _packed_kernel(name: str) -> Callable[..., Any]:
    def kernel(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        *rest: Any,
    ) -> Any:
        if not _torch.is_device_tensor(data):
            operator = getattr(_aten, name).data
            return operator.decompose(data, batch_sizes, hx, params, *rest)
        return _run(name, data, tuple(batch_sizes.tolist()), hx, params, *rest)

    return kernel


def _run(  # noqa: PLR0913, PLR0917  # torch's arguments
    name: str,
    input: torch.Tensor,
    batch_sizes: tuple[int, ...],
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """The outputs, time steps first, and the last states."""
    states = list(hx) if name == "lstm" else [hx]
    tensors = [input, *states, *params]
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensors = [each.to(dtype) for each in tensors]
    mode, kept = _MODES[name]
    layers = _Layers(
        mode=mode,
        kept=kept,
        hidden=states[-1].size(2),
        projected=states[0].size(2) if len({s.size(2) for s in states}) > 1 else 0,
        num_layers=num_layers,
        dropout=dropout,
        train=train,
        bidirectional=bidirectional,
        batch_sizes=batch_sizes,
        num_states=len(states),
        weights_of_a_layer=len(params) // (num_layers * (1 + bidirectional)),
    )
    return _Recurrent.apply(layers, *tensors)


class _Layers(NamedTuple):
    """The layers of one call, as cuDNN is told of them.

    Attributes:
        kept: What each cell keeps for backward, in hidden states.
        batch_sizes: By time step, of packed sequences.
        num_states: Two for an LSTM, else one.
    """

    mode: int
    kept: int
    hidden: int
    projected: int
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: tuple[int, ...]
    num_states: int
    weights_of_a_layer: int

    def reserved_bytes(self, input: torch.Tensor) -> int:
        """What cuDNN keeps for backward beside its inputs and outputs.

        What cells keep, and what goes from layer to layer: before and behind its dropout.
        So an H200 had it for LSTMs of two layers, and of three with dropout.
        """
        between = (self.num_layers - 1) * (2 if self.dropout else 1)
        states = self.num_layers * self.kept + between
        rows = math.prod(input.shape[:-1])
        cells = rows * self.hidden * (1 + self.bidirectional)
        return states * cells * input.element_size()

    def arguments(self) -> tuple[Any, ...]:
        """For both directions, from the mode on."""
        return (
            self.mode,
            self.hidden,
            self.projected,
            self.num_layers,
            False,
            self.dropout,
            self.train,
            self.bidirectional,
            list(self.batch_sizes),
            None,
        )


class _Recurrent(torch.autograd.Function):
    """cuDNN's operator, which torch has for CUDA only; inputs have time steps first."""

    @staticmethod
    def forward(
        ctx: Any, layers: _Layers, input: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of the last layer, and the last states of all."""
        states, weights = others[: layers.num_states], others[layers.num_states :]
        hx, cx = states[0], states[1] if len(states) > 1 else None
        with _torch.below_autograd():
            flat = input.new_empty(0)  # parameters are views of one buffer already
            x = input.contiguous()
            output, hy, cy, _, _ = _aten._cudnn_rnn.default(
                x,
                list(weights),
                layers.weights_of_a_layer,
                flat,
                hx,
                cx,
                *layers.arguments(),
            )
            size = layers.reserved_bytes(x) if layers.train else 0
            reserve = x.new_empty(size, dtype=torch.uint8)
        ctx.layers = layers
        ctx.save_for_backward(input, output, reserve, *others)
        return (output, hy) if cx is None else (output, hy, cy)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *of_states: torch.Tensor) -> Any:
        """The gradients of inputs, states and weights."""
        layers: _Layers = ctx.layers
        input, output, reserve, *others = ctx.saved_tensors
        states, weights = others[: layers.num_states], others[layers.num_states :]
        hx, cx = states[0], states[1] if len(states) > 1 else None
        with _torch.below_autograd():
            of_input, *of_hx, of_weights = _aten._cudnn_rnn_backward.default(
                input.contiguous(),
                weights,
                layers.weights_of_a_layer,
                input.new_empty(0),
                hx,
                cx,
                output,
                grad.contiguous(),
                of_states[0],
                None if cx is None else of_states[1],
                *layers.arguments(),
                reserve,
                [True] * 4,
            )
        return None, of_input, *of_hx[: layers.num_states], *of_weights


def _backward_of(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> Any:
    of_cell = input.new_empty(0) if cx is None else torch.empty_like(cx)
    of_weights = [torch.empty_like(each) for each in weight]
    return torch.empty_like(input), torch.empty_like(hx), of_cell, of_weights


# ----------------------------------------------------------------------------
# Cells


def _lstm_cell(
    input: torch.Tensor, hx: Sequence[torch.Tensor], *weights: torch.Tensor | None
) -> Any:
    if not _torch.is_device_tensor(input):
        return _aten.lstm_cell.default.decompose(input, hx, *weights)
    of_input, of_state, (state,), biases = _gates(input, hx[0], hx[1:], weights)
    fused = _aten._thnn_fused_lstm_cell.default
    hy, cy, _ = fused(of_input, of_state, state, *biases)
    return hy, cy


def _gru_cell(
    input: torch.Tensor, hx: torch.Tensor, *weights: torch.Tensor | None
) -> Any:
    if not _torch.is_device_tensor(input):
        return _aten.gru_cell.default.decompose(input, hx, *weights)
    of_input, of_state, (state,), biases = _gates(input, hx, (hx,), weights)
    hy, _ = _aten._thnn_fused_gru_cell.default(of_input, of_state, state, *biases)
    return hy


def _gates(
    input: torch.Tensor,
    hx: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
) -> tuple[Any, ...]:
    """Two products; and what the kernel behind them reads beside those."""
    tensors = [input, hx, *states, *(each for each in weights if each is not None)]
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensors = [each.to(dtype) for each in tensors]
    input, hx, *rest = tensors
    states, (of_input, of_state, *biases) = rest[: len(states)], rest[len(states) :]
    return input @ of_input.t(), hx @ of_state.t(), states, biases


def _fused_lstm(gates: torch.Tensor, _: Any, cx: torch.Tensor, *biases: Any) -> Any:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)


def _fused_lstm_backward(
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> Any:
    of_bias = workspace.new_empty(workspace.size(1)) if has_bias else None
    return torch.empty_like(workspace), torch.empty_like(cx), of_bias


def _fused_gru(gates: torch.Tensor, _: Any, hx: torch.Tensor, *biases: Any) -> Any:
    return torch.empty_like(hx), hx.new_empty(hx.size(0), 5 * hx.size(1))


def _fused_gru_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> Any:
    rows, hidden = grad_hy.shape
    gates = [workspace.new_empty(rows, 3 * hidden) for _ in range(2)]
    of_biases = [
        workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)
    ]
    return *gates, torch.empty_like(grad_hy), *of_biases


META_KERNELS: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn_backward": _backward_of,
    "_thnn_fused_lstm_cell": _fused_lstm,
    "_thnn_fused_lstm_cell_backward_impl": _fused_lstm_backward,
    "_thnn_fused_gru_cell": _fused_gru,
    "_thnn_fused_gru_cell_backward": _fused_gru_backward,
}
