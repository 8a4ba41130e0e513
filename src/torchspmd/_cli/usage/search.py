"""How ``torchspmd search`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import output_problems, refuse, script_problems
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
Names in --where and --work are those of the script's arguments, with _ for -; and
world_size. What was predicted before comes from a cache, by the texts of the script's
folder and of the hardware files.
Exit code 1: nothing fits.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("script", type=Path)
    parser.add_argument("--world-size", type=int, default=1, help="ranks (1)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to play (0)")
    parser.add_argument("--gpu", required=True, help="its name, or a TOML file")
    parser.add_argument("--network", default="ib-ndr400", help="between nodes")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(8)")
    parser.add_argument("--where", help="which combinations are tried, as in 'tp <= 8'")
    parser.add_argument("--work", help="items of a step, as in 'batch * seq'")
    parser.add_argument(
        "--repeat",
        metavar="NAME[=FEW,MORE]",
        help="the script's argument that is its number of equal blocks: few are "
        "rehearsed, twice, and the difference is extended",
    )
    parser.add_argument("--jobs", type=int, help="processes at a time; all cores")
    parser.add_argument("--top", type=int, default=10, help="rows to show (10)")
    parser.add_argument(
        "--cache", type=Path, help="folder of what was predicted before"
    )
    parser.add_argument("--no-cache", action="store_true", help="predict all again")
    parser.add_argument("--json", type=Path, help="write every candidate here")
    parser.add_argument("--html", type=Path, help="write a page to look at here")


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = script_problems(options.script, 1, 0)
    problems += output_problems(options.json, "--json", "search.json")
    problems += output_problems(options.html, "--html", "page.html")
    if options.world_size < 1 or options.gpus_per_node < 1:
        problems.append("--world-size and --gpus-per-node must be at least 1")
    elif not 0 <= options.rank < options.world_size:
        problems.append(f"--rank must be 0 to {options.world_size - 1}")
    if (options.jobs is not None and options.jobs < 1) or options.top < 1:
        problems.append("--jobs and --top must be at least 1")
    refuse(problems)
    load_gpu(options.gpu)  # before anything runs
    load_network(options.network)
