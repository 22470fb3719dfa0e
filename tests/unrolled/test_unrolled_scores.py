"""Scores of a replay are ordinary scores; what needs stored rows says so."""

import numpy as np
import pytest
from unrolled_cases import TARGETS, N, margin, recipe, targets

from trak_lite.errors import InvalidInputError, StateError
from trak_lite.methods import Unrolled
from trak_lite.scoring.scores import Scores
from trak_lite.unrolled import unrolled

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module", params=["disk", "memory"])
def scores(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") if request.param == "disk" else None
    return unrolled(recipe().train(path), targets(), margin, name="few")


def test_values_and_order(scores):
    values = scores.numpy()

    assert isinstance(scores, Scores)
    assert scores.shape == (N, TARGETS) == values.shape
    assert values.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(scores), values)
    np.testing.assert_array_equal(scores.rows([3, 0]), values[[3, 0]])
    np.testing.assert_array_equal(np.concatenate([tile for _, tile in scores.tiles()]), values)
    helpful, harmful = scores.top(3), scores.top(2, target=1, sign="harmful")
    np.testing.assert_array_equal(helpful.indices, np.argsort(-values, axis=0)[:3].T)
    np.testing.assert_array_equal(harmful.indices, np.argsort(values[:, 1])[:2])
    groups = np.arange(N) % 2
    sums = np.stack([values[groups == label].sum(0) for label in (0, 1)])
    np.testing.assert_allclose(scores.group(groups).sums, sums, rtol=1e-5, atol=1e-7)


def test_descriptions(scores):
    assert isinstance(scores.method, Unrolled)
    text = repr(scores)
    for expected in ("'few'", f"{N} train rows x {TARGETS} targets", "metasmoothness=", "steps=6"):
        assert expected in text
    assert "few" in scores._repr_html_()
    assert "<" in scores.gallery([0], lambda row: f"row {row}", k=2)._repr_html_()
    assert scores.verdict is None


def test_tables(scores):
    frame = pytest.importorskip("pandas") and scores.to_pandas()

    np.testing.assert_array_equal(frame.to_numpy(), scores.numpy())
    assert frame.index.name == "train_row"


@pytest.mark.parametrize(
    "call",
    [
        lambda scores: scores.self_influence(),
        lambda scores: scores.damping_path([0.1]),
        lambda scores: scores.standard_error(),
        lambda scores: scores.reliability(),
        lambda scores: scores.checkpoint_agreement(),
        lambda scores: scores.run,
    ],
)
def test_what_needs_stored_rows_says_so(scores, call):
    with pytest.raises(
        StateError, match=r"few.*not computed from stored rows.*Attributor.featurize"
    ) as caught:
        call(scores)
    assert "refine" not in str(caught.value)


def test_wrong_targets_are_named(scores):
    with pytest.raises(InvalidInputError, match="few"):
        scores.top(1, target=99)
