"""Capture: fake tensors, symbols for numbers, tracing to a graph, functional form."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torchspmd._torch.compilation import capturing
from torchspmd._torch.fake_results import (
    failures_not_logged,
    fused_updates_without_values,
)
from torchspmd._torch.recurrent import rnn_layer


@functools.cache
def shape_mode() -> Any:
    """The mode of tensors that have shapes only; one, so that all of them go together."""
    from torchspmd._torch.operator_cache import CachingMode

    return CachingMode(allow_non_fake_inputs=True)


def _without_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees an operator."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


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
        """What is always assumed about sizes, such as that they are not 0 or 1."""
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

    It looks for symbols without a node, to warn of them; a tracer makes nodes of all.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(pytree, name)

    @staticmethod
    def tree_iter(_: Any) -> tuple[()]:
        return ()


@contextlib.contextmanager
def _quick_nodes() -> Iterator[None]:
    """Skip work that a tracer does for each node and that is not needed here.

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
    """Meta kernels that torch lacks, or has for some sizes only."""
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
    """Torch's decomposition of an operator into simpler ones; None where there is none."""
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(operator)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if found is None and operator.has_kernel_for_dispatch_key(composite):
        return operator.decompose
    return found


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without operators that write into a tensor."""
    return torch.func.functionalize(function, remove="mutations")


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


def has_symbols(graph: fx.GraphModule) -> bool:
    """Whether a graph computes with numbers that are not known yet."""
    return any(
        isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymInt, torch.SymBool))
        for node in graph.graph.nodes
    )


def sum_over(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of a tensor over the ranks of a group, as two traceable operators."""
    started = torch.ops._c10d_functional.all_reduce.default(
        tensor, "sum", group.group_name
    )
    return torch.ops._c10d_functional.wait_tensor.default(started)
