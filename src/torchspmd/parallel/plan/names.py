"""Module names: matching patterns, suggesting near ones, folding repeated layers."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from torchspmd.comm import folding

_NUMBER_PART = re.compile(r"(?<![^.])\d+(?![^.])")
_QUOTED = re.compile(r"'([\w.]+)'")
_SUBJECT = re.compile(r"'[^']*'(?=: )")
V = TypeVar("V")
_LISTED = 6  # names that a message lists before it says how many more there are


def module_tree(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by path; one that sits in two places is listed under both."""
    return dict(model.named_modules(remove_duplicate=False))


def match(tree: Mapping[str, object], pattern: str) -> list[str]:
    """The paths that a pattern means; each part of it stands for one part of a path.

    >>> tree = module_tree(nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()))
    >>> match(tree, "*"), match(tree, "*.0"), match(tree, "")
    (['0', '1'], ['0.0'], [''])
    """
    if not pattern:
        return [""]
    parts = pattern.split(".")
    return [path for path in tree if path and _is_match(path.split("."), parts)]


def _is_match(names: list[str], parts: list[str]) -> bool:
    return len(names) == len(parts) and all(map(fnmatchcase, names, parts))


def explain_no_match(tree: Mapping[str, nn.Module], pattern: str) -> str:
    """Where a pattern stops to match, and the nearest patterns that do."""
    parts = pattern.split(".")
    owner = ".".join(parts[:-1])
    for path in match(tree, owner):
        own = dict(tree[path].named_parameters(recurse=False))
        if any(fnmatchcase(name, parts[-1]) for name in own):
            return (
                f"{pattern!r} matches no module; it names a parameter, and a plan names "
                f"modules: write {owner!r}"
            )
    where = _where_it_stops(tree, parts)
    near = near_patterns(tree, pattern)
    hint = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    return f"{pattern!r} matches no module; {where}{hint}"


def _where_it_stops(tree: Mapping[str, nn.Module], parts: list[str]) -> str:
    depth = 0
    while match(tree, ".".join(parts[: depth + 1])):
        depth += 1
    prefix = ".".join(parts[:depth])
    children = {
        name: None
        for path in match(tree, prefix)
        for name, _ in tree[path].named_children()
    }
    subject = f"{prefix!r} matches, but has" if prefix else "the model has"
    if not children:
        return f"{subject} no modules inside"
    return f"{subject} no {parts[depth]!r} inside, only {listed(children)}"


def near_patterns(tree: Mapping[str, nn.Module], pattern: str) -> list[str]:
    """Up to three patterns of this model that look like the given one."""
    patterns = list(dict.fromkeys(generalise(path) for path in tree if path))
    wanted = generalise(pattern)
    ending = [known for known in patterns if known.endswith(f".{wanted}")]
    near = difflib.get_close_matches(wanted, patterns, n=3, cutoff=0.6)
    return list(dict.fromkeys([*ending, *near]))[:3]


def generalise(path: str) -> str:
    """A path with every number as ``*``.

    >>> generalise("layers.11.mlp.fc2")
    'layers.*.mlp.fc2'
    """
    return _NUMBER_PART.sub("*", path)


def shortest_patterns(
    tree: Mapping[str, nn.Module], values: Mapping[str, V]
) -> dict[str, V]:
    """Values by path as values by pattern: numbers as ``*`` where all are alike."""
    groups: dict[str, list[str]] = {}
    for path in values:
        groups.setdefault(generalise(path), []).append(path)
    result: dict[str, V] = {}
    for pattern, paths in groups.items():
        first = values[paths[0]]
        if all(values.get(path) == first for path in match(tree, pattern)):
            result[pattern] = first
        else:
            result |= {path: values[path] for path in paths}
    return result


def listed(names: Iterable[str]) -> str:
    """Names for a sentence; numbered ones as a range, many shortened.

    >>> listed(["0", "1", "2"]), listed(["up", "down"])
    ('[0-2]', 'up, down')
    """
    all_names = list(names)
    if len(all_names) > 2 and all(name.isdecimal() for name in all_names):
        return f"[{folding.ranges(map(int, all_names))}]"
    more = len(all_names) - _LISTED
    shown = ", ".join(all_names[:_LISTED])
    return f"{shown} and {more} more" if more > 0 else shown


def fold(paths: Sequence[str]) -> list[str]:
    """Paths that differ in layer numbers only, as one with ranges.

    >>> fold(["layers.0.up", "layers.1.up", "layers.0.down", "head"])
    ['layers.[0-1].up', 'layers.0.down', 'head']
    """
    # The first part of a path in a ledger is the model's class, which is never folded.
    rows = folding.fold((f"model.{path}", None) for path in dict.fromkeys(paths))
    return [name.removeprefix("model.") for name, _ in rows]


def fold_texts(texts: Iterable[str]) -> list[str]:
    """Texts that differ in the numbers of quoted paths only, as one with ranges.

    Where one text is said of several paths, it is said once.

    >>> fold_texts(["'layers.0.up' is odd", "'layers.1.up' is odd"])
    ["'layers.[0-1].up' is odd"]
    >>> fold_texts(["'q': too few heads", "'k': too few heads"])
    ["'q', 'k' each: too few heads"]
    """
    groups: dict[str, list[str]] = {}
    for text in texts:
        key = _QUOTED.sub(lambda found: f"'{generalise(found[1])}'", text)
        groups.setdefault(key, []).append(text)
    lines = [line for group in groups.values() for line in _fold_text_group(group)]
    subjects: dict[str, list[str]] = {}
    for line in lines:
        found = _SUBJECT.match(line)
        subjects.setdefault(line[found.end() :] if found else line, []).append(
            found[0] if found else ""
        )
    return [
        f"{', '.join(names)}{' each' if len(names) > 1 else ''}{rest}"
        for rest, names in subjects.items()
    ]


def _fold_text_group(texts: list[str]) -> list[str]:
    first = texts[0]
    quoted = [_QUOTED.findall(text) for text in texts]
    columns = zip(*quoted, strict=True)
    folded = [fold(list(dict.fromkeys(column))) for column in columns]
    if len(set(texts)) == 1 or any(len(names) != 1 for names in folded):
        return list(dict.fromkeys(texts))
    names = iter(folded)
    return [_QUOTED.sub(lambda found: f"'{next(names)[0]}'", first)]
