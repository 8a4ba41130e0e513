"""``torchspmd show``: a saved result, or two, as a page to look at."""

import argparse
import webbrowser
from pathlib import Path

from torchspmd._cli.output import say_written
from torchspmd._cli.script import output_problems
from torchspmd.errors import UsageError
from torchspmd.report import compare_results, read_result, write_page, write_perfetto

HELP = "write a page of a saved result, or of two side by side"
DESCRIPTION = "Write a saved result as one HTML file that opens without a network."
EPILOG = """\
examples:
  torchspmd show report.json                       writes report.html beside it
  torchspmd show report.json --open                and opens it in a browser
  torchspmd show before.json after.json --out page.html
  torchspmd show prediction.json --perfetto trace.json

Results are what these write: trace --out, plan --json, predict --json, search --json and
step.exposure(...).to_json().

exit code: 0 when the page is written, 2 when a file is not a result
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("file", type=Path, help="a saved result")
    parser.add_argument(
        "after", type=Path, nargs="?", help="a second one, to compare the first with"
    )
    parser.add_argument("--out", type=Path, help="write the page here (FILE.html)")
    parser.add_argument(
        "--open", action="store_true", help="open the page in a browser"
    )
    parser.add_argument(
        "--perfetto", type=Path, help="also write the timeline here, for Perfetto"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page, and open it where asked."""
    out = options.out or options.file.with_suffix(".html")
    problems = output_problems(out, "--out", "page.html")
    problems += output_problems(options.perfetto, "--perfetto", "trace.json")
    if out in (options.file, options.after):
        problems.append(f"--out {out} is the result itself: name another file")
    if options.perfetto is not None and options.after is not None:
        problems.append("--perfetto writes one timeline: give one result")
    if problems:
        raise UsageError("; ".join(problems) + ".")
    document = read_result(options.file)
    if options.after is not None:
        names = (str(options.file), str(options.after))
        document = compare_results(document, read_result(options.after), names)
    write_page(document, out)
    say_written("Page", out)
    if options.perfetto is not None:
        write_perfetto(document, options.perfetto)
        say_written("Trace", options.perfetto)
    if options.open and not webbrowser.open(out.absolute().as_uri()):
        raise UsageError(f"no browser was found to open {out} with; open it yourself.")
    return 0
