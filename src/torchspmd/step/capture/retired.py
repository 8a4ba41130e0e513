"""Parameters whose place was taken by a shard: using one of them is an error."""

import functools
from typing import Any

import torch
from torch import nn

from torchspmd import _torch
from torchspmd.errors import UsageError


class _Told:
    """Every function of torch that gets the parameter raises."""

    _name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves, _ = _torch.flatten_tree((args, kwargs))
        name = next(leaf for leaf in leaves if isinstance(leaf, cls)).__dict__["_name"]
        raise UsageError(
            f"{name}: this is the whole parameter from before the first step; "
            "DataParallel('fully_shard') put a shard in its place. Take it from the model "
            "again (model.parameters()), and pass every optimizer and module that holds "
            "it to the step, or make them after the first step."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{self.__dict__['_name']}: replaced by its shard>"


class _Retired(_Told, nn.Parameter):  # type: ignore[misc]  # torch's own __repr__ is untyped
    """A plain parameter from before."""


@functools.cache
def _retired_dtensor() -> type:
    from torch.distributed.tensor import DTensor

    return type("_RetiredDTensor", (_Told, DTensor), {})


def is_retired(value: Any) -> bool:
    """Whether a value is a parameter from before."""
    return isinstance(value, _Told)


def retire(parameter: torch.Tensor, name: str) -> None:
    """Free the whole tensor, and let no one use it by mistake."""
    parameter.grad = None
    parameter.__dict__["_name"] = name
    if _torch.layout_of(parameter) is None:
        parameter.data = parameter.data.new_empty(0)
        parameter.__class__ = _Retired
    else:
        _torch.free_shard(parameter)
        parameter.__class__ = _retired_dtensor()
