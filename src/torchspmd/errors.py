"""Every error that torchspmd raises on purpose.

Each class is a ``SpmdError`` and also the builtin that a caller would expect, so both
``except SpmdError`` and ``except ValueError`` work. Where more can be said than fits into a
message, the class names a ``page`` of the documentation, and a traceback ends with it.
"""

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "AgreementError",
    "CaptureError",
    "CaptureWarning",
    "CheckError",
    "ContractError",
    "DeferralError",
    "LayoutCountError",
    "LayoutError",
    "LedgerError",
    "LegalityError",
    "LockError",
    "LostStateError",
    "ParityError",
    "PassOrderError",
    "PassWarning",
    "PlanError",
    "PlanWarning",
    "RankError",
    "RecordingError",
    "ShadowError",
    "ShadowWarning",
    "SpmdError",
    "UnsupportedModuleError",
    "UnsupportedPassError",
    "UsageError",
    "VerificationError",
    "VirtualRanksError",
    "WorldError",
]

_SHOWN = 6  # names in one message


class SpmdError(Exception):
    """Base of all torchspmd errors; its text says what was called and what to change."""

    #: The page with causes and fixes; empty where the text always says all of it.
    page: ClassVar[str] = ""

    # A note, so that the text itself stays as it is. Not added in a constructor: Dynamo
    # would follow that one, and no longer fall back to eager where such an error is raised.
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        first = [f"Causes and fixes: {self.page}"] if self.page else []
        notes: list[str] = self.__dict__.setdefault("_notes", first)
        return notes


class LedgerError(SpmdError, ValueError):
    """A saved ledger cannot be read: not JSON, not a ledger, or another version.

    Cause: a file that ``torchspmd trace --out`` or ``save_ledger`` did not write, or
    one written by a version with another file format.
    Fix: write the file again with this version.
    """


class UsageError(SpmdError, ValueError):
    """An argument has a value that the call does not take; the text lists what it takes."""


class WorldError(SpmdError, RuntimeError):
    """The process group is missing, already there, or of the wrong size for the call."""


class RankError(SpmdError, RuntimeError):
    """A rank started by ``testing.run_ranks`` failed, died, or ran out of time."""

    page = "docs/errors/ranks.md#rankerror"


class LayoutError(SpmdError, ValueError):
    """A tensor, a style or a mesh has a layout that the call cannot work with.

    Cause: an input of another shape or layout than the style was given, a mesh with
    more than one axis, layouts that cannot be turned into each other.
    Fix: the text names the module, the argument, the mesh and the change to make.
    """

    page = "docs/errors/layouts.md#layouterror"


class LayoutCountError(LayoutError, AssertionError):
    """Two lists of layouts that belong together have different lengths.

    Also an ``AssertionError``, which is what ``torch.distributed.tensor.parallel``
    raises for it.
    """

    page = "docs/errors/layouts.md#layoutcounterror"


class UnsupportedModuleError(LayoutError, NotImplementedError):
    """A style does not know this type of module; the text says which it knows."""

    page = "docs/errors/layouts.md#unsupportedmoduleerror"


class PlanError(SpmdError, ValueError):
    """A plan does not fit its model; the text lists every problem and its fix.

    Cause: a pattern that matches nothing, a style that does not fit its module, tied
    parameters that would get different layouts.
    Fix: change the plan as the text says; the model was not changed.
    """

    page = "docs/errors/layouts.md#planerror"


class PlanWarning(UserWarning):
    """A change of a plan that was asked for is not possible; the text says why."""


class CheckError(SpmdError, ValueError):
    """A checked promise does not hold at run time: ranks hold other values than written.

    Cause: ``check=True`` or ``TORCHSPMD_CHECK=1`` compared values across a mesh axis and
    found, for instance, an output declared ``Replicate`` that differs between ranks.
    Fix: the last line of the text; the layout or the function is wrong, not the check.
    """

    page = "docs/errors/checks.md#checkerror"


class ContractError(SpmdError, AssertionError):
    """A recorded step does not communicate what was expected; the text lists it all.

    Cause: ``expect(ledger)`` was told other counts, bytes or kinds than came.
    Fix: the text names the modules and lines behind the difference; change them, or
    the contract.
    """

    page = "docs/errors/checks.md#contracterror"


class LockError(SpmdError, ValueError):
    """A lock of a step's communication cannot be read, or says what cannot be.

    Cause: not a file of ``torchspmd lock``, another version of it, or a broken line.
    Fix: write it again with ``torchspmd lock``, or ``pytest --comm-lock-update``.
    """


class ParityError(SpmdError, AssertionError):
    """A parallel step does not compute what one device computes; ``verdict`` has the facts.

    Cause: the last lines of the text, from the pattern of the difference.
    Fix: start at the module that the text names; everything before it agrees.
    """

    page = "docs/errors/checks.md#parityerror"
    verdict: object = None


class RecordingError(SpmdError, ValueError):
    """A recording for parity cannot be written or read: missing, not whole, or broken."""


class CaptureError(SpmdError, RuntimeError):
    """A training step cannot be captured as one graph; the text names the user's line.

    Cause: the step reads a tensor's value (``item()``, ``if loss > 1``), keeps a tensor
    where no argument shows it, or calls an operator without a sharding rule.
    Fix: the last lines of the text.
    """

    page = "docs/errors/capture.md#captureerror"


class AgreementError(SpmdError, RuntimeError):
    """Ranks would not run the same communication; the text lists where they differ.

    Cause: ranks captured other programs, for instance from batches of other shapes.
    Fix: give every rank the same shapes and the same step.
    """

    page = "docs/errors/capture.md#agreementerror"


class PassOrderError(SpmdError, AssertionError):
    """A graph pass was applied in an order that it or another pass does not allow."""

    page = "docs/errors/passes.md#passordererror"


class LegalityError(SpmdError, RuntimeError):
    """An edited graph would not compute what it computed before; it was not taken.

    Cause: a pass lost an output, a wait or a gradient, changed the order of collectives
    on a group, or moved a read across a write.
    Fix: the text names the nodes. The graph is as it was before the pass.
    """

    page = "docs/errors/passes.md#legalityerror"


class DeferralError(LegalityError, ValueError):
    """Work cannot be moved to the next iteration; the text names the nodes and the rule.

    Cause: something reads the state that the moved nodes write before they would run, or
    needs their result in this iteration.
    Fix: the latest legal place, which the text names.
    """

    page = "docs/errors/passes.md#deferralerror"


class LostStateError(SpmdError, RuntimeError):
    """An update was interrupted half-way: its states are neither the old nor the new ones.

    Cause: an exception, or Ctrl-C, in the middle of an update that overlapped steps make
    in place, or while they copy their results at the end.
    Fix: load a checkpoint, into the same module and optimizer or in a new process.
    """

    page = "docs/errors/passes.md#loststateerror"

    @classmethod
    def of(cls, names: Sequence[str]) -> "LostStateError":
        """The error for states, by name."""
        shown = ", ".join(names[:_SHOWN])
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        has_gradients = any(name.endswith(".grad") for name in names)
        return cls(
            f"{len(names)} states of an overlapped step are lost: {shown}{rest}. An "
            "exception ended the step while it wrote them, so that they hold neither the "
            "old nor the new values. Load a checkpoint: load_state_dict() of the module "
            "and of the optimizer, both before the next step, or in a new process."
            + (" Gradients: zero_grad() of the optimizer." if has_gradients else "")
        )


class VirtualRanksError(SpmdError, RuntimeError):
    """A graph cannot be run on virtual ranks; the text names the node and why.

    Cause: a communication that is not modelled, a result that nobody waited for, groups
    that are no grid, or an operator that failed.
    Fix: run the step on real ranks, or change the node that the text names.
    """

    page = "docs/errors/passes.md#virtualrankserror"


class VerificationError(SpmdError, RuntimeError):
    """A pass changed what the step computes; found by running both graphs.

    Cause: a pass that computes something else, or keeps bits under fewer reduction
    orders than it claims.
    Fix: the text names the pass, the first node that differs and both values'
    statistics. Leave the pass out, or correct it.
    """

    page = "docs/errors/passes.md#verificationerror"


class ShadowError(SpmdError, RuntimeError):
    """A compiled step did not do what the step does eagerly; found while it ran.

    Cause: the text names the first value that differs and the likely cause.
    Fix: the last lines of the text. Model, optimizer and arguments are as the compiled
    step left them.
    """

    page = "docs/errors/capture.md#shadowerror"


class ShadowWarning(UserWarning):
    """Calls of a compiled step could not be compared with eager ones; the text says why."""


class UnsupportedPassError(SpmdError, NotImplementedError):
    """A pass does not know this kind of node; the text says which it knows."""

    page = "docs/errors/passes.md#unsupportedpasserror"


class CaptureWarning(UserWarning):
    """A step is captured again and again, or an optimizer of it updates nothing."""


class PassWarning(UserWarning):
    """A pass that was asked for changed nothing, or something else than asked for."""
