"""What trainers and other libraries do around a step, in a few lines of each."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.evaluation import evaluated_places
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.memory import count_memory
from torchspmd.rehearse.recording import (
    Category,
    Mark,
    MarkKind,
    Op,
    Phase,
    Synchronize,
)
from torchspmd.rehearse.values import NoValueError


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ----------------------------------------------------------------------------
# Values that come back to the host


def test_a_copy_on_the_host_is_not_garbage(rehearse):
    with rehearse() as recording:
        losses = torch.randn(1000, device="cuda").exp().cpu()
        assert (losses.float().numpy() == 1).all()
        with pytest.raises(NoValueError):
            bool(losses[0] > 3)
    assert any("reads values" in note for note in recording.notes)


def test_known_values_come_back_as_they_were(rehearse):
    """As accelerate sends the state of a generator from rank 0 to the others."""
    with rehearse(8):
        dist.init_process_group("nccl")
        generator = torch.Generator().manual_seed(3)
        expected = generator.get_state()
        state = expected.to("cuda")
        dist.broadcast(state, 0)
        generator.set_state(state.cpu())
        assert torch.equal(generator.get_state(), expected)


def test_a_copy_into_a_buffer_of_the_host_writes_it(rehearse):
    with rehearse() as recording:
        buffer = torch.full((4,), 7.0).pin_memory()
        buffer.copy_(torch.randn(4, device="cuda"), non_blocking=True)
        known = torch.zeros(2, dtype=torch.int64)
        known.copy_(torch.tensor([3, 4], device="cuda"))
    assert (buffer.tolist(), known.tolist()) == ([1.0] * 4, [3, 4])
    assert any("reads values: 1.0" in note for note in recording.notes)


def reduced(operation):
    value = torch.tensor([3, 1], device="cuda")
    dist.all_reduce(value, op=operation)
    return value.tolist()


def gathered():
    value = torch.tensor([3, 1], device="cuda")
    lists = [torch.empty_like(value) for _ in range(4)]
    dist.all_gather(lists, value)
    joined = torch.empty(8, dtype=torch.int64, device="cuda")
    # torch 2.13 has another name for it, and warns of this one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(joined, value)
    return [each.tolist() for each in lists], joined.tolist()


def decided_by_all():
    """As Lightning asks whether all ranks want to stop."""
    decision = torch.tensor(1, device="cuda")
    dist.all_reduce(decision, op=dist.ReduceOp.SUM)
    return bool(decision == dist.get_world_size())


COLLECTIVES = {
    "sum": (lambda: reduced(dist.ReduceOp.SUM), [12, 4]),
    "max": (lambda: reduced(dist.ReduceOp.MAX), [3, 1]),
    "gathered": (gathered, ([[3, 1]] * 4, [3, 1] * 4)),
    "functional": (
        lambda: functional.all_reduce(
            torch.tensor([3, 1], device="cuda"), "sum", dist.group.WORLD
        ).tolist(),
        [12, 4],
    ),
    "decision": (decided_by_all, True),
    # What ranks have of it is not told: no value is kept that was true before.
    "product": (lambda: reduced(dist.ReduceOp.PRODUCT), [1, 1]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_known_values_behind_a_collective(rehearse, name):
    call, expected = COLLECTIVES[name]
    with rehearse(4):
        dist.init_process_group("nccl")
        assert call() == expected


def test_ddp_keeps_the_order_of_its_buckets(rehearse):
    """Its reducer reads it back from the device in the second step."""
    with rehearse(4) as recording:
        dist.init_process_group("nccl")
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        model = DistributedDataParallel(layers)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    assert recording.steps == 3


def test_the_host_waits_for_copies_that_block(rehearse):
    with rehearse() as recording:
        there = torch.ones(4).to("cuda")
        there.cpu()
        torch.ones(4).to("cuda", non_blocking=True)
        there.to("cpu", non_blocking=True)
    waits = [each for each in recording.events if isinstance(each, Synchronize)]
    assert [each.copies_to_device for each in waits] == [True, False]
    assert [each.reads_value for each in waits] == [False, True]


def test_operators_of_libraries_choose_all(rehearse):
    """As the boxes that are left of those which overlap."""
    with torch.library._scoped_library("trainers", "FRAGMENT") as library:
        library.define("keep(Tensor boxes, Tensor scores) -> Tensor")
        operator = torch.ops.trainers.keep

        @torch.library.register_fake("trainers::keep", lib=library)
        def _(boxes, scores):
            count = torch.library.get_ctx().new_dynamic_size()
            return boxes.new_empty(count, dtype=torch.int64)

        with rehearse() as recording:
            boxes = torch.randn(6, 4, device="cuda")
            for _ in range(2):
                assert operator(boxes, boxes[:, 0]).shape == (6,)
    assert ["chooses by values (trainers.keep" in x for x in recording.notes] == [True]
    waits = [each for each in recording.events if isinstance(each, Synchronize)]
    assert len(waits) == 2


# ----------------------------------------------------------------------------
# Steps


def test_a_closure_is_no_part_of_the_update(rehearse):
    """As Lightning has its optimizers call the training step."""
    with rehearse() as recording:
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.Adam(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, device="cuda")).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    phases = {
        event.site.phase
        for event in recording.events
        if isinstance(event, Op) and event.name.startswith(("aten.addmm", "aten.mm"))
    }
    assert phases == {Phase.FORWARD, Phase.BACKWARD}
    updates = [
        event
        for event in recording.events
        if isinstance(event, Op) and event.site.phase is Phase.OPTIMIZER
    ]
    assert updates
    gradients = [
        info.name
        for info in recording.storages.values()
        if info.category is Category.GRADIENT
    ]
    assert sorted(set(gradients)) == ["Linear.bias", "Linear.weight"]


def test_evaluation_is_told_from_training(rehearse):
    with rehearse() as recording:
        model, teacher = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.no_grad():
                teacher(torch.randn(4, 8, device="cuda"))
            train(model, optimizer, steps=1)
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(4, 8, device="cuda")).cpu()
            model.train()
    events = recording.events
    marks = [each for each in events if isinstance(each, Mark)]
    passes = [mark for mark in marks if mark.kind is MarkKind.EVALUATION_BEGIN]
    assert len(passes) == 6
    ranges = evaluated_places(events, range(len(events)))
    assert len(ranges) == 2
    products = [
        place
        for place, event in enumerate(events)
        if isinstance(event, Op) and event.name == "aten.addmm.default"
    ]
    evaluated = [place for place in products if any(place in each for each in ranges)]
    assert (len(products), len(evaluated)) == (10, 6)


# ----------------------------------------------------------------------------
# Parameters and states


def test_addresses_tell_parameters_apart(rehearse):
    """As accelerate finds an optimizer's parameters after FSDP2 has replaced them."""
    with rehearse():
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3)))
        for tensors in ([*model.parameters()], [*model.cuda().parameters()]):
            addresses = [each.data_ptr() for each in tensors]
            assert len(set(addresses)) == 6
            ends = [a + t.nbytes for a, t in zip(addresses, tensors, strict=True)]
            pairs = sorted(zip(addresses, ends, strict=True))
            assert all(
                end <= begin for (_, end), (begin, _) in itertools.pairwise(pairs)
            )
        weight = model[0].weight
        assert weight[1:].data_ptr() == weight.data_ptr() + 2048 * 4
        assert weight.untyped_storage().data_ptr() == weight.data_ptr()


def test_a_model_leaves_the_device_while_ddp_holds_it(rehearse):
    """As Lightning does when a run ends."""
    with rehearse(4):
        dist.init_process_group("nccl")
        model = nn.Linear(2048, 2048).cuda()
        wrapped = DistributedDataParallel(model)
        wrapped(torch.randn(4, 2048, device="cuda")).sum().backward()
        assert model.cpu().weight.device.type == "cpu"
        assert model.cuda().weight.is_cuda


def test_fsdp1_takes_its_module_by_name(rehearse):
    with rehearse(4):
        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(
            module=nn.Linear(8, 8).cuda(), use_orig_params=True
        )
        model(torch.randn(4, 8, device="cuda")).sum().backward()


class Quantized(torch.Tensor):
    """Codes and their scale, as optimizers with states of 8 bits keep them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, device=codes.device, dtype=torch.float32
        )

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Adam8(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            codes = torch.zeros_like(parameter, dtype=torch.uint8)
            state = Quantized(codes, torch.zeros(4, device="cuda"))
            self.state[parameter].setdefault("exp_avg", state)


def test_states_inside_of_wrappers_are_states(rehearse, live_bytes):
    with rehearse() as recording:
        model = nn.Linear(64, 64, bias=False).cuda()
        optimizer = Adam8(model.parameters())
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].is_cuda
        assert live_bytes(recording)["optimizer state"] == 64 * 64 + 4 * 4


def test_averaged_weights_are_no_temporaries(rehearse):
    """A smaller batch would not make them smaller."""
    with rehearse() as recording:
        model = nn.Linear(512, 512, bias=False).cuda()
        averaged = [each.detach().clone() for each in model.parameters()]
        train(
            nn.Sequential(nn.Linear(8, 512).cuda(), model),
            torch.optim.SGD(model.parameters(), lr=0.1),
        )
        assert averaged[0].is_cuda
    account = count_memory(recording, load_gpu("h100"), AllocatorSettings())
    assert account.as_json()["by_category"]["made before training"] == 512 * 512 * 4


# ----------------------------------------------------------------------------
# Processes


def played(rank, seen):
    dist.init_process_group("nccl")
    seen.append((rank, dist.get_rank()))


def test_a_script_that_starts_processes_goes_on_as_one(rehearse):
    seen = []
    with rehearse(16, rank=11):
        context = mp.spawn(played, args=(seen,), nprocs=8, join=False)
        assert context.join()
    assert seen == [(3, 11)]
