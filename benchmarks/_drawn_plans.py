"""Drawn models and plans, each against one device.

Whatever runs must give what one device gives; whatever cannot must be refused by an error
of torchspmd. Half of the plans are right by construction, the others are changed at random:
an entry less, another style, another layout. A case is a number; ranks draw it themselves.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

from torchspmd import clip_grad_norm_
from torchspmd.errors import SpmdError
from torchspmd.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    Plan,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    auto_plan,
    parallelize_module,
    vocab_parallel_cross_entropy,
)

R, P, FEATURES, SEQUENCE = Replicate(), Partial(), Shard(-1), Shard(1)
HEAD_SIZE, BATCH, TOKENS, WORDS = 4, 2, 6, 24


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        kind: ``equal``, ``refused``, ``error of torch`` (in a plan that was changed),
            ``failed`` (a plan that is right does not run) or ``different``.
        text: The case, and what was wrong.
    """

    kind: str
    text: str


# ----------------------------------------------------------------------------
# Models: an embedding, blocks with a norm before each, a norm, a head.


class Attention(nn.Module):
    """Separate projections, perhaps fewer keys than queries and norms of the heads."""

    def __init__(self, width: int, kv_heads: int, norms: bool, bias: bool) -> None:
        super().__init__()
        small = kv_heads * HEAD_SIZE
        self.q, self.o = (nn.Linear(width, width, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(width, small, bias=bias) for _ in range(2))
        self.head_dim = HEAD_SIZE
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD_SIZE), nn.LayerNorm(HEAD_SIZE)

    def forward(self, x: Any) -> Any:
        q, k, v = (
            p(x).unflatten(-1, (-1, HEAD_SIZE)) for p in (self.q, self.k, self.v)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """One projection that is split by the sizes of one device."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.qkv, self.o = (
            nn.Linear(width, 3 * width, bias=bias),
            nn.Linear(width, width),
        )
        self.width, self.head_dim = width, HEAD_SIZE

    def forward(self, x: Any) -> Any:
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
            for part in self.qkv(x).split(self.width, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(
        self, width: int, hidden: int, act: str, gated: bool, bias: bool
    ) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, hidden, bias=bias),
            nn.Linear(hidden, width, bias=bias),
        )
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.act = getattr(F, act)

    def forward(self, x: Any) -> Any:
        h = self.act(self.up(x))
        return self.down(h if self.gate is None else h * self.gate(x))


class Block(nn.Module):
    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Any) -> Any:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice((12, 24))
        heads = width // HEAD_SIZE
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(
            *(self._block(rng, width, heads) for _ in range(rng.randint(1, 2)))
        )
        self.norm = self._norm(rng, width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if rng.random() < 0.3:
            self.head.weight = self.embed.weight

    def _block(self, rng: random.Random, width: int, heads: int) -> Block:
        bias = rng.random() < 0.5
        kind = rng.choice(("attention", "fused", "mlp", "mlp"))
        if kind == "attention":
            few = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
            inner: nn.Module = Attention(width, few, rng.random() < 0.5, bias)
        elif kind == "fused":
            inner = FusedAttention(width, bias)
        else:
            act, gated = rng.choice(("gelu", "relu", "silu")), rng.random() < 0.5
            inner = MLP(width, rng.choice((12, 18)), act, gated, bias)
        return Block(self._norm(rng, width), inner)

    def _norm(self, rng: random.Random, width: int) -> nn.Module:
        kind: Any = rng.choice((nn.LayerNorm, nn.RMSNorm))
        return kind(width)  # type: ignore[no-any-return]

    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.blocks(self.embed(ids))))


# ----------------------------------------------------------------------------
# Plans.


def right_plan(model: Model, rng: random.Random, size: int) -> dict[str, Any]:
    """A plan that gives what one device gives; with or without sequence parallelism."""
    is_sequence = rng.random() < 0.4
    between: Placement = SEQUENCE if is_sequence else R
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=R, output_layouts=between)
    }
    for path, module in model.named_modules():
        if path.endswith("norm") and not path.endswith(("q_norm", "k_norm")):
            plan |= _norm_style(path, rng, is_sequence)
        if isinstance(module, (Attention, FusedAttention, MLP)):
            plan |= _inner_styles(path, module, rng, between, size)
    plan["head"] = ColwiseParallel(
        input_layouts=between, output_layouts=rng.choice((R, FEATURES))
    )
    return plan


def _norm_style(path: str, rng: random.Random, is_sequence: bool) -> dict[str, Any]:
    if is_sequence:
        return {path: SequenceParallel(use_local_output=rng.random() < 0.5)}
    return {path: ReplicateParallel()} if rng.random() < 0.5 else {}


def _inner_styles(
    path: str, module: nn.Module, rng: random.Random, between: Placement, size: int
) -> dict[str, Any]:
    column = ColwiseParallel(input_layouts=between)
    row = RowwiseParallel(output_layouts=between)
    if isinstance(module, MLP):
        names = ("up", "gate") if module.gate is not None else ("up",)
        return {**{f"{path}.{n}": column for n in names}, f"{path}.down": row}
    if isinstance(module, FusedAttention):
        fused = FusedColwiseParallel(
            parts=(module.width,) * 3,
            num_heads=(module.width // HEAD_SIZE,) * 3,
            input_layouts=between,
            split_whole=True,
        )
        return {f"{path}.qkv": fused, f"{path}.o": row}
    few = module.k.out_features // HEAD_SIZE
    key = KeyValueParallel(num_heads=few, input_layouts=between)
    styles = {f"{path}.q": column, f"{path}.[kv]": key, f"{path}.o": row}
    if hasattr(module, "q_norm"):
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        styles[f"{path}.[qk]_norm"] = heads
    return styles


_LAYOUTS = (R, FEATURES, SEQUENCE, Shard(0), P)


def change(plan: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The plan with something else in one place."""
    changed = dict(plan)
    path = rng.choice(list(plan))
    style = plan[path]
    kind = rng.choice(("drop", "style", "input", "output", "local"))
    if kind == "drop":
        del changed[path]
    elif kind == "style":
        layouts = {
            f"{end}_layouts": rng.choice(_LAYOUTS)
            for end in ("input", "output")
            if rng.random() < 0.5
        }
        changed[path] = rng.choice(
            (
                ColwiseParallel(**layouts),
                RowwiseParallel(**layouts),
                SequenceParallel(use_local_output=rng.random() < 0.5),
                ReplicateParallel(),
            )
        )
    elif kind == "local" and hasattr(style, "use_local_output"):
        if not isinstance(style, FusedColwiseParallel):
            changed[path] = replace(style, use_local_output=not style.use_local_output)
    elif hasattr(style, f"{kind}_layouts"):
        changed[path] = replace(style, **{f"{kind}_layouts": rng.choice(_LAYOUTS)})
    return changed


def draw_plan(model: Model, rng: random.Random, size: int) -> tuple[str, Any]:
    """How the plan came to be, and the plan."""
    way = rng.choice(("right", "right", "changed", "changed", "auto"))
    if way == "auto":
        return way, auto_plan(model)
    plan = right_plan(model, rng, size)
    if way == "changed":
        plan = change(plan, rng)
    return way, Plan(plan)


# ----------------------------------------------------------------------------
# One case: train a step, compare everything.


def whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor as one device has it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(model: nn.Module, ids: torch.Tensor, mesh: Any = None) -> list[torch.Tensor]:
    """Two steps with a clipped gradient; the losses and the norms."""
    optim = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for _ in range(2):
        logits = model(ids)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        target = ids.roll(1, 1)
        if mesh is not None and logits.shape[-1] != WORDS:
            loss = vocab_parallel_cross_entropy(logits, target, mesh=mesh)
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        found += [whole(loss).detach(), whole(norm).detach()]
    return found


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """What differs; empty when nothing does."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape:
            return f"value {place}: shape {tuple(one.shape)}, not {tuple(other.shape)}"
        if not torch.allclose(one, other, rtol=1e-7, atol=1e-9, equal_nan=True):
            far = (one - other).abs().max().item()
            return f"value {place} is off by {far:.2g}"
    return ""


def outcome_of(case: str, run: Callable[[], str]) -> Outcome:
    """Run a case and say what came of it."""
    try:
        difference = run()
    except SpmdError as error:
        return Outcome("refused", f"{case}: {str(error).splitlines()[0]}")
    except Exception as error:  # what a drawn program raises can be anything
        first = (str(error).strip() or "no text").splitlines()[0]
        kind = "failed" if isinstance(error, AssertionError) else "error of torch"
        return Outcome(kind, f"{case}: {type(error).__name__}: {first}")
    kind = "different" if difference else "equal"
    return Outcome(kind, f"{case}: {difference}" if difference else case)


def run_plan(seed: int) -> Outcome:
    """One drawn model under one drawn plan, on the ranks that there are."""
    rng = random.Random(seed)
    size = dist.get_world_size()
    torch.manual_seed(seed)
    model = Model(rng).double()
    alone = copy.deepcopy(model)
    ids = torch.randint(0, WORDS, (BATCH, TOKENS))
    case = f"plan {seed} on {size} ranks"

    def run() -> str:
        way, plan = draw_plan(model, rng, size)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        try:
            parallelize_module(model, mesh, plan)
            found = train(model, ids, mesh)
        except Exception as error:
            if way != "changed" and not _is_about_heads(error):
                raise AssertionError(f"{way} plan {plan}: {error}") from error
            raise
        saved = model.state_dict()
        expected = train(alone, ids)
        keys = alone.state_dict()
        difference = compare(
            [*found, *(whole(saved[key]) for key in keys)], [*expected, *keys.values()]
        )
        return difference and f"{difference} ({way}: {plan})"

    return outcome_of(case, run)


def _is_about_heads(error: Exception) -> bool:
    """Heads that ranks cannot share are the only reason against a right plan."""
    return isinstance(error, SpmdError) and "heads" in str(error)
