"""The command line: how a subcommand is used is in ``usage``, what it does in a file here.

Only the second loads torch, and only once the words are known to be right: ``import torch``
takes longer than all that help and refusals do.

Exit codes: 0, all is well; 1, the answer is no (files differ, the script failed);
2, the command was used wrongly, with one sentence on what to change; 130, interrupted.
"""

import argparse
import importlib
import itertools
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn

import torchspmd
from torchspmd._cli.process import INTERRUPTED, exit_process, ignore_closed_pipes, say
from torchspmd._cli.usage import COMMANDS
from torchspmd._cli.words import refuse_words, split_words
from torchspmd.errors import SpmdError

_DESCRIPTION = (
    "See what a PyTorch training script communicates, predict its steps on GPUs that you "
    "do not have, and keep its parallel version right."
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

torchspmd COMMAND --help shows the options of a command, with examples.
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Paragraphs are filled to the width; indented lines (examples) stay as they are."""

    def add_argument(self, action: argparse.Action) -> None:
        """As argparse's, which forgets that the names of subcommands are indented."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment

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


class _Subcommand(NamedTuple):
    """How it is used, and the parser of its options."""

    usage: ModuleType
    parser: argparse.ArgumentParser


def _is_prose(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(" ") and line != "examples:"


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, _Subcommand]]:
    """The parser of the command line, and each subcommand by its name."""
    parser = argparse.ArgumentParser(
        prog="torchspmd",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=torchspmd.__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    subcommands = {}
    for usage in COMMANDS:
        name = usage.__name__.rpartition(".")[2]
        subparser = subparsers.add_parser(
            name,
            help=usage.HELP,
            usage=getattr(usage, "USAGE", None),
            description=usage.DESCRIPTION,
            epilog=usage.EPILOG,
            formatter_class=_Help,
        )
        usage.add_options(subparser)
        subcommands[name] = _Subcommand(usage, subparser)
    return parser, subcommands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser, subcommands = build_parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    own, for_script = split_words(words)
    options, unknown = parser.parse_known_args(own)
    chosen = subcommands[options.command]
    if unknown:
        refuse_words(chosen.parser, options, unknown)
    options.arguments = for_script
    options.words = words
    try:
        chosen.usage.check(options)
        command = importlib.import_module(f"torchspmd._cli.{options.command}")
        return int(command.run(options))
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
