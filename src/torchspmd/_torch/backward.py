"""Backward: what is in force while autograd runs."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


@contextlib.contextmanager
def backward_under(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a context around autograd's engine, whenever it is run inside.

    ``Tensor.backward`` is itself handed to a function mode, which is off while it handles
    it, and autograd would recompute checkpointed regions without the mode.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_under(*args: Any, **kwargs: Any) -> Any:
        with context:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_under
    try:
        yield
    finally:
        autograd._engine_run_backward = run
