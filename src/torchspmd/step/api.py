"""``compile``: the public way in."""

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd.errors import UsageError
from torchspmd.step.compiled import CompiledStep
from torchspmd.step.modes import DataParallel

Transformation = Callable[[fx.GraphModule], Any]
Backend = Literal["graph", "inductor"]


@overload
def compile(func: Callable[..., Any], /) -> CompiledStep: ...


@overload
def compile(
    func: None = None,
    /,
    *,
    gm_transformation: Transformation | None = None,
    parallel_mode: DataParallel | None = None,
    mesh: DeviceMesh | None = None,
    verify: bool = False,
    backend: Backend = "graph",
) -> Callable[[Callable[..., Any]], CompiledStep]: ...


def compile(
    func: Callable[..., Any] | None = None,
    /,
    *,
    gm_transformation: Transformation | None = None,
    parallel_mode: DataParallel | None = None,
    mesh: DeviceMesh | None = None,
    verify: bool = False,
    backend: Backend = "graph",
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Capture a whole training step as one graph, and run that.

    Forward, loss, backward and optimizer become one functional graph. Parameters, buffers
    and optimizer state go in and their new values are written back into your own tensors
    after each step, so eager code, checkpoints and evaluation see the truth.

    Args:
        func: The step: takes modules, optimizers and tensors anywhere in its arguments.
        gm_transformation: Called with the captured ``fx.GraphModule``; what it returns is
            run instead. See ``GraphModuleTransformation``.
        parallel_mode: None for the result of one device with all ranks' batches
            together; ``DataParallel`` to reduce each rank's own gradients.
        mesh: The data axis, a mesh of one axis; all ranks when there is a process group.
        verify: Compare transformed graphs with the captured one. Not available yet.
        backend: ``graph`` runs generated Python, ``inductor`` compiled code.

    Returns:
        The compiled step, or a decorator when ``func`` is not given.

    Example:
        >>> import torch
        >>> @compile
        ... def train_step(model, optim, batch):
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     optim.step()
        ...     optim.zero_grad()
        ...     return loss
        >>> model = torch.nn.Linear(4, 2)
        >>> optim = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> losses = [train_step(model, optim, torch.ones(3, 4)) for _ in range(3)]
        >>> bool(losses[2] < losses[0])
        True
        >>> len(train_step.programs)
        1
    """
    if verify:
        raise UsageError(
            "compile(verify=True) is not available yet: graphs are not compared on "
            "virtual ranks. Leave verify out."
        )

    def wrap(function: Callable[..., Any]) -> CompiledStep:
        if not callable(function):
            raise UsageError(
                f"compile: {type(function).__name__} cannot be called. Decorate the "
                "function of your training step."
            )
        return CompiledStep(
            function,
            gm_transformation=gm_transformation,
            parallel_mode=parallel_mode,
            mesh=mesh,
            backend=backend,
        )

    return wrap if func is None else wrap(func)
