"""Manual regions: functions of local tensors inside a program of DTensors."""

from torchspmd.local.api import local_map

__all__ = ["local_map"]
