"""A store of somebody else's: whatever it says, no command runs code that the user has not typed, or writes elsewhere.

Every command of the program's own help is tried, in every form that takes a store, on stores whose records, attributes
and files name Python: a new command is tried without a line here.
"""

import contextlib
import functools
import hashlib
import http.client
import io
import json
import os
import pickle
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from cli_cases import RECIPE, done, functions, opened, put_records, records, refused
from store_cases import edit

from trak_lite import Attributor, cli
from trak_lite.errors import CorruptStoreError, ManifestMismatchError, StateError, TrakLiteError
from trak_lite.store import open_store


def commands() -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        cli.main(["--help"])
    return sorted(re.findall(r"^    ([a-z]+)\b", page.getvalue().partition("COMMAND\n")[2], re.M))


COMMANDS = commands()
STDLIB = Path(sysconfig.get_path("stdlib"), "this.py")
"""Prints verses when it is run, and nothing imports it."""
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
PAGES = ("/", "/?target=0", "/?text=x", "/review", "/marks.csv")


@pytest.fixture(autouse=True)
def _no_command_waits(monkeypatch):
    """The server makes every page once, and the command ends."""
    try:
        from uvicorn import Server
    except ImportError:
        return  # and the command ends, too
    serving = Server.run

    def run(server: Any, sockets: Any) -> None:
        thread = Thread(target=serving, args=[server, sockets])
        thread.start()
        for page in PAGES:
            connection = http.client.HTTPConnection(*sockets[0].getsockname(), timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", page)
                connection.getresponse().read()
        server.should_exit = True
        thread.join()

    monkeypatch.setattr(Server, "run", run)


WATCHED = ("open", "import", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class")
watching: list[list[str]] = []


@functools.cache  # installed by the first who watches: it stays for ever, and every event of later tests costs a call
def install_hook() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for seen in watching:
            if event == "exec":
                seen.append(str(arguments[0].co_filename))
            elif event in WATCHED:
                seen += [str(part) for part in arguments]

    sys.addaudithook(hook)


@contextlib.contextmanager
def watch() -> Iterator[list[str]]:
    """What Python has run, imported, opened and started inside a block, told by its audit hook."""
    install_hook()
    watching.append([])
    try:
        yield watching[0]
    finally:
        watching.clear()


class Boom:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def put_record(folder: Path, digest: str, **config: Any) -> None:
    """Replace the records of runs by one of an attacker's, whose checksums are right."""
    old = records(folder / "run.zarr")[-1]
    changed = {"command": "run", "time": "", "config": {**old["config"], **config}, "recipe_digest": digest}
    put_records(folder / "run.zarr", [{**old, **changed}])


def edit_attributes(folder: Path, **attributes: Any) -> None:
    for table in ("ckpt-0", "ckpt-1", "ckpt-2"):
        document = folder / "run.zarr" / table / "zarr.json"
        edit(document, lambda record: record["attributes"].update(attributes))


def plant_python(folder: Path) -> list[Path]:
    """Put Python wherever a name may lead to it; return the files."""
    names = ("recipe.py", ".cache/notes.npy.py", ".entries/notes.py", "torch.py", "ckpt-0/__init__.py")
    files = [folder / "run.zarr" / name for name in names]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(EVIL + RECIPE)
    return files


def names_a_recipe(path: str) -> Callable[[Path], None]:
    """Also the very file of the user's, with its digest: it is not typed on this command line."""

    def attack(folder: Path) -> None:
        recipe = path.format(folder)
        put_record(folder, sha256((folder / recipe).read_text()), recipe=recipe)

    attack.__name__ = path
    return attack


def modules_as_settings(folder: Path) -> None:
    chosen = {"task": "this.s", "projector": "this", "gradient_computer": "this:d", "grad_wrt": "this"}
    put_record(folder, "", recipe="this", method={"name": "this.s"}, **chosen)


def pickles_as_checkpoints(folder: Path) -> None:
    for name in ("evil.pt", "ckpt-0/evil.bin"):
        (folder / "run.zarr" / name).write_bytes(pickle.dumps({"state_dict": Boom()}, protocol=2))
    put_record(folder, "", checkpoints=str(folder / "run.zarr/evil.pt"))
    edit_attributes(folder, source=str(folder / "run.zarr/evil.pt"))


def settings_of_the_manifest(folder: Path) -> None:
    modules = {"task": "this", "gradient_computer": "this.d", "projector": "this.s", "collate": "this.d"}
    modules |= {"method": "this.s", "device": "this"}
    edit(folder / "run.zarr/zarr.json", lambda record: record["made_with"]["settings"].update(modules))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


RECIPES = ["run.zarr/.cache/notes.npy.py", "{}/run.zarr/recipe.py", str(STDLIB), "{}/recipe.py"]
ATTACKS = [*map(names_a_recipe, RECIPES), modules_as_settings, pickles_as_checkpoints]
ATTACKS.append(settings_of_the_manifest)


def attempt(arguments: list[str]) -> list[str]:
    """Run a command, whatever its exit status; return what Python has run and opened meanwhile."""
    with watch() as seen, contextlib.suppress(SystemExit):  # wrong use of this command
        cli.main(arguments)
    return seen


def python_among(seen: list[str], forbidden: list[Path]) -> list[str]:
    """Return what of the forbidden files was opened or run; the names of modules count as well."""
    paths = {str(path) for path in forbidden} | {os.path.relpath(path) for path in forbidden}
    return [entry for entry in seen if entry in paths or entry in ("this", "this.s", "this.d", "os.system")]


def in_standard(row: int, column: int, typed: bool) -> bool:
    """Of every command with every attack, with and without a recipe that is typed, standard tries some."""
    if typed:
        return (COMMANDS[row], column) in {("report", 0), ("featurize", 4), ("unroll", 6)}
    return row % len(ATTACKS) == column


@pytest.mark.parametrize(
    ("command", "attack", "typed"),
    [
        pytest.param(name, attack, typed, id=f"{name}-{attack.__name__}{'-typed' * typed}", marks=marks)
        for row, name in enumerate(COMMANDS)
        for column, attack in enumerate(ATTACKS)
        for typed in (False, True)
        for marks in [() if in_standard(row, column, typed) else pytest.mark.campaign]
    ],
)
def test_no_command_runs_python_that_only_a_store_names(command, attack, typed, copied):
    """In every way in which a command may take a store, whether or not this one does."""
    planted = plant_python(copied)
    attack(copied)
    before = sorted((copied / "trained").rglob("*"))
    store, recipe, forbidden = str(copied / "run.zarr"), copied / "recipe.py", [*planted, STDLIB]
    forms = [[store], ["--from", store]]
    if typed:
        options = ["--recipe", str(recipe), "--verify.budget", "2", "--trials.budget", "9"]
        forms = [[*form, *options] for form in forms]
    else:
        forms += [[store, "--repair"], ["--from", store, "--out", "page.html"]]
        forbidden.append(recipe)
    for form in forms:
        assert python_among(attempt([command, *form]), forbidden) == [], form
    assert not list(copied.rglob("ran"))
    assert not any(entry in sys.modules for entry in ("this", "antigravity"))
    assert typed or sorted((copied / "trained").rglob("*")) == before


def test_the_watch_sees_code_that_runs(copied):
    """The test above can fail: the same file, typed by the user, is run and seen."""
    assert {"check", "featurize", "inspect", "report", "run", "score", "serve", "verify"} <= set(COMMANDS)
    planted = plant_python(copied)
    seen = attempt(["report", str(copied / "run.zarr"), "--recipe", str(planted[0])])
    assert python_among(seen, planted) != []
    assert (planted[0].parent / "ran").exists()


def test_a_recorded_run_is_repeated_with_a_recipe_that_is_typed_only(ran, capsys):
    for command, *more in (["run"], ["featurize"], ["score"], ["verify"], ["run", "--recipe+", "recipe.py"]):
        line = refused([command, "--from", str(ran / "run.zarr"), *more], capsys)
        for said in ("a recipe that a store names is never executed", "recipe.py'", "Pass --recipe FILE"):
            assert said in line


def test_a_typed_recipe_that_differs_from_the_recorded_one_is_told(copied, capsys):
    store, recipe, other = str(copied / "run.zarr"), copied / "recipe.py", RECIPE + "\n# a comment\n"
    assert cli.main(["report", store, "--recipe", str(recipe)]) == 0
    assert "SHA-256" not in capsys.readouterr().err
    recipe.write_text(other)
    for arguments in (["report", store], ["run", "--from", store]):  # the run is recorded with the other one
        assert cli.main([*arguments, "--recipe", str(recipe)]) == 0
        err = capsys.readouterr().err
        assert f"The recipe {recipe} is not the one of the run stored in {store}" in err
        assert f"its SHA-256 is {sha256(other)[:12]}, was {sha256(RECIPE)[:12]}" in err


def test_a_record_chooses_no_folder_to_write_checkpoints_to(copied, capsys):
    elsewhere = copied / "home" / "autostart"
    put_record(copied, "", checkpoints=str(elsewhere), path=str(copied / "other.zarr"))
    arguments = ["run", "--from", str(copied / "run.zarr"), "--recipe", str(copied / "recipe.py")]
    said = "pass --checkpoints PATH: a path that a store names is never written to"
    assert said in refused(arguments, capsys)
    assert not elsewhere.parent.exists()
    assert not (copied / "other.zarr").exists()
    assert cli.main([*arguments, "--checkpoints", str(elsewhere)]) == 0
    assert len(list(elsewhere.glob("*.safetensors"))) == 3


def test_a_report_needs_no_recipe_no_record_and_no_model(copied, capsys):
    """Rows are shown by number; of a store that Python made, the only scores are shown, or those that are named."""
    store = str(copied / "run.zarr")
    top = opened(copied).scores("held-out").top(1, target=0).indices[0]
    (copied / "recipe.py").unlink()
    shutil.rmtree(copied / "trained")
    said = done(["report", store], capsys)  # before the page is written, which may take long
    assert said.startswith("Rows are shown by number. With --recipe FILE they are shown")
    page = (copied / "run.html").read_bytes()
    assert f"row {top}".encode() in page
    assert b"40 train rows, 6 targets" in page
    with open_store(store, "r+") as kept:
        kept.drop_entry("runs")
    for chosen in ([], ["--score.name", "held-out"]):
        (copied / "run.html").unlink()
        done(["report", store, *chosen], capsys)
        assert (copied / "run.html").read_bytes() == page
    shutil.move(store, copied / "lr-0.1")
    assert done(["report", str(copied / "lr-0.1")], capsys).endswith(f"report: {copied}/lr-0.1.html\n")
    shutil.move(copied / "lr-0.1", store)
    missing = "has no scores 'others'. Pass --score.name with one of ['held-out']."
    assert missing in refused(["report", store, "--score.name", "others"], capsys)


ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e\r"


def test_names_of_a_store_tell_a_terminal_nothing(copied, capsys):
    store, config = str(copied / "run.zarr"), str(copied / "run.yaml")
    assert cli.main(["verify", config, "--verify.budget", "2"]) == 0
    with open_store(store, "r+") as kept:
        (name,) = kept.entry_names("verdicts")
        key = kept.open_table("scores/held-out").content_key()
        verdict = json.loads(kept.entry(name, key).tobytes())
        verdict["baselines"][0]["name"] = ESCAPE
        kept.put_entry(name, key, np.frombuffer(json.dumps(verdict).encode(), np.uint8).copy())
    edit_attributes(copied, name=ESCAPE)
    manifest = copied / "run.zarr/zarr.json"
    edit(manifest, lambda record: record["fingerprint"].update({f"a\n{ESCAPE}": ESCAPE}))
    put_record(copied, "x" + ESCAPE, recipe=ESCAPE)
    (copied / f"run.zarr/x{ESCAPE}").mkdir()
    capsys.readouterr()
    shown = []
    for arguments in (["inspect", store], ["check", store], ["run", "--from", store], ["run", config]):
        cli.main(arguments)
        out, err = capsys.readouterr()
        shown.append(out + err)
    with pytest.raises(ManifestMismatchError) as refused:
        opened(copied).scores("held-out")
    shown.append(str(refused.value))
    for text in shown:
        assert "x1b]0;title" in text
        assert [letter for letter in text if not (letter.isprintable() or letter == "\n")] == [], text


def test_a_noted_source_that_is_no_checkpoint_is_not_opened(copied):
    """Devices, folders, pipes, and what is no path at all; a pickle is opened and runs no code."""
    os.mkfifo(copied / "pipe.pt")
    recipe = functions(copied)
    files = ["/proc/kcore", "/dev/zero", "/etc/passwd", "/etc", "\0.pt", "a" * 100_000 + ".pt", "", "pipe.pt"]
    for source in (*files, 5, ["x"], {"a": 1}):
        edit_attributes(copied, source=source)
        attributor = opened(copied)
        with watch() as seen, pytest.raises(StateError, match="none of the known sources has them"):
            attributor.score(recipe["target_data"](), name="new")
        assert str(source) not in seen, source
    pickles_as_checkpoints(copied)
    with pytest.raises(StateError, match="Cannot read the checkpoint"):
        opened(copied).score(recipe["target_data"](), name="new")
    assert not list(copied.rglob("ran"))


SETTINGS: list[Any] = [5, [], {"task": ["regression"]}]
SETTINGS += [{"normalize": value} for value in (5, {"kind": "x"}, {"mind": "unit"})]
SETTINGS += [{"method": value} for value in (None, 5, "this", {"name": "TRAK", "damping": "high"})]
SETTINGS += [{"method": {"name": "TRAK", "dampings": 1}}]


def test_settings_of_a_manifest_that_are_none_are_refused_by_name(copied, capsys):
    path, model = copied / "run.zarr/zarr.json", functions(copied)["build_model"]()
    whole = json.loads(path.read_text())["attributes"]["trak_lite"]["made_with"]["settings"]
    for settings in SETTINGS:
        stored = {**whole, **settings} if isinstance(settings, dict) else settings
        edit(path, lambda record, stored=stored: record["made_with"].update(settings=stored))
        with pytest.raises(TrakLiteError):
            Attributor.open(path.parent, model)
        if not isinstance(settings, dict) or "method" in settings:  # the report reads nothing else of them
            refused(["report", str(path.parent)], capsys)
    less = {name: value for name, value in whole.items() if name != "method"}
    edit(path, lambda record: record["made_with"].update(settings=less))
    for given in ({}, {"method": "GaussNewton"}):
        with pytest.raises(CorruptStoreError, match="does not hold the settings of an attributor"):
            Attributor.open(path.parent, model, **given)
    assert "does not contain a layout and a method" in refused(["report", str(path.parent)], capsys)
    edit(path, lambda record: record["made_with"].update(settings=whole))
    edit(path, lambda record: record["fingerprint"].setdefault("dataset", {}).update(num_rows=0))
    assert "has no train rows. Featurize them first" in refused(["serve", str(path.parent)], capsys)
