"""Modules of numbered layers as one: paths without their numbers, and with them again."""

from torchspmd.comm.folding import ranges

#: Of each place in a path that is a number, the numbers that were seen there.
Numbers = tuple[tuple[int, ...], ...]


def without_numbers(path: str) -> tuple[str, Numbers]:
    """A path with ``#`` for numbers, and the numbers.

    >>> without_numbers("GPT.layers.3.mlp")
    ('GPT.layers.#.mlp', ((3,),))

    One of several modules of a class that no other module calls has its number behind it:

    >>> without_numbers("Block#3.mlp")
    ('Block#.mlp', ((3,),))
    """
    words, numbers = [], []
    for word in path.split("."):
        name, mark, number = (
            ("", "#", word) if word.isdecimal() else word.rpartition("#")
        )
        is_numbered = bool(mark) and number.isdecimal()
        words.append(f"{name}#" if is_numbered else word)
        if is_numbered:
            numbers.append((int(number),))
    return ".".join(words), tuple(numbers)


def united(one: Numbers, other: Numbers) -> Numbers:
    """The numbers of both, place by place; nothing is known of an empty one.

    >>> united(((0, 1),), ((3,),))
    ((0, 1, 3),)
    """
    if not one:
        return other
    return tuple(
        a if set(b) <= set(a) else tuple(sorted({*a, *b}))
        for a, b in zip(one, other, strict=True)
    )


def with_numbers(path: str, numbers: Numbers) -> str:
    """The path with its numbers again.

    >>> with_numbers("GPT.layers.#.mlp", ((0, 1, 3),))
    'GPT.layers.[0-1,3].mlp'
    >>> with_numbers("Block#.mlp", ((2, 3),))
    'Block#[2-3].mlp'
    """
    rest = iter(numbers)
    words = []
    for word in path.split("."):
        if word.endswith("#"):
            found = next(rest, ())
            text = f"[{ranges(found)}]" if len(found) > 1 else ranges(found)
            words.append(text or word if word == "#" else word + text)
        else:
            words.append(word)
    return ".".join(words)
