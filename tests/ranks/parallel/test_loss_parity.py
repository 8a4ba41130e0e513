"""The vocabulary-parallel loss gives F.cross_entropy's numbers and gradients."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tp_parity import CLOSE, part, tp_mesh, whole

from torchspmd.parallel import (
    ColwiseParallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from torchspmd.step import DataParallel
from torchspmd.step import compile as compile_step
from torchspmd.testing import Ranks, run_ranks


def compare(
    logits: torch.Tensor, target: torch.Tensor, options: dict, said: int | None
) -> None:
    mesh, classes = tp_mesh(), logits.size(-1)
    expected_logits = logits.clone().requires_grad_()
    flat = F.cross_entropy(
        expected_logits.reshape(-1, classes), target.reshape(-1), **options
    )
    expected = flat.view(target.shape) if options["reduction"] == "none" else flat
    weights = torch.randn_like(expected)
    expected.backward(weights)
    local = part(logits, Shard(-1), mesh).requires_grad_()
    loss = vocab_parallel_cross_entropy(
        local, target, mesh=mesh, num_classes=said, **options
    )
    torch.testing.assert_close(loss, expected, **CLOSE)
    loss.backward(weights)
    found = whole(local.grad, Shard(logits.ndim - 1), mesh, logits.shape)
    torch.testing.assert_close(found, expected_logits.grad, **CLOSE)


def every_option() -> None:
    cases = itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (False, True), (-100, 2), (12, 7, 4)
    )
    for reduction, smoothing, weighted, ignored, classes in cases:
        logits = 30 * torch.randn(4, 5, classes, dtype=torch.float64)
        target = torch.randint(0, classes, (4, 5))
        target[0, :2] = ignored
        weight = torch.rand(classes, dtype=torch.float64) if weighted else None
        options = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "weight": weight,
            "ignore_index": ignored,
        }
        compare(logits, target, options, said=None)
        if reduction == "none":
            compare(logits, target, options, said=classes)


def test_every_option(ranks: Ranks) -> None:
    ranks.run(every_option)


def consumers() -> None:
    """The gradient is that of the loss, not of a loss that is only averaged."""
    mesh = tp_mesh()
    logits = torch.randn(6, 12, dtype=torch.float64)
    target = torch.randint(0, 12, (6,))
    expected_logits = logits.clone().requires_grad_()
    expected = F.cross_entropy(expected_logits, target, reduction="none")
    (expected.square() / (1 + expected.exp())).sum().backward()
    placed = distribute_tensor(logits, mesh, (Shard(1),)).requires_grad_()
    loss = vocab_parallel_cross_entropy(placed, target, reduction="none")
    (loss.square() / (1 + loss.exp())).sum().backward()
    assert placed.grad.placements == (Shard(1),)
    torch.testing.assert_close(placed.grad.full_tensor(), expected_logits.grad, **CLOSE)


def test_any_consumer_of_the_loss(ranks: Ranks) -> None:
    ranks.run(consumers)


def hand_made_parts() -> None:
    """Parts that no rule of torch makes, and DTensors that take them for equal."""
    mesh = tp_mesh()
    last = mesh.size() - 1
    sizes = [3] * last + [5]
    logits = torch.randn(6, sum(sizes), dtype=torch.float64)
    target = torch.tensor([0, 2, 3, sum(sizes) - 1, 1, sum(sizes) - 5])
    expected_logits = logits.clone().requires_grad_()
    expected = F.cross_entropy(expected_logits, target, label_smoothing=0.1)
    expected.backward()
    for build in (lambda x: x, lambda x: DTensor.from_local(x, mesh, (Shard(1),))):
        local = logits.split(sizes, 1)[mesh.get_local_rank()].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            build(local), target, mesh=mesh, label_smoothing=0.1
        )
        torch.testing.assert_close(loss, expected, **CLOSE)
        loss.backward()
        gradient = expected_logits.grad.split(sizes, 1)[mesh.get_local_rank()]
        torch.testing.assert_close(local.grad, gradient, **CLOSE)


def test_parts_of_any_size(ranks: Ranks) -> None:
    ranks.run(hand_made_parts)


def uneven_head() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(4, 9)).double()
    return head, torch.randn(6, 4).double(), torch.tensor([0, 8, 1, 5, 4, 2])


def one_device() -> list[float]:
    head, x, target = uneven_head()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(head(x), target, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def captured() -> None:
    """Uneven parts in a step that ``step.compile`` or ``torch.compile`` captures."""
    mesh = init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp")
    )

    def step(head: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy(
            head(x), y, mesh=mesh["tp"], label_smoothing=0.1
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    as_graph = compile_step(
        parallel_mode=DataParallel("replicate", reduce="avg"), mesh=mesh["dp"]
    )
    head, x, target = uneven_head()
    parallelize_module(head, mesh["tp"], {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    with as_graph(step) as compiled:
        found = [compiled(head, optimizer, x, target).item() for _ in range(2)]
    assert found == pytest.approx(one_device(), rel=1e-9)
    local = part(torch.randn(6, 9).double(), Shard(1), mesh["tp"]).requires_grad_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits, target, mesh=mesh["tp"])

    loss_of(local).backward()
    gradient, local.grad = local.grad, None
    vocab_parallel_cross_entropy(local, target, mesh=mesh["tp"]).backward()
    torch.testing.assert_close(local.grad, gradient, **CLOSE)


def test_uneven_parts_in_a_captured_step() -> None:
    run_ranks(captured, 2)  # it makes groups of its own


def half_precision() -> None:
    mesh = tp_mesh()
    logits = torch.randn(8, 12).bfloat16()
    target = torch.randint(0, 12, (8,))
    local = part(logits, Shard(1), mesh).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, mesh=mesh)
    assert loss.dtype == torch.float32
    loss.backward()
    assert local.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target))
    weight = distribute_tensor(torch.rand(12), mesh, (Replicate(),))
    vocab_parallel_cross_entropy(local, target, mesh=mesh, weight=weight)


def test_half_precision_is_summed_in_float32(ranks2: Ranks) -> None:
    ranks2.run(half_precision)
