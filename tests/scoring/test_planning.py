"""Plans: what they count is what the run has, what they advise fits, and they leave nothing behind."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import CheckpointError, InvalidInputError
from trak_lite.scoring import grams, planning
from trak_lite.store import open_store

GENERATOR = torch.Generator().manual_seed(0)
TRAIN = TensorDataset(torch.randn(400, 6, generator=GENERATOR), torch.arange(400) % 3)
TARGETS = TensorDataset(*TRAIN[:20])


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def attributor(path, **settings):
    return Attributor(
        perceptron(), "image_classification", path, **{"proj_dim": 16, "progress": False, **settings}
    )


def language_model(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tokens = torch.randint(7, (30, 5))
    made = Attributor(model, "causal_language_modeling", path, proj_dim=8, progress=False)
    return made, TensorDataset(tokens, tokens)


@pytest.mark.parametrize("cached_rows", [1, 1000], ids=["kernels stored", "kernels not stored"])
@pytest.mark.parametrize("settings", [{}, {"dtype": "int4"}, {"layout": "joint", "store_norms": True}])
def test_a_plan_counts_the_bytes_that_the_run_writes_and_leaves_nothing(
    settings, cached_rows, tmp_path, monkeypatch
):
    for module in (grams, planning):
        monkeypatch.setattr(module, "CACHED_ROWS", cached_rows)
    made = attributor(tmp_path / "run.zarr", **settings)
    states = [perceptron().state_dict() for _ in range(2)]
    states[1]["0.bias"] = states[1]["0.bias"] + 1
    drawn = torch.get_rng_state()
    plan = made.plan(TRAIN, TARGETS, checkpoints=states)
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.get_rng_state(), drawn)  # a training that follows is the same as without a plan
    assert "chosen by the first samples" in repr(made)

    made.featurize(TRAIN, states)
    scores = made.score(TARGETS)

    assert (plan.num_rows, plan.num_targets, plan.checkpoints) == (400, 20, 2)
    assert plan.settings["gradients"] == "hook (every kept parameter is covered)"
    assert plan.settings["gradients"] in repr(made)
    with open_store(made.path) as store:
        sizes = {"rows": 0, "targets": 0}
        for path in store.table_names():
            table = store.open_table(path)
            kind = {"c": "rows", "t": "targets"}.get(path[0])
            if kind is not None:
                sizes[kind] += table.spec.num_rows * table.spec.row_bytes
    assert {kind: plan.disk[kind] for kind in sizes} == sizes
    assert plan.disk["scores"] == scores.numpy().nbytes
    kernels = 2 * 8 * sum(segment.width**2 for segment in made.layout.segments)
    files = [file.stat().st_size for file in (tmp_path / "run.zarr").glob(".cache/*.safetensors")]
    assert plan.disk["kernels"] == (kernels if cached_rows == 1 else 0)
    assert kernels <= sum(files) <= kernels + 1000 * len(files) if cached_rows == 1 else not files
    assert set(plan.seconds) == {"rows", "targets", "scores"}
    for span in plan.seconds.values():
        assert 0 < span.low <= span.mean <= span.high
    assert plan.total.mean == pytest.approx(sum(span.mean for span in plan.seconds.values()))
    assert "400 rows x 2 checkpoints, 20 targets, batches of 32" in str(plan)


def test_a_plan_of_a_language_model_tells_its_fit(tmp_path):
    made, data = language_model(tmp_path / "run.zarr")
    plan = made.plan(data)
    assert set(plan.seconds) == {"rows", "fit", "scores"}
    assert plan.seconds["fit"].mean > 0
    assert plan.disk["fit, while it runs"] == 60 * made.layout.width * 4  # 4 x 8 gradients, of 30 rows twice
    assert plan.seconds["scores"] == planning.Span()
    assert made.featurize(data).rows_written == 30


def test_a_plan_takes_the_rows_and_the_batches_of_the_data(tmp_path):
    made = attributor(tmp_path / "run.zarr")
    rows = Rows(TRAIN, indices=range(100), batch_size=10)
    plan = made.plan(rows)
    assert (plan.num_rows, plan.batch_size, rows.batch_size) == (100, 10, 10)
    with pytest.raises(InvalidInputError, match="plan counts the checkpoints"):
        made.plan(rows, checkpoints=iter([perceptron().state_dict()]))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        made.plan(rows, checkpoints=tmp_path / "none")


def test_what_does_not_fit_is_named_with_a_setting_that_does(tmp_path, monkeypatch):
    made = attributor(tmp_path / "run.zarr")
    monkeypatch.setattr(planning, "_free_memory", lambda device: 10)
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    plan = made.plan(TRAIN, TARGETS)
    said = "\n".join(plan.advice)
    if plan.memory["featurizing"]:  # the system tells it, and it grew
        assert re.search(r"featurizing takes .* Use batch_size=\d+", said)
    assert "scoring takes" in said
    assert "Use proj_dim=8" in said
    assert "on disk and 0.977 KiB are free. Use dtype='int8' or proj_dim=8" in said
    assert said in str(plan)


def test_a_clearly_faster_batch_size_is_proposed_only_if_it_fits():
    def trial(seconds, growth):
        span = planning.Span(seconds, seconds, seconds, seconds)
        return planning._Trial(planning.Span(), planning.Span(), span, growth)

    settings, free = attributor(None)._settings, planning._free_memory(torch.device("cpu"))
    workspace, disk = planning.Workspace(None), {"scores": 0}

    def advised(**tried):
        trials = {int(size[1:]): trial(*values) for size, values in tried.items()}
        return list(planning._advice(settings, workspace, 32, trials, disk, {"featurizing": 1, "scoring": 1}))

    assert "Faster: batch_size=512 takes 25% of" in advised(b32=(1.0, 1), b128=(2.0, 1), b512=(4.0, 1))[0]
    assert advised(b32=(1.0, 1), b128=(3.6, 1)) == []
    if free is not None:
        assert "batch_size=128" in advised(b32=(1.0, 1), b128=(2.0, 1), b512=(4.0, 1 << 60))[0]


def test_batch_sizes_are_compared_by_whole_batches(monkeypatch):
    """Of 2000 rows there are too few batches of 512, the last of which is smaller, to be measured."""
    tried, measured = [], planning._tried

    def recorded(run, settings, rows, checkpoint, batch_size, **more):
        tried.append(batch_size)
        return measured(run, settings, rows, checkpoint, batch_size, **more)

    monkeypatch.setattr(planning, "_tried", recorded)
    data = TensorDataset(*(tensor[torch.arange(2000) % 400] for tensor in TRAIN.tensors))
    attributor(None).plan(Rows(data, batch_size=32))
    assert tried == [32, 128]


def test_the_last_batch_of_a_chunk_counts_by_its_share():
    """Warm-up of 3 batches is left out; every 4th batch commits a chunk and takes 3 s more."""
    gaps = [planning._Mark(9.0, 9.0)] * 3 + [
        planning._Mark(*[5.0 if number % 4 == 3 else 2.0] * 2) for number in range(3, 20)
    ]
    np.testing.assert_allclose(planning._usual(gaps, 4), (2.75, 2.75, 2.75, 2.75))
    assert planning._usual(gaps[:7], 64).mean == 2.0  # no chunk ends within the trial
    assert planning._usual(gaps[:5], 1).mean == 3.5  # each batch is a chunk


def test_the_time_of_a_plan_is_that_of_its_batches(monkeypatch):
    """A clock that each batch advances by 2 s, the first by 10 s more: 400 rows in 13 batches."""
    clock = [0.0]

    class Timed(TensorDataset):
        def __getitem__(self, row):
            if row % 32 == 0:
                clock[0] += 12.0 if row == 0 else 2.0
            return super().__getitem__(row)

    monkeypatch.setattr(planning._Mark, "now", classmethod(lambda cls: cls(clock[0], clock[0])))
    monkeypatch.setattr(planning, "_TRIED", ())
    plan = attributor(None).plan(Rows(Timed(*TRAIN.tensors), name="timed"))
    np.testing.assert_allclose(plan.seconds["rows"], (10 + 13 * 2, 10 + 13 * 2, 10 + 13 * 2, 10 + 13 * 2))
