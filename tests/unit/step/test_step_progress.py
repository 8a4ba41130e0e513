"""What a capture shows while it runs, and what it takes from the compiler's cache."""

import contextlib
import io
import logging
import re

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._inductor import compile_fx
from torch.profiler import ProfilerActivity, profile
from training import train

from torchspmd.step import compile, progress
from torchspmd.step.progress import Progress, phase


def run(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = compile(**options)(train)
    step(model, optim, torch.ones(2, 4))
    return step, model.weight.detach()


def test_nothing_is_written_where_there_is_no_terminal(capfd):
    step, _ = run(gm_transformation=lambda gm: gm)
    assert capfd.readouterr() == ("", "")
    (told,) = [line for line in step.programs[0].notes if line.startswith("phases: ")]
    assert [
        name in told for name in ("capture", "functionalize", "mode", "passes")
    ] == [True] * 4
    assert told in step.explain()


def test_phases_on_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_TOLD_AFTER", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Progress("compile step", console) as shown:
        with phase("tracing"):
            pass
        with phase("tracing"), phase("compiling"):
            pass
    assert list(shown.seconds) == ["tracing", "compiling"]
    text = file.getvalue()
    assert "compile step: compiling" in text
    assert "compile step: 0.00 s (tracing 0.00, compiling 0.00)" in text


def test_phases_in_the_log_of_a_job(monkeypatch):
    monkeypatch.setattr(progress, "_LOGGED_AFTER", -1.0)
    file = io.StringIO()
    with Progress("compile step", Console(file=file, width=120)):
        with phase("tracing"):
            pass
    lines = file.getvalue().splitlines()
    assert lines == ["compile step: tracing, after 0 s", lines[1]]
    assert "compile step: 0.00 s (tracing 0.00)" in lines[1]


def test_outside_of_a_capture_nothing_is_kept():
    with phase("tracing"):
        pass
    with Progress("compile step") as shown:
        pass
    assert shown.seconds == {}


def test_a_failed_capture_leaves_no_line():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True)
    with pytest.raises(ValueError, match="stop"), Progress("compile", console):
        raise ValueError("stop")
    assert " s (" not in file.getvalue()


PHASES = ("capture", "functionalize", "mode", "passes", "lowering", "program")


def test_phases_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="torchspmd"):
        run(gm_transformation=lambda gm: gm)
    lines = [record.getMessage() for record in caplog.records]
    for name in PHASES:
        (line,) = [line for line in lines if line.startswith(f"compile train: {name} ")]
        assert re.fullmatch(r".* took \d+\.\d{3} s", line)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="torchspmd"):
        run()
    details = [each for each in caplog.records if each.levelno == logging.DEBUG]
    lines = [record.getMessage() for record in details]
    assert "compile train: capture begins" in lines
    assert "train: step with program 0" in lines


def test_nothing_is_logged_by_default(caplog):
    run()
    assert [each for each in caplog.records if each.name == "torchspmd"] == []
    assert not logging.getLogger("torchspmd").handlers


def test_phases_are_spans_of_a_profile():
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(gm_transformation=lambda gm: gm)
    names = {event.key for event in seen.key_averages()}
    assert {f"torchspmd::{name}" for name in PHASES} <= names
    assert {"torchspmd::step", "torchspmd::inventory"} <= names


def test_the_compilers_cache_is_used_and_may_be_broken(monkeypatch):
    first, weight = run(backend="inductor")
    again, same = run(backend="inductor")
    assert "Inductor: compiled" in first.explain()
    assert "Inductor: compiled code from its cache" in again.explain()
    real, calls = compile_fx.compile_fx, []

    def fails_once(*args, **options):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("truncated")
        return real(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", fails_once)
    # A cache of its own would compile everything anew, which takes long.
    monkeypatch.setattr("torch._inductor.utils.fresh_cache", contextlib.nullcontext)
    without, third = run(backend="inductor")
    assert "its cache could not be used, compiled without it" in without.explain()
    assert torch.equal(weight, same) and torch.equal(same, third)
