"""The command line: what it prints, and which exit status says what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trak_lite import __version__, cli
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore

SPEC = TableSpec(num_rows=8, columns=(Column("features", 2, "float32"),), chunk_rows=4)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "a run.zarr")
    with ZarrFeatureStore.create(path, Manifest({"seed": 0})) as store:
        store.create_table("ckpt-0", SPEC).put(0, {"features": np.ones((8, 2), np.float32)})
    return path


def damage(path: str) -> None:
    Path(path, "ckpt-0", "features", "c.1.0").write_bytes(bytes(32))


def pending(path: str) -> list[int]:
    with ZarrFeatureStore.open(path) as store:
        return store.open_table("ckpt-0").pending().tolist()


def test_a_sound_store_exits_with_0(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", path]) == 0

    out, err = capsys.readouterr()
    assert out == f"{path}: sound; 1 table, 8 rows done, 0 pending, 2 chunks of 64 bytes compared.\n"
    assert err == ""


def test_a_damaged_store_exits_with_1_and_names_chunk_and_rows(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path)
    assert cli.main(["check", path]) == 1

    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith("damage  ckpt-0  1      4 to 7  features  checksum")
    assert pending(path) == []


def test_a_repair_exits_with_0_and_leaves_the_rows_pending(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path)
    assert cli.main(["check", path, "--repair"]) == 0

    assert "set aside: chunk 1 (rows 4 to 7 are pending) of ckpt-0 is in" in capsys.readouterr().out
    assert pending(path) == [4, 5, 6, 7]
    assert cli.main(["check", "--repair", path]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "trak-lite: the following arguments are required: COMMAND. Try 'trak-lite --help'.\n"),
        (["examine"], "invalid choice: 'examine'"),
        (["check"], "trak-lite check: the following arguments are required: PATH"),
        (["check", "a", "b"], "unrecognized arguments: b"),
        (["check", "a", "--fix"], "unrecognized arguments: --fix"),
    ],
)
def test_wrong_use_exits_with_2_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)

    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_path_without_a_store_exits_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(tmp_path / "nothing")]) == 2

    err = capsys.readouterr().err
    assert err.startswith(f"trak-lite: There is no store at {tmp_path}/nothing")
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_version_and_the_help_go_to_standard_output(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([option])

    assert caught.value.code == 0
    assert {"--version": __version__, "--help": "check"}[option] in capsys.readouterr().out


def test_the_module_runs_as_a_program(path: str) -> None:
    damage(path)
    command = [sys.executable, "-m", "trak_lite", "check", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "4 to 7" in done.stdout
    assert done.stderr == ""


def test_the_installed_program_is_the_same() -> None:
    setup = ast.parse((Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8"))
    (call,) = (
        node for node in ast.walk(setup) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    )
    points = next(ast.literal_eval(word.value) for word in call.keywords if word.arg == "entry_points")

    assert points == {"console_scripts": [f"trak-lite = {cli.__name__}:{cli.main.__name__}"]}
