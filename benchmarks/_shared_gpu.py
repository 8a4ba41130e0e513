"""Let the ranks that share a GPU run on it at the same time.

Without help their processes take turns of about two milliseconds, and a collective, which
needs both, waits for turns: the smallest takes 4.7 ms. NVIDIA's multi-process service (MPS)
runs them side by side, as ranks on GPUs of their own would.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from unittest import mock

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def shared_gpu(device: str) -> Iterator[str]:
    """Run a service of our own meanwhile; yields a word on how ranks share the GPU."""
    if device != "cuda":
        yield ""
        return
    if shutil.which(CONTROL) is None:
        yield ", ranks take turns on the GPU (no MPS here)"
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with mock.patch.dict(os.environ, own):
            subprocess.run([CONTROL, "-d"], check=True)
            try:
                yield ", ranks share the GPU by MPS"
            finally:
                subprocess.run([CONTROL], input="quit\n", text=True, check=False)
