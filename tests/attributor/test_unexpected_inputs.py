"""What users pass by mistake is refused by an error that says what to do, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trak_lite import Attributor, Rows, TRAKer, methods
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    PrecisionError,
    TrakLiteError,
    UnsupportedModelError,
)
from trak_lite.retraining import retrain
from trak_lite.selection import select

pytestmark = pytest.mark.quick

N = 12
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
TRAIN = TensorDataset(X, Y)
MASKS = np.eye(2, dtype=bool)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def attributor(model: Any = None, path: Path | None = None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 8, "progress": False, **changes}
    return Attributor(net() if model is None else model, "image_classification", path, **settings)


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(X.numpy()).assign(label=Y.numpy())


def exported() -> nn.Module:
    return torch.export.export(net().eval(), (X,)).module()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: attributor().featurize(frame()), r"DataFrame.*TensorDataset\(torch.tensor\(frame"),
        (lambda: attributor().featurize(frame()[::-1]), "DataFrame"),
        (lambda: attributor().featurize((X.numpy(), Y.numpy())), r"tuple of arrays.*TensorDataset"),
        (lambda: attributor().featurize([X.numpy(), Y.numpy()]), r"list of arrays.*TensorDataset"),
        (lambda: attributor().featurize([X, Y[:, None]]), "list of tensors"),
        (lambda: Rows((X.numpy(), Y.numpy())), "tuple of arrays"),
        (lambda: attributor().featurize(TensorDataset(X.to("meta"), Y)), "meta device.*Load the values"),
        (lambda: attributor({}), "model is a dict, expected a trained torch.nn.Module"),
        (lambda: attributor(np.linalg), "model is a module, expected"),
        (lambda: attributor(nn.Linear), "model is the class Linear"),
        (
            lambda: attributor(torch.export.export(net(), (X,))),
            "ExportedProgram.*Pass the module that was exported",
        ),
        (lambda: TRAKer(model=object(), task="image_classification", train_set_size=1), "model is a object"),
        (lambda: attributor(exported()).featurize(TRAIN), r"eval mode.*Pass the module that was exported"),
        (lambda: attributor(nn.Sequential(exported())).featurize(TRAIN), "of torch"),
        (lambda: attributor(nn.Linear(4, 3, device="meta")), r"no values.*'weight'.*to_empty"),
        (
            lambda: attributor(nn.Sequential(net(), nn.Linear(3, 3, device="meta"))),
            r"2 parameters.*'1.weight'",
        ),
        (lambda: attributor(nn.LazyLinear(3)), "lazy module before"),
        (lambda: attributor(device="meta"), "device='meta'"),
        (lambda: attributor().featurize(TRAIN, batch_size=0), "batch_size must be an integer of at least 1"),
        (lambda: retrain(lambda rows: 0.0, MASKS, lambda found: [found]), r"train_fn\(indices, seed\)"),
        (lambda: retrain(lambda rows, seed: None, MASKS, lambda found: [1.0]), "train_fn returned None"),
    ],
)
def test_the_error_says_what_to_do(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedModelError), match=said) as caught:
        call()
    assert isinstance(caught.value, TrakLiteError)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            TensorDataset(X.flip(0), Y.flip(0)),
            "^The rows are of other samples, or of the same ones in another order",
        ),
        (Rows(TRAIN, indices=range(N - 1, -1, -1)), "^The rows are of the same dataset in another order"),
        ([*TRAIN][::-1], "^The rows are of other samples, or of the same ones in another order"),
    ],
)
def test_other_rows_at_a_path_are_told_in_words(tmp_path: Path, data: Any, said: str) -> None:
    attributor(path=tmp_path / "a.zarr").featurize([*TRAIN] if isinstance(data, list) else TRAIN)

    with pytest.raises(ManifestMismatchError, match=said):
        attributor(path=tmp_path / "a.zarr").featurize(data)


def test_another_model_at_a_path_is_told_before_what_follows_from_it(tmp_path: Path) -> None:
    attributor(path=tmp_path / "a.zarr").featurize(TRAIN)

    with pytest.raises(ManifestMismatchError, match=r"^The rows are of another model"):
        attributor(nn.Linear(4, 3), tmp_path / "a.zarr").featurize(TRAIN)


@pytest.mark.parametrize("source", ["model", "file"])
def test_a_retrained_model_is_not_mixed_with_the_one_before(tmp_path: Path, source: str) -> None:
    file = None if source == "model" else tmp_path / "a.pt"

    def featurized(seed: int, weights: Any = None) -> Attributor:
        if file is not None:
            torch.save(net(seed).state_dict(), file)
        made = attributor(net(seed), tmp_path / "a.zarr")
        made.featurize(TRAIN, file if weights is None else weights)
        return made

    featurized(0)
    featurized(0)  # the same weights
    with pytest.raises(
        ManifestMismatchError, match=r"a retrained model .*drop_checkpoint\('ckpt-0'\).*state_dict"
    ):
        featurized(1)
    made = featurized(1, net(1).state_dict())  # a checkpoint beside the first
    assert (
        made.score(TRAIN, checkpoints=[net(0).state_dict(), net(1).state_dict()]).settings["checkpoints"] == 2
    )
    made.drop_checkpoint("ckpt-0")
    assert featurized(1).score(TRAIN, name="again").settings["checkpoints"] == 1


@pytest.mark.parametrize("data", [TRAIN, DataLoader(TRAIN, batch_size=2), Rows(TRAIN, batch_size=2)])
def test_a_call_has_its_own_batch_size(data: Any) -> None:
    sizes = []
    model = net()
    model.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    made = attributor(model, gradient_computer="hook", method="GradDot")

    made.featurize(data, batch_size=5)
    assert 5 in sizes
    del sizes[:]
    made.score(data, batch_size=3)
    assert 3 in sizes


@pytest.mark.parametrize("k", [N, N + 1, 10**6])
def test_more_rows_than_there_are_are_all_rows(k: int) -> None:
    made = attributor()
    made.featurize(TRAIN)
    scores = made.score(TRAIN)

    assert scores.top(k).indices.shape == (N, N)
    for method in ("top", "greedy"):
        assert sorted(select(scores, k, method).indices) == list(range(N))
    assert len(select(scores, k, where=np.arange(N) < 3).indices) == 3


class Mixed(nn.Module):
    """Layers of two dtypes."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5).to(first), nn.Linear(5, 3).to(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.to(self.first.weight))).to(self.second.weight))


@pytest.mark.parametrize("method", ["GaussNewton", "EKFAC", "CG", "LiSSA"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_layers_of_two_dtypes(method: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    found = []
    for chosen in (dtypes, (torch.float64, torch.float64)):
        made = attributor(Mixed(*chosen), projector="none", dtype="float32", method=method)
        made.featurize(TRAIN)
        found.append(made.score(TRAIN).numpy())

    np.testing.assert_allclose(*found, rtol=2e-2, atol=2e-3 * np.abs(found[1]).max())


def test_features_beyond_float16_name_their_remedy() -> None:
    model = net()
    with pytest.raises(PrecisionError, match=r"entries beyond its range.*dtype='float32'"):
        attributor(model).featurize(TensorDataset(X * 1e8, Y))


@pytest.mark.filterwarnings("ignore")  # quantization is deprecated in torch
def test_a_dynamically_quantised_model_takes_its_own_state_dict() -> None:
    model = torch.ao.quantization.quantize_dynamic(net(), {"0"}, dtype=torch.qint8)
    expected = attributor(model, method=methods.GradDot())
    expected.featurize(TRAIN)
    made = attributor(model, method=methods.GradDot())
    made.featurize(TRAIN, model.state_dict())

    np.testing.assert_array_equal(made.score(TRAIN).numpy(), expected.score(TRAIN).numpy())
