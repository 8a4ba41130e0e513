"""What changed between two ledgers, by module and kind."""

from dataclasses import dataclass

from torchspmd.comm.ledger import Ledger, Total

# What makes two rows the same communication. The operator's spelling is left out: a
# compiled step reduces in place what an eager one reduces out of place.
_IDENTITY = ("module", "kind", "axis", "dtype", "phase", "implicit")


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of communication of one module that differs."""

    module: str
    kind: str
    axis: str
    dtype: str
    phase: str
    implicit: bool
    before: Total
    after: Total

    @property
    def added_count(self) -> int:
        """How many more there are after; negative for fewer."""
        return self.after.count - self.before.count

    @property
    def added_bytes(self) -> int:
        """How many more payload bytes there are after."""
        return self.after.payload_bytes - self.before.payload_bytes


def diff_ledgers(before: Ledger, after: Ledger) -> tuple[Change, ...]:
    """Every row that differs, ordered by module, kind, axis, dtype and phase.

    >>> diff_ledgers(Ledger(), Ledger())
    ()
    """
    old, new = before.total_by(*_IDENTITY), after.total_by(*_IDENTITY)
    changes = []
    for identity in sorted({*old, *new}, key=lambda key: tuple(map(str, key))):
        was, now = old.get(identity, Total()), new.get(identity, Total())
        if was != now:
            module, kind, axis, dtype, phase, implicit = identity
            changes.append(
                Change(
                    str(module),
                    str(kind),
                    str(axis),
                    str(dtype),
                    str(phase),
                    bool(implicit),
                    was,
                    now,
                )
            )
    return tuple(changes)
