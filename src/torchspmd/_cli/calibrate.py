"""``torchspmd calibrate``: measure the GPU of this machine, and write its hardware file."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from torchspmd._cli.output import write_file
from torchspmd._cli.script import output_problems
from torchspmd.errors import UsageError
from torchspmd.predict.calibration import calibrate, with_other_cases
from torchspmd.predict.calibration.nccl_tests import read_nccl_tests
from torchspmd.predict.hardware import Hardware, hardware_text, known_gpu, load_gpu

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


def run(options: argparse.Namespace) -> int:
    """Measure and write the file; 1 when a section could not be measured."""
    problems = output_problems(options.out, "--out", "my.toml")
    if options.out.suffix != ".toml":
        problems.append(f"--out must end in .toml, not {options.out.name}")
    if options.seconds <= 0:
        problems.append("--seconds must be more than 0")
    if options.gpu and not options.nccl_tests:
        problems.append(
            "--gpu starts from a file: give --nccl-tests, what is added to it"
        )
    if not options.gpu and not torch.cuda.is_available():
        problems.append(
            "there is no CUDA device here: run this on a machine with the GPU, or predict "
            "with one of the package's files (--gpu h100)"
        )
    if problems:
        raise UsageError("; ".join(problems) + ".")
    collectives = dict(map(read_nccl_tests, options.nccl_tests))
    if options.gpu:
        base = load_gpu(options.gpu)
        figures = {**base.figures, **collectives}
        gpu = replace(base, name=options.out.stem, figures=figures)
        write_file(options.out, hardware_text(gpu))
        told = ", ".join(sorted(collectives))
        print(f"{base.title} with {told}, written to {options.out}.")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    title = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    measured = calibrate(
        device,
        seconds=options.seconds,
        progress=lambda section: print(f"{section} ...", file=sys.stderr, flush=True),
    )
    base, is_same = known_gpu(title)
    figures = dict(base.figures)
    found = measured.figures
    if is_same:
        found = {key: with_other_cases(found[key], figures.get(key)) for key in found}
    else:
        figures = {
            key: figure._replace(source=f"assumed as of {base.title}: {figure.source}")
            for key, figure in figures.items()
        }
    gpu = Hardware(
        name=options.out.stem,
        title=title,
        compute_capability=f"{major}.{minor}",
        figures={**figures, **found, **collectives},
    )
    write_file(options.out, hardware_text(gpu))
    print(f"{title}: {measured.cases} cases measured, written to {options.out}.")
    for note in measured.notes:
        print(f"  {note}")
    return 1 if any("not measured:" in note for note in measured.notes) else 0
