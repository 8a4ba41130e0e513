"""Helpers for tests of distributed code, yours and ours.

``fake_mesh`` gives any world size in one process, for shapes, layouts and counts.
``run_ranks`` starts real processes, for numbers; ``Ranks`` keeps them for many runs.
"""

from torchspmd.testing.fake import fake_mesh, fake_world
from torchspmd.testing.ranks import Ranks, run_ranks

__all__ = ["Ranks", "fake_mesh", "fake_world", "run_ranks"]
