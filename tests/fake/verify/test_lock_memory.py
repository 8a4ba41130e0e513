"""The memory figures of a lock, against what can be counted by hand."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torchspmd import parallelize_module
from torchspmd.parallel import ColwiseParallel, RowwiseParallel
from torchspmd.testing import fake_mesh
from torchspmd.verify.lock.lockfile import Memory
from torchspmd.verify.lock.memory import ON_FSDP, MemoryWatch

WIDTH, BATCH, FLOAT = 16, 6, 4
WEIGHT = WIDTH * WIDTH * FLOAT
ACTIVATION = BATCH * WIDTH * FLOAT


def layers(number):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)))


def watch_step(model, optimizer, *, call=None, batch=BATCH):
    with MemoryWatch() as watch:
        (call or model)(torch.ones(batch, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch


def test_plain_layers():
    model = layers(3)
    model.register_buffer("table", torch.ones(5))
    watch = watch_step(model, torch.optim.Adam(model.parameters()))
    # Each layer keeps its input; Adam keeps two moments and a step.
    assert watch.memory() == Memory(
        parameters=3 * WEIGHT,
        buffers=5 * FLOAT,
        gradients=3 * WEIGHT,
        optimizer=3 * (2 * WEIGHT + FLOAT),
        activations=3 * ACTIVATION,
    )
    assert watch.notes == set()


def test_one_storage_counts_once_and_parameters_not_at_all():
    model = layers(1)

    def twice(x):
        x = model(x)
        return x.sigmoid() * x.view(-1, WIDTH)  # x and the sigmoid, each kept twice

    watch = watch_step(model, torch.optim.SGD(model.parameters()), call=twice)
    assert watch.memory().activations == 3 * ACTIVATION
    assert watch.memory().optimizer == 0


def test_the_peak_not_the_sum():
    model = layers(2)
    with MemoryWatch() as watch:
        for batch in (2, 6, 4):
            model(torch.ones(batch, WIDTH)).sum().backward()
    assert watch.memory().activations == 2 * 6 * WIDTH * FLOAT
    assert watch.memory().gradients == 2 * WEIGHT  # seen when the model is called again


def test_checkpointing_keeps_the_inputs_of_the_blocks():
    blocks = nn.Sequential(layers(3), layers(3))

    def call(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    watch = watch_step(blocks, torch.optim.SGD(blocks.parameters()), call=call)
    assert watch.memory().activations == 2 * ACTIVATION


def test_shards_are_what_one_rank_holds():
    with fake_mesh(4, ("tp",)) as mesh:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = parallelize_module(layers(2), mesh, plan)
        watch = watch_step(model, torch.optim.Adam(model.parameters()))
    memory = watch.memory()
    assert memory.parameters == memory.gradients == 2 * WEIGHT // 4
    assert memory.optimizer == 2 * (2 * WEIGHT // 4 + FLOAT)
    assert memory.activations == ACTIVATION + ACTIVATION // 4


def test_fully_sharded_parameters_are_no_activations():
    with fake_mesh(4, ("dp",)) as mesh:
        model = layers(2)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        watch = watch_step(model, torch.optim.SGD(model.parameters()))
    assert watch.memory() == Memory(
        2 * WEIGHT // 4, 0, 2 * WEIGHT // 4, 0, 2 * ACTIVATION
    )
    assert watch.notes == {ON_FSDP}


def test_the_meta_device():
    model = layers(2).to("meta")
    with MemoryWatch() as watch:
        model(torch.ones(BATCH, WIDTH, device="meta")).sum().backward()
    assert watch.memory().parameters == 2 * WEIGHT
    assert watch.memory().activations == 2 * ACTIVATION


def test_nothing_is_left_behind():
    call = nn.Module.__call__
    model = layers(1)
    watch_step(model, torch.optim.SGD(model.parameters()))
    assert nn.Module.__call__ is call
    x = torch.ones(2, requires_grad=True)
    assert isinstance(x.exp().grad_fn._saved_result, torch.Tensor)
