"""``check_local_parity``: a function of local tensors against the same on one device."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.local.api import Region
from torchspmd.local.arguments import Options
from torchspmd.testing import Ranks
from torchspmd.verify.parity.check import check_parity, pickling_problems
from torchspmd.verify.parity.compare import Asked
from torchspmd.verify.parity.run import RunOptions
from torchspmd.verify.parity.verdict import Verdict

Layout = Sequence[Placement] | None


def check_local_parity(  # noqa: PLR0913 - the function, its arguments, how it is judged
    function: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Sequence[Any],
    layouts: Sequence[Layout],
    *,
    mesh: Mapping[str, int],
    without_grad: Sequence[str] = (),
    tolerance: Asked = None,
    ranks: Ranks | None = None,
    timeout: float = 300.0,
    raises: bool = True,
) -> Verdict:
    """Compare a function made by ``local_map`` with the same function on one device.

    The outputs are compared, and the gradient of every floating-point argument under
    random weights of the outputs. In the verdict, arguments are ``argument0``,
    ``argument1`` and so on.

    Args:
        function: Takes DTensors; defined at module level, as ``reference`` is, or made
            by ``local_map`` of such a function.
        reference: Takes the whole tensors; may be ``function`` itself, where the mapped
            function needs no communication of its own.
        arguments: The arguments, with whole tensors.
        layouts: For each argument its placements, one for each mesh axis; None for what
            is passed as it is.
        mesh: Names and sizes of the mesh axes.
        without_grad: Arguments that are meant to get no gradient.
        tolerance: As in ``check_parity``.
        ranks: Running ranks to use.
        timeout: Seconds that the ranks may take.
        raises: False returns a failed verdict instead of raising it.

    Returns:
        The verdict, as ``check_parity`` gives it.
    """
    if len(arguments) != len(layouts):
        raise UsageError(
            f"check_local_parity: {len(arguments)} arguments, but {len(layouts)} layouts. "
            "Give one layout for each argument, None for what is no tensor."
        )
    function, reference = _sendable(function), _sendable(reference)
    problems = pickling_problems({"function": function, "reference": reference})
    if problems:
        raise UsageError("check_local_parity: " + "; ".join(problems) + ".")
    return check_parity(
        functools.partial(_Call, reference, tuple(arguments)),
        _weighted_step,
        (),
        parallelize=functools.partial(
            _lay_out, function=function, layouts=tuple(layouts)
        ),
        mesh=mesh,
        data_axes=(),
        steps=1,
        tolerance=tolerance,
        without_grad=without_grad,
        ranks=ranks,
        raises=raises,
        run=RunOptions(timeout=timeout),
    )


def _sendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that pickles and does the same on a rank.

    ``mapped = local_map(reference, ...)`` has the name of ``reference``, and pickle sends
    functions by name; so the function and its layouts are sent instead.
    """
    if not inspect.isfunction(function) or not pickling_problems({"": function}):
        return function
    for held in inspect.getclosurevars(function).nonlocals.values():
        if isinstance(held, Region):
            sent = functools.partial(_call_mapped, held.options)
            return function if pickling_problems({"": sent}) else sent
    return function


def _call_mapped(options: Options, /, *args: Any, **kwargs: Any) -> Any:
    return Region(options)(args, kwargs)


class _Call(nn.Module):
    """A call with its arguments, the tensors among them as parameters and buffers."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments
        for place, value in enumerate(arguments):
            if not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point() or value.is_complex():
                copy = nn.Parameter(value.detach().clone())
                self.register_parameter(f"argument{place}", copy)
            else:
                self.register_buffer(f"argument{place}", value.clone())

    def forward(self) -> Any:
        """Call the function."""
        found = [
            getattr(self, f"argument{place}", value)
            for place, value in enumerate(self.arguments)
        ]
        return self.function(*found)


def _lay_out(
    model: _Call,
    mesh: DeviceMesh,
    function: Callable[..., Any],
    layouts: tuple[Layout, ...],
) -> None:
    model.function = function
    for place, layout in enumerate(layouts):
        name = f"argument{place}"
        value = getattr(model, name, None)
        if layout is None or value is None:
            continue
        placed = distribute_tensor(value.detach(), mesh, list(layout))
        is_parameter = isinstance(value, nn.Parameter)
        setattr(model, name, nn.Parameter(placed) if is_parameter else placed)


def _weighted_step(model: nn.Module, optim: Any, batch: Any) -> Any:
    outputs = [*_torch.leaves_of(torch.Tensor, model())]
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for output in outputs:
        whole = output.full_tensor() if isinstance(output, DTensor) else output
        weights = (
            torch.rand(whole.shape, generator=generator, dtype=torch.float64) + 0.5
        )
        loss = loss + (whole * weights.to(whole)).sum()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss, outputs
