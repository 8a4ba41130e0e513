"""How a model calls its modules: shapes and dtypes, from a run that computes nothing.

The model runs once on the meta device: no weights are read, no memory is used, any size
will do. What needs values (``.item()``, ``nonzero``) cannot run so, and is reported.
"""

import contextlib
import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call

Inputs = Mapping[str, Any] | tuple[Any, ...]


class Facts(NamedTuple):
    """One tensor of one call.

    Attributes:
        shape: Its whole shape.
        dtype: Its element type.
        needs_grad: A gradient is computed for it.
        identity: The same number for the same tensor in other calls.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    identity: int


class Call(NamedTuple):
    """One call of one module: its tensors by position and by name, in start order."""

    path: str
    inputs: tuple[Facts | None, ...]
    keywords: dict[str, Facts | None]
    outputs: tuple[Facts | None, ...]


class NotRunnableError(Exception):
    """The model cannot run on shapes alone; the text says why."""


def run_on_shapes(
    model: nn.Module, paths: Collection[str], inputs: Inputs
) -> list[Call]:
    """Every call of the named modules, in the order in which they start."""
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(recorder.watching(path, model.get_submodule(path)))
        call_on_meta(model, meta_state(model), inputs)
    return recorder.calls


def call_on_meta(
    model: nn.Module, state: dict[str, torch.Tensor], inputs: Inputs
) -> Any:
    """The model's output on the meta device, with these tensors as its state."""
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = {name: to_meta(value) for name, value in inputs.items()}
    else:
        positional = tuple(map(to_meta, inputs))
    try:
        with torch.device("meta"), random_numbers_kept():
            return functional_call(model, state, positional, named)
    except Exception as error:  # the user's forward can raise anything
        first_line = str(error).strip().partition("\n")[0]
        raise NotRunnableError(f"{type(error).__name__}: {first_line}") from error


def random_numbers_kept() -> contextlib.AbstractContextManager[None]:
    """A context after which the user's generators are as before."""
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if is_used else ()
    return torch.random.fork_rng(devices=list(devices))


def guess_inputs(model: nn.Module, batch: int, seq: int) -> Inputs:
    """Token ids for a model with an embedding, else features for its first Linear."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return (torch.empty(batch, seq, dtype=torch.long, device="meta"),)
        if isinstance(module, nn.Linear):
            shape = (batch, seq, module.in_features)
            return (torch.empty(shape, dtype=module.weight.dtype, device="meta"),)
    raise NotRunnableError("it has no Embedding and no Linear")


def describe_inputs(inputs: Inputs) -> str:
    """The shapes of the model's inputs, for a sentence."""
    if isinstance(inputs, Mapping):
        labelled = [(f"{name}=", value) for name, value in inputs.items()]
    else:
        labelled = [("", value) for value in inputs]
    return ", ".join(
        f"{label}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for label, value in labelled
        if isinstance(value, torch.Tensor)
    )


def to_meta(value: Any) -> Any:
    """A tensor without values; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)


def meta_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A stand-in without values for each parameter and buffer, ties kept."""
    made: dict[int, torch.Tensor] = {}
    state = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for _, tensor in state:
        made.setdefault(id(tensor), to_meta(tensor))
    return {path: made[id(tensor)] for path, tensor in state}


class _Recorder:
    """Writes down the calls of the modules that it watches."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: dict[str, list[int]] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique while tensors live

    @contextlib.contextmanager
    def watching(self, path: str, module: nn.Module) -> Iterator[None]:
        handles = (
            module.register_forward_pre_hook(self._enter(path), with_kwargs=True),
            module.register_forward_hook(self._leave(path)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._open.setdefault(path, []).append(len(self.calls))
            keywords = {name: self._facts(value) for name, value in kwargs.items()}
            inputs = tuple(map(self._facts, args))
            self.calls.append(Call(path, inputs, keywords, ()))

        return enter

    def _leave(self, path: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            place = self._open[path].pop()
            outputs = output if isinstance(output, tuple) else (output,)
            facts = tuple(map(self._facts, outputs))
            self.calls[place] = self.calls[place]._replace(outputs=facts)

        return leave

    def _facts(self, value: Any) -> Facts | None:
        if not isinstance(value, torch.Tensor):
            return None
        self._alive.append(value)
        return Facts(tuple(value.shape), value.dtype, value.requires_grad, id(value))


# ----------------------------------------------------------------------------
# One forward as a graph with its children closed: which module's output goes where.
#
# A forward that cannot be traced (control flow on values, shapes taken apart) has no graph.

# What works element by element, so that a tensor keeps its layout through it.
_FUNCTIONS = frozenset(
    [
        F.dropout,
        F.elu,
        F.gelu,
        F.leaky_relu,
        F.mish,
        F.relu,
        F.silu,
        F.softplus,
        operator.mul,
        operator.neg,
        torch.clone,
        torch.exp,
        torch.mul,
        torch.relu,
        torch.sigmoid,
        torch.square,
        torch.tanh,
    ]
)
_METHODS = frozenset(
    ["clone", "contiguous", "exp", "mul", "neg", "relu", "sigmoid", "square", "tanh"]
)
_MODULES = (
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_SPLITS = ("chunk", "split", "tensor_split")
# The last dimension of what a Linear gets in a transformer: (batch, sequence, features).
_LAST_DIMS = (-1, 2)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the output of one call of a module goes, element by element.

    Attributes:
        source: Name of the module inside its parent.
        targets: Modules that get it as their first input.
        split: The function that takes its last dimension apart, if one does.
    """

    source: str
    targets: tuple[str, ...]
    split: str | None


def follow_outputs(parent: nn.Module) -> list[Reach]:
    """Where each module inside ``parent`` hands its output; empty if not traceable."""
    graph = _trace(parent)
    nodes = [] if graph is None else [n for n in graph.nodes if n.op == "call_module"]
    return [_reach(node, parent) for node in nodes]


class _ClosedChildren(fx.Tracer):
    """Traces one forward; every module inside it is one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> fx.Graph | None:
    if isinstance(module, _CONTAINERS):
        return None
    # A forward may write to its module; a copy of the module's own namespace keeps
    # traces of this tracing out of the user's.
    try:
        stand_in = copy.copy(module)
        for name in ("_modules", "_buffers", "_parameters"):
            setattr(stand_in, name, dict(getattr(module, name)))
        with random_numbers_kept():
            return _ClosedChildren().trace(stand_in)
    except Exception:  # the user's code on stand-ins for tensors can raise anything
        return None


def _reach(node: fx.Node, parent: nn.Module) -> Reach:
    users = list(_users(node, parent))
    targets = [str(u.target) for u, _ in users if u.op == "call_module"]
    splits = (_split_name(user) for user, _ in users)
    return Reach(
        source=str(node.target),
        targets=tuple(dict.fromkeys(targets)),
        split=next((name for name in splits if name is not None), None),
    )


def _users(node: fx.Node, parent: nn.Module) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes that take a node's output as first input, and what they take it from."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            if user in seen:
                continue
            if _keeps_layout(user, parent):
                seen.add(user)
                waiting.append(user)
            elif user.args and user.args[0] is current:
                yield user, current


def _keeps_layout(node: fx.Node, parent: nn.Module) -> bool:
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_module":
        return False
    module = parent.get_submodule(str(node.target))
    return isinstance(module, _MODULES)


def _split_name(node: fx.Node) -> str | None:
    if node.op not in ("call_method", "call_function"):
        return None
    target: str | Callable[..., object] = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    return name if name in _SPLITS and dim in _LAST_DIMS else None
