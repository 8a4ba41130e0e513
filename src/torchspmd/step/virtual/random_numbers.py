"""Random numbers of virtual ranks: each draws as if it were alone in its process."""

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from torchspmd import _torch


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from torch's default generator."""
    return _torch.draws_random_numbers(node.target, node.args, node.kwargs)


class Generators:
    """Each rank's random numbers, drawn from torch's default generators."""

    def __init__(self, size: int, seed: int) -> None:
        self._seeds = [seed + rank for rank in range(size)]
        self._states: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]

    @contextlib.contextmanager
    def of(self, rank: int, node: fx.Node) -> Iterator[None]:
        """A random node run inside draws this rank's numbers, and nobody else's."""
        device, states = _device_of(node), self._states[rank]
        before = _get_state(device)
        if device.type in states:
            _set_state(device, states[device.type])
        else:
            _seed(device, self._seeds[rank])
        try:
            yield
            states[device.type] = _get_state(device)
        finally:
            _set_state(device, before)


def _device_of(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    while isinstance(value, (list, tuple)):
        value = value[0]
    return value.device if isinstance(value, torch.Tensor) else torch.device("cpu")


def _get_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
