"""What the vocabulary-parallel loss sends, and what it refuses."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchspmd import CommDebugMode
from torchspmd.errors import LayoutError, UsageError
from torchspmd.parallel import vocab_parallel_cross_entropy
from torchspmd.testing import fake_mesh

TARGET = torch.zeros(6, dtype=torch.long)


def test_the_logits_are_never_gathered(tp4: object) -> None:
    logits = torch.randn(6, 100, requires_grad=True)
    with CommDebugMode() as comm:
        vocab_parallel_cross_entropy(logits, TARGET, mesh=tp4).backward()
    sent = [(event.kind.value, event.shape) for event in comm.ledger.events]
    # A maximum for each row and the size of each rank's part, then three sums.
    assert sent == [("all_reduce", (6 + 4,)), ("all_reduce", (3, 6))]


def test_a_number_of_classes_that_is_said_is_not_sent(tp4: object) -> None:
    with CommDebugMode() as comm:
        vocab_parallel_cross_entropy(
            torch.randn(6, 100), TARGET, mesh=tp4, num_classes=400
        )
    assert [event.shape for event in comm.ledger.events] == [(6,), (3, 6)]


def test_more_classes_than_can_be_told(tp4: object) -> None:
    logits, target = torch.empty(0, 2**24 + 1), torch.empty(0, dtype=torch.long)
    with pytest.raises(LayoutError, match=r"too many.*Pass num_classes="):
        vocab_parallel_cross_entropy(logits, target, mesh=tp4)
    logits = logits[:, 1:]
    vocab_parallel_cross_entropy(logits, target, mesh=tp4)


def test_plain_logits_need_a_mesh() -> None:
    with pytest.raises(LayoutError, match=r"plain logits of shape \(6, 4\).*mesh="):
        vocab_parallel_cross_entropy(torch.randn(6, 4), TARGET)


def test_a_mesh_with_two_axes_is_refused(dp2_tp4: object) -> None:
    with pytest.raises(LayoutError, match=r'dp=2, tp=4 has 2 axes.*mesh\["tp"\]'):
        vocab_parallel_cross_entropy(torch.randn(6, 4), TARGET, mesh=dp2_tp4)


def test_logits_that_are_not_sharded_by_class(tp4: object) -> None:
    logits = DTensor.from_local(torch.randn(6, 4), tp4, (Replicate(),))
    with pytest.raises(LayoutError, match=r"must be sharded.*\(Shard\(1\),\)"):
        vocab_parallel_cross_entropy(logits, TARGET)


def test_a_part_of_the_wrong_size(tp4: object) -> None:
    with pytest.raises(LayoutError, match=r"4 classes on this rank; of num_classes=17"):
        vocab_parallel_cross_entropy(
            torch.randn(6, 4), TARGET, mesh=tp4, num_classes=17
        )


def test_a_dtensor_of_another_number_of_classes(tp4: object) -> None:
    logits = DTensor.from_local(torch.randn(6, 4), tp4, (Shard(1),))
    with pytest.raises(
        LayoutError, match=r"num_classes=15, but.*DTensor of 16.*shape="
    ):
        vocab_parallel_cross_entropy(logits, TARGET, num_classes=15)
    with pytest.raises(LayoutError, match="each of the 16 classes, not of this"):
        vocab_parallel_cross_entropy(logits, TARGET, weight=torch.ones(4))


def test_a_weight_for_the_local_classes_only(tp4: object) -> None:
    with pytest.raises(
        LayoutError, match=r"4 classes on this rank; of the 4 classes of weight.*1\."
    ):
        vocab_parallel_cross_entropy(
            torch.randn(6, 4), TARGET, mesh=tp4, weight=torch.ones(4)
        )


def test_all_wrong_arguments_in_one_message(tp4: object) -> None:
    with pytest.raises(UsageError) as error:
        vocab_parallel_cross_entropy(
            torch.randn(6, 4),
            torch.rand(3),
            mesh=tp4,
            reduction="average",
            label_smoothing=2,
        )
    text = str(error.value)
    assert "class probabilities" in text
    assert "target has shape (3,), the logits have rows of (6,)" in text
    assert "reduction is 'average'" in text
    assert "label_smoothing is 2" in text


def test_a_target_that_is_a_dtensor(tp4: object) -> None:
    target = DTensor.from_local(TARGET, tp4, (Shard(0),))
    with pytest.raises(UsageError, match="pass its full_tensor"):
        vocab_parallel_cross_entropy(torch.randn(24, 4), target, mesh=tp4)


@pytest.mark.parametrize("target", [4, -1, 10**6])
def test_targets_that_are_no_class(target: int) -> None:
    """As in torch, where it is an IndexError."""
    targets = torch.tensor([0, target, -100])
    with fake_mesh(1, ("tp",)) as mesh, pytest.raises(UsageError) as caught:
        vocab_parallel_cross_entropy(torch.zeros(3, 4), targets, mesh=mesh)
    assert "1 of 3 targets are no class. Classes are 0 to 3;" in str(caught.value)


def test_all_targets_ignored_give_no_gradient() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    with fake_mesh(1, ("tp",)) as mesh:
        loss = vocab_parallel_cross_entropy(
            logits, torch.tensor([-100, -100]), mesh=mesh
        )
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0] * 4] * 2
