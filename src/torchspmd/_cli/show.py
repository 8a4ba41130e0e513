"""``torchspmd show``: a saved result, or two, as a page to look at."""

import argparse
import webbrowser

from torchspmd._cli.output import say_written
from torchspmd._cli.usage.show import page_of
from torchspmd.errors import UsageError
from torchspmd.report import compare_results, read_result, write_page, write_perfetto


def run(options: argparse.Namespace) -> int:
    """Write the page, and open it where asked."""
    out = page_of(options)
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
