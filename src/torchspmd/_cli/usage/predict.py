"""How ``torchspmd predict`` is used."""

import argparse
import os

from torchspmd._cli.usage.common import (
    PAGE,
    add_file_options,
    add_module_option,
    add_script_options,
    add_world_options,
    output_problems,
    refuse,
    script_problems,
    world_problems,
)
from torchspmd.predict.hardware import DEFAULT_NETWORK, load_gpu, load_network

HELP = "predict memory and step time of a script on GPUs that you do not have"
DESCRIPTION = (
    "Run a training script, unchanged, as one rank of a world of any size, with tensors "
    "that hold no memory. Report what that rank would hold, send and take on a named GPU."
)
USAGE = "torchspmd predict script.py --gpu NAME [options] [-- script arguments]"
EPILOG = """\
examples:
  torchspmd predict train.py --gpu h100
  torchspmd predict train.py --world-size 1024 --gpu h100 --html page.html
  torchspmd predict train.py --gpu h100 --json step.json --perfetto trace.json
  torchspmd predict train.py --world-size 64 --gpu a100 -- --layers 80 --batch 1

The allocator reads its settings from PYTORCH_CUDA_ALLOC_CONF, as in a real run.

exit code: 0 when it fits, 1 when it does not, 2 wrong use or the script failed
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_script_options(parser)
    add_module_option(parser)
    parser.set_defaults(skip=1)
    add_world_options(parser)
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="the network between nodes: a name such as ib-ndr400 (the default), or a "
        "hardware file (.toml)",
    )
    add_file_options(
        parser,
        json="write the prediction to FILE",
        html=PAGE,
        perfetto="write the timeline to FILE, for Perfetto",
    )
    parser.add_argument(
        "--virtual-clock",
        action="store_true",
        help="make time.time, time.monotonic and time.perf_counter return predicted "
        "time in the script",
    )
    parser.add_argument(
        "--brief",
        action="store_true",
        help="leave out timeline, memory curve and suggestions",
    )
    parser.add_argument(
        "--no-timeline", action="store_true", help="leave the timeline out of the file"
    )
    # Of a candidate of a search, whose process has done nothing yet; and what the best one
    # does: nothing is predicted of a slower one.
    parser.add_argument("--candidate", action="store_true", help=argparse.SUPPRESS)
    for name in ("--bound-rate", "--bound-seconds"):
        parser.add_argument(name, type=float, default=0.0, help=argparse.SUPPRESS)


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = script_problems(
        options.script, options.steps, options.skip, module=options.module
    )
    problems += world_problems(options)
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
