"""How often each style communicates, forward and backward, and what it returns."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchspmd import CommDebugMode
from torchspmd.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import fake_mesh

R, P = Replicate(), Partial()
AR, AG, RS, A2A = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)

# (style, layer's class and input's shape, forward, backward)
LINEAR = [
    (ColwiseParallel(), {}, {AR: 1}),
    (ColwiseParallel(output_layouts=R), {AG: 1}, {AR: 1}),
    (ColwiseParallel(output_layouts=Shard(1)), {A2A: 1}, {A2A: 1, AR: 1}),
    (ColwiseParallel(input_layouts=Shard(0)), {AG: 1}, {RS: 1}),
    (ColwiseParallel(input_layouts=Shard(1)), {AG: 1}, {RS: 1}),
    (ColwiseParallel(input_layouts=P), {AR: 1}, {AR: 1}),
    (RowwiseParallel(), {AR: 1}, {}),
    (RowwiseParallel(input_layouts=R), {AR: 1}, {AG: 1}),
    (RowwiseParallel(output_layouts=Shard(0)), {RS: 1}, {AG: 1}),
    (RowwiseParallel(output_layouts=Shard(1)), {RS: 1}, {AG: 1}),
    (RowwiseParallel(output_layouts=P), {}, {}),
    (RowwiseParallel(input_layouts=P), {RS: 1, AR: 1}, {AG: 1}),
]


def counts(comm: CommDebugMode) -> dict[str, int]:
    return {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items() if n}


def measure(module: nn.Module, value: torch.Tensor) -> tuple[dict[str, int], ...]:
    with CommDebugMode() as forward:
        output = module(value)
    with CommDebugMode() as backward:
        output.sum().backward()
    return counts(forward), counts(backward)


@pytest.mark.parametrize(("style", "forward", "backward"), LINEAR, ids=str)
def test_linear(
    tp4: object, style: object, forward: dict[str, int], backward: dict[str, int]
) -> None:
    linear = parallelize_module(nn.Linear(16, 16), tp4, style)
    width = 4 if style.input_layouts == (Shard(-1),) else 16
    value = torch.randn(4, 8, width, requires_grad=True)
    assert measure(linear, value) == (forward, backward)
    assert linear.weight.grad.placements == linear.weight.placements
    assert linear.bias.grad.placements == linear.bias.placements


def test_a_linear_without_input_gradient_sends_nothing_back(tp4: object) -> None:
    linear = parallelize_module(nn.Linear(16, 16), tp4, ColwiseParallel())
    assert measure(linear, torch.randn(4, 16)) == ({}, {})


@pytest.mark.parametrize(
    ("style", "forward", "backward"),
    [
        (ColwiseParallel(), {}, {}),
        (ColwiseParallel(output_layouts=R), {AG: 1}, {}),
        (RowwiseParallel(input_layouts=R), {AR: 1}, {}),
        (RowwiseParallel(input_layouts=R, output_layouts=Shard(1)), {RS: 1}, {AG: 1}),
    ],
    ids=str,
)
def test_embedding(
    tp4: object, style: object, forward: dict[str, int], backward: dict[str, int]
) -> None:
    table = parallelize_module(nn.Embedding(16, 16), tp4, style)
    index = torch.arange(8).reshape(2, 4)
    assert measure(table, index) == (forward, backward)
    assert table.weight.grad.placements == table.weight.placements


@pytest.mark.parametrize(
    ("layer", "backward"),
    [
        (nn.LayerNorm(16), {AR: 1}),
        (nn.RMSNorm(16), {AR: 1}),
        (nn.LayerNorm(16, elementwise_affine=False), {}),
        (nn.Dropout(0.5), {}),
    ],
    ids=str,
)
def test_sequence_parallel(
    tp4: object, layer: nn.Module, backward: dict[str, int]
) -> None:
    module = parallelize_module(layer, tp4, SequenceParallel())
    value = torch.randn(4, 2, 16, requires_grad=True)
    assert measure(module, value) == ({}, backward)
    output = module(value)
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(1),)
    assert output.shape == (4, 8, 16)


def test_prepare_moves_once_each_way(tp4: object) -> None:
    style = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=R, use_local_output=True
    )
    module = parallelize_module(nn.Identity(), tp4, style)
    value = torch.randn(2, 16, requires_grad=True)
    assert measure(module, value) == ({AG: 1}, {})
    style = PrepareModuleOutput(output_layouts=P, desired_output_layouts=Shard(0))
    module = parallelize_module(nn.Identity(), tp4, style)
    value = torch.randn(8, 16, requires_grad=True)
    assert measure(module, value) == ({RS: 1}, {AG: 1})


def test_prepare_keywords_and_untouched_arguments() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, flag: bool, *, y: torch.Tensor) -> object:
            return x, flag, y

    with fake_mesh(4, ("tp",)) as mesh:
        style = PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(R, None),
            input_kwarg_layouts={"y": Shard(1)},
            desired_input_kwarg_layouts={"y": R},
            use_local_input=True,
            output_layouts=(R, None, R),
            desired_output_layouts=(Shard(0), None, R),
            use_local_output=False,
        )
        module = parallelize_module(Add(), mesh, style)
        x, flag, y = module(torch.ones(2, 3), True, y=torch.ones(2, 3))
        assert x.placements == (Shard(0),)
        assert x.shape == (8, 3)
        assert flag is True
        assert y.shape == (2, 12)


def test_a_dtensor_input_is_used_as_it_is(tp4: object) -> None:
    linear = parallelize_module(nn.Linear(16, 16), tp4, ColwiseParallel())
    local = torch.randn(4, 2, 16, requires_grad=True)
    value = DTensor.from_local(local, tp4, (Shard(1),))
    assert measure(linear, value) == ({AG: 1}, {RS: 1})
    assert local.grad.shape == local.shape


def test_local_output_false_returns_a_dtensor(tp4: object) -> None:
    style = ColwiseParallel(use_local_output=False)
    output = parallelize_module(nn.Linear(16, 10), tp4, style)(torch.randn(4, 16))
    assert isinstance(output, DTensor)
    assert output.shape == (4, 10)
    assert output.placements == (Shard(1),)
    assert output.to_local().shape == (4, 3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.q(x) * self.k(x) + self.v(x))


def test_projections_that_share_a_dtensor_sum_their_gradient_once() -> None:
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=R)
    plan = {
        "0": SequenceParallel(),
        "1": gather,
        "1.[qkv]": ColwiseParallel(),
        "1.out": RowwiseParallel(output_layouts=Shard(1)),
    }
    with fake_mesh(4, ("tp",)) as mesh:
        model = nn.Sequential(nn.LayerNorm(16), Attention())
        parallelize_module(model, mesh, plan)
        value = torch.randn(4, 2, 16, requires_grad=True)
        # One all-reduce is that of the norm's parameters.
        assert measure(model, value) == ({AG: 1, RS: 1}, {AG: 1, RS: 1, AR: 1})
        assert value.grad.shape == value.shape


def test_projections_of_a_plain_tensor_sum_each() -> None:
    plan = {"[qkv]": ColwiseParallel(), "out": RowwiseParallel()}
    with fake_mesh(4, ("tp",)) as mesh:
        model = parallelize_module(Attention(), mesh, plan)
        value = torch.randn(4, 2, 16, requires_grad=True)
        assert measure(model, value) == ({AR: 1}, {AR: 3})


def test_a_dtensor_may_be_read_again_and_again(tp4: object) -> None:
    layer = parallelize_module(nn.Linear(16, 16), tp4, ColwiseParallel())
    with torch.no_grad():
        layer.weight.fill_(1)
    leaf = DTensor.from_local(torch.ones(2, 16), tp4, (R,)).requires_grad_()
    for times in (1, 2, 3):  # gradients of several steps add up
        layer(leaf).sum().backward()
        local = leaf.grad.to_local()
        torch.testing.assert_close(local, torch.full((2, 16), 4.0 * times))
    with torch.no_grad():
        assert not layer(leaf).requires_grad
    assert layer(leaf).requires_grad
    leaf.grad = None
    leaf.data = DTensor.from_local(torch.zeros(2, 16), tp4, (R,))
    torch.testing.assert_close(layer(leaf), layer(leaf.detach()))
