"""Memory that no tensor of the script shows: CUDA's own, cuBLAS's and NCCL's.

cuBLAS takes a workspace from the caching allocator for each handle and stream, when it is
first used there, and keeps it. Handles belong to threads: the one of the script, and
autograd's. CUDA's context, loaded kernels, handles and NCCL's buffers are taken from the
device directly.
"""

from dataclasses import dataclass, field

from torchspmd.predict.hardware import Hardware
from torchspmd.predict.traffic import base_name
from torchspmd.rehearse.recording import OF_PROGRAM, Comm, Op, Phase

__all__ = ["FixedMemory", "FixedPart", "Workspace"]

_CUBLAS = frozenset(
    {
        "addbmm",
        "addmm",
        "addmm_",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "dot",
        "linear",
        "matmul",
        "mm",
        "mv",
        "_addmm_activation",
        "_scaled_mm",
        "linear_backward",
    }
)
_CUBLAS_LT = frozenset({"addmm", "linear", "_addmm_activation", "_scaled_mm"})
_AUTOGRAD_THREAD = frozenset({Phase.BACKWARD, Phase.RECOMPUTE})


@dataclass(frozen=True, slots=True)
class FixedPart:
    """Memory outside of the caching allocator.

    Attributes:
        name: What it is for, as in ``NCCL, 3 communicators``.
        nbytes: How much.
        source: Where the figure comes from.
    """

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """A block that a library takes from the caching allocator, for good."""

    name: str
    nbytes: int
    stream: int


@dataclass(slots=True)
class FixedMemory:
    """What was taken so far, while a recording is gone through."""

    gpu: Hardware
    handles: set[tuple[bool, int]] = field(default_factory=set)
    lt_handles: set[tuple[bool, int]] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)

    def after_op(self, op: Op) -> list[Workspace]:
        """The workspaces that this operator is the first to need."""
        name = base_name(op.name)
        if name not in _CUBLAS or op.views:
            return []
        is_apart = op.site.phase in _AUTOGRAD_THREAD and op.through not in OF_PROGRAM
        key = (is_apart, op.stream)
        result = []
        if key not in self.handles:
            self.handles.add(key)
            nbytes = self.gpu.nbytes("cublas_workspace")
            result.append(Workspace("cuBLAS workspace", nbytes, op.stream))
        if key not in self.lt_handles and name in _CUBLAS_LT and _has_bias(op):
            self.lt_handles.add(key)
            nbytes = self.gpu.nbytes("cublaslt_workspace")
            result.append(Workspace("cuBLASLt workspace", nbytes, op.stream))
        return result

    def after_comm(self, comm: Comm) -> None:
        """A process group gets its communicator with its first communication."""
        self.groups.add(comm.group)

    @property
    def outside(self) -> int:
        """Bytes that are taken from the device directly."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[FixedPart]:
        """What they are."""
        handles, groups = len(self.handles), len(self.groups)
        parts = [
            self._part("CUDA context", "context", 1),
            self._part("loaded kernels", "kernels", 1),
            self._part(f"cuBLAS, {handles} handles", "cublas_handle", handles),
            self._part("NCCL, kernels", "nccl_library", min(groups, 1)),
            self._part(f"NCCL, {groups} communicators", "nccl_communicator", groups),
        ]
        return [part for part in parts if part.nbytes]

    def _part(self, name: str, key: str, count: int) -> FixedPart:
        source = self.gpu.figures[f"memory.{key}"].source
        return FixedPart(name, count * self.gpu.nbytes(key), source)


def _has_bias(op: Op) -> bool:
    """Only a bias that is a vector goes to cuBLASLt; ``_scaled_mm`` always does."""
    if op.name.startswith("aten._scaled_mm"):
        return True
    place = 2 if op.name.startswith("aten.linear") else 0
    return len(op.inputs) > place and len(op.inputs[place].shape) == 1
