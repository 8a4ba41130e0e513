"""Numbers that a script makes itself are told as they are, without a note."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchspmd import _torch
from torchspmd.rehearse.recording import Op


def written_in_parts():
    table = torch.zeros(2, 3)
    table[1] = 4.0
    table[:, 2] += torch.tensor([1.0, 2.0])
    table[0][0].fill_(9)
    return table


FACTORIES = {
    "linspace": lambda: torch.linspace(0, 0.1, 12),
    "logspace": lambda: torch.logspace(0, 2, 5),
    "arange": lambda: torch.arange(2, 9, 3),
    "arange of floats": lambda: torch.arange(0.0, 1.0, 0.25),
    "full": lambda: torch.full((3,), 0.3),
    "full_like": lambda: torch.full_like(torch.empty(3), 7),
    "literal": lambda: torch.tensor([0.1, 0.2]),
    "literal of doubles": lambda: torch.tensor([0.1, 0.2], dtype=torch.float64),
    "as_tensor": lambda: torch.as_tensor(np.array([1.5, 2.5])),
    "scalar_tensor": lambda: torch.scalar_tensor(2.5),
    "eye": lambda: torch.eye(3),
    "tril": lambda: torch.ones(3, 3).tril(),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "triu_indices": lambda: torch.triu_indices(3, 3, 1),
    "zeros": lambda: torch.zeros(3),
    "ones": lambda: torch.ones(2, 2),
    "new_tensor": lambda: torch.empty(1).new_tensor([4.0, 5.0]),
    "new_full": lambda: torch.empty(1).new_full((2,), 1.5),
    "meshgrid": lambda: torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")[
        1
    ],
    "arithmetic": lambda: 1 - 2 ** -(torch.arange(8) / 2),
    "frequencies": lambda: 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8),
    "schedule": lambda: torch.linspace(1e-4, 0.02, 10).neg().add(1).cumprod(0).sqrt(),
    "cat": lambda: torch.cat([torch.zeros(1), torch.linspace(0, 1, 3)]),
    "stack": lambda: torch.stack([torch.tensor(1.0), torch.tensor(2.0)]),
    "where": lambda: torch.where(torch.arange(4) > 1, 1.0, 0.5),
    "bfloat16": lambda: torch.linspace(0, 1, 3).bfloat16(),
    "window": lambda: torch.hann_window(8),
    "item writes": written_in_parts,
    "in place": lambda: torch.zeros(3).add_(2).mul_(torch.arange(3)),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.float().cpu().numpy().tolist(),
        lambda x: [each.item() for each in x.flatten()],
        lambda x: [float(each) for each in x.double().flatten()],
        lambda x: x.sum().item(),
        lambda x: bool(x.max() > 1),
        lambda x: f"{x.float().mean():.3f}",
    ],
)
def test_what_is_not_random_is_known(rehearse, name, read):
    expected = read(FACTORIES[name]())
    with rehearse() as recording:
        with torch.device("cuda"):
            made = FACTORIES[name]()
        assert made.is_cuda
        assert read(made) == expected
    assert recording.notes == []


def test_a_buffer_on_the_device_is_known_until_it_is_written(rehearse):
    with rehearse() as recording:
        rates = torch.linspace(0, 1, 5, device="cuda")
        part = rates[1:3]
        assert part.tolist() == [0.25, 0.5]
        assert recording.notes == []
        rates.add_(torch.randn(5, device="cuda"))
        assert part.tolist() == [1.0, 1.0]
        assert rates[0].item() == 1.0
        rates.zero_()
        assert rates.tolist() == [0.0] * 5
    assert len(recording.notes) == 2


def test_lists_that_optimizers_write_are_not_known_any_more(rehearse):
    with rehearse():
        weights = [torch.zeros(2, device="cuda"), torch.zeros((), device="cuda")]
        torch._foreach_add_(weights, torch.randn((), device="cuda"))
        assert weights[0].tolist() == [1.0, 1.0]


def test_copies_to_the_host_hold_what_is_told(rehearse):
    with rehearse() as recording:
        counts = torch.arange(4, device="cuda")
        host = torch.empty(4, dtype=torch.int64)
        host.copy_(counts)
        assert host.tolist() == [0, 1, 2, 3]
        assert (counts.cpu() + 1).tolist() == [1, 2, 3, 4]
        assert recording.notes == []
        assert torch.rand(3, device="cuda").cpu().tolist() == [1.0] * 3
    assert "reads values: 1.0 was given for each" in recording.notes[0]


def test_what_torch_offloads_is_no_question(rehearse):
    with rehearse() as recording:
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            x.exp().sum().backward()
    assert recording.notes == []


def test_values_are_read_in_inference_mode(rehearse):
    with rehearse() as recording, torch.inference_mode():
        assert torch.arange(3, device="cuda").tolist() == [0, 1, 2]
        assert torch.rand(3, device="cuda").mean().item() == 1.0
        mask = torch.ones(2, 9, dtype=torch.bool).cuda()
        mask[:, 7:] = False  # padding, as a reference model is given
        assert not mask.all() and mask[:, :7].all()
    assert len(recording.notes) == 1


def test_views_in_inference_mode_see_all_writes(rehearse):
    with rehearse(), torch.inference_mode():
        tokens = torch.empty(8, dtype=torch.int64, device="cuda")
        prompt = tokens[:3]
        prompt.copy_(torch.arange(3, device="cuda"))
        prompt.add_(1)
        assert prompt.tolist() == [1, 2, 3]
        tokens.random_(9)
        assert _torch.known_tensor(prompt) is None


def test_views_in_inference_mode_of_what_was_made_outside(rehearse):
    with rehearse():
        outside = torch.randn(4, 3, device="cuda")
        with torch.inference_mode():
            assert not outside[0].is_inference()
            assert outside.view(-1)[1:].add(1).is_inference()


def test_a_grad_scaler_finds_no_infinity(rehearse):
    """Optimizers make their steps: gradients of healthy training are finite."""
    with rehearse() as recording:
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            loss = model(torch.randn(2, 4, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 65536.0
    assert recording.steps == 2
    assert recording.notes == []


def test_data_that_is_replaced_brings_its_own_values(rehearse):
    with rehearse():
        tensor = torch.ones(4, device="cuda")
        tensor.data = torch.zeros(4, device="cuda")
        assert tensor.tolist() == [0, 0, 0, 0]
        tensor.data = flat = torch.full((2,), 3.0, device="cuda")
        assert tensor.tolist() == [3, 3]
        flat.add_(1)
        assert tensor.tolist() in ([4, 4], [1, 1])  # known, or not; never as before
        tensor.data = torch.randn(2, device="cuda")
        assert _torch.known_tensor(tensor) is None


def _inferred(x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cuda").tril()
    heads = F.rms_norm(F.linear(x, x[0]), (8,))[:, None].expand(-1, 2, -1, -1)
    result = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    return F.log_softmax(result.float(), -1).to(torch.bfloat16).reshape(-1, 8) @ x[0]


def test_inference_mode_runs_the_operators_of_no_grad(rehearse):
    ran = []
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with rehearse() as recording:
            x = torch.randn(2, 8, 8, device="cuda", dtype=torch.bfloat16)
            with without_gradients():
                assert _inferred(x).is_inference() == (len(ran) == 1)
        ran.append([e.name for e in recording.events if isinstance(e, Op)])
    assert ran[0] == ran[1]
    assert "aten._scaled_dot_product_cudnn_attention.default" in ran[1]


def test_offloaded_gradients_are_healthy_too(rehearse):
    with rehearse() as recording:
        gradient = torch.randn(2048, 2048, device="cuda").cpu()
        assert not torch.isnan(gradient).any()
        assert torch.isfinite(gradient.norm())
        assert torch.arange(4).sum() == 6  # is real
    assert recording.notes == []


def test_what_other_libraries_call_like_torch_has_no_known_values(rehearse):
    library = torch.library.Library("known_values", "DEF")
    library.define("zeros_like(Tensor x) -> Tensor")
    library.impl("zeros_like", torch.empty_like, "Meta")
    try:
        with rehearse() as recording:
            x = torch.randn(3, device="cuda")
            made = torch.ops.known_values.zeros_like(x)
            assert made.sum().item() == 1.0
        assert "reads a value: 1.0 was given" in recording.notes[0]
    finally:
        _torch.remove_library(library)
