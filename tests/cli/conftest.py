"""One run of the command line, made once for all tests."""

import shutil
from pkgutil import resolve_name

import pytest
from cli_cases import write_case

from trak_lite import cli


@pytest.fixture(autouse=True, scope="module")
def _parsers_are_made_once():
    """A command makes a parser of all keys and one of each key given, which took a third of the time here."""
    made, kept = resolve_name("trak_lite.cli.configs:_parser"), {}

    def parser_of(keys, **texts):
        asked = repr((keys, texts))
        return kept[asked] if asked in kept else kept.setdefault(asked, made(keys, **texts))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trak_lite.cli.configs._parser", parser_of)
        yield


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """The folder of a run; tests leave it as it is, or copy it."""
    folder = tmp_path_factory.mktemp("ran")
    assert cli.main(["run", write_case(folder)]) == 0
    return folder


@pytest.fixture
def copied(ran, tmp_path, monkeypatch):
    """A copy of the run in a folder of its own, where relative paths begin."""
    shutil.copytree(ran, tmp_path / "copy")
    write_case(tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"
