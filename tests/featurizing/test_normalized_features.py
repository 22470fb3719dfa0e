"""Normalised rows and stored norms: autograd divided by hand in float64, and steps that torch.optim really makes."""

import copy
import functools

import numpy as np
import pytest
import reference
import torch
from dense_cases import close, columns, gradients, projection
from tiny_runs import Counting
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Normalization, Rows, clip, clipping_threshold, errors, verify
from trak_lite.evaluation import linear_datamodeling_score
from trak_lite.gradient_computers import FunctionalGradientComputer
from trak_lite.methods import LESS, GaussNewton, GradCos, GradDot
from trak_lite.projectors import PROJECTORS

N, M, K, CLASSES, WORDS = 40, 5, 6, 3, 9
NONE, UNIT, UNIT_BY_MODULE = Normalization(), Normalization("unit"), Normalization("unit", scope="module")
CLIP, CLIP_BY_MODULE = clip(1.5), clip(0.8, scope="module")
ADAM, ADAM_UPDATE = Normalization("adam"), Normalization("adam_update")
BY_NORM, BY_ADAM = [NONE, UNIT, UNIT_BY_MODULE, CLIP, CLIP_BY_MODULE], [ADAM, ADAM_UPDATE]
EVERY = [*BY_NORM, *BY_ADAM]
COMPUTERS = ("hook", "functional", "iterative")


def name_of(normalize):
    return f"{normalize.kind}-{normalize.scope}"


by_norm = pytest.mark.parametrize("normalize", BY_NORM, ids=name_of)
by_adam = pytest.mark.parametrize("normalize", BY_ADAM, ids=name_of)


class Texts(nn.Module):
    """An embedding, layers with several positions, and a head that f does not use but training does."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.hidden = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.auxiliary = nn.Linear(5, 2)
        self.head = nn.Linear(5, CLASSES)

    def inner(self, ids):
        return self.norm(self.hidden(self.words(ids)).tanh()).mean(-2)

    def forward(self, ids):
        return self.head(self.inner(ids))


def dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS - 1, (count, 3), generator=generator)
    ids[0] = 2  # a word that occurs three times
    return TensorDataset(ids, torch.randint(CLASSES, (count,), generator=generator))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)
TARGETS.tensors[0][-1] = WORDS - 1
"""The last target has a word that no train row has, so that Adam's moments of its embedding are zero."""
ROWS = {"name": "d", "batch_size": 10}


@functools.cache
def trained(steps=4, **settings):
    torch.manual_seed(0)
    net = Texts().double()
    given = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, **settings}
    optimizer = torch.optim.AdamW(net.parameters(), **given)
    ids, labels = TRAIN.tensors
    for step in range(steps):
        optimizer.zero_grad()
        some = slice(step, step + 12)
        loss = nn.functional.cross_entropy(net(ids[some]), labels[some])
        (loss + net.auxiliary(net.inner(ids[some])).square().mean()).backward()
        optimizer.step()
    return net, optimizer


def saved(*args, **settings):
    net, optimizer = trained(*args, **settings)
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def both():
    return [saved(2), saved(5)]


def attributor(path, normalize=NONE, net=None, task="image_classification", **changes):
    settings = {"proj_dim": K, "dtype": "float32", "projector": "gaussian", "progress": False, **changes}
    net = copy.deepcopy(trained()[0]) if net is None else net
    return Attributor(net, task, path, **{"normalize": normalize, **settings})


def margins(net, data):
    ids, labels = data.tensors
    p = net(ids).softmax(1)[range(len(labels)), labels]
    return gradients(net, (p / (1 - p)).log())


def flat(rows):
    return np.concatenate([row.reshape(len(row), -1) for row in rows.values()], 1)


def divided(rows, normalize):
    """Every sample's gradient, or its part in each module, over its norm or brought down to C."""
    modules = {name: "all" if normalize.scope == "global" else name.split(".")[0] for name in rows}
    found = {}
    for name in rows:
        own = flat({other: rows[other] for other in rows if modules[other] == modules[name]})
        norms = np.maximum(np.linalg.norm(own, axis=1), 1e-300)
        ratio = (normalize.threshold or (1 if normalize.kind == "unit" else np.inf)) / norms
        factors = ratio if normalize.kind == "unit" else np.minimum(1, ratio)
        found[name] = rows[name] * factors.reshape(-1, *[1] * (rows[name].ndim - 1))
    return flat(found)


def scaled(net, optimizer, data):
    """Gradients of f over the fourth root of the bias-corrected second moment."""
    group, rows = optimizer.param_groups[0], margins(net, data)
    for name, p in net.named_parameters():
        state = optimizer.state[p]
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        root = (second / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
        rows[name] = np.where(second > 0, rows[name] / root.sqrt().numpy(), 0)
    return flat(rows)


def steps(net, optimizer, data):
    """The change of the weights over the learning rate, when Adam steps on the loss of one row."""
    rows = []
    for ids, label in data:
        own = copy.deepcopy(net)
        again = type(optimizer)(own.parameters())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.param_groups[0].update(weight_decay=0.0, lr=1e-3)
        before = [p.detach().clone() for p in own.parameters()]
        for p in own.parameters():
            p.grad = torch.zeros_like(p)
        nn.functional.cross_entropy(own(ids[None]), label[None]).backward()
        again.step()
        pairs = zip(own.parameters(), before, strict=True)
        rows.append(torch.cat([(p.detach() - old).flatten() for p, old in pairs]) / 1e-3)
    return torch.stack(rows).numpy()


@functools.cache
def expected(normalize, side, *args, **settings):
    """Whole rows ``(n, P)`` of the train data or of the targets."""
    (net, optimizer), data = trained(*args, **settings), {"train": TRAIN, "targets": TARGETS}[side]
    if normalize == ADAM:
        return scaled(net, optimizer, data)
    if normalize == ADAM_UPDATE and side == "train":
        return steps(net, optimizer, data)
    return divided(margins(net, data), NONE if normalize == ADAM_UPDATE else normalize)


@pytest.mark.parametrize(
    ("normalize", "computer", "projector"),
    [
        pytest.param(
            normalize, computer, projector, id=f"{name_of(normalize)}-{computer}-{projector}", marks=marks
        )
        for row, normalize in enumerate(EVERY)
        for column, computer in enumerate(COMPUTERS)
        for projector in [list(PROJECTORS)[(row + 3 * column) % len(PROJECTORS)]]
        for marks in [() if row % 3 == column else pytest.mark.campaign]
    ],
)
def test_rows_norms_and_scores_are_those_of_gradients_changed_by_hand(
    tmp_path, normalize, computer, projector, monkeypatch
):
    """Of two checkpoints, which have their own moments; also where the gradients do not fit at once."""
    amsgrad = computer == "functional"
    if computer == "iterative":
        monkeypatch.setattr("trak_lite.featurizing.normalized._MOST_ENTRIES", 50)
    method = LESS() if normalize == ADAM_UPDATE else GaussNewton(damping=1.0)
    settings = {"gradient_computer": computer, "store_norms": True, "method": method, "projector": projector}
    made = attributor(tmp_path / "a.zarr", normalize, **settings)
    made.featurize(Rows(TRAIN, batch_size=16), [saved(count, amsgrad=amsgrad) for count in (2, 5)])
    scores = made.score(Rows(TARGETS, batch_size=2), name="test").numpy()

    rows = {"train": [], "targets": [], "q": [], "w": []}
    norms = made.gradient_norms()  # of what nothing divided
    assert (norms.shape, norms.dtype) == ((2, N), np.float32)
    for model_id, count in enumerate((2, 5)):
        matrix = np.concatenate(list(projection(made.projector, made.parameters, model_id).values()))
        for name, table in (("train", "ckpt"), ("targets", "targets/test/ckpt")):
            whole = expected(normalize, name, count, amsgrad=amsgrad)
            found = columns(tmp_path / "a.zarr", f"{table}-{model_id}")["features"]
            close(found, whole @ matrix, rtol=1e-6)
            rows[name].append(whole @ matrix)
        net = trained(count, amsgrad=amsgrad)[0]
        close(norms[model_id], np.linalg.norm(flat(margins(net, TRAIN)), axis=1), rtol=1e-6)
        logits, labels = net(TRAIN.tensors[0]), TRAIN.tensors[1]
        rows["q"].append(reference.out_to_loss_grad(logits, labels))
        rows["w"].append(reference.loss_curvature(logits, labels))
    if normalize == ADAM_UPDATE:  # whose scores are cosines
        return
    segments = [(s.start, s.stop) for s in made.layout.segments]
    arrays = (rows[name] for name in ("train", "q", "w", "targets"))
    products = reference.kernel_scores(*arrays, segments=segments, damping=1.0)
    np.testing.assert_allclose(scores, products, rtol=1e-4, atol=1e-5 * np.abs(products).max())


@by_norm
def test_one_pass_over_the_data_is_enough(normalize):
    counts = []
    for setting in (NONE, normalize):
        mine, calls = copy.deepcopy(trained()[0]), list[int]()
        mine.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made = attributor(None, setting, mine, gradient_computer="hook", store_norms=True)
        made.featurize(Rows(TRAIN, batch_size=10))
        counts.append(len(calls))
    assert counts[0] == counts[1]


FAILING = [*zip(EVERY, (5, 25, 39, 25, 15, 13, 25), strict=True)]


@pytest.mark.parametrize(("normalize", "fail_at"), FAILING)
def test_an_interrupted_run_is_continued_by_what_opens_the_store(tmp_path, normalize, fail_at):
    """Into a model of other weights: those of the checkpoint, and its moments, are found again."""
    torch.save(saved(), tmp_path / "epoch-1.pt")
    source = tmp_path / "epoch-1.pt"
    whole = attributor(tmp_path / "whole.zarr", normalize, store_norms=True)
    whole.featurize(Rows(TRAIN, **ROWS), source)
    made = attributor(tmp_path / "a.zarr", normalize, store_norms=True)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, fail_at), **ROWS), source)
    opened = (
        made if fail_at < 10 else Attributor.open(tmp_path / "a.zarr", Texts().double(), store_norms=True)
    )
    assert opened.normalization == normalize
    assert 0 < opened.featurize(Rows(TRAIN, **ROWS), source).rows_written < N + (fail_at < 10)
    assert opened.featurize(Rows(TRAIN, **ROWS), source).rows_written == 0
    found, complete = columns(tmp_path / "a.zarr"), columns(tmp_path / "whole.zarr")
    assert found.keys() == complete.keys() == {"features", "out_to_loss", "loss_curvature", "gradient_norm"}
    for name, column in complete.items():
        np.testing.assert_array_equal(found[name], column)
    scores = Attributor.open(tmp_path / "a.zarr", Texts().double(), progress=False).score(TARGETS)
    assert isinstance(scores.method, LESS if normalize == ADAM_UPDATE else GaussNewton)
    np.testing.assert_array_equal(scores.numpy(), whole.score(TARGETS).numpy())


def test_rows_without_norms_are_continued_by_an_attributor_that_stores_norms(tmp_path):
    whole = attributor(tmp_path / "whole.zarr", store_norms=True)
    whole.featurize(Rows(TRAIN, **ROWS), checkpoints=both())
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, 35), **ROWS), checkpoints=both()[:1])
    opened = Attributor.open(tmp_path / "a.zarr", Texts().double(), store_norms=True)
    summary = opened.featurize(Rows(TRAIN, **ROWS), checkpoints=both())
    assert opened.normalization == NONE
    assert summary.rows_found > 0
    assert "gradient_norm" not in columns(tmp_path / "a.zarr", "ckpt-0")
    np.testing.assert_array_equal(opened.score(TARGETS).numpy(), whole.score(TARGETS).numpy())
    with pytest.raises(errors.StateError, match=r"ckpt-0 has no gradient norms.*another path"):
        opened.gradient_norms()
    norms = columns(tmp_path / "a.zarr", "ckpt-1")["gradient_norm"]
    np.testing.assert_array_equal(norms, whole.gradient_norms()[1])


class ComputerThatNormalises(FunctionalGradientComputer):
    def compute_per_sample_grad(self, batch):
        grads = super().compute_per_sample_grad(batch)
        norms = torch.cat([grad.flatten(1) for grad in grads.values()], 1).norm(dim=1)
        return {name: (grad.flatten(1) / norms[:, None]).view_as(grad) for name, grad in grads.items()}

    def fingerprint(self):
        return {**super().fingerprint(), **UNIT.fingerprint()}


def test_normalising_twice_is_refused_and_once_in_the_computer_is_the_same(tmp_path):
    twice = attributor(tmp_path / "a.zarr", CLIP, gradient_computer=ComputerThatNormalises)
    with pytest.raises(errors.InvalidInputError, match=r"already normalises .*Leave out one of the two"):
        twice.featurize(TRAIN)
    assert not (tmp_path / "a.zarr").exists()
    attributor(tmp_path / "a.zarr", "unit").featurize(TRAIN)
    attributor(tmp_path / "b.zarr", gradient_computer=ComputerThatNormalises).featurize(TRAIN)
    found, once = (columns(tmp_path / f"{name}.zarr")["features"] for name in ("b", "a"))
    np.testing.assert_allclose(found, once, rtol=1e-5, atol=1e-7)


def test_a_threshold_from_stored_norms_clips_the_share_that_was_asked_for(tmp_path):
    """Norms in memory are those on disk."""
    paths = tmp_path / "plain.zarr", tmp_path / "clipped.zarr"
    made = attributor(paths[0], projector="none", store_norms=True)
    made.featurize(TRAIN, checkpoints=both()[:1])
    assert made.gradient_norms().shape == (1, N)
    memory = attributor(None, store_norms=True)
    for one in (made, memory):
        one.featurize(TRAIN, checkpoints=both())
    norms = Attributor.open(paths[0], Texts().double()).gradient_norms()
    np.testing.assert_array_equal(memory.gradient_norms(), norms)
    threshold = clipping_threshold(norms, quantile=0.75)
    attributor(paths[1], clip(threshold), projector="none").featurize(TRAIN, checkpoints=both())
    assert (norms > threshold).mean() == pytest.approx(0.25)
    for model_id, long in enumerate(norms > threshold):
        before, after = (columns(path, f"ckpt-{model_id}")["features"] for path in paths)
        np.testing.assert_array_equal(after[~long], before[~long])
        np.testing.assert_allclose(np.linalg.norm(after[long], axis=1), threshold, rtol=1e-6)


def test_norms_that_are_not_there_yet_are_asked_for(tmp_path):
    without, made = attributor(None), attributor(tmp_path / "a.zarr", store_norms=True)
    without.featurize(TRAIN)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, 35), name="d"))
    for error, said, one in (
        (errors.StateError, "featurize", attributor(None)),
        (errors.MissingStoreError, "nowhere", attributor(tmp_path / "nowhere.zarr")),
        (errors.StateError, "store_norms=False", without),
        (errors.StateError, r"ckpt-0 has 32 of 40 train rows", made),
    ):
        with pytest.raises(error, match=said):
            one.gradient_norms()


def linear(path, inputs, **settings):
    """The rows of a linear model, whose gradients are its inputs."""
    made = attributor(path, net=nn.Linear(4, 1, bias=False), task=first_output, projector="none", **settings)
    made.featurize(TensorDataset(inputs))
    return columns(path)


def first_output(call, batch):
    return call(batch[0])[:, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store_norms": True}, r"gradient norm of rows \[3\] of the train data is NaN or beyond float32"),
        ({"normalize": "unit"}, r"rows \[3\] of the train data is beyond float32.*Multiply f by a constant"),
        ({"normalize": clip(2.0)}, r"gradient of rows \[3\] of the train data is beyond float32"),
    ],
)
def test_a_norm_beyond_float32_is_refused_before_anything_is_on_disk(tmp_path, changes, message):
    inputs = torch.ones(8, 4)
    inputs[3] = 1e25  # a gradient that float32 holds, with a squared norm that it does not
    with pytest.raises(errors.NonFiniteError, match=message):
        linear(tmp_path / "a.zarr", inputs, **changes)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize("normalize", [UNIT, UNIT_BY_MODULE, CLIP], ids=name_of)
def test_a_gradient_of_zero_is_a_row_of_zeros_with_norm_zero(tmp_path, normalize):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    inputs[2] = 0
    found = linear(tmp_path / "a.zarr", inputs, normalize=normalize, store_norms=True)
    np.testing.assert_allclose(found["gradient_norm"], inputs.norm(dim=1), rtol=1e-6)
    assert not found["features"][2].any()
    assert found["features"][[0, 1, 3]].any(axis=1).all()


@by_adam
def test_a_store_refuses_other_moments_and_other_kinds(tmp_path, normalize):
    made, first = attributor(tmp_path / "a.zarr", normalize), saved()
    for source in (None, first["model"]):
        with pytest.raises(errors.CheckpointError, match="has no optimizer state"):
            made.featurize(TRAIN, source)
    assert not (tmp_path / "a.zarr").exists()
    made.featurize(TRAIN, first)
    assert made.featurize(TRAIN, first).rows_written == 0
    other = copy.deepcopy(first)
    other["optimizer"]["state"][0]["exp_avg_sq"][1] *= 1.5
    with pytest.raises(errors.ManifestMismatchError, match="optimizer"):
        made.featurize(TRAIN, other)
    for another in {"none", "unit", "adam", "adam_update"} - {normalize.kind}:
        with pytest.raises(errors.ManifestMismatchError, match="normalization"):
            attributor(tmp_path / "a.zarr", another).featurize(TRAIN, first)


@pytest.mark.parametrize("layout", ["module", "joint"])
def test_less_is_the_mean_cosine_of_steps_and_gradients_of_targets(layout):
    """Section 4.1 of arXiv:2402.04333: the sum over checkpoints of eta cos(Gamma(z), gradient of the target)."""
    rates, cosines = (0.05, 0.02), np.zeros((N, M))
    made = attributor(None, ADAM_UPDATE, projector="none", layout=layout)
    made.featurize(TRAIN, both())
    for rate, count in zip(rates, (2, 5), strict=True):
        sides = (expected(ADAM_UPDATE, name, count) for name in ("train", "targets"))
        own, targets = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
        cosines += rate * own @ targets.T
    scores = made.score(TARGETS, method=LESS(learning_rates=rates)).numpy()
    np.testing.assert_allclose(scores, cosines, atol=1e-6 * max(rates))
    by_name = made.score(TARGETS, method={"name": "LESS", "learning_rates": list(rates)}).numpy()
    assert by_name.tobytes() == scores.tobytes()
    assert made.method == LESS()  # without learning rates, the cosine of whole rows
    plain = made.score(TARGETS, method=GradCos(layout="joint")).numpy()
    np.testing.assert_allclose(made.score(TARGETS).numpy(), plain, atol=1e-6)
    with pytest.raises(errors.InvalidInputError, match="learning_rates has 1 numbers, but 2 checkpoints"):
        made.score(TARGETS, method=LESS(learning_rates=rates[:1]))


def test_the_fisher_information_is_that_of_scaled_gradients():
    """A diagonal change of coordinates: with all features and little damping the scores do not depend on it."""
    method = {"name": "Fisher", "samples_per_feature": 40, "max_draws": 4000, "damping": 1e-4}
    found = []
    for kind in ("none", "adam"):
        made = attributor(None, kind, projector="none", grad_wrt="head.*", layout="joint", batch_size=512)
        made.featurize(TRAIN, saved())
        found.append(made.score(TARGETS, method=method).numpy().ravel())
    assert np.corrcoef(*found)[0, 1] > 0.99


def test_methods_and_dtypes_that_the_rows_do_not_fit_are_refused():
    content, kinds = saved(), ("adam", "adam_update")
    made = {kind: attributor(None, kind) for kind in ("none", *kinds)}
    for one in made.values():
        one.featurize(TRAIN, content)
    plain = ("GaussNewton", "TRAK", "TracIn", "GradDot", "Fisher")
    for kind, method, said in (
        *((kind, "LESS", "normalize='adam_update'") for kind in ("none", "adam")),
        *(("adam_update", method, "rows are Adam updates") for method in plain),
        *((kind, "EKFAC", f"normalize='{kind}', and EKFAC") for kind in kinds),
    ):
        with pytest.raises(errors.InvalidInputError, match=said):
            made[kind].score(TARGETS, method=method)
    with pytest.raises(errors.InvalidInputError, match="Self-influence"):
        made["adam_update"].score(TARGETS).self_influence()
    with pytest.raises(errors.InvalidInputError, match="entry by entry"):
        Normalization("adam", scope="module")
    content = saved(eps=0.0)
    for state in content["optimizer"]["state"].values():
        state["exp_avg_sq"] *= 1e-24
    with pytest.raises(errors.PrecisionError):
        attributor(None, "adam", projector="none", dtype="float16").featurize(TRAIN, content)


def test_verify_compares_less_with_plain_products_of_updates_and_gradients():
    """The rows are updates of the loss, so the baseline of dot products has no q."""
    made, subsets = attributor(None, ADAM_UPDATE, projector="none"), {}
    made.featurize(TRAIN, saved())
    scores = made.score(TARGETS)

    def train_fn(rows, seed):
        subsets[tuple(rows.tolist())] = None
        torch.manual_seed(seed)
        net = Texts().double()
        nn.functional.cross_entropy(net(TRAIN.tensors[0][rows]), TRAIN.tensors[1][rows]).backward()
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        return net

    verdict = verify(scores, train_fn, TARGETS, budget=5)
    masks = np.stack([np.isin(np.arange(N), subset) for subset in subsets])
    found = scores.predictions
    np.testing.assert_allclose(found.summed, masks @ scores.numpy().astype(np.float64), rtol=1e-5)
    products = made.score(TARGETS, method=GradDot(q="off")).numpy()
    wanted = linear_datamodeling_score(products, masks, found.retrained, num_resamples=1)
    (dot,) = (one for one in verdict.baselines if "dot product" in one.name)
    assert dot.lds.mean == pytest.approx(wanted.mean, abs=1e-6)
