"""Shared by all tests: one thread, so that results are bitwise repeatable, and the cuda marker."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU, with the reason, where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)
