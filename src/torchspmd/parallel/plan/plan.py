"""``Plan``: which style each module of a model gets, as a value."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from torchspmd.errors import PlanError
from torchspmd.parallel.style import ParallelStyle

if TYPE_CHECKING:  # these build on plans, and are needed by some callers only
    from torchspmd.parallel.axis import MeshLike
    from torchspmd.parallel.plan.preview import Preview

Style = ParallelStyle | TorchStyle


@final
class Plan(Mapping[str, Style]):
    """Styles by module-name pattern; a frozen mapping.

    A pattern is a module's path, in which each part may have ``*``, ``?`` and ``[...]``:
    ``layers.*.mlp.up``. The empty pattern is the model itself. Patterns must not mean
    one module twice with different styles.

    Args:
        styles: Style by pattern.
        heads: Number of attention heads by pattern, for projections whose module does
            not tell: a shard must hold whole heads. 0 says that the features of a
            projection inside an attention module are not heads.

    Example:
        >>> from torchspmd.parallel import ColwiseParallel, RowwiseParallel
        >>> plan = Plan({"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> preview = plan.preview(model, {"tp": 4}, batch=2, seq=16)
        >>> preview.bytes_on_rank(0), preview.total_bytes
        (576, 2208)
    """

    __slots__ = ("_heads", "_styles")

    def __init__(
        self, styles: Mapping[str, Style], *, heads: Mapping[str, int] | None = None
    ) -> None:
        _check(styles, heads)
        self._styles = dict(styles)
        self._heads = dict(heads or {})

    @property
    def heads(self) -> dict[str, int]:
        """Number of heads by pattern; a copy."""
        return dict(self._heads)

    def preview(
        self,
        model: nn.Module,
        mesh: "MeshLike",
        *,
        axis: str | None = None,
        batch: int | None = None,
        seq: int | None = None,
        example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    ) -> "Preview":
        """Every parameter's layout and bytes, and the communication, before any of it.

        Needs no process group and no memory for the weights: a model made under
        ``torch.device("meta")`` will do. The model is not changed.

        Args:
            model: The model, with plain parameters.
            mesh: A ``DeviceMesh``, or sizes by name such as ``{"dp": 4, "tp": 8}``.
            axis: The axis to lay the plan on; default is the only one, else ``tp``.
            batch: Sequences that one rank sees in a step, to price the communication.
            seq: Length of each.
            example_inputs: Inputs of the model instead of ``batch`` and ``seq``:
                positional ones as a tuple, or by name. Only their shapes are used.

        Raises:
            PlanError: The plan does not fit; lists every problem.
        """
        from torchspmd.parallel.plan.preview import build_preview

        return build_preview(
            self,
            model,
            mesh,
            axis=axis,
            tokens=(batch, seq),
            example_inputs=example_inputs,
        )

    def share_inputs(
        self,
        model: nn.Module,
        *,
        example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    ) -> "Plan":
        """The same plan, with the input's gradient of neighbours summed once.

        Query, key and value projections read one tensor, and so do gate and up: each
        sums its gradient over the ranks. Where nothing else reads it, the module around
        them can get it as a DTensor, and one sum serves them all: in a Llama layer, two
        sums in backward instead of five. Where nothing can be shared, the plan comes back
        as it is, with a ``PlanWarning`` that says why.

        Args:
            model: The model; it is run once on shapes, and not changed.
            example_inputs: Its inputs, as for ``preview``.

        Example:
            >>> from torchspmd.parallel import ColwiseParallel
            >>> class Pair(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            ...     def forward(self, x):
            ...         return self.a(x) * self.b(x)
            >>> list(Plan({"[ab]": ColwiseParallel()}).share_inputs(Pair()))
            ['[ab]', '']
        """
        from torchspmd.parallel.plan.share import shared_inputs

        return self | shared_inputs(self, model, example_inputs)

    def replicate_others(self, model: nn.Module) -> "Plan":
        """The same plan, with ``ReplicateParallel()`` for each other layer that is trained.

        All parameters are then DTensors, which is what functions that take them together
        need: ``torch.nn.utils.clip_grad_norm_`` and fused optimizers refuse a mixture of
        plain tensors and DTensors. (``torchspmd.clip_grad_norm_`` takes a mixture.)

        Args:
            model: The model; it is not changed.

        Raises:
            PlanError: A module with layers inside has parameters of its own, which no
                style covers.

        Example:
            >>> from torchspmd.parallel import ColwiseParallel
            >>> model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
            >>> list(Plan({"1": ColwiseParallel()}).replicate_others(model))
            ['1', '0']
        """
        from torchspmd.parallel.plan.resolve import other_layers

        return self | other_layers(self, model)

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML."""
        Path(path).write_text(self.to_toml())

    def to_toml(self) -> str:
        """The plan as TOML.

        >>> from torchspmd.parallel import SequenceParallel
        >>> print(Plan({"norm": SequenceParallel()}).to_toml(), end="")
        [styles]
        "norm" = "SequenceParallel"
        """
        from torchspmd.parallel.plan.text_form import write_toml

        return write_toml(self._styles, self._heads)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that ``save`` wrote, or one written by hand.

        Raises:
            PlanError: It is not a plan; lists every problem with the nearest names.
        """
        from torchspmd.parallel.plan.text_form import read_toml

        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan {path} cannot be read: {error}.") from None
        styles, heads = read_toml(text, str(path))
        return cls(styles, heads=heads)

    @classmethod
    def from_transformers(
        cls, model: nn.Module, *, leave: Collection[str] = ()
    ) -> Self:
        """The plan that a Hugging Face transformers model carries as ``tp_plan``.

        Args:
            model: The model; it is not changed.
            leave: Entries of its ``tp_plan`` to pass over, as patterns of their text:
                what they name stays whole on every rank.

        Raises:
            PlanError: The model carries none, or has entries with no counterpart here;
                lists them.
        """
        from torchspmd.parallel.plan.hugging_face import read_tp_plan

        return cls(read_tp_plan(model, leave))

    def __getitem__(self, pattern: str) -> Style:
        return self._styles[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._styles)

    def __len__(self) -> int:
        return len(self._styles)

    def __or__(self, other: Mapping[str, Style]) -> "Plan":
        """This plan with the entries of another put over it."""
        heads = other._heads if isinstance(other, Plan) else {}
        return Plan({**self, **other}, heads={**self._heads, **heads})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._styles == other._styles and self._heads == other._heads

    def __hash__(self) -> int:
        return hash((frozenset(self._styles.items()), frozenset(self._heads.items())))

    def __repr__(self) -> str:
        from torchspmd.parallel.plan.text_form import describe_style

        entries = [f"{p!r}: {describe_style(s)}" for p, s in self._styles.items()]
        heads = f", heads={self._heads}" if self._heads else ""
        return f"Plan({{{', '.join(entries)}}}{heads})"


def is_style(value: object) -> bool:
    """Whether a value is a style: ours, the user's own, or torch's."""
    return isinstance(value, (ParallelStyle, TorchStyle))


def explain_no_style(pattern: str, value: object) -> str:
    """Why the value of a pattern is not a style, and what to write."""
    from torchspmd.parallel.plan.text_form import STYLES

    if isinstance(value, str):
        name = value if value in STYLES else "ColwiseParallel"
        such = "" if value in STYLES else " or another style"
        fix = f"pass {name}(){such}; names are for TOML files"
    elif isinstance(value, type) and issubclass(value, (ParallelStyle, TorchStyle)):
        return f"{pattern!r}: {value.__name__} is a class; pass {value.__name__}()"
    else:
        fix = "pass one such as ColwiseParallel()"
    return f"{pattern!r}: {value!r} is not a style; {fix}"


def _check(styles: object, heads: Mapping[str, int] | None) -> None:
    if not isinstance(styles, Mapping):
        raise PlanError(
            f"Plan: a plan maps patterns to styles; this is a {type(styles).__name__}. "
            'Write Plan({"layers.*.up": ColwiseParallel()}), or Plan.load("plan.toml") to '
            "read a file."
        )
    problems = [f"the pattern {p!r} is not text" for p in styles if type(p) is not str]
    problems += [
        explain_no_style(pattern, style)
        for pattern, style in styles.items()
        if not is_style(style)
    ]
    problems += [
        f"heads[{pattern!r}]: {count!r} is not a number of heads"
        for pattern, count in (heads or {}).items()
        if type(count) is not int or count < 0
    ]
    if problems:
        raise PlanError("Plan: " + "; ".join(problems) + ".")
