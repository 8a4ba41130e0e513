"""Record what a run computes, in a user's own job or in one that check_parity starts.

Recording sends nothing: every rank writes its own parts with their layouts, and the
comparison puts them together. One step is in memory at a time.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd.errors import RecordingError, UsageError
from torchspmd.layout.names import axis_names, parameter_names, plain_name, unwrapped
from torchspmd.verify.recording.files import (
    INITIAL,
    Header,
    Key,
    Kind,
    Piece,
    prepare_folder,
    write_header,
    write_step,
)
from torchspmd.verify.recording.layouts import Grid, sketch

# ----------------------------------------------------------------------------
# Watch every module of a model: what it takes and gives, and their gradients.
#
# Where an input is wrong but no module's output before it, the code of the module around
# is.
#
# The gradient of an input is that module's own share of it: the input is replaced by an
# alias, so that what other readers of the same tensor contribute does not come in.

Keep = Callable[[Key, torch.Tensor], None]


class ModuleHooks:
    """Hooks on a model and its modules, from ``attach`` to ``detach``."""

    def __init__(self, model: nn.Module, keep: Keep) -> None:
        self.notes: list[str] = []
        self.num_calls = 0
        self._model = unwrapped(model)
        self._keep = keep
        self._calls: dict[str, int] = {}
        self._given: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin to watch; modules inside a compiled one are left alone."""
        closed: list[str] = []
        seen: set[nn.Module] = set()
        for name, module in self._model.named_modules(remove_duplicate=False):
            if any(name == other or name.startswith(f"{other}.") for other in closed):
                continue
            if _torch.is_compiled_module(module):
                closed.append(name)
                continue
            if module not in seen and not isinstance(
                module, nn.ModuleList | nn.ModuleDict
            ):
                self._attach(plain_name(name), module)
            seen.add(module)
        if closed:
            text = ", ".join(repr(name) for name in closed)
            self.notes.append(
                f"inside {text} nothing is seen: torch.compile runs it as one piece"
            )

    def detach(self) -> None:
        """Leave nothing on any module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def next_step(self) -> None:
        """Number the calls of each module from 0 again."""
        self._calls = {}
        self.num_calls = 0

    def _attach(self, name: str, module: nn.Module) -> None:
        # Ours is outermost on both sides: before and after the hooks of styles and FSDP2.
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._before(name, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return self._after(name, output)

        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _before(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_recomputing():
            return None
        call = self._calls[name] = self._calls.get(name, -1) + 1
        self.num_calls += 1
        leaves, structure = _torch.flatten_tree((args, kwargs))
        given = self._given[name] = {}
        for leaf, value in enumerate(leaves):
            if not isinstance(value, torch.Tensor):
                continue
            self._keep(Key(Kind.INPUT, name, call, leaf), value)
            if value.requires_grad and torch.is_grad_enabled():
                alias = _alias(value)
                self._watch(Key(Kind.GRAD_INPUT, name, call, leaf), alias)
                # One more: hooks that others put on the input come before ours.
                leaves[leaf] = _alias(alias)
                given[id(leaves[leaf])] = (leaves[leaf], value)
        return _torch.unflatten_tree(leaves, structure)

    def _after(self, name: str, output: Any) -> Any:
        if _is_recomputing():
            return None
        call = self._calls.get(name, 0)
        given = self._given.pop(name, {})
        leaves, structure = _torch.flatten_tree(output)
        is_changed = False
        for leaf, found in enumerate(leaves):
            if not isinstance(found, torch.Tensor):
                continue
            # A module that hands its input on: an alias would be a view, which FSDP2 and
            # in-place operators treat otherwise.
            value = given[id(found)][1] if id(found) in given else found
            is_changed = is_changed or value is not found
            leaves[leaf] = value
            self._keep(Key(Kind.FORWARD, name, call, leaf), value)
            if value.requires_grad and value.grad_fn is not None:
                self._watch(Key(Kind.GRAD_OUTPUT, name, call, leaf), value)
        if not any(isinstance(leaf, torch.Tensor | None) for leaf in leaves):
            self._note(
                f"{name or 'the model'!r} returns a {type(output).__name__}, which is not "
                "looked into"
            )
        return _torch.unflatten_tree(leaves, structure) if is_changed else None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _watch(self, key: Key, value: torch.Tensor) -> None:
        def arrived(gradient: torch.Tensor) -> None:
            self._keep(key, gradient)

        value.register_hook(arrived)


_alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias.default


def _is_recomputing() -> bool:
    """Whether activation checkpointing runs the forward again, inside backward."""
    return _torch.graph_task() != -1


# ----------------------------------------------------------------------------
# From a live tensor to what is kept of it.

MAX_BYTES = 16 << 20


def grid_of(mesh: DeviceMesh) -> Grid:
    """A mesh as plain numbers."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    return Grid(axis_names(mesh), tuple(mesh.shape), ranks)


def take(value: torch.Tensor, rank: int, max_bytes: int) -> Piece:
    """A copy of this rank's part of a tensor; a sketch of it where it is large."""
    grid, layout, shape = None, None, tuple(value.shape)
    local = value.detach()
    if isinstance(local, DTensor):
        grid = grid_of(local.device_mesh)
        layout = tuple(str(placement) for placement in local.placements)
        local = _torch.local_tensor(local)
    local = _torch.finished(local)
    dtype = str(local.dtype).removeprefix("torch.")
    if local.numel() * local.element_size() <= max_bytes:
        copy = local.to("cpu", copy=True).contiguous()
        return Piece(copy, shape, dtype, grid, layout)
    small = sketch(local, shape, grid, layout, rank)
    return Piece(small, shape, dtype, grid, layout, is_sketch=True)


def record(  # noqa: PLR0913 - what to record, and what it means
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    mesh: DeviceMesh | None = None,
    data_axes: Sequence[str] = (),
    loss_reduction: Literal["mean", "sum"] = "mean",
    modules: bool = True,
    max_bytes: int = MAX_BYTES,
) -> "Recorder":
    """Record a run into a folder, to be compared with another by ``torchspmd parity``.

    Every rank calls it, on one device or under torchrun, with the same folder. Call it
    after the model is parallel and the optimizer exists. Nothing is sent.

    Args:
        folder: A new folder; all ranks write into it.
        model: The model, as it is called.
        optimizer: The optimizer, or several; none for a forward only.
        mesh: The mesh of the run, for the names of its axes; by default one axis of all
            ranks.
        data_axes: The axes whose ranks have different rows of the batch.
        loss_reduction: How the ranks' losses along the data axes make the whole loss.
        modules: Record the activations of every module and their gradients. Without
            them a difference is found, but not where it begins.
        max_bytes: A larger tensor is kept as a sketch of 32 KiB.

    Returns:
        A context manager; call its ``end_step(loss)`` after each step.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with record(tempfile.mkdtemp(), model, optimizer) as recorder:
        ...     for _ in range(2):
        ...         loss = model(torch.ones(3, 2)).sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         recorder.end_step(loss)
    """
    if loss_reduction not in ("mean", "sum"):
        raise UsageError(
            f"record(loss_reduction={loss_reduction!r}): choose 'mean' or 'sum'."
        )
    grid = _world() if mesh is None else grid_of(mesh)
    unknown = [axis for axis in data_axes if axis not in grid.names]
    if unknown:
        raise UsageError(
            f"record(data_axes={tuple(data_axes)}): the mesh {grid.describe()} has no "
            f"axis {', '.join(unknown)}."
        )
    optimizers = (
        [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    header = Header(
        rank,
        world_size=len(grid.ranks),
        num_steps=0,
        grid=grid,
        data_axes=tuple(data_axes),
        loss_reduction=loss_reduction,
        wrappers=_wrappers_of(model),
        sees_modules=modules,
    )
    return Recorder(Path(folder), model, optimizers, header, max_bytes)


def _world() -> Grid:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return Grid(("ranks",), (size,), tuple(range(size)))


class Recorder:
    """A running recording; made by ``record``."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        header: Header,
        max_bytes: int,
    ) -> None:
        self._folder = folder
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._header = header
        self._max_bytes = max_bytes
        self._step = INITIAL
        self._pieces: dict[Key, Piece] = {}
        self._has_gradients = False
        self._saw_gradients = False
        self._depth = 1
        self._parameters: dict[str, nn.Parameter] = {}
        self._hooks = ModuleHooks(model, self._keep) if header.sees_modules else None
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._folder = prepare_folder(self._folder, self._header.rank)
        self._find_parameters()
        self._keep_values()
        self._write()
        if self._hooks is not None:
            self._hooks.attach()
            for optimizer in self._optimizers:
                hook = optimizer.register_step_pre_hook(self._before_update)
                self._handles.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if self._hooks is not None:
            self._hooks.detach()
        if kind is not None:
            return  # without its header the recording says that it did not finish
        if self._pieces:
            raise RecordingError(
                f"record: something ran after the last end_step() of {self._folder}. "
                "Call end_step(loss) once after each step, the last one too."
            )
        write_header(self._folder, self._finished_header())

    def end_step(self, loss: Any, outputs: Any = None) -> None:
        """Close a step: keep loss, outputs, and the model and optimizer as they are now.

        Args:
            loss: What the step returned as its loss: a tensor or a number.
            outputs: Anything else to compare: tensors in lists, tuples or dicts.
        """
        self._find_parameters()
        self._keep_tree(Kind.LOSS, loss)
        self._keep_tree(Kind.OUTPUT, outputs)
        if not self._has_gradients:
            self._keep_gradients()
        self._keep_values()
        if self._hooks is not None:
            self._depth = max(self._depth, self._hooks.num_calls)
            self._hooks.next_step()
        self._write()
        self._has_gradients = False

    # --- what is kept -----------------------------------------------------------------

    def _find_parameters(self) -> None:
        """Read the parameters by name, each once.

        A step may exchange them: ``DataParallel("fully_shard")`` puts a shard in the place
        of each. DDP over tensor-parallel modules takes some out of the model while it
        runs: these stay what they were.
        """
        self._parameters.update(parameter_names(self._model))

    def _before_update(self, *_: Any) -> None:
        if not self._has_gradients:
            self._keep_gradients()
            self._has_gradients = True

    def _keep_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._saw_gradients = True
                self._keep(Key(Kind.GRADIENT, name), parameter.grad)

    def _keep_values(self) -> None:
        for name, parameter in self._parameters.items():
            self._keep(Key(Kind.PARAMETER, name), parameter)
        for name, buffer in self._model.named_buffers():
            self._keep(Key(Kind.BUFFER, plain_name(name)), buffer)
        names: dict[torch.Tensor, str] = {
            p: name for name, p in self._parameters.items()
        }
        for optimizer in self._optimizers:
            for owner, state in optimizer.state.items():
                if owner in names:
                    self._keep_state(names[owner], state)

    def _keep_state(self, name: str, state: dict[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, (torch.Tensor, int, float)):
                self._keep(Key(Kind.STATE, f"{name}.{key}"), torch.as_tensor(value))

    def _keep_tree(self, kind: Kind, tree: Any) -> None:
        for leaf, value in enumerate(_leaves(tree)):
            self._keep(Key(kind, "", leaf=leaf), value)

    def _keep(self, key: Key, value: torch.Tensor) -> None:
        self._pieces[key] = take(value, self._header.rank, self._max_bytes)

    def _write(self) -> None:
        write_step(self._folder, self._header.rank, self._step, self._pieces)
        self._pieces = {}
        self._step += 1

    def _finished_header(self) -> Header:
        ties: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(plain_name(name))
        named = self._parameters.items()
        return replace(
            self._header,
            num_steps=self._step,
            ties=tuple(tuple(sorted(names)) for names in ties.values() if names[1:]),
            frozen=tuple(name for name, value in named if not value.requires_grad),
            notes=() if self._hooks is None else tuple(self._hooks.notes),
            sees_gradients=self._saw_gradients,
            depth=self._depth,
        )


def _leaves(tree: Any) -> Iterable[torch.Tensor]:
    for leaf in _torch.flatten_tree(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            yield torch.tensor(leaf)


def _wrappers_of(model: nn.Module) -> tuple[str, ...]:
    """Which data-parallel wrappers are in a model; these want different rows by rank."""
    from torch.distributed.fsdp import FSDPModule  # takes long to import

    names = {
        DistributedDataParallel: "DistributedDataParallel",
        FSDPModule: "fully_shard",
    }
    found = (
        name
        for module in model.modules()
        for kind, name in names.items()
        if isinstance(module, kind)
    )
    return tuple(sorted(set(found)))
