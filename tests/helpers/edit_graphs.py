"""Training-like graphs made by hand, and what they compute on several ranks at once."""

import operator
from itertools import pairwise

import torch
from torch import fx

from torchspmd.step.graph.metadata import (
    OutputKind,
    OutputRole,
    Owner,
    output_values,
    set_roles,
)
from torchspmd.step.graph.nodes import NodeMaker

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
NUM_RANKS = 4
GROUP, OTHER = "0", "1"
BATCH = 3


class GraphBuilder:
    """Adds nodes with fake values to a graph."""

    def __init__(self, graph=None):
        self.graph = graph or fx.Graph()
        self.make = NodeMaker(self.graph, Owner())

    def input(self, name, *shape):
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=torch.float64, device="meta")
        return node

    def call(self, target, *args, **kwargs):
        if not kwargs:
            return self.make.call(target, *args)
        node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def items(self, node):
        return [
            self.call(operator.getitem, node, i) for i in range(len(node.meta["val"]))
        ]

    def waited(self, target, *args):
        return self.call(c10d.wait_tensor.default, self.call(target, *args))

    def reduced(self, node, op="sum", group=GROUP):
        return self.waited(c10d.all_reduce.default, node, op, group)

    def gathered(self, node):
        target = c10d.all_gather_into_tensor.default
        return self.waited(target, node, NUM_RANKS, GROUP)

    def scattered(self, node):
        target = c10d.reduce_scatter_tensor.default
        return self.waited(target, node, "sum", NUM_RANKS, GROUP)


def training_graph(random, sharded=False, fused=False):
    """Forward, backward, reductions, optimizer: new parameters and momenta, a loss."""
    b = GraphBuilder()
    sizes = [random.choice((4, 8, 12)) for _ in range(random.randint(3, 5))]
    share = NUM_RANKS if sharded else 1
    shapes = [(n // share, m) for n, m in pairwise(sizes)]
    weights = [b.input(f"w{i}", *shape) for i, shape in enumerate(shapes)]
    biases = [b.input(f"b{i}", m // share) for i, m in enumerate(sizes[1:])]
    params = [*weights, *biases]
    momenta = [b.input(f"m{i}", *p.meta["val"].shape) for i, p in enumerate(params)]
    x = b.input("x", BATCH, sizes[0])
    grads, loss = _gradients(b, random, weights, biases, x, sharded)
    watched = [b.call(aten.sum.default, random.choice([*params, *momenta]))]
    states = _optimizer(b, random, params, grads, momenta, fused)
    watched += [b.call(aten.sum.default, random.choice(states))]
    b.graph.output([*states, loss, *watched])
    roles = [OutputRole(OutputKind.STATE, i) for i in range(len(states))]
    set_roles(b.graph, roles + [OutputRole(OutputKind.RESULT)] * 3)
    return b.graph


def _gradients(b, random, weights, biases, x, sharded):
    whole = b.gathered if sharded else lambda node: node
    h, kept = x, []
    for weight, bias in zip(weights, biases, strict=True):
        used = whole(weight)
        kept.append((h, used))
        linear = b.call(aten.add.Tensor, b.call(aten.mm.default, h, used), whole(bias))
        h = b.call(aten.tanh.default, linear)
    loss = b.reduced(b.call(aten.sum.default, h), "avg", random.choice((GROUP, OTHER)))
    g = b.call(aten.mul.Tensor, h, 0.5)
    reduced = []
    for weight, (activation, used) in reversed(list(zip(weights, kept, strict=True))):
        again = sharded and random.random() < 0.5
        full = whole(weight) if again else used
        dw = b.call(aten.mm.default, b.call(aten.t.default, activation), g)
        db = b.call(aten.sum.dim_IntList, g, [0])
        share = b.scattered if sharded else b.reduced
        reduced.append((share(dw), share(db)))
        g = b.call(aten.mm.default, g, b.call(aten.t.default, full))
    grads = [w for w, _ in reversed(reduced)] + [v for _, v in reversed(reduced)]
    if random.random() < 0.5:
        grads = [b.call(aten.div.Tensor, grad, NUM_RANKS) for grad in grads]
    return grads, loss


def _optimizer(b, random, params, grads, momenta, fused):
    if fused:
        options = {
            "weight_decay": 0.01,
            "momentum": 0.9,
            "lr": 0.1,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
            "is_first_step": False,
        }
        lists = (params, grads, momenta)
        made = b.graph.call_function(aten._fused_sgd.default, lists, options)
        made.meta["val"] = [[node.meta["val"] for node in each] for each in lists]
        new, _, moved = b.items(made)
        return [*b.items(new), *b.items(moved)]
    kept = b.items(b.call(aten._foreach_mul.Scalar, momenta, 0.9))
    moved = b.items(b.call(aten._foreach_sub.List, kept, grads))
    new = b.items(b.call(aten._foreach_add.List, params, moved, alpha=0.1))
    return [*new, *moved]


def inputs_for(graph, seed=0):
    """Random inputs, other ones on each rank."""
    generator = torch.Generator().manual_seed(seed)
    nodes = graph.find_nodes(op="placeholder")
    return [
        [torch.randn(n.meta["val"].shape, generator=generator).double() for n in nodes]
        for _ in range(NUM_RANKS)
    ]


def run_ranks(graph, inputs):
    """All ranks in lockstep: what the graph returns, and what it left in its inputs."""
    inputs = [[tensor.clone() for tensor in each] for each in inputs]
    envs = [{} for _ in inputs]
    feeds = [iter(each) for each in inputs]
    for node in graph.nodes:
        if node.op == "placeholder":
            results = [next(feed) for feed in feeds]
        elif node.op == "output":
            break
        else:
            args = [_arguments(node, env) for env in envs]
            results = _call(node.target, args)
        for env, result in zip(envs, results, strict=True):
            env[node] = result
    outputs = [[env.get(node) for node in output_values(graph)] for env in envs]
    return outputs, inputs


def _arguments(node, env):
    return fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: env[source])


def _call(target, args):
    if target is c10d.wait_tensor.default:
        return [positional[0] for positional, _ in args]
    if getattr(target, "namespace", "") != "_c10d_functional":
        return [target(*positional, **named) for positional, named in args]
    name, rest = target._schema.name.partition("::")[2], args[0][0][1:]
    payloads = [positional[0] for positional, _ in args]
    if not name.endswith("_coalesced"):
        return _collective(name, payloads, rest)
    single = name.removesuffix("_coalesced")
    lists = [_collective(single, each, rest) for each in zip(*payloads, strict=True)]
    return [list(each) for each in zip(*lists, strict=True)]


def _collective(name, payloads, rest):
    stacked = torch.stack([each.contiguous() for each in payloads])
    if name == "all_gather_into_tensor":
        return [torch.cat(list(stacked)) for _ in payloads]
    total = stacked.sum(0)
    total = total / len(payloads) if rest[0] == "avg" else total
    if name == "all_reduce":
        return [total.clone() for _ in payloads]
    return list(total.chunk(len(payloads)))


def is_same(before, after, seed=0):
    """Whether two graphs give the same outputs on all ranks, up to rounding."""
    inputs = inputs_for(before, seed)
    try:
        old, new = run_ranks(before, inputs)[0], run_ranks(after, inputs)[0]
    except (RuntimeError, IndexError, TypeError):
        return False
    flat = [list(zip(*pair, strict=False)) for pair in zip(old, new, strict=True)]
    if any(len(a) != len(b) for a, b in zip(old, new, strict=True)):
        return False
    return all(
        one.shape == two.shape and torch.allclose(one, two, rtol=1e-9, atol=1e-12)
        for rank in flat
        for one, two in rank
    )
