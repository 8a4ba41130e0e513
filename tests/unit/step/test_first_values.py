"""When parameters are compared between ranks: until a program was made."""

import pytest

from torchspmd.step.progress import Progress, when_done

pytestmark = pytest.mark.unit


def test_a_failed_capture_is_not_done():
    called = []
    with pytest.raises(ValueError, match="failed"), Progress("compile"):
        when_done(lambda: called.append("failed"))
        raise ValueError("failed")
    with Progress("compile"):
        when_done(lambda: called.append("made"))
        assert not called
    assert called == ["made"]
