"""The memory account as text: the verdict first, then what holds memory and what to do."""

from collections.abc import Iterator, Sequence

from torchspmd.predict.memory import Fits, MemoryAccount
from torchspmd.predict.suggestions import Suggestion
from torchspmd.rehearse.recording import Site

__all__ = ["describe_memory", "size_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """Bytes in the unit that people say them in.

    >>> size_text(1536), size_text(-5 * 2**30)
    ('1.50 KiB', '-5.00 GiB')
    """
    value, place = float(nbytes), 0
    while abs(value) >= 1024 and place < len(_UNITS) - 1:
        value /= 1024
        place += 1
    return f"{value:.2f} {_UNITS[place]}" if place else f"{nbytes:.0f} B"


def describe_memory(
    account: MemoryAccount, suggestions: Sequence[Suggestion] = (), *, most: int = 8
) -> str:
    """The account in lines of plain text.

    Args:
        account: Of ``count_memory``.
        suggestions: Of ``suggest``.
        most: Holders and suggestions that are listed.
    """
    return "\n".join(
        [
            *_verdict(account),
            "",
            *_peaks(account),
            "",
            *_at_the_peak(account, most),
            *_suggested(suggestions, most),
            "",
            "Outside of the caching allocator (assumed):",
            *(
                f"  {size_text(part.nbytes):>11}  {part.name} ({part.source})"
                for part in account.fixed
            ),
        ]
    )


def _verdict(account: MemoryAccount) -> Iterator[str]:
    gpu, total = account.gpu.title, account.gpu.nbytes("total")
    if account.failure is not None:
        failure = account.failure
        yield (
            f"OUT OF MEMORY on {gpu}: {size_text(failure.nbytes)} are asked for "
            f"{_where(failure.site)}"
            + (f" by {failure.op}" if failure.op else "")
            + f", with {size_text(failure.allocated)} allocated, "
            f"{size_text(failure.reserved)} reserved and {size_text(failure.outside)} "
            f"taken by CUDA and NCCL, of {size_text(total)}."
        )
        yield f"The whole run would need {size_text(-account.margin)} more."
        return
    left = (
        f"{size_text(account.margin)} of {size_text(total)} are left at the worst time"
    )
    if account.fits is Fits.YES:
        yield f"Fits on {gpu}: {left}."
        return
    why = "less than the error of this prediction"
    if account.retries:
        why = (
            f"the allocator gives its cache back {account.retries} times, which is slow"
        )
    yield f"AT RISK on {gpu}: {left}; {why}."


def _where(site: Site) -> str:
    place = f"in {site.module}" if site.module else "outside of modules"
    line = f" at {_line(site.line)}" if site.line else ""
    return f"{place}, {site.phase.value} of step {site.step}{line}"


def _line(line: str) -> str:
    """File and line, and the function where there is one."""
    return line.removesuffix(" <module>")


def _peaks(account: MemoryAccount) -> Iterator[str]:
    yield f"  {'':15} {'allocated':>11} {'reserved':>11}"
    for period, peak in account.peaks.items():
        mark = " <- peak" if period is account.peak_period else ""
        yield (
            f"  {period.value:15} {size_text(peak.allocated):>11} "
            f"{size_text(peak.reserved):>11}{mark}"
        )
    yield f"  {'between steps':15} {size_text(account.steady):>11}"
    yield (
        f"  {account.fragmentation:.1%} of the reserved peak is not allocated "
        "(fragments and cache)"
    )


def _at_the_peak(account: MemoryAccount, most: int) -> Iterator[str]:
    yield f"At the peak, {_where(account.peak.site)}:"
    for category, nbytes in account.by_category().items():
        yield f"  {size_text(nbytes):>11}  {category}"
    yield "Largest holders there:"
    for holder in account.holders(most=most):
        what = holder.name or holder.module
        of = f" of {what}" if what else ", outside of modules"
        count = f"{holder.storages} x " if holder.storages > 1 else ""
        line = f", {_line(holder.line)}" if holder.line else ""
        yield (f"  {size_text(holder.nbytes):>11}  {count}{holder.category}{of}{line}")


def _suggested(suggestions: Sequence[Suggestion], most: int) -> Iterator[str]:
    if suggestions:
        yield "What would lower the peak most (each by itself):"
    for each in suggestions[:most]:
        yield f"  {size_text(each.saved_bytes):>11}  {each.text} ({each.of}; {each.how})"
