"""Data in, text out: one renderer a file."""

from torchspmd.comm import format_bytes as format_bytes
from torchspmd.report.exposure import print_exposure as print_exposure
from torchspmd.report.text import print_changes as print_changes
from torchspmd.report.text import print_ledger as print_ledger
from torchspmd.report.tree import ModuleNode as ModuleNode
from torchspmd.report.tree import build_tree as build_tree
