"""``torchspmd doctor``: what works on this machine, what does not, and why.

Each feature is tried, in small, rather than looked up: a version that should work and does
not is what people come here for.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn

import torchspmd
from torchspmd.comm import format_bytes
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.live import LiveMemory
from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World
from torchspmd.testing import fake_mesh

# The oldest torch that is supported, and the one that the tests run with (constraints.txt).
_TESTED = ("2.11", "2.13")
_TIMEOUT = datetime.timedelta(seconds=20)
_PACKAGES = ("torch", "rich", "numpy", "triton", "transformers", "pytest")


@dataclass(frozen=True)
class Finding:
    """Whether one feature works here.

    Attributes:
        feature: What users call it.
        works: Whether it was tried and did.
        detail: What it uses; or why it does not work, and what to do.
        optional: It needs hardware or packages that not everybody has.
    """

    feature: str
    works: bool
    detail: str
    optional: bool


class _Missing(Exception):  # noqa: N818 - not an error: a part that is not there
    """What a feature needs is not there; the text says what, and the way out."""


def run(options: argparse.Namespace) -> int:
    """Try everything, print, and tell by the exit code whether all is well."""
    findings = examine()
    if options.json:
        what = {"versions": versions(), "machine": machine()}
        print(json.dumps({**what, "features": [asdict(f) for f in findings]}, indent=1))
    else:
        print(describe(versions(), machine(), findings))
    return 1 if any(is_fault(finding) for finding in findings) else 0


def is_fault(finding: Finding) -> bool:
    """Whether something does not work that should work everywhere."""
    return not finding.works and not finding.optional


def examine() -> list[Finding]:
    """Try each feature."""
    return [_try(*feature) for feature in _FEATURES]


def _try(feature: str, check: Callable[[], str], optional: bool) -> Finding:
    try:
        return Finding(feature, True, check(), optional)
    except _Missing as missing:
        return Finding(feature, False, str(missing), optional)
    except Exception as error:  # whatever is wrong here is what was asked for
        detail = f"{type(error).__name__}: {error}"
        return Finding(feature, False, detail, optional)


def describe(
    versions: dict[str, str], machine: dict[str, str], findings: list[Finding]
) -> str:
    """The report as text.

    >>> gpu = Finding("GPUs", False, "there is no CUDA device", optional=True)
    >>> print(describe({"torch": "2.13.0"}, {"memory": "8 GiB"}, [gpu]))
    torch 2.13.0
    memory 8 GiB
    <BLANKLINE>
    no     GPUs: there is no CUDA device
    <BLANKLINE>
    All is well: what does not work needs other hardware or packages.
    """
    lines = [
        ", ".join(f"{name} {value}" for name, value in facts.items())
        for facts in (versions, machine)
    ]
    lines = [part for line in lines for part in textwrap.wrap(line, 80)]
    lines.append("")
    for finding in findings:
        state = "works" if finding.works else "no" if finding.optional else "FAILS"
        lines += textwrap.wrap(
            f"{state:<7}{finding.feature}: {finding.detail}",
            80,
            subsequent_indent=" " * 7,
            break_on_hyphens=False,
        )
    faults = sum(map(is_fault, findings))
    if faults:
        end = f"{faults} of {len(findings)} should work here and do not."
    elif all(finding.works for finding in findings):
        end = "All is well."
    else:
        end = "All is well: what does not work needs other hardware or packages."
    return "\n".join([*lines, "", end])


def versions() -> dict[str, str]:
    """What is installed."""
    found = {"torchspmd": torchspmd.__version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def machine() -> dict[str, str]:
    """What it runs on."""
    found = {"system": f"{platform.system()} {platform.machine()}"}
    found["CPU cores"] = str(os.cpu_count())
    with contextlib.suppress(AttributeError, ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = format_bytes(memory)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{device.name} {format_bytes(device.total_memory)}"
    return found


# ----------------------------------------------------------------------------
# The features.


def _check_version() -> str:
    version = torch.__version__.split("+")[0]
    lowest, highest = _TESTED
    if _numbers(version) < _numbers(lowest):
        raise _Missing(f"{version} is too old: pip install 'torch>={lowest}'")
    if _numbers(version)[:2] > _numbers(highest):
        return f"{version}, newer than what was tested (up to {highest})"
    if _numbers(version)[:2] < _numbers(highest):
        return f"{version}, supported; the tests run with {highest}"
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _check_simulated_ranks() -> str:
    with fake_mesh(8, ("tp",)) as mesh, torchspmd.CommDebugMode() as mode:
        dist.all_reduce(torch.ones(4), group=mesh.get_group())
    seen = mode.ledger.total(kind="all_reduce", axis="tp").count
    if seen != 1:
        raise _Missing(
            f"one all_reduce ran and {seen} were recorded: this torch calls other "
            "operators than those in torchspmd.comm.kinds"
        )
    return "any number in one process"


def _check_layout() -> str:
    styles = {"0": torchspmd.ColwiseParallel(), "1": torchspmd.RowwiseParallel()}
    with fake_mesh(2, ("tp",)) as mesh:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        torchspmd.parallelize_module(model, mesh, styles)
        model(torch.ones(2, 4)).sum().backward()
    return "on a simulated mesh"


def _check_compile() -> str:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).sum().backward()
        optim.step()
        optim.zero_grad()

    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters())
    with torchspmd.compile(step) as compiled:
        compiled(model, optim, torch.ones(2, 2))
    return 'backend="graph"'


def _check_gloo() -> str:
    if not dist.is_gloo_available():
        raise _Missing(
            "this torch was built without gloo: install one from pytorch.org"
        )
    try:
        with _group("gloo"):
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise _Missing(
            f"gloo cannot start: {str(error).splitlines()[0]}. It takes the network "
            "interface of this host's name: name another one, as in "
            "GLOO_SOCKET_IFNAME=lo"
        ) from error
    return "gloo"


def _check_rehearsal() -> str:
    gpu, world = load_gpu("h100"), World(8, 0)
    recording = Recording(world.size, world.rank, world.nodes)
    memory = LiveMemory(recording, gpu, AllocatorSettings())
    device = Gpu(gpu.title, gpu.nbytes("total"), (9, 0))
    with rehearsal(recording, world, device, memory):
        model = nn.Linear(4, 4, device="cuda")
        model(torch.ones(2, 4, device="cuda")).sum().backward()
    if not recording.storages:
        raise _Missing(
            "a layer ran on a GPU that is not there, and nothing was recorded"
        )
    return "no GPU needed"


def _check_nccl() -> str:
    _needs_cuda()
    if not dist.is_nccl_available():
        raise _Missing("this torch was built without NCCL; gloo works on GPUs, slowly")
    torch.cuda.set_device(0)
    with _group("nccl"):
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    return f"NCCL, {torch.cuda.device_count()} devices"


def _check_cuda_graphs() -> str:
    _needs_cuda()
    graph, tensor = torch.cuda.CUDAGraph(), torch.ones(1, device="cuda")
    with torch.cuda.graph(graph):
        tensor.add_(1)
    return "captured one"


def _check_inductor() -> str:
    if torch.cuda.is_available():
        try:
            return f"triton {importlib.metadata.version('triton')}"
        except importlib.metadata.PackageNotFoundError:
            raise _Missing("triton is not installed: pip install triton") from None
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name) or shutil.which("clang++")
    if compiler is None:
        raise _Missing(
            f"there is no C++ compiler ({name}, clang++): install one, or name it in CXX"
        )
    return compiler


def _check_transformers() -> str:
    return _package("transformers")


def _check_pytest() -> str:
    return _package("pytest")


def _package(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        raise _Missing(f"{name} is not installed: pip install {name}") from None


def _needs_cuda() -> None:
    if torch.version.cuda is None:
        raise _Missing(
            "this torch was built without CUDA; on a machine with GPUs install another "
            "build from pytorch.org"
        )
    if not torch.cuda.is_available():
        raise _Missing("there is no CUDA device here, or its driver does not answer")


@contextlib.contextmanager
def _group(backend: str) -> Iterator[None]:
    """A default process group of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


# What users call it, how it is tried, and whether it needs what not everybody has.
_FEATURES: tuple[tuple[str, Callable[[], str], bool], ...] = (
    ("torch", _check_version, False),
    ("simulated ranks (trace, lock, fake_mesh)", _check_simulated_ranks, False),
    ("styles and plans (parallelize_module)", _check_layout, False),
    ("the step as one graph (compile)", _check_compile, False),
    ("real ranks on this CPU (check_parity, run_ranks)", _check_gloo, False),
    ("rehearsals of scripts for GPUs (predict, search)", _check_rehearsal, False),
    ("real ranks on GPUs", _check_nccl, True),
    ('compile(backend="cudagraph")', _check_cuda_graphs, True),
    ('compile(backend="inductor")', _check_inductor, True),
    ("plans of Hugging Face models", _check_transformers, True),
    ("the pytest plugin", _check_pytest, True),
)
