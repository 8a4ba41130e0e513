"""Who still holds a parameter from before parallelize_module, and what hung on it."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.nn.parallel import DistributedDataParallel

from torchspmd.errors import LayoutError, PlanError
from torchspmd.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    ParallelStyle,
    PrepareModuleInput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import fake_mesh

STYLES = (
    ColwiseParallel(),
    FusedColwiseParallel(parts=(4, 4)),
    ReplicateParallel(),
    torch_styles.ColwiseParallel(),
)


class Distribute(ParallelStyle):
    """A style whose layouts nobody can know before."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(index))


@pytest.mark.parametrize("style", [*STYLES, Distribute()])
def test_an_optimizer_from_before(style: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight
    values = before.detach().clone()
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": style}, src_data_rank=None)
    text = (
        r"'0\.weight' \(Linear\) has been replaced by parallelize_module.*"
        r"Make optimizers.*after parallelize_module"
    )
    for use in (early.step, early.zero_grad):
        with pytest.raises(LayoutError, match=text):
            use()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    # Its values may still be read and copied.
    assert torch.equal(before, values)
    assert torch.equal(copy.deepcopy(before), values)


def test_a_backward_to_the_parameters_from_before() -> None:
    model = nn.Linear(4, 8)
    loss = model(torch.ones(2, 4)).sum()
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, ColwiseParallel())
        with pytest.raises(LayoutError, match=r"\(Linear\) has been replaced.*arrives"):
            loss.backward()


def test_a_copy_of_a_parameter_from_before_is_free() -> None:
    model = nn.Linear(4, 8)
    before = model.weight
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, ColwiseParallel())
    for other in (copy.deepcopy(before), pickle.loads(pickle.dumps(before))):
        assert type(other) is nn.Parameter
        assert not vars(other)
        other.sum().backward()
        torch.optim.SGD([other], lr=1.0).step()
        assert not torch.equal(other, before)


def test_a_frozen_parameter_from_before_misses_nothing() -> None:
    model = Tied().requires_grad_(False)
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model.embed, mesh, ROWS)
        model.zero_grad()
        model.head.to(torch.float64)
        before = model.head.weight
        assert before.grad is None
        before.grad = None
        with pytest.raises(LayoutError, match=r"\(Embedding\) has been replaced"):
            before.grad = torch.zeros(16, 8, dtype=torch.float64)
        before.requires_grad_()
        with pytest.raises(LayoutError, match=r"\(Embedding\) has been replaced"):
            model.zero_grad()


class Named(nn.Parameter):
    """A parameter class of a user's own."""

    def title(self) -> str:
        return f"named {tuple(self.shape)}"


class Final(nn.Parameter):
    """One that refuses to have classes derived from it."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


def test_parameters_of_a_class_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    before = model[0].weight = Named(model[0].weight.detach())
    early = torch.optim.SGD([before], lr=0.1)
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        assert isinstance(before, Named)
        assert before.title() == "named (8, 4)"
        with pytest.raises(LayoutError, match=r"'0\.weight' \(Linear\) has been repl"):
            early.step()
        model[0] = nn.Linear(4, 8)
        model[0].weight = Final(model[0].weight.detach())
        text = r"'0\.weight' \(Linear\) is a Final, .*Make it an nn\.Parameter before"
        with pytest.raises(LayoutError, match=text):
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        model[0] = nn.Linear(4, 8)
        model[0].weight = Final(model[0].weight.detach(), requires_grad=False)
        parallelize_module(model, mesh, {"0": ColwiseParallel()})  # nothing is lost


def hook_before(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: gradient)


def hook_after(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: None)


def gradient(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("give", "text"),
    [
        (
            hook_before,
            r"'0': weight: hooks on the gradient are lost.*register them after",
        ),
        (
            hook_after,
            r"'0': weight: hooks on the gradient are lost.*register them after",
        ),
        (gradient, r"'0': weight: the gradient is lost.*call zero_grad\(\) before"),
    ],
)
def test_what_hangs_on_a_parameter(give: Any, text: str, style: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    give(model[0].weight)
    with fake_mesh(2, ("tp",)) as mesh:
        with pytest.raises(PlanError, match=text):
            parallelize_module(model, mesh, {"0": style})
        assert type(model[0]) is nn.Linear  # nothing was changed
        with pytest.raises(LayoutError, match=r"0\.weight: .*build it anew"):
            parallelize_module(model, mesh, {"0": Distribute()})


def test_hooks_on_what_stays_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    hook_before(model[1].weight)
    gradient(model[1].bias)
    style = ColwiseParallel(output_layouts=Replicate())
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": style})
        model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()


@pytest.mark.parametrize("style", [*STYLES, Distribute()])
def test_what_was_noted_on_a_parameter(style: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model[0].weight.no_decay = True
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": style}, src_data_rank=None)
        noted = [
            n for n, p in model.named_parameters() if getattr(p, "no_decay", False)
        ]
        assert noted
        assert all("weight" in name for name in noted)
        copied = [
            p for p in copy.deepcopy(model).parameters() if hasattr(p, "no_decay")
        ]
        assert len(copied) == len(noted)


@pytest.mark.parametrize("style", [*STYLES, Distribute()])
def test_tensors_of_the_old_shape_are_not_handed_on(style: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    weight = model[0].weight
    weight.main_grad, weight.itself = torch.zeros(8, 4), weight
    weight.scale = torch.ones(())
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": style}, src_data_rank=None)
        placed = [p for n, p in model.named_parameters() if "weight" in n]
        for parameter in placed:
            assert set(vars(parameter)) & {"main_grad", "itself", "scale"} == {"scale"}


def test_the_old_parameter_does_not_keep_the_shard() -> None:
    model = nn.Linear(4, 8)
    before = model.weight
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, ColwiseParallel())
        kept = weakref.ref(model.weight)
        assert kept() is not None
        del model
        gc.collect()
        assert kept() is None
    assert before.shape == (8, 4)


def test_a_model_that_is_wrapped_already() -> None:
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 8)), process_group=mesh["dp"].get_group()
        )
        text = "is inside of a DistributedDataParallel.*call parallelize_module first"
        with pytest.raises(PlanError, match=rf"'module\.0' {text}"):
            parallelize_module(model, mesh["tp"], {"module.0": ColwiseParallel()})
        with pytest.raises(PlanError, match=f"'' {text}"):
            parallelize_module(model, mesh["tp"], ReplicateParallel())
        prepare = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        parallelize_module(model, mesh["tp"], prepare)  # it replaces nothing


# --- ties -----------------------------------------------------------------------------

ROWS, COLUMNS = RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())


def test_a_tied_module_outside_of_the_call_that_gets_no_style() -> None:
    model = Tied()
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model.embed, mesh, ROWS)
        with pytest.raises(LayoutError, match=r"\(Embedding\).*shares.*in one plan"):
            model(torch.arange(4)).sum().backward()
        with pytest.raises(LayoutError, match=r"\(Embedding\) has been replaced"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        parallelize_module(model.head, mesh, COLUMNS)  # the tie is whole again
        model(torch.arange(4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert model.head.weight is model.embed.weight


def test_a_tied_module_without_a_style_in_one_plan() -> None:
    text = r"'embed\.weight' Shard\(dim=0\), 'head\.weight' with no style"
    with fake_mesh(2, ("tp",)) as mesh, pytest.raises(PlanError, match=text):
        parallelize_module(Tied(), mesh, {"embed": ROWS})


@pytest.mark.parametrize("calls", (1, 2))
def test_styles_of_torch_keep_a_tie(calls: int) -> None:
    model = Tied()
    plan = {
        "embed": torch_styles.RowwiseParallel(),
        "head": torch_styles.ColwiseParallel(),
    }
    with fake_mesh(2, ("tp",)) as mesh:
        for part in [plan] if calls == 1 else []:
            parallelize_module(model, mesh, part)
        for name in plan if calls == 2 else []:
            parallelize_module(model.get_submodule(name), mesh, plan[name])
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight is model.embed.weight


def test_a_tie_that_an_unknown_style_cuts() -> None:
    with fake_mesh(2, ("tp",)) as mesh:
        text = (
            r"'embed\.weight' is laid out as Replicate\(\), 'head\.weight' is as it was"
        )
        with pytest.raises(LayoutError, match=rf"{text}.*build it anew"):
            parallelize_module(Tied(), mesh, {"embed": Distribute()})
        model = Tied()
        parallelize_module(model.embed, mesh, ROWS)
        text = (
            r"laid out as Replicate\(\), a module of an earlier call laid out as Shard"
        )
        with pytest.raises(LayoutError, match=rf"'weight' is {text}\(dim=0\)"):
            parallelize_module(model.head, mesh, Distribute())


# --- copies of gradients --------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "style"),
    [
        (lambda: nn.LayerNorm(8), SequenceParallel(use_local_output=True)),
        (lambda: nn.Linear(8, 12), FusedColwiseParallel(parts=(4, 4, 4))),
        (
            lambda: nn.Linear(8, 12),
            FusedColwiseParallel(parts=(4, 4, 4), num_heads=(2, 1, 1)),
        ),
        (lambda: nn.Linear(8, 8), KeyValueParallel(num_heads=1)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), ReplicateParallel()),
    ],
)
def test_a_deep_copy_after_a_backward(build: Any, style: ParallelStyle) -> None:
    with fake_mesh(2, ("tp",)) as mesh:
        model = parallelize_module(build(), mesh, style, src_data_rank=None)
        model(torch.randn(2, 4, 8)).square().sum().backward()
        other = copy.deepcopy(model)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert theirs.grad.placements == mine.grad.placements
            assert torch.equal(theirs.grad.to_local(), mine.grad.to_local())
