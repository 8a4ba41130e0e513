"""Words of the command line: ours, and those of a script."""

import argparse
import shlex
from typing import NoReturn


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those after ``--``, which are for a script.

    >>> split_words(["trace", "a.py", "--", "--layers", "2"])
    (['trace', 'a.py'], ['--layers', '2'])
    """
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def refuse_words(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: list[str]
) -> NoReturn:
    """End on words that are no options of the subcommand; a script may want them."""
    words = shlex.join(unknown)
    hint = ""
    if "script" in options:
        command = f"{parser.prog} {shlex.quote(str(options.script))} ... -- {words}"
        hint = f". Arguments of the script go after --, as in {command}"
    parser.error(f"unrecognized arguments: {words}{hint}")


def typed_command(options: argparse.Namespace) -> str:
    """The command as it can be typed again."""
    return shlex.join(["torchspmd", *options.words])
