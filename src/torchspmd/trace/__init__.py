"""Record the communication of running code, by module and phase."""

from torchspmd.trace.mode import CommDebugMode

__all__ = ["CommDebugMode"]
