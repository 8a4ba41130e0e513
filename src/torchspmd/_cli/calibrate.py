"""``torchspmd calibrate``: measure the GPU of this machine, and write its hardware file."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from torchspmd._cli.output import write_file
from torchspmd.errors import UsageError
from torchspmd.predict.calibration import (
    calibrate,
    host_in_proportion,
    with_other_cases,
)
from torchspmd.predict.calibration.nccl_tests import read_nccl_tests
from torchspmd.predict.hardware import (
    Figure,
    Hardware,
    hardware_text,
    known_gpu,
    load_gpu,
)

_STEADY = 1.1  # rounds of one host differ by less


def run(options: argparse.Namespace) -> int:
    """Measure and write the file; 1 when a section could not be measured."""
    if not options.gpu and not torch.cuda.is_available():
        raise UsageError(
            "there is no CUDA device here: run this on a machine with the GPU, or predict "
            "with one of the package's files (--gpu h100)."
        )
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
        devices=torch.cuda.device_count(),
        progress=lambda section: print(f"{section} ...", file=sys.stderr, flush=True),
    )
    base, is_same = known_gpu(title)
    figures = dict(base.figures)
    found, factor = measured.figures, None
    if is_same:
        found, factor = host_in_proportion(found, figures)
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
    if factor is not None:
        print(f"  The host takes {factor:.2f} times as long as that of {base.name}.")
        print(*_drift(measured.rounds, base.figures), sep="", end="")
    else:
        print("  Too few times of the host are known of this GPU: each is as measured.")
    for note in measured.notes:
        print(f"  {note}")
    return 1 if any("not measured:" in note for note in measured.notes) else 0


def _drift(
    rounds: Sequence[Mapping[str, Figure]], known: Mapping[str, Figure]
) -> Iterator[str]:
    """What to know of a host whose speed changed while it was measured."""
    told = [factor for each in rounds if (factor := host_in_proportion(each, known)[1])]
    if told and max(told) > _STEADY * min(told):
        factors = ", ".join(f"{factor:.2f}" for factor in told)
        yield (
            f"  Its speed changed meanwhile: {factors} times in {len(told)} rounds. Others "
            f"use the machine, or it\n  has just started. Calibrate again, or take the "
            f"package's file where steps are closer to that.\n"
        )
