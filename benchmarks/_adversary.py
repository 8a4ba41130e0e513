"""Training steps drawn from a grammar, each run eagerly and compiled, and compared.

A ``Recipe`` is plain data: it can be drawn, shrunk, printed, sent to ranks and run again.
Whatever compiles must equal eager; whatever is refused must be refused by an ``SpmdError``.
"""

import ast
import contextlib
import copy
import dataclasses
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchspmd.errors import SpmdError
from torchspmd.step import compile as compile_step

WIDTH = 4
ROWS = 3  # of one rank
CALLS = 5


@dataclass(frozen=True)
class Recipe:
    """One training script: a model, an optimizer, a step and what happens between calls."""

    layers: tuple[str, ...] = ("linear",)
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()
    groups: int = 1
    schedule: str = ""  # the hyper-parameter that changes between calls
    step: str = "plain"  # how the work is divided into backward passes
    zero: str = "end"
    clip: str = ""
    argument: str = ""  # a further argument that changes between calls
    python: str = ""  # Python state that the step reads or writes
    hook: str = ""
    returns: str = "loss"
    between: str = ""
    batch: str = ""  # what is special about the batches
    second: str = ""  # a further model: an average, a teacher, an adversary
    mode: str = ""
    passes: bool = False
    overlap: bool = False
    is_mixed: bool = False  # fully_shard with bfloat16 for parameters
    backend: str = "graph"
    shadow: int = 0
    seed: int = 0

    def __str__(self) -> str:
        """What is other than by default, as ``parse`` reads it."""
        parts = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != each.default
        ]
        return f"Recipe({', '.join(parts)})"

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """A recipe from its text.

        Raises:
            ValueError: It is no recipe.
        """
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            msg = f"Recipe.parse: {text!r} is not like Recipe(layers=('tanh',), seed=1)"
            raise ValueError(msg)
        return cls(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


# ----------------------------------------------------------------------------
# Models.


class Counter(nn.Module):
    """A buffer that counts, and is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x + self.mean / self.count.clamp(min=1)


class Replaced(nn.Module):
    """A buffer that is replaced by another tensor in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 0.9 + 0.1
        return x * self.scale


class Residual(nn.Module):
    """A block around a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Checkpointed(Residual):
    """The same, recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(nn.Module):
    """A recurrent layer over single steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[:, None])[0][:, 0]


def rows_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of a table for values; of huge ones, which rounding moves, always the same."""
    return x.detach()[:, 0].nan_to_num().clamp(-2, 2).abs().mul(3).long() % count


class Lookup(nn.Module):
    """An embedding of rounded values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(rows_of(x, 7))


class Images(nn.Module):
    """A convolution and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.norm(self.conv(x[:, None]))).mean(1)


class SharedMemory(nn.Module):
    """Two buffers in one memory: one is written, the other is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.ones(2 * WIDTH))
        self.register_buffer("part", self.all[:WIDTH])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.all.mul_(0.9)
        return x * self.part


class Cached(nn.Module):
    """Keeps the tensor of its last call and reads it in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.last
        self.last = x.detach().mean(0)
        return y


class Skipped(nn.Module):
    """A layer that is left out by chance, drawn by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * (torch.rand(()) > 0.5)


class Attending(nn.Module):
    """Attention over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(1, (2, 2))
        return self.inner(pairs, pairs, pairs, need_weights=False)[0].flatten(1)


class Limited(nn.Module):
    """An embedding whose rows are shortened in place in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(rows_of(x, 5))


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "nobias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "groupnorm": lambda: nn.GroupNorm(1, WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "tanh": nn.Tanh,
    "relu": lambda: nn.ReLU(inplace=True),
    "prelu": nn.PReLU,
    "counter": Counter,
    "replaced": Replaced,
    "residual": Residual,
    "checkpointed": Checkpointed,
    "recurrent": Recurrent,
    "lookup": Lookup,
    "images": Images,
    "tied": None,
    "half tied": None,
    "shared memory": SharedMemory,
    "cached": Cached,
    "skipped": Skipped,
    "attending": Attending,
    "limited": Limited,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
    "instancenorm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
    ),
}


def build_model(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(recipe.seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    for name in recipe.layers:
        make = LAYERS[name]
        layer = nn.Linear(WIDTH, WIDTH) if make is None else make()
        if name == "tied":
            layer.weight = model[0].weight
        elif name == "half tied":
            layer.bias = model[0].bias
        model.append(layer)
    return model


OPTIMIZERS = {
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}),
    "Adam": ({}, {"amsgrad": True}, {"weight_decay": 0.1}),
    "AdamW": ({}, {"maximize": True}),
    "RMSprop": ({}, {"momentum": 0.5, "centered": True}),
    "Adagrad": ({}, {"lr_decay": 0.1}),
    "Rprop": ({},),
    "NAdam": ({},),
    "RAdam": ({},),
    "Adamax": ({},),
    "Adadelta": ({},),
    "ASGD": ({},),
}
FORMS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
CAN_FUSE = ("SGD", "Adam", "AdamW", "Adagrad")


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    options = dict(recipe.options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": parameters}]
    if recipe.groups == 2 and len(parameters) > 1:
        groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
    lr: Any = 0.05
    if recipe.schedule == "tensor lr":
        lr = torch.tensor(0.05)
    kind = getattr(torch.optim, recipe.optimizer)
    return kind(groups, lr=lr, **options)


def _switch(group: dict[str, Any], call: int) -> None:
    group["maximize"] = call % 2 == 0
    if group.get("momentum"):
        group["nesterov"] = call % 2 == 0


def _change_others(group: dict[str, Any], call: int) -> None:
    changed = {"alpha": 0.9, "rho": 0.8, "lambd": 1e-3}
    if not group.get("nesterov"):
        changed["dampening"] = 0.1
    for name in changed.keys() & group.keys():
        group[name] = changed[name] / (1 + call)


# Hyper-parameters: where a group has them, another value before each call.
SCHEDULES: dict[str, tuple[str, Callable[[dict[str, Any], int], Any]]] = {
    "lr": ("lr", lambda group, call: group.update(lr=0.05 / (1 + call))),
    "tensor lr": ("lr", lambda group, call: group["lr"].fill_(0.05 / (1 + call))),
    "weight_decay": (
        "weight_decay",
        lambda group, call: group.update(weight_decay=0.01 * (call // 2)),
    ),
    "momentum": (
        "momentum",
        lambda group, call: group.update(momentum=0.9 - 0.1 * call),
    ),
    "betas": (
        "betas",
        lambda group, call: group.update(betas=(0.9 - 0.1 * call, 0.99)),
    ),
    "eps": ("eps", lambda group, call: group.update(eps=10.0 ** -(8 - call))),
    "switches": ("maximize", _switch),
    "others": ("lr", _change_others),
}


def change_schedule(recipe: Recipe, optim: torch.optim.Optimizer, call: int) -> None:
    if recipe.schedule not in SCHEDULES:
        return
    name, change = SCHEDULES[recipe.schedule]
    for group in optim.param_groups:
        if name in group:
            change(group, call)


def build_scheduler(recipe: Recipe, optim: torch.optim.Optimizer) -> Any:
    """A scheduler of torch, which is called after each step."""
    schedulers = torch.optim.lr_scheduler
    match recipe.schedule:
        case "LambdaLR":
            return schedulers.LambdaLR(optim, lambda call: 1 / (1 + call))
        case "OneCycleLR":
            is_cycled = {"betas", "momentum"} & optim.param_groups[0].keys()
            return schedulers.OneCycleLR(
                optim, 0.1, total_steps=20, cycle_momentum=bool(is_cycled)
            )
        case "Sequential":
            return schedulers.SequentialLR(
                optim,
                [
                    schedulers.LinearLR(optim, 0.1, total_iters=2),
                    schedulers.CosineAnnealingLR(optim, 5),
                ],
                [2],
            )
    return None


# ----------------------------------------------------------------------------
# Steps.


@dataclass
class Config:
    scale: float = 1.0
    offset: int = 0

    @property
    def total(self) -> float:
        return self.scale + self.offset


@dataclass
class Sample:
    """An argument that holds tensors."""

    value: Any
    mask: Any = None
    weight: float = 1.0


GLOBALS = Config()


class StepError(Exception):
    """Raised by a step itself."""


@dataclass
class Output:
    loss: Any
    extra: Any = 1


def by_counting(trainer: "Trainer") -> Any:
    trainer.count += 1
    return trainer.count


def by_appending(trainer: "Trainer") -> Any:
    trainer.log.append(1)
    return len(trainer.log)


def by_swallowing(trainer: "Trainer") -> Any:
    try:
        trainer.count += 1
        return 1.0
    except Exception:
        return 2.0


# Numbers by which the loss is multiplied.
FACTORS = {
    "": lambda trainer: 1.0,
    "attribute": lambda trainer: trainer.scale,
    "table": lambda trainer: trainer.table["scales"][0],
    "config": lambda trainer: trainer.config.scale + trainer.config.offset,
    "counts": by_counting,
    "appends": by_appending,
    "draws": lambda trainer: trainer.rng.random(),
    "iterates": lambda trainer: next(trainer.numbers),
    "swallows": by_swallowing,
    "global": lambda trainer: GLOBALS.scale,
    "class": lambda trainer: type(trainer).kind,
    "closure": lambda trainer: trainer.read_closure(),
    "property": lambda trainer: trainer.config.total,
    "method": lambda trainer: trainer.table_of("scales")[1],
    "format": lambda trainer: float(f"{trainer.scale:.2f}"),
}


def closure_over(trainer: "Trainer") -> Any:
    """A function that reads a variable around it, and one that changes that variable."""
    value = 1.0

    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


@dataclass(frozen=True)
class Argument:
    """A further argument of a step: its value in each call, and how the loss uses it."""

    make: Callable[["Trainer", int], Any]
    use: Callable[[Any, Any], Any] = lambda loss, argument: loss * argument


def by_sample(loss: Any, sample: Sample) -> Any:
    value = sample.value * sample.weight
    if sample.mask is not None:
        value = value * sample.mask
    return loss * value.mean()


def by_writing(loss: Any, table: dict[str, Any]) -> Any:
    table["seen"].add_(1)
    table["total"] = table["seen"] * 2
    return loss * table["seen"].mean()


def by_view(loss: Any, views: Any) -> Any:
    views[0].mul_(0.5)
    return loss * views[1].mean()


def two_views(call: int) -> Any:
    memory = torch.full((4,), 1.0 + call)
    return memory[:3], memory[1:]


_KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64)

# Means of tensors, not sums: in the default mode each is a part of a larger one.
ARGUMENTS = {
    "": Argument(lambda trainer, call: None, lambda loss, argument: loss),
    "float": Argument(lambda trainer, call: 1.0 + 0.25 * call),
    "int": Argument(lambda trainer, call: 1 + call % 2),
    "tensor": Argument(lambda trainer, call: torch.tensor(1.0 + call)),
    "flag": Argument(
        lambda trainer, call: call % 2 == 0,
        lambda loss, argument: loss * 2 if argument else loss,
    ),
    "text": Argument(
        lambda trainer, call: ("plain", "square")[call % 2],
        lambda loss, argument: loss.square() if argument == "square" else loss,
    ),
    "list": Argument(
        lambda trainer, call: [1.0, 0.5 * call],
        lambda loss, argument: loss * sum(argument),
    ),
    "dict": Argument(
        lambda trainer, call: {
            "weight": 1.0 + call,
            "bias": torch.full((2,), call / 1),
        },
        lambda loss, argument: loss * argument["weight"] + argument["bias"].mean(),
    ),
    "config": Argument(
        lambda trainer, call: Config(1.0 + call, call // 2),
        lambda loss, argument: loss * argument.scale + argument.offset,
    ),
    "branch": Argument(
        lambda trainer, call: 1.0 + 0.3 * call,
        lambda loss, argument: loss * (2.0 if argument > 1.5 else 1.0),
    ),
    "generator": Argument(
        lambda trainer, call: trainer.generator,
        lambda loss, argument: loss + torch.rand((), generator=argument),
    ),
    "dtype": Argument(
        lambda trainer, call: torch.full((2,), 2 + call).to(_KINDS[call % 4]),
        lambda loss, argument: loss * argument.to(loss.dtype).mean(),
    ),
    "shape": Argument(
        lambda trainer, call: torch.full((1 + call, 2), 1.0 + call),
        lambda loss, argument: loss * argument.mean(),
    ),
    "number": Argument(
        lambda trainer, call: [torch.full((2,), 1.0 + call)] * (1 + call % 3),
        lambda loss, argument: loss * sum(each.mean() for each in argument),
    ),
    "optional": Argument(
        lambda trainer, call: (None, 2.0, torch.tensor(3.0))[call % 3],
        lambda loss, argument: loss if argument is None else loss * argument,
    ),
    "sample": Argument(
        lambda trainer, call: Sample(
            torch.full((2,), 1.0 + call),
            torch.tensor([True, False]) if call % 2 else None,
            1.0 + call / 4,
        ),
        by_sample,
    ),
    "written": Argument(lambda trainer, call: {"seen": trainer.seen}, by_writing),
    "views": Argument(lambda trainer, call: two_views(call), by_view),
    "raises": Argument(
        lambda trainer, call: -1 if call == 2 else 1, lambda loss, argument: loss
    ),
    "key": Argument(
        lambda trainer, call: {"abc"[call % 3]: 1.0 + call, "d": 2.0},
        lambda loss, argument: loss * sum(argument.values()),
    ),
}


class Trainer:
    """Holds all that a step may use beside its arguments."""

    kind = 1.0

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.scale, self.count, self.log = 1.0, 0, []
        self.table = {"scales": [1.0, 2.0]}
        self.config = Config()
        self.rng = random.Random(recipe.seed)
        self.factor = FACTORS[recipe.python]
        if recipe.python == "iterates":
            self.numbers = iter(range(1, 1000))
        self.seen = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(5)
        self.read_closure, self.write_closure = closure_over(self)

    def table_of(self, name: str) -> list[float]:
        return self.table[name]

    def loss(self, model: nn.Module, batch: torch.Tensor, argument: Any) -> Any:
        loss = model(batch).square().mean()
        return ARGUMENTS[self.recipe.argument].use(loss, argument) * self.factor(self)

    def step(  # noqa: PLR0913 - what training scripts pass
        self,
        model: Any,
        optim: Any,
        batch: Any,
        argument: Any,
        scaler: Any = None,
        second: Any = None,
        second_optim: Any = None,
        *,
        is_update: bool = True,
    ) -> Any:
        recipe = self.recipe
        if recipe.argument == "raises" and argument < 0:
            raise StepError
        if recipe.zero == "start" and recipe.step != "accumulate":
            optim.zero_grad()
        if recipe.batch == "in place":
            batch.mul_(0.5)
        loss = self.backward(model, batch, argument, scaler, second)
        if is_update:
            self.update(model, optim, scaler)
            self.train_second(model, batch, second, second_optim)
        return self.returned(model, loss.detach())

    def backward(
        self, model: Any, batch: Any, argument: Any, scaler: Any, second: Any
    ) -> Any:
        wanted = [p for p in model.parameters() if p.requires_grad]
        match self.recipe.step:
            case "micro":
                total: Any = 0.0
                for part in (batch[::2], batch[1::2]):
                    loss = self.loss(model, part, argument)
                    (loss / 2).backward()
                    total = total + loss.detach()
                return total
            case "grad":
                loss = self.loss(model, batch, argument)
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
                for parameter, gradient in zip(wanted, found, strict=True):
                    parameter.grad = gradient
                return loss
            case "penalty":
                loss = self.loss(model, batch, argument)
                found = torch.autograd.grad(
                    loss, wanted, create_graph=True, allow_unused=True
                )
                loss = loss + sum(g.square().sum() for g in found if g is not None)
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    loss = self.loss(model, batch, argument)
            case _:
                loss = self.loss(model, batch, argument)
                if self.recipe.second == "teacher":
                    with torch.no_grad():
                        aim = second(batch)
                    loss = loss + (model(batch) - aim).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    def update(self, model: Any, optim: Any, scaler: Any) -> None:
        match self.recipe.clip:
            case "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            case "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
        if scaler is None:
            optim.step()
        else:
            scaler.step(optim)
            scaler.update()
        if self.recipe.zero == "end":
            optim.zero_grad()
        elif self.recipe.zero == "zeros":
            optim.zero_grad(set_to_none=False)

    def train_second(self, model: Any, batch: Any, second: Any, optim: Any) -> None:
        if self.recipe.second == "average":
            with torch.no_grad():
                pairs = zip(second.parameters(), model.parameters(), strict=True)
                for old, new in pairs:
                    old.lerp_(new, 0.1)
        elif self.recipe.second == "adversary":
            with torch.no_grad():
                made = model(batch)
            (second(batch).mean() - second(made).mean()).backward()
            optim.step()
            optim.zero_grad()

    def returned(self, model: Any, loss: Any) -> Any:
        match self.recipe.returns:
            case "nothing":
                return None
            case "dict":
                return {"loss": loss, "name": "train", "scale": self.recipe.seed}
            case "dataclass":
                return Output(loss, 2)
            case "parameter":
                return loss, model[0].weight.detach().clone()
            case "view":
                return loss, model[0].weight.detach()[0]
            case "number":
                return loss, 3.5, [loss + 1]
        return loss

    def change(self, call: int) -> None:
        """What happens to Python state before a call."""
        self.scale = 1.0 + call // 2
        self.table["scales"][0] = 1.0 + call // 3
        self.config.offset = call // 2
        GLOBALS.scale = 1.0 + call // 2
        type(self).kind = 1.0 + call // 3
        self.write_closure(1.0 + call // 2)


def install_hook(recipe: Recipe, model: Any, optim: Any) -> None:
    match recipe.hook:
        case "forward":
            model[0].register_forward_hook(lambda module, args, out: out * 0.5)
        case "pre":
            model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        case "gradient":
            model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        case "accumulated":

            def halve(parameter: torch.Tensor) -> None:
                parameter.grad.mul_(0.5)

            model[0].weight.register_post_accumulate_grad_hook(halve)
        case "counting":
            calls: list[int] = []
            model[0].register_forward_hook(lambda *_: calls.append(1))


@dataclass(frozen=True)
class Loop:
    """What a training loop holds between two calls, and what it has seen."""

    recipe: Recipe
    model: Any
    optim: Any
    seen: list[Any]
    call: int


def save(loop: Loop) -> None:
    loop.seen.append([whole(each).clone() for each in loop.model.state_dict().values()])
    loop.seen.append([whole(each) for each in _states(loop.optim.state_dict())])


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    if loop.recipe.mode != "fully_shard":
        with torch.no_grad():
            loop.seen.append([loop.model(torch.ones(2, WIDTH))])
    loop.model.train()


def load(loop: Loop) -> None:
    saved = copy.deepcopy((loop.model.state_dict(), loop.optim.state_dict()))
    loop.model.load_state_dict(saved[0])
    loop.optim.load_state_dict(saved[1])


def load_pickled(loop: Loop) -> None:
    saved = pickle.loads(pickle.dumps(loop.model.state_dict()))
    loop.seen.append([whole(each).detach().clone() for each in saved.values()])


def write(loop: Loop) -> None:
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.9)


def replace_data(loop: Loop) -> None:
    if loop.recipe.mode == "fully_shard":
        return  # torch ignores it for a DTensor
    for parameter in loop.model.parameters():
        parameter.data = parameter.data * 0.9


def copy_model(loop: Loop) -> None:
    other = copy.deepcopy(loop.model)
    loop.seen.append([whole(p).detach().clone() for p in other.parameters()])


def add_group(loop: Loop) -> None:
    bias = nn.Parameter(torch.ones(WIDTH))
    if _average in (loop.model[0].weight._backward_hooks or {}).values():
        bias.register_hook(_average)  # the eager loop of several ranks
    loop.model[0].bias = bias
    loop.optim.add_param_group({"params": [bias], "lr": 0.01})


def halve_states(loop: Loop) -> None:
    for values in loop.optim.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)


def halve_gradients(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def train_eagerly(loop: Loop) -> None:
    if loop.recipe.mode in ("", "default"):
        loop.model(torch.ones(4, WIDTH)).square().mean().backward()
        loop.optim.step()
        loop.optim.zero_grad()


def reset_statistics(loop: Loop) -> None:
    for module in loop.model.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()


def replace_buffers(loop: Loop) -> None:
    for module in loop.model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer * 0.5)


# After which calls, and what a training loop does then.
BETWEEN: dict[str, tuple[tuple[int, ...], Callable[[Loop], Any]]] = {
    "": ((), save),
    "state_dict": ((1, 3), save),
    "evaluate": ((2,), evaluate),
    "load": ((2,), load),
    "pickle": ((2,), load_pickled),
    "write": ((2,), write),
    "data": ((2,), replace_data),
    "deepcopy": ((2,), copy_model),
    "clear": ((0, 1, 2, 3), lambda loop: loop.optim.zero_grad()),
    "freeze": ((2,), lambda loop: loop.model[0].requires_grad_(False)),
    "toggle": (
        (0, 1, 2, 3),
        lambda loop: loop.model[0].requires_grad_(loop.call % 2 == 1),
    ),
    "add group": ((2,), add_group),
    "switch": ((0, 1, 2, 3), lambda loop: loop.model.train(loop.call % 2 == 1)),
    "inference": ((1, 3), lambda loop: loop.model[loop.call % len(loop.model)].eval()),
    "forget": ((2,), lambda loop: loop.optim.state.clear()),
    "rescale": ((2,), halve_states),
    "gradients": ((0, 1, 2, 3), halve_gradients),
    "train eagerly": ((2,), train_eagerly),
    "statistics": ((2,), reset_statistics),
    "buffers": ((2,), replace_buffers),
    "wrong call": ((), save),  # made by the loop
}


def _states(saved: Any) -> list[Any]:
    return [
        value.clone() if isinstance(value, torch.Tensor) else value
        for entries in saved["state"].values()
        for value in entries.values()
    ]


# ----------------------------------------------------------------------------
# One run, eager or compiled.


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def options_of(recipe: Recipe) -> dict[str, Any]:
    options: dict[str, Any] = {"backend": recipe.backend, "shadow": recipe.shadow}
    if recipe.mode not in ("", "default"):
        options["parallel"] = recipe.mode
        options["passes"] = recipe.passes
        if recipe.passes:
            options["overlap"] = recipe.overlap
        if recipe.is_mixed:
            options["mp_policy"] = POLICY
    return options


def whole(value: Any) -> Any:
    """A tensor with the rows of all ranks.

    Not by ``full_tensor()``: gathers of that kind can corrupt the heap on gloo.
    """
    if not hasattr(value, "to_local"):
        return value
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value.to_local().detach())
    return torch.cat(parts) if value.placements[0].is_shard() else parts[0]


def run(recipe: Recipe, *, compiled: bool, perturbed: int = 0) -> list[Any]:
    """All that a training loop sees: one list of values, in order.

    Args:
        recipe: The training script.
        compiled: Whether its step is compiled.
        perturbed: Which perturbation of the start; 0 for none.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = build_model(recipe)
    perturb(model, perturbed)
    if recipe.is_mixed and not compiled:
        fully_shard(model, mp_policy=POLICY)
    optim = build_optimizer(recipe, model)
    install_hook(recipe, model, optim)
    trainer = Trainer(recipe)
    scheduler = build_scheduler(recipe, optim)
    more = further_arguments(recipe, model)
    step: Any = trainer.step
    seen: list[Any] = []
    with contextlib.ExitStack() as stack:
        if compiled:
            step = stack.enter_context(compile_step(**options_of(recipe))(step))
        elif (
            size > 1
            and recipe.mode in ("replicate", "fully_shard")
            and not recipe.is_mixed
        ):
            average_gradients(model)
            if recipe.second == "adversary":
                average_gradients(more["second"])
        for call in range(CALLS):
            batch = draw_batch(recipe, call, compiled=compiled)
            trainer.change(call)
            change_schedule(recipe, optim, call)
            argument = ARGUMENTS[recipe.argument].make(trainer, call)
            if recipe.step == "accumulate":
                more["is_update"] = call % 2 == 0
            torch.manual_seed(7 + call)
            if recipe.between == "wrong call" and call == 2:
                with contextlib.suppress(Exception):
                    step(model, optim, torch.ones(3, WIDTH + 1), argument)
                torch.manual_seed(7 + call)
                optim.zero_grad()
            try:
                result = step(model, optim, batch, argument, **more)
            except StepError:
                result = "raised"
            seen += [copy.deepcopy(_plain(result)), _tensors(argument)]
            if recipe.batch in ("gradient", "in place") and recipe.mode != "default":
                seen += [copy.deepcopy(batch.detach()), copy.deepcopy(batch.grad)]
            if scheduler is not None:
                scheduler.step()
            calls, act = BETWEEN[recipe.between]
            if call in calls:
                act(Loop(recipe, model, optim, seen, call))
    return [*seen, *what_is_left(model, optim, trainer, more)]


def what_is_left(
    model: nn.Module, optim: Any, trainer: Trainer, more: dict[str, Any]
) -> list[Any]:
    """Every state after the last call."""
    left = [whole(value).detach().clone() for value in model.state_dict().values()]
    left += [whole(value) for value in _states(optim.state_dict())]
    left += [None if p.grad is None else whole(p.grad) for p in model.parameters()]
    if "second" in more:
        second = more["second"].state_dict()
        left += [whole(value).detach().clone() for value in second.values()]
    if "scaler" in more:
        left.append(more["scaler"].get_scale())
    left += [trainer.count, len(trainer.log), trainer.generator.get_state()]
    return [*left, trainer.rng.random(), torch.rand(2)]


def further_arguments(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if recipe.step == "scaler":
        more["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    if recipe.second:
        more["second"] = copy.deepcopy(model)
    if recipe.second == "adversary":
        more["second_optim"] = torch.optim.SGD(more["second"].parameters(), lr=0.01)
    return more


def draw_batch(recipe: Recipe, call: int, *, compiled: bool) -> torch.Tensor:
    """This rank's rows; eagerly in the default mode those of all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(100 * recipe.seed + call)
    rows = ROWS + call % 3 if recipe.batch == "lengths" else ROWS
    batch = torch.randn(rows * size, WIDTH)
    if compiled or recipe.mode != "default":
        batch = batch[rows * rank : rows * (rank + 1)].clone()
    if recipe.batch == "gradient":
        batch.requires_grad_()
    elif recipe.batch == "strided":
        batch = batch.t().contiguous().t()
    return batch


def average_gradients(model: nn.Module) -> None:
    """What data parallel does, before the hooks of the user."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks = parameter._backward_hooks
            parameter._backward_hooks = None
            parameter.register_hook(_average)
            for hook in (hooks or {}).values():
                parameter.register_hook(hook)


def _plain(result: Any) -> Any:
    return dataclasses.astuple(result) if isinstance(result, Output) else result


def _tensors(argument: Any) -> list[torch.Tensor]:
    """What a step may have written into its argument."""
    if isinstance(argument, dict):
        argument = list(argument.values())
    if not isinstance(argument, (list, tuple)):
        return []
    return [each.clone() for each in argument if isinstance(each, torch.Tensor)]


def _average(gradient: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():  # one to differentiate again is each rank's own
        return gradient
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# ----------------------------------------------------------------------------
# Comparison.


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for item in value.values() for part in flat(item)]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in flat(item)]
    return [value]


@dataclass(frozen=True)
class Difference:
    """A value that is other than eagerly.

    Attributes:
        place: Its place among all values; -1 where they are not even as many.
        text: What differs.
        apart: By how much it differs; infinite for what is no rounding in any case.
    """

    place: int
    text: str
    apart: float = math.inf


def differences(eager: Any, compiled: Any, tolerance: float) -> list[Difference]:
    """The values that differ."""
    one, other = flat(eager), flat(compiled)
    if len(one) != len(other):
        return [Difference(-1, f"{len(one)} values eagerly, {len(other)} compiled")]
    found: list[Difference] = []
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        name = f"value {place} of {len(one)}"
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                text = f"{name}: {a.dtype}{[*a.shape]}, {b.dtype}{[*b.shape]}"
                found.append(Difference(place, text))
                continue
            apart, size = apart_by(a, b), size_of(a)
            if not apart <= tolerance * (size + 0.01):  # a gradient may be rounding
                text = f"{name}: differs by {apart:.3g} of {size:.3g}"
                found.append(Difference(place, text, apart))
        elif type(a) is not type(b) or (a != b and a == a):  # noqa: PLR0124
            if not (isinstance(a, float) and abs(a - b) <= tolerance * abs(a)):
                text = f"{name}: {a!r:.20} ({type(a).__name__}) and {b!r:.20}"
                found.append(Difference(place, text))
    return found


def apart_by(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of an element; infinite where one alone is finite."""
    if not a.isfinite().equal(b.isfinite()):
        return math.inf
    apart = (a.double() - b.double()).abs()[a.isfinite()]
    return float(apart.max()) if apart.numel() else 0.0


def size_of(value: torch.Tensor) -> float:
    finite = value.double().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) if value.numel() else 0.0


# A step may amplify rounding: a norm over two values that are nearly alike, the sign of a
# gradient that is rounding alone. What a start that is other in its last bits does eagerly
# is not a fault; how much counts beside it.
PERTURBED_RUNS = 6
MORE_THAN_PERTURBED = 10.0


def rounding_of(recipe: Recipe, eager: list[Any]) -> list[float]:
    """By how much each value differs eagerly, where the start differs in its last bits."""
    one = flat(eager)
    found = [0.0] * len(one)
    for number in range(1, 1 + PERTURBED_RUNS):
        other = flat(run(recipe, compiled=False, perturbed=number))
        for place, (a, b) in enumerate(zip(one, other, strict=False)):
            if isinstance(a, torch.Tensor) and a.shape == b.shape:
                found[place] = max(found[place], apart_by(a, b))
    return found


def perturb(model: nn.Module, number: int) -> None:
    """Change parameters by about one unit in the last place; not at all for number 0."""
    if not number:
        return
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + noise * torch.finfo(parameter.dtype).eps)


EQUAL, REFUSED, SKIPPED = "equal", "refused", "eager fails"


def judge(recipe: Recipe) -> tuple[str, str]:
    """What becomes of a recipe: equal, refused, or a fault with its text."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    exact = is_exact(recipe.mode, recipe.backend, size)
    tolerance = 2e-6 if exact else 3e-5  # and more where rounding is amplified
    if recipe.step == "autocast":
        # Inductor rounds less often to bfloat16, and shards are cast at each of their uses:
        # a weight that is used twice has its gradients added in float32.
        tolerance = 8e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome, text, eager, compiled = run_both(recipe)
        found = differences(eager, compiled, 3e-2 if recipe.is_mixed else tolerance)
        if not exact and any_rank(bool(found)):
            rounding = rounding_of(recipe, eager)
            found = [
                each
                for each in found
                if each.place < 0
                or each.apart > MORE_THAN_PERTURBED * rounding[each.place]
            ]
    return ("fault: differs", found[0].text) if found else (outcome, text)


def is_exact(mode: str, backend: str, ranks: int) -> bool:
    """Whether the compiled step does eager's own operations in their order."""
    return backend == "graph" and mode != "default" and ranks == 1


def run_both(recipe: Recipe) -> tuple[str, str, list[Any], list[Any]]:
    """The outcome and its text; where both ran, also the values of both."""
    try:
        eager = run(recipe, compiled=False)
    except Exception as error:
        return SKIPPED, f"{type(error).__name__}: {error}", [], []
    try:
        return EQUAL, "", eager, run(recipe, compiled=True)
    except SpmdError as error:
        return *refusal(recipe, error), [], []
    except Exception as error:
        return f"fault: {type(error).__name__}", str(error), [], []


def refusal(recipe: Recipe, error: SpmdError) -> tuple[str, str]:
    """Whether an error of ours is a refusal or a fault, and its text."""
    kind, text = type(error).__name__, str(error)
    if "an effect that happens only at capture" in text:
        return REFUSED, f"{kind}: an effect that happens only at capture"
    if "limited" in recipe.layers and "replicated parameter" in text:
        # Its forward writes to the parameters of each rank by that rank's rows.
        return REFUSED, f"{kind}: replicas that a forward makes unlike"
    if kind in ("ShadowError", "LegalityError", "VerificationError"):
        return f"fault: {kind}", text
    lines = text.strip().splitlines()
    why = next((line.strip() for line in lines[1:] if line.strip()), "")
    return REFUSED, f"{kind}: {lines[0][:70]} {why}"


def any_rank(flag: bool) -> bool:
    """Whether any rank says so: what follows is done by all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    told = torch.tensor(int(flag))
    dist.all_reduce(told)
    return bool(told)


@contextlib.contextmanager
def group_of_one() -> Any:
    """A process group of this process alone, for the modes that need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------
# What is drawn.


MIXED_LAYERS = ("linear", "nobias", "layernorm", "tanh", "residual", "tied", "prelu")
STEPS = ("plain", "plain", "plain", "micro", "scaler", "grad", "accumulate", "penalty")
STEPS += ("autocast",)  # not in the default mode, where sums of bfloat16 differ


@st.composite
def recipes(
    draw: Any, *, modes: tuple[str, ...], backends: tuple[str, ...], ranks: int = 1
) -> Recipe:
    mode = draw(st.sampled_from(modes))
    backend = draw(st.sampled_from(backends))
    names = sorted(OPTIMIZERS)
    if not is_exact(mode, backend, ranks):
        # Others turn gradients that are rounding alone (a bias before a norm) into steps,
        # beside which little can be seen.
        names += ["SGD"] * len(names)
    name = draw(st.sampled_from(names))
    options = dict(draw(st.sampled_from(OPTIMIZERS[name])))
    form = draw(st.sampled_from(FORMS if name in CAN_FUSE else FORMS[:3]))
    if backend == "inductor" and name != "SGD" and name in CAN_FUSE:
        form = {"fused": True}  # others read their counters, and are refused
    options |= form
    schedules = ["", "lr", "lr", "weight_decay", "momentum", "betas", "eps"]
    schedules += ["switches", "others", "LambdaLR", "OneCycleLR", "Sequential"]
    if name in ("SGD", "Adam", "AdamW") and form.get("foreach") is False:
        schedules.append("tensor lr")

    def rarely(*values: str) -> Any:
        return st.one_of(st.just(""), st.sampled_from(("", *values)))

    layers = sorted(LAYERS)
    if backend == "inductor":
        layers.remove(
            "skipped"
        )  # torch.rand gives other numbers there, as is documented
    recipe = Recipe(
        layers=tuple(draw(st.lists(st.sampled_from(layers), max_size=4))),
        optimizer=name,
        options=tuple(sorted(options.items())),
        groups=draw(st.integers(1, 2)),
        schedule=draw(st.sampled_from(schedules)),
        step=draw(st.sampled_from(STEPS if mode != "default" else STEPS[:-1])),
        zero=draw(st.sampled_from(("end", "end", "start", "zeros", "never"))),
        clip=draw(rarely("norm", "value")),
        argument=draw(rarely(*ARGUMENTS)),
        python=draw(rarely(*FACTORS)),
        hook=draw(rarely("forward", "pre", "gradient", "accumulated")),
        returns=draw(
            st.sampled_from(
                ("loss", "nothing", "dict", "dataclass", "parameter", "view", "number")
            )
        ),
        between=draw(rarely(*BETWEEN)),
        batch=draw(rarely("lengths", "in place", "gradient", "strided")),
        second=draw(rarely("average", "teacher", "adversary")),
        mode=mode,
        passes=mode in ("replicate", "fully_shard") and draw(st.booleans()),
        overlap=mode in ("replicate", "fully_shard") and draw(st.booleans()),
        backend=backend,
        shadow=draw(st.sampled_from((0, 2))),
        seed=draw(st.integers(0, 9)),
    )
    if mode != "fully_shard" or not draw(st.booleans()):
        return recipe
    # Eagerly this is FSDP2 itself: what both of them have, and no other model beside it.
    plain = [name for name in recipe.layers if name in MIXED_LAYERS]
    return dataclasses.replace(
        recipe,
        layers=tuple(plain),
        optimizer="SGD",
        options=(("momentum", 0.9),),
        schedule="lr",
        step="plain",
        hook="",
        between="",
        second="",
        batch="",
        returns="loss",
        is_mixed=True,
    )
