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
