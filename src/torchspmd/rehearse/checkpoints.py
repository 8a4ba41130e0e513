"""Checkpoints in a rehearsal: there are no values to write, and files are left alone."""

import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchspmd.rehearse.place import read_place
from torchspmd.rehearse.values import Values

__all__ = ["checkpoints_skipped"]


@contextlib.contextmanager
def checkpoints_skipped(values: Values) -> Iterator[None]:
    """Inside, saving and loading checkpoints is a note."""
    with contextlib.ExitStack() as stack:
        for module, name, function in _replacements(values):
            stack.enter_context(mock.patch.object(module, name, function))
        hook = register_optimizer_step_post_hook(
            lambda *args: _replace_savers(stack)  # by now, a trainer is imported
        )
        stack.callback(hook.remove)
        yield


def _replace_savers(stack: contextlib.ExitStack) -> None:
    """Of Lightning, which saves into a buffer, and writes that into a file."""
    for name, module in list(sys.modules.items()):
        plain = vars(module).get("_atomic_save") if name.startswith("light") else None
        if plain is not None and not isinstance(plain, partial):
            save = partial(torch.save)  # as it is replaced here
            stack.enter_context(mock.patch.object(module, "_atomic_save", save))


def _replacements(values: Values) -> Iterator[tuple[Any, str, Any]]:
    plain_save = torch.save
    unwritten: set[str] = set()

    def save(*args: Any, **kwargs: Any) -> None:
        line = read_place().line or "the script"
        values.note(f"{line} saves a checkpoint: skipped, its time too.")

    def save_file(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            save()
            unwritten.add(_path(f))
        elif isinstance(f, io.BytesIO):  # which the script reads again
            plain_save(obj, f, *args, **kwargs)
        else:
            save()

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
    yield from _files(unwritten)


def _files(unwritten: set[str]) -> Iterator[tuple[Any, str, Any]]:
    """What scripts do to a file that they have just saved, where it was not written.

    Mostly they save under another name first, and rename then: files that are really there
    must stay.
    """

    def moved(plain: Callable[..., Any], *, stays: bool) -> Callable[..., Any]:
        def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            if _path(src) not in unwritten:
                return plain(src, dst, *args, **kwargs)
            unwritten.add(_path(dst))
            if not stays:
                unwritten.discard(_path(src))
            return dst

        return move

    def removed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            if _path(path) not in unwritten:
                plain(path, *args, **kwargs)
            unwritten.discard(_path(path))

        return remove

    plain_size = os.path.getsize

    def size(filename: Any) -> int:
        return 0 if _path(filename) in unwritten else plain_size(filename)

    yield os.path, "getsize", size
    for name in ("replace", "rename"):
        yield os, name, moved(getattr(os, name), stays=False)
    for name in ("remove", "unlink"):
        yield os, name, removed(getattr(os, name))
    for name in ("copy", "copy2", "copyfile"):
        yield shutil, name, moved(getattr(shutil, name), stays=True)


def _path(name: Any) -> str:
    """One name of a file; of a descriptor, one that no file has."""
    return str(Path(name).absolute()) if isinstance(name, str | os.PathLike) else ""
