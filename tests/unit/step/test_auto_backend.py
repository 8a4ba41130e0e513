"""backend="auto": graph and Inductor take turns in real calls, and the faster one stays."""

import gc
import weakref

import pytest
import torch
from timed_backends import Timed
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from training import train

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step import GraphModuleTransformation, IterGraphModule, compile
from torchspmd.step.runtime import Runtime, using_runtime
from torchspmd.step.trial import LAP_CALLS, ROUNDS, TIMED_CALLS, TRIAL_CALLS

TIMES = {"graph": (0.061, 0.066), "inductor": (0.116, 0.104)}  # by what is faster
OVERLAPPED = {"parallel": "replicate", "overlap": True}


def make(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, optimizer(model.parameters(), lr=0.1, **options)


def batches(count=TRIAL_CALLS + 3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def assert_same_state(model, optim, eager):
    """What a checkpoint of both would hold."""
    expected, expected_optim = eager
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    theirs = expected_optim.state_dict()["state"]
    torch.testing.assert_close(optim.state_dict()["state"], theirs)


@pytest.mark.parametrize("faster", TIMES)
def test_the_faster_one_stays(faster):
    (model, optim), eager = make(), make()
    step, runtime = compile(train, backend="auto"), Timed(*TIMES[faster])
    with using_runtime(runtime):
        first, *others = batches()
        torch.testing.assert_close(step(model, optim, first), train(*eager, first))
        graph = step.programs[0]
        loser = graph.rival if faster == "graph" else graph
        released = weakref.ref(loser.run)
        del graph, loser
        for batch in others:
            assert "take turns" in step.explain() or len(runtime.made) > TRIAL_CALLS
            torch.testing.assert_close(step(model, optim, batch), train(*eager, batch))
    round_of_both = ["graph"] * LAP_CALLS + ["inductor"] * LAP_CALLS
    assert runtime.made == round_of_both * ROUNDS + [faster] * 3
    assert [len(watch.runs) for watch in runtime.watches] == [ROUNDS * TIMED_CALLS] * 2
    (program,) = step.programs
    assert (program.backend, program.rival) == (faster, None)
    assert program.choice.taken == faster
    assert program.choice.seconds == dict(
        zip(("graph", "inductor"), TIMES[faster], strict=True)
    )
    text = "{:.2f} ms, inductor {:.2f} ms".format(*(1e3 * t for t in TIMES[faster]))
    assert f"{faster} taken; graph {text} a call" in step.explain()
    gc.collect()
    assert released() is None
    step.close()
    assert step.programs[0].choice.taken == faster


def test_graph_stays_where_both_are_as_fast():
    model, optim = make()
    step = compile(train, backend="auto")
    with using_runtime(Timed(0.1, 0.1)):
        for batch in batches():
            step(model, optim, batch)
    assert step.programs[0].backend == "graph"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("faster", TIMES)
def test_overlapped_steps_with_a_schedule(faster, fused, alone):
    """No update is lost when turns change, and every rate has its effect."""
    options = {"momentum": 0.9, "fused": fused}
    (model, optim), eager = make(**options), make(**options)
    schedules = [ExponentialLR(each, 0.9) for each in (optim, eager[1])]
    step = compile(train, backend="auto", shadow=3, **OVERLAPPED)
    with using_runtime(Timed(*TIMES[faster], compiles=True)):
        for number, batch in enumerate(batches()):
            torch.testing.assert_close(step(model, optim, batch), train(*eager, batch))
            for schedule in schedules:
                schedule.step()
            if number % 7 == 5:
                assert_same_state(model, optim, eager)
    assert_same_state(model, optim, eager)
    (program,) = step.programs
    assert program.is_deferring
    assert program.choice.taken == program.backend == faster
    # Three calls of each backend were compared with eager ones.
    assert "shadow steps: 6 calls were also made eagerly" in step.explain()


def test_one_flush_at_each_change_of_turns(alone, monkeypatch):
    flushed, flush = [], IterGraphModule.flush

    def count(self, *args, **kwargs):
        flushed.append(runtime.made[-1])
        return flush(self, *args, **kwargs)

    monkeypatch.setattr(IterGraphModule, "flush", count)
    model, optim = make()
    runtime = Timed(*TIMES["graph"])
    with using_runtime(runtime), compile(train, backend="auto", **OVERLAPPED) as step:
        for batch in batches():
            step(model, optim, batch)
    assert flushed == ["graph", "inductor"] * ROUNDS + ["graph"]


def test_the_clock_of_the_machine():
    """Nothing is replaced: some choice is made, and both times are said."""
    (model, optim), eager = make(), make()
    step = compile(train, backend="auto")
    for batch in batches():
        torch.testing.assert_close(step(model, optim, batch), train(*eager, batch))
    (program,) = step.programs
    seconds = program.choice.seconds
    assert program.backend == min(seconds, key=seconds.get)
    assert all(0 < each < 60 for each in seconds.values())


def test_a_failed_call_is_not_timed(monkeypatch):
    model, optim = make()
    step = compile(train, backend="auto")
    runtime = Timed(*TIMES["graph"])
    with using_runtime(runtime):
        for number, batch in enumerate(batches()):
            if number == LAP_CALLS - 1:
                with pytest.raises(RuntimeError), monkeypatch.context() as failing:
                    failing.setattr(
                        type(step.programs[0]), "_run_and_write", _raise_error
                    )
                    step(model, optim, batch)
            else:
                step(model, optim, batch)
    choice = step.programs[0].choice
    assert (choice.taken, choice.seconds["graph"]) == ("graph", TIMES["graph"][0])


def _raise_error(*args, **kwargs):
    raise RuntimeError


def no_compiler(runtime, graph, compiled):
    raise RuntimeError("no C++ compiler\nlong text")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(Runtime, "compile_graph", no_compiler)
    assert_graph({}, "Inductor cannot compile it: no C++ compiler")


def test_a_counter_on_the_host():
    assert_graph({"optimizer": torch.optim.Adam}, "Inductor cannot compile it: the ")


def assert_graph(options, why, **compiling):
    (model, optim), eager = make(**options), make(**options)
    step = compile(train, backend="auto", **compiling)
    for batch in batches(3):
        torch.testing.assert_close(step(model, optim, batch), train(*eager, batch))
    (program,) = step.programs
    assert (program.backend, program.rival) == ("graph", None)
    assert program.choice.seconds == {}
    assert f"backend='auto': graph taken, not measured: {why}" in step.explain()


class Counting(torch.optim.Optimizer):
    """Counts its steps in Python, and computes with the number."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                rate = group["lr"] / state["count"]
                parameter.add_(parameter.grad, alpha=-rate)


@pytest.mark.parametrize("backend", ["auto", "inductor"])
def test_inductor_leaves_numbers_as_they_are(backend):
    """They go into its code as no constants: neither a counter nor, measured, a rate."""
    (model, optim), eager = make(Counting), make(Counting)
    step = compile(train, backend=backend)
    with using_runtime(Timed(*TIMES["inductor"], compiles=True)):
        for batch in batches():
            torch.testing.assert_close(step(model, optim, batch), train(*eager, batch))
    assert_same_state(model, optim, eager)
    cold, warm = step.programs
    assert warm.backend == "inductor"
    if backend == "auto":
        assert (cold.backend, cold.choice, cold.rival) == ("graph", None, None)
        assert "so it runs once: not timed" in step.explain()


def test_a_callable_of_the_users_own():
    assert_graph(
        {},
        "Inductor cannot compile it: gm_transformation returned a callable",
        gm_transformation=lambda graph: graph.forward,
    )


def test_sizes_that_are_symbols():
    model, optim = make()
    step = compile(train, backend="auto")
    with using_runtime(Timed(*TIMES["graph"])):
        for rows in (3, 5, 6, 7):
            step(model, optim, torch.ones(rows, 4))
    one_size, all_sizes = step.programs
    assert one_size.rival is not None
    assert all_sizes.rival is None
    assert "whose sizes are symbols" in str(all_sizes.choice)


def test_two_backends_at_once():
    transformation = GraphModuleTransformation(enable_inductor=True)
    with pytest.raises(UsageError, match=r"compile\(backend='auto', .*two backends"):
        compile(train, backend="auto", gm_transformation=transformation)
    step = compile(
        train,
        backend="auto",
        gm_transformation=lambda graph: IterGraphModule(graph, enable_inductor=True),
    )
    with pytest.raises(CaptureError, match="or leave out enable_inductor"):
        step(*make(), torch.ones(3, 4))


def test_graphs_are_verified_for_both(alone):
    model, optim = make()
    step = compile(train, backend="auto", verify=True, **OVERLAPPED)
    with using_runtime(Timed(*TIMES["inductor"])):
        for batch in batches():
            step(model, optim, batch)
    step.flush()
    text = str(step.programs[0].certificate)
    assert "the form that Inductor gets" in text
    assert step.programs[0].backend == "inductor"
