"""Every block of code and every command that the documentation shows runs as written."""

import pytest
from pages import ROOT, find_blocks, run_page
from processes import run_forked


PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if find_blocks(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs(page, tmp_path):
    done = run_forked(run_page, page, folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_wrong_is_found(tmp_path):
    page = tmp_path / "page.md"
    for text in (
        "```python\nassert False\n```\n",
        "<!-- python\nassert False\n-->\n",
        "```console\n$ torchspmd --version\n9.9.9\n```\n",
        "```console\n$ ls\n```\n",
    ):
        page.write_text(text)
        folder = tmp_path / str(len(text))
        folder.mkdir()
        assert run_forked(run_page, page, folder=folder).returncode == 1
