"""Helpers for tests of distributed code, yours and ours.

``fake_mesh`` gives any world size in one process, for shapes, layouts and counts.
``run_ranks`` starts real processes, for numbers; ``Ranks`` keeps them for many runs.
"""

from torchspmd.testing.fake import fake_mesh as fake_mesh
from torchspmd.testing.fake import fake_world as fake_world
from torchspmd.testing.ranks import Ranks as Ranks
from torchspmd.testing.ranks import run_ranks as run_ranks
