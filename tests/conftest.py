"""Shared by all tests: one thread, so that results are bitwise repeatable, and the cuda and campaign markers."""

from __future__ import annotations

import pytest
import torch
from tiers import mark_campaign

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the campaign; skip what needs a GPU, with the reason, where there is none."""
    mark_campaign(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)
