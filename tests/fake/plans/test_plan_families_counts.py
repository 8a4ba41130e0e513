"""What families with fused layers, adapters and experts send, against the forecast."""

import pytest
import torch
from plan_families import build, make_plan

from torchspmd import CommDebugMode
from torchspmd.parallel import parallelize_module
from torchspmd.testing import fake_mesh

IDS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize("kind", ["auto", "by hand"])
@pytest.mark.parametrize("name", ["nanogpt", "gpt2", "peft", "mixtral"])
def test_the_forecast_is_what_is_sent(name: str, kind: str) -> None:
    model = build(name)
    plan = make_plan(name, model, kind)
    forecast = plan.preview(model, {"tp": 2}, example_inputs=(IDS,))
    assert len(forecast.notes) == 1, forecast.notes
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, plan)
        with CommDebugMode() as mode:
            output = model(IDS)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            logits.sum().backward()
    expected = forecast.ledger.total_by("phase", "kind")
    assert mode.ledger.total_by("phase", "kind") == expected
