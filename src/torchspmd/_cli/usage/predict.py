"""How ``torchspmd predict`` is used."""

import argparse
import os
from pathlib import Path

from torchspmd._cli.usage.common import (
    add_script_options,
    output_problems,
    refuse,
    script_problems,
)
from torchspmd.predict.hardware import DEFAULT_NETWORK, load_gpu, load_network

HELP = "rehearse a training script without GPUs: will it fit, what will it send"
DESCRIPTION = (
    "Run a training script, unchanged, as one rank of any number, with tensors that hold "
    "no memory; say what that rank would hold and send on a named GPU."
)
USAGE = "torchspmd predict script.py --gpu NAME [options] [-- script arguments]"
EPILOG = """\
examples:
  torchspmd predict train.py --gpu h100
  torchspmd predict train.py --world-size 1024 --gpu h100 --html page.html
  torchspmd predict train.py --gpu h100 --json step.json --perfetto trace.json
  torchspmd predict train.py --world-size 64 --gpu a100 -- --layers 80 --batch 1

Exit code 1: it does not fit. 2: the command was used wrongly, or the script failed.
The allocator's settings are read from PYTORCH_CUDA_ALLOC_CONF, as in a real run.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_script_options(parser)
    parser.set_defaults(skip=1)
    parser.add_argument("--world-size", type=int, default=1, help="ranks (1)")
    parser.add_argument(
        "--gpu", required=True, help="its name, as in h100, or a TOML file"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, help="ranks of a node (8)"
    )
    parser.add_argument(
        "--network", help="between nodes: its name, as in ib-ndr400, or a TOML file"
    )
    parser.add_argument("--json", type=Path, help="write the prediction here")
    parser.add_argument("--html", type=Path, help="write a page to look at here")
    parser.add_argument(
        "--perfetto", type=Path, help="write the timeline here, for Perfetto"
    )
    parser.add_argument(
        "--virtual-clock",
        action="store_true",
        help="time.perf_counter and time.time tell predicted time to the script",
    )
    parser.add_argument(
        "--brief", action="store_true", help="no slices, curve or suggestions"
    )
    parser.add_argument(
        "--no-timeline", action="store_true", help="leave the slices out of the file"
    )
    # What the best candidate of a search does: nothing is predicted of a slower one.
    for name in ("--bound-rate", "--bound-seconds"):
        parser.add_argument(name, type=float, default=0.0, help=argparse.SUPPRESS)


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = script_problems(options.script, options.steps, options.skip)
    if options.world_size < 1 or options.gpus_per_node < 1:
        problems.append("--world-size and --gpus-per-node must be at least 1")
    elif not 0 <= options.rank < options.world_size:
        problems.append(f"--rank must be 0 to {options.world_size - 1}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        problems.append("start it without torchrun: one process plays a rank")
    problems += output_problems(options.json, "--json", "prediction.json")
    problems += output_problems(options.html, "--html", "page.html")
    problems += output_problems(options.perfetto, "--perfetto", "trace.json")
    if options.perfetto is not None and (options.no_timeline or options.brief):
        problems.append(
            "--perfetto needs the timeline: leave --no-timeline and --brief"
        )
    refuse(problems)
    # Read once: a search predicts hundreds of candidates.
    options.hardware = (
        load_gpu(options.gpu),
        load_network(options.network or DEFAULT_NETWORK),
    )
