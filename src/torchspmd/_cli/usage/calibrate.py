"""How ``torchspmd calibrate`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import output_problems, refuse

HELP = "measure the GPU of this machine, for predictions"
DESCRIPTION = (
    "Measure the GPU of this machine, and write a hardware file that predict and search "
    "take."
)
EPILOG = """\
examples:
  torchspmd calibrate --out my.toml
  torchspmd predict train.py --world-size 8 --gpu my.toml
  torchspmd calibrate --gpu h100 --nccl-tests all_reduce.txt --out my.toml

It measures matrix products, attention, convolutions, memory-bound operators, copies, and
how long the host takes to issue each; where there are several GPUs, also collectives
between 2, 4, ... and all of them. Nothing else should run on the GPUs. What cannot be
measured (collectives of one GPU, and the ratios under [kernels]) comes from the package's
file of the same or the most similar GPU; each figure names its source. --nccl-tests adds
times of collectives from outputs of nccl-tests, over several nodes too. With --gpu, nothing
is measured, and the outputs are added to an existing file.

exit code: 0 when all is measured, 1 when a part could not be, 2 wrong use
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("my.toml"),
        metavar="FILE",
        help="write the hardware file to FILE (default: my.toml)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        metavar="X",
        help="time to spend on one GPU (default: 90); collectives come on top",
    )
    parser.add_argument(
        "--nccl-tests",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="add times of collectives from these files, as nccl-tests printed them",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="measure nothing, and start from this GPU's file, such as h100",
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
