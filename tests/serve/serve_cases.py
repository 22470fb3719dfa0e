"""A small run with a recipe for ``serve``, a server in a thread, and requests to it by the standard library."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

from cli_cases import RECIPE as CLI_RECIPE
from cli_cases import write_case
from report_cases import Parsed

from trak_lite import cli
from trak_lite.cli.configs import read_config
from trak_lite.cli.records import last_record
from trak_lite.cli.serve import marks as marks_module
from trak_lite.cli.serve.app import application
from trak_lite.cli.serve.command import pages_of
from trak_lite.cli.serve.pages import Pages
from trak_lite.cli.serve.server import listener, server
from trak_lite.core.sealed import BLANK as BLANK
from trak_lite.core.sealed import SEAL as SEAL
from trak_lite.core.sealed import seal as seal

Mark, MarksFile, relabelling = marks_module.Mark, marks_module.MarksFile, marks_module.relabelling
FORM = "application/x-www-form-urlencoded"
TEXT = "0.5 -1 0.25 2 1"
HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=alert(1)>"
RECIPE = (
    CLI_RECIPE
    + f"""
HOSTILE = {HOSTILE!r}


def render_target(index):
    return HOSTILE if index == 1 else f"target {{index}}"


def columns(*, num_train: int = 40):
    labels = train_data(num_train).tensors[1].tolist()
    return {{"label": labels, "source": [HOSTILE if i % 4 == 0 else "=1+1" for i in range(num_train)]}}


def sample(text):
    *numbers, label = text.split()
    return torch.tensor([float(number) for number in numbers]), torch.tensor(int(label))


def predict(model, sample):
    return {{"logits": " ".join(f"{{value:.4f}}" for value in model(sample[0][None])[0].tolist())}}
"""
)


def finished_run(folder: Path, *more: str, recipe: str = RECIPE, **changes: str) -> Path:
    assert cli.main(["run", write_case(folder, recipe=recipe, **changes), *more]) == 0
    return folder


def pages_in(folder: Path, *, recipe: bool = True, **options: str) -> Pages:
    record = last_record(str(folder / "run.zarr"))
    given = [*options.items(), *([("recipe", str(folder / "recipe.py"))] if recipe else [])]
    return pages_of(read_config(record, given, runs=False))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Client:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **params: Any) -> Answer:
        return self.request("GET", f"{path}?{urlencode(params)}" if params else path)

    def page(self, path: str, **params: Any) -> Parsed:
        answer = self.get(path, **params)
        assert answer.status == 200, answer.text
        page = Parsed(answer.text)
        assert page.is_closed
        return page

    def post(self, path: str, fields: Any, **headers: str) -> Answer:
        """Send a form: a mapping, pairs, or the body itself."""
        body = fields if isinstance(fields, bytes) else urlencode(fields).encode()
        return self.request("POST", path, body, {"Content-Type": FORM, **headers})

    def token(self) -> str:
        return str(self.page("/review").all("input", name="token")[0]["value"])

    def request(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path.partition("#")[0], body, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read().decode())

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@contextmanager
def served(pages: Pages, *, patience: float = 30.0) -> Iterator[Client]:
    with listener(0) as listening:
        running = server(application(pages, patience=patience), patience=patience)
        thread = Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield Client(listening.getsockname()[1])
        finally:
            running.should_exit = True
            thread.join(60)


def marks_in(folder: Path) -> dict[str, Any]:
    path = folder / "run.marks.json"
    return dict(json.loads(path.read_text())["marks"]) if path.exists() else {}
