"""Numbers for people."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(number: int) -> str:
    """A size with at most four digits and a unit.

    >>> format_bytes(512), format_bytes(1536), format_bytes(-3 * 2**20)
    ('512 B', '1.50 KiB', '-3.00 MiB')
    """
    value, unit = float(abs(number)), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    sign = "-" if number < 0 else ""
    if unit == 0:
        return f"{sign}{int(value)} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{sign}{value:.{digits}f} {_UNITS[unit]}"
