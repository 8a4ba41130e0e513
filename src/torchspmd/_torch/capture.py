"""Capture: fake tensors, symbols for numbers, tracing to a graph, functional form."""

import contextlib
import functools
import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import fx, nn
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.utils import _pytree as pytree

from torchspmd._torch.compilation import capturing
from torchspmd._torch.operators import (
    failures_not_logged,
    fused_updates_without_values,
)

# ----------------------------------------------------------------------------
# Recurrent layers: their CPU kernel in a graph, and what they hold of their weights.


def rnn_layer(*args: Any) -> Any:
    """``aten.mkldnn_rnn_layer`` that keeps what its backward reads.

    The kernel itself keeps it only where gradients are enabled, and a graph that has a
    backward in it runs where they are not.
    """
    _library()
    return torch.ops.torchspmd.rnn_layer.default(*args)


@functools.cache
def _library() -> torch.library.Library:
    """Made when it is needed first: an import registers nothing."""
    library = torch.library.Library("torchspmd", "FRAGMENT")
    schema = str(torch.ops.aten.mkldnn_rnn_layer.default._schema)
    library.define(schema.replace("aten::mkldnn_rnn_layer", "rnn_layer"))
    library.impl("rnn_layer", _run, "CompositeExplicitAutograd")
    fake = torch.ops.aten.mkldnn_rnn_layer.default
    torch.library.register_fake("torchspmd::rnn_layer", fake, lib=library)
    return library


def _run(*args: Any) -> Any:
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


@contextlib.contextmanager
def without_rnn_kernels() -> Iterator[None]:
    """Inside, recurrent layers are written out in plain operators."""
    native: Any = torch._C
    names = ("mkldnn", "cudnn")
    before = [getattr(native, f"_get_{name}_enabled")() for name in names]
    for name in names:
        getattr(native, f"_set_{name}_enabled")(False)
    try:
        yield
    finally:
        for name, enabled in zip(names, before, strict=True):
            getattr(native, f"_set_{name}_enabled")(enabled)


@contextlib.contextmanager
def keep_flat_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give recurrent layers their own lists of weights back, which every call renews."""
    kept = [
        (vars(layer), key, list(vars(layer)[key]))
        for layer in _layers(modules)
        for key in ("_flat_weights", "_flat_weight_refs")
        if key in vars(layer)
    ]
    try:
        yield
    finally:
        for table, key, weights in kept:
            table[key] = weights


def renew_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Give recurrent layers lists of the weights that they have now."""
    for layer in _layers(modules):
        weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        vars(layer)["_flat_weights"] = weights
        vars(layer)["_flat_weight_refs"] = [
            w if w is None else weakref.ref(w) for w in weights
        ]


def _layers(modules: Iterable[nn.Module]) -> list[nn.RNNBase]:
    return [m for root in modules for m in root.modules() if isinstance(m, nn.RNNBase)]


@functools.cache
def shape_mode() -> Any:
    """The mode of tensors that have shapes only; one, so that all of them go together."""
    from torchspmd._torch.operator_cache import CachingMode

    return CachingMode(allow_non_fake_inputs=True)


def _without_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees an operator."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return context


class FakeWorld:
    """Tensors without values and numbers without a value, for one capture."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        from torchspmd._torch.operator_cache import CachingMode

        self._environment: Any = ShapeEnv(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            duck_shape=False,  # sizes that are equal now may differ in another call
        )
        self.mode: Any = CachingMode(
            keep_collectives=True,
            shape_env=self._environment,
            static_shapes=True,
            allow_non_fake_inputs=False,
        )

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, strides, dtype and device, without values."""
        with _without_modes():  # one of them may make all tensors fake, its own way
            made: torch.Tensor | None = self.mode.stand_in(tensor)
            if made is not None:
                return made
            fake: torch.Tensor = self.mode.from_tensor(
                tensor.detach(), static_shapes=True
            )
            return fake.detach()

    def fake_batch(
        self, tensor: torch.Tensor, name: str, shape: tuple[int, ...], dims: Any
    ) -> torch.Tensor:
        """The same of another shape, with a symbol for the size of each of these dims."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import (
            DimDynamic,
            StatelessSymbolicContext,
        )

        sizes: list[Any] = [
            DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC
            for dim in range(tensor.ndim)
        ]
        with _without_modes():
            fake: torch.Tensor = self.mode.from_tensor(
                tensor.new_empty(shape),
                static_shapes=False,
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes),
                source=ConstantSource(name),
            )
            return fake.detach()

    def number(self, name: str, value: float) -> Any:
        """A symbol for a float or int that may change from run to run."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self._environment.create_unspecified_symbol(
            value, source=source, dynamic_dim=DimDynamic.DYNAMIC
        )
        if isinstance(value, int):
            return self._environment.create_symintnode(
                symbol, hint=value, source=source
            )
        return self._environment.create_symfloatnode(symbol, hint=value, source=source)

    def same_number(self, number: Any) -> Any:
        """Another number with the same symbol: both are taken to be always equal."""
        from torch._dynamo.source import ConstantSource

        symbol, hint = symbol_of(number), number.node.hint
        make = self._environment.create_symfloatnode
        if isinstance(number, torch.SymInt):
            make = self._environment.create_symintnode
        return make(symbol, hint=hint, source=ConstantSource(str(symbol)))

    def is_true(self, number: Any) -> bool:
        """Whether a number is not 0, which is assumed from now on."""
        import sympy  # type: ignore[import-untyped]

        is_other = sympy.Ne(symbol_of(number), 0)
        return bool(self._environment.evaluate_expr(is_other))

    @contextlib.contextmanager
    def reading_values(self) -> Iterator[None]:
        """Let ``item()`` give a symbol inside; outside it fails."""
        before = self.mode.allow_scalar_outputs
        self.mode.allow_scalar_outputs = True
        try:
            yield
        finally:
            self.mode.allow_scalar_outputs = before

    def assumptions(self) -> tuple[Any, ...]:
        """What the trace assumed about the numbers, as expressions over their symbols."""
        return tuple(guard.expr for guard in self._environment.guards)

    def ranges(self, symbols: Iterable[Any]) -> tuple[Any, ...]:
        """What is assumed about sizes all along: that they are not 0 or 1, for one."""
        import sympy

        found = [(symbol, self._environment.var_to_range[symbol]) for symbol in symbols]
        lower = [sympy.Ge(symbol, bounds.lower) for symbol, bounds in found]
        upper = [
            sympy.Le(symbol, bounds.upper)
            for symbol, bounds in found
            if isinstance(bounds.upper, sympy.Integer)
        ]
        return tuple(
            each for each in (*lower, *upper) if isinstance(each, sympy.core.Rel)
        )


def symbol_of(number: Any) -> Any:
    """The symbol that stands for a number of ``FakeWorld.number``; None for a tensor."""
    # A symbol that was fixed to one value shows that value as its expression.
    return None if isinstance(number, torch.Tensor) else number.node._expr


def is_symbol(number: Any) -> bool:
    """Whether a number is not known yet, and was not fixed to a value since."""
    is_symbolic = isinstance(number, (torch.SymInt, torch.SymFloat))
    return is_symbolic and not number.node.expr.is_number


def holds(expression: Any, values: Mapping[Any, float]) -> bool:
    """Whether an assumption is true for these values of its symbols.

    An assumption over other symbols (values that are only known inside the step) cannot be
    decided here and is taken as true: torch refuses to branch on those.
    """
    import sympy

    if not expression.free_symbols <= set(values):
        return True
    numbers = {
        symbol: sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)
        for symbol, value in values.items()
    }
    return bool(expression.xreplace(numbers))


def sizes_from_inputs(
    graph: fx.Graph, sizes: Mapping[Any, tuple[fx.Node, int]]
) -> None:
    """Compute each symbolic number from the sizes of inputs, in front of all operators.

    The tracer reads sizes from whatever tensor has them, which would keep that tensor in
    memory. What is known about values becomes concrete: the sizes that were traced with.

    Args:
        graph: A traced graph.
        sizes: For the symbol of each size, the input that has it, and the dim.
    """
    made: dict[Any, fx.Node] = {}
    read: dict[Any, fx.Proxy] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if (
            isinstance(value, (torch.SymInt, torch.SymFloat))
            and node.op != "placeholder"
        ):
            expression = value.node.expr
            if expression.free_symbols <= sizes.keys():
                if expression not in made:
                    with graph.inserting_before(first):
                        made[expression] = _computed(
                            graph, expression, sizes, node, read
                        )
                node.replace_all_uses_with(made[expression])
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function":
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                graph.erase_node(node)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _concrete(node.meta["val"])


def _computed(
    graph: fx.Graph,
    expression: Any,
    sizes: Mapping[Any, tuple[fx.Node, int]],
    like: fx.Node,
    read: dict[Any, fx.Proxy],
) -> fx.Node:
    """A node for the value of an expression over sizes of inputs."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    before = set(graph.nodes)
    for symbol in sorted(expression.free_symbols - read.keys(), key=str):
        node = graph.call_function(torch.ops.aten.sym_size.int, sizes[symbol])
        read[symbol] = fx.Proxy(node)
    result = sympy_interp(PythonReferenceAnalysis, read, expression)
    made: Any = result.node if isinstance(result, fx.Proxy) else result
    for node in graph.nodes:
        if node not in before:
            args = fx.node.map_arg(node.args, lambda arg: arg.meta["val"])
            node.meta.update(like.meta)
            is_size = node.target is torch.ops.aten.sym_size.int
            node.meta["val"] = (
                _hint(args[0].shape[args[1]]) if is_size else node.target(*args)
            )
    if not isinstance(made, fx.Node):
        raise NotImplementedError(f"{expression} is no number of the inputs")
    return made


def _concrete(value: Any) -> Any:
    """What is known about a value, with the sizes that were traced with."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_concrete, value))
    if isinstance(value, torch.SymInt) and value.node.hint is not None:
        return int(value.node.hint)
    if not isinstance(value, torch.Tensor) or not _has_symbolic_size(value):
        return value
    shape, stride = ([_hint(n) for n in each] for each in (value.shape, value.stride()))
    mode: Any = getattr(value, "fake_mode")  # noqa: B009 - only fake tensors have it
    with mode:
        return torch.empty_strided(
            shape, stride, dtype=value.dtype, device=value.device
        )


def propagate_shapes(graph: fx.GraphModule, inputs: list[Any]) -> dict[fx.Node, Any]:
    """The shapes of what each node makes of inputs like these, which are not read."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode: Any = FakeTensorMode(
        shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True
    )
    fakes = [
        mode.from_tensor(each.detach(), static_shapes=True)
        if isinstance(each, torch.Tensor)
        else each
        for each in inputs
    ]
    found: dict[fx.Node, Any] = {}

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            found[n] = shapes_of(made)
            return made

    with mode, _missing_kernels(), torch.no_grad():
        Run(graph).run(*fakes, enable_io_processing=False)
    return found


def shapes_of(value: Any) -> Any:
    """The shape of a tensor, or of each tensor of a list; () for numbers."""
    if isinstance(value, (tuple, list)):
        return [shapes_of(each) for each in value]
    return list(value.shape) if isinstance(value, torch.Tensor) else ()


def _has_symbolic_size(tensor: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))


def _hint(number: Any) -> int:
    return int(number.node.hint if isinstance(number, torch.SymInt) else number)


def trace(function: Callable[..., Any], inputs: list[Any]) -> fx.GraphModule:
    """The operators that ``function(*inputs)`` calls, as a graph with flat inputs."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    with (
        capturing(),
        failures_not_logged(),
        _without_constant_values(),
        _quick_powers(),
        _quick_nodes(),
        _missing_kernels(),
        _use_lazy_graph_module(True),
    ):
        run = _with_cached_casts(function)
        return make_fx(run, decomposition_table=_decompositions())(*inputs)


def _with_cached_casts(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with autocast's cache of weights as eager has it; a tracer turns it off.

    A weight that is used twice is cast once, and its gradients are added before they are
    cast back.
    """
    is_enabled = torch.is_autocast_cache_enabled()

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        torch.set_autocast_cache_enabled(is_enabled)  # the tracer sets it back
        return function(*args)

    return run


@contextlib.contextmanager
def _quick_powers() -> Iterator[None]:
    """Skip the proof that a symbol is not negative before it is raised to a power.

    It takes a quarter of the time to trace Adam, which raises its betas to the step
    count for each parameter; a run works on real numbers and needs no proof.
    """
    symbolic: Any = torch.SymFloat
    before = symbolic.__pow__
    symbolic.__pow__ = symbolic.__float_pow__
    try:
        yield
    finally:
        symbolic.__pow__ = before


class _WithoutSymbolSearch:
    """The tree functions of ``torch.fx``, without a walk through each node's arguments.

    It looks for symbols that are no nodes, to warn of them; a tracer makes nodes of all.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(pytree, name)

    @staticmethod
    def tree_iter(_: Any) -> tuple[()]:
        return ()


@contextlib.contextmanager
def _quick_nodes() -> Iterator[None]:
    """Leave out what a tracer does for each node and nobody here needs.

    Together a fifth of the time to trace a step: a walk through all arguments, a second
    description of each tensor beside ``meta["val"]``, and a search of all base classes.
    What ``meta["val"]`` gets is made as the mode of a ``FakeWorld`` makes its tensors.
    """
    from torch.fx.experimental import proxy_tensor

    opaque: Any = sys.modules.get("torch._library.opaque_object")
    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (torch.fx.graph, "pytree", lambda _: _WithoutSymbolSearch()),
        (proxy_tensor, "_extract_tensor_metadata", lambda _: lambda value: None),
        (opaque, "_resolve_opaque_type_info", functools.cache),
        (proxy_tensor, "snapshot_fake", _quick_snapshots),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, change in changes:
            if hasattr(owner, name):  # not in all versions
                before = getattr(owner, name)
                stack.callback(setattr, owner, name, before)
                setattr(owner, name, change(before))
        yield


def _quick_snapshots(slow: Callable[..., Any]) -> Callable[..., Any]:
    from torchspmd._torch.operator_cache import CachingMode

    def snapshot(value: Any, include_real: bool = False) -> Any:
        mode = getattr(value, "fake_mode", None)
        made = mode.snapshot(value) if isinstance(mode, CachingMode) else None
        return slow(value, include_real) if made is None else made

    return snapshot


@contextlib.contextmanager
def _missing_kernels() -> Iterator[None]:
    """Kernels for tensors without values that torch does not have, or not for any size."""
    with (
        fused_updates_without_values(),
        torch.library._scoped_library("aten", "IMPL", "Meta") as library,
    ):
        library.impl("constant_pad_nd", _padded)
        yield


def _padded(x: torch.Tensor, pad: list[Any], value: Any = 0) -> torch.Tensor:
    """Torch's own kernel takes sizes for numbers, and pads with them."""
    from torch._prims_common import suggest_memory_format

    shape = list(x.shape)
    for place in range(len(pad) // 2):
        shape[-1 - place] += pad[2 * place] + pad[2 * place + 1]
    form = suggest_memory_format(x)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


def lazy_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph with the tensors of a module; its code is made when it is asked for."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


@contextlib.contextmanager
def _without_constant_values() -> Iterator[None]:
    """Keep the tracer from computing with the values of one-element constants.

    A counter that starts at zero and is multiplied by a symbol would become NaN, without
    a word, and ``item()`` on it would be baked in.
    """
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import proxy_tensor

    modules: tuple[Any, ...] = (fake_tensor, proxy_tensor)
    before = [module.CONSTANT_NUMEL_LIMIT for module in modules]
    for module in modules:
        module.CONSTANT_NUMEL_LIMIT = -1
    try:
        yield
    finally:
        for module, limit in zip(modules, before, strict=True):
            module.CONSTANT_NUMEL_LIMIT = limit


def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {
        torch.ops.aten.native_batch_norm.default: _batch_norm_that_says_it_writes,
        torch.ops.aten.mkldnn_rnn_layer.default: rnn_layer,
    }


def _batch_norm_that_says_it_writes(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: Any
) -> Any:
    # The plain operator writes its running statistics but its schema does not say so,
    # and a functional form would lose them.
    legit = torch.ops.aten._native_batch_norm_legit
    if mean is None and var is None:
        return legit.no_stats(x, weight, bias, *options)
    return legit.default(x, weight, bias, mean, var, *options)


def decomposition(operator: Any) -> Callable[..., Any] | None:
    """Torch's own account of an operator in simpler ones; None where there is none."""
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(operator)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if found is None and operator.has_kernel_for_dispatch_key(composite):
        return cast("Callable[..., Any]", operator.decompose)
    return found


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without operators that write into a tensor."""
    made: Callable[..., Any] = torch.func.functionalize(function, remove="mutations")
    return made


def current_graph() -> fx.Graph | None:
    """The graph that is being traced into now."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def operator_of_unknown_size(error: BaseException | None) -> str | None:
    """The operator whose result has a size that depends on values, where that failed."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    while error is not None:
        if isinstance(error, DynamicOutputShapeException):
            return str(error.func)
        error = error.__cause__ or error.__context__
    return None


def data_dependence_errors() -> tuple[type[Exception], ...]:
    """What torch raises when a trace would have to know a tensor's value."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, in few kernel launches."""
    torch._foreach_copy_(targets, sources)


def compile_with_inductor(
    graph: fx.GraphModule, inputs: list[Any]
) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
    """The graph compiled ahead by torch's own compiler, and what its cache gave.

    What is returned takes a list of the inputs and empties it. A cache that cannot be used
    costs time, and nothing else.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    inputs = _distinct(inputs)
    before = dict(counters["inductor"])
    try:
        made = _compile_boxed(graph, inputs)
    except Exception as error:
        # It may be a broken file in the cache: once more, without it.
        try:
            with fresh_cache():
                made = _compile_boxed(graph, inputs)
        except Exception:
            raise error from None
        return made, "its cache could not be used, compiled without it"
    hits, misses = (
        counters["inductor"][key] - before.get(key, 0)
        for key in ("fxgraph_cache_hit", "fxgraph_cache_miss")
    )
    if hits:
        return made, "compiled code from its cache"
    return (
        made,
        "compiled anew, kept in its cache" if misses else "compiled, not cached",
    )


# Operations that Inductor computes in one kernel before it stores a value in between; its
# own limit for a GPU is 30. A loss with its gradient has 32, and what is stored then is as
# large as the logits, in float32.
_MOST_INLINED = 60


def _compile_boxed(
    graph: fx.GraphModule, inputs: list[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor's own code without the wrapper around it, where that would do nothing.

    The wrapper gives outputs that are views of inputs their history. It holds all inputs
    until the end, and takes longer than a small kernel.
    """
    from torch._inductor import compile_fx, config

    (output,) = graph.graph.find_nodes(op="output")
    found: list[Callable[[list[Any]], Sequence[Any]]] = []

    def compile_inner(inner: fx.GraphModule, examples: Any, **options: Any) -> Any:
        made: Any = compile_fx.compile_fx_inner(inner, examples, **options)
        if _gives_the_same(inner, len(inputs), len(output.args[0])):
            found.append(made)
        return made

    inlining = config.patch(realize_opcount_threshold=_MOST_INLINED)
    with torch.no_grad(), inlining, _without_numbers(inputs):
        wrapped: Any = compile_fx.compile_fx(graph, inputs, inner_compile=compile_inner)
    if found:
        return found[-1]

    def run(args: list[Any]) -> Sequence[Any]:
        taken = tuple(args)
        args.clear()
        result: Sequence[Any] = wrapped(*taken)
        return result

    return run


@contextlib.contextmanager
def _without_numbers(inputs: list[Any]) -> Iterator[None]:
    """Inside, the examples know nothing of the numbers of the step that they are from.

    The compiler asks for constants in the place of all floats that are known where its
    examples are from, also of those that the graph does not get.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    modes = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mock.patch.object(mode, "shape_env", ShapeEnv()))
        yield


def _gives_the_same(inner: fx.GraphModule, num_inputs: int, num_outputs: int) -> bool:
    """Whether what Inductor gets takes and gives the same as the graph it was made of."""
    inputs = inner.graph.find_nodes(op="placeholder")
    (output,) = inner.graph.find_nodes(op="output")
    values = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    memory = {
        value.untyped_storage()._cdata
        for value in (node.meta.get("val") for node in inputs)
        if isinstance(value, torch.Tensor)
    }
    return (
        len(inputs) == num_inputs
        and len(values) == len(tensors) == num_outputs
        and not any(each.untyped_storage()._cdata in memory for each in tensors)
    )


def _distinct(inputs: list[Any]) -> list[Any]:
    """Example inputs none of which share memory.

    The compiler reads one input instead of two wherever their examples are one tensor: a
    learning rate and the one that the step before left would become the same number.
    """
    seen: set[int] = set()

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()._cdata
        if storage in seen:
            return value.new_empty_strided(value.shape, value.stride())
        seen.add(storage)
        return value

    return [apart(value) for value in inputs]


def has_symbols(graph: fx.GraphModule) -> bool:
    """Whether a graph computes with numbers that are not known yet."""
    return any(
        isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymInt, torch.SymBool))
        for node in graph.graph.nodes
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor, this rank's shard."""
    if type(tensor) in _PLAIN:  # asked for every tensor at every step
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def layout_of(tensor: torch.Tensor) -> Any:
    """The spec of a DTensor; None for a plain tensor."""
    return None if type(tensor) in _PLAIN else getattr(tensor, "_spec", None)


def form_check(
    tensors: Sequence[torch.Tensor],
) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A quick check whether plain tensors have the types and forms that these have now.

    Shapes, strides, dtypes, devices and whether they require gradients. It never says yes
    where one of them differs; under another autocast or in inference mode it says no.
    """
    kind: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if kind is None:
        return lambda now: False
    guards = kind(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    return lambda now: bool(guards.check(*now))


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators compute in the dtypes that they are given."""
    guard: Any = torch._C._DisableAutocast()
    return cast(contextlib.AbstractContextManager[Any], guard)


def autocast_state() -> tuple[Any, ...]:
    """Which device types have autocast on, and in which dtype."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose when it is called."""
    allowed: Any = torch.backends.cuda
    return (
        allowed.flash_sdp_enabled(),
        allowed.mem_efficient_sdp_enabled(),
        allowed.math_sdp_enabled(),
        allowed.cudnn_sdp_enabled(),
    )


def function_modes() -> tuple[Any, ...]:
    """The modes that see functions of torch: their classes, and plain data in them.

    ``torch.set_default_device`` and ``with torch.device(...)`` are such modes.
    """
    count = torch._C._len_torch_function_stack()
    return tuple(_mode_fact(torch._C._get_function_stack_at(n)) for n in range(count))


def saved_tensor_hooks() -> tuple[Any, ...]:
    """The code of the innermost hooks on tensors that are saved for backward."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return tuple(getattr(each, "__code__", type(each)) for each in found or ())


def _mode_fact(mode: Any) -> tuple[Any, ...]:
    plain = (bool, int, float, str, torch.device, torch.dtype)
    own = sorted(vars(mode).items())
    return (
        type(mode),
        *((key, str(value)) for key, value in own if isinstance(value, plain)),
    )


def sum_over(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of a tensor over the ranks of a group, as two traceable operators."""
    started = torch.ops._c10d_functional.all_reduce.default(
        tensor, "sum", group.group_name
    )
    total: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return total


# ----------------------------------------------------------------------------
# The gradient scaler of mixed precision: its tensors, and the step it may skip.

_TENSORS = ("_scale", "_growth_tracker")

# (optimizer, number of infinities found, what makes the step) -> what the step returned
ChosenStep = Callable[[torch.optim.Optimizer, torch.Tensor, Callable[[], Any]], Any]


def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What an optimizer of torch keeps for a parameter before its first update.

    Empty for other optimizers, and for those that make their state in the update itself.
    """
    kind = type(optimizer)
    make: Any = getattr(kind, "_init_group", None)
    if make is None or not f"{kind.__module__}.".startswith("torch.optim."):
        return {}
    stand_in = parameter.detach()  # the user's keeps its own gradient
    stand_in.grad = torch.empty_like(stand_in)
    other: Any = object.__new__(kind)
    vars(other).update(vars(optimizer), state=defaultdict(dict))
    lists: list[list[Any]] = [[] for _ in inspect.signature(make).parameters][2:]
    # Options that contradict each other: the step itself tells, when it is traced.
    with contextlib.suppress(RuntimeError):
        make(other, {**group, "params": [stand_in]}, *lists)
    return dict(other.state.get(stand_in, {}))


def scaler_tensors(scaler: GradScaler, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a scaler by attribute; it makes them when it first scales a loss."""
    if not scaler.is_enabled():
        return {}
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return {name: getattr(scaler, name) for name in _TENSORS}


def scaler_facts(scaler: GradScaler) -> tuple[Any, ...]:
    """What a program takes for granted about a scaler."""
    if not scaler.is_enabled():
        return (type(scaler).__name__, False)
    return (
        type(scaler).__name__,
        True,
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )


@contextlib.contextmanager
def choosing_steps(
    scaler: GradScaler, choose: ChosenStep
) -> Iterator[Callable[[], bool]]:
    """Let ``choose`` make the steps that a scaler would skip after reading a value.

    Gives a function that tells whether ``update`` has been called after the last step.
    """
    if not scaler.is_enabled():
        yield lambda: True
        return
    dynamic: Any = scaler
    before = scaler._per_optimizer_states

    def make(
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = torch.stack(list(state["found_inf_per_device"].values())).sum()
        return choose(optimizer, found, lambda: optimizer.step(*args, **kwargs))

    dynamic._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    dynamic._maybe_opt_step = make
    try:
        yield lambda: not scaler._per_optimizer_states
    finally:
        del dynamic._maybe_opt_step
        dynamic._per_optimizer_states = before
