"""``compile(parallel=, passes=, overlap=, cost=, backend=)``: what each turns on."""

import functools
import logging
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import train as step
from training import train_clipped

from torchspmd.comm import Kind
from torchspmd.errors import PassWarning, UsageError
from torchspmd.step import DataParallel, GraphModuleTransformation, Override, compile
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.passes import comm_fusion_with_concat
from torchspmd.testing import fake_world


def run(function=step, width=8, layers=3, size=4, **options):
    """The last program of two steps, and the compiled step."""
    with fake_world(size):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        optim = torch.optim.AdamW(model.parameters(), foreach=True)
        compiled = compile(function, **options)
        for _ in range(2):
            compiled(model, optim, torch.ones(2, width))
        compiled.flush()
        return compiled.programs[-1], compiled


def passes_of(program):
    return [report.name for report in program.certificate.passes]


def num_reductions(program):
    return sum(event.kind is Kind.ALL_REDUCE for event in program.ledger.events)


def test_passes_are_on_where_a_mode_is_given():
    program, _ = run(parallel="replicate")
    assert "comm_fusion_with_concat" in passes_of(program)
    assert num_reductions(program) == 1  # one bucket for six gradients


def test_passes_may_be_turned_off():
    program, _ = run(parallel="replicate", passes=False)
    assert passes_of(program) == []
    assert num_reductions(program) == 6


def fuse(gm):
    comm_fusion_with_concat(gm, 25)


def test_passes_may_be_a_list():
    seen = []
    program, _ = run(parallel="replicate", passes=[seen.append, fuse])
    assert len(seen) == 1
    assert num_reductions(program) == 1
    assert passes_of(program)[-1] == "comm_fusion_with_concat"


def test_the_lower_level_has_no_passes_by_default():
    program, _ = run(parallel_mode=DataParallel("replicate"))
    assert passes_of(program) == []
    program, _ = run()
    assert passes_of(program) == []


def test_the_global_batch_has_passes_when_asked_for():
    program, _ = run(passes=True)
    assert "comm_fusion_with_concat" in passes_of(program)


def test_a_mode_with_options():
    summed, _ = run(parallel=DataParallel("replicate", reduce="sum"), passes=False)
    averaged, _ = run(parallel="replicate", passes=False)
    divisions = [each.code.count("aten.div.") for each in (summed, averaged)]
    assert divisions == [divisions[0], divisions[0] + 6]  # one for each gradient


def test_fully_shard_gathers_and_never_defers():
    program, compiled = run(parallel="fully_shard")
    kinds = {event.kind for event in program.ledger.events}
    assert kinds == {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}
    assert "prefetch_gathers" in passes_of(program)
    assert "defer_updates" not in passes_of(program)
    assert "overlap" not in compiled.explain()


def test_overlap_defers_updates(caplog):
    with caplog.at_level(logging.INFO, logger="torchspmd"):
        program, compiled = run(parallel="replicate", overlap=True)
    assert program.is_deferring
    assert "made in the next step" in compiled.explain()
    assert caplog.messages[-1].startswith("train: flush took ")


def test_no_overlap():
    program, compiled = run(parallel="replicate", overlap=False)
    assert not program.is_deferring
    assert "defer_updates" not in passes_of(program)
    assert "overlap" not in compiled.explain()


def test_auto_defers_where_the_simulation_gains():
    """A network that is as slow as computing: half of the reductions can hide."""
    cost = CostModel(flops=1e9, memory_bytes=1e9, network_bytes=1e8)
    program, _ = run(width=256, layers=4, parallel="replicate", cost=cost)
    assert program.is_deferring
    assert not [each for each in program.notes if each.startswith("overlap='auto'")]
    (line,) = [each for each in program.notes if "wait for the next step" in each]
    assert re.match(
        r"updates wait for the next step: simulated to be [12]\.\d\d ", line
    )


def test_auto_leaves_updates_where_nothing_is_gained():
    cost = CostModel(network_bytes=1e18, latency_seconds=0.0)
    program, compiled = run(parallel="replicate", cost=cost)
    assert not program.is_deferring
    (line,) = [each for each in program.notes if each.startswith("overlap='auto'")]
    assert re.match(
        r"overlap='auto': nothing is deferred: left as it was: simulated to be \d\.\d\d "
        r"times as fast as without this pass$",
        line,
    )
    assert line in compiled.explain()
    assert "defer_updates (changed nothing)" in program.certificate.summary()


def test_auto_says_why_nothing_can_be_deferred():
    program, _ = run(train_clipped, width=600, parallel="replicate")
    assert not program.is_deferring
    (line,) = [each for each in program.notes if each.startswith("overlap='auto'")]
    assert "a norm for clipping" in line


def test_asked_for_overlap_warns_where_nothing_can_be_deferred():
    with pytest.warns(PassWarning, match="no update can wait for the next step"):
        run(train_clipped, width=600, parallel="replicate", overlap=True)


def test_default_passes_do_not_warn_where_there_is_nothing_to_do():
    program, _ = run(parallel="replicate", size=1, passes=True)
    assert not program.is_deferring


def test_as_a_decorator():
    @compile(parallel="replicate", overlap=False)
    def train(model, optim, batch):
        return step(model, optim, batch)

    with fake_world(2):
        model = nn.Linear(4, 4)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
        assert num_reductions(train.programs[0]) == 1


def test_backends_are_not_timed_on_fake_ranks():
    program, _ = run(parallel="replicate", backend="auto")
    assert (program.backend, program.rival) == ("graph", None)
    assert str(program.choice) == (
        "backend='auto': graph taken, not measured: the process group is fake, and sends "
        "nothing"
    )


def test_inductor_is_chosen_in_one_place():
    inductor = GraphModuleTransformation(enable_inductor=True)
    for options in (
        {"backend": "inductor"},
        {"gm_transformation": inductor},
        {"backend": "inductor", "gm_transformation": inductor},
    ):
        assert compile(step, **options)._options.backend == "inductor"
    assert compile(step)._options.backend == "graph"
    assert compile(step, backend="cudagraph")._options.backend == "cudagraph"


GRAPH = GraphModuleTransformation()
REFUSED = {
    "compile(parallel='ddp'): pass 'replicate', 'fully_shard', a DataParallel, or None "
    "for the result of one device on the batches of all ranks together.": {
        "parallel": "ddp"
    },
    "compile(parallel_mode='replicate'): pass a DataParallel, or None for the result of "
    "one device on the batches of all ranks together.": {"parallel_mode": "replicate"},
    "compile(passes=3): pass True, False or a list of functions, each called with the "
    "IterGraphModule.": {"passes": 3},
    "compile(overlap='yes'): pass True, False or 'auto'.": {"overlap": "yes"},
    "compile(cost='fast'): pass a CostModel, 'measure', or None for a guess.": {
        "cost": "fast"
    },
    "compile(backend='triton'): choose among graph, inductor, cudagraph, auto.": {
        "backend": "triton"
    },
    "compile(overlap=1): pass True, False or 'auto'.\n"
    "compile(verify='no'): pass True, False or a Verification.": {
        "overlap": 1,
        "verify": "no",
    },
    "compile(parallel=..., parallel_mode=...): both say how the step is spread over ranks."
    " Pass parallel alone.": {
        "parallel": "replicate",
        "parallel_mode": DataParallel("replicate"),
    },
    "compile(passes, overlap, cost=..., gm_transformation=...): the transformation says "
    "which passes run. Leave it out, or set the options of GraphModuleTransformation "
    "instead.": {
        "passes": True,
        "overlap": "auto",
        "cost": "measure",
        "gm_transformation": GRAPH,
    },
    "compile(backend='cudagraph', gm_transformation=GraphModuleTransformation("
    "enable_inductor=True)): these are two backends. Leave out enable_inductor, or pass "
    "backend='inductor'.": {
        "backend": "cudagraph",
        "gm_transformation": GraphModuleTransformation(enable_inductor=True),
    },
    "compile(overlap=True) would have no effect without passes. Set parallel='replicate', "
    "or passes=True.": {"overlap": True},
    "compile(overlap='auto') would have no effect without passes. Set parallel="
    "'replicate', or passes=True.": {
        "overlap": "auto",
        "parallel": "replicate",
        "passes": False,
    },
    "compile(overlap=True, passes=[...]) would have no effect: it is for the default "
    "passes alone. Add defer_updates to the list.": {"overlap": True, "passes": []},
    "compile(cost=...) would have no effect without passes. Set parallel='replicate', or "
    "passes=True.": {"cost": CostModel()},
    "compile(cost=..., passes=[...]) would have no effect: it is for the default passes "
    "alone. Give it to those passes that take a cost.": {
        "cost": "measure",
        "passes": [],
    },
    "compile(mp_policy=...): it goes with parallel='fully_shard'. Pass that, or give the "
    "policy to the DataParallel, DataParallel('fully_shard', mp_policy=...).": {
        "parallel": "replicate",
        "mp_policy": MixedPrecisionPolicy(),
    },
    "compile: mp_policy=str: pass torch's own policy, torch.distributed.fsdp."
    "MixedPrecisionPolicy(param_dtype=..., reduce_dtype=..., output_dtype=..., "
    "cast_forward_inputs=...).": {"parallel": "fully_shard", "mp_policy": "bf16"},
    "compile: mp_policy.param_dtype=torch.int8: choose among torch.bfloat16, "
    "torch.float16, torch.float32, torch.float64, or None.": {
        "parallel": "fully_shard",
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.int8),
    },
    "compile(overlap='auto') is not available: backend='cudagraph' replays one graph in "
    "which every collective ends.": {
        "parallel": "fully_shard",
        "overlap": "auto",
        "backend": "cudagraph",
    },
    "compile(shadow, shadow_every=..., module_override=...): modules that have stand-ins "
    "compute something else eagerly, so that nothing would be compared. Leave out shadow "
    "and shadow_every, or the stand-ins.": {
        "shadow": 1,
        "shadow_every": 2,
        "module_override": [Override()],
    },
    "compile(overlap=True) is not available: backend='cudagraph' replays one graph in "
    "which every collective ends.": {
        "parallel": "replicate",
        "overlap": True,
        "backend": "cudagraph",
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text):
    with pytest.raises(UsageError) as error:
        compile(step, **REFUSED[text])
    assert str(error.value) == text


def test_an_option_of_another_style_is_refused():
    with pytest.raises(UsageError) as error:
        DataParallel("replicate", reshard_after_forward=False)
    assert str(error.value) == (
        "DataParallel('replicate', reshard_after_forward=False) would have no effect: "
        "this style keeps whole parameters at all times; leave the argument out."
    )


def test_a_policy_is_for_shards():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.int8)
    with pytest.raises(UsageError) as error:
        DataParallel("replicate", mp_policy=policy)
    assert str(error.value) == (
        "DataParallel('replicate', mp_policy=...): the policy is for sharded parameters. "
        "Choose 'fully_shard', or run the step under torch.autocast."
    )
    with pytest.raises(UsageError, match=r"reduce_dtype=.*int8: choose"):
        DataParallel("fully_shard", mp_policy=policy)


def test_a_transformation_takes_auto():
    with pytest.raises(UsageError, match="overlap_iterations='maybe'"):
        GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations="maybe"
        )


async def coroutine(model, optim, batch):
    return model(batch)


def generator(model, optim, batch):
    yield model(batch)


async def asynchronous_generator(model, optim, batch):
    yield model(batch)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (coroutine, "a step that is a coroutine (async def) does its work after"),
        (generator, "a step that is a generator (yield) does its work after"),
        (functools.partial(generator, None), "'generator': a step that is a generator"),
        (asynchronous_generator, "a step that is an asynchronous generator does its"),
        (compile(step), "'train': it is compiled already"),
    ],
)
def test_functions_that_are_no_step(function, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        compile(function)


class Step:
    def __call__(self, model, optim, batch):
        return step(model, optim, batch)


@pytest.mark.parametrize(
    ("function", "name"), [(functools.partial(step), "train"), (Step(), "Step")]
)
def test_ranks_know_a_callable_object_by_one_name(function, name):
    """Its ``repr`` has an address, which other ranks would wait for in vain."""
    _, compiled = run(function, parallel="replicate")
    assert compiled.explain().startswith(f"{name}: 1 program")
