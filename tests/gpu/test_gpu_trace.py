"""Tracing on CUDA: backward in a thread of its own, NCCL, compiled and captured graphs.

Also runs without pytest: ``python tests/gpu/run.py``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torchspmd import CommDebugMode, Phase
from torchspmd.testing import fake_mesh, run_ranks


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduces(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, device="cuda"))

    def forward(self, x):
        return _Reduce.apply(x * self.scale)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Reduces(), Reduces()

    def forward(self, x):
        return self.second(self.first(x))


class Stack(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def places(mode, phase):
    return [event.module for event in mode.ledger.events if event.phase is phase]


def test_backward_thread_knows_the_modules():
    with fake_mesh(4, ("dp",), device_type="cuda"):
        for reentrant in (None, False, True):
            model = Stack(reentrant)
            with CommDebugMode() as mode:
                for _ in range(2):
                    model(
                        torch.ones(4, device="cuda", requires_grad=True)
                    ).sum().backward()
            order = [
                f"Stack.layers.{i}.{n}" for i in range(3) for n in ("first", "second")
            ]
            assert places(mode, Phase.FORWARD) == order * 2, reentrant
            assert places(mode, Phase.BACKWARD) == order[::-1] * 2, reentrant
            recomputed = set(places(mode, Phase.RECOMPUTE))
            assert recomputed <= set(order), recomputed
            assert bool(recomputed) == (reentrant is not None)


def test_parameter_hooks_in_the_backward_thread():
    with fake_mesh(4, ("dp",), device_type="cuda"):
        model = Pair()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.broadcast(p.grad, 0)
            )
        with CommDebugMode() as mode:
            model(torch.ones(4, device="cuda")).sum().backward()
        found = [e.module for e in mode.ledger.events if e.kind == "broadcast"]
        assert sorted(found) == ["Pair.first", "Pair.second"]


def test_replay_of_a_real_cuda_graph_is_noted():
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    with CommDebugMode() as mode:
        graph.replay()
    assert [text[:26] for text in mode.ledger.notes] == ["a CUDA graph was replayed:"]
    assert y.sum().item() == 8


def test_compiled_region_on_cuda():
    class Model(nn.Module):
        def forward(self, x):
            x = torch.ops._c10d_functional.all_reduce(x * 2, "sum", "0")
            return torch.ops._c10d_functional.wait_tensor(x) + 1

    with fake_mesh(4, ("tp",), device_type="cuda"), torch.no_grad():
        compiled = torch.compile(Model(), fullgraph=True)
        for _ in range(2):
            with CommDebugMode() as mode:
                compiled(torch.ones(8, device="cuda"))
            assert len(mode.ledger) == 1
            assert mode.ledger.total().payload_bytes == 32


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()


def _with_ddp(mesh):
    return DistributedDataParallel(mlp(), process_group=mesh.get_group())


def _with_fsdp(mesh):
    return fully_shard(mlp(), mesh=mesh)


def _with_tensor_parallel(mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(mlp(), mesh, plan)


def train(build, watched):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("x",))
    model = build(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    mode = CommDebugMode()
    if watched:
        mode.__enter__()
    for _ in range(3):
        model(torch.ones(4, 8, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mode.__exit__(None, None, None)
    full = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()
    ]
    rows = mode.ledger.total_by("kind", "axis", "phase")
    return [p.detach().cpu() for p in full], {
        k: t.payload_bytes for k, t in rows.items()
    }


WEIGHTS = 4 * (8 * 16 + 16 + 16 * 8 + 8)
EXPECTED = {
    _with_ddp: {("all_reduce", "x", "backward"): 3 * WEIGHTS},
    _with_fsdp: {
        ("all_gather", "x", "forward"): 3 * WEIGHTS,
        ("reduce_scatter", "x", "backward"): 3 * WEIGHTS,
    },
    _with_tensor_parallel: {("all_reduce", "x", "forward"): 3 * 4 * 8 * 4},
}


def test_watching_changes_nothing_with_nccl():
    for build, expected in EXPECTED.items():
        plain = run_ranks(train, 2, build, False, backend="nccl", timeout=120)
        watched = run_ranks(train, 2, build, True, backend="nccl", timeout=120)
        for (values, _), (watched_values, rows) in zip(plain, watched, strict=True):
            for value, watched_value in zip(values, watched_values, strict=True):
                assert torch.equal(value, watched_value)
            assert {key: rows.get(key) for key in expected} == expected
