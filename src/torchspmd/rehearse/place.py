"""Where an operator comes from: the user's line, and what torch itself is doing."""

import sys
import sysconfig
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from torch import fx

from torchspmd import _torch

__all__ = ["Maker", "Place", "is_called_by_torch", "is_called_by_user", "read_place"]


class Maker(Enum):
    """Code of torch whose tensors have a purpose that nothing else tells."""

    NOBODY = "nobody"
    OPTIMIZER = "optimizer"  # clipping and scaling of gradients too
    FSDP_PARAMETER = "fsdp parameter"
    FSDP_COLLECTIVE = "fsdp collective"
    DDP = "ddp"
    INITIALISER = "initialiser"


class Place(NamedTuple):
    """What a call stack says.

    Attributes:
        line: ``file:line function`` of the user's code; "" where there is none.
        maker: The innermost code of torch that ``Maker`` knows.
        node: Of a compiled step, the node of its graph that runs.
    """

    line: str
    maker: Maker
    node: fx.Node | None = None


_USERS = "user's"
_MODULE = "a module's call"
_OWN_FOLDER = str(Path(__file__).parent.parent)
# Where a dispatcher's operators come from: it is kept out of torch.compile by these.
_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_SITE_PACKAGES = sysconfig.get_paths()["purelib"]
_MAKERS = (
    ("fsdp/_fully_shard/_fsdp_param.py", Maker.FSDP_PARAMETER),
    ("fsdp/_fully_shard/_fsdp_collectives.py", Maker.FSDP_COLLECTIVE),
    ("fsdp/_flat_param.py", Maker.FSDP_PARAMETER),
    ("nn/parallel/distributed.py", Maker.DDP),
    ("nn/utils/clip_grad.py", Maker.OPTIMIZER),
    ("amp/grad_scaler.py", Maker.OPTIMIZER),
    ("optim/lbfgs.py", Maker.OPTIMIZER),
    ("nn/init.py", Maker.INITIALISER),
)
# By identity: a code object's own hash reads all its bytecode. Held, so that no other
# function can take their place.
_meanings: dict[int, tuple[CodeType, object]] = {}


def read_place() -> Place:
    """Read the stack of the caller's caller, up to the first line of the user's code."""
    maker, node = Maker.NOBODY, None
    in_module = False  # what calls the module is not the maker of what it does
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        seen = _meanings.get(id(code))
        meaning = seen[1] if seen is not None else _remember(code)
        if meaning is _USERS:
            line = f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"
            return Place(line, maker, node)
        if meaning is _torch.Landmark.GRAPH:
            node = node or _torch.running_node(frame)
        elif meaning is _MODULE:
            in_module = True
        elif meaning is not None and maker is Maker.NOBODY and not in_module:
            assert isinstance(meaning, Maker)
            maker = meaning
        frame = frame.f_back
    return Place("", maker, node)


def is_called_by_torch() -> bool:
    """Whether the function that led here was called by torch, and not by the user."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _leads_on(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _torch.is_torch_code(frame.f_code)


def _leads_on(path: str) -> bool:
    return path.startswith(_OWN_FOLDER) or path.replace("\\", "/").endswith(_WRAPPERS)


def is_called_by_user() -> bool:
    """Whether the function that asks was called by the user's code."""
    return _meaning(sys._getframe(2).f_code) is _USERS


def _short(path: str) -> str:
    """A library's file, as its users know it."""
    return path.rpartition("/site-packages/")[2]


def _remember(code: CodeType) -> object:
    meaning = _meaning(code)
    _meanings[id(code)] = (code, meaning)
    return meaning


def _meaning(code: CodeType) -> object:
    name = code.co_filename
    if _torch.is_torch_code(code):
        if _torch.landmark(code) is _torch.Landmark.GRAPH:
            return _torch.Landmark.GRAPH
        path = name.replace("\\", "/")
        if path.endswith("nn/modules/module.py") and code.co_name == "_call_impl":
            return _MODULE
        return next((maker for end, maker in _MAKERS if path.endswith(end)), None)
    if name.startswith(_OWN_FOLDER):
        return None
    if name.startswith(_STANDARD_LIBRARY) and not name.startswith(_SITE_PACKAGES):
        return None
    return _USERS
