"""The house keeps its floors: a module imports only from lower floors or from its own room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trak_lite

PACKAGE = Path(trak_lite.__file__).parent

FLOORS = [
    {"errors", "types", "_version"},
    {"_validate", "_batches", "_devices", "_progress", "_adapters", "_eval_caches", "sharded"},
    {
        "modelout_functions",
        "projectors",
        "store",
        "scoring",
        "evaluation",
        "checkpoints",
        "datasets",
        "_session",
    },
    {"gradient_computers", "_sources", "vectorised"},
    {"diagnosis", "kronecker", "sharing"},
    {"distributed", "row_checks"},
    {"pipeline"},
    {"fisher"},
    {"score_tiles", "kept_grams"},
    {"workspace", "score_source", "curvature_fits", "attributor_settings"},
    {"target_session", "score_matrix"},
    {"scores", "score_result", "featurizing"},
    {"retraining", "token_scores"},
    {"verification"},
    {"kept_scores"},
    {"attributor"},
    {"traker"},
    {"utils", "testing", "report", "integrations"},
    {"cli"},
    {"__init__", "__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ONLY_IN = {
    "zarr": set(),
    "obstore": {"store/_objects_obstore.py"},
    "fsspec": {"store/_objects_fsspec.py"},
    "fast_jl": {"projectors/fast_jl.py"},
    "pytest": {"testing"},
    "tqdm": {"_progress.py"},
    "triton": {"projectors/_triton_"},
    "pandas": {"scores.py"},
    "xarray": {"scores.py"},
    "matplotlib": set(),
    "jsonargparse": {"cli/parsing.py"},
    "docstring_parser": {"cli/keys.py"},
    "yaml": {"cli/configs.py"},
    "transformers": {"integrations/huggingface.py"},
    "peft": {"integrations/huggingface.py"},
    "datasets": {"integrations/huggingface.py"},
    "lightning": {"integrations/lightning.py"},
}
ON_USE = {("scores", "report")}  # a method whose pictures are made two floors up, and imported only then
MODULES = sorted(PACKAGE.rglob("*.py"), key=str)


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imported_modules(path: Path, *, at_once: bool = False) -> list[str]:
    names = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors_or_its_own_room(path: Path) -> None:
    room = room_of(path)
    at_once = imported_modules(path, at_once=True)
    for name in imported_modules(path):
        if name.startswith("trak_lite.") or name == "trak_lite":
            other = [*name.split("."), "__init__"][1]
            if (room, other) in ON_USE and name not in at_once:
                continue
            assert other == room or FLOOR_OF[other] < FLOOR_OF[room], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_packages_are_imported_in_their_one_place(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    for name in imported_modules(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        if allowed is not None:
            assert any(place.startswith(prefix) for prefix in allowed), f"{place} imports {name}"


def test_the_store_works_without_torch() -> None:
    for path in (PACKAGE / "store").rglob("*.py"):
        assert not any(name.split(".")[0] == "torch" for name in imported_modules(path)), path


FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "normal",
    ),
    *("ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if room_of(path) != "testing"],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_every_tensor_names_its_device(path: Path) -> None:
    # Where torch.set_default_device is a GPU, a tensor that does not would not meet the others.
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        made = (
            isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
        )
        named = {keyword.arg for keyword in node.keywords} & {"device", None}
        assert not made or named, (
            f"{path.name}:{node.lineno} makes a tensor on whatever device is the default"
        )
