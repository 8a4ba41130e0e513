"""Prove that a parallel step computes what one device computes, and keep it so."""

from torchspmd.verify.contract.claim import at_least, at_most
from torchspmd.verify.contract.expect import Contract, expect
from torchspmd.verify.parity.check import check_parity
from torchspmd.verify.parity.compare import compare_recordings
from torchspmd.verify.parity.local import check_local_parity
from torchspmd.verify.parity.run import RunOptions
from torchspmd.verify.parity.verdict import Verdict
from torchspmd.verify.recording.recorder import record

__all__ = [
    "Contract",
    "RunOptions",
    "Verdict",
    "at_least",
    "at_most",
    "check_local_parity",
    "check_parity",
    "compare_recordings",
    "expect",
    "record",
]
