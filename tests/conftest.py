"""Fixtures for all tiers: real ranks that are started once for the whole run."""

from collections.abc import Iterator

import pytest

from torchspmd.testing import Ranks


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
