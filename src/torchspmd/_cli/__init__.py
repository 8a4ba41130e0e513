"""The command line: one file a subcommand, each with its texts, options and ``run``.

Exit codes: 0, all is well; 1, the answer is no (files differ, the script failed);
2, the command was used wrongly, with one sentence on what to change; 130, interrupted.
"""

import argparse
import sys
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
from torchspmd._cli.output import exit_process, ignore_closed_pipes, say
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
_INTERRUPTED = 130  # as of shells: 128 and the number of SIGINT
_EPILOG = """\
examples:
  torchspmd trace train.py --world-size 8          simulate 8 ranks on this machine
  torchrun --nproc-per-node 4 -m torchspmd trace train.py
  torchspmd predict train.py --world-size 1024 --gpu h100   does it fit
  torchspmd diff before.json after.json            exit code 1 when they differ
  torchspmd plan model.py:build --mesh tp=8        what a plan does to every parameter
  torchspmd lock train.py --mesh dp=2,tp=4         write down what it communicates
  torchspmd check comm.lock                        exit code 1 when that changed
  torchspmd parity runs/one runs/tp4               do two recorded runs compute the same
  torchspmd search train.py --gpu h100 -- --tp {1,2}   the fastest arguments that fit
  torchspmd calibrate --out my.toml                measure this GPU for predictions
  torchspmd show report.json --open                any saved result as a page to look at
  torchspmd doctor                                 what works on this machine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchspmd",
        description="Lay a PyTorch model out over a mesh, and see every byte it sends.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
            formatter_class=argparse.RawDescriptionHelpFormatter,
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
        return _INTERRUPTED


def command() -> NoReturn:
    """The ``torchspmd`` command: run it and end the process."""
    ignore_closed_pipes()
    exit_process(main())
