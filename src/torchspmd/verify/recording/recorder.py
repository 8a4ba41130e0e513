"""Record what a run computes, in a user's own job or in one that check_parity starts.

Recording sends nothing: every rank writes its own parts with their layouts, and whoever
compares puts them together. One step is in memory at a time.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.errors import RecordingError, UsageError
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
from torchspmd.verify.recording.hooks import ModuleHooks
from torchspmd.verify.recording.layouts import Grid
from torchspmd.verify.recording.names import (
    parameter_names,
    plain_name,
    unwrapped,
    wrappers_of,
)
from torchspmd.verify.recording.pieces import MAX_BYTES, grid_of, take


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
    about = _About(grid, tuple(data_axes), loss_reduction, modules, max_bytes, rank)
    return Recorder(Path(folder), model, optimizers, about)


@dataclass(frozen=True, slots=True)
class _About:
    """What is fixed for a whole recording."""

    grid: Grid
    data_axes: tuple[str, ...]
    loss_reduction: str
    modules: bool
    max_bytes: int
    rank: int


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
        about: _About,
    ) -> None:
        self._folder = folder
        self._model = unwrapped(model)
        self._wrappers = wrappers_of(model)
        self._optimizers = optimizers
        self._about = about
        self._step = INITIAL
        self._pieces: dict[Key, Piece] = {}
        self._has_gradients = False
        self._saw_gradients = False
        self._depth = 1
        self._hooks = ModuleHooks(model, self._keep) if about.modules else None
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._folder = prepare_folder(self._folder, self._about.rank)
        # Once: DDP over tensor-parallel modules takes them out of the model later.
        self._names = parameter_names(self._model)
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
        write_header(self._folder, self._header())

    def end_step(self, loss: Any, outputs: Any = None) -> None:
        """Close a step: keep loss, outputs, and the model and optimizer as they are now.

        Args:
            loss: What the step returned as its loss: a tensor or a number.
            outputs: Anything else to compare: tensors in lists, tuples or dicts.
        """
        self._keep_tree(Kind.LOSS, "", 0, loss)
        self._keep_tree(Kind.OUTPUT, "", 0, outputs)
        if not self._has_gradients:
            self._keep_gradients()
        self._keep_values()
        if self._hooks is not None:
            self._depth = max(self._depth, self._hooks.num_calls)
            self._hooks.next_step()
        self._write()
        self._has_gradients = False

    # --- what is kept -----------------------------------------------------------------

    def _before_update(self, *_: Any) -> None:
        if not self._has_gradients:
            self._keep_gradients()
            self._has_gradients = True

    def _keep_gradients(self) -> None:
        for name, parameter in self._names.items():
            if parameter.grad is not None:
                self._saw_gradients = True
                self._keep(Key(Kind.GRADIENT, name), parameter.grad)

    def _keep_values(self) -> None:
        for name, parameter in self._names.items():
            self._keep(Key(Kind.PARAMETER, name), parameter)
        for name, buffer in self._model.named_buffers():
            self._keep(Key(Kind.BUFFER, plain_name(name)), buffer)
        names: dict[torch.Tensor, str] = {p: name for name, p in self._names.items()}
        for optimizer in self._optimizers:
            for owner, state in optimizer.state.items():
                if owner in names:
                    self._keep_state(names[owner], state)

    def _keep_state(self, name: str, state: dict[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, (torch.Tensor, int, float)):
                self._keep(Key(Kind.STATE, f"{name}.{key}"), torch.as_tensor(value))

    def _keep_tree(self, kind: Kind, name: str, call: int, tree: Any) -> None:
        for leaf, value in enumerate(_leaves(tree)):
            self._keep(Key(kind, name, call, leaf), value)

    def _keep(self, key: Key, value: torch.Tensor) -> None:
        about = self._about
        self._pieces[key] = take(value, about.rank, about.max_bytes)

    def _write(self) -> None:
        write_step(self._folder, self._about.rank, self._step, self._pieces)
        self._pieces = {}
        self._step += 1

    def _header(self) -> Header:
        about, model = self._about, self._model
        ties: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(plain_name(name))
        named = self._names.items()
        return Header(
            rank=about.rank,
            world_size=len(about.grid.ranks),
            num_steps=self._step,
            grid=about.grid,
            data_axes=about.data_axes,
            loss_reduction=about.loss_reduction,
            ties=tuple(tuple(sorted(names)) for names in ties.values() if names[1:]),
            frozen=tuple(name for name, value in named if not value.requires_grad),
            wrappers=self._wrappers,
            notes=() if self._hooks is None else tuple(self._hooks.notes),
            sees_modules=self._hooks is not None,
            sees_gradients=self._saw_gradients,
            depth=self._depth,
        )


def _leaves(tree: Any) -> Iterable[torch.Tensor]:
    for leaf in _torch.flatten_tree(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            yield torch.tensor(leaf)
