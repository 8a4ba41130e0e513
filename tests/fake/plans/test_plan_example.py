"""The example runs as it stands."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "parallelize_llama.py"


def test_parallelize_llama(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    text = capsys.readouterr().out
    assert "model.layers.[0-3].mlp.down_proj" in text
    *_, foretold, recorded = text.splitlines()
    assert foretold.removeprefix("foretold: ") == recorded.removeprefix("recorded: ")
    assert recorded.startswith("recorded: 19 collectives")
