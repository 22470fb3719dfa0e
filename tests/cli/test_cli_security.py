"""A store of somebody else's: whatever it says, no command runs code that the user has not typed, or writes elsewhere.

Every command of the program's own table is tried, in every form that takes a store, on stores whose records, attributes
and files name Python: a new command is tried without a line here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import RECIPE, finished_run, refused, write_case

from trak_lite import Attributor, cli
from trak_lite.cli.program import _parser
from trak_lite.cli.recipes import load_recipe
from trak_lite.cli.records import RunRecord, last_record, store_record_of_run
from trak_lite.errors import CheckpointError, ManifestMismatchError, StateError, TrakLiteError
from trak_lite.store import open_store
from trak_lite.store.disk.documents import sealed

(_TABLE,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
COMMANDS = sorted(_TABLE.choices)
STDLIB = Path(sysconfig.get_path("stdlib"), "this.py")
"""Prints verses when it is run, and nothing imports it."""
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


ran = pytest.fixture(scope="module")(finished_run)


class OnePass:
    """In place of a server: every page is made once, and the command ends."""

    def __init__(self, application: Any) -> None:
        self.application = application

    def run(self, sockets: Any) -> None:
        for path, query in (
            ("/", b""),
            ("/", b"target=0"),
            ("/", b"text=x"),
            ("/review", b""),
            ("/marks.csv", b""),
        ):
            asyncio.run(self.get(path, query))

    async def get(self, path: str, query: bytes) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
        }
        scope |= {
            "headers": [(b"host", b"localhost")],
            "http_version": "1.1",
            "root_path": "",
            "scheme": "http",
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            return

        with contextlib.suppress(Exception):  # a page of an error was sent
            await self.application(scope, receive, send)


@pytest.fixture(autouse=True)
def no_command_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("uvicorn") is not None:
        from trak_lite.serve import server

        monkeypatch.setattr(server, "server", OnePass)


class Watch:
    """What Python has run, imported, opened and started inside a block, told by its audit hook."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "exec":
            self.seen.append(str(arguments[0].co_filename))
        elif event in ("open", "import", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class"):
            self.seen += [str(part) for part in arguments]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list[str]]:
        self.seen, self.active = [], True
        try:
            yield self.seen
        finally:
            self.active = False


watch = Watch()


class Boom:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.fixture
def copied(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ran, tmp_path / "copy")
    write_case(tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")  # relative paths of a record begin here
    return tmp_path / "copy"


def put_record(folder: Path, digest: str, **config: Any) -> None:
    """Replace the records of runs by one of an attacker's, whose checksums are right."""
    old = last_record(str(folder / "run.zarr"))
    assert old is not None
    record = {
        "command": "run",
        "time": "",
        "config": {**old.config, **config},
        "recipe_digest": digest,
        "versions": dict(old.versions),
        "where": "",
    }
    text = np.frombuffer(json.dumps([record]).encode(), np.uint8).copy()
    with open_store(str(folder / "run.zarr"), "r+") as store:
        store.put_entry("runs", "run records, format 1", text)


def edit_record(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change metadata as an attacker does, who makes the checksum fit."""
    document = json.loads(path.read_text())
    record = document["attributes"]["trak_lite"]
    change(record)
    document["attributes"]["trak_lite"] = sealed(record)
    path.write_text(json.dumps(document))


def edit_attributes(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for table in ("ckpt-0", "ckpt-1", "ckpt-2"):
        edit_record(folder / "run.zarr" / table / "zarr.json", change)


def plant_python(folder: Path) -> list[Path]:
    """Put Python wherever a name may lead to it; return the files."""
    text = EVIL + RECIPE
    files = [
        folder / "run.zarr" / name
        for name in (
            "recipe.py",
            ".cache/notes.npy.py",
            ".entries/notes.py",
            "torch.py",
            "ckpt-0/__init__.py",
        )
    ]
    for file in files:
        file.write_text(text)
    return files


def recipe_in_the_store(folder: Path) -> None:
    digest = hashlib.sha256((EVIL + RECIPE).encode()).hexdigest()
    put_record(folder, digest, recipe="run.zarr/.cache/notes.npy.py")


def recipe_in_the_store_by_its_absolute_path(folder: Path) -> None:
    digest = hashlib.sha256((EVIL + RECIPE).encode()).hexdigest()
    put_record(folder, digest, recipe=str(folder / "run.zarr/recipe.py"))


def recipe_of_the_standard_library(folder: Path) -> None:
    put_record(folder, hashlib.sha256(STDLIB.read_bytes()).hexdigest(), recipe=str(STDLIB))


def recipe_of_the_user(folder: Path) -> None:
    """The very file of the user's, with its digest: not typed on this command line either."""
    put_record(
        folder,
        hashlib.sha256((folder / "recipe.py").read_bytes()).hexdigest(),
        recipe=str(folder / "recipe.py"),
    )


def modules_as_settings(folder: Path) -> None:
    put_record(
        folder,
        "",
        recipe="this",
        task="this.s",
        projector="this",
        method={"name": "this.s"},
        gradient_computer="this:d",
        grad_wrt="this",
    )


def pickles_as_checkpoints(folder: Path) -> None:
    for name in ("evil.pt", "ckpt-0/evil.bin"):
        (folder / "run.zarr" / name).write_bytes(pickle.dumps({"state_dict": Boom()}, protocol=2))
    put_record(folder, "", checkpoints=str(folder / "run.zarr/evil.pt"))
    edit_attributes(folder, lambda table: table["attributes"].update(source=str(folder / "run.zarr/evil.pt")))


def settings_of_the_manifest(folder: Path) -> None:
    modules = {"task": "this", "gradient_computer": "this.d", "projector": "this.s", "collate": "this.d"}
    modules |= {"method": "this.s"}
    edit_record(
        folder / "run.zarr/zarr.json",
        lambda record: record["made_with"]["settings"].update(modules, device="this"),
    )


ATTACKS = [
    recipe_in_the_store,
    recipe_in_the_store_by_its_absolute_path,
    recipe_of_the_standard_library,
    recipe_of_the_user,
    modules_as_settings,
    pickles_as_checkpoints,
    settings_of_the_manifest,
]


def forms(command: str, store: str) -> list[list[str]]:
    """Every way in which a command may take a store, whether or not this one does."""
    return [
        [command, store],
        [command, "--from", store],
        [command, store, "--repair"],
        [command, "--from", store, "--out", "page.html"],
    ]


def attempt(arguments: list[str]) -> list[str]:
    """Run a command, whatever its exit status; return what Python has run and opened meanwhile."""
    with watch() as seen, contextlib.suppress(SystemExit):  # wrong use of this command
        cli.main(arguments)
    return list(seen)


def python_among(seen: list[str], forbidden: list[Path]) -> list[str]:
    """Return what of the forbidden files was opened or run; the names of modules count as well."""
    paths = {str(path) for path in forbidden} | {os.path.relpath(path) for path in forbidden}
    return [entry for entry in seen if entry in paths or entry in ("this", "this.s", "this.d")]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_python_that_only_a_store_names(
    command: str, attack: Callable[[Path], None], copied: Path
) -> None:
    planted = plant_python(copied)
    attack(copied)
    before = {name: list(map(str, sorted((copied / name).rglob("*")))) for name in ("trained",)}

    for arguments in forms(command, str(copied / "run.zarr")):
        seen = attempt(arguments)
        assert python_among(seen, [*planted, STDLIB, copied / "recipe.py"]) == [], arguments
        assert "os.system" not in seen
    assert not list(copied.rglob("ran"))
    assert not any(entry in sys.modules for entry in ("this", "antigravity"))
    assert {name: list(map(str, sorted((copied / name).rglob("*")))) for name in ("trained",)} == before


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_beside_a_typed_recipe_the_store_adds_no_code(
    command: str, attack: Callable[[Path], None], copied: Path
) -> None:
    planted = plant_python(copied)
    attack(copied)
    recipe = str(copied / "recipe.py")

    for arguments in forms(command, str(copied / "run.zarr"))[:2]:
        seen = attempt([*arguments, "--recipe", recipe, "--verify.budget", "2"])
        assert python_among(seen, [*planted, STDLIB]) == [], arguments
        assert "os.system" not in seen
    assert not list(copied.rglob("ran"))
    assert "this" not in sys.modules


def test_the_watch_sees_code_that_runs(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two tests above can fail: the same file, typed by the user, is run and seen."""
    planted = plant_python(copied)
    store, recipe = str(copied / "run.zarr"), str(planted[0])

    seen = attempt(["report", store, "--recipe", recipe])
    assert python_among(seen, planted) != []
    assert (planted[0].parent / "ran").exists()


@pytest.mark.parametrize("command", ["run", "featurize", "score", "verify"])
def test_a_recorded_run_is_repeated_with_a_recipe_that_is_typed_only(
    command: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused([command, "--from", str(copied / "run.zarr")], capsys)

    assert "a recipe that a store names is never executed" in line
    assert "recipe.py'" in line  # which one it was
    assert "Pass --recipe FILE" in line


def test_a_typed_recipe_that_differs_from_the_recorded_one_is_told(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, recipe = str(copied / "run.zarr"), copied / "recipe.py"
    assert cli.main(["run", "--from", store, "--recipe", str(recipe)]) == 0
    assert "SHA-256" not in capsys.readouterr().err

    recipe.write_text(RECIPE + "\n# a comment\n")
    digests = [
        hashlib.sha256(text.encode()).hexdigest()[:12] for text in (RECIPE + "\n# a comment\n", RECIPE)
    ]
    for arguments in (["run", "--from", store], ["report", store]):
        assert cli.main([*arguments, "--recipe", str(recipe)]) == 0
        err = capsys.readouterr().err
        assert f"The recipe {recipe} is not the one of the run stored in {store}" in err
        assert f"its SHA-256 is {digests[0]}, was {digests[1]}" in err
        put_record(copied, hashlib.sha256(RECIPE.encode()).hexdigest())


def test_a_record_chooses_no_folder_to_write_checkpoints_to(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = copied / "home" / "autostart"
    put_record(copied, "", checkpoints=str(elsewhere), path=str(copied / "other.zarr"))
    arguments = ["run", "--from", str(copied / "run.zarr"), "--recipe", str(copied / "recipe.py")]

    assert cli.main(arguments) == 2
    assert "pass --checkpoints PATH: a path that a store names is never written to" in capsys.readouterr().err
    assert not elsewhere.parent.exists()
    assert not (copied / "other.zarr").exists()

    assert cli.main([*arguments, "--checkpoints", str(elsewhere)]) == 0
    assert len(list(elsewhere.iterdir())) == 3


def test_a_report_without_a_recipe_shows_rows_by_number_and_needs_no_model(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "recipe.py").unlink()
    shutil.rmtree(copied / "trained")

    assert cli.main(["report", str(copied / "run.zarr")]) == 0
    assert "Rows are shown by number. With --recipe FILE they are shown" in capsys.readouterr().out
    page = (copied / "run.html").read_text()
    model = load_recipe(Path(write_case(copied)).with_name("recipe.py")).call("build_model", {})
    top = Attributor.open(copied / "run.zarr", model).scores("held-out").top(1, target=0).indices[0]
    assert f"row {top}" in page
    assert "40 train rows, 6 targets" in page


def test_a_report_of_a_store_that_python_made_is_of_the_scores_that_are_named(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(copied / "run.zarr")
    with open_store(store, "r+") as opened:
        opened.drop_entry("runs")

    assert cli.main(["report", store]) == 0  # the only scores
    only = (copied / "run.html").read_bytes()
    missing = "has no scores 'others'. Pass --score.name with one of ['held-out']."
    assert missing in refused(["report", store, "--score.name", "others"], capsys)
    assert cli.main(["report", store, "--score.name", "held-out"]) == 0
    assert (copied / "run.html").read_bytes() == only
    assert "has no features" not in capsys.readouterr().err


def test_other_methods_are_reported_as_they_were_scored(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(copied / "run.yaml")
    for value in ("{name: TRAK, damping: 1}", "graddot", "{name: GaussNewton, damping: 2.5}"):
        view = ["--score.method", value]
        assert cli.main(["score", config, *view]) == 0
        store_record_of_run(
            str(copied / "run.zarr"),
            RunRecord("run", "", {"path": "", "score": {"name": "held-out"}}, "", {}),
        )
        assert cli.main(["report", str(copied / "run.zarr"), *view]) == 0
    page = (copied / "run.html").read_text()
    assert "2.5" in page


ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e\r"


def visible(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_names_of_a_store_tell_a_terminal_nothing(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(copied / "run.zarr")
    assert cli.main(["verify", str(copied / "run.yaml"), "--verify.budget", "2"]) == 0
    with open_store(store, "r+") as opened:
        (name,) = opened.entry_names("verdicts")
        key = opened.open_table("scores/held-out").content_key()
        kept = opened.entry(name, key)
        assert kept is not None
        verdict = json.loads(kept.tobytes())
        verdict["baselines"][0]["name"] = ESCAPE
        opened.put_entry(name, key, np.frombuffer(json.dumps(verdict).encode(), np.uint8).copy())
    edit_attributes(copied, lambda table: table["attributes"].update(name=ESCAPE))
    edit_record(
        copied / "run.zarr/zarr.json", lambda record: record["fingerprint"].update({f"a\n{ESCAPE}": ESCAPE})
    )
    put_record(copied, "x" + ESCAPE, recipe=ESCAPE)
    (copied / f"run.zarr/x{ESCAPE}").mkdir()
    capsys.readouterr()

    for arguments in (
        ["inspect", store],
        ["check", store],
        ["run", "--from", store],
        ["run", str(copied / "run.yaml")],
    ):
        cli.main(arguments)
        out, err = capsys.readouterr()
        assert "x1b]0;title" in out + err, arguments
        assert visible(out + err), arguments
    model = load_recipe(copied / "recipe.py").call("build_model", {})
    shown = str(Attributor.open(store, model).scores("held-out"))
    assert "x1b]0;title" in shown
    assert visible(shown)


@pytest.mark.parametrize(
    "verdict",
    [
        b"[]",
        b"{}",
        b"nonsense",
        b'{"lds": {"mean": {}}}',
        b"[" * 200 + b"]" * 200,
        b"[" + b"[]," * (1 << 21) + b"[]]",
    ],
    ids=["list", "empty", "nonsense", "mapping", "deep", "many"],
)
def test_a_verdict_that_cannot_be_read_is_told(
    verdict: bytes, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(copied / "run.zarr")
    with open_store(store, "r+") as opened:
        key = opened.open_table("scores/held-out").content_key()
        opened.put_entry("verdicts/scores/held-out", key, np.frombuffer(verdict, np.uint8).copy())

    assert "The verdict on scores/held-out" in refused(["report", store], capsys)
    assert cli.main(["inspect", store]) == 0
    assert "verdict on scores/held-out: The verdict on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    [
        "/proc/kcore",
        "/dev/zero",
        "/etc/passwd",
        "/etc",
        5,
        ["x"],
        {"a": 1},
        "\0.pt",
        "a" * 100_000 + ".pt",
        "",
        "pipe.pt",
    ],
    ids=["memory", "zeros", "text", "folder", "number", "list", "mapping", "nul", "long", "empty", "pipe"],
)
def test_a_noted_source_that_is_no_checkpoint_is_not_opened(source: Any, copied: Path) -> None:
    os.mkfifo(copied / "pipe.pt")
    edit_attributes(copied, lambda table: table["attributes"].update(source=source))
    recipe = load_recipe(copied / "recipe.py")
    attributor = Attributor.open(copied / "run.zarr", recipe.call("build_model", {}))

    with watch() as seen, pytest.raises(StateError, match="none of the known sources has them"):
        attributor.score(recipe.call("target_data", {}), name="new")
    assert str(source) not in seen


def test_a_noted_source_runs_no_code_when_it_is_opened(copied: Path) -> None:
    pickles_as_checkpoints(copied)
    recipe = load_recipe(copied / "recipe.py")
    attributor = Attributor.open(copied / "run.zarr", recipe.call("build_model", {}))

    with pytest.raises(CheckpointError, match="Cannot read the checkpoint"):
        attributor.score(recipe.call("target_data", {}), name="new")
    assert not list(copied.rglob("ran"))


@pytest.mark.parametrize(
    "settings",
    [
        5,
        [],
        {"normalize": 5},
        {"normalize": {"kind": "x"}},
        {"normalize": {"mind": "unit"}},
        {"task": ["regression"]},
        {"method": None},
        {"method": 5},
        {"method": "this"},
        {"method": {"name": "TRAK", "damping": "high"}},
        {"method": {"name": "TRAK", "dampings": 1}},
    ],
    ids=str,
)
def test_settings_of_a_manifest_that_are_none_are_refused_by_name(settings: Any, copied: Path) -> None:
    path = copied / "run.zarr/zarr.json"

    def change(record: dict[str, Any]) -> None:
        stored = record["made_with"]["settings"]
        record["made_with"]["settings"] = {**stored, **settings} if isinstance(settings, dict) else settings

    edit_record(path, change)
    model = load_recipe(copied / "recipe.py").call("build_model", {})

    with pytest.raises(TrakLiteError):
        Attributor.open(path.parent, model)
    if not isinstance(settings, dict) or "method" in settings:  # the report reads nothing else of them
        assert cli.main(["report", str(path.parent)]) == 2


def test_a_store_of_an_older_version_is_refused_by_name(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings say a kernel and a damping instead of a method, and its scores are of another identity."""
    store = copied / "run.zarr"

    def older(record: dict[str, Any]) -> None:
        del record["made_with"]["settings"]["method"]
        record["made_with"]["settings"].update(kernel="curvature", damping=0.0078125)

    edit_record(store / "zarr.json", older)
    model = load_recipe(copied / "recipe.py").call("build_model", {})
    said = "was written by an older version of trak_lite: its settings name no method. Featurize again into"

    with pytest.raises(ManifestMismatchError, match=said):
        Attributor.open(store, model)
    with pytest.raises(ManifestMismatchError, match=said):
        Attributor.open(store, model, method="GaussNewton")
    assert said in refused(["report", str(store)], capsys)
