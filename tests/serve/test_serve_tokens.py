"""Colours of tokens, against one backward pass per token; what is prepared at the start; texts that are kept."""

import heapq
import re
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Event, Semaphore, Thread
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import functions, opened
from serve_cases import Pages, finished_run, pages_in
from torch.overrides import TorchFunctionMode

from trak_lite import Scores, cli
from trak_lite.errors import InvalidInputError
from trak_lite.store import check_store, open_store

RECIPE = """
import torch
from tiny_runs import LanguageModel
from torch.utils.data import TensorDataset


def build_model():
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
        yield LanguageModel(seed=step).state_dict()


def tokens(index):
    return [f"[{token}]" for token in train_data().tensors[0][index].tolist()]


def sample(text, shift: int = 0):
    ids = torch.tensor([(int(token) + shift) % 7 for token in text.split()])
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
OF_ANSWERS = RECIPE.replace(
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
"""The samples of the targets are not those of the train rows' task."""
ONE = "1 2 3 4 5 6"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("language"), recipe=RECIPE, config=CONFIG)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    config = f"{CONFIG}  task: answer_difference\n"
    return finished_run(tmp_path_factory.mktemp("answers"), recipe=OF_ANSWERS, config=config)


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
def test_colours_of_tokens_are_their_products_with_the_target(client, ran, target):
    recipe = functions(ran)
    train = recipe["train_data"]()
    ids, labels = recipe["target_data"]()[2] if target == "stored" else recipe["sample"](ONE)
    if target == "text":
        assert client.post("/ask", {"token": client.token(), "text": ONE}).status == 303
    expected = np.zeros((len(INDICES), 6))
    for weights in recipe["train"](None, 0):
        model = recipe["build_model"]()
        model.load_state_dict(weights)
        of_target = token_gradients(model, ids, labels).sum(0)
        for row, index in enumerate(INDICES):
            expected[row] += token_gradients(model, *train[index]) @ of_target / 2
    params = {"text": ONE} if target == "text" else {"set": "held-out", "target": "2"}
    link = re.search('<a id="colour" href="([^"]+)"', client.get("/", **params, k=6).text)[1]
    answer = client.get(link.replace("&amp;", "&"))
    assert answer.status == 200, answer.text
    assert 'id="colour"' not in answer.text
    items = re.findall(r'<li data-row="(\d+)"[^>]*>(.*?)</li>', answer.text, re.S)
    assert len(items) == 12
    for row, inside in items:
        weights, texts = zip(*re.findall(r'<span[^>]* title="([^"]*)">([^<]*)</span>', inside), strict=True)
        assert list(texts) == recipe["tokens"](INDICES[int(row)])
        np.testing.assert_allclose([float(one) for one in weights], expected[int(row)], rtol=6e-3, atol=1e-5)
        score = float(re.search('class="score">([^<]+)<', inside)[1])
        np.testing.assert_allclose(sum(expected[int(row)]), score, rtol=6e-3)


def test_a_wrong_number_of_tokens_names_the_index_and_the_row(ran, tmp_path):
    folder = shutil.copytree(ran, tmp_path / "copy")
    recipe = folder / "recipe.py"
    recipe.write_text(recipe.read_text().replace("[index].tolist()]", "[index].tolist() if index != 8]"))
    with pytest.raises(InvalidInputError, match=r"tokens\(8\) .* 0 texts for train row 3\..* label: 6"):
        pages_in(folder).start({"target": "1", "tokens": "1", "k": "6"})


def shown(page: str) -> list[str]:
    """Return rows and scores, and tokens with their weights."""
    found = re.findall(r'(?:data-row="(\d+)")|(?:class="score">([^<]+)<)|(?:title="([^"]*)">)', page)
    assert found
    return ["".join(parts) for parts in found]


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made[getattr(function, "__name__", "")] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("run", ["made", "answers"], ids=["a kernel", "targets of another task"])
def test_preparation_makes_what_pages_need_and_changes_none(request, tmp_path, monkeypatch, run):
    """Plans of gradients, factors of kernels and orders of rows."""
    folder, made, found = request.getfixturevalue(run), {}, {}
    text, tokens = {"text": "1 2 3 4 1"}, {} if run == "made" else {"tokens": "1"}
    for name in ("warm", "cold"):
        pages = pages_in(shutil.copytree(folder, tmp_path / name))
        if name == "warm":
            pages.warm(Event())
            with monkeypatch.context() as patched:
                patched.setattr(Scores, "self_influence", lambda *_: pytest.fail("computed again"))
                assert "self-influence" in pages.review({})
        with Calls() as calls:
            pages.ask(text)
            shown_pages = [pages.start(text)]
        made[name] = calls.made
        shown_pages += [pages.start({**one, **tokens}) for one in ({"target": "1"}, text)]
        shown_pages.append(pages.review({}))
        found[name] = [shown(page) for page in shown_pages]
    assert found["warm"] == found["cold"]
    assert 0 < made["warm"]["linear"] < made["cold"]["linear"]  # passes through the model
    assert made["warm"]["linalg_cholesky_ex"] == 0
    assert run != "made" or made["cold"]["linalg_cholesky_ex"] > 0


def test_a_preparation_ends_when_it_is_stopped_has_no_scores_or_its_server_fails(ran, copy, monkeypatch):
    stopped, pages, without = Event(), pages_in(ran), pages_in(copy)
    stopped.set()
    pages.warm(stopped)
    assert pages.sets.held("held-out") is None
    shutil.rmtree(copy / "run.zarr/scores")
    without.warm(Event())

    class Failing:
        def run(self, sockets: object) -> None:
            raise SystemExit(3)

    stops: list[bool] = []
    monkeypatch.setattr(Pages, "warm", lambda pages, stopped: stops.append(stopped.wait(30)))
    monkeypatch.setattr("trak_lite.cli.serve.server.server", lambda app: Failing())
    with pytest.raises(SystemExit):
        cli.main(["serve", str(ran / "run.zarr"), "--port", "0"])
    assert stops == [True]


# ---- texts that are kept


def asked_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run.zarr/targets").glob("asked-*")}


def pages_for(folder: Path, most: int, **options: str) -> Pages:
    """Return pages that keep so many texts."""
    pages = pages_in(folder, **options)
    pages.live.most_asked = most
    return pages


def test_only_the_newest_texts_stay_in_the_store_beside_the_targets_of_the_user(copy, ran):
    mine, by_hand = opened(copy), "asked-by-hand"
    mine.score(functions(copy)["target_data"](), by_hand, checkpoints=str(ran / "trained"))
    texts = [f"1 2 3 4 5 {number}" for number in range(5)]
    pages_for(copy, 2).ask({"text": texts[3]})
    pages = pages_for(copy, 2)
    name = pages.live.name

    for text in texts[:2]:
        pages.ask({"text": text})
    # that of another process went first
    assert asked_names(copy) == {by_hand, *(name(text) for text in texts[:2])}
    first = shown(pages.start({"text": texts[0]}))
    pages.ask({"text": texts[2]})
    assert asked_names(copy) == {by_hand, name(texts[0]), name(texts[2])}
    assert "was not scored yet" in pages.start({"text": texts[1]})
    assert shown(pages.start({"text": texts[0]})) == first

    pages.ask(params := {"text": texts[1], "tokens": "1"})
    before = shown(pages.start(params))
    pages_for(copy, 1).ask({"text": texts[4]})  # another server
    assert asked_names(copy) == {by_hand, name(texts[4])}
    assert "was not scored yet" in pages.start(params)
    pages.ask(params)
    assert shown(pages.start(params)) == before
    pages_for(copy, 1).ask({"text": texts[4]})
    assert check_store(str(copy / "run.zarr")).ok
    with open_store(str(copy / "run.zarr")) as store:
        names = {path.split("/")[1] for path in store.table_names("targets")}
    assert names == {"held-out", by_hand, name(texts[4])}
    assert mine.scores(by_hand).shape == (len(INDICES), 3)


def test_other_arguments_of_the_recipe_are_other_texts(copy):
    plain, shifted = pages_in(copy), pages_in(copy, **{"recipe_arguments.shift": "1"})
    for text in (ONE, "2 3 4 5 6 0"):
        plain.ask({"text": text})
    assert "was not scored yet" in shifted.start({"text": ONE})
    shifted.ask({"text": ONE})
    assert shown(shifted.start({"text": ONE})) == shown(plain.start({"text": "2 3 4 5 6 0"}))


def test_targets_of_another_task_are_shown_with_their_own_output(answers, tmp_path):
    """f is the difference of the log-probabilities of two answers, by a plain loop."""
    folder = shutil.copytree(answers, tmp_path / "copy")
    pages, recipe = pages_in(folder), functions(folder)
    *_, weights = recipe["train"](None, 0)
    model = recipe["build_model"]()
    model.load_state_dict(weights)
    target = recipe["target_data"]()[1]

    @torch.no_grad()
    def log_p(ids: torch.Tensor) -> float:
        log_ps = model(ids[None])[0].double().log_softmax(-1)
        return sum(float(log_ps[place - 1, ids[place]]) for place in range(1, len(ids)))

    assert "question 1" in pages.start({})
    page = pages.start({"target": "1", "tokens": "1"})
    expected = log_p(target["chosen_input_ids"]) - log_p(target["rejected_input_ids"])
    assert float(re.search(r"f = ([-+\d.e]+), checkpoint", page)[1]) == pytest.approx(expected, rel=1e-3)
    assert "question 1" in page
    assert "the task answer_difference" in page
    pages.ask({"text": ONE})
    assert "the task causal_language_modeling" in pages.start({"text": ONE})


def test_rows_without_labels_are_not_flipped(client):
    page = client.get("/review").text
    assert not re.search("flip (row|,)|new label|<datalist", page)
    assert page.count('value="drop"') == len(INDICES)
    answer = client.post("/mark", {"token": client.token(), "row": 1, "mark": "flip"})
    assert answer.status == 400
    assert "no column label" in answer.text


def test_pages_go_before_texts_that_wait(copy, monkeypatch):
    """Of a page and of texts that wait for the text under way, the page is next, although it came last."""
    pages = pages_in(copy)
    pages.start({"target": "1"})
    begun, waits, go, order = Event(), Semaphore(0), Event(), []
    push = heapq.heappush
    monkeypatch.setattr("trak_lite.cli.serve.pages.heappush", lambda *given: (push(*given), waits.release()))

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
