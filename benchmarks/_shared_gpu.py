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
from collections.abc import Callable, Iterator
from unittest import mock

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def shared_gpu(device: str) -> Iterator[Callable[[], str]]:
    """Run a service of our own meanwhile; yields what says how the ranks shared the GPU."""
    if device != "cuda" or shutil.which(CONTROL) is None:
        yield lambda: ", ranks take turns on the GPU" if device == "cuda" else ""
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with mock.patch.dict(os.environ, own):
            subprocess.run([CONTROL, "-d"], check=True)
            try:
                yield _sharing
            finally:
                _ask("quit -t 5")  # without a time it can wait for ever


def _sharing() -> str:
    """Asked while ranks are up: a service that nobody came to has no servers."""
    used = bool(_ask("get_server_list").strip())
    return ", ranks share the GPU by MPS" if used else ", ranks take turns on the GPU"


def _ask(words: str) -> str:
    done = subprocess.run(
        [CONTROL], input=words + "\n", text=True, stdout=subprocess.PIPE, check=False
    )
    return done.stdout
