"""The command line: one file a subcommand, each with its texts, options and ``run``.

Exit codes: 0, all is well; 1, the answer is no (files differ, the script failed);
2, the command was used wrongly, with one sentence on what to change; 130, interrupted.
"""

import argparse
import itertools
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

import torchspmd
from torchspmd._cli import (
    calibrate,
    check,
    diff,
    doctor,
    lock,
    parity,
    plan,
    predict,
    search,
    show,
    trace,
)
from torchspmd._cli.output import INTERRUPTED, exit_process, ignore_closed_pipes, say
from torchspmd._cli.script import refuse_words, split_words
from torchspmd.errors import SpmdError

# In the order of the help.
_COMMANDS = (
    trace,
    predict,
    search,
    show,
    diff,
    plan,
    lock,
    check,
    parity,
    calibrate,
    doctor,
)
_EPILOG = """\
examples:
  torchspmd trace train.py --world-size 8
  torchrun --nproc-per-node 4 -m torchspmd trace train.py
  torchspmd predict train.py --world-size 1024 --gpu h100
  torchspmd search train.py --world-size 64 --gpu h100 -- --tp {1,2,4}
  torchspmd show prediction.json --open
  torchspmd diff before.json after.json
  torchspmd plan model.py:build --mesh tp=8
  torchspmd lock train.py --mesh dp=2,tp=4
  torchspmd check comm.lock

torchspmd COMMAND --help has the options of each, with examples.
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Paragraphs are filled to the width; indented lines (examples) stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_prose, block in itertools.groupby(text.splitlines(), key=_is_prose):
            if is_prose:
                lines += textwrap.wrap(
                    " ".join(block),
                    width,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            else:
                lines += block
        return "\n".join(lines)


def _is_prose(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(" ") and line != "examples:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchspmd",
        description="Lay a PyTorch model out over a mesh, and see every byte it sends.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=torchspmd.__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.HELP,
            usage=getattr(command, "USAGE", None),
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            formatter_class=_Help,
        )
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    words = sys.argv[1:] if arguments is None else list(arguments)
    own, for_script = split_words(words)
    options, unknown = parser.parse_known_args(own)
    if unknown:
        refuse_words(subparsers.choices[options.command], options, unknown)
    options.arguments = for_script
    options.words = words
    try:
        return int(options.run(options))
    except SpmdError as error:
        say(options.command, str(error))
        return 2
    except KeyboardInterrupt:
        say(options.command, "interrupted.")
        return INTERRUPTED


def command() -> NoReturn:
    """The ``torchspmd`` command: run it and end the process."""
    ignore_closed_pipes()
    exit_process(main())
