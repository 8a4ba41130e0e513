"""Clipping that would do nothing is refused."""

import pytest

from torchspmd import clip_grad_norm_
from torchspmd.errors import UsageError


def test_no_parameters():
    with pytest.raises(
        UsageError, match="no parameters were given, so nothing would be"
    ):
        clip_grad_norm_([], 1.0)
