"""Shared by the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import write_case

from trak_lite import cli


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run; tests leave it as it is, or copy it."""
    folder = tmp_path_factory.mktemp("ran")
    assert cli.main(["run", write_case(folder)]) == 0
    return folder
