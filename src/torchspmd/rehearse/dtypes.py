"""Operators whose kernels refuse tensors of several dtypes, which shape functions take."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["DTYPES", "refuse_dtypes"]

# Of each, the arguments that must have one dtype.
DTYPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("aten.mm.default", "aten.mv.default", "aten.dot.default"), (0, 1)),
    **dict.fromkeys(
        (
            "aten.linear.default",
            "aten.addmm.default",
            "aten.addmv.default",
            "aten.convolution.default",
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_efficient_attention.default",
            "aten._scaled_dot_product_cudnn_attention.default",
        ),
        (0, 1, 2),
    ),
    **dict.fromkeys(("aten.index_add.default", "aten.index_add_.default"), (0, 3)),
    "aten.binary_cross_entropy.default": (0, 1),
    "aten.nll_loss_forward.default": (1,),
    "aten.nll_loss2d_forward.default": (1,),
}
_CLASSES = (torch.int64, torch.uint8)  # of a target that is a class


def refuse_dtypes(name: str, places: Sequence[int], args: Sequence[Any]) -> None:
    """Raise what the kernel would raise.

    Args:
        name: Of an operator.
        places: Its arguments that must have one dtype; of a loss, the classes.
        args: As it is called.

    Raises:
        RuntimeError: They have several.
    """
    dtypes = dict.fromkeys(
        args[place].dtype
        for place in places
        if place < len(args) and isinstance(args[place], torch.Tensor)
    )
    if "nll_loss" in name:
        if not set(dtypes) <= set(_CLASSES):
            raise RuntimeError(
                f"{name}: expected a target of int64, but got {_words(dtypes)}. Kernels of "
                "GPUs refuse it too: give target.long()."
            )
    elif len(dtypes) > 1:
        raise RuntimeError(
            f"{name}: expected tensors of the same dtype, but got {_words(dtypes)}. "
            "Kernels of GPUs refuse it too: cast one of them, or compute under "
            "torch.autocast."
        )


def _words(dtypes: Sequence[torch.dtype] | dict[torch.dtype, None]) -> str:
    return " and ".join(str(each).removeprefix("torch.") for each in dtypes)
