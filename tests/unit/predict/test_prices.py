"""Prices of operators, collectives and the host, from hand-made recordings."""

import math

import pytest

from torchspmd.errors import UsageError
from torchspmd.predict.collectives import (
    Link,
    Placement,
    collective_seconds,
    place,
    price_comm,
)
from torchspmd.predict.compiled_regions import tensors_taken
from torchspmd.predict.figures import Correction, Figures, Line
from torchspmd.predict.hardware import Figure, Hardware, load_gpu, load_network
from torchspmd.predict.host import HostModel
from torchspmd.predict.operators import Pricer, is_known
from torchspmd.predict.products import factor_of
from torchspmd.predict.traffic import bytes_moved, op_flops
from torchspmd.rehearse.nodes import Nodes, read_nodes
from torchspmd.rehearse.recording import (
    Comm,
    Node,
    Op,
    Phase,
    Site,
    TensorSpec,
)

SITE = Site("net.layer", Phase.FORWARD, 0, "")
EIGHT = Nodes(8)


def tensor(*shape, dtype="bfloat16", stride=None, storage=0):
    if stride is None:
        stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return TensorSpec(shape, stride, dtype, "cuda", storage)


def operator(name, inputs, outputs, phase=Phase.FORWARD, **scalars):
    site = SITE._replace(phase=phase)
    return Op(0, f"aten.{name}", inputs, outputs, tuple(scalars.items()), 0, site)


def product(m, n, k, dtype="bfloat16"):
    inputs = (tensor(m, k, dtype=dtype), tensor(k, n, dtype=dtype))
    return operator("mm.default", inputs, (tensor(m, n, dtype=dtype),))


@pytest.fixture
def pricer():
    return Pricer(Figures(load_gpu("h100")))


# --- bytes and operations -----------------------------------------------------------


def test_operations_are_counted_from_shapes():
    assert op_flops(product(2, 3, 5)) == 60
    q, kv = tensor(2, 8, 64, 16), tensor(2, 2, 64, 16)
    attention = "_scaled_dot_product_flash_attention.default"
    forward = operator(attention, (q, kv, kv), (q,), is_causal=False)
    assert op_flops(forward) == 4 * 2 * 8 * 64 * 64 * 16
    causal = operator(attention, (q, kv, kv), (q,), is_causal=True)
    assert op_flops(causal) == op_flops(forward) / 2
    name = "_scaled_dot_product_flash_attention_backward.default"
    backward = operator(name, (q, q, kv, kv, q), (q, kv, kv), is_causal=True)
    assert op_flops(backward) == 2.5 * op_flops(causal)
    x, w, y = tensor(4, 8, 32, 32), tensor(16, 8, 3, 3), tensor(4, 16, 32, 32)
    convolution = operator("convolution.default", (x, w), (y,), groups=1)
    assert op_flops(convolution) == 2 * 4 * 16 * 32 * 32 * 8 * 9
    gradients = operator(
        "convolution_backward.default",
        (y, x, w),
        (x, w),
        output_mask=[True, True, False],
    )
    assert op_flops(gradients) == 2 * op_flops(convolution)
    assert op_flops(operator("add.Tensor", (x, x), (x,))) == 0


def test_bytes_are_those_that_are_touched():
    x, row = tensor(64, 128), tensor(64, 128, stride=(0, 1))
    assert bytes_moved("aten.add.Tensor", (x, row), (x,)) == 2 * 2 * 64 * 128 + 256
    table, out = tensor(50000, 128), tensor(64, 128)
    where = tensor(64, dtype="int64")
    moved = bytes_moved("aten.embedding.default", (table, where), (out,))
    assert moved == 64 * 8 + 2 * 2 * 64 * 128
    assert bytes_moved("aten.zero_.default", (x,), (x,)) == 2 * 64 * 128
    params = tuple(tensor(100, dtype="float32", storage=at) for at in range(12))
    eight, square = params[:8], (*params[:4], *params[4:8], *params[4:8])
    assert bytes_moved("aten._fused_adamw_.default", eight, ()) == 8 * 400 * 7 // 4
    assert bytes_moved("aten._foreach_add_.List", eight, ()) == 4 * 400 * 3
    assert bytes_moved("aten._foreach_lerp_.Scalar", eight, ()) == 4 * 400 * 3
    assert bytes_moved("aten._foreach_copy_.default", eight, ()) == 4 * 400 * 2
    assert bytes_moved("aten._foreach_addcdiv_.ScalarList", params, ()) == 4 * 400 * 4
    # The gradient that is squared is read once.
    assert bytes_moved("aten._foreach_addcmul_.Scalar", square, ()) == 4 * 400 * 3


# --- operators ----------------------------------------------------------------------


def test_a_large_product_is_near_the_best_rate_and_a_small_one_at_the_floor(pricer):
    cost = pricer.price(product(8192, 8192, 8192))
    assert cost.kind == "matmul"
    rate = cost.flops / cost.seconds
    assert 0.5e15 < rate < 0.8e15
    assert pricer.price(product(16, 16, 16)).seconds < 2e-5


def test_waves_that_are_not_full_cost_as_much_as_full_ones(pricer):
    """132 multiprocessors: one more row of tiles is one more wave."""
    full = pricer.price(product(128 * 132, 256, 8192)).seconds
    more = pricer.price(product(128 * 133, 256, 8192)).seconds
    assert more > 1.1 * full


def test_fp32_products_are_slower_than_bf16_and_tf32_is_between(pricer):
    exact = product(4096, 4096, 4096, "float32")
    rounded = exact._replace(scalars=(("allow_tf32", True),))
    bf16 = product(4096, 4096, 4096)
    times = [pricer.price(op).seconds for op in (bf16, rounded, exact)]
    assert times == sorted(times)
    assert times[2] > 4 * times[0]


def test_what_memory_bounds_is_priced_by_its_bytes(pricer):
    x = tensor(1 << 28)
    cost = pricer.price(operator("add.Tensor", (x, x), (x,)))
    assert cost.kind == "memory"
    rate = cost.nbytes / cost.seconds
    assert 0.6 * 3.35e12 < rate <= 3.4e12


def test_views_cost_nothing(pricer):
    x = tensor(1 << 20)
    view = operator("view.default", (x,), (x,))._replace(views=True)
    assert pricer.price(view).seconds == 0
    assert pricer.price(operator("_unsafe_view.default", (x,), (x,))).seconds == 0
    assert is_known("aten._unsafe_view.default")


def test_an_unknown_operator_is_priced_by_its_bytes(pricer):
    x = tensor(1 << 28)
    op = operator("x", (x,), (x,))._replace(name="mylib.surprise.default")
    assert pricer.price(op).seconds > 2 * 2 * (1 << 28) / 4e12
    assert not is_known(op.name)
    assert is_known("aten.mm.default")


def test_copies_from_the_host_go_over_its_link(pricer):
    here = tensor(1 << 27)._replace(device="cpu")
    cost = pricer.price(operator("_to_copy.default", (here,), (tensor(1 << 27),)))
    assert cost.kind == "copy"
    assert cost.seconds == pytest.approx(2 * (1 << 27) / 5.54e10, rel=0.01)


def test_measured_rows_correct_the_formula_and_carry_over_to_another_chip():
    h100, op = load_gpu("h100"), product(4096, 4096, 4096)
    figures = {k: f for k, f in h100.figures.items() if not k.startswith("matmul")}

    def seconds(rows):
        more = {"matmul.bfloat16": Figure(rows, "test")}
        gpu = Hardware("x", "x", "9.0", {**figures, **more})
        return Pricer(Figures(gpu)).price(op).seconds

    assert seconds(((0, 1, 4096, 4096, 4096, 1e-3),)) == pytest.approx(1e-3)
    near = seconds(((0, 1, 4096, 4096, 4096, 1e-3), (0, 1, 64, 64, 64, 1.0)))
    assert near == pytest.approx(1e-3, rel=0.05)


def test_what_multiprocessors_bound_does_not_follow_the_memory_of_another_chip():
    x, rows = tensor(1 << 18, 1024), tensor(1 << 18, 1, dtype="float32")

    def seconds(gpu, name, inputs, outputs):
        op = operator(name, inputs, outputs)
        return Pricer(Figures(load_gpu(gpu))).price(op).seconds

    def ratio(gpu, name, inputs, outputs):
        there = seconds("h200", name, inputs, outputs)
        return seconds(gpu, name, inputs, outputs) / there

    norm = "native_layer_norm.default", (x,), (x, rows, rows)
    add = "add.Tensor", (x, x), (x,)
    # The H100 has the H200's multiprocessors, and 0.7 of its memory's rate.
    assert ratio("h100", *add) == pytest.approx(4.8 / 3.35, rel=0.02)
    assert 1 < ratio("h100", *norm) < 1.2
    # The A100 has fewer and slower ones, and less of both.
    clocks = 132 * 1.98 / (108 * 1.41)
    assert clocks < ratio("a100", *norm) < ratio("a100", *add)


def test_corrections_between_cases():
    line = Line([(0.0, 1.0), (2.0, 4.0)])
    assert [line.at(x) for x in (-1, 0, 1, 5)] == pytest.approx([1, 1, 2, 4])
    assert Line([]).at(3) == 1
    assert Correction([], []).at((1, 2)) == 1
    both = Correction([(0.0,), (1.0,)], [1.0, 4.0])
    assert both.at((0.5,)) == pytest.approx(2.0)


# --- collectives --------------------------------------------------------------------


def slower(tmp_path, figure, part):
    """An H200 of which one figure is a part of what it was."""
    gpu = load_gpu("h200")
    table, key = figure.split(".")
    value = f"{{ value = {gpu.number(figure) * part}, source = 'me' }}"
    path = tmp_path / "slower.toml"
    path.write_text(f'like = "h200"\n[{table}]\n{key} = {value}\n')
    return load_gpu(str(path))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_collectives_follow_the_links_that_a_file_gives(kind, ranks, tmp_path):
    """Tables that it takes from the file it is like were measured on other links."""
    half, where = slower(tmp_path, "bandwidth.nvlink", 0.5), (ranks, 1, ranks)
    before, now = (
        collective_seconds(kind, 1 << 30, Placement(*where), Figures(gpu))
        for gpu in (load_gpu("h200"), half)
    )
    assert now == pytest.approx(2 * before, rel=0.05)


def test_collectives_that_were_measured_follow_the_links_too(tmp_path):
    a100, path = load_gpu("a100"), tmp_path / "bridged.toml"
    path.write_text(
        'like = "a100"\n[bandwidth]\nnvlink = { value = 1.5e11, source = "me" }\n'
    )
    before, now = (
        collective_seconds("all_reduce", 1 << 29, Placement(8, 1, 8), Figures(gpu))
        for gpu in (a100, load_gpu(str(path)))
    )
    assert now == pytest.approx(2 * before, rel=0.02)


def test_kernels_follow_the_memory_that_a_file_gives(tmp_path):
    x = tensor(1 << 28)
    add = operator("add.Tensor", (x, x), (x,))
    half = slower(tmp_path, "bandwidth.memory", 0.5)
    before, now = (
        Pricer(Figures(gpu)).price(add).seconds for gpu in (load_gpu("h200"), half)
    )
    assert now == pytest.approx(2 * before, rel=0.05)


def test_products_follow_the_rates_that_a_file_gives(tmp_path):
    half = slower(tmp_path, "flops.bfloat16_achieved", 0.5)
    before, now = (
        Pricer(Figures(gpu)).price(product(8192, 8192, 8192)).seconds
        for gpu in (load_gpu("h200"), half)
    )
    assert now == pytest.approx(2 * before, rel=0.1)


def test_ranks_are_placed_on_nodes_in_their_order():
    assert place(tuple(range(16)), EIGHT) == (16, 2, 8)
    assert place((0, 8, 16, 24), EIGHT) == (4, 4, 1)
    assert place((0, 2), EIGHT) == (2, 1, 2)


def test_ranks_are_placed_on_nodes_as_told(tmp_path):
    cyclic = read_nodes("cyclic", 16, 8)
    assert place(tuple(range(8)), cyclic) == (8, 2, 4)
    assert place(tuple(range(0, 16, 2)), cyclic) == (8, 1, 8)
    hosts = tmp_path / "hosts"
    hosts.write_text("b\na\n\na\nb\n")
    listed = read_nodes(str(hosts), 4, 2)
    assert listed.order == (0, 1, 1, 0)
    assert listed.environment(3, 4) == {
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 2,
    }
    assert read_nodes("block", 16, 8) == EIGHT


@pytest.mark.parametrize(
    ("text", "size", "said"),
    [
        ("a\nb", 4, "it has the hosts of 2 ranks, not of 4."),
        ("a\na\na\nb", 4, "host a has 3 ranks, and a node has 2."),
        (
            "".join(f"{host}\n" * 3 for host in "abcdefgh"),
            24,
            "host f has 3 ranks, and a node has 2; and 2 more such hosts.",
        ),
    ],
)
def test_a_list_of_hosts_of_other_ranks_is_refused(text, size, said, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_nodes(str(hosts), size, 2)
    assert str(caught.value).startswith(f"--rank-order {hosts}: ")
    assert str(caught.value).endswith(said)


def test_an_order_of_ranks_that_is_not_known_is_refused():
    with pytest.raises(UsageError) as caught:
        read_nodes("spread", 4, 2)
    assert str(caught.value) == (
        "--rank-order spread: give block, cyclic, or a file with the host of each rank, "
        "one a line (No such file or directory)."
    )


def test_a_group_with_more_ranks_on_each_node_has_more_ports():
    figures = Figures(load_gpu("h100"), load_network("ib-ndr400"))
    size = 8 << 30
    one, four = (
        collective_seconds("all_gather", size, place(ranks, EIGHT), figures)
        for ranks in (
            tuple(range(0, 128, 8)),
            tuple(n * 8 + g for n in range(16) for g in range(4)),
        )
    )
    assert one == pytest.approx(4 * four, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "mib", "ranks", "milliseconds"),
    [  # NVLink, eight ranks: published tables of nccl-tests
        ("all_reduce", 16, 8, 0.129),
        ("all_reduce", 128, 8, 0.708),
        ("all_reduce", 1024, 8, 5.28),
        ("all_reduce", 8192, 8, 31.8),
        ("all_gather", 16 * 1024, 8, 41.6),
    ],
)
def test_collectives_of_a_node_are_near_what_was_published(
    kind, mib, ranks, milliseconds
):
    figures = Figures(load_gpu("h100"))
    where = place(tuple(range(ranks)), EIGHT)
    seconds = collective_seconds(kind, mib << 20, where, figures)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.25)


def test_a_small_all_reduce_over_nodes_takes_a_tree():
    figures = Figures(load_gpu("h100"), load_network("ib-ndr400"))
    where = place(tuple(range(256)), EIGHT)
    small = collective_seconds("all_reduce", 1024, where, figures)
    ring = collective_seconds("all_gather", 1024, where, figures)
    assert small < ring


def test_collectives_of_another_gpu_carry_over_by_their_links():
    where = place(tuple(range(4)), EIGHT)
    a100, h100, b200 = (
        collective_seconds("all_gather", 4 << 30, where, Figures(load_gpu(name)))
        for name in ("a100", "h100", "b200")
    )
    assert a100 / h100 == pytest.approx(450 / 300, rel=0.01)
    assert h100 / b200 == pytest.approx(900 / 450, rel=0.01)


@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_the_algorithm_follows_size_and_nodes(nodes):
    figures = Figures(load_gpu("h100"), load_network("ib-ndr400"))
    where = place(tuple(range(8 * nodes)), EIGHT)
    times = [
        collective_seconds("all_reduce", 1 << power, where, figures)
        for power in range(10, 34)
    ]
    assert times == sorted(times)
    ring = 2 * collective_seconds("all_gather", 1 << 33, where, figures)
    assert times[-1] == pytest.approx(ring, rel=0.15)  # by then only the rate counts
    assert times[0] < 1e-4 * math.log2(2 * nodes)  # latency grows as a tree's


def communication(kind, ranks, nbytes, peer=-1):
    where = ("g", ranks, "dp", nbytes, "float32", (), (), 0, 1, True, peer, SITE)
    return Comm(0, kind, "c10d.x", *where)


def test_figures_of_nccl_and_the_network_are_told_with_their_sources(tmp_path):
    def told(network):
        figures = Figures(load_gpu("h100"), load_network(network))
        for kind in ("all_reduce", "all_to_all"):
            collective_seconds(kind, 1 << 20, place(tuple(range(16)), EIGHT), figures)
        return {each["what"]: each for each in figures.assumptions()}, figures.notes()

    keys = {f"network.{key}" for key in ("port", "wire", "tree", "ramp", "all_to_all")}
    keys |= {"network.all_to_all_lost", "network.latency", "network.efficiency"}
    keys |= {"collectives.protocols", "collectives.nvlink"}
    own, _ = told("ib-ndr400")
    assert keys <= set(own)
    assert not own["network.ramp"]["source"].startswith("taken")
    other, notes = told("efa-400")
    assert other["network.ramp"]["source"].startswith("taken from InfiniBand NDR")
    assert "not measured on this network" in other["network.tree"]["source"]
    assert not other["network.port"]["source"].startswith("taken")
    path = tmp_path / "own.toml"
    path.write_text(
        'like = "efa-400"\n[network]\nramp = { value = [[1, 1.0]], source = "mine" }\n'
    )
    assert told(str(path))[0]["network.ramp"]["source"] == "mine"
    assert told(str(path))[1] == notes  # of the GPU alone


def test_links_of_communications():
    figures = Figures(load_gpu("h100"), load_network("ib-ndr400"))
    inside = price_comm(communication("send", (0, 1), 1 << 20, 1), figures, EIGHT, 0)
    outside = price_comm(communication("send", (0, 8), 1 << 20, 8), figures, EIGHT, 0)
    assert (inside.link, outside.link) == (Link.NVLINK, Link.NETWORK)
    assert outside.seconds > 3 * inside.seconds
    alone = price_comm(communication("all_reduce", (0,), 1 << 20), figures, EIGHT, 0)
    assert alone.link is Link.NONE


def test_several_nodes_without_a_network_are_refused():
    figures = Figures(load_gpu("h100"))
    comm = communication("all_reduce", tuple(range(16)), 1 << 20)
    with pytest.raises(
        UsageError, match=r"no network was named \(port\): give --network"
    ):
        price_comm(comm, figures, EIGHT, 0)


# --- the host -----------------------------------------------------------------------


def test_the_host_pays_for_operators_python_and_wrappers():
    def seconds(*ops):
        host = HostModel(Figures(load_gpu("h100")))
        return sum(map(host.seconds, ops))

    x = tensor(8)
    add = operator("add.Tensor", (x, x), (x,))
    assert seconds(add) > 1e-6
    assert seconds(add._replace(through="dtensor")) > seconds(add) + 5e-6
    assert seconds(add._replace(through="graph")) < seconds(add)
    compiled = add._replace(region=1)
    entry = seconds(compiled) - (seconds(compiled, compiled) - seconds(compiled))
    assert entry > 2e-5  # once for a region, not for each kernel
    replayed = compiled._replace(through="replay")
    assert seconds(replayed) == seconds(replayed, replayed)
    assert seconds(replayed) == pytest.approx(entry)
    called = add._replace(calls=10)
    assert seconds(called) > seconds(add) + 5e-6
    graph = add._replace(through="graph")
    assert seconds(graph._replace(calls=10)) == seconds(graph)


def host_seconds(gpu, ops):
    host = HostModel(Figures(gpu))
    return [host.seconds(op) for op in ops]


def test_entering_a_compiled_region_costs_once_and_for_each_tensor_that_it_takes():
    gpu = load_gpu("h200")
    mul = operator("mul.Tensor", (tensor(64), tensor(64)), (tensor(64),))
    mul = mul._replace(region=1)

    def entry(taken):
        host = HostModel(Figures(gpu), taken)
        first, *others = (host.seconds(mul) for _ in range(20))
        assert max(others) == min(others)
        return first - others[0]

    slower = gpu.number("host_mixed.forward")  # than in a loop
    region = gpu.number("launch.compiled_forward_region")
    each = gpu.number("launch.compiled_forward_input")
    assert entry({}) == pytest.approx(slower * region)
    assert entry({1: 100}) == pytest.approx(slower * (region + 100 * each))


def test_a_region_takes_what_it_has_not_made():
    weight, x, made, result = (tensor(8, storage=each) for each in range(4))
    host = tensor(8, storage=-1)
    first = operator("mul.Tensor", (weight, x, host), (made,))._replace(region=1)
    second = operator("add_.Tensor", (made, weight), (made,))._replace(region=1)
    third = operator("mul.Tensor", (made, x), (result,))._replace(region=2)
    eager = operator("neg.default", (weight,), (tensor(8, storage=4),))
    backward = third._replace(site=third.site._replace(phase=Phase.BACKWARD))
    events = [first, second, eager, third, backward]
    assert tensors_taken(events) == {1: 2, 2: 2}


def test_kinds_in_turn_take_longer_than_a_loop_of_one():
    x = tensor(8)
    names = "add mul gelu relu silu exp neg tanh cos sin sqrt abs floor ceil round erf"
    kinds = [operator(f"{name}.default", (x,), (x,)) for name in names.split()]
    gpu = load_gpu("h200")
    loop = sum(sum(host_seconds(gpu, [op] * 9)[1:]) for op in kinds)
    two = kinds[:2] * 9
    turns = sum(host_seconds(gpu, kinds * 9)[len(kinds) :])
    assert turns / loop == pytest.approx(gpu.number("host_mixed.forward"))
    in_a_loop = sum(sum(host_seconds(gpu, [op] * 9)[1:]) for op in kinds[:2])
    few = sum(host_seconds(gpu, two)[2:]) / in_a_loop
    assert 1 < few < 0.5 + 0.5 * turns / loop
    backward = [
        op._replace(site=op.site._replace(phase=Phase.BACKWARD)) for op in kinds
    ]
    again = sum(sum(host_seconds(gpu, [op])) for op in backward)
    assert sum(host_seconds(gpu, backward)) == pytest.approx(again)


def test_a_foreach_optimizer_costs_what_was_measured():
    gpu, count = load_gpu("h200"), 100
    lists = {"lerp_": 2, "mul_": 1, "addcmul_": 3, "sqrt": 1, "div_": 1, "add_": 1}
    ops = [
        operator(f"_foreach_{name}.Scalar", (tensor(8),) * size * count, ())
        for name, size in [*lists.items(), ("mul_", 1), ("addcdiv_", 3)]
    ]
    ops = [op._replace(site=op.site._replace(phase=Phase.OPTIMIZER)) for op in ops]
    each = gpu.number("host_optimizer.adamw_foreach_parameter")
    step = gpu.number("host_optimizer.adamw_foreach_step")
    slower = gpu.number("host_mixed.forward")  # its code ran last in the step before
    assert sum(host_seconds(gpu, ops)) == pytest.approx(slower * (count * each + step))


def test_a_compiled_step_calls_no_optimizers_python():
    gpu, x = load_gpu("h200"), tensor(8)
    fused = operator("_fused_adamw_.default", (x,) * 50, (), Phase.OPTIMIZER)
    (eager,), (program,) = (
        host_seconds(gpu, [fused._replace(through=through)])
        for through in ("eager", "program")
    )
    less = gpu.number("host_optimizer.adamw_fused_step")
    less -= gpu.number("host_forward.no_grad_add")
    assert eager - program == pytest.approx(less * gpu.number("host_mixed.forward"))


def in_backward(name, x, node=Node.NONE, **fields):
    op = operator(name, (x,), (x,), Phase.BACKWARD)
    return op._replace(node=node, **fields)


def node_seconds(gpu):
    """Of a node of autograd: two of views were measured."""
    return (gpu.number("host_backward.view") - gpu.number("host_forward.view")) / 2


def test_a_gradient_is_handed_over_once_in_a_step():
    gpu, x = load_gpu("h200"), tensor(8)
    new = in_backward("detach.default", x, Node.GRADIENT, views=True)
    added = in_backward("add_.Tensor", x, Node.GRADIENT)
    handed = gpu.number("host_optimizer.accumulate") * gpu.number("host_mixed.forward")
    more = gpu.number("host_backward.add") - node_seconds(gpu)
    assert host_seconds(gpu, [new, added]) == pytest.approx([handed, handed + more])


def test_hooks_of_a_checkpoint_run_between_all_other_operators():
    gpu, x = load_gpu("h200"), tensor(8)
    kept = operator("detach.default", (x,), (x,), Phase.RECOMPUTE)._replace(views=True)
    change, each = gpu.number("launch.checkpoint"), "launch.checkpoint_tensor"
    hooks = gpu.number(each) * gpu.number("host_mixed.forward")
    assert host_seconds(gpu, [kept] * 3) == pytest.approx(
        [change + hooks, hooks, hooks]
    )


def test_backward_pays_for_nodes_and_for_the_operators_in_them():
    gpu, x = load_gpu("h200"), tensor(8)
    first = in_backward("mul.Tensor", x, Node.OPERATOR)
    second = in_backward("mul.Tensor", x)
    whole, part = host_seconds(gpu, [first, second])
    assert whole == pytest.approx(gpu.number("host_backward.mul"))
    assert whole - part == pytest.approx(node_seconds(gpu))
    viewed = in_backward("view.default", x, Node.OPERATOR, views=True)
    half = gpu.number("host_backward.view") / 2
    assert host_seconds(gpu, [viewed]) == pytest.approx([half])
    unsafe = in_backward("_unsafe_view.default", x)  # launches nothing either
    assert host_seconds(gpu, [unsafe]) == pytest.approx(
        [gpu.number("host_forward.view") / 2]
    )


def test_gradients_of_parts_are_two_kernels():
    gpu, x = load_gpu("h200"), tensor(8)
    part, other = host_seconds(
        gpu, [in_backward("select_backward.default", x), in_backward("neg.default", x)]
    )
    assert part - other == pytest.approx(gpu.number("host_forward.no_grad_add"))


def test_a_figure_that_no_file_has_is_asked_for_by_name():
    with pytest.raises(UsageError, match=r"has no launch\.nothing: add nothing ="):
        Figures(load_gpu("h100")).number("launch.nothing")


def test_figures_that_were_used_are_told_with_their_source():
    figures = Figures(load_gpu("a100"))
    Pricer(figures).price(product(64, 64, 64))
    told = {each["what"]: each for each in figures.assumptions()}
    assert told["bandwidth.memory"]["value"] == load_gpu("a100").number(
        "bandwidth.memory"
    )
    assert all(each["source"] for each in told.values())


def test_ratios_of_kernels_are_listed_by_what_used_them(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'title = "Own"\nlike = "h100"\n[kernels]\n'
        'misaligned_2 = { value = 12, source = "measured here" }\n'
    )

    def ratios(gpu, width):
        figures = Figures(load_gpu(gpu))
        price = Pricer(figures).price(product(8192, width, 4096)).seconds
        told = {each["what"]: each["source"] for each in figures.assumptions()}
        kernels = {key: told[key] for key in told if key.startswith("kernels.")}
        return price, kernels, figures.notes()

    _, none, _ = ratios("h100", 8192)
    assert none == {}
    odd, taken, notes = ratios("h100", 8191)
    assert set(taken) == {"kernels.misaligned_2"}
    assert "taken from NVIDIA H200" in taken["kernels.misaligned_2"]
    assert "not measured on this GPU" in taken["kernels.misaligned_2"]
    assert (
        "measured on NVIDIA H200 SXM 141GB, not on NVIDIA H100 SXM 80GB: 2;" in notes[0]
    )
    assert "for kernels that no table covers: 1. --json" in notes[0]
    slower, own, notes = ratios(str(path), 8191)
    assert own == {"kernels.misaligned_2": "measured here"}
    assert slower > 1.9 * odd
    (told,) = ratios("h200", 8191)[2]
    assert "not on" not in told
    assert "for kernels that no table covers: 1. --json" in told


def test_an_older_attention_kernel_takes_longer_where_the_script_chose_it(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text(
        'like = "h100"\n[attention]\nflash_times = { value = 2, source = "older" }\n'
    )
    old, new = Pricer(Figures(load_gpu(str(path)))), Pricer(Figures(load_gpu("h100")))
    q = TensorSpec((2, 16, 2048, 128), (), "bfloat16", "cuda", 0)
    name = "aten._scaled_dot_product_flash_attention.default"
    chosen, flash = (
        Op(0, name, (q, q, q), (q,), (("is_causal", True), *more), 0, SITE)
        for more in ((), (("cudnn", False),))
    )
    assert old.price(flash).seconds == pytest.approx(2 * new.price(flash).seconds)
    assert old.price(chosen).seconds == new.price(chosen).seconds
    assert new.price(chosen).seconds < new.price(flash).seconds  # cuDNN's


# --- what kernels do beside their work ----------------------------------------------


def seconds(pricer, *args, **kwargs):
    return pricer.price(operator(*args, **kwargs)).seconds


def images(*shape, last, dtype="bfloat16"):
    _, channels, rows, columns = shape
    size = channels * rows * columns
    stride = (size, 1, channels * columns, channels) if last else None
    return tensor(*shape, dtype=dtype, stride=stride)


def test_rows_that_begin_at_odd_addresses_take_older_kernels(pricer):
    aligned = pricer.price(product(8192, 50304, 1024)).seconds
    even = pricer.price(product(8192, 50306, 1024)).seconds
    odd = pricer.price(product(8192, 50257, 1024)).seconds
    assert 2 * aligned < even < odd
    assert 4 * aligned < odd < 8 * aligned


def test_an_addend_that_is_no_matrix_does_not_misalign_a_product(pricer):
    left, right = tensor(64, 512, 64), tensor(64, 64, 512)
    result, scalar = (tensor(64, 512, 512),), tensor(1, 1, 1)
    plain = pricer.price(operator("bmm.default", (left, right), result))
    added = operator("baddbmm.default", (scalar, left, right), result)
    assert pricer.price(added).seconds == plain.seconds


def test_an_aligned_product_keeps_a_measured_ratio_below_one():
    pricer = Pricer(Figures(load_gpu("h200")))
    inputs = tensor(1024, 32768, stride=(1, 1024)), tensor(32768, 4096)
    op = operator("mm.default", inputs, (tensor(1024, 4096),))
    _, rows = pricer.figures.table("matmul.bfloat16")
    assert [row[-1] for row in rows if row[:-1] == (2, 1, 1024, 4096, 32768)] == [
        pytest.approx(pricer.price(op).seconds)
    ]


def test_a_small_argument_lies_in_the_cache_gaps_or_not():
    pricer = Pricer(Figures(load_gpu("h200")))
    x = tensor(32, 1024, 1024)
    parts = [tensor(32, 1, 1024, stride=(step, step, 1)) for step in (1024, 6144)]
    whole, gaps = (seconds(pricer, "mul.Tensor", (x, part), (x,)) for part in parts)
    assert whole == gaps


def test_one_filter_a_channel_runs_without_tensor_cores(pricer):
    x, filters = tensor(128, 96, 56, 56), tensor(96, 1, 7, 7)
    each = seconds(pricer, "convolution.default", (x, filters), (x,), groups=96)
    assert each == pytest.approx(1.34e-3, rel=0.1)  # on an H200


def test_groups_with_channels_first_run_without_tensor_cores():
    pricer = Pricer(Figures(load_gpu("h200")))
    x, filters, y = tensor(8, 768, 199), tensor(768, 48, 128), tensor(8, 768, 200)
    forward = seconds(pricer, "convolution.default", (x, filters), (y,), groups=16)
    assert forward == pytest.approx(9.3e-3, rel=0.1)  # on an H200


def test_convolutions_over_one_dimension_copy_into_channels_last():
    pricer = Pricer(Figures(load_gpu("h200")))

    def forward(*shapes):
        x, w, y = (tensor(*shape, dtype="float16") for shape in shapes)
        return seconds(pricer, "convolution.default", (x, w), (y,), groups=1)

    first = forward((8, 512, 12799), (512, 512, 3), (8, 512, 6399))
    assert first == pytest.approx(271e-6, rel=0.2)  # on an H200
    second = forward((8, 512, 3199), (512, 512, 3), (8, 512, 1599))
    assert second == pytest.approx(92e-6, rel=0.2)


def test_batch_norms_with_channels_last_have_kernels_of_their_own():
    pricer = Pricer(Figures(load_gpu("h200")))

    def both(*shape):
        x, c = images(*shape, last=True), tensor(shape[1], dtype="float32")
        forward = seconds(pricer, "native_batch_norm.default", (x, c, c, c, c), (x,))
        name = "native_batch_norm_backward.default"
        return forward, seconds(pricer, name, (x, x, c, c, c, c, c), (x, c, c))

    # A step of ResNet-50 on an H200.
    assert both(128, 256, 56, 56) == pytest.approx((441e-6, 346e-6), rel=0.1)
    assert both(128, 1024, 14, 14) == pytest.approx((129e-6, 111e-6), rel=0.1)


def test_a_bias_of_a_convolution_is_a_pass_over_its_result(pricer):
    x, w, bias = tensor(32, 128, 64, 64), tensor(128, 128, 3, 3), tensor(128)
    plain = seconds(pricer, "convolution.default", (x, w), (x,), groups=1)
    added = seconds(pricer, "convolution.default", (x, w, bias), (x,), groups=1)
    assert added > plain + 2 * 2 * 32 * 128 * 64 * 64 / 4e12
    backward = [
        seconds(
            pricer,
            "convolution_backward.default",
            (x, x, w),
            (x, w),
            groups=1,
            output_mask=[True, True, asked],
        )
        for asked in (False, True)
    ]
    assert backward[1] > backward[0]


def test_images_that_lie_otherwise_than_the_filters_are_copied(pricer):
    shape = 32, 128, 64, 64
    w = images(128, 128, 3, 3, last=True)
    first, last = (images(*shape, last=each) for each in (False, True))
    as_they_lie = seconds(pricer, "convolution.default", (last, w), (last,), groups=1)
    copied = seconds(pricer, "convolution.default", (first, w), (last,), groups=1)
    assert copied > as_they_lie + 20e-6


def test_norms_copy_what_is_not_contiguous(pricer):
    shape, row = (64, 196, 1024), tensor(1024, dtype="float32")
    whole = tensor(*shape, dtype="float32")
    moved = tensor(*shape, dtype="float32", stride=(196 * 1024, 1, 196))
    rows = tensor(64, 196, 1, dtype="float32")
    plain, copied = (
        seconds(
            pricer, "native_layer_norm.default", (each, row, row), (whole, rows, rows)
        )
        for each in (whole, moved)
    )
    assert copied > plain + 2 * 4 * math.prod(shape) / 4e12


def test_a_copy_of_whole_rows_is_quicker_than_one_that_transposes(pricer):
    def seconds(stride):
        x = tensor(2048, 8, 4096, stride=stride)
        y, row = tensor(2048, 8, 4096), tensor(2048, 8, 1, dtype="float32")
        name = "native_layer_norm.default"
        return pricer.price(operator(name, (x,), (y, row, row))).seconds

    plain = seconds(None)
    swapped, transposed = seconds((4096, 2048 * 4096, 1)), seconds((1, 2048, 16384))
    assert transposed - plain > 2 * (swapped - plain) > 0


def test_attention_of_few_channels_is_no_quicker():
    pricer = Pricer(Figures(load_gpu("h200")))
    q = tensor(64, 16, 197, 32)
    name = "_scaled_dot_product_flash_attention.default"
    # 61 us on an H200: those of ViT-MAE's decoder, whose heads have 32 channels.
    assert seconds(pricer, name, (q, q, q), (q,)) == pytest.approx(61e-6, rel=0.3)


def test_attention_computes_whole_tiles():
    pricer = Pricer(Figures(load_gpu("h200")))

    def price(keys, heads=12, direction=""):
        q = tensor(4704, heads, keys, 64)
        name = f"_scaled_dot_product_flash_attention{direction}.default"
        inputs = (q,) * (4 if direction else 3)
        return pricer.price(operator(name, inputs, (q,), is_causal=False))

    # In a step of TimeSformer on an H200: a patch in eight frames.
    assert price(8).seconds == pytest.approx(934e-6, rel=0.02)
    backward = price(8, direction="_backward")
    assert backward.seconds == pytest.approx(1531e-6, rel=0.02)
    # Not measured: as long for any number of keys in a tile.
    assert price(32).seconds == pytest.approx(price(8).seconds)
    assert price(16, heads=6).seconds == pytest.approx(price(8).seconds / 2, rel=0.1)
    # What fills a tile up draws no power.
    assert price(8).busy == pytest.approx(price(128).busy / 256)


def test_masks_in_attention_take_time():
    pricer = Pricer(Figures(load_gpu("h200")))
    q = tensor(64, 8, 128, 64)
    plain, masked = (
        seconds(
            pricer, f"_scaled_dot_product_{kernel}_attention.default", (q,) * 3, (q,)
        )
        for kernel in ("flash", "cudnn")
    )
    assert masked == pytest.approx(1.2 * plain)


def test_products_with_vectors_take_as_long_as_their_bytes():
    pricer = Pricer(Figures(load_gpu("h200")))
    # Microseconds in steps on an H200, in 32 bits.
    for m, n, k, measured in (
        (5120, 1, 512, 5.2),
        (5120, 512, 1, 6.5),
        (524288, 1, 128, 99.9),
        (1, 128, 524288, 77.7),
        (256, 1, 256, 3.3),
    ):
        found = 1e6 * pricer.price(product(m, n, k, "float32")).seconds
        assert found == pytest.approx(measured, rel=0.3), (m, n, k)


def test_small_products_in_single_precision_split_their_depth():
    pricer = Pricer(Figures(load_gpu("h200")))
    # Microseconds in a step on an H200.
    for m, n, k, measured in ((128, 1280, 1536, 21.3), (128, 1536, 1280, 22.1)):
        found = 1e6 * pricer.price(product(m, n, k, "float32")).seconds
        assert found == pytest.approx(measured, rel=0.25), (m, n, k)


def test_few_neighbours_of_many_results_take_longer_than_their_bytes():
    """Microseconds in a step of DGCNN on an H200; others are of the same kernels."""
    pricer = Pricer(Figures(load_gpu("h200")))

    def reduced(name, channels, width, results, step=1):
        x = tensor(32, channels, 1024, width, dtype="float32")
        if step > 1:  # the places of the neighbours are far from each other
            x = tensor(32, channels, width, 1024, dtype="float32")
        outputs = (tensor(32, channels, 1024, dtype="float32"),) * results
        dim = -1 if step == 1 else 2
        return 1e6 * seconds(pricer, name, (x,), outputs, dim=dim)

    assert reduced("max.dim", 256, 20, 2) == pytest.approx(1804, rel=0.05)
    assert reduced("max.dim", 64, 20, 2) == pytest.approx(453, rel=0.05)
    assert reduced("sum.dim_IntList", 64, 20, 1) == pytest.approx(296, rel=0.05)
    # Of many neighbours and of those apart, bytes tell all.
    assert reduced("max.dim", 2, 1024, 2) < 100
    assert reduced("max.dim", 256, 20, 2, step=1024) < 400


def test_rows_that_are_gathered_have_a_block_each():
    pricer = Pricer(Figures(load_gpu("h200")))
    where = tensor(655360, dtype="int64")

    def gathered(name, width):
        table, rows = (
            tensor(count, width, dtype="float32") for count in (32768, 655360)
        )
        return 1e6 * seconds(pricer, name, (table, where), (rows,))

    # In a step of DGCNN on an H200.
    assert gathered("index.Tensor", 64) == pytest.approx(396, rel=0.05)
    assert gathered("index.Tensor", 128) == pytest.approx(396, rel=0.05)
    assert gathered("index.Tensor", 3) < 50  # not 16 bytes: another kernel
    assert gathered("embedding.default", 64) == gathered("index.Tensor", 64)


def test_elements_that_are_scattered_touch_whole_sectors():
    pricer = Pricer(Figures(load_gpu("h200")))
    target = tensor(32, 256, 1024, 20, dtype="float32")
    where = tensor(32, 256, 1024, 1, dtype="int64")
    source = tensor(32, 256, 1024, 1, dtype="float32")
    op = operator("scatter_.src", (target, where, source), (target,), dim=-1)
    plain = pricer.price(op).nbytes / 4.8e12
    assert pricer.price(op).seconds > 2 * plain


def test_group_norms_of_rows_go_down_all_of_them_for_their_weights():
    """In a step of a retentive network on an H200: 144 and 638 us."""
    pricer = Pricer(Figures(load_gpu("h200")))
    x, weight, moments = tensor(16384, 1024), tensor(1024), tensor(16384, 8)
    facts = {"N": 16384, "C": 1024, "HxW": 1, "group": 8}
    forward = seconds(
        pricer,
        "native_group_norm.default",
        (x, weight, weight),
        (x, moments, moments),
        **facts,
    )
    backward = seconds(
        pricer,
        "native_group_norm_backward.default",
        (x, x, moments, moments, weight),
        (x, weight, weight),
        **facts,
    )
    assert forward == pytest.approx(144e-6, rel=0.2)
    assert backward == pytest.approx(638e-6, rel=0.1)


def test_adaptive_maxima_are_found_by_one_thread_each():
    pricer = Pricer(Figures(load_gpu("h200")))
    x, result = (tensor(32, 1024, 1, size, dtype="float32") for size in (1024, 1))
    where = tensor(32, 1024, 1, 1, dtype="int64")
    found = seconds(pricer, "adaptive_max_pool2d.default", (x,), (result, where))
    assert found == pytest.approx(570e-6, rel=0.1)  # in a step of DGCNN on an H200
    name = "adaptive_max_pool2d_backward.default"
    assert seconds(pricer, name, (result, x, where), (x,)) < 1e-4
    assert is_known(f"aten.{name}")


def test_a_fused_kernel_takes_no_less_than_its_arithmetic():
    """Microseconds of Triton's kernels in steps on an H200."""
    pricer = Pricer(Figures(load_gpu("h200")))

    def computed(name, *shape):
        x = tensor(*shape, dtype="float32")
        return 1e6 * pricer.arithmetic(operator(f"{name}.default", (x,), (x,)))

    assert computed("gelu", 37632, 3072) == pytest.approx(167, rel=0.15)
    assert computed("gelu_backward", 37632, 3072) == pytest.approx(226, rel=0.15)
    for name in ("_log_softmax", "_log_softmax_backward_data"):
        assert computed(name, 16384, 50304) == pytest.approx(1366, rel=0.1)
    assert computed("relu", 37632, 3072) == 0


def test_gradients_of_cells_are_summed_up_for_their_biases():
    pricer = Pricer(Figures(load_gpu("h200")))
    state, kept, gates, bias = (
        tensor(*shape, dtype="float32")
        for shape in ((128, 512), (128, 2560), (128, 1536), (1536,))
    )
    name = "_thnn_fused_gru_cell_backward.default"
    with_biases, without = (
        seconds(pricer, name, (state, kept), (gates, gates, state, *biases))
        for biases in ((bias, bias), ())
    )
    assert with_biases > without + 2 * pricer.floor - 1e-12
    assert is_known(f"aten.{name}")


@pytest.mark.parametrize("kernel, dtype", [("flash", None), ("efficient", "float32")])
def test_attention_with_dropout_takes_longer(pricer, kernel, dtype):
    q = tensor(8, 16, 1024, 64, dtype=dtype or "bfloat16")
    name = f"_scaled_dot_product_{kernel}_attention.default"
    plain, dropped = (
        seconds(pricer, name, (q, q, q), (q,), is_causal=True, dropout_p=p)
        for p in (0.0, 0.1)
    )
    assert dropped > 1.5 * plain


def test_the_gradient_of_attention_is_computed_in_the_type_of_its_queries(pricer):
    q, sums = tensor(8, 16, 1024, 64), tensor(8, 16, 1024, dtype="float32")
    name = "_scaled_dot_product_flash_attention_backward.default"
    op = operator(name, (q, q, q, q, q, sums), (q, q, q), is_causal=True)
    assert factor_of(op).dtype == "bfloat16"
    assert pricer.price(op).busy > 0  # tensor cores draw power


def test_a_product_that_adds_to_32_bits_multiplies_16(pricer):
    total = tensor(4096, 4096, dtype="float32", storage=9)
    left, right = tensor(4096, 8192, storage=1), tensor(8192, 4096, storage=2)
    op = operator("addmm.dtype_out", (total, left, right, total), (total,))
    plain = product(4096, 4096, 8192)
    assert factor_of(op).dtype == "bfloat16"
    assert pricer.price(op).seconds == pytest.approx(pricer.price(plain).seconds)


def test_a_product_in_8_bits_is_priced_by_its_factors_not_by_its_scales(pricer):
    a, b = tensor(8192, 8192, dtype="float8_e4m3fn"), tensor(8192, 8192)
    b = b._replace(dtype="float8_e4m3fn", stride=(1, 8192))
    scale, result = tensor(dtype="float32"), (tensor(8192, 8192),)
    cost = pricer.price(operator("_scaled_mm.default", (a, b, scale, scale), result))
    best = pricer.figures.gpu.number("flops.float8_achieved")
    assert 0.7 * best < cost.flops / cost.seconds < 1.05 * best
    assert cost.seconds < 0.7 * pricer.price(product(8192, 8192, 8192)).seconds


def test_grouped_products_are_products(pricer):
    ends = tensor(8, dtype="int32")
    name, x = "_grouped_mm.default", tensor(8192, 1024)
    forward = operator(name, (x, tensor(8, 1024, 5632), ends), (tensor(8192, 5632),))
    of_weights = operator(
        name,
        (tensor(5632, 8192, stride=(1, 5632)), x, ends),
        (tensor(8, 5632, 1024),),
    )
    for each in (forward, of_weights):
        assert op_flops(each) == 2 * 8192 * 5632 * 1024
        assert pricer.price(each).kind == "matmul"
    assert is_known("aten._grouped_mm.default")


def recurrent(steps, name="_cudnn_rnn.default", **facts):
    x, state = (tensor(*s, dtype="float32") for s in ((steps, 64, 1024), (2, 64, 1024)))
    weight = tensor(4096, 1024, dtype="float32")
    given = {"mode": 2, "hidden_size": 1024, "num_layers": 2, "bidirectional": False}
    return operator(name, (x, weight, weight, state, state), (x,), **given | facts)


def test_recurrent_layers_are_a_product_in_each_time_step():
    h200 = Pricer(Figures(load_gpu("h200")))
    # cuDNN's two layers of 128 time steps took 4.27 ms on an H200.
    seconds = h200.price(recurrent(128)).seconds
    assert seconds == pytest.approx(4.27e-3, rel=0.05)
    assert h200.price(recurrent(256)).seconds > 1.9 * seconds
    assert op_flops(recurrent(1)) == 2 * 2 * 64 * 4096 * (1024 + 1024)
    assert op_flops(recurrent(1, mode=3)) == 3 / 4 * op_flops(recurrent(1))
    both = recurrent(1, bidirectional=True)  # the second layer has twice the inputs
    assert op_flops(both) == 2 * op_flops(recurrent(1)) + 2 * 2 * 64 * 4096 * 1024
    back = recurrent(1, "_cudnn_rnn_backward.default")
    assert op_flops(back) == 2 * op_flops(recurrent(1))
    assert is_known(back.name)


def test_the_host_launches_kernels_for_each_time_step():
    host = HostModel(Figures(load_gpu("h200")))
    short, long = host.seconds(recurrent(8)), host.seconds(recurrent(800))
    assert long == pytest.approx(100 * short)
    back = recurrent(800, "_cudnn_rnn_backward.default")
    assert host.seconds(back) == pytest.approx(1.5 * long)


def test_gradients_of_bags_of_embeddings_sort_their_indices(pricer):
    result, where = tensor(8, 64, dtype="float32"), tensor(32, dtype="int64")
    table = tensor(2000, 64, dtype="float32")
    each = seconds(
        pricer, "_embedding_bag_backward.default", (result, where, where), (table,)
    )
    assert each == pytest.approx(1.24e-4)  # on an H200


def test_few_keys_slow_attention_down_only_where_it_is_fast(pricer):
    name = "_scaled_dot_product_efficient_attention.default"

    def rate(keys, dtype):
        q = tensor(4096 // keys, 16, keys, 64, dtype=dtype)
        op = operator(name, (q, q, q), (q,), is_causal=False)
        return op_flops(op) / pricer.price(op).seconds

    assert rate(4096, "bfloat16") > 1.5 * rate(256, "bfloat16")
    assert rate(256, "float32") > 0.8 * rate(4096, "float32")


def test_a_gradient_that_a_parameter_is_given_is_paid_for_once():
    host = HostModel(Figures(load_gpu("h200")))
    x = tensor(4, 4)
    first = operator("mul.Tensor", (x,), (x,), Phase.BACKWARD)
    detach = operator("detach.default", (x,), (x,), Phase.BACKWARD)._replace(views=True)
    view = operator("view.default", (x,), (x,), Phase.BACKWARD)._replace(views=True)
    host.seconds(first)
    assert host.seconds(detach) == 0
    assert host.seconds(view) > 0


# --- complex numbers ----------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize(
    ("dtype", "real"), [("complex64", "float32"), ("complex128", "float64")]
)
def test_a_complex_product_is_four_real_ones(gpu, dtype, real):
    pricer = Pricer(Figures(load_gpu(gpu)))
    pairs, plain = product(4096, 4096, 4096, dtype), product(4096, 4096, 16384, real)
    assert op_flops(pairs) == op_flops(plain)
    cost = pricer.price(pairs)
    assert cost.seconds == pytest.approx(pricer.price(plain).seconds, rel=0.05)
    assert cost.busy == 0  # no tensor cores


def test_complex_products_may_run_in_tf32(pricer):
    plain = product(4096, 4096, 4096, "complex64")
    quick = plain._replace(scalars=(("allow_tf32", True),))
    assert pricer.price(quick).seconds < 0.4 * pricer.price(plain).seconds
    assert pricer.price(quick).busy > 0


def test_small_complex_products_have_small_tiles():
    """As 576 products of an H200: 20.5 us."""
    pricer = Pricer(Figures(load_gpu("h200")))
    left = tensor(576, 32, 64, dtype="complex64")
    right = tensor(576, 64, 64, dtype="complex64")
    cost = pricer.price(operator("bmm.default", (left, right), (left,)))
    assert cost.seconds == pytest.approx(20.5e-6, rel=0.15)


def transform(name, source, result, dims=(2, 3), normalization=0):
    inputs, outputs = (source,), (result,)
    return operator(name, inputs, outputs, dim=dims, normalization=normalization)


def test_transforms_pass_over_memory_for_each_dimension():
    """As 2048 fields of 128 x 128 on an H200."""
    pricer = Pricer(Figures(load_gpu("h200")))
    field = tensor(32, 64, 128, 128, dtype="float32")
    half = tensor(32, 64, 128, 65, dtype="complex64")
    whole = tensor(32, 64, 128, 128, dtype="complex64")
    forward = pricer.price(transform("_fft_r2c.default", field, half))
    assert forward.seconds == pytest.approx(159e-6, rel=0.15)
    both = pricer.price(transform("_fft_c2c.default", whole, whole))
    assert both.seconds == pytest.approx(370e-6, rel=0.15)
    one = pricer.price(transform("_fft_c2c.default", whole, whole, (3,)))
    assert one.seconds == pytest.approx(both.seconds / 2, rel=0.01)
    back = transform("_fft_c2r.default", half, field, normalization=2)
    copied = 74e-6 + 64e-6  # before, and scaled afterwards
    assert pricer.price(back).seconds == pytest.approx(159e-6 + copied, rel=0.15)
    assert is_known(back.name)


def test_long_transforms_take_more_passes(pricer):
    short = tensor(2**14, 2**10, dtype="complex64")
    long = tensor(1, 2**24, dtype="complex64")
    each = [
        pricer.price(transform("_fft_c2c.default", x, x, (1,))).seconds
        for x in (short, long)
    ]
    assert each[1] == pytest.approx(2 * each[0], rel=0.01)
