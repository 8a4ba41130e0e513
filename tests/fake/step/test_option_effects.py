"""Every option of ``compile`` in every mode: it has an effect, or an error names it."""

import contextlib
import functools
import inspect
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import train as step

from torchspmd.errors import PassWarning, SpmdError
from torchspmd.step import (
    CostModel,
    DataParallel,
    GraphModuleTransformation,
    Override,
    compile,
)
from torchspmd.testing import fake_world

MODES = {
    "one device": {},
    "global batch": {},
    "replicate": {"parallel": "replicate"},
    "fully_shard": {"parallel": "fully_shard"},
}
NONE, GLOBAL, REPLICATE, SHARD = MODES


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


class Doubled(Override):
    def replacement(self, fqn, orig_submodule):
        return Twice(orig_submodule)


def no_pass(gm):
    return None


def same_graph(gm):
    return gm


def call_of_its_own(gm):
    return gm.forward


def data_axis():
    """A mesh of all ranks that has another name than the default one."""
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


SLOW = CostModel(flops=1e6, memory_bytes=1e9, network_bytes=1e6, latency_seconds=1e-9)

# An option and what else is passed -> the modes in which it asks for what is so anyway,
# or in which there is nothing to see: ranks of a fake group are not compared.
CASES = {
    ("parallel", "replicate", ()): {REPLICATE},
    ("parallel_mode", DataParallel("fully_shard"), ()): set(),
    ("passes", True, ()): {REPLICATE, SHARD},
    ("passes", False, ()): {NONE, GLOBAL},
    ("passes", (no_pass,), ()): set(),
    ("overlap", False, ()): {NONE, GLOBAL, SHARD},
    ("overlap", True, ()): {REPLICATE},  # "auto" defers too
    ("overlap", True, ("passes",)): {GLOBAL, REPLICATE},
    ("overlap", "auto", ()): {REPLICATE},
    ("overlap", "auto", ("passes",)): {GLOBAL, REPLICATE, NONE},
    ("overlap", "auto", ("backend",)): set(),
    ("cost", SLOW, ()): set(),
    ("cost", "measure", ("passes",)): set(),
    ("backend", "graph", ()): {*MODES},
    ("backend", "graph", ("gm_transformation",)): set(),
    ("backend", "cudagraph", ()): set(),
    ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.bfloat16), ()): set(),
    ("mesh", data_axis, ()): {NONE},  # none can be made without a process group
    ("verify", True, ()): set(),
    ("shadow", 2, ()): set(),
    ("shadow", 2, ("module_override",)): set(),
    ("shadow_every", 1, ("shadow",)): {GLOBAL, REPLICATE, SHARD},
    ("shadow_every", 1, ("module_override",)): set(),
    ("module_override", (Doubled("0"),), ()): set(),
    ("gm_transformation", same_graph, ()): {*MODES},
    ("gm_transformation", call_of_its_own, ()): set(),
    ("gm_transformation", GraphModuleTransformation(), ()): {*MODES},
}
BESIDE = {
    "passes": True,
    "backend": "cudagraph",
    "gm_transformation": GraphModuleTransformation(enable_inductor=True),
    "module_override": (Doubled("0"),),
    "shadow": 1,
}


@functools.cache
def seen(mode, given):
    """All that a user can see of two steps, without times; or the text of an error."""
    options = {
        name: value for name, value in given if value is not data_axis or mode != NONE
    }
    in_world = contextlib.nullcontext() if mode == NONE else fake_world(2)
    with in_world, warnings.catch_warnings(record=True) as caught:
        if options.get("mesh"):
            options["mesh"] = data_axis()
        warnings.simplefilter("always", PassWarning)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            compiled = compile(step, **{**MODES[mode], **options})
            for _ in range(2):
                compiled(model, optim, torch.ones(2, 512))
            compiled.flush()
        except SpmdError as error:
            return str(error)
        program = compiled.programs[-1]
        told = "".join(
            line
            for line in compiled.explain().splitlines()
            if not line.strip().startswith(("program", "phases"))
        )
        told = re.sub(r"they took .* s", "", told)
        axes = {event.axis for event in program.ledger.events}
        return program.code, axes, told, [str(each.message) for each in caught]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("option", "value", "beside"),
    CASES,
    ids=[f"{option}-{number}" for number, (option, *_) in enumerate(CASES)],
)
def test_an_option_has_an_effect_or_an_error_names_it(mode, option, value, beside):
    others = tuple((name, BESIDE[name]) for name in beside)
    given = seen(mode, (*others, (option, value)))
    if isinstance(given, str):
        assert re.search(rf"\b{option}\b", given), given
    elif mode not in CASES[option, value, beside]:
        assert given != seen(mode, others)


def test_every_option_is_in_the_table():
    names = set(inspect.signature(compile).parameters) - {"func"}
    assert names == {option for option, _, _ in CASES}
