"""Ways to run one data-parallel training step, each in the words of its own system."""

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _models import GPT, Transformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchspmd.step import DataParallel, GraphModuleTransformation, compile

Step = Callable[..., Any]

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BUCKET_MB = 25.0  # where nothing but communication is measured
GPTS: dict[str, dict[str, Any]] = {
    "gpt 12x768": {},
    "gpt 12x768 untied": {"tied": False},
    "gpt 12x768 untied, 8k": {"tied": False, "vocabulary": 8192},
}


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
            model: nn.Module = GPT(**GPTS[self.model]).to(**where)
            vocabulary = model.embed.num_embeddings
            length = 512 if self.device == "cuda" else 32
            batch = torch.randint(vocabulary, (self.batch, length), device=self.device)
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
    model: nn.Module,
    *,
    reshard: bool | None = None,
    compiled: bool = False,
    low: bool = False,
    hybrid: bool = False,
) -> tuple[nn.Module, Step]:
    """FSDP2 by blocks, each compiled by itself where asked."""
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if low:
        options["mp_policy"] = LOW
    if hybrid:
        options["mesh"] = hybrid_mesh(model)
    for block in blocks_of(model):
        if compiled:
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, train_step


def hybrid_mesh(model: nn.Module) -> DeviceMesh:
    """Shards on two ranks each, and replicas of them."""
    device = next(model.parameters()).device.type
    shape = dist.get_world_size() // 2, 2
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


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
            cost="measure",
            enable_inductor=inductor,
        )
    step = compile(
        gm_transformation=transformation,
        parallel_mode=DataParallel("replicate"),
        backend=backend,
    )(train_step)
    return model, step


def ours_auto(
    model: nn.Module, *, parallel: str = "replicate", **options: Any
) -> tuple[nn.Module, Step]:
    """As a user asks for it who leaves the choice to measurements."""
    step = compile(parallel=parallel, cost="measure", **options)(train_step)
    return model, step


def ours_sharded(
    model: nn.Module,
    *,
    passes: bool,
    reshard: bool = True,
    inductor: bool = False,
    overlap: bool = False,
    low: bool = False,
    hybrid: bool = False,
) -> tuple[nn.Module, Step]:
    """Fully sharded parameters, gathered by our passes."""
    transformation = None
    if passes:
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True,
            overlap_iterations=overlap,
            cost="measure",
            enable_inductor=inductor,
        )
    mode = DataParallel(
        "fully_shard",
        reshard_after_forward=reshard,
        mp_policy=LOW if low else None,
    )
    step = compile(
        gm_transformation=transformation,
        parallel_mode=mode,
        mesh=hybrid_mesh(model) if hybrid else None,
    )(train_step)
    return model, step


def alone(model: nn.Module) -> tuple[nn.Module, Step]:
    return model, train_step


def alone_compiled(model: nn.Module) -> tuple[nn.Module, Step]:
    return torch.compile(model), train_step


def at_once(
    model: nn.Module, *, compiled: bool, family: str = "REPLICATED"
) -> tuple[nn.Module, Step]:
    """Compute alone, and send beside it what a family sends, which nothing waits for.

    No order of a real step can be quicker: here any work may run beside any other.
    """
    send = sender(Family[family], model)
    works: list[Any] = []

    def step(*args: Any) -> torch.Tensor:
        while works:
            works.pop().wait()
        works.extend(send())
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
    "FSDP2, mixed": functools.partial(fsdp, low=True),
    "FSDP2, mixed + torch.compile of blocks": functools.partial(
        fsdp, low=True, compiled=True
    ),
    "FSDP2, hybrid": functools.partial(fsdp, hybrid=True),
    "FSDP2, hybrid + torch.compile of blocks": functools.partial(
        fsdp, hybrid=True, compiled=True
    ),
}
_PASSES = functools.partial(ours_sharded, passes=True)
SHARDED: dict[str, Variant] = {
    "torchspmd, sharded, no passes": functools.partial(ours_sharded, passes=False),
    "torchspmd, sharded": _PASSES,
    "torchspmd, sharded, overlapped": functools.partial(_PASSES, overlap=True),
    "torchspmd, sharded, inductor": functools.partial(_PASSES, inductor=True),
    "torchspmd, sharded, no reshard": functools.partial(_PASSES, reshard=False),
    "torchspmd, sharded, no reshard, overlapped": functools.partial(
        _PASSES, reshard=False, overlap=True
    ),
    "torchspmd, sharded, no reshard, inductor": functools.partial(
        _PASSES, reshard=False, inductor=True
    ),
    "torchspmd, sharded, mixed": functools.partial(_PASSES, low=True),
    "torchspmd, sharded, mixed, inductor": functools.partial(
        _PASSES, low=True, inductor=True
    ),
    "torchspmd, sharded, hybrid": functools.partial(_PASSES, hybrid=True),
    "torchspmd, sharded, hybrid, inductor": functools.partial(
        _PASSES, hybrid=True, inductor=True
    ),
}
VARIANTS: dict[str, Variant] = {
    "both at once, nothing waits": functools.partial(at_once, compiled=False),
    "both at once, compiled": functools.partial(at_once, compiled=True),
    "both at once, sharded, compiled": functools.partial(
        at_once, compiled=True, family="SHARDED"
    ),
    "both at once, no reshard, sharded, compiled": functools.partial(
        at_once, compiled=True, family="KEPT"
    ),
    "both at once, sharded, hybrid, compiled": functools.partial(
        at_once, compiled=True, family="HYBRID"
    ),
    **PEERS,
    "torchspmd, no passes": functools.partial(ours, passes=False, overlap=False),
    "torchspmd, passes": functools.partial(ours, passes=True, overlap=False),
    "torchspmd, overlapped iterations": functools.partial(
        ours, passes=True, overlap=True
    ),
    "torchspmd, auto": ours_auto,
    "torchspmd, auto, inductor": functools.partial(ours_auto, backend="inductor"),
    "torchspmd, auto, backend auto": functools.partial(ours_auto, backend="auto"),
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


class Family(Enum):
    """Variants that send the same; called by how that is measured with nothing else."""

    REPLICATED = "all-reduces alone"
    SHARDED = "gathers twice and scatters alone"
    KEPT = "gathers once and scatters alone"  # no reshard
    HYBRID = "gathers and scatters of half the ranks, and all-reduces"

    @classmethod
    def of(cls, name: str) -> "Family":
        """The family of a variant."""
        if "hybrid" in name:
            return cls.HYBRID
        if not name.startswith("FSDP2") and "sharded" not in name:
            return cls.REPLICATED
        return cls.KEPT if "no reshard" in name else cls.SHARDED

    def compares_with(self, other: "Family") -> bool:
        """Whether one may be the peer of the other: users can choose between them."""
        return self is other or {self, other} == {Family.SHARDED, Family.KEPT}


def can_run(name: str, device: str, ranks: int) -> bool:
    """Whether a device has what a variant needs."""
    if device != "cuda" and ("CUDA" in name or "mixed" in name):
        return False
    return "hybrid" not in name or (ranks >= 4 and ranks % 2 == 0)


class Measured(NamedTuple):
    """One variant on one rank.

    Attributes:
        seconds: Those of a step in its steady state.
        peak: Bytes of the device at most, without what compiling took.
        start: Seconds of the first calls beyond those of as many steady steps.
    """

    seconds: float
    peak: int = 0
    start: float = 0.0


WARM_UP = 4  # cold optimizer, warm one, and two in the steady state
TRIAL = 40  # calls until one of two backends is taken


def measure(name: str, workload: Workload, steps: int, cache: str) -> Measured:
    """A step of a variant in its steady state, compiled into a cache of its own.

    A step that leaves work behind begins with what the one before it left; what is pending
    at the very end is made off the clock. So the clock starts behind a step too: behind a
    barrier the first one would find its reductions done.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    model, optim, batch = workload.build()
    if "mixed" in name:
        model = model.float()
    build = {**BASES, **VARIANTS}[name]
    model, step = build(model)
    if name.startswith("FSDP2") or "mixed" in name:
        optim = _optimizer(model)
    wait_for_all(workload.device)
    start = time.perf_counter()
    calls = TRIAL if "backend auto" in name else WARM_UP
    for number in range(calls):
        step(model, optim, batch)
        if number == calls - 2 and workload.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    wait_for_all(workload.device)  # ranks that share a device must do so meanwhile
    warm = time.perf_counter() - start
    step(model, optim, batch).item()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(model, optim, batch)
    loss.item()  # on a GPU: until the last step has computed it
    seconds = (time.perf_counter() - start) / steps
    if hasattr(step, "flush"):
        step.flush()
        told = [line for line in step.explain().splitlines() if "simulated" in line]
        if dist.get_rank() == 0 and told:
            print(name, *map(str.strip, told[-2:]), sep="\n  ", file=sys.stderr)
    wait_for_all(workload.device)
    is_on_gpu = workload.device == "cuda"
    return Measured(
        seconds,
        torch.cuda.max_memory_allocated() if is_on_gpu else 0,
        max(0.0, warm - calls * seconds),
    )


def measure_wires(
    families: list[Family], workload: Workload, steps: int
) -> dict[Family, float]:
    """Seconds to send what each family sends in a step, with nothing else to do."""
    return {each: _measure_wire(each, workload, steps) for each in families}


def _measure_wire(family: Family, workload: Workload, steps: int) -> float:
    model, _, _ = workload.build()
    send = sender(family, model)
    for work in [*send(), *send()]:
        work.wait()
    wait_for_all(workload.device)
    start = time.perf_counter()
    for _ in range(steps):
        for work in send():
            work.wait()
    wait_for_all(workload.device)
    return (time.perf_counter() - start) / steps


def sender(family: Family, model: nn.Module) -> Callable[[], list[Any]]:
    """Starts all that a family sends in one step of this model."""
    buckets = empty_buckets(model)
    size = dist.get_world_size()
    if family is Family.HYBRID:
        mesh = hybrid_mesh(model)
        inside, across = mesh.get_group("shard"), mesh.get_group("replicate")
        size = 2
    else:
        inside, across = dist.group.WORLD, None
    parts = [bucket.new_empty(-(-bucket.numel() // size)) for bucket in buckets]
    wholes = [part.new_empty(part.numel() * size) for part in parts]

    def send() -> list[Any]:
        if family is Family.REPLICATED:
            return [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        works = []
        for whole, part in zip(wholes, parts, strict=True):
            for _ in range(1 if family is Family.KEPT else 2):
                works.append(_gather(whole, part, inside))
            works.append(_scatter(part, whole, inside))
            if across is not None:
                works.append(dist.all_reduce(part, group=across, async_op=True))
        return works

    return send


def _gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    return dist.all_gather_into_tensor(whole, part, group=group, async_op=True)


def _scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    if not whole.is_cuda and dist.get_world_size(group) == 2:
        # Gloo reduces all of it on both: less is sent where they exchange halves.
        halves = torch.empty_like(whole)
        return dist.all_to_all_single(halves, whole, group=group, async_op=True)
    return dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)


def wait_for_all(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
