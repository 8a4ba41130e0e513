"""Fail when a file, a class or a function is larger than the house style allows.

The budgets are those of docs/design.md. Prints one line for each violation.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SRC_FILE = 400
INIT_FILE = 70
FUNCTION_BODY = 50
CLASS = 250
TEST_FILE = 500
EXAMPLE = 150
README = 200

# What may be larger, its own limit, and why. A file by its path; a class or function as
# `path::name`. There is no other way out.
EXCEPTIONS: dict[str, tuple[int, str]] = {
    "src/torchspmd/_torch/__init__.py": (140, "it is a list of names"),
}

Finding = tuple[str, str, int, int]  # where, what, its size, the usual limit
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    violations = list(too_large(ROOT))
    for line in violations:
        print(line)
    return 1 if violations else 0


def too_large(root: Path) -> Iterator[str]:
    """One line for each thing over its limit."""
    for where, what, size, usual in findings(root):
        limit, _ = EXCEPTIONS.get(where, (usual, ""))
        if size > limit:
            yield f"{where}: {what} has {size} lines, at most {limit} are allowed"


def findings(root: Path) -> Iterator[Finding]:
    """Everything that has a budget, with its size."""
    for path in _python_files(root / "src"):
        where, is_init = _name(root, path), path.name == "__init__.py"
        yield where, "file", _lines(path), INIT_FILE if is_init else SRC_FILE
        yield from _definitions(path, where)
    for path in _python_files(root / "tests"):
        yield _name(root, path), "test file", _lines(path), TEST_FILE
    for path in _python_files(root / "examples"):
        yield _name(root, path), "example", _lines(path), EXAMPLE
    readme = root / "README.md"
    if readme.exists():
        yield "README.md", "README", _lines(readme), README


def _definitions(path: Path, where: str) -> Iterator[Finding]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for name, node in _walk(tree, ""):
        if isinstance(node, ast.ClassDef):
            yield f"{where}::{name}", "class", _span(node, node), CLASS
        else:
            yield f"{where}::{name}", "function body", _body(node), FUNCTION_BODY


def _walk(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from _walk(node, f"{prefix}{node.name}.")
        else:
            yield from _walk(node, prefix)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    statements = function.body[1:] if has_docstring else function.body
    return _span(statements[0], statements[-1]) if statements else 0


def _span(first: ast.stmt, last: ast.stmt) -> int:
    assert last.end_lineno is not None, last
    return last.end_lineno - first.lineno + 1


def _python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    sys.exit(main())
