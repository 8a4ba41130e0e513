"""Model families whose plans need more than Linears in pairs, against one device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from plan_families import build, make_plan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torchspmd.parallel import parallelize_module
from torchspmd.testing import Ranks


def train(model: nn.Module) -> list[float]:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(3))
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = torch.optim.SGD(trained, lr=0.5)
    losses = []
    for _ in range(3):
        output = model(ids)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(name: str, kind: str) -> float:
    """The largest difference from one device after three steps."""
    torch.manual_seed(0)
    # Grouped products take no doubles.
    model = build(name).to(torch.float32 if name == "mixtral" else torch.float64)
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, make_plan(name, model, kind))
    losses = zip(train(alone), train(model), strict=True)
    saved, expected = model.state_dict(), alone.state_dict()
    model.load_state_dict(saved)
    found = {key: whole(value) for key, value in saved.items()}
    assert found.keys() == expected.keys()
    return max(
        *(abs(a - b) for a, b in losses),
        *((found[key] - expected[key]).abs().max().item() for key in expected),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nanogpt", "auto"),
        ("nanogpt", "by hand"),
        ("gpt2", "auto"),
        ("gpt2", "by hand"),
        ("peft", "auto"),
        ("peft", "by hand"),
        ("peft", "carried"),
        ("mixtral", "auto"),
        ("mixtral", "by hand"),
        ("gemma3", "auto"),
        ("Qwen3", "auto"),
        ("bert", "auto"),
    ],
)
def test_families(name: str, kind: str, ranks2: Ranks) -> None:
    for difference in ranks2.run(compare, name, kind):
        assert difference < (1e-5 if name == "mixtral" else 1e-9)


def clip() -> tuple[float, float]:
    torch.manual_seed(0)
    model = build("Llama")
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = make_plan("Llama", model, "carried").replicate_others(model)
    parallelize_module(model, mesh, plan)
    ids = torch.arange(16).view(2, 8)
    norms = []
    for each in (alone, model):
        each(input_ids=ids, labels=ids).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        norms.append(whole(norm).item())
    return norms[0], norms[1]


def test_clipping_by_torch_where_all_layers_have_a_style(ranks2: Ranks) -> None:
    for expected, found in ranks2.run(clip):
        assert found == pytest.approx(expected, rel=1e-5)
