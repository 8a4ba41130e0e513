"""Sums and means, accumulation, tensor-parallel models and the example, on ranks."""

import contextlib
import copy
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchspmd.errors import RankError
from torchspmd.step import DataParallel, compile
from torchspmd.testing import run_ranks

ROOT = Path(__file__).parents[3]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def parts(number):
    """The whole batch, and this rank's part."""
    torch.manual_seed(100 + number)
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = torch.randn(4 * size, 8)
    return batch, batch[4 * rank : 4 * rank + 4].clone()


def worst(model, reference):
    return max(
        (full(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def follow(step, options, *, steps=3):
    model = mlp()
    reference = copy.deepcopy(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.01)
    compiled = compile(**options)(step)
    differences = []
    for number in range(steps):
        whole, part = parts(number)
        got = compiled(model, optim, part)
        expected = step(reference, reference_optim, whole)
        if isinstance(got, torch.Tensor):
            differences.append((got - expected).abs().max().item())
    return max([worst(model, reference), *differences]), compiled


def sum_step(model, optim, batch):
    loss = model(batch).sum()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def micro_step(model, optim, batch):
    for scale in (1.0, 0.5):
        loss = model(batch * scale).square().mean()
        loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def mixed_step(model, optim, batch):
    out = model(batch)
    loss = F.cross_entropy(out, out.argmax(-1)) + 0.1 * out.pow(2).sum() / out.numel()
    loss.backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    optim.zero_grad()
    return total


def run_default(names):
    return [follow(globals()[name], {})[0] for name in names]


def test_sums_accumulation_and_clipping_in_the_default_mode(ranks4):
    for found in ranks4.run(run_default, ["sum_step", "micro_step", "mixed_step"]):
        assert max(found) < 2e-5, found


def run_reduced():
    # Losses are each rank's own here: only parameters are compared.
    return [worst_parameters(sum_step, "sum"), worst_parameters(micro_step, "avg")]


def worst_parameters(step, reduce):
    def silent(*args):
        step(*args)

    return follow(silent, {"parallel_mode": DataParallel(reduce=reduce)})[0]


def test_sums_and_averages_of_gradients(ranks2):
    for found in ranks2.run(run_reduced):
        assert max(found) < 2e-5, found


def run_layouts():
    """Replicated extra input, sharded rows that come back."""
    model = mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))

    @compile(mesh=mesh)
    def step(model, batch, weights):
        out = model(batch) * weights
        return out, out.sum(), weights + 1

    whole, part = parts(0)
    weights = DTensor.from_local(torch.arange(4.0), mesh, [Replicate()])
    rows, total, plus = step(model, part, weights)
    expected = model(whole) * torch.arange(4.0)
    rank = dist.get_rank()
    return (
        torch.allclose(rows, expected[4 * rank : 4 * rank + 4], atol=1e-5),
        torch.allclose(total, expected.sum(), atol=1e-4),
        torch.equal(plus, torch.arange(1.0, 5.0)),
    )


def test_layouts_of_arguments_and_results(ranks2):
    for found in ranks2.run(run_layouts):
        assert found == (True, True, True)


def run_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = mlp()
    reference = copy.deepcopy(model)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference_optim = torch.optim.AdamW(reference.parameters(), lr=0.01)
    mode = DataParallel("replicate", reduce="sum")
    step = compile(mesh=mesh["dp"], parallel_mode=mode)(sum_step)
    for number in range(3):
        torch.manual_seed(number)
        batch = torch.randn(8, 8)
        row = mesh.get_local_rank("dp")
        step(model, optim, batch[4 * row : 4 * row + 4].clone())
        sum_step(reference, reference_optim, batch)
    state = optim.state[model[0].weight]["exp_avg"]
    expected = reference_optim.state[reference[0].weight]["exp_avg"]
    axes = step.programs[-1].ledger.total_by("axis")
    return (
        worst(model, reference),
        (full(state) - expected).abs().max().item(),
        isinstance(model[0].weight, DTensor),
        sorted(axes),
    )


def test_tensor_parallel_model_with_a_data_axis(ranks4):
    for parameters, state, is_dtensor, axes in ranks4.run(run_tensor_parallel):
        assert max(parameters, state) < 2e-5
        assert is_dtensor
        assert axes == [("dp",), ("tp",)]


def run_example(port, output):
    """The example, as torchrun starts it: its store is in another process."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    script = str(ROOT / "examples" / "train_gpt_compiled.py")
    sys.argv = [script, "--steps", "3", "--layers", "1"]
    with output.open("a", buffering=1) as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")


def test_example_follows_ddp(tmp_path):
    output = tmp_path / "output"
    try:
        store = dist.TCPStore("localhost", 0, is_master=True)
        run_ranks(run_example, 2, store.port, output, timeout=120)
    except RankError as error:
        if "died" not in str(error) or "1 program" not in output.read_text():
            raise
        # torch can crash when it frees DDP's group at the end
        store = dist.TCPStore("localhost", 0, is_master=True)
        run_ranks(run_example, 2, store.port, output, timeout=120)
    assert "step 2: compiled" in output.read_text()
    assert "1 program" in output.read_text()


class Router(nn.Module):
    """Keeps its loss, this rank's rows and a running mean; the next call reads these."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 4), nn.Linear(8, 8)
        self.aux_loss, self.rows, self.mean = None, None, torch.zeros(8)

    def forward(self, x):
        chosen = self.gate(x).softmax(-1)
        self.aux_loss = chosen.mean(0).square().sum()
        if self.rows is not None:
            x = x + 0.1 * self.rows
        self.rows, self.mean = x.detach(), 0.9 * self.mean + x.detach().mean(0)
        return self.expert(x) * chosen.amax(-1, keepdim=True) + self.mean


def keep_tensors(parallel):
    torch.manual_seed(0)
    model = Router()
    reference = copy.deepcopy(model)
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]

    def step(model, optim, batch):
        loss = model(batch).square().mean() + model.aux_loss
        loss.backward()
        optim.step()
        optim.zero_grad()

    def average(gradient):
        if parallel is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradient

    for parameter in reference.parameters():
        parameter.register_hook(average)
    compiled, rank = compile(step, parallel=parallel, shadow=2), dist.get_rank()
    for number in range(5):
        whole, own = parts(number)
        compiled(model, optims[0], own)
        step(reference, optims[1], whole if parallel is None else own)
        rows = reference.rows
        if parallel is None:
            rows = rows[4 * rank : 4 * rank + 4]
        torch.testing.assert_close(model.rows, rows)
        torch.testing.assert_close(model.mean, reference.mean)
        torch.testing.assert_close(model.aux_loss, reference.aux_loss.detach())
    assert worst(model, reference) < 1e-6
    return len(compiled.programs)


def test_tensors_kept_in_attributes(ranks2):
    for parallel in (None, "replicate", "fully_shard"):
        assert ranks2.run(keep_tensors, parallel) == [2, 2]


class Initialised(nn.Module):
    """Takes its scale from the first batch, as weights with ActNorm do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = self.layer(x)
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(y.abs().mean(0))
                self.ready.fill_(True)
        self.count += 1
        return y / self.scale if self.count > 2 else y


def choose_by_buffers(parallel):
    torch.manual_seed(0)
    model = Initialised()
    reference = copy.deepcopy(model)
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]

    def step(model, optim, batch):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    def average(gradient):
        if parallel is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradient

    for parameter in reference.parameters():
        parameter.register_hook(average)
    compiled = compile(step, parallel=parallel, shadow=2)
    for number in range(6):
        whole, own = parts(number)
        compiled(model, optims[0], own)
        step(reference, optims[1], whole if parallel is None else own)
        torch.testing.assert_close(model.scale, reference.scale)
        assert model.ready and model.count == number + 1
    assert worst(model, reference) < 1e-6
    return len(compiled.programs)


def test_choices_by_buffers(ranks2):
    for parallel in (None, "replicate", "fully_shard"):
        assert ranks2.run(choose_by_buffers, parallel) == [3, 3]
