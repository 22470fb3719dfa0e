"""Shared by the tests of projectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads that torch may use; a sketch slices rows over them, from eight rows on."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
