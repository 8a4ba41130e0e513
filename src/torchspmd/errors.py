"""Every error that torchspmd raises on purpose.

Each class is a ``SpmdError`` and also the builtin that a caller would expect, so both
``except SpmdError`` and ``except ValueError`` work.
"""


class SpmdError(Exception):
    """Base of all torchspmd errors; its text says what was called and what to change."""


class LedgerError(SpmdError, ValueError):
    """A saved ledger cannot be read: not JSON, not a ledger, or another version.

    Cause: a file that ``torchspmd trace --out`` or ``save_ledger`` did not write, or
    one written by a version with another file format.
    Cure: write the file again with this version.
    """


class UsageError(SpmdError, ValueError):
    """An argument has a value that the call does not take; the text lists what it takes."""


class WorldError(SpmdError, RuntimeError):
    """The process group is missing, already there, or of the wrong size for the call."""


class RankError(SpmdError, RuntimeError):
    """A rank started by ``testing.run_ranks`` failed, died, or ran out of time."""


class LayoutError(SpmdError, ValueError):
    """A tensor, a style or a mesh has a layout that the call cannot work with.

    Cause: an input of another shape or layout than the style was given, a mesh with
    more than one axis, layouts that cannot be turned into each other.
    Cure: the text names the module, the argument, the mesh and the change to make.
    """


class LayoutCountError(LayoutError, AssertionError):
    """Two lists of layouts that belong together have different lengths.

    Also an ``AssertionError``, which is what ``torch.distributed.tensor.parallel``
    raises for it.
    """


class UnsupportedModuleError(LayoutError, NotImplementedError):
    """A style does not know this type of module; the text says which it knows."""


class PlanError(SpmdError, ValueError):
    """A plan does not fit its model; the text lists every problem and its fix.

    Cause: a pattern that matches nothing, a style that does not fit its module, tied
    parameters that would get different layouts.
    Cure: change the plan as the text says; the model was not changed.
    """


class CheckError(SpmdError, ValueError):
    """A checked promise does not hold at run time: ranks hold other values than written.

    Cause: ``check=True`` or ``TORCHSPMD_CHECK=1`` compared values across a mesh axis and
    found, for instance, an output declared ``Replicate`` that differs between ranks.
    Cure: the last line of the text; the layout or the function is wrong, not the check.
    """


class CaptureError(SpmdError, RuntimeError):
    """A training step cannot be captured as one graph; the text names the user's line.

    Cause: the step reads a tensor's value (``item()``, ``if loss > 1``), keeps a tensor
    where no argument shows it, or calls an operator without a sharding rule.
    Cure: the last lines of the text.
    """


class AgreementError(SpmdError, RuntimeError):
    """Ranks would not run the same communication; the text lists where they differ.

    Cause: ranks captured other programs, for instance from batches of other shapes.
    Cure: give every rank the same shapes and the same step.
    """


class PassOrderError(SpmdError, AssertionError):
    """A graph pass was applied in an order that it or another pass does not allow."""
