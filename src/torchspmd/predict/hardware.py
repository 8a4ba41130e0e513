"""GPUs and networks by name: every figure with its source.

The figures are TOML files beside this module, or a file of the user's own. Each is a value
and where it comes from, so that a prediction can say what it rests on. A file that says
``like = "h100"`` has the figures of that one, except for those that it gives itself.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torchspmd.errors import UsageError

__all__ = [
    "Figure",
    "Hardware",
    "hardware_text",
    "known_gpu",
    "load_gpu",
    "load_network",
]

_FOLDER = Path(__file__).parent / "hardware"
Rows: TypeAlias = tuple[tuple[float, ...], ...]

# What memory is counted with: a file without them is refused when it is read.
_NEEDED = {
    "GPU": (
        "memory.total",
        "memory.context",
        "memory.kernels",
        "memory.cublas_handle",
        "memory.cublas_workspace",
        "memory.cublaslt_workspace",
        "memory.nccl_library",
        "memory.nccl_communicator",
    ),
    "network": ("network.port", "network.efficiency", "network.latency"),
}


class Figure(NamedTuple):
    """A number, or rows of numbers, and where it comes from."""

    value: float | Rows
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU, or the network between nodes.

    Attributes:
        name: As on the command line.
        title: As its maker calls it.
        compute_capability: Of a GPU, as in ``9.0``; "" for a network.
        figures: By ``table.key`` of the file.
        like: The hardware that the file begins with, if any.
    """

    name: str
    title: str
    compute_capability: str
    figures: Mapping[str, Figure]
    like: "Hardware | None" = None

    def measured_on(self, key: str) -> "Hardware":
        """Whose file gives a figure: this one's, or that of the hardware it is like.

        What was measured there is carried over by the rates of both.
        """
        if self.like is None or self.like.figures.get(key) is not self.figures.get(key):
            return self
        return self.like.measured_on(key)

    def number(self, key: str) -> float:
        """The figure of this key.

        Raises:
            UsageError: The file has none, or has rows in its place.
        """
        figure = self.figures.get(key)
        if figure is None or isinstance(figure.value, tuple):
            wrong = "has no" if figure is None else "has rows, not a number, for"
            table, _, entry = key.rpartition(".")
            raise UsageError(
                f"The hardware file of {self.name} {wrong} {key}: add {entry} = "
                f"{{ value = ..., source = ... }} under [{table}]."
            )
        return figure.value

    def has(self, *keys: str) -> bool:
        """Whether the file has all of these figures."""
        return all(key in self.figures for key in keys)

    def nbytes(self, key: str) -> int:
        """The figure ``memory.<key>``, in bytes."""
        return int(self.number(f"memory.{key}"))

    def rows(self, key: str) -> Rows:
        """The rows of this key; none where the file has none."""
        figure = self.figures.get(key)
        return figure.value if figure and isinstance(figure.value, tuple) else ()


DEFAULT_NETWORK = "ib-ndr400"


def load_gpu(name: str) -> Hardware:
    """A GPU by name, as in ``h100``, or from a TOML file by its path.

    Raises:
        UsageError: No GPU of this name, or a file that is not one; the text has the names,
            or every problem of the file.
    """
    return _load(name, "GPU", _FOLDER)


def load_network(name: str) -> Hardware:
    """A network by name, as in ``ib-ndr400``, or from a TOML file by its path.

    Raises:
        UsageError: As ``load_gpu``.
    """
    return _load(name, "network", _FOLDER / "networks")


def known_gpu(title: str) -> tuple[Hardware, bool]:
    """The package's file for a GPU as CUDA calls it, and whether it is the same one.

    An unknown GPU gets the file of the H100.
    """
    words = title.lower().replace("-", " ").split()
    for path in sorted(_FOLDER.glob("*.toml"), key=lambda path: -len(path.stem)):
        if set(path.stem.split("-")) <= set(words):
            return load_gpu(path.stem), True
    return load_gpu("h100"), False


def hardware_text(hardware: Hardware) -> str:
    """The TOML file of a GPU or network; read back, it is the same."""
    lines = [f"title = {_quoted(hardware.title)}"]
    if hardware.compute_capability:
        lines.append(f"compute_capability = {_quoted(hardware.compute_capability)}")
    table = ""
    for key, figure in sorted(hardware.figures.items()):
        name, _, entry = key.partition(".")
        if name != table:
            lines += ["", f"[{name}]"]
            table = name
        source = _quoted(figure.source)
        value = _value_text(figure.value)
        lines.append(f"{entry} = {{ value = {value}, source = {source} }}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _value_text(value: float | Rows) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_row_text(row) for row in value) + "]"
    return _number_text(value)


def _row_text(row: tuple[float, ...]) -> str:
    return "[" + ", ".join(map(_number_text, row)) + "]"


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:.4g}"


def _load(name: str, kind: str, folder: Path) -> Hardware:
    path = Path(name) if name.endswith(".toml") else folder / f"{name.lower()}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
        raise UsageError(
            f"There is no {kind} {name!r}: choose one of {names}, or give the path of a "
            "TOML file of your own."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{kind} file {path}: {error}.") from None
    problems: list[str] = []
    like = data.get("like")
    base = _load(str(like), kind, folder) if like else None
    own = _figures(data, problems)
    if path.parent != folder:
        problems += _misspelt(own, folder)
    figures = {**(base.figures if base else {}), **own}
    problems += [f"{key} is missing" for key in _NEEDED[kind] if key not in figures]
    if problems:
        raise UsageError(
            f"{kind} file {path}: {'; '.join(problems)}. The files of "
            f"{folder} are examples."
        )
    return Hardware(
        name=path.stem,
        title=str(data.get("title", path.stem)),
        compute_capability=str(
            data.get("compute_capability", base.compute_capability if base else "")
        ),
        figures=figures,
        like=base,
    )


def _figures(data: Mapping[str, Any], problems: list[str]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for table, entries in data.items():
        if not isinstance(entries, dict):
            continue  # the title, or what it is like
        for key, entry in entries.items():
            figure = _figure(entry)
            if figure is None:
                problems.append(
                    f"{table}.{key} is not a table with a value, a number of 0 or more or "
                    "rows of such numbers, and a source"
                )
            else:
                figures[f"{table}.{key}"] = figure
    return figures


# Tables whose figures have fixed names; those of others name cases that were measured.
_FIXED = (
    "bandwidth",
    "chip",
    "flops",
    "launch",
    "memory",
    "network",
    "overlap",
    "power",
)


def _misspelt(figures: Iterable[str], folder: Path) -> Iterator[str]:
    """Figures that are called almost as one of the package: nothing would read them.

    Others that are not known may be of another version: ``calibrate`` writes all it knows.
    """
    known = {
        f"{table}.{key}"
        for path in folder.glob("*.toml")
        for table, entries in tomllib.loads(path.read_text(encoding="utf-8")).items()
        if isinstance(entries, dict)
        for key in entries
    }
    tables = {key.partition(".")[0] for key in known}.difference(_FIXED)
    for key in figures:
        if key not in known and key.partition(".")[0] not in tables:
            for near in difflib.get_close_matches(key, known, n=1, cutoff=0.8):
                yield f"{key} is not known, but {near} is"


def _figure(entry: object) -> Figure | None:
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        return None
    value, source = entry["value"], entry["source"]
    if not isinstance(source, str) or not source:
        return None
    if _is_number(value):
        return Figure(value, source)
    if isinstance(value, list) and value and all(map(_is_row, value)):
        return Figure(tuple(tuple(row) for row in value), source)
    return None


def _is_row(row: object) -> bool:
    return isinstance(row, list) and bool(row) and all(map(_is_number, row))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
