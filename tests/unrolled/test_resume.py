"""A training or a replay that is interrupted continues to the same bits (kills: ``benchmarks/killed_runs.py``)."""

import os
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from unrolled_cases import CLASSES, WIDTH, Dicts, changed, dict_margin, halves, recipe, replayed, vectors

from trak_lite import Attributor, Rows
from trak_lite.errors import CorruptStoreError, InvalidInputError
from trak_lite.store import check_store
from trak_lite.unrolled import SGD, Adam, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


def files(folder):
    return {file.name: file.read_bytes() for file in (folder / "states").glob("[0-9]*")}


def transposed(seed):
    model = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, CLASSES))
    model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
    return model


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)])
def test_a_layout_that_files_do_not_keep_does_not_change_bits(tmp_path, optimizer):
    few = halves(3, 1)
    made = recipe(transposed, data=halves(32, 0), optimizer=optimizer, batch_size=16, epochs=3, clip_norm=0.5)
    first = made.train(tmp_path / "a", interval=2)
    made.train(tmp_path / "b", interval=2)
    for number in (4, 6):
        (tmp_path / "b" / "states" / f"{number:09d}.safetensors").unlink()
    again, held = made.train(tmp_path / "b", interval=2), made.train()
    assert files(tmp_path / "a") == files(tmp_path / "b")
    torch.testing.assert_close(again.final.parameters, held.final.parameters, rtol=0, atol=0)
    assert len({replayed(run, few, block=2).tobytes() for run in (first, again, held)}) == 1


def test_checkpoints_of_a_run_are_featurized(tmp_path):
    run = recipe().train(tmp_path / "run", interval=2)
    states = run.checkpoints(3)
    assert len(states) == 3
    torch.testing.assert_close(dict(run.model().state_dict()), dict(states[-1]), rtol=0, atol=0)
    made = Attributor(run.model(), "image_classification", None)
    assert len(made.featurize(run.recipe.data, states).checkpoints) == 3


def test_what_is_no_finished_run_is_refused(tmp_path):
    run = recipe().train(tmp_path)
    (tmp_path / "states" / f"{run.num_steps:09d}.safetensors").unlink()
    with pytest.raises(InvalidInputError, match="not finished"):
        replayed(run)
    (tmp_path / "zarr.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="store of features"):
        recipe().train(tmp_path)


class Interrupted(Dicts):
    """Targets that interrupt after some loads."""

    def __init__(self, last):
        super().__init__(*vectors(4, 1))
        self.last = last

    def __getitem__(self, index):
        if self.loads == self.last:
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("block", "again", "loads"), [(1, 1, 4 + 2), (2, 2, 4 + 2), (2, 1, 4 + 4), (1, 4, 4 + 4)]
)
def test_finished_blocks_are_kept_and_those_of_another_size_computed_again(tmp_path, block, again, loads):
    """Every target is loaded once for its output, and once by the replay of its block."""

    def scores(run, data, block):
        return unrolled(run, Rows(data, name="few"), dict_margin, block=block).numpy()

    run = recipe().train(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        scores(run, Interrupted(4 + 2), block)
    data = Interrupted(-1)
    np.testing.assert_array_equal(scores(run, data, again), replayed(recipe().train(), block=again))
    assert data.loads == loads


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the scores of a run, and the folder of the same run whose replay was stopped after some segments."""
    folder = tmp_path_factory.mktemp("stopped")
    expected = replayed(recipe().train(folder / "whole", interval=2))
    run = recipe().train(folder / "run", interval=2)
    backwards = run.program.update

    def stops(*given):
        if len(list((folder / "run").glob("replays/*/*.safetensors"))):
            raise KeyboardInterrupt
        return backwards(*given)

    run.program.update = stops
    with pytest.raises(KeyboardInterrupt):
        replayed(run)
    return expected, folder / "run"


FILES = {
    "first state": "states/000000000.safetensors",
    "a state": "states/000000002.safetensors",
    "last state": "states/*[0-9].safetensors",
    "block": "replays/*/block-*.safetensors",
    "record": "run.json",
}


def changed_files(whole, path, count):
    """Yield the file with a flipped bit, at some places in head and values, cut off, empty, and as another one."""
    for place in np.linspace(0, 8 * len(whole) - 1, count).astype(int).tolist():
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        yield bytes(content)
    yield from (whole[:-1], b"", whole + b"\0")
    other = path.with_name("000000004.safetensors")
    if other.exists() and other != path:
        yield other.read_bytes()


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_of_a_run_is_refused_or_computed_again(stopped, tmp_path, kind):
    expected, folder = stopped
    shutil.copytree(folder, tmp_path / "run")
    path = sorted((tmp_path / "run").glob(FILES[kind]))[-1]
    whole = path.read_bytes()
    assert check_store(tmp_path / "run").ok
    for content in changed_files(whole, path, 30):
        path.write_bytes(content)
        report = check_store(tmp_path / "run")
        assert not report.ok
        assert path.name in str(report)
    if kind != "block":  # a block is computed again below
        for content in changed_files(whole, path, 2):
            path.write_bytes(content)
            with pytest.raises(CorruptStoreError, match=path.name):
                replayed(recipe().train(tmp_path / "run", interval=2))
        path.write_bytes(whole)
    np.testing.assert_array_equal(replayed(recipe().train(tmp_path / "run", interval=2)), expected)
    assert check_store(tmp_path / "run").ok


def test_a_state_of_another_run_is_refused(tmp_path):
    one, other = (changed(recipe(), seed=seed).train(tmp_path / str(seed)) for seed in range(2))
    place = f"states/{one.num_steps:09d}.safetensors"
    shutil.copyfile(other.path / place, one.path / place)
    with pytest.raises(CorruptStoreError, match="exchanged"):
        one.model()
    assert not check_store(tmp_path / "0").ok


def test_a_check_of_a_run_covers_its_scores(stopped, tmp_path):
    shutil.copytree(stopped[1], tmp_path / "run")
    replayed(recipe().train(tmp_path / "run", interval=2))
    chunk = next((tmp_path / "run/scores.zarr").glob("scores/**/c.0.0"))
    content = bytearray(chunk.read_bytes())
    content[0] ^= 1
    chunk.write_bytes(content)
    assert not check_store(tmp_path / "run").ok
    os.symlink(tmp_path, tmp_path / "link")
    assert check_store(tmp_path / "link/run", repair=True).set_aside
    assert check_store(tmp_path / "run").ok


def test_no_link_in_the_folder_of_a_run_is_followed(stopped, tmp_path):
    for name in ("run", "other"):
        shutil.copytree(stopped[1], tmp_path / name)
    replayed(recipe().train(tmp_path / "other", interval=2))
    (chunk,) = (tmp_path / "other/scores.zarr").glob("scores/**/c.0.0")
    chunk.write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "run/scores.zarr", ignore_errors=True)
    os.symlink(tmp_path / "other/scores.zarr", tmp_path / "run/scores.zarr")
    report = check_store(tmp_path / "run", repair=True)
    assert "symbolic link" in str(report)
    assert not report.set_aside
    with pytest.raises(CorruptStoreError, match="symbolic link"):
        replayed(recipe().train(tmp_path / "run", interval=2))
    assert chunk.read_bytes() == b"damaged"
