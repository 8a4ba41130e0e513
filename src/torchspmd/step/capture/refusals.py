"""Why a step cannot be captured, told with the user's own line and the way out."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError, SpmdError
from torchspmd.step.graph.owners import Owner

_OWN_FOLDERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).resolve().parents[2]),
)


def refuse(function: str, error: Exception, owner: Owner) -> CaptureError:
    """The error that the user gets for whatever went wrong while tracing."""
    place = user_line(error)
    where = f"  * {place}\n    in {_describe(owner)}"
    if isinstance(error, _torch.data_dependence_errors()):
        what, cure = "the step needs a tensor's value while it is captured", _VALUE_CURE
        if owner.phase is Phase.OPTIMIZER and _is_optimizers_own(error):
            what = "the optimizer chooses what to do by the value of its state"
            cure = _OPTIMIZER_CURE
    elif "sharding strategy" in str(error):
        what = f"an operator has no sharding rule ({_first_line(error)})"
        cure = _RULE_CURE
    elif "Please convert all Tensors to FakeTensors first" in str(error):
        what, cure = "the step uses a tensor that is in no argument", _TENSOR_CURE
    elif "mixed torch.Tensor and DTensor" in str(error):
        what, cure = "the step mixes a DTensor with a plain tensor", _MIXED_CURE
    elif "norm on empty tensor" in str(error):
        what, cure = "the norm of a shard without elements", _NORM_CURE
    else:
        what = f"the step failed while it was captured ({_first_line(error)})"
        cure = (
            "Run the step without compile first; if it works there, the operator cannot "
            "run on tensors without values."
        )
    return CaptureError(f"compile on {function!r}: {what}\n\n{where}\n\n{cure}")


_VALUE_CURE = (
    "A graph has no values before it runs: item(), float(), bool() and `if` on a tensor "
    "cannot be captured.\nReturn the tensor and read it after the step, or choose with "
    "torch.where."
)
_OPTIMIZER_CURE = (
    "A graph has no values before it runs, so such a choice cannot be captured.\nPass "
    "capturable=True to the optimizer where it has this option and the device allows it, "
    "or use an optimizer that does not choose, such as Adam, AdamW, SGD or RMSprop."
)
_RULE_CURE = (
    "The default mode gives one device's result, so every operator must say how it works "
    "on a sharded batch.\nGive the operator a rule with "
    "torch.distributed.tensor.experimental.register_sharding, or compute on each rank's "
    "own batch with parallel_mode=DataParallel('replicate', reduce='avg')."
)
_TENSOR_CURE = (
    "Only tensors of the step's arguments and of their modules and optimizers are inputs "
    "of the graph.\nPass it as an argument, or register it as a buffer of a module."
)

_MIXED_CURE = (
    "A sharded parameter is whole inside of a module's forward. Elsewhere, without "
    "gradients, it is its shard and works with other shards only.\nCall the module, or "
    "lay the other tensor out with distribute_tensor()."
)
_NORM_CURE = (
    "A parameter with few rows leaves some ranks without any, and torch has no such norm "
    "of nothing.\nUse torchspmd.clip_grad_norm_ instead of torch.nn.utils.clip_grad_norm_."
)


class NoPrinting(TorchFunctionMode):
    """Refuses a print of a tensor in the user's code: there is no value to show."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__repr__:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_name != "__repr__":
                frame = frame.f_back
            caller = frame.f_back
            if caller and not caller.f_code.co_filename.startswith(_OWN_FOLDERS):
                raise CaptureError(
                    "compile: the step prints a tensor, which has no value while the "
                    f"step is captured\n\n  * {caller.f_code.co_filename}:"
                    f"{caller.f_lineno} {caller.f_code.co_name}\n\nReturn the tensor "
                    "and print it after the step."
                )
        return func(*args, **(kwargs or {}))


def user_line(error: BaseException) -> str:
    """``file:line function`` of the innermost frame that is not torch's or ours."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_OWN_FOLDERS):
            line = f": {frame.line}" if frame.line else ""
            return f"{frame.filename}:{frame.lineno} {frame.name}{line}"
    return "(no line of yours: the call came from torch)"


def _is_optimizers_own(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/optim/" in frame.filename for frame in frames)


def is_ours(error: BaseException) -> bool:
    """Whether an error already says what to change."""
    return isinstance(error, SpmdError)


def _describe(owner: Owner) -> str:
    return f"{owner.module} ({owner.phase.value})"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
