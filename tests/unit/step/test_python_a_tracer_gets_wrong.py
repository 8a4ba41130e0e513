"""Python that a tracer gets wrong: what becomes of each piece in a compiled step.

Each row is a small step, run eagerly and compiled, with what changes between two calls. The
outcome is one of three: the results are equal (in one program or several), the step is
refused with a text, or it is stale. What is stale without shadow steps is an error with
them. docs/what_a_step_may_do.md is this table in words.
"""

import array
import builtins
import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import operator
import os
import pathlib
import random
import sys
import sysconfig
import tempfile
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from torchspmd.errors import CaptureError, CaptureWarning, ShadowError
from torchspmd.step import compile

EQUAL = "equal"
STALE = "stale"
CALLS = 5


@dataclasses.dataclass
class World:
    """A step, its further arguments, what happens before each call, and what it leaves."""

    step: object
    extra: tuple = ()
    change: object = lambda number: None
    left: object = lambda: None
    model: object = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A step that is made anew for each run, and what becomes of it.

    Attributes:
        make: Makes it.
        alone: Without shadow steps: equal, stale, or words of the refusal.
        programs: How many are captured where results are equal: one for each value of
            ``halved``, or one where nothing that a program relies on changes.
        shadow: With shadow steps, words of the error where it is stale without them; in
            all other rows they change nothing.
    """

    make: object
    alone: str = EQUAL
    programs: int = 3
    shadow: str = ""


def train(model, optim, batch, scale=1.0):
    loss = model(batch).square().mean() * scale
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


# ----------------------------------------------------------------------------
# Values that change between two calls, where the step reads them.


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    other: int = 0


class Schedule:
    def __init__(self):
        self.t = 0

    @property
    def weight(self):
        return 1.0 + self.halves()

    def halves(self):
        return self.t / 2


class Trainer:
    kind = 1.0

    def __init__(self):
        self.w, self.count, self.seen, self.log = 1.0, 0, 0, []
        self.schedule, self.rng = Schedule(), np.random.default_rng(0)
        self.settings = {"scales": [1.0]}

    def reads(self, model, optim, batch):
        return train(model, optim, batch, self.w)

    def reads_deep(self, model, optim, batch):
        return train(model, optim, batch, self.settings["scales"][0])

    def reads_property(self, model, optim, batch):
        return train(model, optim, batch, self.schedule.weight)

    def reads_by_text(self, model, optim, batch):
        return train(model, optim, batch, getattr(self, "w"))  # noqa: B009

    def reads_by_computed_text(self, model, optim, batch):
        name = "ww"
        return train(model, optim, batch, getattr(self, f"{name[0]}"))

    def counts(self, model, optim, batch):
        self.count += 1
        return train(model, optim, batch, self.count)

    def appends(self, model, optim, batch):
        self.log.append(1)
        return train(model, optim, batch)

    def draws(self, model, optim, batch):
        return train(model, optim, batch, float(self.rng.uniform()))

    __call__ = reads


def method(name, **changes):
    """A method as the step; attributes are set to the number of the call."""

    def make():
        trainer = Trainer()

        def change(number):
            for key, value in changes.items():
                setattr(trainer, key, value(number))

        step = trainer if name == "__call__" else getattr(trainer, name)
        return World(step, change=change, left=lambda: (trainer.count, trainer.log))

    return make


def halved(number):
    return 1.0 / (1 + number // 2)


def schedule_of_a_method():
    trainer = Trainer()

    def change(number):
        trainer.schedule.t = number // 2

    return World(trainer.reads_property, change=change)


def deep_in_self():
    trainer = Trainer()

    def change(number):
        trainer.settings["scales"][0] = halved(number)

    return World(trainer.reads_deep, change=change)


def trainer_with_a_model():
    trainer, model = Trainer(), nn.Linear(4, 4)
    trainer.model = model

    def change(number):
        trainer.w, trainer.seen = halved(number), number

    return World(trainer.reads, change=change, model=model)


class Settings:
    """Answers for a name that it does not have with an error of its own."""

    def __init__(self):
        self.table = {"scale": 1.0}

    def __getattr__(self, name):
        return self.table[name]


class SettingsWithSlots:
    __slots__ = ("later", "table")

    def __init__(self):
        self.table = {"scale": 1.0}

    def __getattr__(self, name):
        return self.table[name]

    def __call__(self, module, args, output):
        return output * self.scale


def settings_that_raise():
    settings, model = Settings(), nn.Linear(4, 4)
    hook = SettingsWithSlots()
    model.register_forward_hook(hook)

    def step(model, optim, batch):
        return train(model, optim, batch, settings.scale)

    def change(number):
        settings.table["scale"] = hook.table["scale"] = halved(number)

    return World(step, change=change, model=model)


def closure():
    scale = 1.0

    def step(model, optim, batch):
        return train(model, optim, batch, scale)

    def change(number):
        nonlocal scale
        scale = halved(number)

    return World(step, change=change)


SCALE = 1.0
COUNT = 0
COUNTS = collections.Counter()


def scaled_by_a_helper():
    return SCALE


def by_a_global(step, make_model=lambda: None):
    """A step, or its model, that reads a global of this file."""

    def make():
        def change(number):
            global SCALE  # noqa: PLW0603
            SCALE = halved(number)

        return World(step, change=change, model=make_model())

    return make


def scaled_by(read):
    """A step that scales its loss by what a function reads."""

    def step(model, optim, batch):
        return train(model, optim, batch, read(batch))

    return step


def twice(function):
    settings = Config()

    @functools.wraps(function)
    def inner(*args):
        return function(*args, settings.scale)

    inner.settings = settings
    return inner


def decorated():
    step = twice(train)

    def change(number):
        step.settings.scale = halved(number)

    return World(step, change=change)


def cached():
    @functools.lru_cache
    def weight():
        return SCALE

    def step(model, optim, batch):
        return train(model, optim, batch, weight())

    def change(number):
        global SCALE  # noqa: PLW0603
        weight.cache_clear()
        SCALE = halved(number)

    return World(step, change=change)


def partial():
    config = Config()

    def step(config, model, optim, batch):
        return train(model, optim, batch, config.scale)

    def change(number):
        config.scale = halved(number)

    return World(functools.partial(step, config), change=change)


SETTINGS = types.ModuleType("settings_of_the_user")
SETTINGS.__file__ = "settings_of_the_user.py"


def file_of_the_user():
    def step(model, optim, batch):
        return train(model, optim, batch, SETTINGS.scale)

    def change(number):
        SETTINGS.scale = halved(number)

    return World(step, change=change)


class ReadsGlobal(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE


def counted_beside():
    trainer = Trainer()

    def change(number):
        trainer.seen = number
        trainer.log.append(number)

    return World(trainer.reads, change=change)


def attribute_of_an_argument():
    config = Config()

    def step(model, optim, batch, config):
        return train(model, optim, batch, config.scale)

    def change(number):
        config.scale = halved(number)

    return World(step, (config,), change)


def attribute_of_the_function():
    def step(model, optim, batch):
        return train(model, optim, batch, step.scale)

    def change(number):
        step.scale = halved(number)

    return World(step, change=change)


def weak_reference():
    config = Config()
    reference = weakref.ref(config)

    def step(model, optim, batch):
        return train(model, optim, batch, reference().scale)

    def change(number):
        config.scale = halved(number)

    return World(step, change=change)


def for_two_calls(context, step=train):
    """A step inside a context of its own in calls 2 and 3."""

    def make():
        stack = contextlib.ExitStack()

        def change(number):
            if number == 2:
                stack.enter_context(context())
            elif number == 4:
                stack.close()

        return World(step, change=change)

    return make


def hook_of_all_modules():
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 0.5
    )


def hook_of_all_optimizers():
    def halve(optim, args, kwargs):
        for parameter in optim.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    return register_optimizer_step_pre_hook(halve)


def halving_saved_tensors():
    return torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved * 0.5, lambda saved: saved
    )


def read_by_a_hook(register):
    """A hook that reads a number, which changes between calls."""

    def make():
        model, config = nn.Linear(4, 4), Config()

        def change(number):
            config.scale = halved(number)

        register(model, config)
        return World(train, change=change, model=model)

    return make


def scales_output(model, config):
    model.register_forward_hook(lambda module, args, output: output * config.scale)


def scales_gradient(model, config):
    model.weight.register_hook(lambda gradient: gradient * config.scale)


class Scales:
    def __init__(self, config):
        self.config = config

    def __call__(self, module, args):
        return (args[0] * self.config.scale,)


def scales_input(model, config):
    model.register_forward_pre_hook(Scales(config))


class Scaled(torch.optim.SGD):
    """An optimizer with a number of its own beside its groups."""

    scale = 1.0

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.01 * self.scale)


def attribute_of_an_optimizer():
    model = nn.Linear(4, 4)
    optim = Scaled(model.parameters())
    optim.scale = 1.0

    def step(model, _, batch, optim):
        return train(model, optim, batch)

    def change(number):
        optim.scale = halved(number)

    return World(step, (optim,), change, model=model)


class ScaledByGroup(Scaled):
    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        self.scale_of(group["own"])
        for parameter in group["params"]:
            parameter.sub_(parameter.grad, alpha=0.01 * self.scale_of(group["own"]))

    @staticmethod
    def scale_of(own):
        if callable(own):
            return own()
        return own["scale"] if isinstance(own, dict) else own.scale


def function_with_settings():
    settings = Config()

    def scale():
        return settings.scale

    scale.settings = settings
    return scale


def held_by_a_group(make_own, write):
    """An optimizer that keeps more than numbers in a parameter group."""

    def make():
        model = nn.Linear(4, 4)
        optim = ScaledByGroup(model.parameters())
        optim.param_groups[0]["own"] = own = make_own()
        optim.param_groups[0]["names"] = {"weight", "bias"}

        def step(model, _, batch, optim):
            return train(model, optim, batch)

        return World(
            step, (optim,), lambda number: write(own, halved(number)), model=model
        )

    return make


def set_scale_of(own, value):
    getattr(own, "settings", own).scale = value


def hook_of_an_optimizer():
    model, config = nn.Linear(4, 4), Config()
    optim = torch.optim.SGD(model.parameters(), lr=0.01)

    def halve(optim, args, kwargs):
        optim.param_groups[0]["params"][0].grad.mul_(config.scale)

    optim.register_step_pre_hook(halve)

    def step(model, _, batch, optim):
        return train(model, optim, batch)

    def change(number):
        config.scale = halved(number)

    return World(step, (optim,), change, model=model)


def scheduler(read):
    def make():
        optim = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)

        def step(model, optim, batch):
            return train(model, optim, batch, read(schedule))

        def change(number):
            if number:
                optim.step()
                schedule.step()

        return World(step, change=change)

    return make


def held_by(holder, read, write):
    """A number that an object of Python's own library holds."""

    def make():
        held = holder()

        def step(model, optim, batch):
            return train(model, optim, batch, read(held))

        return World(step, change=lambda number: write(held, halved(number)))

    return make


def set_item(place):
    return lambda held, value: operator.setitem(held, place, value)


def set_value(held, value):
    held.value = value


def set_or_clear(held, value):
    if value == 1.0:
        held.clear()
    else:
        held.set()


@torch.no_grad()
def scale_without_gradients():
    return SCALE


@functools.singledispatch
def scale_of(value):
    return 1.0


@scale_of.register
def _(value: torch.Tensor):
    return SCALE


@contextlib.contextmanager
def scaled():
    yield SCALE


def scale_in_a_context():
    with scaled() as found:
        return found


class Kinds(type):
    scale = 1.0


class OfAKind(metaclass=Kinds):
    pass


def imported_in_the_step():
    sys.modules["settings_of_the_user"] = SETTINGS

    def step(model, optim, batch):
        from settings_of_the_user import scale

        return train(model, optim, batch, scale)

    def change(number):
        SETTINGS.scale = halved(number)

    return World(step, change=change)


class HasConfig(nn.Linear):
    """A classifier of many classes, whose config names each of them."""

    def __init__(self):
        super().__init__(4, 4)
        self.config = types.SimpleNamespace(zeta=1.0)
        self.config.names = {number: str(number) for number in range(3000)}

    def forward(self, x):
        return super().forward(x) * self.config.zeta


def beside_a_long_table():
    model = HasConfig()

    def change(number):
        model.config.zeta = halved(number)

    return World(train, change=change, model=model)


def beside_a_long_list():
    names, weights = [str(number) for number in range(5000)], {"zeta": 1.0}

    def step(model, optim, batch):
        return train(model, optim, batch, weights["zeta"] * (len(names) - 4999))

    def change(number):
        weights["zeta"] = halved(number)

    return World(step, change=change)


class HalvesTanh(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.tanh else found


def train_on_tanh(model, optim, batch):
    return train(model, optim, torch.tanh(batch))


def float_argument():
    numbers = [1.0]

    def change(number):
        numbers[0] = halved(number)

    return World(train, numbers, change)


# ----------------------------------------------------------------------------
# What the step itself changes.


def counter_of_the_function():
    def step(model, optim, batch):
        step.calls += 1
        return train(model, optim, batch, step.calls)

    step.calls = 0
    return World(step, left=lambda: step.calls)


def variable_set_in_the_step():
    count = contextvars.ContextVar("count", default=0)

    def step(model, optim, batch):
        count.set(count.get() + 1)
        return train(model, optim, batch, count.get())

    count.set(0)
    return World(step, left=count.get)


def drawn_by_numpy():  # np.random.rand itself would be an object around the step
    return np.random.rand()


def random_of_a_library(draw):
    return lambda: World(scaled_by(lambda batch: float(draw())))


def nonlocal_counter():
    count = 0

    def step(model, optim, batch):
        nonlocal count
        count += 1
        return train(model, optim, batch, count)

    return World(step, left=lambda: count)


def global_counter():
    global COUNT  # noqa: PLW0603
    COUNT = 0

    def step(model, optim, batch):
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return train(model, optim, batch, COUNT)

    return World(step, left=lambda: COUNT)


def global_container():
    COUNTS.clear()

    def step(model, optim, batch):
        COUNTS["calls"] += 1
        return train(model, optim, batch, COUNTS["calls"])

    return World(step, left=lambda: dict(COUNTS))


def random_argument(make):
    def step(model, optim, batch, rng):
        return train(model, optim, batch, float(rng.random()))

    def world():
        rng = make()
        return World(step, (rng,), left=rng.random)

    return world


class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) * float(self.rng.random())


def random_of_a_module():
    model = Noisy()
    return World(train, model=model, left=model.rng.random)


def iterator_argument():
    def step(model, optim, batch, numbers):
        return train(model, optim, batch, next(numbers))

    return World(step, (iter(range(1, 99)),))


def generator_around_the_step():
    numbers = (float(n) for n in itertools.count(1))

    def step(model, optim, batch):
        return train(model, optim, batch, next(numbers))

    return World(step)


class Holds(nn.Linear):
    count = 0

    def __init__(self, kind):
        super().__init__(4, 4)
        self.kind, self.config, self.array = kind, Config(), np.zeros(2)

    def forward(self, x):
        if self.kind == "object":
            self.config.other += 1
        elif self.kind == "array":
            self.array[0] += 1
        elif self.kind == "class":
            type(self).count += 1
        else:
            self.config = Config(other=self.config.other + 1)
        number = max(self.config.other, self.array[0], self.count)
        return super().forward(x) * float(number)


def of_a_module(kind):
    def make():
        Holds.count = 0
        model = Holds(kind)
        return World(
            train,
            model=model,
            left=lambda: (model.config, model.array.tolist(), Holds.count),
        )

    return make


def scaler_of_a_trainer(enabled):
    def make():
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)

        def step(model, optim, batch):
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            return loss.detach()

        return World(step, left=scaler.get_scale)

    return make


class Counts(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def counted_in_a_buffer():
    model = Counts()
    return World(train, model=model, left=model.calls.item)


def drawn_by_torch():
    generator = torch.Generator().manual_seed(0)

    def step(model, optim, batch, generator):
        return train(model, optim, batch, torch.rand((), generator=generator))

    return World(step, (generator,), left=lambda: generator.get_state().tolist())


def hook_that_counts():
    model, calls = nn.Linear(4, 4), []
    model.register_forward_hook(lambda *_: calls.append(1))
    return World(train, model=model, left=lambda: len(calls))


class Lazy(nn.Linear):
    cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = Config(scale=2.0)
        return super().forward(x) * self.cache.scale * self.width

    @functools.cached_property
    def width(self):
        self.seen = True
        return self.in_features


def made_in_the_first_call():
    model = Lazy(4, 4)
    return World(
        train, model=model, left=lambda: (model.cache, vars(model)["width"], model.seen)
    )


# ----------------------------------------------------------------------------
# What no guard sees.


def environment():
    def step(model, optim, batch):
        return train(model, optim, batch, float(os.environ["TORCHSPMD_TEST_SCALE"]))

    def change(number):
        os.environ["TORCHSPMD_TEST_SCALE"] = str(halved(number))

    return World(step, change=change)


def sets_environment():
    os.environ["TORCHSPMD_TEST_SCALE"] = "1.0"

    def step(model, optim, batch):
        os.environ["TORCHSPMD_TEST_SCALE"] = "2.0"
        return train(model, optim, batch)

    return World(step, left=lambda: os.environ["TORCHSPMD_TEST_SCALE"])


PACKAGE = types.ModuleType("an_installed_package")
PACKAGE.config = Config()
PACKAGE.__file__ = sysconfig.get_paths()["purelib"] + "/an_installed_package.py"


def set_config_of(package, value):
    package.config.scale = value


def raises_later():
    stop = pathlib.Path(tempfile.mkdtemp()) / "stop"

    def step(model, optim, batch):
        if stop.exists():
            raise RuntimeError("stopped")
        return train(model, optim, batch)

    def change(number):
        if number == 2:
            stop.touch()

    return World(step, change=change)


def deep_data():
    data = {"scale": 1.0}
    for _ in range(9):
        data = {"inner": data}
    return data


def innermost(data):
    while "inner" in data:
        data = data["inner"]
    return data


# ----------------------------------------------------------------------------
# Parameters, which are other tensors while a step is traced.


def by_parameter(scale_of, holds=lambda model: None, change=lambda model, number: None):
    """A step that scales each gradient by what it knows of the parameter itself."""

    def make():
        model = nn.Linear(4, 4)
        held = holds(model)

        def step(model, optim, batch):
            loss = model(batch).square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.mul_(scale_of(parameter, held))
            optim.step()
            optim.zero_grad()
            return loss.detach()

        def left():
            return [getattr(p, "scale", None) for p in model.parameters()]

        return World(
            step, change=lambda number: change(model, number), left=left, model=model
        )

    return make


def set_scale(model, number):
    model.weight.scale = halved(number)


def count_on(parameter, held):
    parameter.scale = getattr(parameter, "scale", 0.0) + 1.0
    return parameter.scale


class ScalesItself(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.scale


def attribute_of_a_parameter_in_a_forward():
    model = ScalesItself(4, 4)
    model.weight.scale = 0.5
    return World(train, model=model)


# ----------------------------------------------------------------------------
# Sizes, which are symbols while a step is traced.


def by_size(scale_of):
    def make():
        batches = [torch.ones(2, 4)]

        def step(model, optim, batch, other):
            return train(model, optim, other, scale_of(other.shape[0]))

        def change(number):
            batches[0] = torch.ones(2 + number // 2, 4)

        return World(step, batches, change)

    return make


def caught(error):
    def make():
        def step(model, optim, batch):
            loss = model(batch).square().mean()
            try:
                scale = float(loss)
            except error:
                scale = 2.0
            return train(model, optim, batch, scale)

        return World(step)

    return make


ROWS = {
    "self.w changed between calls": Row(method("reads", w=halved)),
    "self.w read by getattr": Row(method("reads_by_text", w=halved)),
    "self.w, the name computed": Row(method("reads_by_computed_text", w=halved)),
    "an object that can be called": Row(method("__call__", w=halved)),
    "a property of an object of self": Row(schedule_of_a_method),
    "a list in a dict of self": Row(deep_in_self),
    "self holds the model": Row(trainer_with_a_model),
    "a variable around the step": Row(closure),
    "an object whose __getattr__ raises KeyError": Row(settings_that_raise),
    "a global of a helper": Row(
        by_a_global(scaled_by(lambda batch: scaled_by_a_helper()))
    ),
    "a global of a forward": Row(by_a_global(train, lambda: ReadsGlobal(4, 4))),
    "a variable of a decorator": Row(decorated),
    "a global behind a cache": Row(cached),
    "an argument of functools.partial": Row(partial),
    "a variable of another file": Row(file_of_the_user),
    "an attribute of an argument": Row(attribute_of_an_argument),
    "a class attribute": Row(
        held_by(
            type("Own", (Trainer,), {}),
            lambda own: own.kind,
            lambda own, value: setattr(type(own), "kind", value),
        )
    ),
    "an attribute of the function": Row(attribute_of_the_function),
    "what a weak reference points to": Row(weak_reference),
    "a context variable": Row(
        held_by(
            lambda: contextvars.ContextVar("scale"),
            lambda scale: scale.get(),
            lambda scale, value: scale.set(value),
        )
    ),
    "a variable of a thread": Row(
        held_by(threading.local, lambda own: own.scale, set_scale_of)
    ),
    "a hook of all modules": Row(for_two_calls(hook_of_all_modules), programs=2),
    "a hook of all optimizers": Row(for_two_calls(hook_of_all_optimizers), programs=2),
    "what a forward hook reads": Row(read_by_a_hook(scales_output)),
    "what a hook keeps": Row(read_by_a_hook(scales_input)),
    "what a gradient hook reads": Row(read_by_a_hook(scales_gradient)),
    "what a hook of an optimizer reads": Row(hook_of_an_optimizer),
    "an attribute of an optimizer": Row(attribute_of_an_optimizer),
    "a dict in a parameter group": Row(
        held_by_a_group(
            lambda: {"scale": 1.0}, lambda own, value: own.update(scale=value)
        )
    ),
    "a dataclass in a parameter group": Row(held_by_a_group(Config, set_scale_of)),
    "a function in a parameter group": Row(
        held_by_a_group(function_with_settings, set_scale_of)
    ),
    "scheduler.get_last_lr()": Row(
        scheduler(lambda schedule: schedule.get_last_lr()[0])
    ),
    "scheduler.last_epoch": Row(
        scheduler(lambda schedule: 0.5 if schedule.last_epoch > 2 else 1.0), programs=5
    ),
    "a threading.Event": Row(
        held_by(threading.Event, lambda e: 0.5 if e.is_set() else 1.0, set_or_clear),
        programs=2,
    ),
    "a UserList": Row(
        held_by(lambda: collections.UserList([1.0]), lambda held: held[0], set_item(0))
    ),
    "a ChainMap": Row(
        held_by(lambda: collections.ChainMap({0: 1.0}), lambda m: m[0], set_item(0))
    ),
    "an array.array": Row(
        held_by(lambda: array.array("d", [1.0]), lambda a: a[0], set_item(0))
    ),
    "a list of 1,000 numbers": Row(
        held_by(lambda: [1.0] * 1000, lambda held: held[700], set_item(700))
    ),
    "a table of 1,000 numbers": Row(
        held_by(
            lambda: dict.fromkeys(range(1000), 1.0),
            lambda held: held[700],
            set_item(700),
        )
    ),
    "an array of 1,000 numbers": Row(
        held_by(lambda: np.ones(1000), lambda held: float(held[700]), set_item(700))
    ),
    "a bytearray": Row(
        held_by(
            lambda: bytearray(b"2"),
            float,
            lambda b, value: set_item(0)(b, ord("2") if value == 1.0 else ord("1")),
        ),
        programs=2,
    ),
    "a multiprocessing.Value": Row(
        held_by(lambda: multiprocessing.Value("d", 1.0), lambda v: v.value, set_value)
    ),
    "a number beside a long table": Row(beside_a_long_table),
    "a number beside a long list around the step": Row(beside_a_long_list),
    "a global of a helper under no_grad": Row(
        by_a_global(scaled_by(lambda batch: scale_without_gradients()))
    ),
    "a global of a context manager": Row(
        by_a_global(scaled_by(lambda batch: scale_in_a_context()))
    ),
    "a global of a function chosen by type": Row(by_a_global(scaled_by(scale_of))),
    "the environment": Row(environment),
    "the environment, which the step sets": Row(
        sets_environment, "os.environ.TORCHSPMD_TEST_SCALE: '1.0' -> '2.0'"
    ),
    "globals()['NAME']": Row(by_a_global(scaled_by(lambda batch: globals()["SCALE"]))),
    "an attribute of a metaclass": Row(
        held_by(
            lambda: OfAKind,
            lambda kind: kind.scale,
            lambda kind, value: setattr(Kinds, "scale", value),
        )
    ),
    "a module that the step imports": Row(imported_in_the_step),
    "hooks on saved tensors": Row(for_two_calls(halving_saved_tensors), programs=2),
    "a mode of torch functions": Row(
        for_two_calls(HalvesTanh, train_on_tanh), programs=2
    ),
    "a float argument": Row(float_argument, programs=1),
    "counters that the step does not read": Row(counted_beside, programs=1),
    "a counter in a buffer": Row(counted_in_a_buffer, programs=1),
    "a torch.Generator": Row(drawn_by_torch, programs=1)
    if torch.__version__ >= (2, 13)
    else Row(drawn_by_torch, "torch._C.Generator"),
    "what a module notes in its first call": Row(made_in_the_first_call, programs=1),
    "self.count += 1": Row(method("counts"), "self.count: 0 -> 1"),
    "self.log.append()": Row(method("appends"), "self.log: its items"),
    "self.rng drawn": Row(method("draws"), "the state of self.rng"),
    "nonlocal counter": Row(nonlocal_counter, "count around step: 0 -> 1"),
    "global counter": Row(global_counter, ".COUNT: 0 -> 1"),
    "global Counter": Row(global_container, ".COUNTS: its items"),
    "step.calls += 1": Row(counter_of_the_function, "step.calls: 0 -> 1"),
    "a context variable that the step sets": Row(
        variable_set_in_the_step, "count around step.get(): 0 -> 1"
    ),
    "random.random()": Row(
        random_of_a_library(random.random), "the state of Python's random"
    ),
    "numpy.random.rand()": Row(
        random_of_a_library(drawn_by_numpy), "the state of numpy.random"
    ),
    "numpy Generator": Row(
        random_argument(lambda: np.random.default_rng(0)), "the state of args[3]"
    ),
    "numpy RandomState": Row(
        random_argument(lambda: np.random.RandomState(0)), "the state of args[3]"
    ),
    "random.Random": Row(
        random_argument(lambda: random.Random(0)), "the state of args[3]"
    ),
    "numpy Generator of a module": Row(random_of_a_module, "the state of Noisy.rng"),
    "a hook that counts": Row(
        hook_that_counts,
        "calls around hook hook_that_counts.<locals>.<lambda> of Linear",
    ),
    "an iterator": Row(iterator_argument, "args[3]: an iterator"),
    "a generator around the step": Row(
        generator_around_the_step, "numbers around step: an iterator"
    ),
    "an object of a module": Row(of_a_module("object"), "Holds.config.other: 0 -> 1"),
    "an array of a module": Row(of_a_module("array"), "Holds.array: its items"),
    "a class of a module": Row(of_a_module("class"), "class Holds.count: 0 -> 1"),
    "another object in a module": Row(of_a_module("other"), "  * Holds.config\n"),
    "a GradScaler around the step": Row(scaler_of_a_trainer(True), programs=1),
    "a GradScaler that is off": Row(scaler_of_a_trainer(False), programs=1),
    "a list of thousands": Row(
        held_by(
            lambda: [1.0] * 5000,
            lambda held: sum(held) / 5000,
            lambda held, value: set_item(4007)(held, 5000 * value),
        ),
        STALE,
        shadow="since call 3",
    ),
    "a large array": Row(
        held_by(
            lambda: np.ones(50_000),
            lambda held: float(held.mean()),
            lambda held, value: set_item(7)(held, 50_000 * value),
        ),
        STALE,
        shadow="since call 3",
    ),
    "data deeper than six levels": Row(
        held_by(
            deep_data,
            lambda data: innermost(data)["scale"],
            lambda data, value: innermost(data).update(scale=value),
        ),
        STALE,
        shadow="since call 3",
    ),
    "a file": Row(
        held_by(
            lambda: pathlib.Path(tempfile.mkdtemp()) / "scale",
            lambda path: float(path.read_text()),
            lambda path, value: path.write_text(str(value)),
        ),
        STALE,
        shadow="since call 3",
    ),
    "an object of an installed package": Row(
        held_by(lambda: PACKAGE, lambda p: p.config.scale, set_config_of),
        STALE,
        shadow="since call 3",
    ),
    "isinstance(p, nn.Parameter)": Row(
        by_parameter(lambda p, held: 0.5 if isinstance(p, nn.Parameter) else 1.0),
        programs=1,
    ),
    "an attribute of a parameter": Row(
        by_parameter(lambda p, held: getattr(p, "scale", 1.0), change=set_scale)
    ),
    "an attribute of a parameter in a forward": Row(
        attribute_of_a_parameter_in_a_forward, programs=1
    ),
    "an attribute that the step sets on a parameter": Row(
        by_parameter(count_on), "Linear.weight.scale: new"
    ),
    "p is another parameter": Row(
        by_parameter(lambda p, held: 0.5 if p is held else 1.0, lambda m: m.weight),
        programs=1,
    ),
    "p in a set": Row(
        by_parameter(lambda p, held: 0.5 if p in held else 1.0, lambda m: {m.weight}),
        programs=1,
    ),
    "p as a key": Row(
        by_parameter(lambda p, held: held.get(p, 1.0), lambda m: {m.bias: 0.5}),
        programs=1,
    ),
    "a parameter in a list of tuples": Row(
        by_parameter(
            lambda p, held: min(scale if p is q else 1.0 for q, scale in held),
            lambda m: [(m.bias, 0.5)],
        ),
        programs=1,
    ),
    "id(p)": Row(
        by_parameter(
            lambda p, held: 0.5 if id(p) in held else 1.0, lambda m: {id(m.bias)}
        ),
        programs=1,
    ),
    "p in a frozenset": Row(
        by_parameter(
            lambda p, held: 0.5 if p in held else 1.0, lambda m: frozenset([m.bias])
        ),
        programs=1,
    ),
    "a size is an int": Row(
        by_size(lambda n: 0.5 if isinstance(n, int) else 1.0), programs=2
    ),
    "a size as text": Row(by_size(lambda n: float(f"{n}"))),
    "a size as a key": Row(by_size(lambda n: {2: 0.5, 3: 2.0, 4: 1.0}[n])),
    "a refusal that the step catches": Row(
        caught(Exception), "needs a tensor's value while it is captured"
    ),
}


def run(row, wrap):
    """Losses, weights and what is left, after a few steps."""
    torch.manual_seed(0)
    world = row.make()
    torch.manual_seed(0)
    model = world.model or nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    step = wrap(world.step)
    losses = []
    for number in range(CALLS):
        world.change(number)
        batch = torch.full((2, 4), 1.0 + number)
        losses.append(step(model, optim, batch, *world.extra).item())
    return [losses, model.weight.tolist(), world.left()], step


@pytest.mark.parametrize("name", ROWS)
def test_capture_alone(name):
    row = ROWS[name]
    if row.alone in (EQUAL, STALE):
        eager, _ = run(row, lambda step: step)
        compiled, step = run(row, compile(shadow=0))
        assert (compiled == eager) is (row.alone == EQUAL)
        assert len(step.programs) == (row.programs if row.alone == EQUAL else 1)
    else:
        with pytest.raises(CaptureError) as caught:
            run(row, compile(shadow=0))
        assert row.alone in str(caught.value)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].alone == EQUAL])
def test_shadow_steps_change_no_right_step(name):
    eager, _ = run(ROWS[name], lambda step: step)
    compiled, step = run(ROWS[name], compile(shadow=3))
    assert compiled == eager
    assert "also made eagerly" in step.explain()


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].alone == STALE])
def test_shadow_steps_find_a_stale_step(name):
    with pytest.raises(ShadowError) as caught:
        run(ROWS[name], compile(shadow=3))
    assert ROWS[name].shadow and ROWS[name].shadow in str(caught.value)


def test_shadow_steps_tell_of_a_step_that_would_raise_now():
    """Alone, the captured step goes on; eagerly it stops."""
    row = Row(raises_later)
    with pytest.raises(RuntimeError, match="stopped"):
        run(row, lambda step: step)
    run(row, compile(shadow=0))
    with pytest.raises(ShadowError, match="stopped"):
        run(row, compile(shadow=3))


@pytest.mark.parametrize(("shadow", "times"), ((0, 1), (3, 4)))
def test_what_is_written_happens_at_capture_and_in_shadow_steps(
    shadow, times, tmp_path, capsys, caplog
):
    path, logger = tmp_path / "log", logging.getLogger("of the user")

    def step(model, optim, batch):
        print("a line")
        logger.warning("a line")
        with path.open("a") as file:
            file.write("a line\n")
        return train(model, optim, batch)

    run(Row(lambda: World(step)), compile(shadow=shadow))
    assert capsys.readouterr().out.count("a line") == times
    assert caplog.text.count("a line") == times
    assert path.read_text().count("a line") == times


@pytest.mark.parametrize(
    ("name", "left"),
    (
        ("step.calls += 1", 0),
        ("a context variable that the step sets", 0),
        ("self.count += 1", (0, [])),
        ("self.log.append()", (0, [])),
        ("nonlocal counter", 0),
        ("global counter", 0),
        ("global Counter", {}),
        ("an object of a module", (Config(), [0.0, 0.0], 0)),
        ("an array of a module", (Config(), [0.0, 0.0], 0)),
        ("a class of a module", (Config(), [0.0, 0.0], 0)),
        ("another object in a module", (Config(), [0.0, 0.0], 0)),
        ("numpy Generator", np.random.default_rng(0).random()),
        ("random.Random", random.Random(0).random()),
        ("numpy RandomState", np.random.RandomState(0).random()),
    ),
)
@pytest.mark.parametrize("fails", (False, True))
def test_a_refused_step_changes_nothing(name, left, fails):
    world = ROWS[name].make()
    model = world.model or nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(*args):
        loss = world.step(*args)
        return loss.item() if fails else loss

    with pytest.raises(CaptureError):
        compile(step)(model, optim, torch.ones(2, 4), *world.extra)
    assert world.left() == left


def test_a_value_that_changes_in_each_call_is_named():
    trainer = Trainer()
    step = compile(trainer.reads)
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.warns(CaptureWarning) as told:
        for number in range(9):
            trainer.w = 1.0 + number
            step(model, optim, torch.ones(2, 4))
    text = str(told[0].message)
    assert "self.w: 8.0 -> 9.0" in text
    assert "torch.tensor(x), or a float argument" in text


LIBRARY = types.ModuleType("library")
LIBRARY.__file__ = f"{sysconfig.get_path('purelib')}/library.py"
vars(LIBRARY).update(nn=nn, torch=torch, __name__="library")
exec(  # as an installed package has it
    builtins.compile(
        "def inner(x):\n    return torch.sin(x)\n"
        "def scaled(x):\n    return inner(x) * 2\n"
        "class Layer(nn.Linear):\n"
        "    def forward(self, x):\n        return scaled(super().forward(x))\n",
        LIBRARY.__file__,
        "exec",
    ),
    vars(LIBRARY),
)


class Activations(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(LIBRARY.Layer(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x):
        from torch.nn.functional import softplus

        x = F.relu(self.layers(x)) + torch.nn.functional.silu(x) + torch.tanh(x)
        return x + softplus(x)


@pytest.mark.parametrize(
    ("owner", "name"),
    (
        *((F, name) for name in ("relu", "silu", "gelu", "linear", "softplus")),
        *((torch, "tanh"), (nn.Linear, "forward"), (nn.GELU, "forward")),
        *((LIBRARY, "scaled"), (LIBRARY, "inner"), (LIBRARY.Layer, "forward")),
    ),
)
def test_a_function_of_a_package_that_is_replaced(owner, name, monkeypatch):
    torch.manual_seed(0)
    own = getattr(owner, name)
    models = [Activations() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    steps = [compile(train, shadow=0), train]
    for number in range(8):
        batch = torch.randn(2, 4)
        if number in (3, 5):  # others that this test has replaced are not torch's
            monkeypatch.setattr(
                owner, name, lambda *a, n=number, **k: own(*a, **k) * 0.1 * n
            )
        elif number == 7:
            monkeypatch.undo()
        losses = [s(m, o, batch) for s, m, o in zip(steps, models, optims, strict=True)]
        assert torch.equal(*losses), number
    assert len(steps[0].programs) == 3


def test_what_is_not_looked_at_is_said():
    _, step = run(ROWS["a list of thousands"], compile(shadow=0))
    assert "held around step" in step.explain()
    assert "not guarded" in step.explain()


def test_a_step_that_reads_the_clock():
    start = time.monotonic()

    def step(model, optim, batch):
        return train(model, optim, batch, 2.0 if time.monotonic() > start else 1.0)

    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(CaptureWarning, match="the step reads the clock") as caught:
        compile(step)(model, optim, torch.ones(2, 4))
    (text,) = [str(each.message) for each in caught]
    assert "if time.monotonic() > start else 1.0" in text
    assert "Read the clock where the step is called, and pass what depends" in text


def test_anomaly_detection_that_comes_later():
    model = nn.Linear(4, 4)
    optim, step = torch.optim.SGD(model.parameters(), lr=0.1), compile(train)
    step(model, optim, torch.ones(2, 4))
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(CaptureError, match="anomaly detection reads every"):
            step(model, optim, torch.ones(2, 4))
