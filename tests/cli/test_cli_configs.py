"""Configs: what is refused in one line, and what comes of values that are given in several places."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from cli_cases import CONFIG, RECIPE, refused, write_case

from trak_lite import cli
from trak_lite.cli.configs import RunConfig, read_config, run_keys
from trak_lite.gradient_computers.normalization import Normalization

KEYS = {key.name: key for key in run_keys()}


def read(folder: Path, more: str = "", **options: str) -> RunConfig:
    return read_config(write_case(folder, more=more), list(options.items()))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("seed: many", "seed must be int, got 'many'."),
        ("seed: 1.5", "seed must be int, got 1.5."),
        ("seed: true", "seed must be int, got True."),
        ("seed: null", "seed must be int, got None."),
        ("seed: {a: 1}", "seed must be int, got {'a': 1}."),
        ("store_norms: 1", "store_norms must be bool, got 1."),
        ("method: {name: TRAK, damping: .nan}", "method must be Union[dict[str, "),
        (
            "method: {name: TRAK, damping: high}",
            "method: damping must be a finite number of at least 0, got 'high'.",
        ),
        ("method: {name: TRAK, dampings: 1}", "dampings"),
        ("method: {damping: 1}", "method must be a name of 'GaussNewton', "),
        ("method: 5", "method must be Union[dict[str, "),
        ("method: {name: TracIn, learning_rates: fast}", "method: learning_rates must be finite"),
        ("dtype: float61", "dtype must be Literal['float32', 'float16', 'int8', 'int4'], got 'float61'."),
        ("grad_wrt: [1]", "grad_wrt must be Union[str, list[str], NoneType], got [1]."),
        ("normalize: {kind: clip, most: 2}", "normalize: Unknown fields of normalize: ['most']."),
        ("normalize: {kind: clip}", "normalize: kind='clip' needs a threshold"),
        ("verify: {budget: ten}", "verify.budget must be int, got 'ten'."),
        ("verify: {alpha: 1" + "0" * 400 + "}", "verify.alpha must be float, got 1000"),
        ("verify: {alpha: .inf}", "verify.alpha must be float, got inf."),
        ("verify: 5", "verify must be a mapping of keys, got 5."),
        ("recipe_arguments: 5", "recipe_arguments must be a mapping, got 5."),
        ("recipe_arguments: {steps: few}", "recipe_arguments.steps must be int, got 'few'."),
        (
            "recipe_arguments: {step: 2}",
            "unknown key 'recipe_arguments.step'. Did you mean 'recipe_arguments.steps'?",
        ),
        (
            "train_data: {indices+: 1}",
            "unknown key 'train_data.indices+'. Did you mean 'train_data.indices'?",
        ),
        ("recipe+: a.py", "unknown key 'recipe+'. Did you mean 'recipe'?"),
        ("proj_dims: 4", "unknown key 'proj_dims'. Did you mean 'proj_dim'?"),
        ("verify: {bugdet: 4}", "unknown key 'verify.bugdet'. Did you mean 'verify.budget'?"),
        ("budget: 4", "unknown key 'budget'. Did you mean 'verify.budget'?"),
        ("zzzz: 4", "unknown key 'zzzz'. The option --help lists the keys."),
        ("seed: 1\nseed: 2", "the key 'seed' is there twice"),
        ("grad_wrt: &a [x]\nindices: *a", "aliases are not allowed"),
        ("grad_wrt: &a [*a]", "aliases are not allowed"),
        ("seed: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("seed: [", "cannot be read as YAML"),
        ("? [seed]\n: 1", "found unhashable key"),
        ("1: 2", "unknown key '1'."),
        (
            "indices: [1]",
            "unknown key 'indices'. Did you mean 'train_data.indices' or 'target_data.indices'?",
        ),
        (
            "train_data: {indices: !!set {1, 2}}",
            "train_data.indices must be Optional[list[int]]",
        ),
        ("device: !!binary aGk=", "device must be str"),
        ("device: 2020-01-01", "device must be str"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path(
    more: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["run", write_case(tmp_path, more=more)], capsys)

    assert said in line
    assert str(tmp_path / "run.yaml") in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "many"], "seed must be int, got 'many'."),
        (["--verify.alpha=.nan"], "verify.alpha must be float, got '.nan'."),
        (["--seed"], "--seed has no value. Expected --seed VALUE."),
        (["--sed", "1"], "unknown key 'sed'. Did you mean 'seed'?"),
        (["--see", "1"], "unknown key 'see'. Did you mean 'seed'?"),
        (["1", "--seed"], "unexpected '1'. Expected --key value, after the config."),
        (["--recipe_arguments.steps=x"], "recipe_arguments.steps must be int, got 'x'."),
        (["--score.method", "GausNewton"], "Did you mean 'GaussNewton'?"),
        (
            ["--score.method", "{name: EKFAC, damping: 0}"],
            "score.method: EKFAC(damping=0) would divide by zero",
        ),
    ],
)
def test_a_wrong_override_is_named(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["run", write_case(tmp_path), *arguments], capsys)

    assert said in line
    assert "Command line: " in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a", "holds list, expected keys with values"),
        (b"", "holds NoneType, expected keys with values"),
        (b"\xff", "cannot be read as YAML: 'utf-8' codec can't decode"),
        (b"a: " + b"[" * 5000, "cannot be read as YAML"),
        (b"a: " + b"[" * 200 + b"]" * 200, "nested more than 128 levels deep"),
        (b"path: x", "recipe, task must be given. Add it, or pass --recipe VALUE."),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)

    assert said in refused(["run", str(tmp_path / "run.yaml")], capsys)


def test_a_missing_recipe_argument_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_case(tmp_path, recipe=RECIPE.replace("width: int = 4", "width: int"))

    assert "recipe_arguments.width must be given" in refused(["run", config], capsys)


def test_the_command_line_comes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    values = read(
        tmp_path,
        "seed: 3\nverify: {budget: 4}\nrecipe_arguments: {steps: 2}\nmethod: {name: TRAK, damping: 1}\n",
        **{
            "seed": "5",
            "score.method": "{name: graddot, checkpoint_weights: [1, -1]}",
            "grad_wrt": "0.*",
            "recipe_arguments.width": "8",
            "store_norms": "true",
            "method": "{name: Fisher}",
        },
    ).values

    assert (values["seed"], values["verify"]["budget"], values["proj_dim"]) == (5, 4, 16)
    assert values["score"]["method"] == {"name": "graddot", "checkpoint_weights": [1, -1]}
    assert (values["grad_wrt"], values["store_norms"]) == ("0.*", True)
    assert values["method"] == {"name": "Fisher"}  # not merged with the fields of the file
    assert values["verify"]["alpha"] == 0.5
    assert [values["recipe_arguments"][name] for name in ("steps", "width", "num_train")] == [2, 8, 40]


def test_an_option_with_a_plus_appends_to_the_list_of_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, "train_data: {indices: [3]}\n", **{"train_data.indices+": "5"})

    assert config.values["train_data"]["indices"] == [3, 5]


def test_a_recipes_argument_may_have_the_name_of_a_key_of_the_attributor(tmp_path: Path) -> None:
    recipe = RECIPE.replace("steps: int = 3", "steps: int = 3, method: str = 'sgd', normalize: str = 'rows'")
    config = read_config(write_case(tmp_path, recipe=recipe), [("recipe_arguments.method", "adam")])

    assert config.recipe_arguments["method"] == "adam"
    assert config.recipe_arguments["normalize"] == "rows"


def test_the_default_number_of_features_can_be_asked_for(tmp_path: Path) -> None:
    assert read(tmp_path, proj_dim="auto").values["proj_dim"] == "auto"


def test_a_config_written_out_is_the_same_config(tmp_path: Path) -> None:
    config = read(tmp_path, "normalize: {kind: clip, threshold: 2}\nverify: {seeds: [0, 1]}\n")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(dict(config.values)))

    assert read_config(str(tmp_path / "again.yaml"), []).values == config.values


def test_the_recipe_stands_beside_the_config_and_paths_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    write_case(tmp_path / "below", config=CONFIG.replace("{folder}/", ""), more="")

    values = read_config("below/run.yaml", [("checkpoints", "[a, b]")]).values

    assert values["recipe"] == str(tmp_path / "below" / "recipe.py")
    assert values["path"] == str(tmp_path / "run.zarr")
    assert values["checkpoints"] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_an_address_in_an_object_store_stays_as_it_is(tmp_path: Path) -> None:
    assert read(tmp_path, path="memory://run.zarr").values["path"] == "memory://run.zarr"


def test_a_mapping_becomes_a_normalization(tmp_path: Path) -> None:
    config = read(tmp_path, "normalize: {kind: clip, threshold: 2, scope: module}")

    assert config.attributor_arguments()["normalize"] == Normalization("clip", 2.0, "module")


def test_nothing_of_the_recipe_runs_before_all_other_keys_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_case(tmp_path, recipe="raise SystemExit('the recipe was run')", more="seed: x")

    assert "seed must be" in refused(["run", config], capsys)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be imported and must not be; its class's path."""
    (tmp_path / "planted_code.py").write_text("class Planted:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "planted_code.Planted"


@pytest.mark.parametrize("name", sorted({*KEYS, "recipe_arguments.steps", "recipe_arguments"}))
def test_a_class_path_in_any_key_is_refused_and_imports_nothing(
    name: str, planted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(CONFIG.format(folder=tmp_path))
    write_case(tmp_path)
    section, _, key = name.rpartition(".")
    place = config.setdefault(section, {}) if section else config
    place[key] = {"class_path": planted, "init_args": {}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    refused(["run", str(tmp_path / "run.yaml")], capsys)

    assert "planted_code" not in sys.modules


@pytest.mark.parametrize(
    "name", ["task", "projector", "gradient_computer", "device", "normalize", "method", "score.method"]
)
@pytest.mark.parametrize("form", ["{}", "class_path: {}", "!!python/name:{}"])
def test_the_path_of_a_class_as_text_imports_nothing(
    name: str, form: str, planted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["run", write_case(tmp_path), f"--{name}", form.format(planted)], capsys)

    assert "planted_code" not in sys.modules


@pytest.mark.parametrize("name", ["run", "report"])
def test_the_help_lists_the_keys(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0

    shown = capsys.readouterr().out
    assert "--proj_dim" in shown
    assert ":meth:" not in shown
    assert "Takes up to 10 % more time" in shown
    assert "--verify.budget" in shown
    assert "--score.method" in shown
