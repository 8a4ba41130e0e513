"""How ``torchspmd trace`` is used."""

import argparse
import os

from torchspmd._cli.usage.common import (
    PAGE,
    add_fake_options,
    add_file_options,
    add_module_option,
    add_script_options,
    fake_problems,
    output_problems,
    refuse,
    script_problems,
)

HELP = "run a training script and show what it communicates"
DESCRIPTION = "Run a training script and show what it communicates."
USAGE = "torchspmd trace script.py [options] [-- script arguments]"
EPILOG = """\
examples:
  torchspmd trace train.py --world-size 8
  torchspmd trace train.py --world-size 8 --steps 2 --skip 1 --out report.json
  torchspmd trace train.py --world-size 8 --html page.html
  torchspmd trace train.py --world-size 8 -- --layers 4 --batch 16
  torchrun --nproc-per-node 4 -m torchspmd trace train.py --out report.json

With --world-size, this process plays one rank of a simulated world: it needs no torchrun
and no GPU, and collectives return at once. Shapes and counts are those of a real run,
values are not. Under torchrun, every rank is recorded, and rank 0 prints the sum.

exit code: 0 when the report is written, 1 when the script failed, 2 wrong use
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_script_options(parser)
    add_module_option(parser)
    add_fake_options(parser)
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="simulate a world of N ranks"
    )
    add_file_options(parser, out="write the ledger to FILE, as JSON", html=PAGE)
    parser.add_argument(
        "--sources",
        action="store_true",
        help="with --out: also record the source line of each communication",
    )


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = script_problems(
        options.script, options.steps, options.skip, module=options.module
    )
    if options.world_size is not None:
        if options.world_size < 1:
            problems.append("--world-size must be at least 1")
        elif not 0 <= options.rank < options.world_size:
            problems.append(f"--rank must be 0 to {options.world_size - 1}")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            problems.append("leave out --world-size under torchrun")
    elif options.fake:
        problems.append("--fake simulates a world: give --world-size N with it")
    elif "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        problems.append(
            "give --world-size N to simulate N ranks, or start with torchrun"
        )
    problems += fake_problems(options, fake=options.fake)
    if options.sources and options.out is None:
        problems.append("--sources is for the ledger's file: give --out FILE with it")
    problems += output_problems(options.out, "--out", "report.json")
    problems += output_problems(options.html, "--html", "page.html")
    refuse(problems)
