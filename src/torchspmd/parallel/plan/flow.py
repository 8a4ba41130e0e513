"""Which Linears feed which, from one run of a model on shapes.

Every tensor carries which Linears' output features it holds, and in which dimension:
its *trail*. Each torch function passes trails on by a rule; where one needs the features
whole, the trail ends, with the reason.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchspmd import _torch
from torchspmd.parallel.linear import linear_form
from torchspmd.parallel.plan.run import FunctionCall, Inputs, Recording, record

# ----------------------------------------------------------------------------
# How torch functions pass on the features of Linears: one rule for a family.
#
# A rule gets the trails of the inputs and gives one for each output, or raises ``Ended``
# when the function needs the features of all ranks together.


class Trail(NamedTuple):
    """The Linears whose output features a tensor holds, and the dimension they lie in."""

    sources: frozenset[str]
    dim: int


class Ended(Exception):  # noqa: N818
    """A function needs the features whole; the text says which and why."""


Trails = Mapping[int, Trail]
Rule = Callable[[Trails, FunctionCall], list[Trail]]


def _elementwise(trails: Trails, call: FunctionCall) -> list[Trail]:
    """Dimensions line up from the back; others must be broadcast over the features."""
    (output,) = call.outputs
    given = [
        t for t in (*call.args, *call.kwargs.values()) if isinstance(t, torch.Tensor)
    ]
    found = {trails[id(t)].dim + output.ndim - t.ndim for t in given if id(t) in trails}
    if len(found) != 1:
        raise Ended("tensors with features in different dimensions are combined")
    (dim,) = found
    for tensor in given:
        place = dim - (output.ndim - tensor.ndim)
        if id(tensor) not in trails and place >= 0 and tensor.shape[place] != 1:
            raise Ended(
                "they are combined with a tensor that is whole in that dimension"
            )
    sources = frozenset().union(
        *(trails[id(t)].sources for t in given if id(t) in trails)
    )
    return [Trail(sources, dim)]


def _reshape(trails: Trails, call: FunctionCall) -> list[Trail]:
    """The features must stay the outer part of one dimension, as shards are cut."""
    (output,), tensor = call.outputs, call.args[0]
    trail = trails[id(tensor)]
    before = math.prod(tensor.shape[: trail.dim])
    size = tensor.shape[trail.dim]
    for dim, new in enumerate(output.shape):
        starts_here = math.prod(output.shape[:dim]) == before
        if starts_here and new > 1 and (new % size == 0 or size % new == 0):
            return [Trail(trail.sources, dim)]
    raise Ended(
        f"a reshape from {list(tensor.shape)} to {list(output.shape)} mixes dimension "
        f"{trail.dim} with the one before it"
    )


def _transpose(trails: Trails, call: FunctionCall) -> list[Trail]:
    tensor, trail = call.args[0], trails[id(call.args[0])]
    first, second = (
        (*call.args[1:], *call.kwargs.values())
        if len(call.args) + len(call.kwargs) > 1
        else (-2, -1)
    )
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return [Trail(trail.sources, order.index(trail.dim))]


def _permute(trails: Trails, call: FunctionCall) -> list[Trail]:
    tensor, trail = call.args[0], trails[id(call.args[0])]
    given = call.kwargs.get("dims", call.args[1:])
    dims = (
        given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    )
    order = [dim % tensor.ndim for dim in dims]
    return [Trail(trail.sources, order.index(trail.dim))]


def _along(trails: Trails, call: FunctionCall) -> list[Trail]:
    """An operation along another dimension, which stays."""
    tensor, trail = call.args[0], trails[id(call.args[0])]
    dim = call.argument(1, "dim")
    if type(dim) is not int or dim % tensor.ndim == trail.dim:
        raise Ended("they are compared or summed up")
    return [trail] * len(call.outputs)


def _split(trails: Trails, call: FunctionCall) -> list[Trail]:
    """A split of another dimension; that of the features themselves is followed apart."""
    return [trails[id(call.args[0])]] * len(call.outputs)


def _index(trails: Trails, call: FunctionCall) -> list[Trail]:
    """Whole slices keep a dimension, numbers drop one, None adds one."""
    tensor, index = call.args
    if id(tensor) not in trails:
        raise Ended("they are used as an index")
    trail = trails[id(tensor)]
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, (torch.Tensor, list)) for part in parts):
        raise Ended("they are indexed with a tensor")
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    place = parts.index(Ellipsis)
    parts[place : place + 1] = [slice(None)] * (tensor.ndim - used)
    old = new = 0
    for part in parts:
        if part is None:
            new += 1
            continue
        if old == trail.dim:
            if part != slice(None):
                raise Ended("a part of them is taken")
            return [Trail(trail.sources, new)]
        old, new = old + 1, new + isinstance(part, slice)
    raise AssertionError((tensor.shape, index))


def _expand(trails: Trails, call: FunctionCall) -> list[Trail]:
    tensor, (output,), trail = call.args[0], call.outputs, trails[id(call.args[0])]
    dim = trail.dim + output.ndim - tensor.ndim
    if output.shape[dim] != tensor.shape[trail.dim]:
        raise Ended("they are repeated")
    return [Trail(trail.sources, dim)]


def _repeat_interleave(trails: Trails, call: FunctionCall) -> list[Trail]:
    """Each feature beside its copies: shards of the result are made from shards."""
    if call.argument(2, "dim") is None:
        raise Ended("they are flattened and repeated")
    return [trails[id(call.args[0])]]


def _concatenate(trails: Trails, call: FunctionCall) -> list[Trail]:
    given = call.args[0] if call.args else call.kwargs["tensors"]
    # A cache that is still empty adds nothing.
    tensors = [t for t in given if t.numel() or id(t) in trails]
    dim = call.argument(1, "dim", 0)
    found = {trails[id(t)].dim if id(t) in trails else -1 for t in tensors}
    if len(found) != 1 or dim % tensors[0].ndim in found:
        raise Ended("they are joined with other features")
    sources = frozenset().union(*(trails[id(t)].sources for t in tensors))
    return [Trail(sources, found.pop())]


def _matmul(trails: Trails, call: FunctionCall) -> list[Trail]:
    """A product of one matrix for each head: both operands have the heads in front."""
    left, right = call.args
    both = [trails.get(id(left)), trails.get(id(right))]
    if both[0] is None or both[1] is None or both[0].dim != both[1].dim:
        raise Ended("they are multiplied with a whole matrix")
    if left.ndim != right.ndim or both[0].dim >= left.ndim - 2:
        raise Ended("they are summed over in a matrix product")
    return [Trail(both[0].sources | both[1].sources, both[0].dim)]


def _attention(trails: Trails, call: FunctionCall) -> list[Trail]:
    """Heads of queries, keys and values are in one dimension, before tokens and size."""
    named = [
        call.kwargs[name] for name in ("query", "key", "value") if name in call.kwargs
    ]
    parts = [*call.args[:3], *named][:3]
    found = [trails.get(id(part)) for part in parts]
    dims = {
        trail.dim - part.ndim for part, trail in zip(parts, found, strict=True) if trail
    }
    if None in found or dims != {-3}:
        raise Ended("attention needs the heads of queries, keys and values together")
    mask = call.argument(3, "attn_mask")
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        raise Ended("the attention mask is another for each head")
    sources = frozenset().union(*(trail.sources for trail in found if trail))
    return [Trail(sources, call.outputs[0].ndim - 3)]


def _reduce(trails: Trails, call: FunctionCall) -> list[Trail]:
    tensor, trail = call.args[0], trails[id(call.args[0])]
    given: Any = call.argument(1, "dim")
    if type(given) not in (int, tuple, list) or given in ((), []):
        raise Ended("they are summed up")
    dims = [d % tensor.ndim for d in ([given] if isinstance(given, int) else given)]
    if trail.dim in dims:
        raise Ended("they are summed up")
    is_kept = call.outputs[0].ndim == tensor.ndim
    dropped = 0 if is_kept else sum(dim < trail.dim for dim in dims)
    return [Trail(trail.sources, trail.dim - dropped)] * len(call.outputs)


def _normalise(trails: Trails, call: FunctionCall) -> list[Trail]:
    """Each slice of the last dimensions by itself."""
    tensor, trail = call.args[0], trails[id(call.args[0])]
    if trail.dim >= tensor.ndim - len(call.argument(1, "normalized_shape")):
        raise Ended("they are normalised together")
    return [trail]


def _same(trails: Trails, call: FunctionCall) -> list[Trail]:
    """The features stay where they are."""
    return [trails[id(call.args[0])]]


def _complex(trails: Trails, call: FunctionCall) -> list[Trail]:
    """Only the last dimension changes."""
    trail = trails[id(call.args[0])]
    if trail.dim == call.args[0].ndim - 1:
        raise Ended("they are turned into parts of complex numbers")
    return [trail]


_ELEMENTWISE = """
    __add__ __and__ __eq__ __ge__ __gt__ __iadd__ __imul__ __invert__ __isub__ __le__
    __lt__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rmul__ __rpow__ __rsub__
    __rtruediv__ __sub__ __truediv__ abs add add_ clamp cos div div_ dropout elu eq erf
    exp ge gelu gt hardswish le leaky_relu log logical_and logical_not logical_or lt
    masked_fill masked_fill_ maximum minimum mish mul mul_ ne neg pow relu relu6 relu_
    rsqrt rsub sigmoid silu sin softplus sqrt square sub sub_ tanh true_divide where
""".split()
_CONVERSIONS = """
    bfloat16 bool clone contiguous detach double float half requires_grad_ to type
    type_as
""".split()
SPLITS = ("chunk", "split", "tensor_split")
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_CONVERSIONS, _same),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape
    ),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    "permute": _permute,
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _along),
    **dict.fromkeys(SPLITS, _split),
    "__getitem__": _index,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("cat", "concat"), _concatenate),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(("amax", "amin", "mean", "sum"), _reduce),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalise),
}

OUTPUT = "they are an output of the model"
# Functions at the end of a model that need all features, as its caller does.
_LOSSES = frozenset(
    {
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy"),
        *("gaussian_nll_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss"),
        *("multilabel_soft_margin_loss", "nll_loss", "smooth_l1_loss"),
    }
)


@dataclass(frozen=True, slots=True)
class Flow:
    """What a run has shown.

    Attributes:
        linears: Paths of the Linears that were called, in order.
        embeddings: Paths of the Embeddings that were called, in order.
        fed_by: For each Linear, the Linears whose features it reads, one entry a call;
            empty for a call on something else.
        ends: For each Linear, why its features are needed whole somewhere.
        fused: For each Linear whose output features are split, the sizes of the parts.
        added: For each Linear, those whose features are combined with its own, one by one.
        summed: Modules whose parameters are used on features that may be shards, so that
            their gradients are sums over ranks: the Linears, and the dimension from the
            back.
        gaps: Torch functions that got a tensor from something that is not one, such as
            a scripted function, through which nothing can be followed.
    """

    linears: dict[str, None] = field(default_factory=dict)
    embeddings: dict[str, None] = field(default_factory=dict)
    fed_by: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)
    fused: dict[str, tuple[int, ...]] = field(default_factory=dict)
    added: dict[str, set[str]] = field(default_factory=dict)
    summed: dict[str, Trail] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


def follow(model: nn.Module, inputs: Inputs) -> Flow:
    """Run the model on shapes and follow the features of its Linears.

    Raises:
        NotRunnableError: The model needs values to run.
    """
    recording = record(model, inputs)
    follower = _Follower(model, recording)
    for call in recording.function_calls:
        follower.pass_on(call)
    for tensor in _torch.leaves_of(torch.Tensor, recording.output):
        follower.end(follower.trails.get(id(tensor)), OUTPUT)
    for path in follower.flow.fused.keys() & follower.unsplit.keys():
        name = follower.unsplit[path]
        reason = f"they are split into parts, and used as a whole by {name}"
        follower.end(Trail(frozenset({path}), -1), reason)
    return follower.flow


def _owners(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    is_owner: Callable[[nn.Module], bool],
) -> dict[int, str]:
    """The path of the module of a kind that owns each weight."""
    return {
        id(state[f"{path}.weight" if path else "weight"]): path
        for path, module in model.named_modules()
        if is_owner(module)
    }


def is_plain_linear(module: nn.Module) -> bool:
    """Whether its class is one whose forward is known."""
    return linear_form(module) is not None and (
        type(module) is nn.Linear or not isinstance(module, nn.Linear)
    )


class _Follower:
    """Passes trails from the inputs of each torch function to its outputs."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        state = recording.state
        self.flow = Flow()
        self.trails: dict[int, Trail] = {}
        self.unsplit: dict[str, str] = {}
        self._linears = _owners(model, state, is_plain_linear)
        self._embeddings = _owners(
            model, state, lambda part: isinstance(part, nn.Embedding)
        )
        self._modules = dict(model.named_modules())
        names = [path for path, _ in model.named_parameters()]
        self._parameters = {id(state[path]): path for path in names}
        # Tensors computed from parameters alone, with one of them.
        self._computed = dict(self._parameters)
        self._activations = {id(tensor) for tensor in recording.inputs}
        self._known = {id(tensor) for tensor in state.values()}

    def pass_on(self, call: FunctionCall) -> None:
        """Give the outputs of a call the trails that follow from its inputs."""
        for tensor in call.inputs:
            # A gradient history that no observed torch function made.
            if tensor.requires_grad and id(tensor) not in self._known:
                self._known.add(id(tensor))
                self.flow.gaps.append(call.name)
        if not call.outputs:
            return
        self._known |= set(map(id, call.outputs))
        self._note_computed(call)
        if call.func is F.linear:
            self._linear(call.outputs[0], *call.args, **call.kwargs)
        elif call.func is torch.addmm and id(call.args[2]) in self._linears:
            self._linear(call.outputs[0], call.args[1], call.args[2])
        elif call.func is F.embedding:
            self._embedding(*call.args, **call.kwargs)
        else:
            self._apply(call)

    def _note_computed(self, call: FunctionCall) -> None:
        """Tell what is computed from parameters alone from what comes from the inputs."""
        is_layer = call.func in (F.linear, F.embedding)
        if is_layer or any(id(t) in self._activations for t in call.inputs):
            self._activations |= set(map(id, call.outputs))
            return
        paths = [self._computed[id(t)] for t in call.inputs if id(t) in self._computed]
        if paths:
            self._computed |= dict.fromkeys(map(id, call.outputs), paths[0])

    def _linear(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: Any = None,
    ) -> None:
        trail = self.trails.get(id(input))
        path = self._linears.get(id(weight))
        if path is None:
            self.end(
                trail,
                f"they are multiplied with {self._name(weight)}, which no nn.Linear owns",
            )
            return
        if trail is not None and trail.dim != input.ndim - 1:
            self.end(
                trail, f"'{path}' reads them in dimension {trail.dim}, not the last"
            )
            trail = None
        self.flow.linears[path] = None
        sources = frozenset() if trail is None else trail.sources
        self.flow.fed_by.setdefault(path, []).append(sources)
        self.trails[id(output)] = Trail(frozenset({path}), output.ndim - 1)

    def _embedding(
        self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        path = self._embeddings.get(id(weight))
        if path is not None:
            self.flow.embeddings[path] = None

    def _apply(self, call: FunctionCall) -> None:
        trails = [self.trails[id(t)] for t in call.inputs if id(t) in self.trails]
        if not trails:
            return
        try:
            passed = self._apply_rule(call)
        except Ended as end:
            for trail in trails:
                self.end(trail, str(end))
            for tensor in call.outputs:  # written in place: it had a trail before
                self.trails.pop(id(tensor), None)
            return
        for path in passed[0].sources if call.name in _ELEMENTWISE else ():
            self.flow.added.setdefault(path, set()).update(passed[0].sources - {path})
        pairs = zip(call.outputs, passed, strict=True)
        self.trails |= {id(tensor): trail for tensor, trail in pairs}

    def _apply_rule(self, call: FunctionCall) -> list[Trail]:
        used = [self._computed[id(t)] for t in call.inputs if id(t) in self._computed]
        try:
            passed = self._follow_rule(call)
            for path in used:
                self._sum(path, call, passed)
        except Ended:
            if not used:
                raise
            raise Ended(f"the parameter '{used[0]}' is used on them") from None
        for tensor in call.inputs:
            is_followed = id(tensor) in self.trails or id(tensor) in self._computed
            if tensor.requires_grad and not is_followed:
                raise Ended(
                    f"{call.name} combines them with a tensor whose gradient would be one "
                    "rank's part"
                )
        return passed

    def _sum(self, path: str, call: FunctionCall, passed: list[Trail]) -> None:
        """Note that the gradient of a parameter is a sum over the ranks with features."""
        owner, _, name = path.rpartition(".")
        module = self._modules[owner]
        if not module.get_parameter(name).requires_grad:
            return
        is_leaf = next(module.children(), None) is None
        if not owner or not is_leaf or path in self._linears.values():
            raise Ended("no style adds up its gradient")
        (trail,), (output,) = passed, call.outputs
        known = self.flow.summed.get(owner, trail)
        self.flow.summed[owner] = Trail(
            known.sources | trail.sources, trail.dim - output.ndim
        )

    def _follow_rule(self, call: FunctionCall) -> list[Trail]:
        rule = RULES.get(call.name)
        if rule is None:
            if call.name in _LOSSES:
                raise Ended(OUTPUT)
            raise Ended(
                f"the torch function {call.name} is applied, for which no rule is known"
            )
        try:
            if call.name in SPLITS and self._split(call):
                return [self.trails[id(call.args[0])]] * len(call.outputs)
            if rule not in (_reshape, _same):
                self._note_unsplit(call)
            return rule(self.trails, call)
        except (IndexError, KeyError, TypeError, ValueError):
            # Torch functions have many signatures; a rule knows the usual ones.
            raise Ended(
                f"{call.name} is applied in a way for which no rule is known"
            ) from None

    def _note_unsplit(self, call: FunctionCall) -> None:
        """Note Linears all of whose output features a function takes together."""
        for tensor in call.inputs:
            trail = self.trails.get(id(tensor))
            for path in trail.sources if trail is not None else ():
                form = linear_form(self._modules[path])
                if form is not None and tensor.shape[-1] == form.outside:
                    self.unsplit[path] = call.name

    def _split(self, call: FunctionCall) -> bool:
        """Note a split of features into the parts of a fused projection."""
        tensor, trail = call.args[0], self.trails[id(call.args[0])]
        dim = call.argument(2, "dim", 0) % tensor.ndim
        if dim != trail.dim:
            return False
        sizes = tuple(part.shape[dim] for part in call.outputs)
        forms = {path: linear_form(self._modules[path]) for path in trail.sources}
        is_whole = all(form and form.outside == sum(sizes) for form in forms.values())
        known = {self.flow.fused.setdefault(path, sizes) for path in trail.sources}
        if (
            len(forms) != 1
            or not is_whole
            or dim != tensor.ndim - 1
            or known != {sizes}
        ):
            raise Ended("they are split into parts in more than one way")
        return True

    def end(self, trail: Trail | None, reason: str) -> None:
        """Note that the features of a trail are needed whole."""
        for path in trail.sources if trail is not None else ():
            reasons = self.flow.ends.setdefault(path, [])
            if reason not in reasons:
                reasons.append(reason)

    def _name(self, weight: torch.Tensor) -> str:
        path = self._parameters.get(id(weight))
        return "a computed weight" if path is None else f"'{path}'"
