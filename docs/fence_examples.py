"""For the reference: examples in docstrings become blocks of code.

A docstring has ``>>>`` lines anywhere in its text, as doctest wants them. Markdown would
read them as quotations.
"""

from typing import Any

import griffe


class FenceExamples(griffe.Extension):
    """Put each run of ``>>>`` lines and their output between fences."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the text before it is taken apart into sections."""
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fence(obj.docstring.value)


def fence(text: str) -> str:
    """The text with fences around its examples; an example ends at an empty line."""
    lines: list[str] = []
    indent: str | None = None
    for line in [*text.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines)
