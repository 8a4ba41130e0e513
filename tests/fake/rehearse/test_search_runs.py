"""Searches from end to end: candidates in processes of their own."""

import re

import pytest
from search_builds import train

from torchspmd.errors import UsageError
from torchspmd.predict.search import search


def test_a_function_is_searched_with_few_of_its_blocks():
    space = {"layers": [24], "width": [4096, 65536]}
    result = search(train, space, gpu="h100", repeat="layers", jobs=2)
    assert result.best.candidate.values == {"layers": 24, "width": 4096}
    assert [each.candidate.values["width"] for each in result.too_large] == [65536]
    (note,) = result.notes
    assert re.search(r"with all blocks: extended, the step is [+-]0\.\d% and", note)


def test_an_argument_that_is_not_there_cannot_be_repeated():
    with pytest.raises(
        UsageError, match="repeat='depth' is no argument: there are wid"
    ):
        search(train, {"width": [1]}, gpu="h100", repeat="depth")
