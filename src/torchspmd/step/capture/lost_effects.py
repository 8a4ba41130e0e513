"""Operators that only do something, and that a functional graph would lose."""

import functools
from typing import Any

from torchspmd import _torch
from torchspmd.errors import CaptureError


@functools.cache  # asked at every call of a traced step
def check_effect(operator: Any) -> None:
    """Refuse an operator that neither returns nor writes anything.

    Nothing in the graph would need it, so it would be removed as dead code and never run.
    """
    if _torch.only_has_effects(operator):
        raise CaptureError(
            f"compile: the step calls {operator}, which returns nothing and by its schema "
            "writes into nothing, so that nothing in a graph needs it and it would never "
            "run. Return its argument from the step and call it after the step."
        )
