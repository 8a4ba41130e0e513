"""Names of modules: patterns that match them, and the order of their numbers."""

import re


def matches(module: str, pattern: str, *, within: bool) -> bool:
    """Whether a module path fits a pattern; ``*`` stands for one part of the path.

    The root module's class may be left out: ``layers.*.mlp`` fits ``GPT.layers.0.mlp``.

    >>> matches("GPT.layers.0.mlp.down", "layers.*.mlp", within=True)
    True
    >>> matches("GPT.layers.0.mlp.down", "layers.*.mlp", within=False)
    False
    """
    wanted, parts = pattern.split("."), module.split(".")
    return _fits(parts, wanted, within) or _fits(parts[1:], wanted, within)


def _fits(parts: list[str], wanted: list[str], within: bool) -> bool:
    if len(parts) < len(wanted) or (not within and len(parts) != len(wanted)):
        return False
    return all(want in ("*", part) for part, want in zip(parts, wanted, strict=False))


def natural(path: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbered parts as numbers: ``layers.2`` before ``layers.10``."""
    return tuple((_leading_number(part), part) for part in path.split("."))


def _leading_number(part: str) -> int:
    digits = re.match(r"\[?(\d+)", part)
    return int(digits[1]) if digits else -1
