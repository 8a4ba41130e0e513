"""Recurrent layers: their CPU kernel in a graph, and what they hold of their weights."""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def rnn_layer(*args: Any) -> Any:
    """``aten.mkldnn_rnn_layer`` that keeps what its backward reads.

    The kernel itself keeps it only where gradients are enabled, and a graph that has a
    backward in it runs where they are not.
    """
    _library()
    return torch.ops.torchspmd.rnn_layer.default(*args)


@functools.cache
def _library() -> torch.library.Library:
    """Made when it is needed first: an import registers nothing."""
    library = torch.library.Library("torchspmd", "FRAGMENT")
    schema = str(torch.ops.aten.mkldnn_rnn_layer.default._schema)
    library.define(schema.replace("aten::mkldnn_rnn_layer", "rnn_layer"))
    library.impl("rnn_layer", _run, "CompositeExplicitAutograd")
    fake = torch.ops.aten.mkldnn_rnn_layer.default
    torch.library.register_fake("torchspmd::rnn_layer", fake, lib=library)
    return library


def _run(*args: Any) -> Any:
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


@contextlib.contextmanager
def without_rnn_kernels() -> Iterator[None]:
    """Inside, recurrent layers are written out in plain operators."""
    native: Any = torch._C
    names = ("mkldnn", "cudnn")
    before = [getattr(native, f"_get_{name}_enabled")() for name in names]
    for name in names:
        getattr(native, f"_set_{name}_enabled")(False)
    try:
        yield
    finally:
        for name, enabled in zip(names, before, strict=True):
            getattr(native, f"_set_{name}_enabled")(enabled)


@contextlib.contextmanager
def keep_flat_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give recurrent layers their own lists of weights back, which every call renews."""
    kept = [
        (vars(layer), key, list(vars(layer)[key]))
        for layer in _layers(modules)
        for key in ("_flat_weights", "_flat_weight_refs")
        if key in vars(layer)
    ]
    try:
        yield
    finally:
        for table, key, weights in kept:
            table[key] = weights


def renew_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Give recurrent layers lists of the weights that they have now."""
    for layer in _layers(modules):
        weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        vars(layer)["_flat_weights"] = weights
        vars(layer)["_flat_weight_refs"] = [
            w if w is None else weakref.ref(w) for w in weights
        ]


def _layers(modules: Iterable[nn.Module]) -> list[nn.RNNBase]:
    return [m for root in modules for m in root.modules() if isinstance(m, nn.RNNBase)]
