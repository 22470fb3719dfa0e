"""The commands on a small recipe: the numbers of the native facade, resumed, recorded and repeated."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import RECIPE, finished_run, refused, write_case

from trak_lite import Attributor, cli
from trak_lite.cli.configs import read_config
from trak_lite.cli.recipes import load_recipe
from trak_lite.cli.records import RunRecord, last_record, store_record_of_run, stored_records
from trak_lite.errors import CorruptStoreError, InvalidInputError
from trak_lite.run.columns import stored_columns
from trak_lite.store import Manifest, ZarrFeatureStore, open_store

ran = pytest.fixture(scope="module")(finished_run)


def done(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that succeeds; return what it printed."""
    capsys.readouterr()
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def typed(folder: Path) -> list[str]:
    """The recipe, as the user names it when a recorded run is repeated."""
    return ["--recipe", str(folder / "recipe.py")]


def scores(folder: Path, name: str = "held-out", path: str = "run.zarr") -> np.ndarray:
    model = load_recipe(folder / "recipe.py").call("build_model", {})
    return Attributor.open(folder / path, model).scores(name).numpy()


@pytest.fixture
def copied(ran: Path, tmp_path: Path) -> Path:
    """A copy of the run in a folder of its own."""
    shutil.copytree(ran, tmp_path / "copy")
    write_case(tmp_path / "copy")
    return tmp_path / "copy"


def test_a_run_gives_the_scores_of_the_native_facade(ran: Path) -> None:
    recipe = load_recipe(ran / "recipe.py")
    states = [
        {name: value.clone() for name, value in state.items()}
        for state in recipe.functions["train"](np.arange(40), 0)
    ]
    attributor = Attributor(recipe.call("build_model", {}), "image_classification", None, proj_dim=16)
    attributor.featurize(recipe.call("train_data", {}), states)

    np.testing.assert_array_equal(scores(ran), attributor.score(recipe.call("target_data", {})).numpy())


def test_a_run_says_what_it_did_and_does_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = done(["run", write_case(tmp_path)], capsys)
    again = done(["run", str(tmp_path / "run.yaml")], capsys)

    assert f"trained: 3 checkpoints in {tmp_path}/trained" in first
    assert "featurized: 120 rows written, 0 found" in first
    assert "Scores('held-out': 40 train rows x 6 targets)" in first
    assert "target 2, most harmful rows: " in first
    assert "trained" not in again.splitlines()[0]
    assert "featurized: 0 rows written, 120 found" in again


def test_featurize_and_score_do_what_a_run_does(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ran / "trained", tmp_path / "trained")
    config = write_case(tmp_path)
    assert "120 rows written" in done(["featurize", config], capsys)
    assert "40 train rows x 6 targets" in done(["score", config], capsys)

    np.testing.assert_array_equal(scores(tmp_path), scores(ran))


COLUMNS = """

def columns(num_train: int = 40):
    rows = range(num_train)
    return {"source": ["web" if i % 3 else "book" for i in rows], "year": [2020 + i // 25 for i in rows]}
"""


def test_columns_of_the_recipe_filter_and_group_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_case(tmp_path, recipe=RECIPE + COLUMNS)
    chosen = ["--where", "source=web", "--where", "year=2020", "--by", "source"]

    shown = done(["run", config, *chosen], capsys)

    matrix = scores(tmp_path).astype(np.float64)
    rows = np.array([i for i in range(40) if i % 3 and i < 25])
    best = rows[np.argsort(-matrix[rows, 1], kind="stable")[:5]]
    listed = "  ".join(f"{row} ({matrix[row, 1]:+.2e})" for row in best)
    assert f"target 1, most helpful rows: {listed}" in shown
    assert (
        f"mean score over all targets by source:\n  {matrix[rows].mean():+.2e}  web ({len(rows)} rows)\n"
        in shown
    )
    again = done(["score", config, "--by", "year"], capsys)
    means = {2020: matrix[:25].mean(), 2021: matrix[25:].mean()}
    lines = [
        f"  {means[year]:+.2e}  {year} ({25 if year == 2020 else 15} rows)"
        for year in sorted(means, key=lambda y: -means[y])
    ]
    assert again.endswith("mean score over all targets by year:\n" + "\n".join(lines) + "\n")
    assert "Unknown columns: ['colour']" in refused(["score", config, "--by", "colour"], capsys)
    assert "--where must be NAME=VALUE" in refused(["score", config, "--where", "web"], capsys)
    selected = done(
        [
            "featurize",
            write_case(tmp_path, recipe=RECIPE + COLUMNS, more="train_data: {indices: [5, 0, 39]}\n"),
            "--path",
            str(tmp_path / "some.zarr"),
        ],
        capsys,
    )
    assert "9 rows written" in selected
    with open_store(tmp_path / "some.zarr") as store:
        assert stored_columns(store)["source"].values.tolist() == ["web", "book", "book"]


def test_targets_of_another_task_are_scored_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPE.replace("nn.Linear(width, 2)", "nn.Linear(width, 1)").replace(".long())", ".float())")
    config = write_case(tmp_path, recipe=recipe)
    plain = ["--checkpoints", "null", "--task", "binary_classification"]
    done(["run", config, *plain], capsys)

    asked = done(["score", config, *plain, "--score.task", "regression", "--score.name", "other"], capsys)

    assert "task=regression" in asked
    own = load_recipe(tmp_path / "recipe.py")
    attributor = Attributor(own.call("build_model", {}), "binary_classification", None, proj_dim=16)
    attributor.featurize(own.call("train_data", {}))
    expected = attributor.score(own.call("target_data", {}), task="regression").numpy()
    with open_store(tmp_path / "run.zarr") as store:
        np.testing.assert_array_equal(store.open_table("scores/other").read("scores"), expected)


def test_a_recipe_without_checkpoints_is_taken_as_it_builds_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = done(["run", write_case(tmp_path), "--checkpoints", "null"], capsys)

    assert "40 rows written, 0 found, checkpoints current" in shown
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize("method", ["ekfac", "fisher", {"name": "EKFAC", "damping": 0.3}])
def test_scores_have_their_curvature_fitted(
    method: Any, ran: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done(["score", str(copied / "run.yaml"), "--score.method", json.dumps(method).strip('"')], capsys)
    model = load_recipe(copied / "recipe.py").call("build_model", {})

    assert Attributor.open(copied / "run.zarr", model).scores("held-out", method=method).shape == (40, 6)


def test_rows_of_train_data_and_targets_are_chosen_by_their_sections(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(copied / "run.yaml")
    shown = done(["score", config, "--score.name", "two", "--target_data.indices", "[5, 0]"], capsys)
    assert "Scores('two': 40 train rows x 2 targets)" in shown
    np.testing.assert_allclose(scores(copied, "two"), scores(copied)[:, [5, 0]], rtol=1e-5, atol=1e-7)

    some = [
        "--train_data.indices",
        "[3, 1]",
        "--train_data.name",
        "some",
        "--path",
        str(copied / "some.zarr"),
    ]
    assert "featurized: 6 rows written, 0 found" in done(["featurize", config, *some], capsys)


def test_a_training_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    recipe = RECIPE.replace(
        "        yield model.state_dict()", "        yield model.state_dict()\n        1 / 0"
    )

    with pytest.raises(ZeroDivisionError):
        cli.main(["run", write_case(tmp_path, recipe=recipe)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.py", "run.yaml"]


def test_a_training_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_case(tmp_path, recipe=RECIPE.replace("range(steps)", "range(0 * steps)"))

    assert "returned no weights" in refused(["run", config], capsys)


def test_the_checkpoints_of_another_process_that_was_faster_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPE.replace(
        "        yield model.state_dict()",
        "        yield model.state_dict()\n"
        "    import os, safetensors.torch\n"
        f"    os.makedirs('{tmp_path}/trained', exist_ok=True)\n"
        f"    safetensors.torch.save_file(build_model().state_dict(), '{tmp_path}/trained/theirs.safetensors')\n",
    )
    done(["run", write_case(tmp_path, recipe=recipe)], capsys)

    assert [path.name for path in (tmp_path / "trained").iterdir()] == ["theirs.safetensors"]
    assert not list(tmp_path.glob(".trained.new-*"))


def test_what_a_killed_training_left_is_removed_by_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless a process holds its lock: a training may take longer than any time that could be waited for."""
    left, living = tmp_path / ".trained.new-left", tmp_path / ".trained.new-living"
    for folder in (left, living):
        folder.mkdir()
        (folder / "checkpoint-1.safetensors").touch()
        os.utime(folder, (0, 0))
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    done(["run", write_case(tmp_path)], capsys)
    os.close(held)

    assert list(tmp_path.glob(".trained.new-*")) == [living]
    assert list((tmp_path / "trained").iterdir())


def test_a_verification_retrains_and_its_verdict_is_shown_with_the_store(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = done(["verify", str(copied / "run.yaml"), "--verify.budget", "4"], capsys)
    inspected = done(["inspect", str(copied / "run.zarr")], capsys)

    assert shown.startswith("LDS ")
    assert "on 4 subsets x 1 seeds of 50% of the rows, 6 targets" in shown
    assert f"verdict on scores/held-out: {shown.splitlines()[0]}" in inspected


def test_a_verification_of_selected_rows_trains_on_these_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPE.replace(
        "    torch.manual_seed(seed)\n    model = build",
        f"    with open('{tmp_path}/seen', 'a') as file:\n"
        "        file.write(' '.join(map(str, sorted(indices))) + '\\n')\n"
        "    torch.manual_seed(seed)\n    model = build",
    )
    config = write_case(tmp_path, recipe=recipe, more="train_data: {indices: [30, 31, 35, 39]}\n")
    done(["run", config], capsys)
    (tmp_path / "seen").unlink()
    done(["verify", config, "--verify.budget", "2"], capsys)

    seen = [set(map(int, line.split())) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 2
    assert all(rows < {30, 31, 35, 39} and len(rows) == 2 for rows in seen)


def test_a_verification_needs_a_recipe_that_trains(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_case(tmp_path, recipe=RECIPE.replace("def train(", "def fit("))

    assert "defines no train(indices, seed)" in refused(["verify", config], capsys)


def test_a_store_is_shown_with_settings_tables_and_runs(
    ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = done(["inspect", str(ran / "run.zarr")], capsys).splitlines()

    assert lines[0] == f"{ran}/run.zarr: a store of format 3"
    assert "  proj_dim: 16" in lines
    assert f'  torch: "{torch.__version__}"' in lines
    assert '  ckpt-2                   40 of 40 rows done, checkpoint "checkpoint-3"' in lines
    assert "verdict on scores/held-out: not tested" in lines
    assert any(line.startswith('run: "run" at "') and "recipe.py" in line for line in lines)


def test_a_store_without_runs_and_with_pending_rows_is_shown_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ZarrFeatureStore.create(tmp_path / "a.zarr", Manifest({"name\x1b[31m": "\x1b[2J"})):
        pass
    shown = done(["inspect", str(tmp_path / "a.zarr")], capsys)

    assert shown.endswith("tables:\n  none yet\n")
    assert "\x1b" not in shown
    assert "There is no store at" in refused(["inspect", str(tmp_path / "b.zarr")], capsys)


def test_a_moved_store_repeats_its_run(copied: Path, ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = done(["run", "--from", str(copied / "run.zarr"), *typed(ran)], capsys)

    assert "featurized: 0 rows written, 120 found" in shown
    assert f"stored in {copied}/run.zarr" in shown
    with open_store(str(copied / "run.zarr")) as store:
        first, second = stored_records(store)
    assert second.config == {**first.config, "path": str(copied / "run.zarr")}
    assert first.versions["torch"] == torch.__version__


def test_the_same_run_is_recorded_once_and_another_one_beside_it(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], [], ["--score.method", "graddot"]):
        done(["score", "--from", str(copied / "run.zarr"), *typed(copied), *arguments], capsys)

    with open_store(str(copied / "run.zarr")) as store:
        assert [record.command for record in stored_records(store)] == ["run", "score", "score"]
    repeated = last_record(str(copied / "run.zarr"))
    assert repeated is not None
    assert repeated.config["score"]["method"] == "graddot"


def test_a_recorded_run_with_overrides_is_another_run(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--path", str(copied / "new.zarr"), "--seed=1"]
    shown = done(["run", "--from", str(copied / "run.zarr"), *typed(copied), *arguments], capsys)

    assert "featurized: 120 rows written" in shown
    assert not np.array_equal(scores(copied, path="new.zarr"), scores(copied))


def test_a_run_that_a_store_refuses_is_not_recorded_in_it(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(copied / "run.zarr")
    refused(["run", "--from", store, *typed(copied), "--seed=1"], capsys)

    record = last_record(store)
    assert record is not None
    assert record.config["seed"] == 0


def test_a_run_that_ends_early_is_recorded_in_the_store_that_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_case(tmp_path, recipe=RECIPE.replace("data(6, 2)", "data(0, 2)"))
    assert cli.main(["run", config, "--checkpoints=null"]) == 2
    assert "No rows in the targets" in capsys.readouterr().err

    record = last_record(str(tmp_path / "run.zarr"))
    assert record is not None
    assert record.config["checkpoints"] is None


def test_a_data_loader_and_a_list_of_checkpoints_do_as_well(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPE.replace(
        "    return data(num_train, 1)",
        "    return torch.utils.data.DataLoader(data(num_train, 1), batch_size=32)",
    ).replace("train_data(num_train).tensors", "train_data(num_train).dataset.tensors")
    shown = done(["run", write_case(tmp_path, recipe=recipe)], capsys)
    files = [f"{tmp_path}/trained/checkpoint-{number}.safetensors" for number in (1, 2, 3)]
    again = done(["run", f"{tmp_path}/run.yaml", f"--checkpoints=[{', '.join(files)}]"], capsys)

    assert "120 rows written" in shown
    assert "0 rows written, 120 found" in again
    np.testing.assert_array_equal(scores(tmp_path), scores(ran))


def test_other_versions_than_the_recorded_ones_are_named(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(copied / "run.zarr")
    record = last_record(store)
    assert record is not None
    old = RunRecord(
        "run", record.time, record.config, record.recipe_digest, {**record.versions, "torch": "2.0"}
    )
    store_record_of_run(store, old)

    assert cli.main(["run", "--from", store, *typed(copied)]) == 0
    assert f"torch is '2.0' there, '{torch.__version__}' here" in capsys.readouterr().err


def test_a_store_without_a_record_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ZarrFeatureStore.create(tmp_path / "a.zarr", Manifest({})):
        pass

    assert "has no record of a run" in refused(["run", "--from", str(tmp_path / "a.zarr")], capsys)
    assert "There is no store at" in refused(["report", str(tmp_path / "b.zarr")], capsys)


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense",
        b"[1]",
        b'[{"command": "run"}]',
        b"[" * 9999,
        b"[" * 200 + b"]" * 200,
        b'[{"command": 1, "time": "", "config": {}, "recipe_digest": "", "versions": {}}]',
    ],
)
def test_records_that_cannot_be_read_are_refused(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ZarrFeatureStore.create(tmp_path / "a.zarr", Manifest({})) as store:
        store.put_entry("runs", "run records, format 1", np.frombuffer(text, np.uint8).copy())
        with pytest.raises(CorruptStoreError, match=r"records of runs in .* cannot be read"):
            stored_records(store)

    assert "runs: The records of runs in" in done(["inspect", str(tmp_path / "a.zarr")], capsys)


def test_the_oldest_of_very_many_records_go(tmp_path: Path) -> None:
    with ZarrFeatureStore.create(tmp_path / "a.zarr", Manifest({})):
        pass
    for number in range(102):
        store_record_of_run(str(tmp_path / "a.zarr"), RunRecord("run", "", {"seed": number}, "", {}))

    with open_store(str(tmp_path / "a.zarr")) as store:
        assert [record.config["seed"] for record in stored_records(store)] == list(range(2, 102))


def test_the_report_gets_scores_renders_and_a_place(
    ran: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def write_report(scores: Any, out: Any, *, train_render: Any, target_render: Any, where: Any) -> Path:
        calls.append((scores.shape, Path(out), train_render(3), target_render, where))
        return Path(out)

    module = types.ModuleType("trak_lite.report")
    module.write_report = write_report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trak_lite.report", module)

    store, recipe = str(ran / "run.zarr"), typed(ran)
    assert done(["report", store, *recipe], capsys) == f"report: {ran}/run.html\n"
    chosen = ["--where", "source=web", "--where", "source=a=b", "--where", "year=2024"]
    done(["report", "--from", store, "--out", "other.html", *chosen, *recipe], capsys)
    assert calls == [
        ((40, 6), ran / "run.html", "row 3", None, None),
        ((40, 6), Path("other.html"), "row 3", None, {"source": ["web", "a=b"], "year": ["2024"]}),
    ]
    with open_store(str(ran / "run.zarr")) as store:
        assert [record.command for record in stored_records(store)] == ["run"]


def test_a_report_on_some_rows_shows_the_samples_of_these_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indices, targets = [30, 31, 35, 39, 2, 7], [5, 0, 3]
    recipe = RECIPE + '\n\ndef render_target(index):\n    return f"sample {index}"\n'
    more = f"train_data: {{indices: {indices}}}\ntarget_data: {{indices: {targets}}}\n"
    config = write_case(tmp_path, recipe=recipe, more=more)
    done(["run", config], capsys)

    done(["report", str(tmp_path / "run.zarr"), *typed(tmp_path)], capsys)

    page = (tmp_path / "run.html").read_text()
    shown = re.findall(r'data-row="(\d+)"><div class="content">\s*<p class="text"[^>]*>row (\d+)</p>', page)
    assert {(int(row), int(index)) for row, index in shown} == set(enumerate(indices))
    for target, index in enumerate(targets):
        assert re.search(
            rf'data-target="{target}".{{0,200}}<p class="text"[^>]*>sample {index}</p>', page, re.S
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run"],
            "run takes either a config or --from STORE; the config comes first. Usage: trak-lite run (CONFIG | --from",
        ),
        (["run", "a.yaml", "--from", "b"], "run takes either"),
        (["run", "--from"], "--from has no value. Expected --from VALUE."),
        (["report", "a.zarr", "--out"], "--out has no value. Expected --out VALUE."),
        (["report"], "report needs the path of a store. Usage: trak-lite report (STORE | --from STORE)"),
        (["run", "no/such.yaml"], "There is no config at no/such.yaml"),
    ],
)
def test_a_command_without_its_source_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(arguments, capsys)


def test_no_checkpoint_other_settings_and_a_recipe_without_a_function_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(copied / "run.yaml")
    nowhere = refused(["featurize", config, "--checkpoints", str(copied / "nowhere")], capsys)
    assert f"There is no checkpoint at {copied}/nowhere." in nowhere
    settings = refused(["run", config, "--path", str(copied / "run.zarr"), "--seed", "7"], capsys)
    assert "projector.seed is 0 there, 7 here" in settings
    (copied / "recipe.py").write_text("def build_model(): ...\n")
    assert "defines no function train_data(), target_data()" in refused(["run", config], capsys)


def test_without_the_extra_the_store_can_be_looked_at_and_the_rest_says_what_to_install(ran: Path) -> None:
    code = (
        "import sys\n"
        "from trak_lite import cli\n"
        "extra = ('jsonargparse', 'docstring_parser')\n"
        "print(set(extra) & set(sys.modules))\n"
        "for name in extra: sys.modules[name] = None\n"
        "print(cli.main(['check', sys.argv[1]]), cli.main(['inspect', sys.argv[1]]), cli.main(['run', 'x.yaml']))"
    )
    command = [sys.executable, "-c", code, str(ran / "run.zarr")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines()[0] == "set()"
    assert ended.stdout.splitlines()[-1] == "0 0 2"
    assert ended.stderr == (
        "trak-lite: run needs jsonargparse, which is not installed. Install it with pip install 'trak-lite[cli]'.\n"
    )


def test_every_run_of_a_record_is_checked_like_a_config(copied: Path) -> None:
    store = str(copied / "run.zarr")
    record = last_record(store)
    assert record is not None
    store_record_of_run(
        store, RunRecord("run", "", {**record.config, "sead": 1}, record.recipe_digest, record.versions)
    )

    with pytest.raises(InvalidInputError, match=r"The run stored in .*run\.zarr: unknown key 'sead'"):
        read_config(last_record(store) or record, [("recipe", str(copied / "recipe.py"))])
