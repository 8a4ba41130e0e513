"""Data in, text out: one renderer a file."""

from torchspmd.comm import format_bytes
from torchspmd.report.exposure import print_exposure
from torchspmd.report.text import print_changes, print_ledger

__all__ = [
    "format_bytes",
    "print_changes",
    "print_exposure",
    "print_ledger",
]
