"""What users pass by mistake is refused by an error that says what to do, before anything is written."""

from __future__ import annotations

from array import array
from collections import deque
from functools import cache, partial

import numpy as np
import pytest
import torch
from tiny_runs import contents
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from trak_lite import Attributor, Rows, TRAKer, clip, methods
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    PrecisionError,
    TrakLiteError,
    UnknownTaskError,
    UnsupportedModelError,
)
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.retraining import retrain
from trak_lite.store import open_store

N = 12
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
TRAIN = TensorDataset(X, Y)
MASKS = np.eye(2, dtype=bool)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def attributor(model=None, path=None, **changes):
    settings = {"task": "image_classification", "proj_dim": 8, "progress": False, **changes}
    return Attributor(net() if model is None else model, path=path, **settings)


def frame():
    return pytest.importorskip("pandas").DataFrame(X.numpy()).assign(label=Y.numpy())


def exported():
    return torch.export.export(net().eval(), (X,)).module()


class Trained(nn.Linear):
    def train(self, inputs, labels):
        raise AssertionError


def expanded():
    model = nn.Linear(4, 3)
    model.bias = nn.Parameter(torch.zeros(1).expand(3))
    return model


def with_input(row, value):
    x = X.clone()
    x[row] = value
    return TensorDataset(x, Y)


def with_label(row, value):
    y = Y.clone()
    y[row] = value
    return TensorDataset(X, y)


def empty(rows, width):
    return TensorDataset(torch.zeros(rows, width), torch.zeros(rows).long())


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 if x.sum() > 0 else -1)


NET = net()
OPEN = nn.Sequential(net(), nn.Linear(3, 3, device="meta"))
ARRAYS = X.numpy(), Y.numpy()
SHUFFLED = DataLoader(TRAIN, shuffle=True)
WHOLE = {"projector": "none", "dtype": "float16"}
TRACED = {"gradient_computer": "functional"}
LOOP = {"gradient_computer": "iterative"}
NONE_REACHED = "depends on none of the 4 kept parameters"


def detached(call, batch):
    return call(batch[0]).detach().sum(1)


def closed_over(call, batch):
    return NET(batch[0]).sum(1)


def linear(call, batch):
    return call(batch[0])[:, 0]


def failing(call, batch):
    return call(batch[0]) @ X


def other_dtype(call, batch):
    return -nn.CrossEntropyLoss(reduction="none")(call(batch[0]), batch[1].float())


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        raise NotImplementedError("to be written")


class Written(nn.Linear):
    def forward(self, x):
        return OneWay.apply(super().forward(x))


class OfOriginal(AbstractModelOutput):
    def get_output(self, model, weights, buffers, inputs, label):
        return torch.func.functional_call(model, (weights or {}, buffers or {}), label[None])[0]

    def get_out_to_loss_grad(self, model, weights, buffers, batch):
        return torch.ones(len(batch[0]), 1)


def passes_labels(call, batch):
    return call(batch[1])


def times(constant, dtype):
    """A task whose gradients have the size of a constant."""
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64 if abs(np.log10(constant)) > 50 else None)
    return {
        "model": model,
        "dtype": dtype,
        "projector": "none",
        "method": "GradDot",
        "task": lambda call, batch: call(batch[0].to(model.weight))[:, 0] * constant,
    }


def one_sample(samples):
    return torch.randn(1, 4), torch.zeros(1).long()


def sparse(samples):
    inputs, labels = default_collate(samples)
    return inputs.to_sparse(), labels


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("image_classification", {"task": "image_clasification"}),
        ("proj_dim must be an integer of at least 1", {"proj_dim": 0}),
        (r"dtype must be one of \['float16', 'float32', 'int4', 'int8'\]", {"dtype": "int2"}),
        (r"\['0.wieght'\].*0.weight", {"grad_wrt": ["0.wieght"]}),
        ("grad_wrt must be names, patterns or module classes, got 3", {"grad_wrt": 3}),
        ("grad_wrt must be names, .* got tensor", {"grad_wrt": torch.tensor(3)}),
        ("Unknown parameter names.*wieght", {"grad_wrt": np.str_("wieght")}),
        ("gradient_computer must be one of", {"gradient_computer": "functorch"}),
        ("gradient_computer is the class int, expected", {"gradient_computer": int}),
        ("gradient_computer is the class int, expected", {"gradient_computer": partial(int, base=8)}),
        *((f"collate must be a function, got {c!r}", {"collate": c}) for c in ("x", "", 0)),
        *(("store_norms must be True or False", {"store_norms": n}) for n in (1, "no", torch.tensor(True))),
        ("distributed must be True or False, got 0", {"distributed": 0}),
        ("rademacher", {"projector": "rademacer"}),
        ("method must be a name of .* Did you mean 'GaussNewton'", {"method": "GausNewton"}),
        ("batch_size must be an integer of at least 1", {"batch_size": 0}),
        ("Unknown device 'tpu'", {"device": "tpu"}),
        ("device='meta'", {"device": "meta"}),
        ("linear in it", {"method": "GaussNewton", "task": linear}),
        ("model is a dict, expected a trained torch.nn.Module", {"model": {}}),
        ("model is a module, expected", {"model": np.linalg}),
        ("model is the class Linear", {"model": nn.Linear}),
        (r"no values.*'weight'.*to_empty", {"model": nn.Linear(4, 3, device="meta")}),
        (r"2 parameters.*'1.weight'", {"model": OPEN}),
        ("lazy module before", {"model": nn.LazyLinear(3)}),
        ("torch finds no CUDA GPU", {"device": "cuda"}),
        ("Entries of 'bias' share memory, because it is expanded", {"model": expanded()}),
        *((r"normalize must be 'none', 'unit', clip\(C\)", {"normalize": n}) for n in ("clip", 2.0, clip)),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(tmp_path, said, settings):
    if "CUDA" in said and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = UnknownTaskError if settings.get("task") == "image_clasification" else InvalidInputError
    with pytest.raises(error, match=said):
        attributor(path=tmp_path / "a.zarr", **settings)

    assert contents(tmp_path) == {}


def test_a_wrong_argument_of_a_call_is_named_before_anything_is_written(tmp_path):
    made = attributor(path=tmp_path / "a.zarr")
    for said, call, given in (
        ("append must be True or False, got 'yes'", made.featurize, {"append": "yes"}),
        ("checkpoint_loader must be a function, got 'x'", made.plan, {"checkpoint_loader": "x"}),
        ("refine must be a Refine", made.score, {"refine": True}),
        ("dense must be True or False, got 'no'", made.score, {"dense": "no"}),
        ("resume must be True or False, got 1", made.capture(TRAIN, "e", resume=1).__enter__, {}),
        ("collate must be a function, got ''", Rows, {"collate": ""}),
        ("gradient_computer returned a int", attributor(gradient_computer=lambda **_: 3).featurize, {}),
    ):
        with pytest.raises(InvalidInputError, match=said):
            call(*(() if "resume" in said else (TRAIN,)), **given)
    assert contents(tmp_path) == {}
    with pytest.raises(InvalidInputError, match="checkpoint_loader must be a function, got 3"):
        made.featurize(TRAIN, NET, checkpoint_loader=3)


@pytest.mark.quick
def test_booleans_of_numpy_are_those_of_python():
    made = attributor(store_norms=np.bool_(True), distributed=np.bool_(False))
    made.featurize(TRAIN, append=np.bool_(False))
    lazy = made.score(TRAIN, dense=np.bool_(False))
    np.testing.assert_array_equal(lazy.numpy(), made.score(TRAIN, dense=np.bool_(True)).numpy())
    assert made.gradient_norms().shape == (1, N)


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(NET.state_dict(), tmp_path / "weights.pt")
    attributor(path="~/a.zarr").featurize(TRAIN, checkpoints="~/weights.pt")
    assert {one.partition("/")[0] for one in contents(tmp_path)} == {"a.zarr", "weights.pt"}
    with open_store("~/a.zarr") as store:
        assert store.table_names() == ["ckpt-0"]


@pytest.mark.quick
def test_integers_of_numpy_are_those_of_python(tmp_path):
    """The stores are the same: each opens the other's."""
    found = []
    for path, kind in ((tmp_path / "a.zarr", int), (tmp_path / "b.zarr", np.int64)):
        for again in (kind, int):
            made = attributor(path=path, proj_dim=again(6), seed=again(1), batch_size=again(3))
            made.featurize(TRAIN)
            scores = made.score(TRAIN, "lazy", dense=False, k=again(2))
            streamed = made.stream_scores(TRAIN, TRAIN, method="GradDot", k=again(2))
            found.append([s.top(again(2)).scores.tolist() for s in (scores, streamed)])
    assert all(one == found[0] for one in found)


SPARSE = r"sparse tensor \(torch.sparse_coo\) of shape .*to_dense\(\)"
BACKWARD = r"^The backward pass of Written \(test_un.* failed .*NotImplementedError: to be written"
ROW_9 = r"^Row 9 of the train data: .*99"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "data", "settings", "error"),
    [
        (r"output of rows \[3\] of the train data is NaN", with_input(3, np.nan), {}, NonFiniteError),
        ("99", with_label(5, 99), {}, InvalidInputError),
        ("-1", with_label(5, -1), LOOP, InvalidInputError),
        (ROW_9, with_label(9, 99), {**TRACED, "batch_size": 4}, InvalidInputError),
        (ROW_9, with_label(9, 99), {**LOOP, "batch_size": 4}, InvalidInputError),
        (r"Sequential failed.*\(12, 7\) float32", empty(N, 7), {}, InvalidInputError),
        (r"^The task \(test_unexpected_inputs.py:\d+\) failed", TRAIN, {"task": failing}, InvalidInputError),
        (r"^The task \(test_un.*\. Check that the task", TRAIN, {"task": other_dtype}, InvalidInputError),
        (r"^Sequential \(test_un.*\) failed", TRAIN, {"task": passes_labels, **LOOP}, InvalidInputError),
        (r"^Sequential \(test_un.*that the model takes", TRAIN, {"task": OfOriginal()}, InvalidInputError),
        (BACKWARD, TRAIN, {"model": Written(4, 3)}, InvalidInputError),
        (BACKWARD, TRAIN, {"model": Written(4, 3), **LOOP}, InvalidInputError),
        ("No rows in the train data", empty(0, 4), {}, InvalidInputError),
        ("the train data does not read", SHUFFLED, {}, InvalidInputError),
        ("gave a batch of 1", TRAIN, {"collate": one_sample}, InvalidInputError),
        (SPARSE, TRAIN, {"collate": sparse}, InvalidInputError),
        (SPARSE, Rows(TRAIN, name="sparse"), {"collate": sparse}, InvalidInputError),
        ("iterative", TRAIN, {"model": Branches(4, 3), **TRACED}, UnsupportedModelError),
        (NONE_REACHED, TRAIN, {"task": detached, **TRACED}, UnsupportedModelError),
        (NONE_REACHED, TRAIN, {"task": detached, **LOOP}, UnsupportedModelError),
        # A closed-over model is not the one that is traced.
        (NONE_REACHED, TRAIN, {"task": closed_over, "model": NET, **TRACED}, UnsupportedModelError),
        (
            "float16 cannot hold.*float32",
            with_input(3, 1e6),
            {**WHOLE, "model": nn.Linear(4, 3)},
            PrecisionError,
        ),
        (r"entries beyond its range.*dtype='float32'", TensorDataset(X * 1e8, Y), {}, PrecisionError),
        *(
            (
                f"{dtype} cannot hold.* loses 100.0% of it. Store float32",
                TRAIN,
                times(c, dtype),
                PrecisionError,
            )
            for dtype, c in (("int8", 1e-37), ("int4", 1e-39), ("float16", 1e-43))
        ),
        (
            "^float32 cannot hold.*range. Multiply f by a constant",
            TRAIN,
            times(1e300, "int8"),
            PrecisionError,
        ),
        ("^float32 cannot hold.*of it. Multiply", TRAIN, times(1e-200, "float32"), PrecisionError),
        (
            r"targets\[0\] is 1e\+39. Expected a finite number of torch.float32",
            TensorDataset(X, torch.full((N,), 1e39, dtype=torch.float64)),
            {"model": nn.Linear(4, 1), "task": "regression"},
            InvalidInputError,
        ),
        ("meta device.*Load the values", TensorDataset(X.to("meta"), Y), {}, InvalidInputError),
        (r"tuple of arrays.*TensorDataset", ARRAYS, {}, InvalidInputError),
        (r"list of arrays.*TensorDataset", [*ARRAYS], {}, InvalidInputError),
        ("list of tensors", [X, Y[:, None]], {}, InvalidInputError),
    ],
)
def test_bad_data_get_a_named_error_and_nothing_on_disk_changes(tmp_path, said, error, data, settings):
    with pytest.raises(error, match=said):
        attributor(path=tmp_path / "a.zarr", **settings).featurize(data)

    if "batch_size" not in settings:  # row 9 is in the third batch
        assert contents(tmp_path) == {}


class Rooted(nn.Module):
    """Attention whose keys have a bias with gradient 0, up to rounding, beside a layer whose gradient is NaN."""

    def __init__(self):
        super().__init__()
        self.root, self.key, self.out = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        seen = (x @ self.key(x).mT).softmax(-1) @ x
        return self.out(seen.mean(1)) + (0 * self.root(x)).sum(1).sqrt()


@pytest.mark.parametrize("computer", ["auto", "hook", "iterative"])
def test_gradients_that_are_nan_are_not_taken_for_wrong_ones_of_other_parameters(computer):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 9, 8).double(), Y[:8])
    with pytest.raises(NonFiniteError, match=r"feature of rows \[0, 1, .* is NaN"):
        attributor(Rooted().double(), gradient_computer=computer).featurize(data)


def test_products_beyond_float32_are_not_said_to_be_of_the_model():
    made = attributor(**times(1e30, "float32"))
    made.featurize(TRAIN)
    with pytest.raises(NonFiniteError, match=r"scores is NaN or .* products of rows, these are too large"):
        made.score(TRAIN, "all")
    small = made.score(TensorDataset(X * 1e-30, Y), "small")
    with pytest.raises(NonFiniteError, match=r"self-influence of rows \[0, 1, 2, 3, 4\] is beyond float32"):
        small.self_influence()


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("ExportedProgram.*Pass the module that was", lambda: attributor(torch.export.export(net(), (X,)))),
        (r"eval mode.*Pass the module that was exported", lambda: attributor(exported()).featurize(TRAIN)),
        ("of torch", lambda: attributor(nn.Sequential(exported())).featurize(TRAIN)),
        (
            r"eval mode.*'labels'.*another name",
            lambda: attributor(nn.Sequential(Trained(4, 3))).featurize(TRAIN),
        ),
        (r"DataFrame.*TensorDataset\(torch.tensor\(frame", lambda: attributor().featurize(frame())),
        ("DataFrame", lambda: attributor().featurize(frame()[::-1])),
        ("tuple of arrays", lambda: Rows(ARRAYS)),
        ("model is a object", lambda: TRAKer(model=object(), task="image_classification", train_set_size=1)),
        ("batch_size must be", lambda: attributor().featurize(TRAIN, batch_size=0)),
        ("batch_size must be", lambda: attributor().featurize(Rows(TRAIN, batch_size=0))),
        ("checkpoints is empty", lambda: attributor().featurize(TRAIN, [])),
        ("does not fit", lambda: attributor().featurize(TRAIN, {"0.weight": torch.ones(1)})),
        ("gave NoneType, expected a mapping", lambda: load_with(lambda source: None)),
        (r"train_fn\(indices, seed\)", lambda: retrain(lambda rows: 0.0, MASKS, lambda found: [found])),
        ("train_fn returned None", lambda: retrain(lambda rows, seed: None, MASKS, lambda found: [1.0])),
    ],
)
def test_the_error_says_what_to_do(said, call):
    with pytest.raises((InvalidInputError, UnsupportedModelError), match=said) as caught:
        call()
    assert isinstance(caught.value, TrakLiteError)


def load_with(loader):
    attributor().featurize(TRAIN, [1, 2], checkpoint_loader=loader)


def halved(samples):
    inputs, labels = torch.utils.data.default_collate(samples)
    return inputs / 2, labels


@pytest.mark.parametrize(
    ("said", "model", "data"),
    [
        (
            "The rows are of other samples, or of the same ones in another order",
            None,
            TensorDataset(X.flip(0), Y.flip(0)),
        ),
        (
            "The rows are of the same dataset in another order",
            None,
            Rows(TRAIN, indices=range(N - 1, -1, -1)),
        ),
        ("The rows are of other samples, or of the same ones in another order", None, [*TRAIN][::-1]),
        ("The rows are of another model", nn.Linear(4, 3), TRAIN),
        ("The data have fewer rows than those of the store", None, TensorDataset(X[1:], Y[1:])),
        ("The collate function makes other batches", None, Rows(TRAIN, collate=halved)),
    ],
)
def test_other_rows_and_another_model_at_a_path_are_told_in_words(tmp_path, said, model, data):
    attributor(path=tmp_path / "a.zarr").featurize([*TRAIN] if isinstance(data, list) else TRAIN)

    with pytest.raises(ManifestMismatchError, match=f"^{said}"):
        attributor(model, tmp_path / "a.zarr").featurize(data)


def test_a_store_in_memory_is_named_where_train_data_have_changed_before_a_fit():
    changing = TensorDataset(X.clone(), Y)
    made = attributor(method="EKFAC")
    made.featurize(changing)
    changing.tensors[0][3] += 1
    with pytest.raises(ManifestMismatchError, match=r"^the store in memory was made with .*dataset"):
        made.score(TRAIN)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_retrained_model_is_not_mixed_with_the_one_before(tmp_path, in_file):
    first, second = (net(seed).state_dict() for seed in (0, 1))

    def featurized(seed, weights=None):
        torch.save(net(seed).state_dict(), tmp_path / "a.pt")
        made = attributor(net(seed), tmp_path / "a.zarr")
        made.featurize(TRAIN, weights or (tmp_path / "a.pt" if in_file else None))
        return made

    featurized(0)
    featurized(0)  # the same weights
    said = r"a retrained model .*drop_checkpoint\('ckpt-0'\).*state_dict"
    with pytest.raises(ManifestMismatchError, match=said):
        featurized(1)
    made = featurized(1, second)  # a checkpoint beside the first
    assert made.score(TRAIN, checkpoints=[first, second]).settings["checkpoints"] == 2
    made.drop_checkpoint("ckpt-0")
    assert featurized(1).score(TRAIN, name="again").settings["checkpoints"] == 1


@pytest.mark.parametrize("kind", ["model", "file", "file of a loader", "state dict"])
def test_stored_scores_are_not_returned_for_a_retrained_model(tmp_path, kind):
    """Unless nothing says that it is another model: state dicts are gone, and a loader reads something else."""
    files, saved = [tmp_path / "a.pt", tmp_path / "b.pt"], "file" in kind

    def saved_again(seed):
        if saved:
            torch.save({"model": net(seed).state_dict(), "ema": net(2).state_dict()}, files[-1])
        return attributor(net(seed), tmp_path / "a.zarr")

    torch.save(net(3).state_dict(), files[0])
    made, loader = saved_again(0), None
    if kind == "file of a loader":
        files, loader = files[1:], lambda path: torch.load(path)["ema"]
    weights = files if saved else net(3).state_dict() if kind == "state dict" else None
    made.featurize(TRAIN, weights, checkpoint_loader=loader)
    first = made.score(TRAIN).numpy()
    np.testing.assert_array_equal(saved_again(0).score(TRAIN).numpy(), first)
    other = saved_again(1)
    if kind in ("model", "file"):
        said = f"other weights of {'.*b.pt' if saved else 'the model itself'} already .*scores\\('targets'\\)"
        with pytest.raises(ManifestMismatchError, match=said):
            other.score(TRAIN)
    else:
        np.testing.assert_array_equal(other.score(TRAIN).numpy(), first)
    np.testing.assert_array_equal(other.scores().numpy(), first)


class Mixed(nn.Module):
    """Layers of two dtypes."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5).to(first), nn.Linear(5, 3).to(second)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.to(self.first.weight))).to(self.second.weight))


@cache
def mixed(*dtypes):
    made = attributor(Mixed(*dtypes), projector="none", dtype="float32")
    made.featurize(TRAIN)
    return made


@pytest.mark.parametrize(
    "method",
    [methods.GaussNewton(), methods.EKFAC(), methods.CG(), methods.LiSSA(damping=30.0, depth=20, rows=N)],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_layers_of_two_dtypes(method, dtypes):
    targets = TensorDataset(*TRAIN[:4])
    found, expected = (
        mixed(*chosen).score(targets, method.name, method=method).numpy()
        for chosen in (dtypes, (torch.float64, torch.float64))
    )

    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-3 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated in torch
@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, TRAIN[:2][0])])
@pytest.mark.parametrize("whole", [True, False])
def test_scripted_models_and_parts_have_the_rows_of_their_source(script, whole):
    model = net()
    scripted = script(model) if whole else nn.Sequential(script(model[:1]), *model[1:])
    made = [attributor(one, method=methods.GradDot(), projector="none") for one in (model, scripted)]
    for one in made:
        one.featurize(TRAIN)
    expected, found = (one.score(TRAIN).numpy() for one in made)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
def test_an_embedding_whose_norms_are_limited_is_taken_if_no_pass_changes_it(engine):
    def made(limit):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, max_norm=limit), nn.Flatten(), nn.Linear(6, 3)).eval()
        with torch.no_grad():
            model[0].weight.mul_(0.9 / model[0].weight.norm(dim=1).max())
        return attributor(model, method=methods.GradDot(), gradient_computer=engine)

    words = TensorDataset(
        torch.arange(24, device="cpu").reshape(12, 2) % 5, torch.arange(12, device="cpu") % 3
    )
    found, expected, changed = made(1.0), made(None), made(0.5)
    found.featurize(words)
    expected.featurize(words)
    with pytest.raises(UnsupportedModelError, match="writes into 1 of its parameters"):
        changed.featurize(words)
    np.testing.assert_allclose(found.score(words).numpy(), expected.score(words).numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # quantization is deprecated in torch
def test_a_dynamically_quantised_model_takes_its_own_state_dict():
    model = torch.ao.quantization.quantize_dynamic(net(), {"0"}, dtype=torch.qint8)
    expected = attributor(model, method=methods.GradDot())
    expected.featurize(TRAIN)
    made = attributor(model, method=methods.GradDot())
    made.featurize(TRAIN, model.state_dict())

    np.testing.assert_array_equal(made.score(TRAIN).numpy(), expected.score(TRAIN).numpy())


SEQUENCES = {"deque": deque, "array": partial(array, "q"), "bytes": bytes}


@pytest.mark.parametrize("kind", SEQUENCES.values(), ids=SEQUENCES)
def test_labels_that_are_not_divided_with_the_samples_are_named(kind, tmp_path):
    def output(call, batch):
        return call(batch["x"])[:, 0] * torch.tensor(list(batch["labels"]))

    def collate(samples):
        x, labels = zip(*samples, strict=True)
        return {"x": torch.stack(x), "labels": kind(labels)}

    rows = [(torch.randn(4), n % 3) for n in range(8)]
    made = Attributor(
        nn.Linear(4, 3), output, tmp_path / "a.zarr", collate=collate, batch_size=4, progress=False
    )
    with pytest.raises(
        TrakLiteError, match=r"Not divided with the samples: batch\['labels'\] \(\w+\)\. If there is"
    ):
        made.featurize(rows)
