"""The joined weight of a fused layer: read as one likes, never written in vain."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from torchspmd.errors import LayoutError
from torchspmd.parallel import FusedColwiseParallel, parallelize_module
from torchspmd.testing import fake_mesh


@pytest.fixture
def layer() -> Iterator[Any]:
    style = FusedColwiseParallel(parts=(4, 4, 4), num_heads=(2, 1, 1))
    with fake_mesh(2, ("tp",)) as mesh:
        model = nn.Sequential(nn.Linear(8, 12))
        yield parallelize_module(model, mesh, {"0": style}, src_data_rank=None)[0]


WRITES: list[tuple[str, Callable[[Any], Any]]] = [
    ("zero_", lambda w: w.data.zero_()),
    ("zero_", lambda w: w.detach().zero_()),
    ("zero_", lambda w: w.chunk(3)[1].zero_()),  # DTensor gathers here: another memory
    ("zero_", lambda w: w.data.T[0].zero_()),
    ("zero_", lambda w: w.to_local().zero_()),
    ("zero_", lambda w: w.detach().to_local()[0].zero_()),
    ("fill_", nn.init.ones_),
    ("normal_", nn.init.normal_),
    ("_foreach_add_", lambda w: torch._foreach_add_([w], 1.0)),
    ("add", lambda w: torch.add(w, w, out=w)),
    ("setting items", lambda w: w.__setitem__(0, 0.0)),
    ("setting .data", lambda w: setattr(w, "data", torch.zeros(12, 8))),
    ("requires_grad_", lambda w: w.requires_grad_(False)),
    ("setting .requires_grad", lambda w: setattr(w, "requires_grad", False)),
    ("reading .grad", lambda w: w.grad),
    ("setting .grad", lambda w: setattr(w, "grad", None)),
    ("register_hook", lambda w: w.register_hook(print)),
    (
        "register_post_accumulate_grad_hook",
        lambda w: w.register_post_accumulate_grad_hook(print),
    ),
]


@pytest.mark.parametrize(("name", "write"), WRITES)
def test_a_write_into_the_joined_weight(
    name: str, write: Callable[[Any], Any], layer: Any
) -> None:
    text = (
        rf"'0' with FusedColwiseParallel on the mesh tp=2: its weight is a copy.* "
        rf"{name} would not reach the layer.*layer\.weight_parts"
    )
    with pytest.raises(LayoutError, match=text):
        write(layer.weight)


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(12)), None])
def test_the_joined_bias_cannot_be_replaced(
    value: nn.Parameter | None, layer: Any
) -> None:
    with pytest.raises(LayoutError, match=r"'0' with.*bias cannot be set.*bias_parts"):
        layer.bias = value


def test_the_joined_weight_is_read_like_any_dtensor(layer: Any) -> None:
    weight = layer.weight
    assert torch.equal(weight.full_tensor(), layer.state_dict()["weight"].full_tensor())
    mesh = layer.route.axis.mesh
    value = distribute_tensor(torch.ones(2, 8), mesh, (Replicate(),))
    assert nn.functional.linear(value, weight, layer.bias).shape == (2, 12)
    for other in (weight.clone(), copy.deepcopy(weight), weight + 1, weight.double()):
        assert type(other) is DTensor
        other.zero_()
    assert pickle.loads(pickle.dumps(weight)).shape == (12, 8)
    assert weight.data.shape == weight.detach().shape == (12, 8)
    torch.zeros(12, 8).copy_(weight.full_tensor())


@pytest.mark.parametrize("form", ["weight", "detached", "shard"])
@pytest.mark.parametrize("grad", [True, False])
def test_the_joined_weight_is_saved_as_a_plain_dtensor(
    form: str, grad: bool, layer: Any
) -> None:
    with torch.set_grad_enabled(grad):
        weight = layer.weight
        value = {
            "weight": weight,
            "detached": weight.detach(),
            "shard": weight.to_local(),
        }[form]
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        loaded = (
            torch.load(file, weights_only=False),
            pickle.loads(pickle.dumps(value)),
            copy.deepcopy(value),
        )
    for other in loaded:
        assert type(other) is (torch.Tensor if form == "shard" else DTensor)
        assert full(other).equal(full(value))
        other.detach().zero_()


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_a_loss_of_the_joined_weight_reaches_the_parts(layer: Any) -> None:
    with torch.no_grad():
        quiet = layer.weight
    weight = layer.weight
    assert not quiet.requires_grad
    assert weight.requires_grad
    assert (weight.placements, weight.shape) == (quiet.placements, quiet.shape)
    assert weight.stride() == quiet.stride()
    assert torch.equal(weight.to_local(), quiet.to_local())
    (weight.square().sum() + layer.bias.sum()).full_tensor().backward()
    for part in (*layer.weight_parts, *layer.bias_parts):
        assert part.grad.placements == part.placements
        assert part.grad.to_local().shape == part.to_local().shape
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad
