"""Which Linears feed which, from one run of a model on shapes.

Every tensor carries which Linears' output features it holds, and in which dimension:
its *trail*. Operators pass trails on by the rules in ``plan_flow_rules``; where an
operator needs the features whole, the trail ends, with the reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torchspmd.parallel.plan_calls import Inputs, call_on_meta, meta_state
from torchspmd.parallel.plan_flow_rules import RULES, Ended, Trail

OUTPUT = "they are an output of the model"


@dataclass(frozen=True, slots=True)
class Flow:
    """What a run has shown.

    Attributes:
        linears: Paths of the Linears that were called, in order.
        embeddings: Paths of the Embeddings that were called, in order.
        fed_by: For each Linear, the Linears whose features it reads, one entry a call;
            empty for a call on something else.
        ends: For each Linear, why its features are needed whole somewhere.
        gaps: Torch functions that got a tensor from something that is not one, such as
            a scripted function, through which nothing can be followed.
    """

    linears: dict[str, None] = field(default_factory=dict)
    embeddings: dict[str, None] = field(default_factory=dict)
    fed_by: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


def follow(model: nn.Module, inputs: Inputs) -> Flow:
    """Run the model on shapes and follow the features of its Linears.

    Raises:
        NotRunnableError: The model needs values to run.
    """
    state = meta_state(model)
    mode = _Follow(model, state)
    with mode:
        output = call_on_meta(model, state, inputs)
    for tensor in tensors_in(output):
        mode.end(mode.trails.get(id(tensor)), OUTPUT)
    return mode.flow


def _owners(
    model: nn.Module, state: Mapping[str, torch.Tensor], kind: type[nn.Module]
) -> dict[int, str]:
    """The path of the module of a kind that owns each weight."""
    return {
        id(state[f"{path}.weight" if path else "weight"]): path
        for path, module in model.named_modules()
        if type(module) is kind
    }


class _Follow(TorchFunctionMode):
    """Hands trails from the inputs of each torch function to its outputs."""

    def __init__(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.flow = Flow()
        self.trails: dict[int, Trail] = {}
        self._linears = _owners(model, state, nn.Linear)
        self._embeddings = _owners(model, state, nn.Embedding)
        names = [path for path, _ in model.named_parameters()]
        self._parameters = {id(state[path]): path for path in names}
        self._known = {id(tensor) for tensor in state.values()}
        self._alive: list[torch.Tensor] = []  # ids stay unique while tensors live

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        name = getattr(func, "__name__", str(func))
        self._look_for_gaps(name, args, kwargs)
        if name == "__setitem__":
            outputs = [args[0]]
        if not outputs:
            return result
        self._alive += outputs
        self._known |= set(map(id, outputs))
        if func is F.linear:
            self._linear(outputs[0], *args, **kwargs)
        elif func is F.embedding:
            self._embedding(*args, **kwargs)
        else:
            self._pass_on(name, args, kwargs, outputs)
        return result

    def _look_for_gaps(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Tensors with a history that no torch function has shown to us."""
        for tensor in tensors_in([*args, *kwargs.values()]):
            if tensor.requires_grad and id(tensor) not in self._known:
                self._alive.append(tensor)
                self._known.add(id(tensor))
                self.flow.gaps.append(name)

    def _linear(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any = None,
    ) -> None:
        trail = self.trails.get(id(x))
        path = self._linears.get(id(weight))
        if path is None:
            self.end(trail, f"they meet {self._name(weight)}, which no nn.Linear owns")
            return
        if trail is not None and trail.dim != x.ndim - 1:
            self.end(
                trail, f"'{path}' reads them in dimension {trail.dim}, not the last"
            )
            trail = None
        self.flow.linears[path] = None
        sources = frozenset() if trail is None else trail.sources
        self.flow.fed_by.setdefault(path, []).append(sources)
        self.trails[id(output)] = Trail(frozenset({path}), output.ndim - 1)

    def _embedding(
        self, index: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        path = self._embeddings.get(id(weight))
        if path is not None:
            self.flow.embeddings[path] = None

    def _pass_on(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
    ) -> None:
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        trails = [self.trails[id(t)] for t in given if id(t) in self.trails]
        if not trails:
            return
        try:
            passed = self._apply_rule(name, args, kwargs, outputs)
        except Ended as end:
            for trail in trails:
                self.end(trail, str(end))
            for tensor in outputs:  # written in place: it had a trail before
                self.trails.pop(id(tensor), None)
            return
        self.trails |= {id(t): trail for t, trail in zip(outputs, passed, strict=True)}

    def _apply_rule(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
    ) -> list[Trail]:
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        owned = [self._parameters[id(t)] for t in given if id(t) in self._parameters]
        if owned:
            raise Ended(f"the parameter '{owned[0]}' is used on them")
        rule = RULES.get(name)
        if rule is None:
            raise Ended(
                f"the torch function {name} is applied, for which no rule is known"
            )
        try:
            return rule(self.trails, args, kwargs, outputs)
        except (IndexError, KeyError, TypeError, ValueError):
            # Torch functions have many signatures; a rule knows the usual ones.
            raise Ended(
                f"{name} is applied in a way for which no rule is known"
            ) from None

    def end(self, trail: Trail | None, reason: str) -> None:
        """Note that the features of a trail are needed whole."""
        for path in trail.sources if trail is not None else ():
            reasons = self.flow.ends.setdefault(path, [])
            if reason not in reasons:
                reasons.append(reason)

    def _name(self, weight: torch.Tensor) -> str:
        path = self._parameters.get(id(weight))
        return "a computed weight" if path is None else f"'{path}'"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
