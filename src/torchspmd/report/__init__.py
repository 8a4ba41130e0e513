"""Data in, text or a page out: one renderer a file."""

from torchspmd.comm import format_bytes
from torchspmd.report.exposure import print_exposure
from torchspmd.report.figures import differing_figures, print_figures
from torchspmd.report.html import page_html, write_page
from torchspmd.report.notebook import Summary
from torchspmd.report.perfetto import perfetto_trace, write_perfetto
from torchspmd.report.results import compare_results, read_result
from torchspmd.report.text import print_changes, print_ledger

__all__ = [
    "Summary",
    "compare_results",
    "differing_figures",
    "format_bytes",
    "page_html",
    "perfetto_trace",
    "print_changes",
    "print_exposure",
    "print_figures",
    "print_ledger",
    "read_result",
    "write_page",
    "write_perfetto",
]
