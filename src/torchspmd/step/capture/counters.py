"""Which states of an optimizer are counters, and not values of its parameter."""

import torch

_NAMES = frozenset({"step", "eta", "mu", "mu_product"})


def is_counter(key: str, tensor: torch.Tensor) -> bool:
    """Whether a state is a number that is the same on every rank, however sharded.

    Only the name tells it from the state of a parameter that is one number.

    >>> is_counter("step", torch.zeros(())), is_counter("exp_avg", torch.zeros(()))
    (True, False)
    """
    return key in _NAMES and tensor.ndim == 0
