"""A run that is made once for all modules, each of which serves a copy of its own."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install '.[serve]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")

from serve_cases import finished_run, pages_in, served


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def ran(made, tmp_path_factory):
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("ran") / "copy"))


@pytest.fixture
def copy(ran, tmp_path):
    return Path(shutil.copytree(ran, tmp_path / "copy"))


@pytest.fixture(scope="module")
def client(ran):
    with served(pages_in(ran)) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(ran):
    with served(pages_in(ran, recipe=False)) as opened:
        yield opened
