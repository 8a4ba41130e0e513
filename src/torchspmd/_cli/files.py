"""Files that a command is given, looked at before anything runs."""

from pathlib import Path


def script_problems(script: Path) -> list[str]:
    """Why there is no script to run; empty where there is one."""
    if script.is_dir():
        return [f"{script} is a folder, not a script"]
    return [] if script.is_file() else [f"there is no script {script}"]


def output_problems(path: Path | None, option: str, example: str) -> list[str]:
    """Why nothing can be written there; empty where it can, or none is asked for.

    >>> output_problems(Path("/"), "--out", "report.json")
    ['--out / is a folder: name a file in it, as in /report.json']
    """
    if path is None:
        return []
    if path.is_dir():
        named = path / example
        return [f"{option} {path} is a folder: name a file in it, as in {named}"]
    if not path.absolute().parent.is_dir():
        return [f"there is no folder {path.parent} for {option}"]
    return []
