"""What `pip install` gives a user: the wheel in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from pages import ROOT

SOURCE = ("pyproject.toml", "README.md", "LICENSE")
NOT_PACKAGED = re.compile(r"/__pycache__/|\.egg-info/")


def _run(*command, folder):
    """Run a command as a user would, without this checkout on the path."""
    own = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources: building writes beside them."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        shutil.copy(ROOT / name, folder)
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=skipped)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    flags = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist")
    returned, output = _run(*pip, *flags, ".", folder=folder)
    assert returned == 0, output
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of a new environment with the wheel, which finds torch in this one."""
    folder = tmp_path_factory.mktemp("environment")
    returned, output = _run(
        sys.executable, "-m", "venv", "--without-pip", folder, folder=folder
    )
    assert returned == 0, output
    python = folder / "bin" / "python"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
    )
    returned, output = _run(
        *pip, "install", "--no-index", "--no-deps", wheel, folder=folder
    )
    assert returned == 0, output
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # Files of the name *.pth in there are not read: this checkout stays out.
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "torch_of_the_tests.pth").write_text("\n".join(paths) + "\n")
    return folder


def test_it_holds_the_package_and_its_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and not NOT_PACKAGED.search(path.as_posix())
    }
    assert "torchspmd/py.typed" in expected
    assert "torchspmd/predict/hardware/h100.toml" in expected
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == expected


def test_the_command_works_and_pytest_finds_the_plugin(environment):
    returned, output = _run(environment / "bin" / "torchspmd", "doctor", folder="/")
    assert returned == 0, output
    assert "works  simulated ranks" in output
    code = (
        "import importlib.metadata as m, importlib.util as u; "
        "print(u.find_spec('torchspmd').origin); print(m.version('torchspmd')); "
        "print([e.name for e in m.entry_points(group='pytest11')"
        " if e.value == 'pytest_torchspmd'])"
    )
    returned, found = _run(environment / "bin" / "python", "-c", code, folder="/")
    assert returned == 0, found
    path, version, plugins = found.splitlines()
    assert Path(path).is_relative_to(environment)  # and so is that of the command
    assert output.startswith(f"torchspmd {version}, ")
    assert "pytest_torchspmd" in plugins


USER = """\
from torchspmd import load_ledger

ledger = load_ledger("ledger.json")
count: int = ledger.total(axis="tp").count
wrong: str = ledger.total(axis="tp").count
"""
SETTINGS = """\
[mypy]
[mypy-torch.*]
follow_imports = skip
"""


def test_a_type_checker_sees_the_types(environment):
    (environment / "user.py").write_text(USER)
    (environment / "mypy.ini").write_text(SETTINGS)
    returned, output = _run(
        *(sys.executable, "-m", "mypy", "--config-file", "mypy.ini"),
        *("--python-executable", environment / "bin" / "python"),
        *("--cache-dir", os.devnull, "user.py"),
        folder=environment,
    )
    assert returned == 1, output
    lines = [line for line in output.splitlines() if ": error: " in line]
    assert [line.split(":")[1] for line in lines] == ["5"], output
    assert '(expression has type "int", variable has type "str")' in lines[0]
