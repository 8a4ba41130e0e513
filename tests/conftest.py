"""Fixtures for all tiers: real ranks that are started once for the whole run."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from torchspmd.testing import Ranks

# The same examples in every run; `--hypothesis-profile explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=500, deadline=None)
settings.load_profile("repeatable")


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
