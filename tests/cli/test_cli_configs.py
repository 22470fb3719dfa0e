"""Configs and recipes: what is refused in one line, and what comes of values that are given in several places."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_cases import CONFIG, RECIPE, done, functions, records, refused, write_case
from safetensors.torch import load_file

from trak_lite import Attributor, Normalization, cli
from trak_lite.cli.configs import read_config
from trak_lite.cli.records import last_record

STEP = "recipe_arguments: {step: 2}"
WRONG_KEYS = [
    ("seed: many", "seed must be int, got 'many'."),
    ("seed: 1.5", "seed must be int, got 1.5."),
    ("seed: '60'", "seed must be int, got '60'."),
    ("store_norms: 'true'", "store_norms must be bool, got 'true'."),
    ("batch_size: 'null'", "batch_size must be int or null, got 'null'."),
    ("verify: {alpha: '0.5'}", "verify.alpha must be float, got '0.5'."),
    ("train_data: {indices: '[1]'}", "train_data.indices must be list[int] or null, got '[1]'."),
    ("train_data: {indices: ['1']}", "train_data.indices must be list[int] or null, got ['1']."),
    ("recipe_arguments: {steps: '3'}", "recipe_arguments.steps must be int, got '3'."),
    ("seed: true", "seed must be int, got True."),
    ("seed: null", "seed must be int, got None."),
    ("store_norms: 1", "store_norms must be bool, got 1."),
    ("method: {name: TRAK, damping: .nan}", "method must be dict[str, "),
    ("method: {name: TRAK, damping: x}", "method: damping must be a finite number of at least 0, got 'x'."),
    ("method: {name: TRAK, dampings: 1}", "dampings"),
    ("method: {damping: 1}", "method must be a name of 'GaussNewton', "),
    ("method: {name: TracIn, learning_rates: fast}", "method: learning_rates must be finite"),
    ("batch_size: 0", "batch_size: batch_size must be an integer of at least 1, got 0."),
    ("target_data: {batch_size: 0}", "target_data.batch_size: batch_size must be an integer of at least 1"),
    ("target_data: {indices: []}", "target_data.indices must have at least one row."),
    ("dtype: float61", "dtype must be 'float32', 'float16', 'int8' or 'int4', got 'float61'."),
    ("grad_wrt: [1]", "grad_wrt must be str, list[str] or null, got [1]."),
    ("normalize: {kind: clip, most: 2}", "normalize: Unknown fields of normalize: ['most']."),
    ("normalize: {kind: clip}", "normalize: kind='clip' needs a threshold"),
    ("verify: {budget: ten}", "verify.budget must be int, got 'ten'."),
    ("verify: {alpha: 1" + "0" * 400 + "}", "verify.alpha must be float, got 1000"),
    ("verify: {alpha: .inf}", "verify.alpha must be float, got inf."),
    ("verify: 5", "verify must be a mapping of keys, got 5."),
    ("recipe_arguments: 5", "recipe_arguments must be a mapping, got 5."),
    ("recipe_arguments: {steps: few}", "recipe_arguments.steps must be int, got 'few'."),
    (STEP, "unknown key 'recipe_arguments.step'. Did you mean 'recipe_arguments.steps'?"),
    ("train_data: {indices+: 1}", "unknown key 'train_data.indices+'. Did you mean 'train_data.indices'?"),
    ("recipe+: a.py", "unknown key 'recipe+'. Did you mean 'recipe'?"),
    ("budget: 4", "unknown key 'budget'. Did you mean 'verify.budget' or 'trials.budget'?"),
    ("indices: [1]", "unknown key 'indices'. Did you mean 'train_data.indices' or 'target_data.indices'?"),
    ("scores: {name: held}", "unknown key 'scores'. Did you mean 'score'?"),
    ("zzzz: 4", "unknown key 'zzzz'. The option --help lists the keys."),
    ("1: 2", "unknown key '1'."),
    ("seed: 1\nseed: 2", "the key 'seed' is there twice"),
    ("grad_wrt: &a [*a]", "aliases are not allowed"),
    ("seed: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("? [seed]\n: 1", "found unhashable key"),
    ("train_data: {indices: !!set {1, 2}}", "train_data.indices must be list[int] or null"),
    ("device: !!binary aGk=", "device must be str"),
    ("device: 2020-01-01", "device must be str"),
]
WRONG_OPTIONS = [
    (["--seed", "many"], "seed must be int, got 'many'."),
    (["--verify.alpha=.nan"], "verify.alpha must be float, got '.nan'."),
    (["--seed"], "--seed has no value. Expected --seed VALUE."),
    (["--see", "1"], "unknown key 'see'. Did you mean 'seed'?"),
    (["1", "--seed"], "unexpected '1'. Expected --key value, after the config."),
    (["--recipe_arguments.steps=x"], "recipe_arguments.steps must be int, got 'x'."),
    (["--score.name", "../x"], "score.name: '../x' cannot be a target set name."),
    (["--score.method", "GausNewton"], "Did you mean 'GaussNewton'?"),
    (["--score.method", "{name: EKFAC, damping: 0}"], "score.method: EKFAC(damping=0) would divide by zero"),
]
WRONG_RECIPES = [
    (RECIPE.replace("def train_data", "def data_of_train"), "defines no function train_data(). Expected"),
    ("train_data = target_data = build_model = 1", "defines no function build_model(), train_data()"),
    (RECIPE + "\nrender = 'text'\n", "defines no function render()"),
    ("x = 1\ndef broken(:\n", "cannot be executed: line 2: "),
    ("import no_such_package\n", "No module named 'no_such_package'. Correct it, or install"),
    (RECIPE.replace("torch.manual_seed(0)", "import no_such"), "No module named 'no_such'. Install what it"),
    (RECIPE + "\ndef render_target(i, width: int=9): 0\n", "'width' of render_target() has another type or"),
    (RECIPE.replace("width: int = 4", "width: int"), "recipe_arguments.width must be given"),
    (RECIPE.replace("range(steps)", "range(0 * steps)"), "returned no weights"),
    (RECIPE.replace("yield model.state_dict()", "yield 3"), "train() returned int. Expected a module"),
    (RECIPE.replace("yield model.state_dict()", "yield torch.ones(2)"), "train() returned Tensor. Expected"),
    (RECIPE.replace("yield model.state_dict()", "yield 'file'"), "train() returned str. Expected a module"),
]
ANNOTATIONS = [
    (": str | torch.device", "must be str, got"),
    (": str | Callable[..., Any]", "must be str, got"),
    (": float | Literal['auto']", "must be float or 'auto', got"),
    (": Sequence[int] | None", "must be list[int] or null, got"),
    (": tuple[float, ...]", "must be list[float], got"),
    (": str | type[nn.Module] | Sequence[str | type[Any]] | None", "must be str, list[str] or null"),
    (": Callable[..., Any] | None", "unknown key"),
    (": Sequence[Any]", "unknown key"),
    (": nn.Module", "unknown key"),
    (": Any", "unknown key"),
    (': "Missing"', "The annotations of train_data() cannot be read: name 'Missing' is not defined"),
    ("", "unknown key"),
]
"""Of an argument, and what is said where it is a mapping of lists; no annotation has the type of the default, None."""
WRONG_FILES = [
    (b"- a", "holds list, expected keys with values"),
    (b"", "holds nothing, expected keys with values"),
    (b"\xff", "cannot be read as YAML: 'utf-8' codec can't decode"),
    (b"seed: [", "cannot be read as YAML"),
    (b"a: " + b"[" * 500, "cannot be read as YAML"),
    (b"a: " + b"[" * 200 + b"]" * 200, "nested more than 128 levels deep"),
    (b"path: x", "recipe, task must be given. Add it, or pass --recipe VALUE."),
    (b"path: x\ntask: regression\nrecipe: nothing.py", "There is no recipe at "),
]
MAPPING = "recipe_arguments: {extra: {x: [1]}}"
TYPES = "from collections.abc import Callable, Sequence\nfrom typing import Any, Literal\n"


def extra(text: str, default: Any = None) -> str:
    return TYPES + RECIPE.replace("num_train: int = 40):", f"num_train: int = 40, extra{text} = {default}):")


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        *(({"more": more}, [], said) for more, said in WRONG_KEYS),
        *(({}, options, said) for options, said in WRONG_OPTIONS),
        *(({"recipe": recipe}, [], said) for recipe, said in WRONG_RECIPES),
        *(({"recipe": extra(text), "more": MAPPING}, [], said) for text, said in ANNOTATIONS),
        ({"recipe": extra("", 3)}, ["--recipe_arguments.extra=x"], "recipe_arguments.extra must be int"),
        ({"recipe": "raise SystemExit('the recipe was run')", "more": "seed: x"}, [], "seed must be int"),
        *(({"content": content}, [], said) for content, said in WRONG_FILES),
    ],
)
def test_what_is_wrong_is_named_in_one_line(case, options, said, tmp_path, capsys):
    content = case.pop("content", None)
    config = write_case(tmp_path, **case)
    if content is not None:
        Path(config).write_bytes(content)
    line = refused(["run", config, *options], capsys)
    assert said in line
    if options or (content is None and "recipe" not in case):
        assert ("Command line: " if options else config) in line


def test_an_error_of_the_recipes_own_is_left_to_its_traceback(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", write_case(tmp_path, recipe="1 / 0")])


def test_the_command_line_comes_before_the_file_and_this_before_the_default(tmp_path, monkeypatch, capsys):
    """As the run is recorded; the record, written out as a config, is the same run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    more = "seed: 3\nverify: {budget: 4, seeds: [0, 1], alpha: 2e-1}\nrecipe_arguments: {steps: 2, num_train: 20}\n"
    more += "method: {name: TRAK, damping: 1}\ntrain_data: {indices: [3]}\n"
    more += "normalize: {kind: clip, threshold: 2, scope: module}\n"
    recipe = RECIPE.replace("steps: int = 3", "steps: int = 3, method: str = 'sgd', normalize: str = 'rows'")
    write_case(tmp_path / "below", recipe=recipe, more=more, config=CONFIG.replace("{folder}/", ""))
    options = {
        "seed": "5",
        "score.method": "{name: graddot, checkpoint_weights: [1, -1]}",
        "grad_wrt": "0.*",
        "proj_dim": "auto",
        "recipe_arguments.width": "8",
        "recipe_arguments.method": "adam",
        "store_norms": "true",
        "method": "{name: GradDot}",
        "train_data.indices+": "5",
    }
    given = [word for name, text in options.items() for word in (f"--{name}", text)]
    assert "featurized: 4 rows written, 0 found" in done(["run", "below/run.yaml", *given], capsys)
    (record,) = records(tmp_path / "run.zarr")
    values = record["config"]
    assert (values["seed"], values["verify"]["budget"], values["proj_dim"]) == (5, 4, "auto")
    assert values["score"]["method"] == {"name": "graddot", "checkpoint_weights": [1, -1]}
    assert (values["grad_wrt"], values["store_norms"], values["score"]["name"]) == ("0.*", True, "held-out")
    assert values["method"] == {"name": "GradDot"}  # not merged with the fields of the file
    assert (values["verify"]["alpha"], values["train_data"]["indices"]) == (0.2, [3, 5])
    arguments = {"width": 8, "num_train": 20, "steps": 2, "method": "adam", "normalize": "rows"}
    assert values["recipe_arguments"] == arguments
    assert values["recipe"] == str(tmp_path / "below" / "recipe.py")
    assert (values["path"], values["checkpoints"]) == (str(tmp_path / "run.zarr"), str(tmp_path / "trained"))
    states = [load_file(file) for file in sorted((tmp_path / "trained").glob("*.safetensors"))]
    assert [state["0.weight"].shape for state in states] == [(8, 4)] * 2  # each function has its arguments
    model = functions(tmp_path / "below")["build_model"](width=8)
    assert Attributor.open(tmp_path / "run.zarr", model).normalization == Normalization("clip", 2.0, "module")

    (tmp_path / "again.yaml").write_text(yaml.safe_dump(values))
    assert "featurized: 0 rows written, 4 found" in done(["run", "again.yaml"], capsys)
    assert records(tmp_path / "run.zarr") == [record]
    lists = ["--checkpoints", "[trained/checkpoint-1.safetensors, trained/checkpoint-2.safetensors]"]
    done(["featurize", "again.yaml", *lists], capsys)
    files = [str(tmp_path / f"trained/checkpoint-{number}.safetensors") for number in (1, 2)]
    assert records(tmp_path / "run.zarr")[-1]["config"]["checkpoints"] == files
    more = [("recipe", str(tmp_path / "below/recipe.py")), ("checkpoints+", "third.pt")]
    appended = read_config(last_record(str(tmp_path / "run.zarr")), more)
    assert appended.values["checkpoints"] == [*files, str(tmp_path / "third.pt")]
    assert {"checkpoints", "seed"} & appended.recorded == {"seed"}


def test_an_address_in_an_object_store_stays_as_it_is(tmp_path, monkeypatch, capsys):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.chdir(tmp_path)
    place = f"memory://{tmp_path.name}/run.zarr"
    done(["featurize", write_case(tmp_path), "--path", place, "--checkpoints", "null"], capsys)
    assert done(["inspect", place], capsys).startswith(f"{place}: a store of format 3\n")


def test_a_recipe_has_modules_beside_it_and_arguments_that_only_python_can_say(tmp_path, monkeypatch, capsys):
    """They keep their defaults; names of functions of serve may be variables; serve passes texts."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_recipe.py").write_text("WIDTH = 5\n")
    more = "width: int = WIDTH, where: str = Path(), make: type = nn.Linear, clip: trak_lite.Normalization = None):"
    recipe = RECIPE.replace("width: int = 4):", more).replace("width: int = 4,", "width: int = WIDTH,")
    recipe = "from beside_the_recipe import WIDTH\nfrom pathlib import Path\nimport trak_lite\n" + recipe
    recipe += "\ntokens = [1]\ndef sample(text, scale: float = 2.0):\n    return scale\n"
    done(["featurize", write_case(tmp_path, recipe=recipe), "--checkpoints=null"], capsys)
    (record,) = records(tmp_path / "run.zarr")
    assert record["config"]["recipe_arguments"] == {"width": 5, "num_train": 40, "steps": 3, "scale": 2.0}


@pytest.mark.parametrize("form", ["model", "model.state_dict()", "[model, model.state_dict()]"])
def test_a_module_a_state_dict_and_a_list_are_checkpoints_and_a_loader_is_train_data(form, tmp_path, capsys):
    recipe = RECIPE.replace("        yield model.state_dict()\n", f"    return {form}\n")
    recipe = recipe.replace("train_data(num_train).tensors", "train_data(num_train).dataset.tensors")
    loader = "return torch.utils.data.DataLoader(data(num_train, 1), batch_size=32)"
    recipe = recipe.replace("return data(num_train, 1)", loader)
    done(["run", write_case(tmp_path, recipe=recipe)], capsys)
    trained = functions(tmp_path)["train"](torch.arange(40), 0)
    expected = trained if isinstance(trained, list) else [trained]
    files = sorted((tmp_path / "trained").glob("*.safetensors"))
    for file, one in zip(files, expected, strict=True):
        states = one if isinstance(one, dict) else one.state_dict()
        torch.testing.assert_close(load_file(file), dict(states), rtol=0, atol=0)


def shown_keys(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Name to default and text of the keys that the help lists."""
    page = " ".join(done(["run", "--help"], capsys).split()).partition("options: ")[2]
    found = {}
    for entry in re.split(r" (?=--[a-z])", f" {page}")[1:]:
        name = re.match(r"--([\w.]+)", entry)[1]
        default = re.search(r"default: (.*)\)$", entry)
        if default or name not in found:
            found[name] = ("" if default is None else default[1], entry)
    return found


@pytest.mark.quick
def test_every_argument_of_the_attributor_is_a_key_with_its_default_but_what_only_python_can_say(capsys):
    keys = shown_keys(capsys)
    parameters = inspect.signature(Attributor.__init__).parameters.items()
    without = ("self", "model", "collate", "path", "task")
    defaults = {name: str(p.default).replace("None", "null") for name, p in parameters if name not in without}
    assert {name: keys[name][0] for name in defaults} == defaults
    assert "(type: Optional[int], default: null)" in keys["train_data.batch_size"][1]
    assert "(type: Optional[list[int]], default: null)" in keys["target_data.indices"][1]
    assert "(type: Optional[str], default: null)" in keys["train_data.name"][1]
    assert "(type: bool, default: False)" in keys["featurize.append"][1]
    assert "(type: int, default: 10)" in keys["verify.budget"][1]
    without = {f"verify.{name}" for name in ("texts", "strata", "scores", "targets", "protocol", "task")}
    without |= {"score.data", "train_data.data", "unroll.runs", "unroll.targets", "model", "collate"}
    assert not without & keys.keys()
    assert "K, the number of features per stored row" in keys["proj_dim"][1]
    assert "random subsets" in keys["verify.budget"][1]
    shown = done(["report", "--help"], capsys)
    assert "--score.method" in shown
    assert ":meth:" not in shown


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module that can be imported and must not be; its class's path."""
    (tmp_path / "planted_code.py").write_text("class Planted:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "planted_code.Planted"
    assert "planted_code" not in sys.modules


@pytest.mark.parametrize("part", range(6))
def test_a_class_path_in_any_key_is_refused_and_imports_nothing(part, planted, tmp_path, capsys):
    """Standard tries one key of six."""
    write_case(tmp_path)
    for name in sorted({*shown_keys(capsys), "recipe_arguments.steps", "recipe_arguments"})[part::6]:
        config = yaml.safe_load(CONFIG.format(folder=tmp_path))
        section, _, key = name.rpartition(".")
        place = config.setdefault(section, {}) if section else config
        place[key] = {"class_path": planted, "init_args": {}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        refused(["run", str(tmp_path / "run.yaml")], capsys)


@pytest.mark.parametrize("form", ["{}", "class_path: {}", "!!python/name:{}"])
def test_the_path_of_a_class_as_text_imports_nothing(form, planted, tmp_path, capsys):
    for name in ("task", "projector", "gradient_computer", "device", "normalize", "method", "score.method"):
        refused(["run", write_case(tmp_path), f"--{name}", form.format(planted)], capsys)
