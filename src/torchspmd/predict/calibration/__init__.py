"""Measuring a GPU: the figures that a prediction of time rests on."""

from torchspmd.predict.calibration.meter import Limits
from torchspmd.predict.calibration.run import (
    Calibration,
    calibrate,
    host_in_proportion,
    with_other_cases,
)

__all__ = [
    "Calibration",
    "Limits",
    "calibrate",
    "host_in_proportion",
    "with_other_cases",
]
