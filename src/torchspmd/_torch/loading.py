"""``torch.load`` while a script is rehearsed: tensors of a file, and where they go."""

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

_MARK = "_fake_device"  # on a storage, where torch keeps a place that is not its own


@contextlib.contextmanager
def files_loaded() -> Iterator[None]:
    """Inside, tensors of a file have their values on the host, and none on the device.

    torch takes a rehearsal for a trace, and would make all of them on the meta device.
    """
    load = _loading(torch.load)
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.serialization):
            stack.enter_context(mock.patch.object(module, "load", load))
        yield


def _loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_zip = _is_zip(f)
        if kwargs.get("mmap") is None and is_zip and isinstance(f, str | os.PathLike):
            kwargs["mmap"] = True  # most of it is copied to the device, and never read

        def locate(storage: Any, name: str) -> Any:
            target: Any = name
            if callable(map_location):
                placed = map_location(storage, name)
                if placed is not None:
                    return placed
            elif isinstance(map_location, dict):
                target = map_location.get(name, name)
            elif map_location is not None:
                target = map_location
            device = torch.device(target)
            if device.type != "cpu":  # the file may be of another rank's GPU
                setattr(storage, _MARK, device.type)
            return storage

        placing = _Placing(is_read_first=is_zip)
        with (
            mock.patch.object(torch._guards, "detect_fake_mode", lambda *_: None),
            mock.patch.object(torch._guards, "active_fake_mode", lambda: None),
            mock.patch.object(torch._utils, "_restore_device_fake_mode", placing),
        ):
            return plain(f, locate, *args, **kwargs)

    return load


def _is_zip(f: Any) -> bool:
    if isinstance(f, str | os.PathLike):
        return zipfile.is_zipfile(f)
    place = f.tell()
    try:
        return zipfile.is_zipfile(f)
    finally:
        f.seek(place)


class _Placing:
    """Moves tensors to where their storages are to go; equal ones stay one.

    Args:
        is_read_first: Whether values are there when a tensor is made. In files that are no
            zip archives they come last.
    """

    def __init__(self, *, is_read_first: bool) -> None:
        self._is_read_first = is_read_first
        self._placed: dict[Any, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage: Any = tensor.untyped_storage()
        target = getattr(storage, _MARK)
        if target is None:
            return tensor
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        key = (storage._cdata, tensor.dtype, *place)
        if key not in self._placed:
            if self._is_read_first:
                moved = tensor.detach().to(target)
            else:
                moved = torch.empty_strided(
                    *place[1:], dtype=tensor.dtype, device=target
                )
            self._placed[key] = moved.requires_grad_(tensor.requires_grad)
        return self._placed[key]
