"""Prove that a parallel step computes what one device computes, and keep it so."""

from torchspmd.verify.contract.claim import at_least as at_least
from torchspmd.verify.contract.claim import at_most as at_most
from torchspmd.verify.contract.expect import Contract as Contract
from torchspmd.verify.contract.expect import expect as expect
from torchspmd.verify.parity.check import check_parity as check_parity
from torchspmd.verify.parity.compare import compare_recordings as compare_recordings
from torchspmd.verify.parity.local import check_local_parity as check_local_parity
from torchspmd.verify.parity.verdict import Verdict as Verdict
from torchspmd.verify.recording.recorder import record as record
