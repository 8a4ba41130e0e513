"""The vocabulary-parallel loss gives F.cross_entropy's numbers and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tp_parity import CLOSE, part, tp_mesh, whole

from torchspmd.parallel import vocab_parallel_cross_entropy
from torchspmd.testing import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(params=(2, 3, 4))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(f"ranks{request.param}")
    return found


def compare(logits: torch.Tensor, target: torch.Tensor, options: dict) -> None:
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
        local, target, mesh=mesh, num_classes=classes, **options
    )
    torch.testing.assert_close(loss, expected, **CLOSE)
    loss.backward(weights)
    found = whole(local.grad, Shard(logits.ndim - 1), mesh, logits.shape)
    torch.testing.assert_close(found, expected_logits.grad, **CLOSE)


def every_option() -> None:
    cases = itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (False, True), (-100, 2), (12, 7, 3)
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
        compare(logits, target, options)


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
