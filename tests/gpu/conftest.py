"""The GPU tier: skipped, with the reason, on machines without a CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix() and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
