"""Programs in processes that need not import torch anew: forks of one server."""

import gc
import io
import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

# What the server imports before it forks: what most programs and ranks use.
IMPORTS = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.export._trace",
    "torchspmd._cli.predict",
    "torchspmd._cli.search",
    "torchspmd._cli.trace",
    "torchspmd.local",
    "torchspmd.parallel",
    "torchspmd.step",
    "torchspmd.testing",
    "torchspmd.verify",
    "transformers.models.llama.modeling_llama",
]


def freeze_garbage():
    """What there is now stays; nobody need walk through it again."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Done:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(function, *args, folder, unread=False, unbuffered=False, timeout=120):
    """Run ``function(*args)`` as a program in this folder; its stdin is empty.

    Args:
        function: At module level; what it returns or exits with is the exit code.
        *args: Passed to it; they must pickle.
        folder: Where it runs.
        unread: Its standard output is a pipe that nobody reads.
        unbuffered: Its standard output is not held back, as with PYTHONUNBUFFERED.
        timeout: Seconds after which it is killed.
    """
    context = multiprocessing.get_context("forkserver")
    outputs = Path(folder) / ".stdout", Path(folder) / ".stderr"
    forkserver.ensure_running()
    process = context.Process(
        target=_run,
        args=(function, args, _server(), folder, outputs, unread, unbuffered),
    )
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    texts = [path.read_text() if path.exists() else "" for path in outputs]
    return Done(process.exitcode, *texts)


def _server():
    """Where the server of this process listens; later Pythons ask for a key too."""
    state = vars(forkserver._forkserver)
    names = ("_forkserver_address", "_forkserver_authkey")
    return {name: state[name] for name in names if name in state}


def _share(server):
    """Ranks of a fork come from the same server; its own would import torch anew."""
    vars(forkserver._forkserver).update(server, ensure_running=lambda: None)


def _run(function, args, server, folder, outputs, unread, unbuffered):
    gc.freeze()  # what the server imported stays
    _share(server)
    os.chdir(folder)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if unread:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
    raw = open(1, "wb", 0 if unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(raw, write_through=unbuffered)
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False))
    code = function(*args)
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
