"""Whole parameters of a fully sharded model for a while: evaluation, generation, export."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.step.capture.inventory import full_name, mark_full
from torchspmd.step.modes.gather import gather_rows
from torchspmd.step.modes.shard_layout import DataAxes, read_sharding


@contextlib.contextmanager
def full_parameters(models: Sequence[nn.Module], axes: DataAxes) -> Iterator[None]:
    """Inside, the models hold gathered copies of their shards.

    Every rank enters and leaves at the same point. What is written into a copy would be
    lost, and is an error at the end. A copy may get another name, as pruning does it.
    """
    made: dict[int, tuple[nn.Parameter, Any]] = {}  # by shard: its copy
    inside = _modules(models)
    for name, module in inside:
        for key, shard in list(module._parameters.items()):
            known = made.get(id(shard))
            whole = _gathered(shard, axes) if known is None else known[0]
            if whole is not None:
                made[id(shard)] = whole, shard
                mark_full(whole, f"{name}.{key}" if name else key)
                module._parameters[key] = whole
    _torch.renew_flat_weights(models)
    before = {key: _memory(whole) for key, (whole, _) in made.items()}
    try:
        yield
    finally:
        shards = {id(whole): shard for whole, shard in made.values()}
        for _, module in inside + _modules(models):
            for key, value in list(module._parameters.items()):
                module._parameters[key] = shards.get(id(value), value)
        _torch.renew_flat_weights(models)
    written = [
        full_name(whole)
        for key, (whole, shard) in made.items()
        if _memory(whole) != before[key] and not _holds(shard, whole, axes)
    ]
    if written:
        raise UsageError(
            f"full_parameters: {', '.join(written[:4])} was written inside of the block, "
            "where it is a gathered copy that is thrown away. Write to the shards, outside "
            "of the block, or load a state dict there."
        )


def _modules(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [each for model in models for each in model.named_modules()]


def _memory(whole: torch.Tensor) -> tuple[int, int]:
    """What is another one once a copy was written to, or got other data."""
    local = _torch.plain_tensor(whole)
    return _torch.version_of(whole), _torch.storage_key(local)


def _holds(shard: Any, whole: torch.Tensor, axes: DataAxes) -> bool:
    """Whether nothing is lost: this rank's rows are those of the shard."""
    local = _torch.plain_tensor(whole)
    sharding = read_sharding(_torch.layout_of(shard), axes)
    if sharding is not None and sharding.is_sharded:
        local = local[slice(*sharding.kept)]
    return torch.equal(local, _torch.plain_tensor(shard))


def _gathered(shard: Any, axes: DataAxes) -> nn.Parameter | None:
    """The whole parameter, without gradients; None where this mode has not sharded it."""
    layout = None if shard is None else _torch.layout_of(shard)
    sharding = None if layout is None else read_sharding(layout, axes)
    if sharding is None:
        return None
    with torch.no_grad():
        whole = gather_rows(_torch.plain_tensor(shard).detach(), sharding)
        if sharding.whole is not None:
            whole = _torch.wrap_local(whole, sharding.whole)
    return nn.Parameter(whole, requires_grad=False)
