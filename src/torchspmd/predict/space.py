"""The candidates of a search: words with braces, and expressions over their values."""

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torchspmd.errors import UsageError

__all__ = ["Candidate", "Expression", "Space", "argument_name", "read_space"]

Value: TypeAlias = int | float | str | None


class Candidate(NamedTuple):
    """One point of the space.

    Attributes:
        values: Of the arguments that are swept, by name.
        words: The script's command line.
    """

    values: Mapping[str, Value]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


class Space(NamedTuple):
    """What is swept, and what is the same everywhere.

    Attributes:
        swept: Values by the name of an argument.
        fixed: Values of other arguments that have one.
        template: Words; those that are swept as (argument, word in front of the value).
    """

    swept: Mapping[str, tuple[Value, ...]]
    fixed: Mapping[str, Value]
    template: tuple[str | tuple[str, str], ...]

    def candidates(self) -> Iterator[Candidate]:
        """All combinations, the last argument changing first."""
        for choice in itertools.product(*self.swept.values()):
            yield self.candidate(dict(zip(self.swept, choice, strict=True)))

    def candidate(self, values: Mapping[str, Value]) -> Candidate:
        """The point with these values of what is swept."""
        words = tuple(
            part if isinstance(part, str) else f"{part[1]}{values[part[0]]}"
            for part in self.template
        )
        return Candidate(values, words)


def read_space(words: Sequence[str], *, also: str = "") -> Space:
    """The space that a script's arguments span.

    ``--tp {1,2,4}`` has three values; so has ``--tp 1 2 4``, which is what a shell makes
    of braces without quotes, and ``--tp=1 --tp=2``.

    Args:
        words: Of the script.
        also: An argument that is swept with its one value.

    Raises:
        UsageError: Nothing is swept, or there is no such argument.
    """
    if not any(_BRACES.fullmatch(word) for word in words):
        words = _rejoin(words)
    given, also = also, argument_name(also)
    swept: dict[str, tuple[Value, ...]] = {}
    fixed: dict[str, Value] = {}
    template: list[str | tuple[str, str]] = []
    name = ""
    for word in words:
        option, equals, text = word.partition("=")
        if word.startswith("-") and not _is_number(word):
            name = argument_name(option)
            if not equals:
                template.append(word)
                fixed[name] = True
                continue
            front = f"{option}="
        else:
            front, text = "", word
            name = name or f"argument_{len(template)}"
        values = _values(text)
        if len(values) > 1 or values[0] != _value(text) or name == also:
            swept[name] = values
            fixed.pop(name, None)
            template.append((name, front))
        else:
            fixed[name] = values[0]
            template.append(word)
        name = ""
    if also and also not in swept:
        raise UsageError(
            f"--repeat {given}: the script is given no such argument behind --; give it "
            f"its number of blocks, as in -- --{given.replace('_', '-')} 32."
        )
    if not swept.keys() - {also} and len(swept.get(also, ())) < 2:
        raise UsageError(
            "There is nothing to search: give some argument of the script several values "
            "behind --, as in -- --tp {1,2,4,8} --batch {1,2}."
        )
    return Space(swept, fixed, tuple(template))


def _rejoin(words: Sequence[str]) -> list[str]:
    """Put braces back where a shell has taken them away."""
    groups: list[tuple[str, list[str]]] = []  # an option, or "", and its words
    for word in words:
        option, equals, text = word.partition("=")
        if word.startswith("-") and not _is_number(word):
            last = groups[-1] if groups else ("", [])
            if equals and last[0] == f"{option}=":
                last[1].append(text)
            elif equals:
                groups.append((f"{option}=", [text]))
            else:
                groups.append((word, []))
        elif groups and groups[-1][0] and not groups[-1][0].endswith("="):
            groups[-1][1].append(word)
        else:
            groups.append(("", [word]))
    result = []
    for option, values in groups:
        text = values[0] if len(values) == 1 else "{" + ",".join(values) + "}"
        if option.endswith("="):
            result.append(option + text)
        else:
            result += [word for word in (option, text if values else "") if word]
    return result


# Values in braces. Text with quotes or colons in them, as JSON has, is one value.
_BRACES = re.compile(r"""(.*?)\{([^{}"':]+)\}(.*)""", re.DOTALL)


def _values(text: str) -> tuple[Value, ...]:
    found = _BRACES.fullmatch(text)
    if found is None:
        if text.count("{") != text.count("}"):
            raise UsageError(
                f"{text!r}: a brace is missing; values are listed as in {{1,2,4}}, without "
                "spaces, or in quotes."
            )
        return (_value(text),)
    before, inner, after = found.groups()
    values = {  # each once
        str(value): value
        for part in inner.split(",")
        for value in _values(f"{before}{part}{after}")
    }
    return tuple(values.values())


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_number(word: str) -> bool:
    return not isinstance(_value(word), str)


def argument_name(option: str) -> str:
    """An option as a name in Python.

    >>> argument_name("--model.n-layers")
    'model_n_layers'
    """
    return option.lstrip("-").replace("-", "_").replace(".", "_")


# ----------------------------------------------------------------------------
# --where and --work

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Expression:
    """Arithmetic and comparisons over names, such as ``batch * tp <= 16``.

    Raises:
        UsageError: The text is no such expression.
    """

    def __init__(self, text: str, option: str) -> None:
        self.text, self.option = text, option
        try:
            self._body = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise UsageError(
                f"{option} {text!r}: {error.msg}. Write it as in 'batch * tp <= 16 and "
                'ac == "full"\', with == for equal.'
            ) from None

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Its value.

        Raises:
            UsageError: A name that there is not, something else than arithmetic, or
                arithmetic that these values do not allow.
        """
        try:
            return self._value(self._body, values)
        except UsageError:
            raise
        except (TypeError, ArithmeticError, ValueError) as error:
            names = {
                node.id for node in ast.walk(self._body) if isinstance(node, ast.Name)
            }
            told = ", ".join(f"{name}={values[name]!r}" for name in sorted(names))
            raise UsageError(
                f"{self.option} {self.text!r} cannot be computed for {told or 'it'}: "
                f"{error}."
            ) from None

    def number(self, values: Mapping[str, Any]) -> float:
        """Its value, which must be a number greater than 0.

        Raises:
            UsageError: It is not, or it cannot be computed.
        """
        value = self(values)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UsageError(
                f"{self.option} {self.text!r} is {value!r}: it must be a number greater "
                "than 0."
            )
        return float(value)

    def _value(self, node: ast.AST, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id not in values:
                    names = ", ".join(sorted(values))
                    raise UsageError(
                        f"{self.option} {self.text!r} has no {node.id}: there are {names}."
                    )
                return values[node.id]
            case ast.BinOp() if type(node.op) in _BINARY:
                left, right = (self._value(n, values) for n in (node.left, node.right))
                return _BINARY[type(node.op)](left, right)
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand, values)
            case ast.UnaryOp(op=ast.Not()):
                return not self._value(node.operand, values)
            case ast.BoolOp():
                parts = (self._value(part, values) for part in node.values)
                return all(parts) if isinstance(node.op, ast.And) else any(parts)
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                left = self._value(node.left, values)
                for op, each in zip(node.ops, node.comparators, strict=True):
                    right = self._value(each, values)
                    if not _COMPARE[type(op)](left, right):
                        return False
                    left = right
                return True
        raise UsageError(
            f"{self.option} {self.text!r}: only names, numbers, arithmetic, comparisons, "
            "and, or, not are understood."
        )
