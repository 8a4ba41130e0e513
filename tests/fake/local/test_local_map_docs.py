"""The examples of docs/local_map.md run."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fake

PAGE = Path(__file__).parents[3] / "docs" / "local_map.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_example_of_the_page(code: str) -> None:
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
