"""What a call stack tells about a communication: phase, owner, cause and user's line.

The walk goes from the operator outwards and stops at the first frame that decides the
phase, so it costs a few microseconds, and only for communication.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from torch import nn

from torchspmd import _torch
from torchspmd._torch import Landmark
from torchspmd.comm import OWNER_KEY, Owner, Phase

_PACKAGE_FOLDER = str(Path(__file__).parent.parent)
# Functions of torchspmd itself that decide the phase, as torch's own do.
_OWN_LANDMARKS = {str(Path(_PACKAGE_FOLDER, "parallel", "clip.py")): Landmark.OPTIMIZER}

# Functions seen so far, by identity (a code object's own hash reads all its bytecode).
# Held, so that no other function can take their place; there are few.
_meanings: dict[int, tuple[CodeType, str | None]] = {}

_PHASES = {
    Landmark.BACKWARD: Phase.BACKWARD,
    Landmark.RECOMPUTE: Phase.RECOMPUTE,
    Landmark.OPTIMIZER: Phase.OPTIMIZER,
}


@dataclass(slots=True)
class CallSite:
    """What the stack says, filled in while it is walked; None where it does not say."""

    phase: Phase = Phase.FORWARD
    owner: nn.Module | None = None
    module: str | None = None
    redistribution: str | None = None
    operator: str | None = None
    source: str | None = None
    compiled: bool = False
    decided: bool = False

    @property
    def cause(self) -> str | None:
        """The redistribution, and the operator that needed it where DTensor chose to."""
        if self.redistribution is None or self.operator is None:
            return self.redistribution
        return f"{self.operator}: {self.redistribution}"


def read_call_site(with_source: bool) -> CallSite:
    """Read the stack of the caller's caller.

    ``with_source`` asks for what costs more: the user's line, and the layouts of a
    redistribution that the user asked for (of implicit ones they are always read).
    """
    in_backward = _torch.graph_task() != -1
    site = CallSite(phase=Phase.BACKWARD if in_backward else Phase.FORWARD)
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        seen = _meanings.get(id(code)) or _remember(code)
        meaning = seen[1]
        if meaning is not None:
            if not site.decided:
                _learn(site, meaning, frame, in_backward, with_source)
        elif with_source and site.source is None and _is_users(code):
            site.source = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        if site.decided and (site.source is not None or not with_source):
            break
        frame = frame.f_back
    return site


def read_phase() -> Phase:
    """The phase alone, of code that runs outside modules and backward."""
    return Phase.OPTIMIZER if _is_inside(Landmark.OPTIMIZER) else Phase.FORWARD


def is_nested_backward() -> bool:
    """Whether backward was called from Python in this very thread.

    Autograd's own threads begin without a caller: what they find above themselves is a
    backward pass that one of their nodes started.
    """
    return _is_inside(Landmark.BACKWARD)


def _is_inside(landmark: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        seen = _meanings.get(id(code)) or _remember(code)
        if seen[1] is landmark:
            return True
        frame = frame.f_back
    return False


def _remember(code: CodeType) -> tuple[CodeType, str | None]:
    meaning = _OWN_LANDMARKS.get(code.co_filename) or _torch.landmark(code)
    seen = _meanings[id(code)] = (code, meaning)
    return seen


def _learn(
    site: CallSite, meaning: str, frame: FrameType, in_backward: bool, with_source: bool
) -> None:
    """Note what one frame of torch's own code means."""
    if meaning in _PHASES:
        site.phase, site.decided = _PHASES[meaning], True
    elif meaning is Landmark.MODULE_CALL:
        # A module that runs while a backward pass does is being recomputed.
        site.phase = Phase.RECOMPUTE if in_backward else Phase.FORWARD
        site.decided = True
    elif meaning is Landmark.FSDP and site.owner is None:
        site.owner = _torch.fsdp_module(frame.f_locals)
    elif meaning is Landmark.MODULE_HOOK:
        site.owner = _torch.hooked_module(frame.f_locals)
    elif meaning is Landmark.REDISTRIBUTE:
        if with_source:
            site.redistribution = _torch.redistribution(frame.f_locals)
    elif meaning is Landmark.DISPATCH:
        site.operator, site.redistribution = _torch.implicit_redistribution(
            frame.f_locals
        )
    elif meaning is Landmark.COMPILED:
        site.compiled = True
    elif meaning is Landmark.GRAPH:
        _learn_from_node(site, frame)


def _learn_from_node(site: CallSite, frame: FrameType) -> None:
    """In the graph of a compiled step, each node says whose communication it is."""
    node = _torch.running_node(frame)
    owner = None if node is None else node.meta.get(OWNER_KEY)
    if isinstance(owner, Owner):
        site.phase, site.module = owner
        site.decided = True


def _is_users(code: CodeType) -> bool:
    return not (
        _torch.is_torch_code(code) or code.co_filename.startswith(_PACKAGE_FOLDER)
    )
