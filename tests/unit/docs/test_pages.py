"""The documentation holds together: links lead somewhere, every error has its section."""

import inspect
import re
import tomllib
import traceback

import pytest
from pages import ROOT

from torchspmd import errors
from torchspmd._cli import main


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ERRORS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__
]


def _text(page):
    """The page without what is shown as code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page):
    """The anchors of the headings, as the site and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[\s-]+", "-", word) for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert menu == {
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    }


DESIGN = (ROOT / "docs" / "design.md").read_text()
STEP = ROOT / "src" / "torchspmd" / "step"


def test_the_design_draws_the_tree_of_the_step():
    """Every file is in it, in the order in which modules may import each other."""
    (drawn,) = re.findall(r"^```\nstep/\n(.*?)^```", DESIGN, re.DOTALL | re.MULTILINE)
    folder, files, tops = "", [], []
    for line in drawn.splitlines():
        if line.startswith(" " * 6):
            files += [folder + name for name in line.split()]
        else:
            top = line.split()[0]
            tops.append(top.removesuffix("/").removesuffix(".py"))
            folder = top if top.endswith("/") else ""
            files += [] if folder else [top]
    found = {path.relative_to(STEP).as_posix() for path in STEP.rglob("*.py")}
    assert sorted(files) == sorted(
        path for path in found if not path.endswith("__init__.py")
    )
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (layers,) = (
        contract["layers"]
        for contract in contracts["importlinter"]["contracts"]
        if contract["name"] == "inside the step"
    )
    rows = {name: n for n, row in enumerate(layers) for name in row.split(" | ")}
    assert sorted(tops) == sorted(rows)
    assert [rows[top] for top in tops] == sorted(rows[top] for top in tops)


def test_the_design_names_files_that_exist():
    root = STEP.parent
    known = [path.as_posix() for path in root.rglob("*.py")]
    known += [path.as_posix() for path in (ROOT / "benchmarks").glob("*.py")]
    known += [path.as_posix() for path in (ROOT / "tests").rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", DESIGN)
    assert len(named) > 40
    assert [n for n in named if not any(k.endswith(f"/{n}") for k in known)] == []


@pytest.mark.parametrize("package", ["rehearse", "predict"])
def test_the_walk_of_a_prediction_names_every_file(package):
    (walk,) = re.findall(r"^\*\*A prediction\*\*.*?(?=^\*\*)", DESIGN, re.DOTALL | re.MULTILINE)
    files = {path.name for path in (STEP.parent / package).glob("*.py")}
    named = {name.split("/")[-1] for name in re.findall(r"`([\w/]+\.py)`", walk)}
    assert files - named == {"__init__.py"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("error", ERRORS[1:], ids=lambda error: error.__name__)
def test_every_error_has_a_section_with_cause_and_fix(error):
    name = error.__name__
    pages = [
        page
        for page in (ROOT / "docs" / "errors").glob("*.md")
        if re.search(rf"^## {name}$", page.read_text(), re.MULTILINE)
    ]
    assert len(pages) == 1, f"write '## {name}' on a page of docs/errors"
    here = f"{pages[0].name}#{name.lower()}"
    assert f"[`{name}`]({here})" in (ROOT / "docs/errors/index.md").read_text()
    if getattr(error, "page", ""):
        assert error.page == f"docs/errors/{here}"


def test_a_traceback_ends_with_the_page():
    shown = traceback.format_exception(errors.PlanError("text"))
    assert "".join(shown) == (
        "torchspmd.errors.PlanError: text\n"
        "Causes and fixes: docs/errors/layouts.md#planerror\n"
    )
    assert str(errors.PlanError("text")) == "text"
    assert not errors.UsageError("text").__notes__  # the text says it all


def test_every_command_is_on_the_page_of_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)\s", capsys.readouterr().out, re.MULTILINE)
    page = (ROOT / "docs" / "command_line.md").read_text()
    assert "trace" in commands
    assert [name for name in commands if f"| `torchspmd {name}" not in page] == []
