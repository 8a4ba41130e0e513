"""Mixed precision of fully sharded steps, with the meaning that FSDP2 gives to it.

Shards and optimizer state keep their dtype. What a forward uses is gathered in another
one, and gradients are reduced in a third.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Self, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from torchspmd import _torch

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
_KNOWN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Precision:
    """Which dtypes a step gathers, reduces and returns in; None leaves what is there.

    Attributes:
        param_dtype: Of gathered parameters, on the wire and in forward and backward.
        reduce_dtype: Of gradients while they are reduced; ``param_dtype`` by default.
        output_dtype: Of floating-point results of the models that the step calls.
        cast_forward_inputs: Whether floating-point arguments of these models are cast to
            ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, policy: Any) -> Self:
        """The precision of torch's ``MixedPrecisionPolicy``; None for no casts."""
        if policy is None:
            return cls()
        return cls(*(getattr(policy, each.name) for each in fields(cls)))

    def of_whole(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of this dtype is gathered for a forward."""
        return self.param_dtype or dtype if dtype.is_floating_point else dtype

    def of_reduction(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter of this dtype is reduced."""
        return self.reduce_dtype or dtype if dtype.is_floating_point else dtype

    @contextlib.contextmanager
    def installed(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, models cast what they are called with, and what they return."""
        with contextlib.ExitStack() as stack:
            for model in models:
                if self.param_dtype is not None and self.cast_forward_inputs:
                    before = model.register_forward_pre_hook(
                        functools.partial(_cast_inputs, self.param_dtype),
                        prepend=True,
                        with_kwargs=True,
                    )
                    stack.callback(before.remove)
                if self.output_dtype is not None:
                    after = model.register_forward_hook(
                        functools.partial(_cast_outputs, self.output_dtype)
                    )
                    stack.callback(after.remove)
            yield


def policy_problems(policy: object) -> Iterator[str]:
    """What is wrong with ``mp_policy``, a line each."""
    # Not at the top: importing it registers operators.
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(policy, MixedPrecisionPolicy):
        yield (
            f"mp_policy={type(policy).__name__}: pass torch's own policy, "
            "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=..., "
            "reduce_dtype=..., output_dtype=..., cast_forward_inputs=...)"
        )
        return
    for name in _DTYPES:
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in _KNOWN:
            known = ", ".join(str(each) for each in _KNOWN)
            yield f"mp_policy.{name}={dtype!r}: choose among {known}, or None"
    unknown = {each.name for each in fields(MixedPrecisionPolicy)} - {
        each.name for each in fields(Precision)
    }
    defaults = MixedPrecisionPolicy()
    for name in sorted(unknown):
        if getattr(policy, name) != getattr(defaults, name):
            yield (
                f"mp_policy.{name}={getattr(policy, name)!r} is not supported with a "
                "compiled step; leave it out"
            )


def divisors(dtype: torch.dtype, size: int) -> tuple[float, float]:
    """What an average over ranks divides by, before and after it adds.

    Sums of float16 may leave its range, and quotients vanish: half of each.

    >>> divisors(torch.bfloat16, 8), divisors(torch.float16, 8)
    ((1.0, 8.0), (4.0, 2.0))
    """
    if dtype is not torch.float16:
        return 1.0, float(size)
    before = 2.0 ** math.ceil(math.log2(size) / 2)
    return before, size / before


def cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor in another dtype; others as they are."""
    is_other = value.is_floating_point() and value.dtype is not dtype
    return value.to(dtype) if is_other else value


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    given = _torch.map_tensors(functools.partial(cast, dtype), (args, kwargs))
    return given[0], given[1]


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _torch.map_tensors(functools.partial(cast, dtype), output)


@final
class Casting:
    """Whole parameters that a forward sees in the precision of a policy.

    Each is cast once in a call of a model, as it would be gathered once.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], precision: Precision
    ) -> None:
        self._owned = {id(each): each for each in parameters}
        self._precision = precision
        self._depth = 0
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}  # with its version
        self._original: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the calls of modules inside."""
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._kept.clear()

    @property
    def is_in_forward(self) -> bool:
        """Whether the forward of a module runs now."""
        return self._depth > 0

    def owns(self, value: object) -> bool:
        """Whether a value is one of these parameters."""
        return id(value) in self._owned

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter in the dtype of the policy; itself outside of a forward."""
        dtype = self._precision.of_whole(parameter.dtype)
        if not self.is_in_forward or dtype is parameter.dtype:
            return parameter
        version = _torch.version_of(_torch.plain_tensor(parameter))
        kept = self._kept.get(id(parameter))
        needs_gradient = parameter.requires_grad and torch.is_grad_enabled()
        if kept is not None and kept[0] == version:
            if kept[1].requires_grad or not needs_gradient:
                return kept[1]
        made = parameter.to(dtype)
        self._kept[id(parameter)] = version, made
        self._original[id(made)] = made, parameter
        return made

    def shard_of(self, value: Any) -> Any:
        """The parameter that was cast to a value; other values as they are."""
        return self._original.get(id(value), (None, value))[1]
