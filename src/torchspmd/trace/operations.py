"""The operators that each module ran; only on request, as every operator pays for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.comm import Phase

# Views and copies that say little about what a module computes.
TRIVIAL = frozenset(
    {
        "aten.detach.default",
        "aten.t.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.transpose.int",
    }
)
DEFAULT_MAX_OPERATIONS = 100_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator call; shapes and layouts are those of its DTensor arguments."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    layouts: tuple[str, ...] = ()
    mesh: str = ""

    @property
    def on_dtensors(self) -> bool:
        """Whether it was called with DTensors."""
        return bool(self.layouts)


class OperationLog:
    """Operations by module and phase, up to a limit; counts what it drops."""

    def __init__(self, max_operations: int = DEFAULT_MAX_OPERATIONS) -> None:
        self.dropped = 0
        self._room = max_operations
        self._by_place: dict[tuple[str, Phase], list[Operation]] = {}
        # Of the last operation: most often of the next one, too.
        self._place: tuple[str, Phase] | None = None
        self._here: list[Operation] = []

    def append(self, place: tuple[str, Phase], operation: Operation) -> None:
        """Record one operation of a module in a phase."""
        if self._room == 0:
            self.dropped += 1
            return
        self._room -= 1
        if place != self._place:
            self._place = place
            self._here = self._by_place.setdefault(place, [])
        self._here.append(operation)

    def of(self, module: str, phase: Phase) -> tuple[Operation, ...]:
        """What a module ran in a phase, in order."""
        return tuple(self._by_place.get((module, phase), ()))

    def __len__(self) -> int:
        return sum(map(len, self._by_place.values()))


class OperationMode(_torch.TorchDispatchMode):
    """Puts every operator into a log; ``locate`` says which module and phase runs."""

    supports_higher_order_operators = True

    def __init__(
        self, log: OperationLog, locate: Callable[[], tuple[str, Phase]]
    ) -> None:
        super().__init__()
        self._log = log
        self._locate = locate
        # Calls repeat themselves: equal ones are one object.
        self._plain: dict[Any, Operation] = {}
        self._on_dtensors: dict[tuple[Any, ...], Operation] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: without this it would run everything eagerly."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record, then go on; DTensor takes its own operators apart first."""
        place = self._locate()
        if DTensor in types:
            self._log.append(place, self._dtensor_operation(func, args))
            return NotImplemented
        operation = self._plain.get(func)
        if operation is None:
            operation = self._plain[func] = Operation(str(func))
        self._log.append(place, operation)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _dtensor_operation(self, func: Any, args: tuple[Any, ...]) -> Operation:
        tensors = [arg for arg in args if isinstance(arg, DTensor)]
        key = (func, *[_torch.spec(tensor) for tensor in tensors])
        operation = self._on_dtensors.get(key)
        if operation is None:
            operation = self._on_dtensors[key] = Operation(
                str(func),
                tuple(tuple(tensor.shape) for tensor in tensors),
                tuple(str(tensor.placements) for tensor in tensors),
                str(tensors[0].device_mesh) if tensors else "",
            )
        return operation
