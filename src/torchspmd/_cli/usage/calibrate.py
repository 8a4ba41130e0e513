"""How ``torchspmd calibrate`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import output_problems, refuse

HELP = "measure the GPU of this machine for predictions"
DESCRIPTION = (
    "Measure the GPU of this machine, and write a hardware file for predictions."
)
EPILOG = """\
examples:
  torchspmd calibrate --out my.toml
  torchspmd predict train.py --world-size 8 --gpu my.toml
  torchspmd calibrate --gpu h100 --nccl-tests all_reduce.txt --out my.toml

Measures matrix products, attention, convolutions, operators that memory bounds, copies,
and how long the host takes to issue each. Nothing else should run on the GPU. Figures
that one GPU cannot tell, such as those of collectives, and ratios of kernels that no table
covers ([kernels]) are taken from the package's file of the same or the most similar GPU, or
of the H200; each says where it comes from. Times of collectives are read from what
nccl-tests printed (--nccl-tests); --gpu starts from a file that there is instead of
measuring.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument(
        "--out", type=Path, default=Path("my.toml"), help="write it here"
    )
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="to spend on measuring (90)"
    )
    parser.add_argument(
        "--nccl-tests",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="outputs of nccl-tests: times of collectives",
    )
    parser.add_argument(
        "--gpu", help="measure nothing: start from this file, as in h100"
    )


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = output_problems(options.out, "--out", "my.toml")
    if options.out.suffix != ".toml":
        problems.append(f"--out must end in .toml, not {options.out.name}")
    if options.seconds <= 0:
        problems.append("--seconds must be more than 0")
    if options.gpu and not options.nccl_tests:
        problems.append(
            "--gpu starts from a file: give --nccl-tests, what is added to it"
        )
    refuse(problems)
