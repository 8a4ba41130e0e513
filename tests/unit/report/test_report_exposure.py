"""The measured exposure as a table, at 80 columns, without colour."""

import io

import pytest
from rich.console import Console

from torchspmd.comm import CommEvent, Group, Kind, Phase
from torchspmd.report import print_exposure
from torchspmd.step import ExposureReport, MeasuredExposure

DATA = Group("0", (0, 1), "data")


def exposure(start, what, exposed, simulated, reason=""):
    event = CommEvent(
        Kind.ALL_REDUCE,
        "c10d_functional.all_reduce",
        "float32",
        (65536,),
        262144,
        262144,
        DATA,
        Phase.BACKWARD,
        "Net.up",
    )
    return MeasuredExposure(
        start=start,
        event=event,
        what=what,
        modules=("Net.up",),
        exposed_ms=exposed,
        is_hidden=not reason,
        distance_ms=12.5,
        simulated_ms=simulated,
        reason=reason,
    )


REPORT = ExposureReport(
    program="train, program 1",
    rank=0,
    device="cpu",
    form="steady",
    runs=5,
    step_ms=100.0,
    exposed_ms=9.5,
    simulated_step_ms=90.0,
    collectives=(
        exposure("all_reduce_default", "bucket of 6 gradients", 0.01, 0.0),
        exposure(
            "all_reduce_7",
            "Net.up",
            9.25,
            3.0,
            "only 2.00 ms of computation stand between start and use; simulated 3.00 ms: "
            "its result is needed right after it starts",
        ),
        exposure("all_reduce_default_1", "bucket of 2 gradients", 0.02, None),
    ),
    notes=("1 of 3 differ from the simulation",),
)

TABLE = """\
train, program 1, rank 0, cpu, steady: 9.50 ms of 100.00 ms wait for 1 of 3
collectives (simulated 3.00 ms of 90.00 ms), median of 5 runs

Exposed communication, ms
collective                             axis  payload  to use  exposed  simulated
all_reduce_7, Net.up                   data  256 KiB   12.50     9.25       3.00
  only 2.00 ms of computation stand
  between start and use
  simulated 3.00 ms: its result is
  needed right after it starts
all_reduce_default_1, bucket of 2      data  256 KiB   12.50     0.02          ?
gradients
and 1 more, exposed no longer than these

Note: 1 of 3 differ from the simulation.
"""

TEXT = """\
train, program 1, rank 0, cpu, steady: 9.50 ms of 100.00 ms wait for 1 of 3
  collectives (simulated 3.00 ms of 90.00 ms), median of 5 runs
  all_reduce_7: 9.25 ms exposed (3.00 simulated), Net.up, 256 KiB over data
    only 2.00 ms of computation stand between start and use; simulated 3.00 ms:
      its result is needed right after it starts
  all_reduce_default_1: 0.02 ms exposed, bucket of 2 gradients, 256 KiB over
    data
  all_reduce_default: 0.01 ms exposed (0.00 simulated), bucket of 6 gradients,
    256 KiB over data
  * 1 of 3 differ from the simulation"""


def printed(report, **options):
    out = io.StringIO()
    print_exposure(report, Console(file=out, width=80), **options)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_the_worst_as_a_table():
    assert printed(REPORT, worst=2) == TABLE
    assert printed(REPORT).count("all_reduce_") == 3
    assert "more, exposed no longer" not in printed(REPORT)


def test_the_report_by_itself():
    assert str(REPORT) == TEXT


def test_no_collective():
    nothing = ExposureReport("train", 0, "cpu", "whole", 1, 1.0, 0.0, 1.0, ())
    assert "No collective is waited for." in printed(nothing)


def test_the_same_for_json():
    entries = REPORT.as_dict()
    assert entries["simulated_ms"] == 3.0 and entries["exposed_ms"] == 9.5
    assert entries["everywhere_ms"] == pytest.approx(9.28)  # no other rank is known
    assert entries["collectives"][1] == {
        "start": "all_reduce_7",
        "kind": "all_reduce",
        "dtype": "float32",
        "payload_bytes": 262144,
        "axis": "data",
        "phase": "backward",
        "what": "Net.up",
        "modules": ["Net.up"],
        "exposed_ms": 9.25,
        "is_hidden": False,
        "distance_ms": 12.5,
        "simulated_ms": 3.0,
        "reason": REPORT.collectives[1].reason,
        "least": None,
    }
