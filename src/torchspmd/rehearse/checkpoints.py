"""Checkpoints in a rehearsal: there are no values to write, and files are left alone."""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from torchspmd.rehearse.place import read_place
from torchspmd.rehearse.values import Values

__all__ = ["checkpoints_skipped"]


@contextlib.contextmanager
def checkpoints_skipped(values: Values) -> Iterator[None]:
    """Inside, saving and loading checkpoints is a note."""
    with contextlib.ExitStack() as stack:
        for module, name, function in _replacements(values):
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def _replacements(values: Values) -> Iterator[tuple[Any, str, Any]]:
    plain_save = torch.save

    def save(*args: Any, **kwargs: Any) -> None:
        line = read_place().line or "the script"
        values.note(f"{line} saves a checkpoint: skipped, its time too.")

    def save_file(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            save()
        else:  # a buffer in memory, which the script reads again
            plain_save(obj, f, *args, **kwargs)

    def save_soon(*args: Any, **kwargs: Any) -> Future[None]:
        save()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(*args: Any, **kwargs: Any) -> None:
        line = read_place().line or "the script"
        values.note(
            f"{line} loads a checkpoint: skipped, the state stays as it was made."
        )

    # Where users find each function, and where libraries do: it is defined there.
    for module in (torch, torch.serialization):
        yield module, "save", save_file
    for module in (dcp, dcp.state_dict_saver):
        yield module, "save", save
        yield module, "async_save", save_soon
    for module in (dcp, dcp.state_dict_loader):
        yield module, "load", load
    if importlib.util.find_spec("safetensors") is not None:
        for name in ("save_file", "save_model"):
            yield importlib.import_module("safetensors.torch"), name, save
