"""Plans as TOML, and styles as short text.

One table for the styles, one for the numbers of heads. A style without arguments is its
name; one with arguments is an inline table::

    [styles]
    "layers.*.mlp.up" = "ColwiseParallel"
    "embed" = { style = "RowwiseParallel", input_layouts = "Replicate()" }

    [heads]
    "layers.*.attention.k" = 8
"""

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.errors import LayoutError, PlanError
from torchspmd.layout.placements import format_placement
from torchspmd.parallel.experts import ExpertParallel, ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel, KeyValueParallel
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel
from torchspmd.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torchspmd.parallel.sequence import SequenceParallel

# A style must be listed here to be written to or read from a file.
STYLES: dict[str, Callable[..., Any]] = {
    style.__name__: style
    for style in (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        FusedColwiseParallel,
        KeyValueParallel,
        ExpertParallel,
        ReplicateParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        PrepareModuleInputOutput,
    )
}
_SHARD = re.compile(r"Shard\((?:dim=)?(-?\d+)\)")
_TABLES = ("styles", "heads")


def describe_style(style: object) -> str:
    """A style with the arguments that differ from its defaults.

    >>> describe_style(ColwiseParallel(output_layouts=Replicate()))
    'ColwiseParallel(output_layouts=Replicate())'
    """
    name = type(style).__name__
    if name not in STYLES or not dataclasses.is_dataclass(style):
        return name
    given = _arguments(style)
    return f"{name}({', '.join(f'{k}={_describe(v)}' for k, v in given.items())})"


def _arguments(style: Any) -> dict[str, Any]:
    """The arguments that a reader of the style needs, in order."""
    required = {
        field.name
        for field in dataclasses.fields(style)
        if field.default is dataclasses.MISSING
    }
    values = {
        field.name: getattr(style, field.name) for field in dataclasses.fields(style)
    }
    plain = type(style)(**{name: values[name] for name in required})
    return {
        name: _single(value)
        for name, value in values.items()
        if name in required or value != getattr(plain, name)
    }


def _single(value: Any) -> Any:
    """A value as a user would pass it."""
    if not isinstance(value, tuple):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        return dict(value)  # a frozen style keeps a dict as pairs
    is_one = len(value) == 1 and isinstance(value[0], Placement)
    return value[0] if is_one else value


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return format_placement(value) if isinstance(value, Placement) else repr(value)


def write_toml(styles: Mapping[str, object], heads: Mapping[str, int]) -> str:
    """The text form of a plan.

    >>> print(write_toml({"up": ColwiseParallel()}, {}), end="")
    [styles]
    "up" = "ColwiseParallel"
    """
    unknown = [p for p, s in styles.items() if type(s).__name__ not in STYLES]
    if unknown:
        raise PlanError(
            f"the plan cannot be written: the styles of {', '.join(map(repr, unknown))} "
            f"are none of {', '.join(STYLES)}. Keep such a plan in Python."
        )
    lines = [f"{_quote(p)} = {_style_toml(s)}" for p, s in styles.items()]
    text = "\n".join(["[styles]", *lines]) + "\n"
    if heads:
        lines = [f"{_quote(pattern)} = {count}" for pattern, count in heads.items()]
        text += "\n" + "\n".join(["[heads]", *lines]) + "\n"
    return text


def _style_toml(style: object) -> str:
    name = _quote(type(style).__name__)
    given = _arguments(style)
    if not given:
        return name
    pairs = [f"{key} = {_value_toml(value)}" for key, value in given.items()]
    return f"{{ style = {name}, {', '.join(pairs)} }}"


def _value_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = [f"{_quote(key)} = {_value_toml(v)}" for key, v in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return _quote("None" if value is None else format_placement(value))


def _quote(text: str) -> str:
    return json.dumps(text)  # a JSON string is a TOML basic string


def read_toml(text: str, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    r"""Styles and numbers of heads by pattern; raises every problem of the text at once.

    >>> read_toml('[styles]\n"up" = "ColwiseParallel"', "plan.toml")[0].keys()
    dict_keys(['up'])
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is not TOML: {error}.") from None
    problems = [
        f"[{name}] is unknown{_nearest(name, _TABLES)}"
        for name in tables
        if name not in _TABLES
    ]
    entries = tables.get("styles")
    if not isinstance(entries, dict):
        problems.append("there is no table [styles]")
        entries = {}
    styles = {p: _read_style(p, value, problems) for p, value in entries.items()}
    heads = _read_heads(tables.get("heads", {}), problems)
    if problems:
        lines = "\n".join(f"  * {problem}" for problem in problems)
        raise PlanError(
            f"{source} is not a plan\n\n{lines}\n\nA style is its name, or a table with "
            '`style` and its arguments: { style = "ColwiseParallel", output_layouts = '
            '"Replicate()" }.'
        )
    return styles, heads


def _read_style(pattern: str, value: Any, problems: list[str]) -> Any:
    arguments = dict(value) if isinstance(value, dict) else {"style": value}
    name = arguments.pop("style", None)
    if name not in STYLES:
        hint = _nearest(str(name), tuple(STYLES))
        problems.append(f"{pattern!r}: no style is called {name!r}{hint}")
        return None
    known = [field.name for field in dataclasses.fields(STYLES[name])]  # type: ignore[arg-type]
    unknown = [argument for argument in arguments if argument not in known]
    for argument in unknown:
        hint = _nearest(argument, tuple(known))
        problems.append(f"{pattern!r}: {name} has no argument {argument!r}{hint}")
    if unknown:
        return None
    try:
        return STYLES[name](**{key: _read_value(v) for key, v in arguments.items()})
    except (LayoutError, TypeError, ValueError) as error:
        problems.append(f"{pattern!r}: {error}")
        return None


def _read_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read_value(v) for key, v in value.items()}
    if isinstance(value, list):
        return tuple(map(_read_value, value))
    if not isinstance(value, str):
        return value
    plain = {"Replicate()": Replicate(), "Partial()": Partial(), "None": None}
    if value in plain:
        return plain[value]
    shard = _SHARD.fullmatch(value)
    if shard is None:
        raise ValueError(
            f'{value!r} is no layout; write "Replicate()", "Shard(0)", "Partial()" or '
            '"None"'
        )
    return Shard(int(shard[1]))


def _read_heads(table: Any, problems: list[str]) -> dict[str, int]:
    if not isinstance(table, dict):
        problems.append("[heads] is not a table from patterns to numbers")
        return {}
    for pattern, count in table.items():
        if type(count) is not int or count < 0:
            problems.append(f"[heads] {pattern!r}: {count!r} is not a number of heads")
    return table


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
