"""Every style gives the numbers of one device: forward, gradients, optimizer step."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from tp_parity import check_layer, check_model, tp_mesh

from torchspmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import Ranks

LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1), Partial())
EVEN = 12  # divides by 2, 3 and 4


def linear_layouts(style: type, bias: bool) -> None:
    given_layouts = LAYOUTS if bias else (Replicate(), Shard(-1))
    for given, wanted in itertools.product(given_layouts, LAYOUTS):
        if style is ColwiseParallel and isinstance(wanted, Partial):
            continue  # a column-wise output is never a sum
        # DTensor outputs differ in their last step only: one input layout shows it.
        for local in (True, False) if given == Replicate() else (True,):
            layer = nn.Linear(EVEN, 2 * EVEN, bias=bias)
            placed = style(
                input_layouts=given, output_layouts=wanted, use_local_output=local
            )
            value = torch.randn(EVEN, EVEN, EVEN, dtype=torch.float64)
            check_layer(layer, placed, given, wanted, value)


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("style", (ColwiseParallel, RowwiseParallel))
def test_linear_in_every_layout(ranks: Ranks, style: type, bias: bool) -> None:
    ranks.run(linear_layouts, style, bias)


def linear_uneven(style: type) -> None:
    features = ((7, 5), (4, 4))
    for (inside, outside), given, wanted in itertools.product(
        features, LAYOUTS, LAYOUTS
    ):
        if style is ColwiseParallel and isinstance(wanted, Partial):
            continue
        placed = style(
            input_layouts=given,
            output_layouts=wanted,
            use_local_output=wanted not in (Shard(0), Shard(1)),
        )
        value = torch.randn(5, 7, inside, dtype=torch.float64)
        # Only a DTensor can say how uneven the other dimensions are.
        plain = given in (Replicate(), Shard(-1)) and inside == 7
        layer = nn.Linear(inside, outside)
        check_layer(layer, placed, given, wanted, value, as_dtensor=not plain)


@pytest.mark.parametrize("style", (ColwiseParallel, RowwiseParallel))
def test_linear_with_dimensions_that_do_not_divide(ranks: Ranks, style: type) -> None:
    ranks.run(linear_uneven, style)


def linear_ranks_of_input() -> None:
    for shape in ((6,), (4, 6), (2, 4, 6), (2, 2, 2, 6)):
        value = torch.randn(shape, dtype=torch.float64)
        check_layer(nn.Linear(6, 8), ColwiseParallel(), Replicate(), Shard(-1), value)
        check_layer(nn.Linear(6, 8), RowwiseParallel(), Shard(-1), Replicate(), value)


def test_linear_with_inputs_of_any_rank(ranks: Ranks) -> None:
    ranks.run(linear_ranks_of_input)


def embedding_layouts() -> None:
    index = torch.randint(0, 13, (EVEN, EVEN))
    index[0] = 3
    cases = itertools.product(
        (ColwiseParallel, RowwiseParallel),
        (Replicate(), Shard(0)),
        (Replicate(), Shard(0), Shard(1), Shard(-1)),
        (None, 3),
        ((13, 7), (4, 4)),
    )
    for style, given, wanted, padding, (rows, columns) in cases:
        table = nn.Embedding(rows, columns, padding_idx=padding)
        placed = style(input_layouts=given, output_layouts=wanted)
        check_layer(table, placed, given, wanted, index % rows)


def test_embedding_in_every_layout(ranks: Ranks) -> None:
    ranks.run(embedding_layouts)


class PythonRMSNorm(nn.Module):
    """A norm of a type that torchspmd does not know: it goes through DTensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ScaledLinear(nn.Linear):
    """A Linear with its own forward: it goes through DTensor."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def sequence_norms() -> None:
    layers = (
        lambda: nn.LayerNorm(6),
        lambda: nn.LayerNorm(6, bias=False),
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        lambda: nn.RMSNorm(6),
        lambda: nn.RMSNorm(6, elementwise_affine=False),
    )
    for build, dim, local in itertools.product(layers, (0, 1), (True, False)):
        style = SequenceParallel(sequence_dim=dim, use_local_output=local)
        value = torch.randn(EVEN, EVEN, 6, dtype=torch.float64)
        check_layer(build(), style, Shard(dim), Shard(dim), value)
        check_layer(build(), style, Shard(dim), Shard(dim), value, as_dtensor=True)
        if local:
            continue  # a plain output cannot say that it is one of uneven parts
        uneven = torch.randn(5, 7, 6, dtype=torch.float64)
        check_layer(build(), style, Shard(dim), Shard(dim), uneven, as_dtensor=True)
        check_layer(build(), style, Replicate(), Shard(dim), uneven, as_dtensor=True)


def test_norms_on_a_part_of_the_sequence(ranks: Ranks) -> None:
    ranks.run(sequence_norms)


def other_modules() -> None:
    value = torch.randn(EVEN, EVEN, 6, dtype=torch.float64)
    check_layer(PythonRMSNorm(6), SequenceParallel(), Shard(1), Shard(1), value)
    check_layer(ScaledLinear(6, EVEN), ColwiseParallel(), Replicate(), Shard(-1), value)
    check_layer(ScaledLinear(6, EVEN), RowwiseParallel(), Shard(-1), Replicate(), value)


def test_other_module_types_go_through_dtensor(ranks: Ranks) -> None:
    ranks.run(other_modules)


def sequence_dropout() -> None:
    value = torch.randn(4, EVEN, 6, dtype=torch.float64)
    mesh = tp_mesh()
    for dim in (0, 1):
        torch.manual_seed(5)
        expected = nn.Dropout(0.4)(value)
        style = SequenceParallel(sequence_dim=dim)
        parallel = parallelize_module(nn.Dropout(0.4), mesh, style)
        torch.manual_seed(5)
        output = parallel(distribute_tensor(value, mesh, (Shard(dim),)))
        torch.testing.assert_close(output.full_tensor(), expected)
        parallel.eval()
        whole = parallel(distribute_tensor(value, mesh, (Shard(dim),)))
        assert torch.equal(whole.full_tensor(), value)


def test_dropout_drops_what_one_device_drops(ranks: Ranks) -> None:
    ranks.run(sequence_dropout)


class Block(nn.Module):
    """A transformer block in miniature: attention-like mixing, norms, MLP."""

    def __init__(self, width: int = EVEN, hidden: int = 2 * EVEN) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 1)) for p in (self.q, self.k, self.v))
        scores = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
        return self.out(torch.einsum("bhst,bthd->bshd", scores, v).flatten(-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


PLAN = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
    **dict.fromkeys(("out", "down"), RowwiseParallel()),
}


def tensor_parallel_block() -> None:
    check_model(Block, PLAN, (torch.randn(2, 5, EVEN, dtype=torch.float64),))


def test_a_transformer_block(ranks: Ranks) -> None:
    ranks.run(tensor_parallel_block)


def uneven_mlp() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))

    for local in (True, False):
        plan = {"0": ColwiseParallel(use_local_output=local), "2": RowwiseParallel()}
        check_model(build, plan, (torch.randn(4, 5, dtype=torch.float64),))


def test_colwise_then_rowwise_with_an_uneven_dimension(ranks: Ranks) -> None:
    ranks.run(uneven_mlp)
