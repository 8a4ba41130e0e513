"""Virtual ranks give what real gloo ranks give, bit for bit."""

import torch
import torch.distributed as dist
from torch import nn
from training import train

from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.graph.reduction_order import reduce_values
from torchspmd.step.virtual.run import next_inputs, run_virtual

STEPS = 3


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 37), nn.Tanh(), nn.Linear(37, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch_of(rank, step):
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(97 * rank + step))


def differing(left, right):
    """How many elements have other bits."""
    count = 0
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape
            count += int(
                (
                    a.reshape(-1).view(torch.int32) != b.reshape(-1).view(torch.int32)
                ).sum()
            )
        else:
            assert a == b
    return count


def compare(orders):
    """Elements that differ between the real and the virtual run, by order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optim = model_and_optimizer()
    compiled = compile(parallel_mode=DataParallel(reduce="sum"))(train)
    for step in range(2):
        compiled(model, optim, batch_of(rank, step))
    (program,) = compiled.programs
    inventory = take_inventory((model, optim, batch_of(rank, 0)), {}, lift_numbers=True)
    flat = [
        v.detach().clone() if isinstance(v, torch.Tensor) else v
        for v in inventory.flat_inputs()
    ]
    (place,) = inventory.inputs.values()
    gathered = [None] * size
    dist.all_gather_object(gathered, flat)

    def inputs(step, virtual_rank):
        values = list(gathered[virtual_rank])
        values[place] = batch_of(virtual_rank, step)
        return values

    real = []
    given = inputs(0, rank)
    for step in range(STEPS):
        given[place] = batch_of(rank, step)
        with torch.no_grad():
            real.append(program.graph(*given))
        (given,) = next_inputs(program.graph.graph, [given], [real[-1]])
    found = {}
    for order in orders:
        run = run_virtual(program, size, order=order, steps=STEPS, inputs=inputs)
        found[order] = [
            differing(real[step], run.outputs[step][rank]) for step in range(STEPS)
        ]
    return found


def test_two_ranks_in_any_order(ranks2):
    for found in ranks2.run(compare, ["rank", "ring", "tree"]):
        assert found == {order: [0] * STEPS for order in ("rank", "ring", "tree")}


def test_four_ranks_in_the_order_of_the_ring(ranks4):
    for found in ranks4.run(compare, ["rank", "ring", "tree"]):
        assert found["ring"] == [0] * STEPS
        assert found["rank"][-1] > 0 and found["tree"][-1] > 0


def reduce_all(cases):
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype, number, op in cases:
        values = [drawn(number, rank).to(dtype) for rank in range(size)]
        started = functional.all_reduce(values[rank], op, group)
        real = functional.wait_tensor(started)
        if not torch.equal(real, reduce_values(values, op, "ring")):
            wrong.append((dtype, number, op))
    return wrong


def drawn(number, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, dtype=torch.float64, generator=generator)


def test_the_ring_has_gloos_chunk_edges(ranks4):
    # Not multiples of the ranks, not of twice the ranks.
    cases = [
        (dtype, number, op)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        for number in (1, 3, 5, 12, 16, 1001)
        for op in ("sum", "avg", "product", "max")
    ]
    cases.append((torch.float64, 2**20 + 3, "sum"))  # more than two segments a rank
    for wrong in ranks4.run(reduce_all, cases):
        assert wrong == []


def reduce_parts():
    """Reduce-scatter and the coalesced form, against what virtual ranks do."""
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = [drawn(20 * size, seed).float() for seed in range(size)]
    part = functional.wait_tensor(
        functional.reduce_scatter_tensor(whole[rank], "sum", size, group)
    )
    pair = functional.all_reduce_coalesced([whole[rank], whole[rank][:7]], "sum", group)
    pair = [functional.wait_tensor(each) for each in pair]
    joined = reduce_values([torch.cat([w, w[:7]]) for w in whole], "sum", "ring")
    return (
        torch.equal(part, reduce_values(whole, "sum", "ring").chunk(size)[rank]),
        torch.equal(torch.cat(pair), joined),
    )


def test_what_gloo_makes_of_other_sums(ranks4):
    assert ranks4.run(reduce_parts) == [(True, True)] * 4


def train_verified(verify):
    model, optim = model_and_optimizer()
    step = compile(
        parallel_mode=DataParallel(reduce="sum"),
        gm_transformation=GraphModuleTransformation(enable_graph_optimization=True),
        verify=verify,
    )(train)
    for number in range(3):
        step(model, optim, batch_of(dist.get_rank(), number))
    certificate = step.programs[-1].certificate
    return [p.detach() for p in model.parameters()], certificate.summary()


def compare_verified():
    plain, verified = train_verified(False), train_verified(True)
    return differing(plain[0], verified[0]), verified[1]


def test_verification_on_real_ranks_changes_nothing(ranks2):
    for num_different, summary in ranks2.run(compare_verified):
        assert num_different == 0
        assert "equal bits on 4 virtual ranks (" in summary
