"""How ``torchspmd search`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import (
    PAGE,
    add_file_options,
    add_module_option,
    add_world_options,
    output_problems,
    refuse,
    script_problems,
    world_problems,
)
from torchspmd.predict.hardware import load_gpu, load_network

HELP = "find the fastest arguments of a training script that fit"
DESCRIPTION = (
    "Rehearse and predict a training script for every combination of its own arguments, "
    "and rank those that fit."
)
USAGE = "torchspmd search script.py --gpu NAME [options] -- --tp {1,2,4}"
EPILOG = """\
examples:
  torchspmd search train.py --world-size 64 --gpu h100 -- --tp {1,2,4,8}
  torchspmd search train.py --gpu h100 --repeat layers -- --layers 32 --tp {1,2}
  torchspmd search train.py --gpu h200 --where "batch * seq <= 65536" \\
      --work "batch * seq" -- --batch {1,2,4,8} --seq {2048,4096}

Braces list the values of an argument; it does not matter whether the shell expands them.
--where and --work are Python expressions over the script's arguments (--micro-batch is
micro_batch) and world_size. Predictions are cached until the script's folder or a
hardware file changes.

exit code: 0 when a candidate fits, 1 when none does, 2 wrong use
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("script", type=Path, help="the training script")
    add_module_option(parser)
    add_world_options(parser)
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="N",
        help="the rank that is predicted (default: 0)",
    )
    parser.add_argument(
        "--network",
        default="ib-ndr400",
        metavar="NAME",
        help="the network between nodes: a name or a hardware file (default: %(default)s)",
    )
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help="try only combinations for which it is true, such as 'tp <= 8'",
    )
    parser.add_argument(
        "--work",
        metavar="EXPRESSION",
        help="rank by items per second, with this many in a step, such as 'batch * seq'",
    )
    parser.add_argument(
        "--repeat",
        metavar="NAME[=FEW,MORE]",
        help="the script's argument for its number of equal blocks: two small numbers of "
        "them are rehearsed, and the result is extrapolated",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes at a time (default: all cores)"
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="rows to show (default: 10)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="keep predictions here (default: ~/.cache/torchspmd/search)",
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="neither read nor write the cache"
    )
    add_file_options(parser, json="write every candidate to FILE", html=PAGE)


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = script_problems(options.script, 1, 0, module=options.module)
    problems += output_problems(options.json, "--json", "search.json")
    problems += output_problems(options.html, "--html", "page.html")
    problems += world_problems(options)
    if (options.jobs is not None and options.jobs < 1) or options.top < 1:
        problems.append("--jobs and --top must be at least 1")
    refuse(problems)
    load_gpu(options.gpu)  # before anything runs
    load_network(options.network)
