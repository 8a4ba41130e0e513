"""Training that a search runs in processes of its own: these import it by its name."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from torchspmd import DataParallel, compile, parallelize_module


def train(layers, width):
    """Two steps of equal layers."""
    blocks = [nn.Linear(width, width, device="cuda") for _ in range(layers)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4096, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_layout(plan, order=None, batch=64):
    """Three steps of a model with a plan; of a compiled step, where passes are given."""
    dist.init_process_group("nccl")
    mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
    if plan is not None:
        parallelize_module(model, mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = train_step
    if order is not None:
        parallel = DataParallel("replicate")
        step = compile(train_step, parallel=parallel, mesh=mesh["dp"], passes=order)
    for _ in range(3):
        step(model, optimizer, torch.ones(batch, 1024, device="cuda"))


def train_step(model, optimizer, batch):
    """One step of a compiled loop."""
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_pipeline(stages, micro_batches):
    """A training loop that is longer than anybody needs, of a pipeline."""
    dist.init_process_group("nccl")
    stage, device = dist.get_rank() % stages, torch.device("cuda")
    groups, _ = dist.new_subgroups(stages)
    layers = [nn.Linear(2048, 2048, device=device) for _ in range(8 // stages)]
    model = nn.Sequential(*layers)
    part = PipelineStage(model, stage, stages, device, group=groups)
    schedule = Schedule1F1B(part, micro_batches, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10**9):
        batch = torch.ones(1024 * micro_batches, 2048, device=device)
        schedule.step(*([batch] if stage == 0 else []), target=batch)
        optimizer.step()
        optimizer.zero_grad()
