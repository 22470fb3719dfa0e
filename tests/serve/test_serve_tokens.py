"""Colours of tokens, against one backward pass per token; what is prepared at the start; texts that are kept."""

from __future__ import annotations

import heapq
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Semaphore, Thread

import numpy as np
import pytest
import torch

pytest.importorskip("starlette", reason="starlette is not installed: pip install '.[serve]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")

from cli_cases import write_case
from serve_cases import Client, finished_run, pages_in, served

from trak_lite import Attributor, cli
from trak_lite.cli.configs import read_config
from trak_lite.cli.recipes import SECTION, load_recipe
from trak_lite.cli.records import RunRecord, last_record
from trak_lite.cli.serving import pages_of, serve
from trak_lite.errors import InvalidInputError
from trak_lite.run.tables import featurized_names
from trak_lite.serve.live import ASKED
from trak_lite.serve.pages import Pages
from trak_lite.store import check_store, open_store

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        counts = torch.arange(1, ids.shape[1] + 1).view(1, -1, 1)
        return self.head(torch.tanh(self.embedding(ids).cumsum(1) / counts))


def build_model():
    torch.manual_seed(0)
    return LanguageModel()


def data(rows, seed):
    ids = torch.randint(7, (rows, 6), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[::2, 2] = -100
    return TensorDataset(ids, labels)


def train_data():
    return data(12, 0)


def target_data():
    return data(3, 1)


def train(indices, seed):
    for step in range(2):
        torch.manual_seed(step)
        yield LanguageModel().state_dict()


def tokens(index):
    return [f"[{token}]" for token in train_data().tensors[0][index].tolist()]


def sample(text):
    ids = torch.tensor([int(token) for token in text.split()])
    return ids, ids
"""
CONFIG = """\
recipe: recipe.py
path: {folder}/run.zarr
checkpoints: {folder}/trained
task: causal_language_modeling
projector: none
method: GradDot
dtype: float32
train_data: {{indices: [11, 3, 4, 8, 0, 7]}}
score:
  name: held-out
"""
INDICES = [11, 3, 4, 8, 0, 7]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    assert cli.main(["run", write_case(folder, recipe=RECIPE, config=CONFIG)]) == 0
    return folder


@pytest.fixture(scope="module")
def client(ran: Path) -> Iterator[Client]:
    with served(pages_in(ran)) as opened:
        yield opened


def token_gradients(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return the gradient of log p of every label, ``(T, P)``, by one backward pass each."""
    found = []
    for position, label in enumerate(labels.tolist()):
        log_p = model(ids[None])[0, max(position - 1, 0)].double().log_softmax(0)[max(label, 0)]
        grads = torch.autograd.grad(log_p, list(model.parameters()))
        flat = torch.cat([grad.reshape(-1) for grad in grads]).double().numpy()
        found.append(flat * (position > 0 and label >= 0))
    return np.stack(found)


@pytest.mark.parametrize("target", ["stored", "text"])
def test_the_colours_of_tokens_are_their_own_products_with_the_target(
    client: Client, ran: Path, target: str
) -> None:
    recipe = load_recipe(ran / "recipe.py")
    train = recipe.call("train_data", {})
    ids, labels = (
        recipe.call("target_data", {})[2] if target == "stored" else recipe.functions["sample"]("1 2 3 4 5 6")
    )
    if target == "text":
        token = re.search('name="token" value="([^"]+)"', client.get("/").text)[1]
        assert client.post("/ask", {"token": token, "text": "1 2 3 4 5 6"}).status == 303
    expected = np.zeros((len(INDICES), 6))
    for weights in recipe.functions["train"](None, 0):
        model = recipe.call("build_model", {})
        model.load_state_dict(weights)
        of_target = token_gradients(model, ids, labels).sum(0)
        for row, index in enumerate(INDICES):
            expected[row] += token_gradients(model, *train[index]) @ of_target / 2

    params = {"text": "1 2 3 4 5 6"} if target == "text" else {"set": "held-out", "target": "2"}
    answer = client.get("/", **params, k=6, tokens=1)

    assert answer.status == 200, answer.text
    items = re.findall(r'<li data-row="(\d+)"[^>]*>(.*?)</li>', answer.text, re.S)
    assert len(items) == 12
    for row, inside in items:
        spans = re.findall(r'<span[^>]* title="([^"]*)">([^<]*)</span>', inside)
        texts = [text for _, text in spans]
        assert texts == recipe.functions["tokens"](INDICES[int(row)])
        weights = [float(weight) for weight, _ in spans]
        np.testing.assert_allclose(weights, expected[int(row)], rtol=6e-3, atol=1e-5)
        score = float(re.search('class="score">([^<]+)<', inside)[1])
        np.testing.assert_allclose(sum(expected[int(row)]), score, rtol=6e-3)


def test_a_page_with_colours_links_to_itself(client: Client) -> None:
    page = client.get("/", set="held-out", target=0).text
    link = re.search('<a id="colour" href="([^"]+)"', page)[1].replace("&amp;", "&")

    coloured = client.get(link).text

    assert 'id="colour"' not in coloured
    assert 'class="text tokens"' in coloured


def test_what_is_prepared_changes_no_page(ran: Path, tmp_path: Path) -> None:
    for name in ("cold", "warm"):
        shutil.copytree(ran / "run.zarr", tmp_path / name / "run.zarr")
        shutil.copy(ran / "recipe.py", tmp_path / name)
    cold, warm = (pages_in(tmp_path / name) for name in ("cold", "warm"))

    warm.warm(Event())

    for pages in (cold, warm):
        pages.ask({"text": "6 5 4 3 2 1"})
    for params in ({"target": "1", "tokens": "1"}, {"text": "6 5 4 3 2 1", "tokens": "1"}):
        assert shown(warm.start(params)) == shown(cold.start(params))
    assert shown(warm.review({})) == shown(cold.review({}))


def shown(page: str) -> list[str]:
    """Return rows and scores, and tokens with their weights."""
    found = re.findall(r'(?:data-row="(\d+)")|(?:class="score">([^<]+)<)|(?:title="([^"]*)">)', page)
    assert found
    return ["".join(parts) for parts in found]


def test_the_preparation_leaves_gradients_planned_and_kernels_factorised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run(tmp_path)  # with a kernel
    pages = pages_in(folder)
    pages.warm(Event())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("trak_lite.scoring.source.kernels_of", refuse)
    monkeypatch.setattr("trak_lite.gradient_computers.hooks.computer.make_plan", refuse)
    pages.ask({"text": "1 2 3 4 1"})
    assert "most helpful" in pages.start({"text": "1 2 3 4 1"})
    assert "self-influence" in pages.review({})


def test_a_store_without_scores_is_served_all_the_same(tmp_path: Path) -> None:
    config = write_case(tmp_path, recipe=RECIPE, config=CONFIG)
    assert cli.main(["run", config]) == 0
    pages = pages_in(tmp_path)
    shutil.rmtree(tmp_path / "run.zarr/scores")

    pages.warm(Event())


def test_a_stopped_preparation_ends_after_its_step(ran: Path) -> None:
    stopped = Event()
    stopped.set()
    pages = pages_in(ran)

    pages.warm(stopped)

    assert pages.sets.held("held-out") is None


# ---- texts that are kept


def asked_names(folder: Path) -> list[str]:
    with open_store(str(folder / "run.zarr")) as store:
        return [name for name in featurized_names(store) if name.startswith(ASKED)]


def pages_for(folder: Path, most: int) -> Pages:
    pages = pages_in(folder)
    assert pages.live is not None
    pages.live.most_asked = most
    return pages


def test_only_the_newest_texts_stay_in_the_store(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path / "copy")
    folder = tmp_path / "copy"
    before = asked_names(folder)
    texts = [f"1 2 3 4 5 {number}" for number in range(6)]
    pages = pages_for(folder, 3)
    name = pages.live.name

    for text in texts[:3]:
        pages.ask({"text": text})
    assert set(asked_names(folder)) == {name(text) for text in texts[:3]}
    assert not set(before) & set(asked_names(folder))  # those of another process went first
    first = shown(pages.start({"text": texts[0]}))
    pages.ask({"text": texts[3]})
    assert set(asked_names(folder)) == {name(texts[0]), name(texts[2]), name(texts[3])}
    assert "was not scored yet" in pages.start({"text": texts[1]})
    assert shown(pages.start({"text": texts[0]})) == first

    pages.ask({"text": texts[1]})
    assert "most helpful" in pages.start({"text": texts[1]})
    again = pages_for(folder, 1)
    again.ask({"text": texts[4]})
    assert asked_names(folder) == [name(texts[4])]
    assert [path.name for path in (folder / "run.zarr/targets").glob(f"{ASKED}*")] == [name(texts[4])]
    assert check_store(str(folder / "run.zarr")).ok
    with open_store(str(folder / "run.zarr")) as store:
        assert "held-out" in featurized_names(store)
        assert not [
            path
            for path in store.table_names("targets")
            if path.split("/")[1] not in ("held-out", name(texts[4]))
        ]


def test_targets_of_the_user_under_a_similar_name_stay(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path / "copy")
    folder = tmp_path / "copy"
    recipe = load_recipe(folder / "recipe.py")
    mine = Attributor.open(folder / "run.zarr", recipe.call("build_model", {}), progress=False)
    name = f"{ASKED}by-hand"
    mine.score(recipe.call("target_data", {}), name, checkpoints=str(ran / "trained"))
    pages = pages_for(folder, 1)

    for text in ("1 2 3 4 5 6", "6 5 4 3 2 1"):
        pages.ask({"text": text})

    assert set(asked_names(folder)) == {name, pages.live.name("6 5 4 3 2 1")}
    assert mine.scores(name).shape == (len(INDICES), 3)


def test_a_text_that_another_server_removed_can_be_scored_again(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path / "copy")
    here, other = (pages_for(tmp_path / "copy", 1) for _ in range(2))
    params = {"text": "1 2 3 4 5 6", "tokens": "1"}
    here.ask(params)
    before = shown(here.start(params))

    other.ask({"text": "6 5 4 3 2 1"})

    assert "was not scored yet" in here.start(params)
    here.ask(params)
    assert shown(here.start(params)) == before


def test_other_arguments_of_the_recipe_are_other_texts(tmp_path: Path) -> None:
    recipe = RECIPE.replace("def sample(text):", "def sample(text, shift: int = 0):").replace(
        "int(token) for", "(int(token) + shift) % 7 for"
    )
    assert cli.main(["run", write_case(tmp_path, recipe=recipe, config=CONFIG)]) == 0
    plain = pages_in(tmp_path)
    record = last_record(str(tmp_path / "run.zarr"))
    assert isinstance(record, RunRecord)
    options = [("recipe", str(tmp_path / "recipe.py")), (f"{SECTION}.shift", "1")]
    shifted = pages_of(read_config(record, options, runs=False))

    plain.ask({"text": "1 2 3 4 5 6"})
    plain.ask({"text": "2 3 4 5 6 0"})

    assert "was not scored yet" in shifted.start({"text": "1 2 3 4 5 6"})
    shifted.ask({"text": "1 2 3 4 5 6"})
    assert shown(shifted.start({"text": "1 2 3 4 5 6"})) == shown(plain.start({"text": "2 3 4 5 6 0"}))


def test_texts_are_prepared_beside_targets_of_another_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of the targets are not those of the train rows' task."""
    recipe = RECIPE.replace(
        "def forward(self, ids):",
        "def forward(self, ids=None, input_ids=None):\n        ids = ids if input_ids is None else input_ids",
    ).replace(
        "    return data(3, 1)",
        """    ids = data(3, 1).tensors[0]
    names = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    return [dict(zip(names, (row, row, (row + 1) % 7, (row + 1) % 7))) for row in ids]""",
    )
    config = f"{CONFIG}  task: answer_difference\n"
    assert cli.main(["run", write_case(tmp_path, recipe=recipe, config=config)]) == 0
    pages = pages_in(tmp_path)

    pages.warm(Event())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("trak_lite.gradient_computers.hooks.computer.make_plan", refuse)
    pages.ask({"text": "1 2 3 4 5 6"})
    monkeypatch.setattr("trak_lite.scoring.scores.Scores.self_influence", refuse)
    assert "self-influence" in pages.review({})


@pytest.mark.parametrize("known", [True, False])
def test_targets_of_another_task_are_shown_with_their_own_output(tmp_path: Path, known: bool) -> None:
    """f is the difference of the log-probabilities of two answers, by a plain loop."""
    recipe = RECIPE.replace(
        "def forward(self, ids):",
        "def forward(self, ids=None, input_ids=None):\n        ids = ids if input_ids is None else input_ids",
    ).replace(
        "    return data(3, 1)",
        """    ids = data(3, 1).tensors[0]
    names = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    return [dict(zip(names, (row, row, (row + 1) % 7, (row + 1) % 7))) for row in ids]


def render_target(index):
    return f"question {index}"
""",
    )
    config = f"{CONFIG}  task: answer_difference\n"
    assert cli.main(["run", write_case(tmp_path, recipe=recipe, config=config)]) == 0
    if not known:  # other targets than those of the set
        (tmp_path / "recipe.py").write_text(recipe.replace("data(3, 1)", "data(3, 2)"))
    pages = pages_in(tmp_path)

    for page in (pages.start({}), pages.start({"target": "1"})):
        assert ("question 1" in page) is known
    page = pages.start({"target": "1", "tokens": "1"})
    if not known:
        assert "These targets are not those of the recipe" in page
        return
    functions = load_recipe(tmp_path / "recipe.py")
    *_, weights = functions.functions["train"](None, 0)
    model = functions.call("build_model", {})
    model.load_state_dict(weights)
    target = functions.call("target_data", {})[1]

    @torch.no_grad()
    def log_p(ids: torch.Tensor) -> float:
        log_ps = model(ids[None])[0].double().log_softmax(-1)
        return sum(float(log_ps[place - 1, ids[place]]) for place in range(1, len(ids)))

    expected = log_p(target["chosen_input_ids"]) - log_p(target["rejected_input_ids"])
    assert float(re.search(r"f = ([-+\d.e]+), checkpoint", page)[1]) == pytest.approx(expected, rel=1e-3)
    assert "the task answer_difference" in page
    assert "the task causal_language_modeling" in shown_of_text(pages)


def shown_of_text(pages: Pages) -> str:
    pages.ask({"text": "1 2 3 4 5 6"})
    return pages.start({"text": "1 2 3 4 5 6"})


def test_rows_without_labels_are_not_flipped(client: Client) -> None:
    page = client.get("/review").text
    assert not re.search("flip (row|,)|new label|<datalist", page)
    assert page.count('value="drop"') == len(INDICES)
    token = re.search('name="token" value="([^"]+)"', page)[1]
    answer = client.post("/mark", {"token": token, "row": 1, "mark": "flip"})
    assert answer.status == 400
    assert "no column label" in answer.text


def test_pages_go_before_texts_that_wait(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page and of texts that wait for the text under way, the page is next, although it came last."""
    shutil.copytree(ran, tmp_path / "copy")
    pages = pages_in(tmp_path / "copy")
    pages.start({"target": "1"})
    begun, waits, go, order = Event(), Semaphore(0), Event(), []
    push = heapq.heappush
    monkeypatch.setattr("trak_lite.serve.pages.heappush", lambda *given: (push(*given), waits.release()))

    def ask(_: object, text: str) -> None:
        if text == "first":
            begun.set()
            go.wait(60)
        order.append(text)
        raise InvalidInputError("done")

    def call(make: object, params: dict[str, str]) -> None:
        with suppress(InvalidInputError):
            make(params)
            order.append("page")

    monkeypatch.setattr(type(pages.live), "ask", ask)
    calls = [(pages.ask, {"text": text}) for text in ("first", "second", "third")]
    calls.append((pages.start, {"target": "1"}))
    threads = []
    for one in calls:
        threads.append(Thread(target=call, args=one))
        threads[-1].start()
        assert waits.acquire(timeout=60)
        assert begun.wait(60)
    go.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "page", "second", "third"]


def test_the_preparation_ends_with_a_server_that_fails(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def run(self, sockets: object) -> None:
            raise SystemExit(3)

    stops: list[bool] = []
    monkeypatch.setattr(Pages, "warm", lambda pages, stopped: stops.append(stopped.wait(30)))
    monkeypatch.setattr("trak_lite.serve.server.server", lambda app: Failing())
    record = last_record(str(ran / "run.zarr"))
    assert isinstance(record, RunRecord)

    with pytest.raises(SystemExit):
        list(serve(read_config(record, [], runs=False), "0"))

    assert stops == [True]
