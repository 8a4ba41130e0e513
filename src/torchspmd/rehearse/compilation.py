"""``torch.compile`` in a rehearsal: the function runs as it is, its operators as a region.

What a compiled region allocates and launches depends on a compiler that is not run here.
Its operators are recorded one by one, with the number of their region.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from torchspmd.rehearse.recorder import Recorder

__all__ = ["eager_compilation"]

_NOTE = (
    "torch.compile: compiled regions run operator by operator; intermediate tensors that "
    "the compiler would fuse away are counted"
)


@contextlib.contextmanager
def eager_compilation(recorder: Recorder) -> Iterator[None]:
    """Nothing is compiled inside; calls of what would be are numbered."""
    numbers = iter(range(1 << 62))

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, recorder.region = recorder.region, next(numbers)
            try:
                return function(*args, **kwargs)
            finally:
                recorder.region = outer

        return call

    def compile(model: Any = None, **options: Any) -> Any:
        recorder.values.note(_NOTE)
        if model is None:
            return lambda function: compile(function, **options)
        if isinstance(model, nn.Module):
            model.forward = watched(model.forward)
            return model
        return watched(model)

    def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
        compile(module)

    with (
        mock.patch.object(torch, "compile", compile),
        mock.patch.object(nn.Module, "compile", compile_in_place),
    ):
        yield
