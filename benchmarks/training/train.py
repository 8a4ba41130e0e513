"""Train a model on random data, on one GPU or under torchrun.

    python benchmarks/training/train.py --model llama --precision autocast --recompute
    torchrun --nproc-per-node 4 benchmarks/training/train.py --parallel fsdp2
    torchrun --nproc-per-node 2 benchmarks/training/train.py --parallel fully_shard

An ordinary training script: it knows nothing of rehearsals. At the end of each step it
prints what ``torch.cuda`` says of memory since the last one, as any such script may.
``--timed-steps N`` makes N more steps after those and prints their seconds, each one by
itself from one synchronisation to the next; then N in a row as training makes them, three
times, and prints the middle one's.
``replicate`` and ``fully_shard`` are those of ``torchspmd.compile``.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import MODELS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

COMPILED = ("replicate", "fully_shard")  # whole steps, by torchspmd.compile


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8, help="on each rank")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "autocast"], default="bf16"
    )
    parser.add_argument("--recompute", action="store_true", help="checkpoint blocks")
    parser.add_argument(
        "--optimizer",
        choices=["adamw-fused", "adamw-foreach", "sgd"],
        default="adamw-fused",
    )
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--parallel",
        choices=["none", "ddp", "fsdp2", "hsdp", *COMPILED],
        default="none",
    )
    parser.add_argument(
        "--backend",
        choices=["graph", "inductor"],
        default="graph",
        help="of torchspmd.compile",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="of torchspmd.compile; otherwise it chooses",
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timed-steps", type=int, default=0, help="more of them")
    return parser.parse_args()


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    kind, _ = MODELS[options.model]
    with device:
        model = kind(
            layers=options.layers,
            width=options.width,
            sequence=options.sequence,
            recompute=options.recompute,
        )
    masters = ("fsdp2", "hsdp", "fully_shard")  # parameters stay in float32
    if options.precision == "bf16" and options.parallel not in masters:
        model = model.to(torch.bfloat16)
    return parallelize(model, options, device)


def parallelize(
    model: nn.Module, options: argparse.Namespace, device: torch.device
) -> nn.Module:
    if options.parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index])
    if options.parallel in ("fsdp2", "hsdp"):
        world_size = dist.get_world_size()
        if options.parallel == "hsdp":
            shape, names = (2, world_size // 2), ("replicate", "shard")
        else:
            shape, names = (world_size,), ("shard",)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
        policy = mixed_precision(options)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def mixed_precision(options: argparse.Namespace) -> MixedPrecisionPolicy:
    if options.precision == "bf16":
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return MixedPrecisionPolicy()


def autocast(options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    if options.precision == "autocast":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def compiled_step(options: argparse.Namespace) -> Callable[..., torch.Tensor]:
    """A step of ``main``, for ``torchspmd.compile``."""
    from torchspmd import compile

    def train_step(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        with autocast(options):
            loss = model(inputs, targets)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    policy = mixed_precision(options) if options.parallel == "fully_shard" else None
    return compile(
        train_step,
        parallel=options.parallel,
        backend=options.backend,
        mp_policy=policy,
        overlap=True if options.overlap else None,
        shadow=0,
    )


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    fused = name == "adamw-fused"
    return torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=fused, foreach=not fused
    )


def report(phase: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        figures = {
            "phase": phase,
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        print(json.dumps(figures), flush=True)
    torch.cuda.reset_peak_memory_stats()


class Clock:
    """Seconds of steps: ``count`` from ``first`` on alone, then as many in a row."""

    ROUNDS = 3  # of those in a row

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.in_a_row = first + count  # where those begin
        self.last = self.in_a_row + self.ROUNDS * count
        self.wall: list[float] = []
        self.event: list[float] = []
        self.host: list[float] = []
        self.rounds: list[float] = []

    def begin(self, step: int) -> None:
        """Before a step."""
        place = step - self.in_a_row
        if self.first <= step and self.count and (place < 0 or place % self.count == 0):
            torch.cuda.synchronize()
            self.start_event = torch.cuda.Event(enable_timing=True)
            self.start = time.perf_counter()
            self.start_event.record()

    def end(self, step: int) -> None:
        """After a step; prints the figures after the last one."""
        if self.first <= step < self.in_a_row:
            end_event = torch.cuda.Event(enable_timing=True)
            end_event.record()
            self.host.append(time.perf_counter() - self.start)
            torch.cuda.synchronize()
            self.wall.append(time.perf_counter() - self.start)
            self.event.append(self.start_event.elapsed_time(end_event) / 1e3)
        elif self.in_a_row <= step and (step + 1 - self.in_a_row) % self.count == 0:
            torch.cuda.synchronize()
            self.rounds.append((time.perf_counter() - self.start) / self.count)
        if self.count and step == self.last - 1:
            if not dist.is_initialized() or dist.get_rank() == 0:
                figures: dict[str, object] = {"wall": self.wall, "event": self.event}
                figures |= {"host": self.host, "rounds": self.rounds}
                figures |= {
                    "phase": "seconds",
                    "in_a_row": statistics.median(self.rounds),
                }
                print(json.dumps(figures), flush=True)


def main() -> None:
    options = arguments()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= torch.cuda.device_count():  # ranks that share one GPU
        device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    if options.parallel != "none":
        dist.init_process_group("nccl", device_id=device)
    model = build(options, device)
    optim = build_optimizer(options.optimizer, model)
    run = torch.compile(model) if options.compile else model
    train_step = compiled_step(options) if options.parallel in COMPILED else None
    image_dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    make_batch = MODELS[options.model][1]
    clock = Clock(options.steps, options.timed_steps)
    report("initialisation")
    for step in range(clock.last):
        clock.begin(step)
        inputs, targets = make_batch(
            options.batch, options.sequence, device, image_dtype
        )
        if train_step is not None:
            loss = train_step(model, optim, inputs, targets)
        else:
            with autocast(options):
                loss = run(inputs, targets)
            loss.backward()
            if options.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optim.step()
            optim.zero_grad()
        if step < options.steps:
            report(f"step {step}")
        clock.end(step)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
