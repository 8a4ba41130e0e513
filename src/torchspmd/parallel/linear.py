"""Column-wise and row-wise: ``nn.Linear``, ``nn.Embedding`` and ``Conv1D`` on shards.

One autograd function for the whole Linear keeps host time low and lets the sum of the
input's gradient travel while the weight's gradient is computed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.layout.shards import shard_bounds, shard_size
from torchspmd.parallel.dispatch import run_on_dtensors
from torchspmd.parallel.parameters import (
    describe_computed,
    local_shard,
    local_shards,
    place_parameter,
    unwrap_parameter,
    wrap_gradient,
    wrong_shard,
)
from torchspmd.parallel.redistribute import (
    begin_backward,
    change_layout,
    finish_reduce,
    move,
    start_reduce,
    take_shard,
)
from torchspmd.parallel.route import (
    Route,
    RoutedModule,
    Steps,
    Value,
    build_route,
    check_tensor,
    enter,
    enter_features,
    leave,
)
from torchspmd.parallel.style import (
    Place,
    PlacedStyle,
    StyleLayouts,
    describe_placed,
    one_layout,
)


class LinearForm(NamedTuple):
    """The sizes of a layer that multiplies by a matrix.

    Attributes:
        inside: Its input features.
        outside: Its output features.
        transposed: Its weight is (input, output), as in the ``Conv1D`` of GPT-2.
    """

    inside: int
    outside: int
    transposed: bool = False

    @property
    def output_dim(self) -> int:
        """The dimension of the weight that holds the output features."""
        return 1 if self.transposed else 0


def linear_form(module: nn.Module) -> LinearForm | None:
    """The sizes of a Linear, or of the ``Conv1D`` of transformers; None for others."""
    if isinstance(module, nn.Linear):
        return LinearForm(module.in_features, module.out_features)
    if isinstance(module, LocalConv1D) or _is_conv1d(module):
        inside, outside = module.get_parameter("weight").shape
        return LinearForm(inside, outside, transposed=True)
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """By its name: transformers need not be there."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


class _OnShards(RoutedModule):
    """A layer that multiplies by a matrix, whose forward runs on shards."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    transposed: ClassVar[bool] = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output in the layout that its style asks for."""
        route = self.route
        check_tensor(input, route)
        if torch.compiler.is_compiling() or isinstance(input, DTensor):
            return self._forward(input)
        call = route.calls.get(input.shape)
        if call is None:
            return self._forward(input)
        # The usual way: a plain tensor of a shape that was checked before.
        output: torch.Tensor = _LocalLinear.apply(input, self.weight, self.bias, call)
        return leave(output, route, call.steps, call.shape)

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        route = self.route
        steps = route.steps(input.ndim, input.ndim)
        value = enter_features(input, route, steps, self.in_features)
        shape = (*value.shape[:-1], self.out_features)
        call = LinearCall(route, steps, value, shape, self.transposed)
        if torch.compiler.is_compiling():
            output = _traceable(self, value, call)
        else:
            if not isinstance(input, DTensor):
                route.remember(input.shape, call)
            output = _LocalLinear.apply(value.tensor, self.weight, self.bias, call)
        return leave(output, route, steps, shape)


class LocalLinear(_OnShards, nn.Linear):  # type: ignore[misc]
    """A Linear whose parameters are DTensors and whose forward runs on shards.

    ``parallelize_module`` turns an ``nn.Linear`` into one; it is not built by hand.
    """


class LocalConv1D(_OnShards):
    """The same for the ``Conv1D`` of transformers, whose weight is (input, output)."""

    transposed = True

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """The features that it reads."""
        return self.weight.size(0)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """The features that it makes."""
        return self.weight.size(1)

    def extra_repr(self) -> str:
        """The layer's sizes and its style."""
        return f"nf={self.out_features}, nx={self.in_features}, {self.route}"


class LinearCall:
    """What forward and backward of one call of a Linear need besides tensors."""

    __slots__ = (
        "axis",
        "bias_shape",
        "input_gradient",
        "input_layout",
        "input_shape",
        "route",
        "shape",
        "steps",
        "transposed",
        "weight_shape",
    )

    def __init__(
        self,
        route: Route,
        steps: Steps,
        value: Value,
        shape: tuple[int, ...],
        transposed: bool,
    ) -> None:
        self.route = route
        self.axis = route.axis
        self.steps = steps
        self.input_layout = value.layout
        self.input_gradient = value.gradient
        self.input_shape = value.shape
        self.shape = shape
        self.transposed = transposed
        self.weight_shape, self.bias_shape = _shard_shapes(
            route, value.shape[-1], shape[-1]
        )
        if transposed:
            self.weight_shape = self.weight_shape[::-1]

    def check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raise for parameters that were replaced by ones in another layout."""
        if weight.shape != self.weight_shape:
            raise wrong_shard(self.route.where, "weight", weight, self.weight_shape)
        if bias is not None and bias.shape != self.bias_shape:
            raise wrong_shard(self.route.where, "bias", bias, self.bias_shape)


def _shard_shapes(
    route: Route, inside: int, outside: int
) -> tuple[tuple[int, int], tuple[int]]:
    """What this rank holds of the weight and of the bias."""
    axis = route.axis
    if type(route.computed) is Shard:
        rows = shard_size(outside, axis.size, axis.rank)
        return (rows, inside), (rows,)
    return (outside, shard_size(inside, axis.size, axis.rank)), (outside,)


class _LocalLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: LinearCall,
    ) -> torch.Tensor:
        ctx.call = call
        ctx.dtypes = None
        local_weight, ctx.weight_spec = unwrap_parameter(weight)
        assert local_weight is not None
        local_bias, ctx.bias_spec = unwrap_parameter(bias)
        call.check(local_weight, local_bias)
        if call.transposed:
            local_weight = local_weight.t()
        if _torch.is_autocast_enabled():
            ctx.dtypes = (input.dtype, local_weight.dtype)
            input, local_weight, local_bias = _autocast(input, local_weight, local_bias)
        steps, axis = call.steps, call.axis
        whole = move(
            input, call.input_layout, steps.desired_input, axis, call.input_shape
        )
        ctx.save_for_backward(whole, local_weight)
        if type(steps.computed) is Partial and axis.rank != 0:
            local_bias = None  # a replicated bias enters the sum once
        output = F.linear(whole, local_weight, local_bias)
        return move(output, steps.computed, steps.output, axis, call.shape, owned=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        steps, axis = call.steps, call.axis
        begin_backward(LocalLinear.__name__, gradient, axis)
        whole, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gradient = move(
            gradient, steps.output_gradient, steps.computed_gradient, axis, call.shape
        )
        rows = _rows(gradient)
        started = of_weight = of_bias = None
        if needs_input:
            started = _start_input_gradient(
                rows.mm(weight.conj()), gradient.shape, call
            )
        if needs_weight:
            read = _rows(whole).conj()
            of_weight = read.t().mm(rows) if call.transposed else rows.t().mm(read)
        if needs_bias:
            of_bias = rows.sum(0)
        of_input = None if started is None else _finish_input_gradient(started, call)
        if ctx.dtypes is not None:
            of_input, of_weight, of_bias = _cast_back(
                of_input, of_weight, of_bias, ctx.dtypes
            )
        of_weight = wrap_gradient(of_weight, ctx.weight_spec)
        return of_input, of_weight, wrap_gradient(of_bias, ctx.bias_spec), None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor.unsqueeze(0)


def _start_input_gradient(
    rows: torch.Tensor, shape: torch.Size, call: LinearCall
) -> torch.Tensor:
    """Start the sum of the input's gradient, if it is one."""
    gradient = rows
    if len(shape) != 2:
        gradient = rows.view(*shape[:-1], rows.size(-1))
    if type(call.steps.desired_input_gradient) is not Partial:
        return gradient
    return start_reduce(gradient, call.input_gradient, call.axis, owned=True)


def _finish_input_gradient(started: torch.Tensor, call: LinearCall) -> torch.Tensor:
    target, made = call.input_gradient, call.steps.desired_input_gradient
    if type(made) is Partial:
        return finish_reduce(started, target, call.axis, call.input_shape)
    return move(started, made, target, call.axis, call.input_shape)


def _cast_back(
    of_input: torch.Tensor | None,
    of_weight: torch.Tensor | None,
    of_bias: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients in the types that the operands had before autocast."""
    of_input = None if of_input is None else of_input.to(dtypes[0])
    of_weight = None if of_weight is None else of_weight.to(dtypes[1])
    return of_input, of_weight, None if of_bias is None else of_bias.to(dtypes[1])


def _autocast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What autocast does to a Linear's operands; the backward must see the same ones."""
    device = input.device.type
    if not torch.is_autocast_enabled(device):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(device)
    bias = None if bias is None else _cast(bias, dtype)
    return _cast(input, dtype), _cast(weight, dtype), bias


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor  # autocast leaves doubles alone
    return tensor.to(dtype)


def _traceable(module: _OnShards, value: Value, call: LinearCall) -> torch.Tensor:
    """The same layer in small differentiable parts, for torch.compile to trace."""
    axis, steps, shape = call.axis, call.steps, call.shape
    whole = change_layout(
        value.tensor,
        value.layout,
        steps.desired_input,
        axis,
        value.shape,
        gradient=steps.desired_input_gradient,
        leaving=value.gradient,
    )
    weight = local_shard(module.weight)
    call.check(weight, None)
    if call.transposed:
        weight = weight.t()
    if type(steps.computed) is Shard:
        (bias,) = local_shards([module.bias])
        output = F.linear(whole, weight, bias)
        return change_layout(output, steps.computed, steps.output, axis, shape)
    output = F.linear(whole, weight)
    output = change_layout(output, steps.computed, steps.output, axis, shape)
    if module.bias is None:
        return output
    return output + _traceable_bias(module, steps.output, output.ndim)


def _traceable_bias(module: _OnShards, wanted: Placement, ndim: int) -> torch.Tensor:
    axis = module.route.axis
    assert module.bias is not None
    if type(wanted) is Replicate:
        return local_shard(module.bias)
    bias = local_shard(module.bias, sum_over=axis)
    if type(wanted) is Partial:
        return bias if axis.rank == 0 else bias * 0
    is_last = type(wanted) is Shard and wanted.dim == ndim - 1
    return take_shard(bias, 0, axis) if is_last else bias


# ----------------------------------------------------------------------------
# ``nn.Embedding`` on this rank's columns or rows of the table.


class LocalEmbedding(RoutedModule, nn.Embedding):
    """An Embedding whose table is a DTensor and whose forward runs on its shard.

    ``parallelize_module`` turns an ``nn.Embedding`` into one; it is not built by hand.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of the table at these indices, in the layout of the style."""
        route = self.route
        check_tensor(input, route)
        steps = route.steps(input.ndim, input.ndim + 1)
        value = enter(input, route, steps)
        # Indices have no gradient, so their layout changes in one direction only.
        index = change_layout(
            value.tensor, value.layout, steps.desired_input, route.axis, value.shape
        )
        table = local_shard(self.weight)
        expected = _shard_shape(self)
        if table.shape != expected:
            raise wrong_shard(route.where, "weight", table, expected)
        if type(route.computed) is Shard:
            output = F.embedding(index, table, self.padding_idx)
        else:
            output = _look_up_rows(self, index, table)
        shape = (*value.shape, self.embedding_dim)
        output = change_layout(output, steps.computed, steps.output, route.axis, shape)
        return leave(output, route, steps, shape)


def _shard_shape(module: LocalEmbedding) -> tuple[int, int]:
    axis, rows, columns = module.route.axis, module.num_embeddings, module.embedding_dim
    if type(module.route.computed) is Shard:
        return rows, shard_size(columns, axis.size, axis.rank)
    return shard_size(rows, axis.size, axis.rank), columns


def _look_up_rows(
    module: LocalEmbedding, index: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """This rank's rows, and zeros where another rank holds the row."""
    axis, num_rows = module.route.axis, module.num_embeddings
    first, last = shard_bounds(num_rows, axis.size, axis.rank)
    length = last - first
    if length == 0:
        # An empty table has no row to look up; it still takes part in the sum.
        return table.new_zeros(*index.shape, module.embedding_dim) + table.sum()
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + length else None
    local = index - first
    elsewhere = (local < 0) | (local >= length)
    # A row number outside of the whole table must stay an error, as on one device.
    local = torch.where(elsewhere & (index >= 0) & (index < num_rows), 0, local)
    rows = F.embedding(local, table, padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def local_form(module: nn.Module) -> type[nn.Module] | None:
    """The class that computes this module on shards; None where DTensor must.

    A subclass or a replaced ``forward`` may do anything, so only the plain classes have
    a local form.
    """
    if "forward" in vars(module):
        return None
    if type(module) is nn.Linear:
        return LocalLinear
    if _is_conv1d(module):
        return LocalConv1D
    plain = isinstance(module, nn.Embedding) and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )
    return LocalEmbedding if plain and type(module) is nn.Embedding else None


# ----------------------------------------------------------------------------
# Column-wise and row-wise: Linears and Embeddings on shards of their parameters.


def _other_way(module: nn.Module) -> str:
    """What to write for a module that is no such layer."""
    inside = [
        name
        for name, part in module.named_modules()
        if linear_form(part) is not None or isinstance(part, nn.Embedding)
    ]
    if inside:
        shown = ", ".join(map(repr, inside[:4])) + (", ..." if len(inside) > 4 else "")
        return f"write the pattern of the layer inside of it ({shown})"
    if next(module.parameters(), None) is None:
        return "it has no parameters to cut"
    return (
        "its parameters are its own: ExpertParallel(parameter_placements={...}) cuts them "
        "where its forward makes partial values of them, ReplicateParallel() keeps it whole"
    )


@dataclass(frozen=True, kw_only=True)
class ShardedStyle(PlacedStyle):
    """What Colwise and Rowwise have in common."""

    input_layouts: Placement | tuple[Placement] | None = None
    output_layouts: Placement | tuple[Placement] | None = None
    use_local_output: bool = True

    _default_input: ClassVar[Placement]
    _default_output: ClassVar[Placement]

    def __post_init__(self) -> None:
        given, wanted = self.input_layouts, self.output_layouts
        given = one_layout(self, "input_layouts", given, self._default_input)
        wanted = one_layout(self, "output_layouts", wanted, self._default_output)
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "output_layouts", wanted)

    def _layouts(self, needed: Placement, made: Placement) -> StyleLayouts:
        given, wanted = self.input_layouts, self.output_layouts
        assert isinstance(given, tuple) and isinstance(wanted, tuple)
        return StyleLayouts(given, (needed,), made, wanted[0], self.use_local_output)

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only Linear and Embedding have rows and columns, and are cut only once."""
        if linear_form(module) is None and not isinstance(module, nn.Embedding):
            return [
                f"{type(self).__name__} currently only support nn.Linear and "
                f"nn.Embedding! This is a {type(module).__name__}; {_other_way(module)}"
            ]
        return describe_placed(module) + describe_computed(module)

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Shard the parameters and let the module compute on its shard."""
        for name, placement in self.parameter_layouts(module).items():
            place_parameter(module, name, placement, place.axis, place.src_data_rank)
        route = build_route(self, module, place)
        local = local_form(module)
        if local is None:
            run_on_dtensors(module, route)
        else:
            # The object stays the one that the model holds; its forward is another.
            module.__class__ = local
            module.route = route  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ShardedStyle):
    """Shard a Linear or an Embedding over its output features.

    The input is needed whole; each rank computes its part of the last dimension of the
    output. Forward sends nothing when the input is replicated and the output stays
    sharded; backward sums the input's gradient.

    Args:
        input_layouts: Layout of an input that is a plain tensor; default
            ``Replicate()``.
        output_layouts: Layout of the output; default ``Shard(-1)``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        ...     model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        ...     first, second = parallelize_module(model, mesh, plan)
        ...     hidden = first(torch.ones(2, 8))
        ...     hidden.shape, second(hidden).shape
        (torch.Size([2, 4]), torch.Size([2, 8]))
    """

    _default_input = Replicate()
    _default_output = Shard(-1)

    @property
    def desired_input_layouts(self) -> tuple[Placement]:
        """The layout that the computation reads."""
        return (Replicate(),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Output features sharded: rows of a Linear's weight, columns of a table."""
        form = linear_form(module)
        dim = 1 if form is None else form.output_dim
        names = (name for name, _ in module.named_parameters(recurse=False))
        return {n: Shard(0) if n == "bias" else Shard(dim) for n in names}

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """The input is needed whole; each rank makes some of the output features."""
        return self._layouts(Replicate(), Shard(-1))


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ShardedStyle):
    """Shard a Linear over its input features, or an Embedding over its rows.

    Each rank computes a partial value of the output; these are summed into the output's
    layout, by one all-reduce (``Replicate()``) or reduce-scatter (``Shard(dim)``). A
    bias is added once, after the sum. The example of ``ColwiseParallel`` shows both.

    Args:
        input_layouts: Layout of an input that is a plain tensor; default ``Shard(-1)``.
            The indices of an Embedding are usually ``Replicate()``.
        output_layouts: Layout of the output; default ``Replicate()``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> style = RowwiseParallel(input_layouts=Replicate())
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     table = parallelize_module(nn.Embedding(10, 8), mesh, style)
        ...     table.weight.to_local().shape, table(torch.tensor([1, 9])).shape
        (torch.Size([3, 8]), torch.Size([2, 8]))
    """

    _default_input = Shard(-1)
    _default_output = Replicate()

    def desired_input_layouts(self, module: nn.Module) -> tuple[Placement]:
        """The layout that the computation of this module reads."""
        return (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Input features sharded: columns of a Linear's weight, rows of a table."""
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        form = linear_form(module)
        dim = 1 if form is None else 1 - form.output_dim
        names = [name for name, _ in module.named_parameters(recurse=False)]
        return {n: Replicate() if n == "bias" else Shard(dim) for n in names}

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """Each rank reads some of the input features and makes a partial value."""
        return self._layouts(*self.desired_input_layouts(module), Partial())
