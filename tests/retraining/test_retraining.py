"""Retraining: what is trained, what is kept, what is refused; the noise of seeds."""

import contextlib

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError, ManifestMismatchError, NonFiniteError, RetrainingError
from trak_lite.evaluation import linear_datamodeling_score, seed_noise_ceiling, subset_masks
from trak_lite.retraining import retrain

MASKS = subset_masks(10, 5)
VALUES = np.arange(10.0) ** 2


class Recording:
    """Trains by adding up, remembers what it was asked for, and fails on request."""

    def __init__(self, fail_at=None, error=KeyboardInterrupt):
        self.calls, self.fail_at, self.error = [], fail_at, error

    def __call__(self, indices, seed):
        if len(self.calls) == self.fail_at:
            raise self.error("no luck")
        self.calls.append((tuple(indices.tolist()), seed))
        return float(VALUES[indices].sum() + 10 * seed)


def two_targets(total):
    return np.array([total, -total])


def other_targets(total):
    return np.array([total, 1 - total])


def retrained(train=None, masks=MASKS, output_fn=two_targets, **settings):
    return retrain(Recording() if train is None else train, masks, output_fn, **settings)


@pytest.mark.quick
def test_every_subset_is_trained_with_every_seed():
    train = Recording()
    found = retrained(train, seeds=(3, 7))
    assert train.calls == [(tuple(np.flatnonzero(mask).tolist()), seed) for mask in MASKS for seed in (3, 7)]
    expected = np.stack([[two_targets(total + 10 * seed) for seed in (3, 7)] for total in MASKS @ VALUES])
    np.testing.assert_array_equal(found.outputs, expected)
    np.testing.assert_array_equal(found.mean, expected.mean(axis=1))
    assert (found.seeds, found.compared) == ((3, 7), "")


@pytest.mark.parametrize("fail_at", [0, 1, 4, 9, 10])
def test_only_what_is_missing_is_trained_after_one_training_per_seed(tmp_path, fail_at):
    """The latter is to tell whether the training is the same. After 10 nothing is missing."""
    with contextlib.suppress(KeyboardInterrupt):
        retrained(Recording(fail_at), path=tmp_path / "r")
    rest, whole = Recording(), Recording()
    found = retrained(rest, path=tmp_path / "r")
    np.testing.assert_array_equal(found.outputs, retrained(whole).outputs)
    repeated = {0: [], 1: [0]}.get(fail_at, [0, 3])
    assert rest.calls == [whole.calls[place] for place in repeated] + whole.calls[fail_at:]
    stated = "subset 0, seed 0 (5 rows); subset 1, seed 1 (5 rows); outputs differ by 0 of"
    assert (stated in found.compared) == (len(repeated) == 2)


class OwnError(Exception):
    """Of the user's training."""


@pytest.mark.parametrize("error", [ValueError, OwnError, StopIteration])
def test_a_failing_training_names_subset_and_seed_and_keeps_the_rest(tmp_path, error):
    stated = rf"subset 1, seed 1 \(5 rows\) failed \({error.__name__}: no luck\)"
    with pytest.raises(RetrainingError, match=stated) as caught:
        retrained(Recording(3, error), path=tmp_path / "r")
    assert isinstance(caught.value.__cause__, error)
    rest = Recording()
    retrained(rest, path=tmp_path / "r")
    assert len(rest.calls) == 2 + 7, "one per seed is repeated"


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"masks": subset_masks(10, 5, seed=1)}, "masks is '"),
        ({"seeds": (0, 2)}, r"seeds is \[0, 1\] there, \[0, 2\] here"),
        ({"train": lambda indices, seed: 1.0}, "training.train_fn"),
        ({"output_fn": other_targets}, "training.output_fn"),
        ({"train_id": "mine"}, "training.id is 'absent' there, 'mine' here"),
    ],
)
def test_other_masks_seeds_or_functions_are_refused_at_the_same_path(tmp_path, change, seen):
    retrained(path=tmp_path / "r")
    with pytest.raises(ManifestMismatchError, match=seen):
        retrained(path=tmp_path / "r", **change)


def test_a_name_of_ones_own_stands_for_both_functions(tmp_path):
    given = {"path": tmp_path / "r", "train_id": "sums"}
    first = retrained(**given)
    again = retrained(lambda indices, seed: 1.0, output_fn=other_targets, **given)
    np.testing.assert_array_equal(again.outputs, first.outputs)


ONE_PER_TARGET = r"output_fn returned shape .* one number per target"
UNEVEN = {"train": lambda rows, seed: seed, "output_fn": lambda seed: [1.0] * (seed + 1)}
INVALID = [
    *(({"output_fn": lambda total, one=one: one}, ONE_PER_TARGET) for one in (1.0, [], [[1.0]])),
    (UNEVEN, "output_fn returned 2 numbers for subset 0, seed 1"),
    ({"train": lambda rows, seed: None}, "train_fn returned None"),
    ({"train": lambda rows: None}, "cannot be called as train_fn"),
    ({"masks": MASKS.astype(float)}, "masks must be a boolean matrix"),
    ({"masks": np.zeros((1, 4), bool)}, "without an empty subset"),
    *(
        ({"seeds": seeds}, "one or more different integers")
        for seeds in ((), (1, 1), 3, (0.5, 1.7), (0, None))
    ),
]
FAILED = r"subset 0, seed 0 .* failed \(ZeroDivisionErr"
NAN = "1 of 2 outputs .* subset 0, seed 0 .* target 1"


@pytest.mark.parametrize(
    ("settings", "seen", "error"),
    [
        ({"output_fn": lambda total: [total / 0]}, FAILED, RetrainingError),
        ({"output_fn": lambda total: [0, np.nan]}, NAN, NonFiniteError),
        *((*case, InvalidInputError) for case in INVALID),
    ],
)
def test_what_cannot_be_retrained_is_refused(settings, seen, error):
    with pytest.raises(error, match=seen):
        retrained(**settings)


# ------------------------------------------------------------------------ the noise of seeds
def test_the_ceiling_is_what_a_perfect_method_reaches():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(300, 1, 40))
    outputs = signal + 0.8 * rng.normal(size=(300, 3, 40))
    found = seed_noise_ceiling(outputs)
    reached = linear_datamodeling_score(signal[:, 0], None, outputs.mean(axis=1), num_resamples=1).mean
    assert found.ceiling == pytest.approx(reached, abs=0.02)
    assert 0 < found.between_seeds < found.reliability < found.ceiling < 1


def test_seeds_that_agree_only_by_chance_leave_no_room_and_one_tells_nothing():
    found = seed_noise_ceiling(np.stack([np.eye(4), -np.eye(4)], axis=1))
    assert found.between_seeds == pytest.approx(-1.0)
    assert (found.reliability, found.ceiling) == (0.0, 0.0)
    with pytest.raises(InvalidInputError, match=r"at least 2 seeds, got shape \(5, 1, 2\)"):
        retrained(seeds=(0,)).noise_ceiling()
