"""Ways to run one data-parallel training step, each in the words of its own system."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _models import GPT, Transformer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchspmd.step import DataParallel, GraphModuleTransformation, compile

Step = Callable[..., Any]

BUCKET_MB = 25.0  # where nothing but communication is measured
GPTS = {"gpt 12x768": True, "gpt 12x768 untied": False}  # whether the head is tied


@dataclass(frozen=True)
class Workload:
    """A model, its batch and where it runs."""

    model: str
    batch: int
    device: str = "cpu"

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        """The model, a warm optimizer and a batch of this rank."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        where = {"device": self.device, "dtype": dtype}
        if self.model in GPTS:
            model: nn.Module = GPT(tied=GPTS[self.model]).to(**where)
            length = 512 if self.device == "cuda" else 32
            batch = torch.randint(50304, (self.batch, length), device=self.device)
            return model, _optimizer(model), batch
        if self.model == "transformer 12x768":
            model = Transformer(12, 768, 3072, 64).to(**where)
            batch = torch.randn(self.batch, 512 if self.device == "cuda" else 32, 768)
        else:
            layers, width = (int(part) for part in self.model.split()[1].split("x"))
            model = linear_stack(layers, width).to(**where)
            batch = torch.randn(self.batch, width)
        return model, _optimizer(model), batch.to(**where)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def linear_stack(layers: int, width: int) -> nn.Module:
    """Linear and relu in turns, as in the original's own tests."""
    parts = [
        part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())
    ]
    return nn.Sequential(*parts)


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    out = model(batch)
    loss = out if out.ndim == 0 else out.float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def ddp(model: nn.Module) -> tuple[nn.Module, Step]:
    return DistributedDataParallel(model), train_step


def ddp_compiled(model: nn.Module) -> tuple[nn.Module, Step]:
    return torch.compile(DistributedDataParallel(model)), train_step


def ddp_blocks_compiled(model: nn.Module) -> tuple[nn.Module, Step]:
    """Each block is compiled by itself: its gradients are sent when it is through."""
    for block in blocks_of(model):
        block.compile()
    return ddp(model)


def fsdp(
    model: nn.Module, *, reshard: bool | None = None, compiled: bool = False
) -> tuple[nn.Module, Step]:
    """FSDP2 by blocks, each compiled by itself where asked."""
    for block in blocks_of(model):
        if compiled:
            block.compile()
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model, train_step


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that stand one behind another and have parameters."""
    body = model.body if isinstance(model, GPT) else model
    blocks = body.layers if isinstance(body, Transformer) else body
    return [block for block in blocks if any(True for _ in block.parameters())]


def fsdp_compiled(model: nn.Module) -> tuple[nn.Module, Step]:
    return torch.compile(fsdp(model)[0]), train_step


def ours(
    model: nn.Module,
    *,
    passes: bool,
    overlap: bool,
    megabytes: float | None = None,
    inductor: bool = False,
    rows: bool = False,
    backend: str | None = None,
) -> tuple[nn.Module, Step]:
    transformation = None
    if passes:
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True,
            overlap_iterations=overlap,
            gather_embeddings=rows,
            bucket_size_mb=megabytes,
            cost="measure",
            enable_inductor=inductor,
        )
    step = compile(
        gm_transformation=transformation,
        parallel_mode=DataParallel("replicate"),
        backend=backend,
    )(train_step)
    return model, step


def ours_sharded(
    model: nn.Module, *, passes: bool, reshard: bool = True, inductor: bool = False
) -> tuple[nn.Module, Step]:
    """Fully sharded parameters, gathered by our passes."""
    transformation = None
    if passes:
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True, cost="measure", enable_inductor=inductor
        )
    mode = DataParallel("fully_shard", reshard_after_forward=reshard)
    step = compile(gm_transformation=transformation, parallel_mode=mode)(train_step)
    return model, step


def alone(model: nn.Module) -> tuple[nn.Module, Step]:
    return model, train_step


def alone_compiled(model: nn.Module) -> tuple[nn.Module, Step]:
    return torch.compile(model), train_step


def at_once(model: nn.Module, *, compiled: bool) -> tuple[nn.Module, Step]:
    """Compute alone, and reduce as many bytes beside it that nothing waits for in a step.

    No order of a real step can be quicker: here any work may run beside any other.
    """
    buckets = empty_buckets(model)
    works: list[Any] = []

    def step(*args: Any) -> torch.Tensor:
        while works:
            works.pop().wait()
        works.extend(dist.all_reduce(bucket, async_op=True) for bucket in buckets)
        return train_step(*args)

    return torch.compile(model) if compiled else model, step


def empty_buckets(model: nn.Module) -> list[torch.Tensor]:
    """Room for all gradients of a model, in pieces of equal size."""
    sample = next(model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    size = int(BUCKET_MB * 2**20) // sample.element_size()
    return [sample.new_zeros(min(size, total - at)) for at in range(0, total, size)]


Variant = Callable[[nn.Module], tuple[nn.Module, Step]]

BASES: dict[str, Variant] = {
    "compute alone": alone,
    "compute alone, compiled": alone_compiled,
}
PEERS: dict[str, Variant] = {
    "DDP": ddp,
    "DDP + torch.compile": ddp_compiled,
    "FSDP2": fsdp,
    "FSDP2 + torch.compile": fsdp_compiled,
    "DDP + torch.compile of blocks": ddp_blocks_compiled,
    "FSDP2 + torch.compile of blocks": functools.partial(fsdp, compiled=True),
    "FSDP2, no reshard": functools.partial(fsdp, reshard=False),
    "FSDP2, no reshard + torch.compile of blocks": functools.partial(
        fsdp, reshard=False, compiled=True
    ),
}
SHARDED: dict[str, Variant] = {
    "torchspmd, sharded, no passes": functools.partial(ours_sharded, passes=False),
    "torchspmd, sharded": functools.partial(ours_sharded, passes=True),
    "torchspmd, sharded, inductor": functools.partial(
        ours_sharded, passes=True, inductor=True
    ),
    "torchspmd, sharded, no reshard": functools.partial(
        ours_sharded, passes=True, reshard=False
    ),
    "torchspmd, sharded, no reshard, inductor": functools.partial(
        ours_sharded, passes=True, reshard=False, inductor=True
    ),
}
VARIANTS: dict[str, Variant] = {
    "both at once, nothing waits": functools.partial(at_once, compiled=False),
    "both at once, compiled": functools.partial(at_once, compiled=True),
    **PEERS,
    "torchspmd, no passes": functools.partial(ours, passes=False, overlap=False),
    "torchspmd, passes": functools.partial(ours, passes=True, overlap=False),
    "torchspmd, overlapped iterations": functools.partial(
        ours, passes=True, overlap=True
    ),
    "torchspmd, passes, CUDA graph": functools.partial(
        ours, passes=True, overlap=False, backend="cudagraph"
    ),
    "torchspmd, passes, inductor": functools.partial(
        ours, passes=True, overlap=False, inductor=True
    ),
    "torchspmd, overlapped, inductor": functools.partial(
        ours, passes=True, overlap=True, inductor=True
    ),
    "torchspmd, overlapped, rows": functools.partial(
        ours, passes=True, overlap=True, rows=True
    ),
    "torchspmd, overlapped, rows, inductor": functools.partial(
        ours, passes=True, overlap=True, inductor=True, rows=True
    ),
    **SHARDED,
}


def measure(name: str, workload: Workload, steps: int) -> float:
    """Seconds for a step of a variant in its steady state.

    A step that leaves work behind begins with what the one before it left; what is pending
    at the very end is made off the clock. So the clock starts behind a step too: behind a
    barrier the first one would find its reductions done.
    """
    model, optim, batch = workload.build()
    build = {**BASES, **VARIANTS}[name]
    model, step = build(model)
    if name.startswith("FSDP2"):
        optim = _optimizer(model)
    for _ in range(4):  # cold optimizer, warm one, and two in the steady state
        step(model, optim, batch)
    wait_for_all(workload.device)  # ranks that share a device must do so meanwhile
    step(model, optim, batch).item()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(model, optim, batch)
    loss.item()  # on a GPU: until the last step has computed it
    seconds = (time.perf_counter() - start) / steps
    if hasattr(step, "flush"):
        step.flush()
    wait_for_all(workload.device)
    return seconds


def measure_wire(workload: Workload, steps: int) -> float:
    """Seconds to reduce all gradients in buckets, with nothing else to do."""
    model, _, _ = workload.build()
    buckets = empty_buckets(model)
    for _ in range(2):
        dist.all_reduce(buckets[0])
    wait_for_all(workload.device)
    start = time.perf_counter()
    for _ in range(steps):
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()
    wait_for_all(workload.device)
    return (time.perf_counter() - start) / steps


def wait_for_all(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
