"""Retraining: what is trained, what is kept, what is refused; the noise of seeds."""

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


def test_every_subset_is_trained_with_every_seed():
    train = Recording()

    found = retrain(train, MASKS, two_targets, seeds=(3, 7))

    assert train.calls == [(tuple(np.flatnonzero(mask).tolist()), seed) for mask in MASKS for seed in (3, 7)]
    sums = MASKS @ VALUES
    expected = np.stack([[two_targets(total + 10 * seed) for seed in (3, 7)] for total in sums])
    np.testing.assert_array_equal(found.outputs, expected)
    np.testing.assert_array_equal(found.mean, expected.mean(axis=1))
    assert found.seeds == (3, 7)


def test_a_finished_retraining_repeats_one_training_per_seed(tmp_path):
    first = retrain(Recording(), MASKS, two_targets, path=tmp_path / "r")
    again = Recording()

    found = retrain(again, MASKS, two_targets, path=tmp_path / "r")

    np.testing.assert_array_equal(found.outputs, first.outputs)
    assert again.calls == [(tuple(np.flatnonzero(MASKS[place]).tolist()), place) for place in (0, 1)]
    assert "subset 0, seed 0 (5 rows); subset 1, seed 1 (5 rows); outputs differ by 0 of" in found.compared
    assert first.compared == ""


@pytest.mark.parametrize("fail_at", [0, 1, 4, 9])
def test_after_a_kill_only_what_is_missing_is_trained(tmp_path, fail_at):
    with pytest.raises(KeyboardInterrupt):
        retrain(Recording(fail_at), MASKS, two_targets, path=tmp_path / "r")
    rest = Recording()

    found = retrain(rest, MASKS, two_targets, path=tmp_path / "r")

    whole = Recording()
    np.testing.assert_array_equal(found.outputs, retrain(whole, MASKS, two_targets).outputs)
    repeated = {0: [], 1: [0], 4: [0, 3], 9: [0, 3]}[fail_at]  # one per seed: is the training the same?
    assert rest.calls == [whole.calls[place] for place in repeated] + whole.calls[fail_at:]


def other_targets(total):
    return np.array([total, 1 - total])


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"masks": subset_masks(10, 5, seed=1)}, "masks is '"),
        ({"seeds": (0, 2)}, r"seeds is \[0, 1\] there, \[0, 2\] here"),
        ({"train_fn": lambda indices, seed: 1.0}, "training.train_fn"),
        ({"output_fn": other_targets}, "training.output_fn"),
        ({"train_id": "mine"}, "training.id is 'absent' there, 'mine' here"),
    ],
)
def test_other_masks_seeds_or_functions_are_refused_at_the_same_path(tmp_path, change, seen):
    given = {"train_fn": Recording(), "masks": MASKS, "output_fn": two_targets, "path": tmp_path / "r"}
    retrain(**given)

    with pytest.raises(ManifestMismatchError, match=seen):
        retrain(**{**given, **change})


def test_a_name_of_ones_own_stands_for_both_functions(tmp_path):
    given = {"masks": MASKS, "path": tmp_path / "r", "train_id": "sums"}
    first = retrain(Recording(), output_fn=two_targets, **given)

    again = retrain(lambda indices, seed: 1.0, output_fn=other_targets, **given)

    np.testing.assert_array_equal(again.outputs, first.outputs)


def test_a_failing_training_names_subset_and_seed_and_keeps_the_rest(tmp_path):
    with pytest.raises(
        RetrainingError, match=r"subset 1, seed 1 \(5 rows\) failed \(ValueError: no luck\)"
    ) as caught:
        retrain(Recording(3, ValueError), MASKS, two_targets, path=tmp_path / "r")
    assert isinstance(caught.value.__cause__, ValueError)
    rest = Recording()
    retrain(rest, MASKS, two_targets, path=tmp_path / "r")
    assert len(rest.calls) == 2 + 7, "one per seed is repeated"


def test_a_failing_output_function_names_subset_and_seed():
    with pytest.raises(RetrainingError, match=r"subset 0, seed 0 .* failed \(ZeroDivisionError"):
        retrain(Recording(), MASKS, lambda total: [total / 0])


def test_outputs_that_are_not_finite_name_subset_seed_and_target():
    with pytest.raises(NonFiniteError, match=r"1 of 2 outputs .* subset 0, seed 0 .* the first for target 1"):
        retrain(Recording(), MASKS, lambda total: [total, np.nan])


@pytest.mark.parametrize("outputs", [1.0, [], [[1.0]]])
def test_outputs_must_be_one_number_per_target(outputs):
    with pytest.raises(InvalidInputError, match=r"output_fn returned shape .* one number per target"):
        retrain(Recording(), MASKS, lambda total: outputs)


def test_outputs_must_not_change_in_number():
    with pytest.raises(InvalidInputError, match="output_fn returned 2 numbers for subset 0, seed 1"):
        retrain(lambda indices, seed: seed, MASKS, lambda seed: [1.0] * (seed + 1))


@pytest.mark.parametrize(
    ("masks", "seeds", "seen"),
    [
        (MASKS.astype(float), (0,), "masks must be a boolean matrix"),
        (np.zeros((1, 4), bool), (0,), "without an empty subset"),
        (MASKS, (), "one or more different integers"),
        (MASKS, (1, 1), "one or more different integers"),
    ],
)
def test_masks_and_seeds_must_be_usable(masks, seeds, seen):
    with pytest.raises(InvalidInputError, match=seen):
        retrain(Recording(), masks, two_targets, seeds=seeds)


# ------------------------------------------------------------------------ the noise of seeds


def test_the_ceiling_is_what_a_perfect_method_reaches():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(300, 1, 40))
    outputs = signal + 0.8 * rng.normal(size=(300, 3, 40))

    found = seed_noise_ceiling(outputs)

    reached = linear_datamodeling_score(signal[:, 0], None, outputs.mean(axis=1), num_resamples=1).mean
    assert found.ceiling == pytest.approx(reached, abs=0.02)
    assert 0 < found.between_seeds < found.reliability < found.ceiling < 1


def test_seeds_that_agree_only_by_chance_leave_no_room():
    outputs = np.stack([np.eye(4), -np.eye(4)], axis=1)

    found = seed_noise_ceiling(outputs)

    assert found.between_seeds == pytest.approx(-1.0)
    assert (found.reliability, found.ceiling) == (0.0, 0.0)


def test_the_ceiling_needs_two_seeds():
    with pytest.raises(InvalidInputError, match=r"at least 2 seeds, got shape \(5, 1, 2\)"):
        retrain(Recording(), MASKS, two_targets, seeds=(0,)).noise_ceiling()
