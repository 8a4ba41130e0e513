"""Parameters that ranks hold whole: other values or gradients are an error in eager too."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from tp_parity import tp_mesh

from torchspmd.errors import CheckError, PlanWarning
from torchspmd.parallel import (
    ColwiseParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import Ranks


class PerHead(nn.Module):
    """A norm for each head between sharded layers, as in Qwen 3 and Gemma 3."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.up, self.norm, self.down = (
            nn.Linear(8, 24),
            nn.RMSNorm(4),
            nn.Linear(24, 8),
        )
        with torch.no_grad():
            self.down.weight *= start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(x), self.dropout) if self.dropout else self.embed(x)
        heads = self.norm(self.up(x).unflatten(-1, (-1, 4)))
        return self.down(heads.flatten(-2))

    dropout = 0.0


PAIR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SUMMED = {**PAIR, "norm": SequenceParallel(sequence_dim=-2, use_local_output=True)}


def train(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any],
    seed: int = 0,
    **how: Any,
) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    parallelize_module(model, mesh, plan, **how)
    for _ in range(2):
        model(torch.randn(4, 3, 8, generator=generator)).square().mean().backward()
    return model


def refused(work: Callable[[], Any]) -> str:
    """The text of the error, which every rank must get."""
    with pytest.raises(CheckError) as caught:
        work()
    return str(caught.value)


def unreduced_norm() -> str:
    return refused(lambda: train(PerHead(), tp_mesh(), PAIR))


def test_an_unreduced_norm_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for text in ranks.run(unreduced_norm):
        assert "parallelize_module of PerHead on the mesh tp=" in text
        assert "got other gradients on its ranks in backward 1" in text
        assert "'norm.weight' (RMSNorm): rank 1 differs from rank 0" in text
        assert "embed" not in text and "up" not in text.partition("\n\nEach")[0]
        for fix in ("SequenceParallel(", "register_hook", "per_rank=[...]"):
            assert fix in text


class Opaque(PerHead):
    """A forward that cannot be traced, so that its plan is not judged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


def replicated_norm() -> str:
    plan = {**PAIR, "norm": ReplicateParallel()}
    return refused(lambda: train(Opaque(), tp_mesh(), plan))


def zero_gradients_tell_nothing() -> str:
    model, mesh = PerHead(start=0.0), tp_mesh()
    parallelize_module(model, mesh, PAIR)
    generator = torch.Generator().manual_seed(0)
    model(torch.randn(4, 3, 8, generator=generator)).square().mean().backward()
    assert not model.norm.weight.grad.any()
    with torch.no_grad():
        model.down.weight.add_(1.0)
    x = torch.randn(4, 3, 8, generator=generator)
    return refused(lambda: model(x).square().mean().backward())


def other_batches() -> str:
    return refused(lambda: train(PerHead(), tp_mesh(), SUMMED, seed=dist.get_rank()))


def other_random_numbers() -> str:
    model = PerHead()
    model.dropout = 0.5
    torch.manual_seed(dist.get_rank())
    return refused(lambda: train(model, tp_mesh(), SUMMED))


def other_values() -> str:
    torch.manual_seed(dist.get_rank())
    return refused(lambda: train(PerHead(), tp_mesh(), SUMMED))


@pytest.mark.parametrize(
    ("work", "name", "words"),
    (
        (replicated_norm, "norm.weight", ("got other gradients", "backward 1")),
        (zero_gradients_tell_nothing, "norm.weight", ("backward 2",)),
        (other_batches, "embed.weight", ("other batches",)),
        (other_random_numbers, "embed.weight", ("other random numbers",)),
        (other_values, "embed.weight", ("hold other values", "seed all ranks")),
    ),
)
def test_what_makes_replicas_differ(
    work: Callable[[], str], name: str, words: tuple[str, ...], ranks2: Ranks
) -> None:
    for text in ranks2.run(work):
        assert f"'{name}'" in text
        for word in words:
            assert word in text


def accepted() -> None:
    mesh, seed = tp_mesh(), dist.get_rank()
    train(PerHead(), mesh, SUMMED)
    train(PerHead(), mesh, PAIR, per_rank=["norm"])
    torch.manual_seed(seed)
    names = ["embed.*", "norm.weight", "down.bias"]
    train(PerHead(), mesh, PAIR, per_rank=names, src_data_rank=0)

    torch.manual_seed(0)
    model = PerHead()
    model.norm.weight.register_hook(sum_gradient)  # by the user's own hand
    train(model, mesh, PAIR)


def sum_gradient(gradient: torch.Tensor) -> torch.Tensor:
    summed = gradient.clone()
    dist.all_reduce(summed)
    return summed


def test_right_programs_pass(ranks: Ranks) -> None:
    ranks.run(accepted)


def below_data_parallel(wrap: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(PerHead(), mesh["tp"], PAIR)
    wrapped: nn.Module = model
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(mesh["dp"].get_local_rank())
    x = torch.randn(4, 3, 8)
    return refused(lambda: wrapped(x).square().mean().backward())


@pytest.mark.parametrize("wrap", ("ddp", "fsdp"))
def test_below_data_parallel(wrap: str, ranks4: Ranks) -> None:
    texts = ranks4.run(below_data_parallel, wrap)
    for rank, text in enumerate(texts):
        first = rank // 2 * 2
        assert (
            f"'norm.weight' (RMSNorm): rank {first + 1} differs from rank {first}"
            in (text.replace("FSDPRMSNorm", "RMSNorm"))
        )
        assert "embed" not in text


class Tokens(nn.Module):
    """A norm on this rank's tokens, which the layer behind it takes as such."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:  # cannot be traced
            return x
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tokens() -> str:
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = tp_mesh()
    model = parallelize_module(Tokens(), mesh, plan)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 8, generator=generator).chunk(mesh.size(), 1)[dist.get_rank()]
    return refused(lambda: model(x).square().sum().backward())


def test_a_norm_on_a_part_of_the_tokens(ranks: Ranks) -> None:
    for text in ranks.run(tokens):
        assert "'norm.bias' (LayerNorm)" in text and "'norm.weight' (LayerNorm)" in text


class Residual(nn.Module):
    """A norm behind a sum, where no graph shows which layout it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x + 1))


def take_part(values: str) -> str:
    mesh = tp_mesh()
    plan = {"norm": SequenceParallel(use_local_output=True)}
    model = parallelize_module(Residual(), mesh, plan)
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8) if values != "ones" else torch.ones(2, 4, 8)
    if values == "parts":
        x = x + dist.get_rank()
    model.inner.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).square().sum().backward()
    told = [each for each in caught if issubclass(each.category, PlanWarning)]
    return "".join(str(each.message) for each in told)


def test_an_input_that_is_taken_as_a_part_and_is_whole(ranks2: Ranks) -> None:
    """The gradients of the norm would be counted twice."""
    for text in ranks2.run(take_part, "whole"):
        assert (
            "inputs that are taken as one part for each rank are the same on all"
            in text
        )
        assert "  * 'norm' with SequenceParallel on the mesh tp=2" in text
        assert "write input_layouts=Replicate()" in text
    for values in ("parts", "ones"):
        assert ranks2.run(take_part, values) == ["", ""]
