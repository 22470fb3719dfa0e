"""The command ``serve``: pages on a store, with a recipe or without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import PurePosixPath
from threading import Event, Thread

from trak_lite.attributor import Attributor
from trak_lite.cli.configs import RunConfig
from trak_lite.cli.recipes import Recipe, recipe_columns
from trak_lite.cli.serve.live import LiveModel
from trak_lite.cli.serve.marks import MarksFile
from trak_lite.cli.serve.pages import Pages
from trak_lite.cli.serve.sets import Sets
from trak_lite.cli.stored import beside, methods_of, opener, renders
from trak_lite.core.json_text import digest_of
from trak_lite.core.validate import require_packages
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError, UnknownTaskError
from trak_lite.methods import as_method
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.report.content import Renders
from trak_lite.run.columns import stored_columns
from trak_lite.run.tables import num_train_rows, score_path, scored_names
from trak_lite.scoring.scores import Scores
from trak_lite.store import open_store

_PORT = "8765"


def serve(config: RunConfig, port: str | None) -> Iterator[str]:
    """Serve the pages of a store on a port of 127.0.0.1 (0 is a free one) until Ctrl-C. Yield the line to print."""
    require_packages("starlette", "uvicorn", "jinja2", extra="serve")
    from trak_lite.cli.serve.app import application  # imported late: no other command needs Starlette
    from trak_lite.cli.serve.server import ADDRESS, listener, server

    text = _PORT if port is None else port
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 1 << 16):
        raise InvalidInputError(f"--port must be a whole number from 0 to 65535, got {text!r:.40}.")
    pages = pages_of(config)
    with listener(int(text)) as listening:
        marks = pages.marks.path
        yield f"http://{ADDRESS}:{listening.getsockname()[1]}/  (Ctrl-C ends it; marks are written to {marks})"
        stopped = Event()
        preparing = Thread(target=pages.warm, args=[stopped], daemon=True)
        preparing.start()
        try:
            with contextlib.suppress(KeyboardInterrupt):  # the way to end it; running requests have finished
                server(application(pages)).run(sockets=[listening])
        finally:
            stopped.set()
            preparing.join()


def pages_of(config: RunConfig) -> Pages:
    """Return the pages of the store that a config names."""
    path = config.path
    with open_store(path) as store:
        manifest, columns = store.manifest, stored_columns(store)
    num_rows = num_train_rows(manifest)
    if not num_rows:
        raise StateError(f"{path} has no train rows. Featurize them first: trak-lite run CONFIG.")
    file = beside(config, ".marks.json", "marks.json")
    marks = MarksFile(file, manifest.fingerprint.get("dataset", {}), num_rows)
    names, changes = partial(_names, config), partial(_refuse_changes, config, _train_rows(config))
    # A path would name folders and users of this machine on every page.
    title = PurePosixPath(str(path)).name
    task = str(manifest.fingerprint.get("task", {}).get("name", ""))
    if config.recipe is None:
        sets = Sets(names, opener(config, manifest), columns, num_rows, changes)
        return Pages(title, sets, marks, Renders(), task=task)
    live = _live_model(config, config.recipe)
    columns = {**columns, **recipe_columns(config.recipe, live.train)}
    method_of = methods_of(config, manifest)
    opened = lambda name: live.attributor.scores(name, method=method_of(name))  # noqa: E731
    sets = Sets(names, opened, columns, num_rows, changes)
    task_of = lru_cache(partial(_task_of, config, live))
    return Pages(
        *(title, sets, marks, Renders(*renders(config)), live),
        task_of=lambda name: task_of(sets.scores(name)),
        task=task,
    )


def _live_model(config: RunConfig, recipe: Recipe) -> LiveModel:
    values = config.values
    model = recipe.call("build_model")
    attributor = Attributor.open(config.path, model, device=values["device"], progress=False)
    names = _names(config)
    train, targets = (
        Rows(recipe.call(f"{kind}_data"), **values[f"{kind}_data"], what=what)
        for kind, what in (("train", "the train data"), ("target", "the targets"))
    )
    with open_store(config.path) as store:
        default = values["score"]["method"]
        method = methods_of(config, store.manifest)(names[0]) if names else default  # that of the first page
        chosen = attributor.method if method is None else as_method(method)
        return LiveModel(
            attributor,
            values["checkpoints"],
            train,
            targets,
            store=store,
            # A text has no scores of a matrix method.
            method=method if chosen.multiplies_rows else None,
            salt=digest_of({"recipe": recipe.digest, "arguments": recipe.arguments}),
            sample_of=recipe.bound("sample"),
            predict=recipe.bound("predict"),
            tokens=recipe.bound("tokens"),
        )


def _task_of(config: RunConfig, live: LiveModel, scores: Scores) -> AbstractModelOutput | None:
    """Return the task of a set with these scores if its targets are those of the recipe."""
    name = scores.name
    with open_store(config.path) as store:
        path = score_path(store, name, scores.method, live.attributor.method)
        stored = store.open_table(path).spec.fingerprint.get("targets", {})
    # A function, or a task with settings of its own, is known only if it is that of the config.
    for task in {config.values["score"]["task"], scores.settings.get("task")}:
        with contextlib.suppress(InvalidInputError, ManifestMismatchError, UnknownTaskError):
            run = live.attributor.scores(name, method=scores.method, task=task).run
            identity = run.target_identity(run.targets(live.targets))
            if digest_of({key: stored.get(key) for key in identity}) == digest_of(identity):
                return run.target_task
    return None


def _names(config: RunConfig) -> list[str]:
    """Return the names of the stored target sets, that of the config first."""
    with open_store(config.path) as store:
        first, names = scored_names(store, own=True), scored_names(store)
    return sorted(names, key=lambda name: (name != config.values["score"]["name"], name not in first, name))


def _train_rows(config: RunConfig) -> tuple[object, object]:
    """Return what identifies the train data in a store, and their columns."""
    with open_store(config.path) as store:
        columns = stored_columns(store).items()
        content = {name: (column.texts, column.places.tobytes()) for name, column in columns}
        return store.manifest.fingerprint.get("dataset"), content


def _refuse_changes(config: RunConfig, began: tuple[object, object]) -> None:
    if _train_rows(config) != began:
        raise StateError(
            f"{config.path} has other train data, or other columns of them, than when this server started. Start it "
            "again."
        )
