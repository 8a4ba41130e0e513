"""The store of a rehearsed rank, which has no others to meet."""

from typing import Any

import torch.distributed as dist

from torchspmd.errors import UsageError

__all__ = ["OneRankStore"]


class OneRankStore(dist.Store):  # type: ignore[name-defined, misc]
    """Keys by which ranks tell each other something: the others do as this one does."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Text is kept as bytes."""
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        """What was set.

        Raises:
            UsageError: Another rank would have set it.
        """
        if key not in self._values:
            raise UsageError(
                f"store.get({key!r}): another rank would set it, and only rank "
                f"{self._rank} is rehearsed here, which has not. Put what ranks tell "
                "each other by a store behind an option, or use broadcast_object_list."
            )
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """As much is added by each rank."""
        every = int(self._values.get(key, b"0")) + amount * self._size
        self.set(key, every)
        return every

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set it where it has the expected value, or none."""
        before = self._values.get(key)
        if before is None or before == expected or before.decode() == expected:
            self.set(key, desired)
        return self._values[key]

    def append(self, key: str, value: Any) -> None:
        """Behind what is there."""
        before = self._values.get(key, b"")
        self.set(key, value)
        self._values[key] = before + self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Of each."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Each."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whoever is to set them has."""
        return True

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """As in ``check``."""

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many there are."""
        return len(self._values)

    # By these names C++ asks.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """``append`` and those of several keys."""
        return True

    def set_timeout(self, timeout: Any) -> None:
        """Nothing is waited for."""
