"""Parameters that every rank of an axis holds whole must be, and be trained, alike.

A plan says what is cut; nothing says that the rest is right. A norm without a style among
sharded activations gets the gradient of one rank's part, ranks that were seeded otherwise
hold other embeddings, a loader may hand each rank of the axis another batch. All of these
show in one place: replicas, or their gradients, differ between ranks. And a layer that
takes its input as a part of the sequence counts its gradients once for each rank if the
input is whole: then all ranks have the same input. So ranks compare these, as a few sums
of each, at the end of backward passes 1, 2, 4, 8, ... of a parallel module. They do so
through the store: ranks that have come apart do not wait for ever.
"""

import json
import math
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.comm.exchange import exchange
from torchspmd.errors import CheckError, PlanWarning
from torchspmd.layout.names import format_mesh, plain_name

_PARTS = 4  # of each tensor, so that what cancels in one sum does not in all
# How far replicas may differ, relative to their norm: some kernels add in any order.
_NEAR, _NEAR_IN_HALF = 1e-3, 1e-2
_SECONDS = 300.0  # for the last rank of the axis to come to the end of its backward
_SHOWN = 12  # parameters in one message
_RULE = (
    "Every rank of the axis must end backward, and hold the same modules: one that failed "
    "says why itself."
)

LAYOUTS = "_torchspmd_layouts"  # on a module: the layout of each placed parameter

# How many parallel modules these ranks have made; every rank counts the same.
_numbers: dict[tuple[int, ...], int] = {}


class Sketch(NamedTuple):
    """What ranks compare of a tensor.

    Attributes:
        figures: Sum and norm of each part of it.
        near: How far apart two of them may be, of the norm of all.
    """

    figures: tuple[float, ...]
    near: float

    @property
    def size(self) -> float:
        """The norm of the tensor; zero and what is not finite tell nothing."""
        return math.hypot(*self.figures[1::2])

    def differs(self, other: "Sketch") -> bool:
        """Whether the two are certainly sketches of other tensors.

        >>> Sketch((1.0, 1.0), 1e-3).differs(Sketch((1.0001, 1.0), 1e-3))
        False
        >>> Sketch((1.0, 1.0), 1e-3).differs(Sketch((2.0, 2.0), 1e-3))
        True
        """
        if not (math.isfinite(self.size) and math.isfinite(other.size)):
            return False
        bound = max(self.near, other.near) * max(self.size, other.size)
        pairs = zip(self.figures, other.figures, strict=False)
        return any(abs(a - b) > bound for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells the others, by the names of its parameters."""

    values: Mapping[str, Sketch]
    gradients: Mapping[str, Sketch]
    parts: Mapping[str, Sketch]

    def to_json(self) -> str:
        """The report as it travels."""
        return json.dumps([dict(self.values), dict(self.gradients), dict(self.parts)])

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report from a text that ``to_json`` made."""
        values, gradients, parts = (
            {
                name: Sketch(tuple(figures), near)
                for name, (figures, near) in part.items()
            }
            for part in json.loads(text)
        )
        return cls(values, gradients, parts)


def find_differing(parts: Mapping[int, Mapping[str, Sketch]]) -> dict[str, int]:
    """The first rank that differs from the first of all, for each name that does.

    >>> one, other = Sketch((1.0, 1.0), 1e-3), Sketch((2.0, 2.0), 1e-3)
    >>> find_differing({0: {"a": one, "b": one}, 1: {"a": one, "b": other}})
    {'b': 1}
    """
    first, *others = parts
    found: dict[str, int] = {}
    for rank in others:
        for name in sorted(parts[first].keys() | parts[rank].keys()):
            ours, theirs = parts[first].get(name), parts[rank].get(name)
            # No gradient on one rank and zeros on another are the same.
            none = Sketch((), 0.0)
            if ours is None or theirs is None:
                differs = bool((ours or none).size or (theirs or none).size)
            else:
                differs = ours.differs(theirs)
            if differs:
                found.setdefault(name, rank)
    return found


def find_whole(parts: Mapping[int, Mapping[str, Sketch]]) -> list[str]:
    """Inputs that were taken as parts, and are the same on all ranks.

    >>> one, other = Sketch((1.0, 1.0), 1e-3), Sketch((2.0, 2.0), 1e-3)
    >>> find_whole({0: {"a": one, "b": one}, 1: {"a": one, "b": other}})
    ['a']
    """
    first, *others = parts.values()
    return [
        name
        for name, sketch in first.items()
        if math.isfinite(sketch.size)
        and sketch.size
        and all(name in o and o[name].figures == sketch.figures for o in others)
    ]


def is_replica(tensor: torch.Tensor, ranks: Sequence[int]) -> bool:
    """Whether these ranks must hold the same values in this tensor."""
    if not isinstance(tensor, DTensor):
        return True
    mesh: DeviceMesh = tensor.device_mesh
    return all(
        placement.is_replicate()
        for dim, placement in enumerate(tensor.placements)
        if dist.get_process_group_ranks(mesh.get_group(dim)) == list(ranks)
    )


def sketch(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sketch]:
    """A sketch of each tensor; its values are read from the device all at once."""
    names = list(tensors)
    rows = [_figures(tensors[name]) for name in names]
    figures = torch.stack(rows).tolist() if rows else []
    return {
        name: Sketch(tuple(row), _near(tensors[name].dtype))
        for name, row in zip(names, figures, strict=True)
    }


def _near(dtype: torch.dtype) -> float:
    return _NEAR_IN_HALF if dtype.itemsize < 4 else _NEAR


def _figures(tensor: torch.Tensor) -> torch.Tensor:
    local = _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    parts = local.reshape(-1).tensor_split(_PARTS)
    wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    both = [f(part) for part in wide for f in (torch.sum, torch.linalg.vector_norm)]
    return torch.stack(both).double()


class Replicas:
    """The replicas of one parallel module, compared from time to time.

    Args:
        module: What was given to ``parallelize_module``.
        mesh: The axis that it was laid over.
        per_rank: Patterns of parameters that are not compared.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, per_rank: Collection[str] = ()
    ) -> None:
        self._module = weakref.ref(module)
        self._mesh_text = format_mesh(mesh)
        self._per_rank = tuple(per_rank)
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        is_alone = mesh.size() == 1 or dist.get_backend(mesh.get_group()) == "fake"
        self._is_checked = not is_alone
        number = _numbers[tuple(self._ranks)] = _numbers.get(tuple(self._ranks), 0) + 1
        listed = "-".join(map(str, self._ranks))
        self._key = f"torchspmd/replicas/{listed}/{number}"
        self._lock = threading.Lock()
        self._task = -1
        self._count = 0
        self._parts: dict[str, torch.Tensor] = {}

    def note_backward(self, gradient: torch.Tensor) -> None:
        """Called in every backward of a layer; compares after the last one, if it is time.

        What runs on stand-ins (a step that is captured) has no values to compare.
        """
        task = _torch.graph_task()
        if task == self._task or not self._is_checked or type(gradient) is not _PLAIN:
            return
        with self._lock:
            if task == self._task:
                return
            self._task = task
            self._count += 1
        if self._count & (self._count - 1) == 0 and not _is_recorded(gradient):
            # Behind the callbacks of others, which reduce gradients: those of FSDP2 are
            # there, those of DistributedDataParallel come when its last bucket is full.
            _torch.after_backward(lambda: _torch.after_backward(self.compare))

    def note_part(self, where: str, tensor: torch.Tensor, dim: int) -> None:
        """Called for each plain input that is taken as a part in a dimension.

        One that does not vary along it (ones, for instance) tells nothing.
        """
        is_time = (self._count + 1) & self._count == 0
        if not (self._is_checked and is_time) or type(tensor) is not _PLAIN:
            return
        if where in self._parts or not torch.is_grad_enabled() or tensor.size(dim) < 2:
            return
        if tensor.is_floating_point() and not _is_recorded(tensor):
            steps = tensor.detach().diff(dim=dim)
            varies = (steps != 0).any().double()
            self._parts[where] = _figures(tensor) * varies

    def compare(self) -> None:
        """Compare replicas and their gradients with those of the other ranks.

        Raises:
            CheckError: They differ; the text has the parameters and what to do.
            AgreementError: A rank did not come.
        """
        module = self._module()
        if module is None:
            return
        replicas = dict(self._replicas(module))
        gradients = {
            name: parameter.grad
            for name, parameter in replicas.items()
            if parameter.grad is not None and is_replica(parameter.grad, self._ranks)
        }
        noted, self._parts = self._parts, {}
        figures = torch.stack(list(noted.values())).tolist() if noted else []
        parts = {
            name: Sketch(tuple(row), _NEAR)
            for name, row in zip(noted, figures, strict=True)
        }
        report = Report(sketch(replicas), sketch(gradients), parts)
        done = exchange(
            _torch.default_store(),
            dist.get_rank(),
            report.to_json(),
            self._ranks,
            f"{self._key}/{self._count}",
            _SECONDS,
        )
        texts = done.require_all(
            f"parallelize_module on the mesh {self._mesh_text}", _RULE
        )
        reports = {rank: Report.from_json(texts[rank]) for rank in self._ranks}
        self._refuse(module, reports)

    def _replicas(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for path, part in module.named_modules():
            placed = getattr(part, LAYOUTS, {})
            for name, parameter in part.named_parameters(recurse=False):
                plain = plain_name(f"{path}.{name}" if path else name)
                is_own = any(is_meant(pattern, plain) for pattern in self._per_rank)
                # DistributedDataParallel makes plain parameters of shards.
                is_unwrapped = name in placed and not isinstance(parameter, DTensor)
                if not (is_own or is_unwrapped) and is_replica(parameter, self._ranks):
                    yield plain, parameter

    def _refuse(self, module: nn.Module, reports: Mapping[int, Report]) -> None:
        values = find_differing({r: report.values for r, report in reports.items()})
        if values:
            raise CheckError(
                self._text(module, values, "hold other values", "", _VALUES_FIX)
            )
        gradients = find_differing(
            {rank: report.gradients for rank, report in reports.items()}
        )
        if gradients:
            which = f" in backward {self._count}"
            raise CheckError(
                self._text(
                    module, gradients, "got other gradients", which, _GRADIENTS_FIX
                )
            )

        whole = find_whole({rank: report.parts for rank, report in reports.items()})
        if whole:
            lines = "\n".join(f"  * {name}" for name in whole[:_SHOWN])
            # Data may be alike on purpose, as in a test: not an error.
            warnings.warn(
                f"parallelize_module of {type(module).__name__} on the mesh "
                f"{self._mesh_text}: inputs that are taken as one part for each rank are "
                f"the same on all ranks\n\n{lines}\n\n{_WHOLE_FIX}",
                PlanWarning,
                stacklevel=2,
            )

    def _text(
        self,
        module: nn.Module,
        found: Mapping[str, int],
        what: str,
        when: str,
        fix: str,
    ) -> str:
        first = self._ranks[0]
        lines = [
            f"  * {_describe(module, name)}: rank {rank} differs from rank {first}"
            for name, rank in found.items()
        ]
        rest = len(lines) - _SHOWN
        if rest > 0:
            lines = [*lines[:_SHOWN], f"  * and {rest} more"]
        listed = "\n".join(lines)
        return (
            f"parallelize_module of {type(module).__name__} on the mesh "
            f"{self._mesh_text}: parameters that every rank holds whole {what} on its "
            f"ranks{when}\n\n{listed}\n\n{fix} {_PER_RANK_FIX}"
        )


_PLAIN = torch.Tensor
_PER_RANK_FIX = (
    "A parameter that is each rank's own on purpose is named in "
    "parallelize_module(..., per_rank=[...])."
)
_VALUES_FIX = (
    "They must start alike: seed all ranks of the axis with the same number before the "
    "model is built, load the same checkpoint, or broadcast these parameters."
)
_WHOLE_FIX = (
    "If they are whole, gradients count once for each rank. Take the style off such "
    "a module (or give it ReplicateParallel()), write input_layouts=Replicate(), or give "
    "the module before it output_layouts=Shard(...). If all parts of your data are alike "
    "on purpose, nothing is wrong."
)
_GRADIENTS_FIX = (
    "Each rank would train another model. A module that works on a part of the activations "
    "needs a style that adds its gradients up: SequenceParallel(sequence_dim=...) for a "
    "norm, with the dimension that is cut, ExpertParallel(Replicate()) for a module that "
    "makes partial values; or gather its input first (PrepareModuleInput). If the "
    "activations are whole there, the ranks of the axis ran on other batches or drew other "
    "random numbers: give all of them the same. What you sum yourself, sum in a hook of "
    "the parameter (register_hook), before it is accumulated."
)


def _is_recorded(gradient: torch.Tensor) -> bool:
    """Whether a CUDA graph records, so that no value can be read."""
    return gradient.is_cuda and torch.cuda.is_current_stream_capturing()


def is_meant(pattern: str, name: str) -> bool:
    """A pattern means a parameter by its name, or all of a module by the module's path."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _describe(module: nn.Module, name: str) -> str:
    owners: dict[str, Any] = {
        plain_name(f"{path}.{own}" if path else own): part
        for path, part in module.named_modules()
        for own, _ in part.named_parameters(recurse=False)
    }
    return (
        f"'{name}' ({type(owners[name]).__name__})" if name in owners else f"'{name}'"
    )
