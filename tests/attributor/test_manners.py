"""Library manners: one bar, shown where somebody looks; no chatter; a light import; a Ctrl-C that says what is safe."""

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from tqdm import tqdm

from trak_lite import Attributor, Rows, verify
from trak_lite.core.progress import KeptProgress, Stages
from trak_lite.errors import StateError
from trak_lite.retraining import retrain

N, BATCH = 300, 32
TRAIN = TensorDataset(torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3)
TARGETS = TensorDataset(*TRAIN[:5])
FEW = TensorDataset(*TRAIN[:40])


class Stopping(Dataset[Any]):
    """The train rows, one of which is never loaded because something else happens."""

    def __init__(self, stop, at=100):
        self.stop, self.at = stop, at

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == self.at:
            self.stop()
        return TRAIN[index]


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise StateError("another")


def attributor(path, **changes):
    torch.manual_seed(0)
    return Attributor(nn.Linear(4, 3), "image_classification", path, proj_dim=8, **changes)


def featurize(made, data=TRAIN):
    return made.featurize(Rows(data, batch_size=BATCH, name="mine"))


@pytest.mark.parametrize(
    ("asked", "rank", "group", "shown"),
    [
        (True, "0", None, True),
        (True, "1", None, False),
        (True, "no number", None, True),
        (True, "1", 0, True),  # the rank of a process group counts more than that of the launcher
        (True, "0", 1, False),
        (None, "0", None, True),  # a terminal shows the bar without being asked
        (None, "1", None, False),
    ],
)
def test_of_several_processes_rank_0_shows_the_bar(asked, rank, group, shown, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: asked is None)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("RANK", rank)
    if group is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: group)
    attributor(None, progress=asked).featurize(FEW)
    assert ("40/40" in stderr.getvalue()) is shown


@pytest.mark.parametrize("progress", [True, None])
def test_every_long_call_shows_one_bar_at_a_time_with_rate_and_time_left(progress, capsys):
    """And nothing where nobody looks."""
    made = attributor(None, progress=progress)
    made.featurize(FEW)
    made.score(TARGETS, "first-five", method="EKFAC")
    scores = made.score(TARGETS, "first-five")
    if progress is None:
        assert capsys.readouterr() == ("", "")
        return
    verify(scores, lambda rows, seed: nn.Linear(4, 3), TARGETS, budget=4, train_id="none")
    shown = capsys.readouterr().err
    labels = ["Featurizing current", "Fitting the curvature of", "Scoring 'first-five'", "Retraining"]
    assert [label for label in labels if label not in shown] == []
    for line in re.split(r"[\r\n]+", shown):
        assert len(re.findall(r"\d+/\d+ \[", line)) <= 1
    rate_and_time_left = r"\[\d\d:\d\d<\d\d:\d\d, .*(row|model)"
    assert len(re.findall(rate_and_time_left, shown)) >= len(labels)


@pytest.mark.parametrize("logged", [False, True])
def test_without_a_terminal_a_line_a_minute_says_how_far_all_checkpoints_are(
    logged, capsys, caplog, monkeypatch
):
    now = iter(range(0, 10**6, 25))  # each look at the clock is 25 s after the one before
    monkeypatch.setattr("trak_lite.core.progress.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    if logged:
        caplog.set_level("INFO", logger="trak_lite.core.progress")
    states = [nn.Linear(4, 3).state_dict() for _ in range(3)]
    attributor(None).featurize(Rows(FEW, batch_size=8), states)
    lines = capsys.readouterr().err.splitlines()
    said = [record.getMessage() for record in caplog.records if record.name == "trak_lite.core.progress"]
    lines, nowhere = (said, lines) if logged else (lines, said)
    assert nowhere == []
    pattern = (
        r"Featurizing \d \(checkpoint (\d) of 3\): (\d+) of 40 rows, [\d.e-]+ a second, [\d:]+ left"
        r"; [\d:]+ to the end of all"
    )
    found = [re.fullmatch(pattern, line) for line in lines[:-1]]  # nothing is left after the last one
    assert None not in found
    assert {int(match[1]) for match in found if match} == {1, 2, 3}
    assert 5 <= len(found) < 15  # of 15 batches


@pytest.mark.parametrize("call", ["score", "find", "stream", "passes"])
@pytest.mark.parametrize("method", ["GaussNewton", "EKFAC"])
def test_lines_of_scoring_say_how_far_all_checkpoints_are(call, method, capsys, monkeypatch):
    states = [nn.Linear(4, 3).state_dict() for _ in range(3)]
    made = attributor(None)
    made.featurize(FEW, states)
    monkeypatch.setattr("trak_lite.core.progress._LINE_EVERY", 0.0)
    capsys.readouterr()
    if call in ("score", "find"):
        made.score(FEW, method=method, **({"checkpoints": states} if call == "score" else {}))
    else:
        method = "GradDot" if method == "GaussNewton" else method
        item = 4 * 15 * (1 if method == "GradDot" else 2) + 4 * 40
        more = {"max_bytes": 20 * item} if call == "passes" else {}  # for half of the targets at a time
        made.stream_scores(FEW, FEW, method=method, checkpoints=states, **more)
    found = re.findall(
        r"(\w+).* \(checkpoint (\d) of 3\): .*?(; [\d:]+ to the end of all)?\n", capsys.readouterr().err
    )
    places = [place for label, place, _ in found if label == "Targets"]  # 40 rows take two batches
    assert places == [*("123123" if call == "passes" else "112233")]
    labels = {"Targets"} | ({"Fitting"} if method == "EKFAC" else set())
    assert {label for label, *_ in found} == labels | ({"Scoring"} if call in ("stream", "passes") else set())
    # A fit is known after the first checkpoint, and nothing is left after the last line.
    ends = [bool(end) for _, place, end in found if place > "1" or method != "EKFAC"]
    assert all(ends[:-1])
    assert not ends[-1]


def test_the_time_to_the_end_of_all_counts_rows_that_are_found_and_fits(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("trak_lite.core.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Stages.of(2, 150) as stages:
        for place in stages.each(["a", "b"]):
            for total, done in ((100, 40), (50, 0)):
                with KeptProgress(total, done, label=place, progress=None) as work:
                    for _ in range((total - done) // 10):
                        clock[0] += 10.0  # one unit a second
                        work.advance(10)
                        left = {"a": 150, "b": 0}[place] + (50 if total == 100 else 0) + total - done
                        left -= 10 * _ + 10
                        assert stages.time_left == (tqdm.format_interval(left) if left else "")


def test_the_time_to_the_end_of_all_has_no_solver_after_the_last_one(monkeypatch):
    """Checkpoints of 10 targets, a solver of 60 s without a bar, and 10 rows; a target or row takes a second."""
    clock = [0.0]
    monkeypatch.setattr("trak_lite.core.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
    said = []
    with Stages.of(2, 20) as stages:
        for _ in stages.each(range(2)):
            for pause in (0.0, 60.0):
                clock[0] += pause
                with KeptProgress(10, label="here", progress=None) as work:
                    for _ in range(10):
                        clock[0] += 1.0
                        work.advance(1)
                        said.append(stages.time_left)
    assert said[-10:] == [*(f"00:0{left}" for left in range(9, 0, -1)), ""]
    assert said[:2] == ["00:39", "00:38"]  # no solver has run yet
    assert said[19] == "01:20"  # another checkpoint as the first one


def test_the_time_to_the_end_of_all_expects_a_fit_only_in_the_first_pass(monkeypatch):
    """Two checkpoints of a fit of 100 units and 10 rows, then the same rows twice more; a unit takes a second."""
    clock = [0.0]
    monkeypatch.setattr("trak_lite.core.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
    said = []
    with Stages.of(2, later=(10, 10)) as stages:
        for number in range(3):
            for _ in stages.each(range(2)):
                with KeptProgress(10 if number else 110, label="here", progress=None) as work:
                    for _ in range(10 if number else 11):
                        clock[0] += 1.0 if number else 10.0
                        work.advance(1 if number else 10)
                        said.append(stages.time_left)
    assert said[10] == ""  # it is not known whether there is a fit
    assert said[11] == tqdm.format_interval(100 + 40)
    assert said[-40:] == [tqdm.format_interval(left) if left else "" for left in range(39, -1, -1)]


def test_the_fit_of_a_language_model_is_told_before_the_rows_and_only_once(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    tokens = torch.randint(5, (12, 6))
    data = TensorDataset(tokens, tokens)
    made = Attributor(model, "causal_language_modeling", None, proj_dim=8, progress=True)
    states = [{name: value + k for name, value in model.state_dict().items()} for k in (0.0, 0.1)]
    for again in (False, True):
        made.featurize(data, states)
        shown = re.split(r"[\r\n]+", capsys.readouterr().err)
        told = [line for line in shown if "gradients" in line]
        message = (
            "12 rows per checkpoint, and then the fit of Fisher: 36 gradients, 3.0 times as many as rows."
        )
        assert told == ([] if again else [message])
        if not again:
            assert shown.index(told[0]) < next(k for k, line in enumerate(shown) if "Featurizing" in line)
            assert any("Fitting the Fisher information of 1 (checkpoint 2 of 2)" in line for line in shown)


def test_an_attributor_shows_its_settings_and_the_content_of_its_store(tmp_path):
    made = attributor(tmp_path / "run.zarr")
    assert "gradients: chosen by the first samples" in repr(made)
    assert "run.zarr: no row yet, call featurize(data)" in repr(made)
    made.featurize(FEW)
    made.score(TARGETS, "first-five")
    for said in (
        "Attributor of Linear\n  task: image_classification\n  parameters: 15 in 2 tensors, on cpu\n",
        "features: 8 (countsketch, proj_dim=8)\n  rows: float16, 24 bytes each per checkpoint\n",
        "gradients: hook (every kept parameter is covered)\n",
        "method: GaussNewton(",
        "run.zarr: 40 train rows, 1 checkpoints, scores: first-five",
    ):
        assert said in repr(made)
    assert "<td>image_classification</td>" in made._repr_html_()
    for file in (tmp_path / "run.zarr").rglob("zarr.json"):
        file.write_text("{")
    assert "Attributor of Linear" in repr(made)  # with the error, which it does not raise


def test_scores_show_what_proj_dim_was_and_the_features_that_came_of_it():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))  # 20 and 15 parameters
    for proj_dim, features in ((8, "2 x 8"), (16, "31 in 2 modules")):
        made = Attributor(layers, "image_classification", None, proj_dim=proj_dim)
        made.featurize(FEW)
        assert f"proj_dim={proj_dim}, features={features}" in repr(made.score(TARGETS))


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_ctrl_c_tells_how_many_rows_are_done_and_how_to_continue(tmp_path, on_disk):
    path = tmp_path / "run.zarr" if on_disk else None
    made = attributor(path)
    with pytest.raises(KeyboardInterrupt) as caught:
        featurize(made, Stopping(interrupt))
    where = f"Finished work is stored in {path}. Make the same call again to continue."
    said, place = caught.value.__notes__
    assert said == f"Featurizing current: at least 96 of {N} rows are done."
    assert place == where if on_disk else "Nothing was stored on disk, because no path was given" in place
    with pytest.raises(StateError) as other:
        featurize(made, Stopping(fail))
    assert not any("done" in note or "Finished" in note for note in getattr(other.value, "__notes__", []))
    assert featurize(made).rows_found == 96
    with pytest.raises(KeyboardInterrupt) as caught:
        made.score(Rows(Stopping(interrupt), batch_size=BATCH, name="mine"), "itself")
    assert re.search(r"'itself'.*: at least 96 of 300 rows are done", caught.value.__notes__[0])


def test_a_ctrl_c_while_retraining_counts_models(tmp_path):
    trained = []

    def train(rows, seed):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(seed)
        return len(rows)

    masks = np.eye(4, dtype=bool)
    with pytest.raises(KeyboardInterrupt) as caught:
        retrain(train, masks, lambda model: [model], path=tmp_path / "r.zarr", seeds=(0, 1))
    assert caught.value.__notes__[0] == "Retraining: at least 3 of 8 models are done."
    assert f"Finished work is stored in {tmp_path}" in caught.value.__notes__[1]
