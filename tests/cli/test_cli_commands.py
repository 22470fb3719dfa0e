"""The commands on a small recipe: the numbers of the native facade, resumed, recorded and repeated."""

import fcntl
import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import RECIPE, done, functions, opened, put_records, records, refused, typed, write_case
from cli_cases import scores as scores_of

from trak_lite import Attributor, cli, repair, verify, what_if
from trak_lite.methods import GaussNewton
from trak_lite.projectors import PROJECTORS
from trak_lite.store import Column, Manifest, TableSpec, ZarrFeatureStore, open_store

SIGNS = """
from trak_lite.projectors import PROJECTORS, AbstractProjector, ProjectionType


class Signs(AbstractProjector):
    def __init__(self, proj_dim, *, seed=0):
        super().__init__(0, proj_dim, seed, ProjectionType.rademacher, None)

    def project(self, grads, model_id):
        return sum(self.rows(name, grad.flatten(1)) for name, grad in grads.items())

    def rows(self, name, grad):
        generator = torch.Generator().manual_seed(len(name))
        return grad @ torch.randn(grad.shape[1], self.proj_dim, generator=generator).sign()


PROJECTORS["signs"] = Signs
"""


def native(folder: Path, task: str = "image_classification", *, trained: bool = True) -> tuple[Any, ...]:
    """The facade, featurized as the recipe of a folder is, and the targets."""
    recipe, states = functions(folder), None
    if trained:
        states = [{k: v.clone() for k, v in state.items()} for state in recipe["train"](np.arange(40), 0)]
    attributor = Attributor(recipe["build_model"](), task, None, proj_dim=16)
    attributor.featurize(recipe["train_data"](), states)
    return attributor, recipe["target_data"]()


def empty_store(folder: Path, fingerprint: dict[str, str] | None = None) -> str:
    with ZarrFeatureStore.create(folder / "a.zarr", Manifest(fingerprint or {})):
        return str(folder / "a.zarr")


@pytest.mark.parametrize("method", [None, "fisher", {"name": "EKFAC", "damping": 0.3}])
def test_scores_are_those_of_the_native_facade(method, ran, copied, capsys):
    """A curvature that the method needs is fitted."""
    if method is not None:
        done(["score", str(copied / "run.yaml"), "--score.method", str(method)], capsys)
    attributor, targets = native(ran)
    found = opened(copied).scores("held-out", method=method).numpy()
    np.testing.assert_array_equal(found, attributor.score(targets, method=method).numpy())


def test_a_run_says_what_it_did_and_does_nothing_twice(ran, tmp_path, capsys):
    config = write_case(tmp_path)
    first, again = done(["run", config], capsys), done(["run", config], capsys)
    said = [f"trained: 3 checkpoints in {tmp_path}/trained", "featurized: 120 rows written, 0 found"]
    said += ["Scores('held-out': 40 train rows x 6 targets)", "target 2, most harmful rows: "]
    assert [text for text in said if text not in first] == []
    names = f"{tmp_path}/run.zarr --recipe {tmp_path}/recipe.py"
    following = [line.partition("  (")[0].split("trak-lite ")[1].rstrip() for line in first.splitlines()[-3:]]
    assert following == [f"{command} {names}" for command in ("serve", "report", "verify --from")]
    assert first.splitlines()[-3].startswith("next: trak-lite ")
    assert "trained" not in again.splitlines()[0]
    assert "featurized: 0 rows written, 120 found" in again
    apart = ["--path", str(tmp_path / "apart.zarr")]
    assert "120 rows written" in done(["featurize", config, *apart], capsys)
    assert "40 train rows x 6 targets" in done(["score", config, *apart], capsys)
    np.testing.assert_array_equal(scores_of(tmp_path, path="apart.zarr"), scores_of(ran))


def test_a_plan_measures_and_writes_nothing(ran, copied, tmp_path, capsys):
    config = write_case(tmp_path)
    shown = done(["plan", config], capsys)
    assert f"There is no checkpoint at {tmp_path}/trained: for one checkpoint" in shown
    assert "40 rows x 1 checkpoints, 6 targets, batches of 32" in shown
    assert "gradients: hook (" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.py", "run.yaml", "copy"}
    before = records(copied / "run.zarr")
    assert "40 rows x 3 checkpoints" in done(["plan", str(copied / "run.yaml")], capsys)
    assert records(copied / "run.zarr") == before


COLUMNS = """

def columns(num_train: int = 40):
    rows = range(num_train)
    return {"source": ["web" if i % 3 else "book" for i in rows], "year": [2020 + i // 25 for i in rows]}
"""


def test_columns_of_the_recipe_filter_and_group_what_is_printed(tmp_path, capsys):
    config = write_case(tmp_path, recipe=RECIPE + COLUMNS)
    chosen = ["--where", "source=web", "--where", "year=2020", "--by", "source"]
    shown = done(["run", config, *chosen], capsys)
    matrix = scores_of(tmp_path).astype(np.float64)
    rows = np.array([i for i in range(40) if i % 3 and i < 25])
    best = rows[np.argsort(-matrix[rows, 1], kind="stable")[:5]]
    listed = "  ".join(f"{row} ({matrix[row, 1]:+.2e})" for row in best)
    assert f"target 1, most helpful rows: {listed}" in shown
    mean = f"  {matrix[rows].mean():+.2e}  web ({len(rows)} rows)\n"
    assert f"mean score over all targets by source:\n{mean}" in shown
    again = done(["score", config, "--by", "year"], capsys)
    means = sorted([(matrix[:25].mean(), 2020, 25), (matrix[25:].mean(), 2021, 15)], reverse=True)
    lines = [f"  {value:+.2e}  {year} ({count} rows)\n" for value, year, count in means]
    assert again.endswith("mean score over all targets by year:\n" + "".join(lines))
    assert "Unknown columns: ['colour']" in refused(["score", config, "--by", "colour"], capsys)
    other = ["--path", str(tmp_path / "other.zarr"), "--checkpoints", str(tmp_path / "other")]
    for unknown in (["--by", "colour"], ["--where", "colour=red"]):
        assert "Unknown columns: ['colour']" in refused(["run", config, *other, *unknown], capsys)
    assert not (tmp_path / "other").exists()  # nothing was trained
    assert "--where must be NAME=VALUE" in refused(["score", config, "--where", "web"], capsys)
    some = ["--train_data.indices", "[5, 0, 39]", "--path", str(tmp_path / "some.zarr"), "--score.name=some"]
    assert "9 rows written" in done(["featurize", config, *some], capsys)
    grouped = done(["score", config, *some, "--by", "source"], capsys)
    assert set(re.findall(r"  (\w+ \(\d rows\))\n", grouped)) == {"web (1 rows)", "book (2 rows)"}


def test_targets_of_another_task_are_scored_by_the_command_line(tmp_path, capsys):
    """And without checkpoints, the model is taken as the recipe builds it."""
    recipe = RECIPE.replace("nn.Linear(width, 2)", "nn.Linear(width, 1)").replace(".long())", ".float())")
    config = write_case(tmp_path, recipe=recipe)
    plain = ["--checkpoints", "null", "--task", "binary_classification"]
    assert "40 rows written, 0 found, checkpoints current" in done(["run", config, *plain], capsys)
    assert not (tmp_path / "trained").exists()
    asked = done(["score", config, *plain, "--score.task", "regression", "--score.name", "other"], capsys)
    assert "task=regression" in asked
    attributor, targets = native(tmp_path, "binary_classification", trained=False)
    with open_store(tmp_path / "run.zarr") as store:
        found = store.open_table("scores/other").read("scores")
    np.testing.assert_array_equal(found, attributor.score(targets, task="regression").numpy())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--score.task=regresion", "--score.method=EKFAC"], "Did you mean 'regression'?"),
        (["--score.k=3"], "k=3 needs dense=False"),
        (["--score.k=0", "--score.dense=false"], "k must be an integer of at least 1, got 0"),
        (["--score.recall=0.9"], "recall=0.9 must be above 0 and below 1, and needs dense=False and k"),
    ],
)
@pytest.mark.parametrize("command", ["run", "score"])
def test_wrong_arguments_of_scores_are_refused_before_a_training(command, options, said, tmp_path, capsys):
    assert said in refused([command, write_case(tmp_path), *options], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.py", "run.yaml"]


def test_a_training_that_fails_leaves_no_checkpoint(tmp_path):
    failing = "        yield model.state_dict()\n        1 / 0"
    recipe = RECIPE.replace("        yield model.state_dict()", failing)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", write_case(tmp_path, recipe=recipe)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.py", "run.yaml"]


def test_the_checkpoints_of_another_process_that_was_faster_are_taken(tmp_path, capsys):
    """What a killed training left is removed, unless a process holds its lock, however old it is."""
    left, living = tmp_path / ".trained.new-left", tmp_path / ".trained.new-living"
    for folder in (left, living):
        folder.mkdir()
        (folder / "checkpoint-1.safetensors").touch()
        os.utime(folder, (0, 0))
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    recipe = RECIPE.replace(
        "        yield model.state_dict()",
        "        yield model.state_dict()\n"
        "    import os, safetensors.torch\n"
        f"    os.makedirs('{tmp_path}/trained', exist_ok=True)\n"
        f"    safetensors.torch.save_file(build_model().state_dict(), '{tmp_path}/trained/theirs.safetensors')\n",
    )
    done(["run", write_case(tmp_path, recipe=recipe)], capsys)
    os.close(held)
    assert [path.name for path in (tmp_path / "trained").iterdir()] == ["theirs.safetensors"]
    assert list(tmp_path.glob(".trained.new-*")) == [living]


def test_checkpoints_of_another_training_are_refused_and_those_without_a_note_are_taken(copied, capsys):
    """Also with another store, which has no rows of the earlier data to compare with."""
    recipe = RECIPE.replace("def train(", "RATE = 0.5\n\n\ndef train(").replace("lr=0.5", "lr=RATE")
    edits = {
        "train_seed is 0 there, 3 here": ([], ["--train_seed=3"]),
        "recipe_arguments.steps is '3' there, '4' here": ([], ["--recipe_arguments.steps=4"]),
        "dataset.tensors": (["(x[:, 0] > 0)", "(x[:, 1] > 0)"], []),
        "dataset.num_rows is 40 there, 36 here": (["num_train: int = 40", "num_train: int = 36"], []),
    }
    config, other = write_case(copied, recipe=recipe), ["--path", str(copied / "other.zarr")]
    place = ["--checkpoints", str(copied / "own")]
    done(["run", config, *place], capsys)
    for said, (edit, options) in edits.items():
        write_case(copied, recipe=recipe.replace(*edit) if edit else recipe)
        told = refused(["run", config, *place, *other, *options], capsys)
        assert said in told
        assert f"The training of the checkpoints in {copied}/own was made with" in told
    assert not (copied / "other.zarr").exists()
    for said, edit in {
        "train().source": ["for _ in range(steps)", "for _ in range(2 * steps)"],
        "global variables.RATE is '0.5' there, '0.1' here": ["RATE = 0.5", "RATE = 0.1"],
    }.items():
        write_case(copied, recipe=recipe.replace(*edit))
        with pytest.warns(UserWarning, match=re.escape(said)):
            assert "0 rows written, 120 found" in done(["run", config, *place], capsys)
    longer = "x, y = data(num_train, 1).tensors; return TensorDataset(torch.cat([x, x[:4]]), torch.cat([y, y[:4]]))"
    write_case(copied, recipe=recipe.replace("return data(num_train, 1)", longer))
    with pytest.warns(UserWarning, match=re.escape("global variables.train_data.source")):
        told = done(["featurize", config, *place, "--featurize.append=true"], capsys)
    assert "12 rows written, 120 found" in told
    with (
        pytest.warns(UserWarning, match=re.escape("global variables.train_data.source")),
        pytest.warns(UserWarning, match="were trained on the first 40 of the 44 train rows"),
    ):
        assert "0 rows written, 132 found" in done(["featurize", config, *place], capsys)
    shutil.rmtree(copied / "run.zarr")
    write_case(copied, recipe=f"# {__name__}\n{recipe}".replace('f"row {index}"', '"a row"'))
    assert "120 rows written, 0 found" in done(["run", config, *place], capsys)
    (copied / "own/trained-with.json").unlink()
    assert "0 rows written, 120 found" in done(["run", config, *place, "--train_seed=3"], capsys)


def test_a_damaged_or_missing_checkpoint_is_refused_until_all_are_trained_again(copied, capsys):
    config, file = str(copied / "run.yaml"), copied / "trained/checkpoint-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"~")
    told = refused(["run", config], capsys)
    assert "does not match its checksum" in told
    assert "Delete its folder, and make the call again" in told
    file.unlink()
    assert "holds 2 of the 3 checkpoints of its training. Delete the folder" in refused(
        ["run", config], capsys
    )
    shutil.rmtree(copied / "trained")
    again = done(["run", config], capsys)
    assert "trained: 3 checkpoints" in again
    assert "0 rows written, 120 found" in again


def test_a_verification_retrains_and_its_verdict_is_shown_with_the_store(copied, capsys):
    """It is the native verdict on the last weights that training gives."""
    shown = done(["verify", str(copied / "run.yaml"), "--verify.budget", "3"], capsys)
    inspected = done(["inspect", str(copied / "run.zarr")], capsys)
    attributor, targets = native(copied)
    train = functions(copied)["train"]
    scored = attributor.score(targets)
    expected = verify(scored, lambda rows, seed: [*train(rows, seed)][-1], targets, budget=3)
    assert shown.splitlines()[0] == str(expected).splitlines()[0]
    assert "on 3 subsets x 1 seeds of 50% of the rows, 6 targets" in shown
    assert f"verdict on scores/held-out: {shown.splitlines()[0]}" in inspected


def test_effects_of_a_set_and_a_set_for_an_effect_are_asked_of_the_store(copied, capsys):
    """Without model and recipe; before the trials without an interval. Ranges of rows and columns name a set."""
    store, config = str(copied / "run.zarr"), str(copied / "run.yaml")
    scored = opened(copied).scores("held-out")
    assert done(["effects", store, "--remove", "3,8-10"], capsys) == f"{what_if(scored, [3, 8, 9, 10])}\n"
    shown = done(["trials", config, "--trials.budget", "30", "--trials.shares=[0.1, 0.2]"], capsys)
    assert shown.startswith("30 trial sets, 1 model each")
    assert "without 20.0% of the train rows (14 sets): changes " in shown
    scored = opened(copied).scores("held-out")
    expected = what_if(scored, [3, 8, 9, 10])
    out = copied / "effects.json"
    shown = done(["effects", store, "--remove=3,8-10", "--out", str(out)], capsys)
    assert shown == f"{expected}\nwritten: {out}\n"
    assert "From 30 trial sets (1 model each)" in shown
    assert json.loads(out.read_text()) == expected.to_json()
    lost = ["effects", store, "--remove=3,8-10", "--out", f"{copied}/no/effects.json"]
    status, (out, err) = cli.main(lost), capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, f"{expected}\n", 1)
    assert err.startswith(f"trak-lite: {lost[-1]} cannot be written: No such file or directory. Name a file")
    found = repair(scored, 2, -0.05)
    rows = ",".join(map(str, sorted(found.rows.tolist())))
    shown = done(["effects", store, "--target", "2", "--goal", "-0.05"], capsys)
    assert shown == f"rows to remove: {rows}\n{found}\n"


def test_scores_are_found_whichever_method_the_last_command_had(copied, capsys):
    """A second target set of another method is read as it is, and the first one by the attributor's method."""
    store, ask = str(copied / "run.zarr"), ["--remove", "3"]
    done(["score", str(copied / "run.yaml"), "--score.name", "other", "--score.method", "GradDot"], capsys)
    assert "3 checkpoints, scores: held-out, other\n" in done(["inspect", store], capsys)
    found = opened(copied)
    other = what_if(found.scores("other", method="GradDot"), [3])
    assert done(["effects", store, *ask], capsys) == f"{other}\n"
    first = f"{what_if(found.scores('held-out'), [3])}\n"
    assert done(["effects", store, *ask, "--score.name", "held-out"], capsys) == first
    said = refused(["effects", store, *ask, "--score.name=held-out", "--score.method=GradDot"], capsys)
    assert "made with GradDot" in said
    assert "with one of ['held-out', 'other']" in refused(["effects", store, *ask, "--score.name=no"], capsys)
    lazy = ["--score.name", "held-out", "--score.method", "GradDot", "--score.dense", "false"]
    done(["score", str(copied / "run.yaml"), *lazy], capsys)
    of_rows = what_if(found.scores("held-out", method="GradDot", dense=False), [3])
    assert done(["effects", store, *ask], capsys) == f"{of_rows}\n"


ONE = "effects takes one question"
WRONG_QUESTIONS = [
    ([], f"{ONE}: --remove ROWS, such as 3,8-11; --where NAME=VALUE; or --target NUMBER with"),
    (["--remove", "1", "--where", "a=b"], ONE),
    (["--target", "1"], ONE),
    (["--remove", "one"], "--remove must be numbers and ranges, such as 3,8-11, got 'one'"),
    (["--remove=-1"], "--remove must be numbers and ranges, such as 3,8-11, got '-1'"),
    (["--remove", "1,3-"], "--remove must be numbers and ranges, such as 3,8-11, got '3-'"),
    (["--remove", "3--5"], "--remove must be numbers and ranges, such as 3,8-11, got '3--5'"),
    (["--remove", "3- -5"], "--remove must be numbers and ranges, such as 3,8-11, got '3- -5'"),
    (["--remove", "9-3"], "--remove: '9-3' ends before it begins. Use 3-9."),
    (["--remove", "0-39999999999"], "no range of at most 10,000,000 rows"),
    (["--target", "x", "--goal", "1"], "--target must be a number, got 'x'"),
    (["--remove", "40"], "rows of the train data must lie between 0 and 39, got [40]."),
    (["--where", "source=web"], "source"),
]


def test_questions_about_effects_that_cannot_be_answered_are_refused(ran, capsys):
    for options, said in WRONG_QUESTIONS:
        assert said in refused(["effects", str(ran / "run.zarr"), *options], capsys)


def test_a_verification_of_selected_rows_trains_on_these_rows(tmp_path, capsys):
    """Again, one is trained for comparison; the values in a list and the code of the training tell trainings apart."""
    recipe = RECIPE.replace(
        "    torch.manual_seed(seed)\n    model = build",
        f"    with open('{tmp_path}/seen', 'a') as file:\n"
        "        file.write(' '.join(map(str, sorted(indices))) + '\\n')\n"
        "    torch.manual_seed(seed)\n    model = build",
    ).replace("steps: int = 3", "steps: int = 3, sizes: list[int] = (), batch_size: str = 'full'")
    selected = "train_data: {indices: [30, 31, 35, 39]}\n"
    config = write_case(tmp_path, recipe=recipe, more=selected)
    done(["run", config], capsys)
    (tmp_path / "seen").unlink()

    def trained(*options: str) -> int:
        done(["verify", config, "--verify.budget", "2", *options], capsys)
        seen = [set(map(int, line.split())) for line in (tmp_path / "seen").read_text().splitlines()]
        assert all(rows < {30, 31, 35, 39} and len(rows) == 2 for rows in seen)
        return len(seen)

    assert trained("--recipe_arguments.sizes=[1, 2]", "--recipe_arguments.batch_size=full") == 2
    assert trained("--recipe_arguments.sizes=[1, 2]") == 3
    assert trained("--recipe_arguments.sizes=[1, 3]") == 5
    for more, number in (("# a comment", 6), ("def render(index):\n    return 'a row'", 7)):
        write_case(tmp_path, recipe=f"{recipe}\n\n{more}\n", more=selected)
        assert trained("--recipe_arguments.sizes=[1, 3]") == number
    changed = recipe.replace("optimizer.step()", "optimizer.step(None)")
    write_case(tmp_path, recipe=changed, more=selected)
    assert trained("--recipe_arguments.sizes=[1, 3]") == 9
    # what train calls is noticed by two repetitions, then all are trained again
    write_case(tmp_path, recipe=changed.replace("Tanh", "GELU"), more=selected)
    assert trained("--recipe_arguments.sizes=[1, 3]") == 13


def test_rows_of_a_recipes_projector_are_found_after_a_change_elsewhere_in_the_file(
    tmp_path, monkeypatch, capsys
):
    """Also in Python."""
    monkeypatch.setitem(PROJECTORS, "signs", None)  # removes it afterwards
    for more in (SIGNS, f"{SIGNS}# a comment\n"):
        config = write_case(tmp_path, recipe=RECIPE + more, more="projector: signs\n")
        written = "0 rows written, 120 found" if "comment" in more else "120 rows written"
        assert written in done(["run", config], capsys)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "recipe", raising=False)
    recipe = importlib.import_module("recipe")
    monkeypatch.delitem(sys.modules, "recipe")
    made = Attributor(
        recipe.build_model(), "image_classification", tmp_path / "run.zarr", projector="signs", proj_dim=16
    )
    states = [{k: v.clone() for k, v in state.items()} for state in recipe.train(np.arange(40), 0)]
    assert made.featurize(recipe.train_data(), states).rows_written == 0


def test_a_store_is_shown_with_settings_tables_and_runs(ran, tmp_path, capsys):
    lines = done(["inspect", str(ran / "run.zarr")], capsys).splitlines()
    assert lines[0] == f"{ran}/run.zarr: a store of format 3"
    assert lines[1] == "  40 train rows, 3 checkpoints, scores: held-out"
    assert lines[2].startswith("  7 tables (none not finished), ")
    assert "  proj_dim: 16" in lines
    assert f'  torch: "{torch.__version__}"' in lines
    assert '  ckpt-2                   40 of 40 rows done, checkpoint "checkpoint-3"' in lines
    assert "verdict on scores/held-out: not tested" in lines
    assert any(line.startswith('run: "run" at "') and "recipe.py" in line for line in lines)
    shown = done(["inspect", empty_store(tmp_path, {"name\x1b[31m": "\x1b[2J"})], capsys)
    assert shown.endswith("tables:\n  none yet\n")
    counts = "0 train rows, 0 checkpoints, scores: none\n  0 tables (none not finished), 0 entries"
    assert f"\n  {counts}\n" in shown
    assert "\x1b" not in shown


def test_tables_of_many_checkpoints_are_summed_up_and_unfinished_ones_named(tmp_path, capsys):
    spec = TableSpec(4, (Column("features", 2, "float32"),), 4)
    with open_store(empty_store(tmp_path), "r+") as store:
        for number in range(12):
            table = store.create_table(f"ckpt-{number}", spec)
            table.put(range(2 if number == 5 else 4), {"features": np.ones((2 if number == 5 else 4, 2))})
            store.put_entry(f"ekfac/{number}", "key", np.ones(1))
        store.put_entry("runs/0", "key", np.ones(1))
        for number in range(9):
            for path in (f"targets/{number}/ckpt-0", f"scores/{number}"):
                store.create_table(path, spec).put(range(4), {"features": np.ones((4, 2))})
    lines = done(["inspect", f"{tmp_path}/a.zarr"], capsys).splitlines()
    start = lines.index("tables:")
    assert lines[2:4] == ["  30 tables (1 not finished), 13 entries", "  rows: 0.0 MB"]
    assert lines[start + 1 :] == [
        "  ckpt-*            46 of 48 rows done, 12 tables (1 not finished), 0.0 MB",
        "  ckpt-5            2 of 4 rows done",
        "  scores/*          36 of 36 rows done, 9 tables (none not finished), 0.0 MB",
        "  targets/*/ckpt-*  36 of 36 rows done, 9 tables (none not finished), 0.0 MB",
        "entries (verdicts, fits, runs):",
        "  ekfac/*  12 entries",
        "  runs/0",
        "verdicts: 9 of 9 scores are not tested",
    ]
    every = done(["inspect", f"{tmp_path}/a.zarr", "--every"], capsys)
    assert [every.count(text) for text in ("rows done", "  ekfac/", "not tested")] == [30, 12, 9]


def test_a_moved_store_repeats_its_run_and_records_what_differs(copied, ran, capsys):
    store = copied / "run.zarr"
    shown = done(["run", "--from", str(store), *typed(ran)], capsys)
    assert "featurized: 0 rows written, 120 found" in shown
    assert f"stored in {store}" in shown
    first, second = records(store)
    assert second["config"] == {**first["config"], "path": str(store)}
    assert first["versions"]["torch"] == torch.__version__
    refused(["run", "--from", str(store), *typed(copied), "--seed=1"], capsys)
    assert [record["config"]["seed"] for record in records(store)] == [0] * 2
    other = ["--path", str(copied / "new.zarr"), "--seed=1"]
    again = done(["run", "--from", str(store), *typed(copied), *other], capsys)
    assert "featurized: 120 rows written" in again
    assert not np.array_equal(scores_of(copied, path="new.zarr"), scores_of(copied))
    for arguments in ([], [], ["--score.method", "graddot"]):
        done(["score", "--from", str(store), *typed(copied), *arguments], capsys)
    assert [record["command"] for record in records(store)] == ["run", "run", "score", "score"]
    assert records(store)[-1]["config"]["score"]["method"] == "graddot"


def test_a_run_that_ends_early_is_recorded_in_the_store_that_it_made(tmp_path, capsys):
    config = write_case(tmp_path, recipe=RECIPE.replace("data(6, 2)", "data(0, 2)"))
    assert cli.main(["run", config, "--checkpoints=null"]) == 2
    assert "No rows in the targets" in capsys.readouterr().err
    assert [record["config"]["checkpoints"] for record in records(tmp_path / "run.zarr")] == [None]


def test_what_differs_from_the_record_is_named_and_the_oldest_of_many_records_go(copied, capsys):
    (record,) = records("run.zarr")
    again = ["run", "--from", "run.zarr", *typed(copied)]
    other = {**record, "versions": {**record["versions"], "torch": "2.0"}}
    put_records("run.zarr", [*({**record, "time": str(number)} for number in range(99)), other])
    assert cli.main([*again, "--score.method", "graddot"]) == 0
    assert f"torch is '2.0' there, '{torch.__version__}' here" in capsys.readouterr().err
    assert [one["time"] for one in records("run.zarr")][:98] == [str(number) for number in range(1, 99)]
    assert len(records("run.zarr")) == 100
    put_records("run.zarr", [{**record, "config": {**record["config"], "sead": 1}}])
    assert re.search(r"The run stored in .*run\.zarr: unknown key 'sead'", refused(again, capsys))


RECORD = {"command": "run", "time": "", "config": {}, "recipe_digest": "", "versions": {}}
NO_RECORDS = [b"nonsense", [1], [{"command": "run"}], [{**RECORD, "command": 1}], [{**RECORD, "config": []}]]
NO_RECORDS += [b"[" * 9999, b"[" * 200 + b"]" * 200]
NO_VERDICTS = [b"[]", b"{}", b'{"lds": {"mean": {}}}', NO_RECORDS[-1], b"[" + b"[]," * (1 << 21) + b"[]]"]


def test_records_and_verdicts_that_cannot_be_read_are_refused(ran, copied, capsys):
    store = str(copied / "run.zarr")
    for text in NO_RECORDS:
        put_records(store, text)
        assert re.search(r"records of runs in .* cannot be read", refused(["run", "--from", store], capsys))
        assert "runs: The records of runs in" in done(["inspect", store], capsys)
    put_records(store, records(ran / "run.zarr"))
    for verdict in NO_VERDICTS:
        with open_store(store, "r+") as kept:
            key = kept.open_table("scores/held-out").content_key()
            kept.put_entry("verdicts/scores/held-out", key, np.frombuffer(verdict, np.uint8).copy())
        assert "The verdict on scores/held-out" in refused(["report", store], capsys)
        assert "verdict on scores/held-out: The verdict on" in done(["inspect", store], capsys)


def test_a_report_on_some_rows_shows_the_samples_of_these_rows(tmp_path, capsys):
    """Those that are chosen by their columns, of the method that is asked for; it is not recorded as a run."""
    indices, targets = [30, 31, 35, 39, 2, 7], [5, 0, 3]
    recipe = RECIPE + COLUMNS + '\n\ndef render_target(index):\n    return f"sample {index}"\n'
    more = f"train_data: {{indices: {indices}}}\ntarget_data: {{indices: {targets}}}\n"
    view = ["--score.method", "{name: GaussNewton, damping: 2.5}"]
    done(["run", write_case(tmp_path, recipe=recipe, more=more), *view], capsys)
    assert opened(tmp_path).scores("held-out", method=GaussNewton(damping=2.5)).shape == (6, 3)
    store, other = str(tmp_path / "run.zarr"), str(tmp_path / "other.html")
    chosen = ["--out", other, "--where", "source=book", "--where", "source=a=b", "--where", "year=2021"]
    assert done(["report", store, *typed(tmp_path)], capsys) == f"report: {tmp_path}/run.html\n"
    nowhere = f"{tmp_path}/recipe.py/a.html"
    assert f"{nowhere} cannot be written" in refused(
        ["report", store, *typed(tmp_path), "--out", nowhere], capsys
    )
    assert done(["report", "--from", store, *typed(tmp_path), *chosen], capsys) == f"report: {other}\n"
    books = [row for row, index in enumerate(indices) if index % 3 == 0 and index >= 25]
    for page, rows in (((tmp_path / "run.html").read_text(), range(6)), (Path(other).read_text(), books)):
        assert "2.5" in page
        row_and_text = r'data-row="(\d+)"><div class="content">\s*<p class="text"[^>]*>row (\d+)</p>'
        shown = {(int(row), int(index)) for row, index in re.findall(row_and_text, page)}
        assert shown == {(row, indices[row]) for row in rows}
        for target, index in enumerate(targets):
            line = rf'data-target="{target}".{{0,200}}<p class="text"[^>]*>sample {index}</p>'
            assert re.search(line, page, re.S)
    assert [record["command"] for record in records(store)] == ["run"]


def test_no_checkpoint_other_settings_and_a_recipe_without_a_function_are_refused(copied, tmp_path, capsys):
    config = str(copied / "run.yaml")
    nowhere = refused(["featurize", config, "--checkpoints", str(copied / "nowhere")], capsys)
    assert f"There is no checkpoint at {copied}/nowhere." in nowhere
    assert "projector.seed is 0 there, 7 here" in refused(["run", config, "--seed", "7"], capsys)
    write_case(copied, recipe=RECIPE.replace("def train(", "def fit("))
    assert "defines no train(indices, seed)" in refused(["verify", config], capsys)
    assert "trak-lite verify" not in done(["run", config], capsys)
    (copied / "recipe.py").write_text("def build_model(): ...\n")
    assert "defines no function train_data(), target_data()" in refused(["run", config], capsys)
    assert "has no record of a run" in refused(["run", "--from", empty_store(tmp_path)], capsys)
