"""Training steps drawn from a grammar, each run eagerly and compiled, and compared.

A ``Recipe`` is plain data: it can be drawn, shrunk, printed, sent to ranks and run again.
Whatever compiles must equal eager; whatever is refused must be refused by an ``SpmdError``.
"""

import contextlib
import copy
import dataclasses
import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

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
    mode: str = ""
    passes: bool = False
    overlap: bool = False
    backend: str = "graph"
    shadow: int = 0
    seed: int = 0


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


class Lookup(nn.Module):
    """An embedding of rounded values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(x.detach()[:, 0].abs().mul(3).long() % 7)


class Images(nn.Module):
    """A convolution and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.norm(self.conv(x[:, None]))).mean(1)


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
}


def build_model(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(recipe.seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    for name in recipe.layers:
        make = LAYERS[name]
        layer = nn.Linear(WIDTH, WIDTH) if make is None else make()
        if make is None:
            layer.weight = model[0].weight
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


def change_schedule(recipe: Recipe, optim: torch.optim.Optimizer, call: int) -> None:
    for group in optim.param_groups:
        match recipe.schedule:
            case "lr":
                group["lr"] = 0.05 / (1 + call)
            case "tensor lr":
                group["lr"].fill_(0.05 / (1 + call))
            case "weight_decay":
                group["weight_decay"] = 0.01 * (call // 2)
            case "momentum" if "momentum" in group:
                group["momentum"] = 0.9 - 0.1 * call
            case "betas" if "betas" in group:
                group["betas"] = (0.9 - 0.1 * call, 0.99)
            case "eps" if "eps" in group:
                group["eps"] = 10.0 ** -(8 - call)


# ----------------------------------------------------------------------------
# Steps.


@dataclass
class Config:
    scale: float = 1.0
    offset: int = 0


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
}


class Trainer:
    """Holds all that a step may use beside its arguments."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.scale, self.count, self.log = 1.0, 0, []
        self.table = {"scales": [1.0, 2.0]}
        self.config = Config()
        self.rng = random.Random(recipe.seed)
        self.factor = FACTORS[recipe.python]
        if recipe.python == "iterates":
            self.numbers = iter(range(1, 1000))
        self.generator = torch.Generator().manual_seed(5)

    def weigh(self, loss: Any, argument: Any) -> Any:
        match self.recipe.argument:
            case "float" | "int" | "tensor":
                return loss * argument
            case "flag":
                return loss * 2 if argument else loss
            case "text":
                return loss.square() if argument == "square" else loss
            case "list":
                return loss * sum(argument)
            case "dict":
                return loss * argument["weight"] + argument["bias"].sum()
            case "config":
                return loss * argument.scale + argument.offset
            case "branch":
                return loss * (2.0 if argument > 1.5 else 1.0)
            case "generator":
                return loss + torch.rand((), generator=argument)
        return loss

    def loss(self, model: nn.Module, batch: torch.Tensor, argument: Any) -> Any:
        loss = model(batch).square().mean()
        return self.weigh(loss, argument) * self.factor(self)

    def step(
        self, model: Any, optim: Any, batch: Any, argument: Any, scaler: Any = None
    ) -> Any:
        recipe = self.recipe
        if recipe.zero == "start":
            optim.zero_grad()
        if recipe.step == "micro":
            total = 0.0
            for part in (batch[::2], batch[1::2]):
                loss = self.loss(model, part, argument)
                (loss / 2).backward()
                total = total + loss.detach()
            loss = total
        elif recipe.step == "scaler":
            loss = self.loss(model, batch, argument)
            scaler.scale(loss).backward()
        elif recipe.step == "grad":
            loss = self.loss(model, batch, argument)
            wanted = [p for p in model.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            for parameter, gradient in zip(wanted, found, strict=True):
                parameter.grad = gradient
        else:
            loss = self.loss(model, batch, argument)
            loss.backward()
        match recipe.clip:
            case "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            case "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
        if recipe.step == "scaler":
            scaler.step(optim)
            scaler.update()
        else:
            optim.step()
        if recipe.zero == "end":
            optim.zero_grad()
        elif recipe.zero == "zeros":
            optim.zero_grad(set_to_none=False)
        return self.returned(model, loss.detach())

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

    def argument(self, call: int) -> Any:
        match self.recipe.argument:
            case "float":
                return 1.0 + 0.25 * call
            case "int":
                return 1 + call % 2
            case "tensor":
                return torch.tensor(1.0 + call)
            case "flag":
                return call % 2 == 0
            case "text":
                return ("plain", "square")[call % 2]
            case "list":
                return [1.0, 0.5 * call]
            case "dict":
                return {"weight": 1.0 + call, "bias": torch.full((2,), float(call))}
            case "config":
                return Config(1.0 + call, call // 2)
            case "branch":
                return 1.0 + 0.3 * call
            case "generator":
                return self.generator
        return None


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


def act_between(
    recipe: Recipe, model: Any, optim: Any, call: int, seen: list[Any]
) -> None:
    """What a training loop does between two calls."""
    match recipe.between:
        case "state_dict" if call % 2:
            seen.append([whole(each).clone() for each in model.state_dict().values()])
            seen.append([whole(each) for each in _states(optim.state_dict())])
        case "evaluate" if call == 2:
            model.eval()
            if recipe.mode != "fully_shard":
                with torch.no_grad():
                    seen.append([model(torch.ones(2, WIDTH))])
            model.train()
        case "load" if call == 2:
            saved = copy.deepcopy((model.state_dict(), optim.state_dict()))
            model.load_state_dict(saved[0])
            optim.load_state_dict(saved[1])
        case "write" if call == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        case "clear":
            optim.zero_grad()
        case "freeze" if call == 2:
            model[0].requires_grad_(False)
        case "wrong call" if call == 1:
            pass  # made by the loop


def _states(saved: Any) -> list[Any]:
    return [
        value.clone() if isinstance(value, torch.Tensor) else value
        for entries in saved["state"].values()
        for value in entries.values()
    ]


# ----------------------------------------------------------------------------
# One run, eager or compiled.


def options_of(recipe: Recipe) -> dict[str, Any]:
    options: dict[str, Any] = {"backend": recipe.backend, "shadow": recipe.shadow}
    if recipe.mode not in ("", "default"):
        options["parallel"] = recipe.mode
        options["passes"] = recipe.passes
        if recipe.passes and recipe.mode == "replicate":
            options["overlap"] = recipe.overlap
    return options


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def run(recipe: Recipe, *, compiled: bool) -> list[Any]:
    """All that a training loop sees: one list of values, in order."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = build_model(recipe)
    optim = build_optimizer(recipe, model)
    install_hook(recipe, model, optim)
    trainer = Trainer(recipe)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    step: Any = trainer.step
    seen: list[Any] = []
    with contextlib.ExitStack() as stack:
        if compiled:
            step = stack.enter_context(compile_step(**options_of(recipe))(step))
        elif size > 1 and recipe.mode in ("replicate", "fully_shard"):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hooks = parameter._backward_hooks
                    parameter._backward_hooks = None
                    parameter.register_hook(_average)
                    for hook in (hooks or {}).values():
                        parameter.register_hook(hook)
        for call in range(CALLS):
            torch.manual_seed(100 * recipe.seed + call)
            batch = torch.randn(ROWS * size, WIDTH)
            is_global = not compiled and recipe.mode == "default"
            if not is_global:
                batch = batch[ROWS * rank : ROWS * (rank + 1)].clone()
            trainer.change(call)
            change_schedule(recipe, optim, call)
            torch.manual_seed(7 + call)
            if recipe.between == "wrong call" and call == 2:
                with contextlib.suppress(Exception):
                    step(model, optim, torch.ones(3, WIDTH + 1), trainer.argument(call))
                torch.manual_seed(7 + call)
                optim.zero_grad()
            more = (scaler,) if recipe.step == "scaler" else ()
            result = step(model, optim, batch, trainer.argument(call), *more)
            seen.append(copy.deepcopy(_plain(result)))
            act_between(recipe, model, optim, call, seen)
    seen += [whole(value).detach().clone() for value in model.state_dict().values()]
    seen += [whole(value) for value in _states(optim.state_dict())]
    seen += [None if p.grad is None else whole(p.grad) for p in model.parameters()]
    seen += [
        scaler.get_scale(),
        trainer.count,
        len(trainer.log),
        trainer.generator.get_state(),
    ]
    seen += [trainer.rng.random(), torch.rand(2)]
    return seen


def _plain(result: Any) -> Any:
    return dataclasses.astuple(result) if isinstance(result, Output) else result


def _average(gradient: torch.Tensor) -> torch.Tensor:
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


def difference(eager: Any, compiled: Any, tolerance: float) -> str:
    """The first value that differs, as text; empty where all are equal."""
    one, other = flat(eager), flat(compiled)
    if len(one) != len(other):
        return f"{len(one)} values eagerly, {len(other)} compiled"
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"value {place}: {a.dtype}{[*a.shape]}, {b.dtype}{[*b.shape]}"
            if torch.equal(a, b) or not a.numel():
                continue
            apart = float((a.double() - b.double()).abs().nan_to_num(math.inf).max())
            size = float(a.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
            if a.isnan().equal(b.isnan()) and a.isnan().any():
                continue
            if not apart <= tolerance * (size + 0.01):  # a gradient may be rounding
                return (
                    f"value {place} of {len(one)}: differs by {apart:.3g} of {size:.3g}"
                )
        elif type(a) is not type(b) or (a != b and a == a):  # noqa: PLR0124
            if not (isinstance(a, float) and abs(a - b) <= tolerance * abs(a)):
                return f"value {place}: {a!r:.20} ({type(a).__name__}) and {b!r:.20}"
    return ""


EQUAL, REFUSED, SKIPPED = "equal", "refused", "eager fails"


def judge(recipe: Recipe) -> tuple[str, str]:
    """What becomes of a recipe: equal, refused, or a fault with its text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager = run(recipe, compiled=False)
        except Exception as error:
            return SKIPPED, f"{type(error).__name__}: {error}"
        try:
            compiled = run(recipe, compiled=True)
        except SpmdError as error:
            kind = type(error).__name__
            if "an effect that happens only at capture" in str(error):
                return REFUSED, f"{kind}: an effect that happens only at capture"
            if kind in ("ShadowError", "LegalityError", "VerificationError"):
                return f"fault: {kind}", str(error)
            return REFUSED, f"{kind}: {str(error).strip().splitlines()[0]}"
        except Exception as error:
            return f"fault: {type(error).__name__}", str(error)
    size = dist.get_world_size() if dist.is_initialized() else 1
    is_exact = recipe.backend == "graph" and size == 1 and recipe.mode != "default"
    text = difference(eager, compiled, 2e-6 if is_exact else 2e-3)
    return ("fault: differs", text) if text else (EQUAL, "")


def judge_all(recipes: list[Recipe]) -> list[tuple[str, str]]:
    """On this rank, one after the other."""
    return [judge(recipe) for recipe in recipes]


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


@st.composite
def recipes(
    draw: Any, *, modes: tuple[str, ...], backends: tuple[str, ...], ranks: int = 1
) -> Recipe:
    mode = draw(st.sampled_from(modes))
    backend = draw(st.sampled_from(backends))
    # Others turn gradients that are rounding alone (a bias before a norm) into steps.
    is_exact = backend == "graph" and mode != "default" and ranks == 1
    name = draw(st.sampled_from(sorted(OPTIMIZERS) if is_exact else ["SGD"]))
    options = dict(draw(st.sampled_from(OPTIMIZERS[name])))
    form = draw(st.sampled_from(FORMS if name in CAN_FUSE else FORMS[:3]))
    options |= form
    schedules = ["", "lr", "lr", "weight_decay", "momentum", "betas", "eps"]
    if name in ("SGD", "Adam", "AdamW") and form.get("foreach") is False:
        schedules.append("tensor lr")

    def rarely(*values: str) -> Any:
        return st.one_of(st.just(""), st.sampled_from(("", *values)))

    return Recipe(
        layers=tuple(draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=4))),
        optimizer=name,
        options=tuple(sorted(options.items())),
        groups=draw(st.integers(1, 2)),
        schedule=draw(st.sampled_from(schedules)),
        step=draw(st.sampled_from(("plain", "plain", "micro", "scaler", "grad"))),
        zero=draw(st.sampled_from(("end", "end", "start", "zeros", "never"))),
        clip=draw(rarely("norm", "value")),
        argument=draw(
            rarely(
                *("float", "int", "tensor", "flag", "text", "list", "dict"),
                *("config", "branch", "generator"),
            )
        ),
        python=draw(
            rarely(
                *("attribute", "table", "config", "counts", "appends", "draws"),
                *("iterates", "swallows"),
            )
        ),
        hook=draw(rarely("forward", "pre", "gradient", "accumulated")),
        returns=draw(
            st.sampled_from(
                ("loss", "nothing", "dict", "dataclass", "parameter", "view", "number")
            )
        ),
        between=draw(
            rarely(
                *("state_dict", "evaluate", "load", "write", "clear", "freeze"),
                "wrong call",
            )
        ),
        mode=mode,
        passes=mode in ("replicate", "fully_shard") and draw(st.booleans()),
        overlap=mode == "replicate" and draw(st.booleans()),
        backend=backend,
        shadow=draw(st.sampled_from((0, 2))),
        seed=draw(st.integers(0, 9)),
    )
