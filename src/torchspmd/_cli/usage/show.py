"""How ``torchspmd show`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import add_file_options, output_problems, refuse

HELP = "write a page of a saved result, or of two side by side"
DESCRIPTION = "Write a saved result as one HTML file that opens without a network."
EPILOG = """\
examples:
  torchspmd show report.json                       writes report.html beside it
  torchspmd show report.json --open                and opens it in a browser
  torchspmd show before.json after.json --out page.html
  torchspmd show prediction.json --perfetto trace.json

Results are files of trace --out, plan --json, predict --json and search --json, and what
step.exposure(...).to_json() returns.

exit code: 0 when the page is written, 2 wrong use or a file that is not a result
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("file", type=Path, help="a saved result")
    parser.add_argument(
        "after", type=Path, nargs="?", help="a second result, shown beside the first"
    )
    out = "write the page to FILE (default: the result's name with .html)"
    add_file_options(parser, out=out)
    parser.add_argument(
        "--open", action="store_true", help="open the page in a browser"
    )
    add_file_options(parser, perfetto="also write the timeline to FILE, for Perfetto")


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    out = page_of(options)
    problems = output_problems(out, "--out", "page.html")
    problems += output_problems(options.perfetto, "--perfetto", "trace.json")
    if out in (options.file, options.after):
        problems.append(f"--out {out} is the result itself: name another file")
    if options.perfetto is not None and options.after is not None:
        problems.append("--perfetto writes one timeline: give one result")
    refuse(problems)


def page_of(options: argparse.Namespace) -> Path:
    """Where the page is written."""
    return options.out or options.file.with_suffix(".html")
