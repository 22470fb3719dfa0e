"""Effects of sets and repairs, for ridge regressions whose changes are known in closed form."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from held_scores import held_scores
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Refine, Rows, repair, try_removals, verify, what_if
from trak_lite.errors import CorruptStoreError, InvalidInputError, StateError, UnknownNameError
from trak_lite.methods import GaussNewton, GradDot
from trak_lite.store import open_store

N, M, D, RIDGE = 120, 14, 5, 2.0
EVERYTHING = np.arange(N)


def drawn(count, seed):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 4, count)
    inputs = rng.normal(size=(count, D)) + 2.0 * np.eye(4, D)[groups]
    values = inputs @ np.arange(1.0, D + 1) + rng.normal(size=count) + np.square(inputs[:, 0])
    return inputs.astype(np.float32), values.astype(np.float32), groups


TRAIN, TARGETS = drawn(N, 0), drawn(M, 1)
DATA, ASKED = (TensorDataset(*map(torch.from_numpy, part[:2])) for part in (TRAIN, TARGETS))


def weights(rows, noise=0.0, values=TRAIN[1]):
    """The ridge regression on some rows, in closed form."""
    x, y = TRAIN[0][rows].astype(float), values[rows].astype(float)
    return np.linalg.solve(x.T @ x + RIDGE * np.eye(D), x.T @ y) + noise


def model(values):
    made = nn.Linear(D, 1, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(values)[None])
    return made


class Training:
    """Trains in closed form, with noise of the seed on the weights, and counts its calls."""

    def __init__(self, noise=0.02):
        self.noise, self.calls = noise, []

    def __call__(self, rows, seed):
        self.calls.append((len(rows), seed))
        return model(weights(rows, self.drawn(rows, seed))).state_dict()

    def drawn(self, rows, seed):
        return self.noise * np.random.default_rng((int(rows.sum()), seed)).normal(size=D)


def output(rows, noise=0.0):
    return TARGETS[0].astype(float) @ weights(rows, noise)


def without(rows):
    return np.setdiff1d(EVERYTHING, rows)


def scored(path=None, targets=ASKED, **more):
    """Scores that are the influence of each row on the regression: one kernel, without projection."""
    damping = RIDGE * D / np.square(TRAIN[0]).sum()  # in units of the mean eigenvalue
    settings = {"layout": "joint", "dtype": "float32", "method": GaussNewton(damping=float(damping))}
    made = Attributor(model(weights(EVERYTHING)), "regression", path, progress=False, **settings)
    made.featurize(DATA, columns={"source": TRAIN[2]})
    return made.score(targets, "asked", **more)


@pytest.fixture(scope="module")
def scores():
    return scored()


@pytest.fixture(scope="module")
def tried():
    found = scored()
    try_removals(found, Training(), ASKED, groups="source")
    return found


# ------------------------------------------------------------------------ without trials
def test_the_prediction_is_the_sum_of_scores(scores):
    """Of any scores, by numbers or a mask; without retrainings there is no interval, and the text says why."""
    matrix = np.random.default_rng(0).normal(size=(10, 3))
    held = held_scores(matrix)
    found = what_if(held, remove=[7, 2])
    np.testing.assert_allclose(found.predicted, -matrix[[2, 7]].sum(0), rtol=1e-6)
    assert found.lower is None
    assert found.upper is None
    assert "without 2 of 10 train rows (20.0%)" in str(found)
    assert "No interval: no retraining is stored with these scores" in str(found)
    whole = "The prediction is the sum of scores."  # retraining functions refuse these scores
    assert str(found).endswith(whole)
    assert str(what_if(scored(dense=False), [1])).endswith(whole)
    assert "targets) (on the command line: trak-lite trials CONFIG), or verify." in what_if(scores, [1]).basis
    np.testing.assert_array_equal(what_if(held, np.isin(np.arange(10), [2, 7])).predicted, found.predicted)
    both = what_if(held, remove=[1], add=[3, 4])
    np.testing.assert_allclose(both.predicted, matrix[[3, 4]].sum(0) - matrix[1], rtol=1e-6)
    assert "without 1 of 10 train rows (10.0%), twice 2 of 10 train rows (20.0%)" in repr(both)
    assert "none added or relabelled any" in both.basis
    assert json.loads(json.dumps(both.to_json()))["predicted"] == both.predicted.tolist()


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ({}, "got 0 to remove, 0 to add, 0 to relabel of 10"),
        ({"remove": range(10)}, "leaves at least one row; got 10 to remove"),
        ({"remove": [2, 1], "add": [1]}, r"each in one of these only.* of 10; in several of these: 1\.$"),
        (
            {"remove": [2, 7, 1], "add": [7, 3, 2]},
            r"3 to add, 0 to relabel of 10; in several of these: 2, 7\.$",
        ),
        ({"remove": [1, 1]}, "remove names a row twice"),
        ({"add": [10]}, r"must lie between 0 and 9, got \[10\]\."),
        ({"remove": [3, 10, -1]}, r"must lie between 0 and 9, got \[10, -1\]\."),
        ({"remove": [0.5]}, "list of integers, got float64 of shape .*indices of a Selection"),
        ({"remove": np.zeros(10, bool)}, "at least one row"),
        ({"add": np.ones(9, bool)}, r"add: a mask needs one entry for each of the 10 .* shape \(9,\)"),
        *(
            ({"remove": [1], "level": level}, f"level must lie between 0 and 1, got {level!r}")
            for level in ("x", 2, -1, np.nan, None, 1.0, True)
        ),
    ],
)
def test_sets_that_cannot_be_changed_are_refused(asked, seen):
    """Levels are without trials too."""
    with pytest.raises(InvalidInputError, match=seen):
        what_if(held_scores(np.ones((10, 3))), **asked)


@pytest.mark.parametrize("call", [partial(what_if, remove=[0, 1]), partial(repair, target=0, goal=-1.0)])
def test_effects_of_scores_of_some_rows_are_refused(call):
    """Scores of the other rows are not known, and NaN would be the sum."""
    attributor = Attributor(model(weights(EVERYTHING)), "regression", None, progress=False, proj_dim=4)
    attributor.featurize(DATA)
    refined = attributor.score(ASKED, refine=Refine(candidates=4, method=GradDot()))
    for some in (attributor.stream_scores(DATA, ASKED, k=4, method=GradDot()), refined):
        with pytest.raises(
            InvalidInputError, match=r"4 most helpful .*effects of sets.*without k and refine"
        ):
            call(some)


def test_new_labels_change_scores_as_if_the_rows_had_been_trained_with_them(scores):
    """The kernel and the targets stay; q of a row is its residual, so scores are linear in labels."""
    rows = np.array([5, 80, 17])
    labels = torch.tensor([40.0, -3.0, 0.5])
    found = what_if(scores, relabel=(rows, TensorDataset(DATA.tensors[0][rows], labels)))
    residuals = TRAIN[1] - TRAIN[0] @ weights(EVERYTHING)  # q, to which scores are proportional
    ratios = (labels.numpy() - TRAIN[1][rows]) / residuals[rows]
    np.testing.assert_allclose(found.predicted, ratios @ scores.numpy()[rows], rtol=1e-4, atol=1e-5)
    changed = TRAIN[1].copy()
    changed[rows] = labels
    # Of a ridge regression this is the change itself.
    after = TARGETS[0].astype(float) @ weights(EVERYTHING, values=changed)
    np.testing.assert_allclose(found.predicted, after - output(EVERYTHING), rtol=0.05)
    assert "with other labels 3 of 120" in found.change
    assert found.lower is None
    same = Rows(DATA, indices=rows)
    np.testing.assert_allclose(what_if(scores, relabel=(rows, same)).predicted, 0.0, atol=1e-5)
    with pytest.raises(InvalidInputError, match="relabel names 2 rows, but its data has 3 samples"):
        what_if(scores, relabel=(rows[:2], same))
    with pytest.raises(StateError, match="not computed from stored rows"):
        what_if(held_scores(np.ones((N, M))), relabel=(rows, same))


class Drawn(TensorDataset):
    """Inputs with noise that is drawn anew at each access."""

    def __getitem__(self, row):
        values, label = super().__getitem__(row)
        return values + torch.randn(D, dtype=torch.float32, device="cpu"), label


def test_samples_of_other_rows_are_no_new_labels(scores):
    """Named are the rows of which no tensor is that of the train row; only the process that featurized knows these."""
    rows, labels = np.array([5, 80, 17]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float32, device="cpu")
    own, others = DATA.tensors[0][rows], DATA.tensors[0][[80, 5, 17]]
    for inputs, seen in ((others, "rows 5, 80 differ"), (torch.flip(own, [1]), "rows 5, 80, 17 differ")):
        with pytest.raises(InvalidInputError, match=f"{seen} from the train rows in all tensors"):
            what_if(scores, relabel=(rows, TensorDataset(inputs, labels)))
    mask = np.isin(EVERYTHING, rows)
    with pytest.raises(InvalidInputError, match="rows 17, 80 differ"):
        what_if(scores, relabel=(mask, TensorDataset(own, labels)))
    what_if(scores, relabel=(mask, TensorDataset(DATA.tensors[0][mask], labels)))
    what_if(scores, relabel=(rows, TensorDataset(others, DATA.tensors[1][rows])))  # the label alone is shared


def test_samples_that_cannot_be_compared_with_train_rows_are_not_refused(tmp_path):
    """Drawn anew, of one tensor, of another length, or token ids that hold the label; nor without train data."""
    torch.manual_seed(0)
    drawn_anew = Attributor(model(weights(EVERYTHING)), "regression", None, proj_dim=4, progress=False)
    drawn_anew.featurize(Drawn(*DATA.tensors))
    what_if(drawn_anew.score(ASKED), relabel=([3], Rows(Drawn(*DATA.tensors), indices=[3])))
    tokens = torch.randint(7, (20, 4), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    embedding = nn.Embedding(8, 3, dtype=torch.float32, device="cpu")

    def mean(net, batch):
        return net(batch[0]).mean((1, 2))

    answer = torch.cat([tokens[:2, :3], torch.full((2, 1), 7, dtype=torch.int64, device="cpu")], 1)
    for parts in (1, 2):
        settings = {"proj_dim": 4, "progress": False, "method": "GradDot"}
        made = Attributor(embedding, mean, tmp_path / f"{parts}.zarr", **settings)
        made.featurize(TensorDataset(*[tokens] * parts))
        found = made.score(TensorDataset(*[tokens] * parts))
        for inputs in (answer, answer[:, 1:]):
            what_if(found, relabel=([0, 1], TensorDataset(*[inputs] * parts)))
    with pytest.raises(InvalidInputError, match="rows 0, 1 differ"):
        what_if(found, relabel=([0, 1], TensorDataset(*[torch.full_like(answer, 7)] * 2)))
    again = Attributor.open(tmp_path / "2.zarr", embedding, task=mean).scores("targets")
    what_if(again, relabel=([0, 1], TensorDataset(*[torch.full_like(answer, 7)] * 2)))


# ------------------------------------------------------------------------ with trials
def test_trials_are_retrainings_in_closed_form_and_are_stored_with_the_scores(tmp_path):
    found, training = scored(tmp_path / "a.zarr"), Training()
    settings = {"budget": 18, "shares": (0.05, 0.1), "groups": "source", "seeds": np.arange(5, 7)}
    trials = try_removals(found, training, ASKED, **settings)
    assert len(training.calls) == 5 + 2 * 18
    assert [count for count, _ in training.calls[5::2]] == [N - 6] * 9 + [N - 12] * 9
    np.testing.assert_allclose(trials.shares, [0.05] * 9 + [0.1] * 9)
    before = np.array([output(EVERYTHING, training.drawn(EVERYTHING, seed)) for seed in range(5)])
    np.testing.assert_allclose(trials.outputs, before.mean(0), rtol=1e-5)
    np.testing.assert_allclose(trials.noise, before.std(0, ddof=1), rtol=1e-2, atol=1e-5)

    matrix = found.numpy().astype(float)
    opened = Attributor.open(tmp_path / "a.zarr", model(np.zeros(D))).scores("asked")
    np.testing.assert_array_equal(opened.trials.measured, trials.measured)
    again = Training()
    same = try_removals(found, again, ASKED, **settings)
    np.testing.assert_array_equal(same.measured, trials.measured)
    assert len(again.calls) == 5 + 2, "one stored training per seed is repeated"
    # Every trial is one of a set whose scores sum to the prediction, and whose removal changes the outputs so.
    helpful = np.argsort(-matrix, axis=0, kind="stable")[:6].T
    sums = np.array([-matrix[rows].sum(0) for rows in helpful])
    place = int(np.abs(sums - trials.predicted[1]).sum(1).argmin())
    np.testing.assert_allclose(trials.predicted[1], sums[place], rtol=1e-4)
    rows = without(helpful[place])
    after = np.mean(
        [output(rows, training.drawn(rows, seed)) for seed in (7, 8)], axis=0
    )  # of the second set
    np.testing.assert_allclose(trials.measured[1], after - before.mean(0), rtol=1e-3, atol=1e-4)
    for place, sign in ((2, 1), (6, -1)):  # those that harm, or help, all targets in the mean
        rows = np.argsort(sign * matrix.mean(1), kind="stable")[:6]
        np.testing.assert_allclose(trials.predicted[place], -matrix[rows].sum(0), rtol=1e-4)
    error = np.abs(TRAIN[1] - TRAIN[0] @ weights(EVERYTHING))  # q of a regression: whose label may be wrong
    suspects = np.argsort(-error, kind="stable")[:6]
    np.testing.assert_allclose(trials.predicted[8], -matrix[suspects].sum(0), rtol=1e-4)
    centred = trials.predicted[1] + 6 * matrix.mean(0)
    standard = centred / matrix.std(0) / np.sqrt(6 * (1 - 6 / N))
    np.testing.assert_allclose(trials.standard[1], standard, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [8, 20, 60])
def test_no_trial_is_a_copy_of_another(num_rows):
    """The rows that harm all targets are the same in every round of one size, and sizes of small shares coincide."""
    rows, calls = DATA.tensors[0][:num_rows], []
    made = Attributor(model(weights(np.arange(num_rows))), "regression", None)
    made.featurize(TensorDataset(rows, DATA.tensors[1][:num_rows]))

    def train(kept, seed):
        calls.append(tuple(np.setdiff1d(np.arange(num_rows), kept).tolist()))
        return model(weights(kept))

    trials = try_removals(made.score(ASKED), train, ASKED, shares=(0.01, 0.02, 0.05, 0.1, 0.4))
    assert len(set(calls[5:])) == len(calls[5:]) == len(trials) == 60
    assert max(map(len, calls)) == round(0.4 * num_rows)
    assert trials.shares.tolist() == [len(removed) / num_rows for removed in calls[5:]]


def test_intervals_cover_removals_of_other_sets(tried):
    """Random sets, a source, the rows that are most helpful for a target; the noise of seeds is in them."""
    rng, training, covered = np.random.default_rng(5), Training(), []
    matrix, before = tried.numpy(), output(EVERYTHING)
    for size in (3, 12, 24):
        orders = [rng.permutation(N) for _ in range(6)]
        orders += [np.argsort(-matrix[:, target]) for target in range(0, M, 2)]
        orders += [np.argsort(TRAIN[2] != group, kind="stable") for group in range(4)]
        for order in orders:
            rows = without(order[:size])
            found = what_if(tried, order[:size])
            assert found.lower is not None
            assert found.upper is not None
            change = output(rows, training.drawn(rows, 77)) - before
            covered.append(((found.lower <= change) & (change <= found.upper)).mean())
            widths = (found.upper - found.lower)[np.isfinite(found.upper)]
            assert np.median(widths) < 12 * max(np.abs(change).max(), 0.1)
    assert 0.87 <= np.mean(covered) <= 0.99
    text = str(what_if(tried, order[:24]))
    assert "From 60 trial sets (1 model each)" in text
    assert "intervals exclude 0 (level 90%)" in text


def test_intervals_hold_noise_of_seeds_that_does_not_depend_on_the_rows():
    """As that of an initialisation: models of one seed are off in the same direction, whichever set is left out."""

    class Initialised(Training):
        def drawn(self, rows, seed):
            return self.noise * np.random.default_rng(seed).normal(size=D)

    rng, covered, training = np.random.default_rng(6), [], Initialised(0.1)
    for first in (0, 100, 200, 300):
        found = scored()
        seeds = {"seeds": (first,), "base_seeds": tuple(range(first + 500, first + 530))}
        try_removals(found, training, ASKED, shares=(0.05,), **seeds)
        for seed in range(1000, 1016):
            rows = rng.permutation(N)[:6]
            effects = what_if(found, rows)
            change = output(without(rows), training.drawn(rows, seed)) - output(EVERYTHING)
            covered.append(((effects.lower <= change) & (change <= effects.upper)).mean())
    assert 0.85 <= np.mean(covered) <= 0.98, np.mean(covered)


def test_sets_beyond_the_trials_are_refused_with_the_reason(tried):
    found = what_if(tried, np.arange(60))
    assert found.lower is None
    assert "larger or denser than all 60 trial sets" in found.basis
    assert "shares=..., groups=...) measures sets of other sizes and kinds" in found.basis
    np.testing.assert_allclose(found.predicted, -tried.numpy()[:60].sum(0), rtol=1e-5)
    assert found.to_json()["lower"] is None


def test_without_trials_the_subsets_of_a_verdict_answer_for_random_sets_only():
    found, training = scored(), Training()
    verify(found, training, ASKED, budget=30, alpha=0.8)
    rng, covered = np.random.default_rng(3), []
    for _ in range(20):
        rows = rng.permutation(N)[:24]
        effects = what_if(found, rows)
        if effects.lower is not None and effects.upper is not None:
            change = output(without(rows), training.drawn(without(rows), 77)) - output(EVERYTHING)
            covered.append(((effects.lower <= change) & (change <= effects.upper)).mean())
            assert "From 30 random subsets of the verdict" in effects.basis
    assert len(covered) > 15
    assert np.mean(covered) > 0.8
    best = np.argsort(-found.numpy()[:, 0])[:24]
    for few, why in ((best, "larger or denser"), ([0], "an interval needs 9")):
        refused = what_if(found, few)
        assert refused.lower is None
        assert why in refused.basis
        assert "try_removals" in refused.basis
    try_removals(found, training, ASKED, budget=9, seeds=(2,), base_seeds=(0, 1))
    assert "9 trial sets" in what_if(found, few).basis


def test_the_budget_that_a_set_is_told_to_need_gives_it_an_interval():
    """The most helpful rows of a single target are denser than most trials."""
    made = scored(targets=TensorDataset(*ASKED[:1]))
    best, asked = np.argsort(-made.numpy()[:, 0])[:24], TensorDataset(*ASKED[:1])
    try_removals(made, Training(), asked, groups="source")
    refused = what_if(made, best, level=0.95)
    assert refused.lower is None
    assert "Measure more sets: try_removals(..., budget=" in refused.basis
    budget = int(re.search(r"budget=(\d+)", refused.basis)[1])
    try_removals(made, Training(), asked, groups="source", budget=budget)
    assert what_if(made, best, level=0.95).lower is not None
    assert "changes of the other targets" not in str(repair(made, 0, -0.2))


SHARES = r"shares must lie between 0 and 1 and leave a row, got \(0.0, 0.1\)"


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"budget": 8}, "budget must be an integer of at least 9, got 8"),
        ({"budget": 10**20}, "and at most 1,000,000, got 1"),
        ({"seed": None}, "seed must be an integer of at least 0, got None"),
        (
            {"base_seeds": (0,)},
            r"base_seeds must be 2 or more different integers, such as \(0, 1\), got \(0,\)",
        ),
        ({"base_seeds": 3}, "base_seeds must be 2 or more different integers.*got 3"),
        ({"seeds": (0.5,)}, r"seeds must be one or more different integers.*got \(0.5,\)"),
        (
            {"seeds": (4,)},
            r"the 60 sets take the seeds 4 to 63, and base_seeds are \(0, 1, 2, 3, 4\).*seeds=\(5,\)",
        ),
        ({"seeds": (5, 7), "base_seeds": (0, 184)}, "take the seeds 5 to 184"),
        ({"shares": (0.0, 0.1)}, SHARES),
        (
            {"shares": (0.01,), "budget": 121},
            "at most 120, the number of sets of at most 1 of 120 train rows, got 121",
        ),
        ({"shares": ()}, "shares must lie between 0 and 1"),
        ({"groups": "author"}, "author"),
        ({"groups": [1, 2]}, "The groups of train rows must hold 120 labels"),
    ],
)
def test_trials_that_cannot_be_made_are_refused(scores, changes, seen):
    training = Training()
    with pytest.raises(UnknownNameError if seen == "author" else InvalidInputError, match=seen):
        try_removals(scores, training, ASKED, **changes)
    assert training.calls == []


def stored_trials(path, values):
    with open_store(str(path), "r+") as store:
        store.put_entry("trials/scores/asked", store.open_table("scores/asked").content_key(), values)


def test_damaged_trials_are_told_and_trials_go_with_their_scores(tmp_path):
    found = scored(tmp_path / "a.zarr")
    for shape in ((3, 3), (3, 5), (1, 4), (4,)):
        stored_trials(tmp_path / "a.zarr", np.zeros(shape))
        said = rf"trials of shape {re.escape(str(shape))}\). Call try_removals again"
        with pytest.raises(CorruptStoreError, match=said):
            what_if(found, [1])
    stored_trials(tmp_path / "a.zarr", np.zeros((3, 1 + 3 * M)))
    assert found.trials is not None
    Attributor.open(tmp_path / "a.zarr", model(np.zeros(D))).drop_scores("asked")
    with open_store(str(tmp_path / "a.zarr")) as store:
        assert store.entry_names("trials") == []


# ------------------------------------------------------------------------ repair
def test_a_repair_is_the_smallest_set_whose_interval_reaches_the_goal(tried):
    target = 3
    order = np.argsort(-tried.numpy()[:, target], kind="stable")
    full = what_if(tried, order[:20], level=0.6)
    goal = 0.5 * float(full.upper[target])
    assert goal < 0
    found = repair(tried, target, goal)
    assert found.reached
    np.testing.assert_array_equal(found.rows, order[: len(found.rows)])
    assert found.effects.upper[target] <= goal
    assert what_if(tried, found.rows[:-1], level=0.6).upper[target] > goal
    assert repair(tried, target, goal, chance=0.95).rows.size > found.rows.size
    assert found.success is None
    change = output(without(found.rows)) - output(EVERYTHING)
    assert change[target] <= goal
    rise = repair(tried, target, 0.05)
    assert set(rise.rows) <= set(np.argsort(tried.numpy()[:, target])[:24])
    far = repair(tried, target, -1e6)
    assert not far.reached
    assert "NOT predicted to be reached" in str(far)
    json.dumps(far.to_json())


def test_a_repair_without_retrainings_goes_by_the_prediction():
    matrix = np.random.default_rng(1).normal(size=(40, 3))
    found = repair(held_scores(matrix), 1, -3.0)
    falls = np.cumsum(np.sort(matrix[:, 1])[::-1])
    assert len(found.rows) == np.argmax(falls >= 3.0) + 1
    assert found.reached
    said = "goal -3, predicted to be reached by the uncalibrated sum of scores, without a probability\n"
    assert said in str(found)
    assert "No interval" in str(found)
    far = repair(held_scores(matrix), 1, -100.0)
    assert not far.reached
    assert "NOT predicted to be reached by the uncalibrated sum of scores, without a prob" in str(far)


@pytest.fixture(scope="module")
def tried_small():
    found = scored()
    try_removals(found, Training(), ASKED, groups="source", shares=(0.01, 0.02, 0.04), budget=36)
    return found


@pytest.mark.parametrize("target", range(M))
def test_a_repair_does_not_count_sets_without_an_interval(tried_small, target):
    """The sum of larger sets reaches the goal; the intervals end before."""
    order = np.argsort(-tried_small.numpy()[:, target], kind="stable")
    sets = [what_if(tried_small, order[:size], level=0.6) for size in range(1, 25)]
    known = [found.lower is not None and np.isfinite(found.lower[target]) for found in sets]
    ends = [found.upper[target] if is_known else np.inf for found, is_known in zip(sets, known, strict=True)]
    assert not known[-1]
    assert "can be several times too small or too large" in sets[-1].basis
    goal = float(min(ends)) - 0.01
    assert sets[-1].predicted[target] < goal < 0
    found = repair(tried_small, target, goal)
    assert not found.reached
    assert known[len(found.rows) - 1]
    assert (
        "NOT predicted to be reached with a chance of 80% by a set that has an interval; shown is the best"
        in str(found)
    )
    assert "inf" not in str(found)
    nearer = repair(tried_small, target, goal + 0.02)
    assert nearer.effects.upper[target] <= goal + 0.02 or not nearer.reached


def test_effects_count_the_intervals_that_there_are(tried_small):
    found = what_if(tried_small, [0], level=0.6)
    missing = np.arange(M) < M - 2
    lower, upper = np.where(missing, -np.inf, 1.0), np.where(missing, np.inf, 2.0)
    text = str(replace(found, lower=lower, upper=upper, predicted=np.linspace(-2, 1.5, M)))
    assert "2 of 2 intervals exclude 0 (level 60%)" in text
    assert "largest falls: target 0: -2 (no interval); target 1" in text
    none = np.full(M, np.inf)
    assert "exclude 0" not in str(replace(found, lower=-none, upper=none))


def test_a_repair_whose_trials_resemble_no_set_goes_by_the_prediction():
    """Random halves of the rows resemble no set of a few rows, so that nothing is known but the sum."""
    found = scored()
    verify(found, Training(), ASKED, budget=20, alpha=0.5)
    repaired = repair(found, 3, -0.2, most=0.1)
    assert repaired.reached
    assert len(repaired.rows) == len(repair(scored(), 3, -0.2, most=0.1).rows)
    assert "predicted to be reached by the uncalibrated sum of scores, without a probability" in str(repaired)


def test_a_repair_is_tested_on_fresh_seeds_with_all_other_targets(tried):
    training = Training()
    found = repair(tried, 3, -0.2, train_fn=training, targets=ASKED, budget=4)
    rows = without(found.rows)
    calls = [(len(part), seed) for part in (rows, EVERYTHING) for seed in (1000, 1001)]
    assert sorted(training.calls) == sorted(calls)
    changes = [
        output(rows, training.drawn(rows, seed)) - output(EVERYTHING, training.drawn(EVERYTHING, seed))
        for seed in (1000, 1001)
    ]
    np.testing.assert_allclose(found.measured, changes, rtol=1e-3, atol=1e-4)
    assert found.success is bool(np.mean(changes, axis=0)[3] <= -0.2)
    text = str(found)
    assert f"retrained with 2 seeds: measured change {np.mean(changes, axis=0)[3]:+.3g}" in text
    largest = next(i for i in np.argsort(-np.abs(np.mean(changes, axis=0))) if i != 3)
    assert f"largest target {largest}: " in text
    assert len(found.to_json()["measured"]) == 2


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"target": M}, f"{M}"),
        ({"goal": 0.0}, "goal must be a change other than 0"),
        ({"goal": np.nan}, "got nan"),
        ({"most": 1.0}, "most a share of at least one of 120 rows but not all"),
        ({"chance": 0.5}, "chance must lie between 0.5 and 1, got 0.5"),
        ({"train_fn": Training()}, "A test needs train_fn, targets and a budget of at least 2"),
        ({"train_fn": Training(), "targets": ASKED, "budget": 1}, "budget=1"),
    ],
)
def test_repairs_that_cannot_be_asked_for_are_refused(scores, changes, seen):
    with pytest.raises(InvalidInputError, match=seen):
        repair(scores, **{"target": 0, "goal": -1.0, **changes})
