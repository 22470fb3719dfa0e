"""Plans: what they count is what the run has, what they advise fits, and they leave nothing behind."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import labelled, perceptron
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import CheckpointError, InvalidInputError
from trak_lite.methods import GaussNewton, GradDot
from trak_lite.scoring import grams, planning
from trak_lite.store import open_store

TRAIN = labelled(400)
TARGETS = TensorDataset(*TRAIN[:20])


def attributor(path, **settings):
    settings = {"proj_dim": 16, "progress": False, **settings}
    return Attributor(perceptron(), "image_classification", path, **settings)


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
    made.score(TARGETS)

    assert (plan.num_rows, plan.num_targets, plan.checkpoints) == (400, 20, 2)
    assert plan.settings["gradients"] == "hook (every kept parameter is covered)"
    assert plan.settings["gradients"] in repr(made)
    with open_store(made.path) as store:
        sizes = {"rows": 0, "targets": 0, "scores": 0}
        for path in store.table_names():
            kind = {"c": "rows", "t": "targets", "s": "scores"}.get(path[0])
            if kind is not None:
                sizes[kind] += sum(
                    file.stat().st_size for file in (tmp_path / "run.zarr" / path).rglob("c.*")
                )
    assert {kind: plan.disk[kind] for kind in sizes} == sizes
    kernels = 2 * 8 * sum(segment.width**2 for segment in made.layout.segments)
    files = [file.stat().st_size for file in (tmp_path / "run.zarr").glob(".cache/*.safetensors")]
    assert plan.disk["kernels"] == (kernels if cached_rows == 1 else 0)
    assert kernels <= sum(files) <= kernels + 1000 * len(files) if cached_rows == 1 else not files
    assert set(plan.seconds) == {"rows", "targets", "scores"}
    for span in plan.seconds.values():
        assert 0 < span.low <= span.mean <= span.high
    assert plan.total.mean == pytest.approx(sum(span.mean for span in plan.seconds.values()))
    assert "400 rows x 2 checkpoints, 20 targets, batches of 128" in str(plan)


def test_kernels_on_the_side_of_few_rows_are_not_stored(tmp_path, monkeypatch):
    for module in (grams, planning):
        monkeypatch.setattr(module, "CACHED_ROWS", 1)
    data = TensorDataset(torch.randn(40, 100), torch.arange(40) % 10)
    made = Attributor(
        nn.Linear(100, 10), "image_classification", tmp_path / "run.zarr", projector="none", progress=False
    )
    assert made.plan(data, data).disk["kernels"] == 0
    made.featurize(data)
    made.score(data)
    assert not list((tmp_path / "run.zarr").glob(".cache/*.safetensors"))


def test_a_plan_of_a_language_model_tells_its_fit(tmp_path):
    model, tokens = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.randint(7, (30, 5))
    data, path = TensorDataset(tokens, tokens), tmp_path / "run.zarr"
    made = Attributor(model, "causal_language_modeling", path, proj_dim=8, progress=False)
    plan = made.plan(data)
    assert set(plan.seconds) == {"rows", "fit", "scores"}
    assert plan.seconds["fit"].mean > 0
    assert plan.disk["fit, while it runs"] == 60 * made.layout.width * 4  # 4 x 8 gradients, of 30 rows twice
    assert plan.seconds["scores"].mean == 0
    assert made.featurize(data).rows_written == 30
    assert plan.disk["kernels"] == sum(file.stat().st_size for file in (path / "fisher").rglob("c.*"))


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
    assert "Faster" not in said
    assert said in str(plan)


@pytest.mark.parametrize("method", [GradDot(), GaussNewton()])
def test_the_memory_of_scores_of_few_wide_rows_is_that_of_these_rows(method):
    data = TensorDataset(torch.randn(40, 1000), torch.arange(40) % 10)
    made = Attributor(
        nn.Linear(1000, 10), "image_classification", None, projector="none", method=method, progress=False
    )
    plan = made.plan(data, TensorDataset(*data[:2]))
    gradients = plan.memory["featurizing"] or 0  # of the targets
    assert max(40 * 10_010 * 2, gradients) <= plan.memory["scoring"] < max(200 * 10_010 * 4, gradients + 1)


@pytest.fixture
def clock(monkeypatch):
    seconds = [0.0]
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(planning.time, name, lambda: seconds[0])
    return seconds


class Timed(TensorDataset):
    """Rows of which a batch takes some seconds to load."""

    def __init__(self, clock, count, seconds):
        super().__init__(*(tensor[torch.arange(count) % 400] for tensor in TRAIN.tensors))
        self.clock, self.seconds, self.sizes = clock, seconds, list[int]()

    def __getitems__(self, rows):
        self.sizes.append(len(rows))
        self.clock[0] += self.seconds(rows)
        return [self[row] for row in rows]


@pytest.mark.parametrize(("seconds", "total"), [
    (lambda rows: 12.0 if 0 in rows else 2.0, 10 + 13 * 2),
    (lambda rows: 5.0 if 127 in rows else 2.0, 13 * 2.75),  # one in four commits a chunk
], ids=["first batch", "last batch of a chunk"])  # fmt: skip
def test_the_time_of_a_plan_is_that_of_its_batches(seconds, total, clock, monkeypatch):
    """400 rows in 13 batches of 2 s, some of which take longer."""
    monkeypatch.setattr("trak_lite.store._grid._FEWEST_ROWS_PER_COMMIT", 128)
    plan = attributor(None).plan(Rows(Timed(clock, 400, seconds), name="timed", batch_size=32))
    np.testing.assert_allclose(plan.seconds["rows"], [total] * 4)


def test_a_plan_of_slow_data_reads_less_than_the_run(clock):
    """Eight batches; a trial of another size takes at most a tenth of the run, and the batch that it ends with."""
    data = Timed(clock, 2000, lambda rows: 0.005 * len(rows))
    plan = attributor(None).plan(Rows(data, name="slow", batch_size=256))
    assert sum(data.sizes) <= 4 * 256 + 2 * (200 + 128)
    np.testing.assert_allclose(plan.seconds["rows"].mean, 0.005 * 256 * 8)
    assert "Faster" not in str(plan)


def test_the_time_of_scores_counts_that_of_writing_them_once(monkeypatch):
    stored = []
    monkeypatch.setattr(
        planning,
        "_storing_time",
        lambda run, size, **_: stored.append(size) or planning.Span(7.0, 7.0, 7.0, 7.0),
    )
    plan = attributor(None).plan(TRAIN, TARGETS, checkpoints=[perceptron().state_dict()] * 2)
    assert stored == [plan.disk["scores"]]
    assert 7 < plan.seconds["scores"].low < 14


@pytest.mark.parametrize("power", [0.0, 0.95])
def test_a_clearly_faster_batch_size_is_proposed(clock, power, monkeypatch):
    """Batches of 4000 rows end with their chunks of 256; of 800 there are too few of 128 to compare."""
    counts = {20_000: {32, 128, 512}, 4000: {32, 128}, 800: {32}}
    for count, sizes in [*counts.items()][power > 0.0 :]:
        data = Timed(clock, count, lambda rows: (len(rows) / 32) ** power)
        (*_, advice) = ["", *attributor(None).plan(Rows(data, name="many", batch_size=32)).advice]
        share = f"Faster: batch_size={max(sizes)} takes {32 / max(sizes):.0%} of"
        assert advice.startswith(share) if power == 0.0 and len(sizes) > 1 else advice == ""
        assert sizes == {32, 128, 512} & set(data.sizes)
    data = Timed(clock, 4000, lambda rows: 1.0)  # a batch of 512 would be two
    assert "Faster" not in str(attributor(None).plan(Rows(data, name="many", batch_size=512)))
    kept = {"VmRSS": 0, "VmHWM": 100, "MemAvailable": 50}
    monkeypatch.setattr(planning, "_proc_bytes", lambda file, name: kept[name])
    plan = attributor(None).plan(Rows(Timed(clock, 4000, lambda rows: 1.0), name="many", batch_size=32))
    assert plan.memory["featurizing"] is None or "Faster" not in "".join(plan.advice)  # no size fits


def test_memory_that_waits_to_be_freed_is_not_taken_from_that_of_the_run(tmp_path):
    """An old model or a traceback in a cycle: the trials free it, and would seem to need less."""
    made, held = attributor(tmp_path / "run.zarr"), [bytearray(b"1") * (64 << 20)]
    if made.plan(TRAIN).memory["featurizing"] is None:
        pytest.skip("the system does not tell the peak of the memory")
    held.append(held)
    del held
    assert made.plan(TRAIN).memory["featurizing"] > 0


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_batch_size_that_does_not_fit_ends_the_search_for_a_faster_one(tmp_path, error):
    class Bounded(TensorDataset):
        def __getitems__(self, rows):
            if len(rows) > 100:
                raise error
            return [self[row] for row in rows]

    data = Bounded(*(tensor.repeat(20, *[1] * (tensor.dim() - 1)) for tensor in TRAIN.tensors))
    plan = attributor(tmp_path / "run.zarr").plan(Rows(data, batch_size=32))
    assert plan.batch_size == 32
    assert plan.seconds["rows"].mean > 0


def test_the_memory_of_all_batch_sizes_is_counted_from_before_the_first_trial(clock, tmp_path, monkeypatch):
    """The first sample takes 1000 bytes of 1700, a batch of n rows n, and the process keeps the most that it had."""
    most = 0

    class Growing(Timed):
        def __getitem__(self, row):
            nonlocal most
            most = max(most, 1000)
            return super().__getitem__(row)

        def __getitems__(self, rows):
            nonlocal most
            most = max(most, 1000 + len(rows))
            return super().__getitems__(rows)

    def told(_, field):
        return 1700 - most if field == "MemAvailable" else 100 + most

    monkeypatch.setattr(planning, "_proc_bytes", told)
    data = Growing(clock, 20_000, lambda rows: 1.0)
    plan = attributor(tmp_path / "run.zarr").plan(Rows(data, batch_size=32))
    if plan.memory["featurizing"] is None:
        pytest.skip("the system does not tell the peak of the memory")
    assert plan.memory["featurizing"] == 1032
    assert plan.advice == ("Faster: batch_size=512 takes 6% of the time per row (and 1.48 KiB).",)
