"""Models sharded by FSDP2 give what whole models give: the same rows, scores, fingerprints and refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forked import answers_of
from late import Late

from trak_lite.store import check_store

cases: Any = Late("sharded_cases")  # which imports FSDP
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    cases.small_chunks()
    yield
    cases.small_chunks(256)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what runs a job on several ranks and gives their answers in order."""

    def run(world, job, *arguments):
        file = str(tmp_path_factory.mktemp("ranks") / "file")
        return answers_of(world, cases.answer, world, file, job, arguments)

    return run


@pytest.fixture(scope="module")
def looks(ranks):
    """What ranks of small models saw, at one start."""
    return ranks(2, cases.looked_at)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Files of full state dicts, two for each model."""
    folder = tmp_path_factory.mktemp("states")
    found: dict[str, list[str]] = {}
    for kind, build in cases.MODELS.items():
        model = build()
        for number in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p += 0.1 * number
            torch.save(model.state_dict(), folder / f"{kind}-{number}.pt")
            found.setdefault(kind, []).append(str(folder / f"{kind}-{number}.pt"))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return what gives the contents of the store of a whole model in one process."""

    def of(kind, checkpoints=None, **settings):
        path = tmp_path_factory.mktemp("whole") / "a.zarr"
        cases.run(cases.MODELS[kind](), kind, path, checkpoints, **settings)
        return cases.contents(path)

    return of


def check_same(path, expected):
    """Compare bits: every operation on a sample's numbers is the same one."""
    found = cases.contents(path)
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert check_store(path).findings == ()


@pytest.mark.parametrize("world", [2, 1])
def test_rows_and_scores_of_checkpoints_have_the_bits_of_a_whole_model(tmp_path, ranks, whole, states, world):
    """Each rank writes rows of its own, unevenly many, and some ranks none."""
    written = ranks(world, cases.featurize_both, str(tmp_path), states)
    assert sum(written) == 2 * 2 * cases.N
    for kind, files in states.items():
        check_same(tmp_path / f"{kind}.zarr", whole(kind, files))


def test_a_sharded_model_finds_the_rows_of_a_whole_one_and_the_other_way_round(tmp_path, ranks):
    path = str(tmp_path / "a.zarr")
    assert cases.rows_missing(path, False) == cases.N
    assert ranks(2, cases.rows_missing, path, True) == [0, 0]
    path = str(tmp_path / "b.zarr")
    assert sum(ranks(2, cases.rows_missing, path, True)) == cases.N
    assert cases.rows_missing(path, False) == 0


def test_copies_of_shards_change_nothing(tmp_path, ranks, whole):
    ranks(4, cases.featurize_copies, str(tmp_path))
    check_same(tmp_path / "copies.zarr", whole("transformer"))


def test_other_resharding_and_projectors_change_nothing(tmp_path, ranks, whole):
    ranks(2, cases.featurize_in_other_ways, str(tmp_path))
    check_same(tmp_path / "sketch.zarr", whole("transformer", projector="countsketch"))
    norms = whole("transformer", projector="rademacher", normalize="unit", store_norms=True)
    check_same(tmp_path / "norms.zarr", norms)


def test_language_models_fit_the_fisher_kernel_and_score_tokens_in_step(tmp_path, ranks):
    cases.explain_language_model(str(tmp_path / "whole.zarr"))
    ranks(2, cases.explain_language_model, str(tmp_path / "a.zarr"), True)
    check_same(tmp_path / "a.zarr", cases.contents(tmp_path / "whole.zarr"))


def test_training_goes_on_with_the_same_bits_after_a_use_of_the_model(looks):
    """Also after an error in the middle of a backward pass, which torch from 2.13 on can forget."""
    for look in looks:
        assert all(found == [True] * 2 for found in look["training"].values()), look["training"]


def test_two_parts_of_the_model_are_gathered_at_once_at_most(looks):
    """The one that is differentiated, and the next one that FSDP2 gathers ahead."""
    for look in looks:
        assert len({name for name, _ in look["gathered"]}) == len([*cases.transformer().parameters()])
        for name, gathered in look["gathered"]:
            own = {int(name.split(".")[1])} if name.startswith("blocks.") else set()
            assert own <= set(gathered)
            assert len(gathered) <= 2


def test_an_error_of_one_rank_is_told_to_the_others(tmp_path, ranks):
    found = sorted(ranks(2, cases.a_row_is_infinite, str(tmp_path / "a.zarr")))
    assert [text.partition(":")[0] for text in found] == ["NonFiniteError", "RankError"]
    assert "rows [40]" in found[0]
    assert "1 other rank" in found[1]


def test_how_gradients_come_about_is_told_as_of_a_whole_model(looks):
    for look in looks:
        sharded, whole = look["coverage"]
        assert sharded == whole


def test_sharded_state_dicts_are_checkpoints_too_and_keep_versions(looks):
    """Besides the model's own weights, also among others, there are those of one other model in several forms."""
    for look in looks:
        assert (look["checkpoints"], look["versions"]) == ((2, 3), (1, 3))


def test_what_is_not_supported_is_refused_by_name(looks):
    kinds = dict.fromkeys(("Use device='auto'", "meta device"), "InvalidInputError")
    kinds["does not fit Sequential"] = "CheckpointError"
    for look in looks:
        assert len(look["refused"]) == 19
        for said, found in look["refused"].items():
            assert found.startswith(kinds.get(said, "UnsupportedModelError")), (said, found)
            assert said in found, (said, found)


def test_a_store_begun_whole_is_continued_sharded_and_the_other_way_round(tmp_path, ranks):
    names = "all", "whole", "sharded"
    expected, begun_whole, begun_sharded = (str(tmp_path / f"{name}.zarr") for name in names)
    cases.featurize_rest(expected, False)
    cases.break_off(begun_whole, False)
    written = ranks(2, cases.featurize_rest, begun_whole, True)
    ranks(2, cases.break_off, begun_sharded, True)
    rest = cases.featurize_rest(begun_sharded, False)
    assert 0 < sum(written) < cases.N
    assert 0 < rest < cases.N
    for path in (begun_whole, begun_sharded):
        check_same(path, cases.contents(expected))
