"""``compile``: the public way in."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd.errors import UsageError
from torchspmd.step.capture.override import Override
from torchspmd.step.compiled import CompiledStep
from torchspmd.step.modes.data_parallel import DataParallel
from torchspmd.step.virtual.verify import Verification

Transformation = Callable[[fx.GraphModule], Any]
Backend = Literal["graph", "inductor", "cudagraph"]


@overload
def compile(func: Callable[..., Any], /) -> CompiledStep: ...


@overload
def compile(
    func: None = None,
    /,
    *,
    module_override: Sequence[Override] = (),
    gm_transformation: Transformation | None = None,
    parallel_mode: DataParallel | None = None,
    mesh: DeviceMesh | None = None,
    verify: bool | Verification = False,
    backend: Backend = "graph",
) -> Callable[[Callable[..., Any]], CompiledStep]: ...


def compile(
    func: Callable[..., Any] | None = None,
    /,
    *,
    module_override: Sequence[Override] = (),
    gm_transformation: Transformation | None = None,
    parallel_mode: DataParallel | None = None,
    mesh: DeviceMesh | None = None,
    verify: bool | Verification = False,
    backend: Backend = "graph",
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Capture a whole training step as one graph, and run that.

    Forward, loss, backward and optimizer become one functional graph. Parameters, buffers
    and optimizer state go in and their new values are written back into your own tensors
    after each step, so eager code, checkpoints and evaluation see the truth.

    Args:
        func: The step: takes modules, optimizers and tensors anywhere in its arguments.
        module_override: Stand-ins for modules while the step is captured; see
            ``Override``. Each module is offered once, the model itself too.
        gm_transformation: Called with the captured ``fx.GraphModule``; what it returns is
            run instead. See ``GraphModuleTransformation``.
        parallel_mode: None for the result of one device with all ranks' batches
            together; ``DataParallel`` to reduce each rank's own gradients.
        mesh: The data axis, a mesh of one axis; all ranks when there is a process group.
        verify: Run the graphs before and after each pass on virtual ranks and compare them
            bit for bit; a ``Verification`` says on how many and how long.
        backend: ``graph`` runs generated Python, ``inductor`` compiled code,
            ``cudagraph`` replays what was launched once.

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
    if not isinstance(verify, (bool, Verification)):
        raise UsageError(
            f"compile(verify={verify!r}): pass True, False or a Verification."
        )
    if gm_transformation is not None and not callable(gm_transformation):
        raise UsageError(
            f"compile(gm_transformation={gm_transformation!r}): pass a function of the "
            "captured graph module, or a GraphModuleTransformation."
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"compile(mesh={mesh!r}): pass a DeviceMesh, for instance of "
            "init_device_mesh(), or None for all ranks."
        )
    if getattr(gm_transformation, "enable_inductor", False) and backend == "graph":
        backend = "inductor"
    comparing = Verification() if verify is True else verify or None

    def wrap(function: Callable[..., Any]) -> CompiledStep:
        if not callable(function):
            raise UsageError(
                f"compile: {type(function).__name__} cannot be called. Decorate the "
                "function of your training step."
            )
        _check_own_keyword(function)
        return CompiledStep(
            function,
            gm_transformation=gm_transformation,
            parallel_mode=parallel_mode,
            mesh=mesh,
            backend=backend,
            module_override=module_override,
            verify=comparing,
        )

    return wrap if func is None else wrap(func)


def _check_own_keyword(function: Callable[..., Any]) -> None:
    """Refuse a parameter that the compiled step would keep for itself."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    if "last_train_step" in parameters:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"compile on {name!r}: the step has a parameter last_train_step, which a "
            "compiled step takes for itself (nothing is left for a next step), so that "
            "yours would never get a value. Give your parameter another name."
        )
