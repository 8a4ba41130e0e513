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
    lost, and is an error at the end.
    """
    made: dict[int, nn.Parameter] = {}
    with contextlib.ExitStack() as stack:
        for name, module in (
            each for model in models for each in model.named_modules()
        ):
            table = module._parameters
            for key, shard in list(table.items()):
                known = made.get(id(shard))
                whole = _gathered(shard, axes) if known is None else known
                if shard is None or whole is None:
                    continue
                made[id(shard)] = whole
                mark_full(whole, f"{name}.{key}" if name else key)
                stack.callback(table.__setitem__, key, shard)
                table[key] = whole
        _torch.renew_flat_weights(models)
        versions = {key: _torch.version_of(each) for key, each in made.items()}
        try:
            yield
        finally:
            stack.close()
            _torch.renew_flat_weights(models)
    written = [
        full_name(whole)
        for key, whole in made.items()
        if _torch.version_of(whole) != versions[key]
    ]
    if written:
        raise UsageError(
            f"full_parameters: {', '.join(written[:4])} was written inside of the block, "
            "where it is a gathered copy that is thrown away. Write to the shards, outside "
            "of the block, or load a state dict there."
        )


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
