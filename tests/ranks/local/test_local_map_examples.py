"""The worked examples agree with one device."""

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run_compare(path: str) -> tuple[float, float]:
    return runpy.run_path(path)["compare"]()


@pytest.mark.parametrize("name", ["ring_attention.py", "vocab_lookup.py"])
def test_example(name: str, ranks: Any) -> None:
    for forward, backward in ranks.run(run_compare, str(EXAMPLES / name)):
        assert forward < 1e-12
        assert backward < 1e-11


def test_examples_are_short() -> None:
    for name in ("ring_attention.py", "vocab_lookup.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) < 150
