"""Why a step cannot be captured, with the user's own line and the fix."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.comm import Owner, Phase
from torchspmd.errors import CaptureError, SpmdError
from torchspmd.step.capture.user_code import raises_itself, user_line


class RefusalError(Exception):
    """What an operator cannot do, and the fix; ``refuse`` adds where it was called."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def refuse(
    function: str, error: Exception, owner: Owner, closed: Sequence[str] = ()
) -> CaptureError:
    """The error that the user gets for whatever went wrong while tracing.

    Args:
        function: The step's name.
        error: What went wrong.
        owner: Where in the step.
        closed: The arguments whose tensors are no inputs, and what they are.
    """
    what, fix = _explain(error, owner, closed)
    where = f"  * {user_line(error)}\n    in {owner.module} ({owner.phase.value})"
    return CaptureError(f"compile on {function!r}: {what}\n\n{where}\n\n{fix}")


def _explain(error: Exception, owner: Owner, closed: Sequence[str]) -> tuple[str, str]:
    """What went wrong, and the fix."""
    if isinstance(error, RefusalError):
        return error.what, error.fix
    if _is_in_distribution(error):
        return "a distribution checks the values of its arguments", _DISTRIBUTION_FIX
    if needs_values(error):
        return _explain_values(error, owner)
    if closed and _NO_INPUT in str(error):
        fix = f"{_CLOSED_FIX}\nHere {'; '.join(closed)}."
        return "the step uses a tensor that is in no argument", fix
    for words, what, fix in _BY_TEXT:
        if words in str(error):
            return what.format(error=_first_line(error)), fix
    if raises_itself(error):
        return f"the step raises {_first_line(error)}, after it has begun", _RAISE_FIX
    return (
        f"the step failed while it was captured ({_first_line(error)})",
        "Run the step without compile first; if it works there, the operator cannot run "
        "on tensors without values.",
    )


def _explain_values(error: Exception, owner: Owner) -> tuple[str, str]:
    if torch.is_anomaly_enabled():
        return "anomaly detection reads every gradient's values", _ANOMALY_FIX
    running = [frame.f_locals.get("self") for frame in _frames(error)]
    for kind, what, fix in _OF_MODULES:
        if any(isinstance(each, kind) for each in running):
            return what, fix
    optimizer = next((each for each in running if isinstance(each, Optimizer)), None)
    if owner.phase is Phase.OPTIMIZER and optimizer is not None:
        name = type(optimizer).__name__
        return (
            f"{name} chooses what to do by a value that is not known yet",
            _OPTIMIZER_FIX,
        )
    if (operator := _torch.operator_of_unknown_size(error)) is not None:
        return f"the size of what {operator} makes depends on values", _SIZE_FIX
    return "the step needs a tensor's value while it is captured", _VALUE_FIX


def needs_values(error: BaseException | None) -> bool:
    """Whether an error, or the one that it was made of, asks for a tensor's values.

    An operator without a sharding rule may have failed so where its parts were tried.
    """
    while error is not None:
        if isinstance(error, _torch.data_dependence_errors()):
            return True
        if _NO_RULE in str(error):
            return False
        error = error.__cause__ or error.__context__
    return False


def no_input_error() -> RuntimeError:
    """As torch's error for a tensor that is no input of the graph."""
    return RuntimeError(_NO_INPUT)


def uses_other_tensors(error: BaseException) -> bool:
    """Whether an error says that a tensor is no input of the graph."""
    return _NO_INPUT in str(error)


_VALUE_FIX = (
    "A graph has no values before it runs: item(), float(), bool() and `if` on a tensor "
    "cannot be captured.\nReturn the tensor and read it after the step, or choose with "
    "torch.where. A choice by a buffer that is one number (`if self.initialized:`, "
    "`self.count.item() % 2`) is captured, as long as it follows from its value before the "
    "step; what reads one as a number of Python, by float() or int(), is not. A place that "
    "a buffer holds is an index as it is: `place = (self.ptr + torch.arange(n)) % size`, "
    "`self.queue.index_copy_(1, place, keys)`, `self.ptr.copy_((self.ptr + n) % size)`."
)
_SIZE_FIX = (
    "A graph has no values before it runs, and every tensor in it has a known size.\n"
    "Write it with a result of fixed size: torch.where or a mask that is multiplied "
    "instead of boolean indexing and nonzero(), F.one_hot(x, n).sum(0) instead of "
    "bincount(), topk() instead of unique()."
)
_DISTRIBUTION_FIX = (
    "A graph has no values before it runs, and the check chooses by them whether to "
    "raise.\nMake the distribution with validate_args=False, or call "
    "torch.distributions.Distribution.set_default_validate_args(False) once."
)
_OPTIMIZER_FIX = (
    "A choice by a counter that is one number is captured; a choice by what is computed "
    "from gradients or parameters cannot be, a graph has no values before it runs.\nPass "
    "capturable=True to the optimizer where it has this option and the device allows it, "
    "or choose with torch.where in an optimizer of your own."
)

_RAISE_FIX = (
    "Of a captured step nothing has happened when it raises, and eagerly a part of it "
    "has.\nCheck before the first operation on tensors in the step: then the error itself "
    "is raised. Or check outside of the step."
)
_CLOSED_FIX = (
    "Inputs of the graph are tensors of the step's arguments, of their modules and "
    "optimizers, and those without gradients that its code reaches by name. An argument is "
    "looked into where it is a container or a plain object (a dataclass), unless the "
    "tensor requires gradients.\nPass the tensors by themselves, or register them as "
    "buffers of a module."
)
_ANOMALY_FIX = (
    "A graph has no values before it runs.\nLeave torch.autograd.set_detect_anomaly() off "
    "around a compiled step, and look for what is not finite without compile."
)
_SPARSE_FIX = (
    "Its size depends on the values of the batch, and a graph has none before it runs.\n"
    "Make the embedding with sparse=False; gather_embeddings=True sends the rows of its "
    "gradient alone."
)


_NO_INPUT = "Please convert all Tensors to FakeTensors first"
_NO_RULE = "sharding strategy"
_RULE_FIX = (
    "The default mode gives one device's result, so every operator must say how it "
    "works on a sharded batch.\nGive the operator a rule with "
    "torch.distributed.tensor.experimental.register_sharding, or compute on each "
    "rank's own batch with parallel_mode=DataParallel('replicate', reduce='avg')."
)
# What torch says, what that means here, and the fix.
_BY_TEXT = (
    (_NO_RULE, "an operator has no sharding rule ({error})", _RULE_FIX),
    (
        _NO_INPUT,
        "the step uses a tensor that is in no argument",
        "Inputs of the graph are tensors of the step's arguments, of their modules and "
        "optimizers, and those without gradients that its code reaches by name.\nPass it "
        "as an argument, or register it as a buffer of a module.",
    ),
    (
        "mixed torch.Tensor and DTensor",
        "the step mixes a DTensor with a plain tensor",
        "A sharded parameter is whole inside of a module's forward. Elsewhere, without "
        "gradients, it is its shard and works with other shards only.\nCall the module, or "
        "lay the other tensor out with distribute_tensor().",
    ),
    (
        "must have the same mesh",
        "an operator gets DTensors of several meshes",
        "Fully sharded parameters lie over the data axis, those with a style over two "
        "axes.\nUse torchspmd.clip_grad_norm_ instead of torch.nn.utils.clip_grad_norm_; "
        "elsewhere, work on the parameters of one mesh at a time.",
    ),
    (
        "TorchScript interpreter",
        "the step calls a function of torch.jit.script",
        "Such a function is compiled code, and does not run on tensors without values.\n"
        "Set PYTORCH_JIT=0 in the environment, so that it stays Python, or call the "
        "function that was scripted.",
    ),
    (
        "norm on empty tensor",
        "the norm of a shard without elements",
        "A parameter with few rows leaves some ranks without any, and torch has no such "
        "norm of nothing.\nUse torchspmd.clip_grad_norm_ instead of "
        "torch.nn.utils.clip_grad_norm_.",
    ),
    (
        "Expected inputs of BF16 type",
        "a grouped product of experts in another dtype than bfloat16",
        "Torch has no form of it for tensors without values in other dtypes.\nGive a model "
        "of transformers experts_implementation='batched_mm' (an argument of "
        "from_pretrained and from_config; set_experts_implementation() of the model), or "
        "compute in bfloat16.",
    ),
    (
        "for `end`, but got dtype",
        "an optimizer's state is of another dtype than its parameter ({error})",
        "Eagerly its step would fail in the same way: the model was converted "
        "(model.double(), model.to()) after the optimizer's first step.\nConvert it before "
        "that, or make the optimizer anew.",
    ),
    ("SparseTensorImpl", "an operator makes a sparse gradient", _SPARSE_FIX),
    ("by strided tensors", "an operator makes a sparse gradient", _SPARSE_FIX),
    # Torch says it of every error in a rule: last.
    (
        "Sharding propagation failed",
        "the sharding rule of an operator does not take what it gets here ({error})",
        _RULE_FIX,
    ),
)


def _is_in_distribution(error: BaseException | None) -> bool:
    """Whether a distribution of torch validates its arguments, here or in the cause."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name
            if isinstance(owner, Distribution) and name in _VALIDATING:
                return True
        error = error.__cause__ or error.__context__
    return False


_VALIDATING = ("__init__", "_validate_sample")


def _frames(error: BaseException) -> Iterator[FrameType]:
    """What ran when an error was raised, the outermost first."""
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))


# Modules of torch that ask for values, what for, and what to do instead.
_OF_MODULES: tuple[tuple[type[nn.Module], str, str], ...] = (
    (
        _BatchNorm,
        "a batch norm with momentum=None averages by the number of batches so far",
        "A graph has no values before it runs, and torch reads that number on the host."
        "\nGive the module a number, such as momentum=0.1.",
    ),
    (
        nn.RNNBase,
        "a packed sequence has sizes that depend on its values",
        "A graph has no values before it runs.\nPass padded sequences, and mask what is "
        "behind the end of each: torch.where, or ignore_index of the loss.",
    ),
)


@contextlib.contextmanager
def noting_refusals(refused: list[Exception]) -> Iterator[None]:
    """Add what is refused inside to a list.

    Code of the user's may catch it, and what it does then would be captured for ever.
    """
    try:
        yield
    except Exception as error:
        if is_ours(error) or isinstance(error, RefusalError) or needs_values(error):
            refused.append(error)
        raise


def is_ours(error: BaseException) -> bool:
    """Whether an error already says what to change."""
    return isinstance(error, SpmdError)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
