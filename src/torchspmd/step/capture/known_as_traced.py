"""Libraries that ask whether a tensor has values are told the truth about DTensors.

transformers looks into an attention mask to leave it out where nothing is masked, unless
the mask is a fake tensor: then it computes with every mask, which is right for all batches
of a graph. It does not know a DTensor around a fake tensor for one.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torchspmd import _torch

_ASKS = ("transformers.utils.import_utils", "is_fake_tensor")


@contextlib.contextmanager
def known_as_traced() -> Iterator[None]:
    """Inside, transformers takes a DTensor without values for what it is."""
    # Nothing is imported for this: a model of transformers has imported it already.
    module, name = _ASKS
    library = sys.modules.get(module)
    asks: Callable[[Any], bool] | None = getattr(library, name, None)
    if asks is None:
        # Another version: what looks into a tensor is refused, by its line.
        yield
        return

    def looks_inside(value: Any) -> bool:
        return asks(_torch.plain_tensor(value))

    setattr(library, name, looks_inside)
    try:
        yield
    finally:
        setattr(library, name, asks)
