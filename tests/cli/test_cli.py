"""The command line as a program: checks, exit status, unroll, Ctrl-C."""

import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_cases import RECIPE, done, functions, refused, scores, write_case
from forked import forkserver, start_script
from store_cases import NAME, done_rows, flip, folder, make

from trak_lite import __version__, cli
from trak_lite.unrolled import unrolled

USAGE = "Usage: trak-lite"


@pytest.fixture
def path(tmp_path):
    make(str(tmp_path / "a run.zarr"), range(11))
    return str(tmp_path / "a run.zarr")


@pytest.mark.quick
def test_the_exit_status_of_a_check_says_whether_there_is_damage(path, capsys):
    sound = f"{path}: sound; 1 table, 11 rows done, 0 pending, 3 chunks of 168 bytes compared.\n"
    assert done(["check", path], capsys) == sound
    flip(folder(path, "features/c.1.0"))
    assert cli.main(["check", path]) == 1
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith(f"damage  {NAME}  1      4 to 7  features  checksum")
    assert done_rows(path) == list(range(11))
    repaired = done(["check", path, "--repair"], capsys)
    assert f"set aside: chunk 1 (rows 4 to 7 are pending) of {NAME} is in" in repaired
    assert done_rows(path) == [0, 1, 2, 3, 8, 9, 10]
    assert cli.main(["check", "--repair", path]) == 0


def check_into_a_closed_pipe(path, errors):
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["trak-lite", "check", path]
    runpy.run_module("trak_lite", run_name="__main__")


def test_a_closed_pipe_ends_a_command_without_a_traceback(path, tmp_path):
    """As of ``trak-lite check PATH | head -0``."""
    process = forkserver().Process(
        target=check_into_a_closed_pipe, args=(str(path), str(tmp_path / "errors"))
    )
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "errors").read_bytes()) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "trak-lite: the following arguments are required: COMMAND. Try 'trak-lite --help'.\n"),
        (["examine"], "invalid choice: 'examine'"),
        (["check"], "trak-lite check: the following arguments are required: PATH"),
        (["check", "a", "b"], "unrecognized arguments: b"),
        (["check", "a", "--fix"], "unrecognized arguments: --fix"),
        (["check", "no/such"], "trak-lite: There is no store at "),
        (["inspect", "no/such"], "trak-lite: There is no store at "),
        (["report", "no/such"], "trak-lite: There is no store at "),
        (
            ["report", __file__],
            "test_cli.py: it is a file, and a store is a folder. Name that folder; a config names it",
        ),
        (["run"], f"run takes either a config or --from STORE; the config comes first. {USAGE} run (CONFIG"),
        (["run", "a.yaml", "--from", "b"], "run takes either"),
        (["run", "--from"], "--from has no value. Expected --from VALUE."),
        (["report", "a.zarr", "--out"], "--out has no value. Expected --out VALUE."),
        (["report"], f"report needs the path of a store. {USAGE} report (STORE | --from STORE)"),
        (["run", "no/such.yaml"], "There is no config at no/such.yaml"),
    ],
)
def test_wrong_use_exits_with_2_and_one_line(arguments, said, capsys):
    assert said in refused(arguments, capsys)


def test_a_program_without_the_extra_looks_at_stores_and_says_what_to_install(path, tmp_path):
    """A process of its own, as an import elsewhere would hide what the commands import."""
    flip(folder(path, "features/c.1.0"))
    code = (
        "import runpy, sys\n"
        "extra = ('jsonargparse', 'docstring_parser')\n"
        "path, sys.argv = sys.argv[1], ['trak-lite', 'check', sys.argv[1]]\n"
        "try: runpy.run_module('trak_lite', run_name='__main__')\n"
        "except SystemExit as ended: print(ended.code, set(extra) & set(sys.modules))\n"
        "for name in extra: sys.modules[name] = None\n"
        "from trak_lite import cli\n"
        "print(cli.main(['inspect', path]), cli.main(['run', 'x.yaml']))"
    )
    (tmp_path / "script.py").write_text(code)
    process = start_script(tmp_path / "script.py", str(path), output=tmp_path / "output")
    process.join()
    printed = (tmp_path / "output").read_text()
    said = (
        "trak-lite: run needs jsonargparse, which is not installed. Install it with pip install 'trak-lite[cli]' "
        "(in a checkout: pip install -e '.[cli]').\n"
    )
    assert [part for part in ("4 to 7", "\n1 set()\n", "\n0 2\n", said) if part not in printed] == []


def test_the_installed_program_is_the_same_and_says_its_version(capsys):
    setup = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    assert f'{{"console_scripts": ["trak-lite = {cli.__name__}:{cli.main.__name__}"]}}' in setup
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert __version__ in capsys.readouterr().out


# The command unroll

TRAINING = """

def row_losses(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def training(*, num_train: int = 40, width: int = 4):
    from trak_lite.unrolled import SGD, Recipe

    data = train_data(num_train)
    return Recipe(lambda seed: build_model(width), row_losses, data, SGD(lr=0.5), batch_size=10, epochs=2)
"""


def test_unroll_trains_replays_and_finds_its_scores_again(tmp_path, capsys):
    config = write_case(tmp_path, recipe=RECIPE + TRAINING, more="unroll:\n  block: 4\n")
    for option, said in (
        ("task", "Unknown task 'nonsense'"),
        ("name", "'nonsense/' cannot be a target set name"),
    ):
        value = said.split("'")[1]
        assert said in refused(["unroll", config, f"--score.{option}", value], capsys)
    assert not (tmp_path / "run.run").exists()
    out = done(["unroll", config], capsys)
    assert "40 train rows x 6 targets" in out
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run.run").rglob("*.safetensors")}
    assert times
    assert done(["unroll", config], capsys) == out
    assert times == {path: path.stat().st_mtime_ns for path in times}
    recipe = functions(tmp_path)
    targets, task = recipe["target_data"](), "image_classification"
    apart = unrolled(recipe["training"]().train(), targets, task, block=4)
    best = [f"{row} ({apart.numpy()[row, 0]:+.2e})" for row in apart.top(5, target=0).indices]
    assert f"target 0, most helpful rows: {'  '.join(best)}\n" in out
    (named,) = (tmp_path / "run.run").glob("scores.*")
    said = f"There is no store at {tmp_path}/run.run: it is the folder of a run. Its scores are in {named}."
    assert said in refused(["inspect", str(tmp_path / "run.run")], capsys)
    for option in ("--where", "--by"):
        assert f"unknown key {option[2:]!r}" in refused(["unroll", config, option, "source=web"], capsys)
    chosen = ["--train_data.indices", "[1]"]
    assert "Leave out train_data.indices" in refused(["unroll", config, *chosen], capsys)
    none = refused(["unroll", write_case(tmp_path)], capsys)
    assert "needs a function training() that returns a trak_lite.unrolled.Recipe, and defines none" in none
    wrong = RECIPE + "\n\ndef training():\n    return 3\n"
    assert "got int" in refused(["unroll", write_case(tmp_path, recipe=wrong)], capsys)


EDITED = """    path = __import__("pathlib").Path(__file__)
    if not path.read_text().startswith("# edited"):
        path.write_text("# edited\\n\\n" + path.read_text())
"""


def test_a_run_is_refused_if_what_it_was_trained_with_changed_and_not_for_the_rest_of_the_recipe(
    tmp_path, monkeypatch, capsys
):
    """In Python likewise; the file may change while the recipe is in use."""
    now = '    """The loss of each sample."""\n    inputs, labels = batch\n'
    recipe = RECIPE + TRAINING.replace("    inputs, labels = batch\n", now)
    config = write_case(
        tmp_path, recipe=recipe.replace("    from trak_lite.unr", f"{EDITED}    from trak_lite.unr")
    )
    out = done(["unroll", config], capsys)
    assert (tmp_path / "recipe.py").read_text().startswith("# edited")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run.run").rglob("*.safetensors")}
    for other in (recipe, f"# a comment\n{recipe}", recipe.replace('f"row {index}"', '"a row"')):
        assert done(["unroll", write_case(tmp_path, recipe=other)], capsys) == out
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "recipe", raising=False)
    importlib.import_module("recipe").training().train(tmp_path / "run.run")
    monkeypatch.delitem(sys.modules, "recipe")
    assert times == {path: path.stat().st_mtime_ns for path in times}
    for old, new in (('n="none")', 'n="none") * 1.0'), ("row_losses", "losses")):
        said = refused(["unroll", write_case(tmp_path, recipe=recipe.replace(old, new))], capsys)
        assert "was made with other settings" in said


# Ctrl-C

INTERRUPTED = RECIPE.replace(
    "    return data(num_train, 1)",
    """    rows = Interrupted(*data(num_train, 1).tensors)
    rows.interrupted_at = interrupted_at
    return rows


class Interrupted(TensorDataset):
    def __getitem__(self, index):
        if index == self.interrupted_at:
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(index)""",
).replace("train_data(num_train: int = 40)", "train_data(num_train: int = 40, interrupted_at: int = -1)")


@pytest.fixture
def interruptible():
    """SIGINT interrupts; a job in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_run_that_is_interrupted_by_a_signal_says_what_is_safe_and_goes_on_there(tmp_path, capsys):
    recipe = f"import signal\n{INTERRUPTED}"
    config = write_case(tmp_path, recipe=recipe, more="train_data: {batch_size: 8, name: rows}\n")
    command = ["run", config, "--recipe_arguments.interrupted_at=20"]
    assert cli.main(command) == 130
    said = capsys.readouterr().err
    assert "interrupted. The same command continues at the first missing row." in said
    assert f"Stored in {tmp_path}/run.zarr:\n  ckpt-0  16 of 40 rows done" in said
    assert f"To continue: trak-lite {' '.join(command)}\n" in said
    done(["run", config, "--path", str(tmp_path / "whole.zarr")], capsys)
    assert "featurized: 104 rows written, 16 found" in done(command[:2], capsys)
    np.testing.assert_array_equal(scores(tmp_path), scores(tmp_path, path="whole.zarr"))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (RECIPE.replace("return data(6, 2)", "raise KeyboardInterrupt"), "Stored in"),
        (RECIPE.replace("torch.manual_seed(0)", "raise KeyboardInterrupt"), "Nothing was written to"),
        ("raise KeyboardInterrupt", "\ntrak-lite: interrupted before the command started.\n"),
    ],
)
def test_an_interrupt_in_the_recipe_is_told_as_well(recipe, said, tmp_path, capsys):
    assert cli.main(["run", write_case(tmp_path, recipe=recipe)]) == 130
    assert said in capsys.readouterr().err
