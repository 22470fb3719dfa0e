"""What the original's own tests and examples do: the same calls run here, and its errors are caught here as there."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from traker_cases import (
    M,
    N,
    checkpoints,
    make_original,
    make_traker,
    original,
    quiet,
    target_batch,
    train_batch,
)

import trak_lite.modelout_functions
import trak_lite.projectors
import trak_lite.utils
from trak_lite import TRAKer
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import FunctionalGradientComputer, IterativeGradientComputer
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import BasicProjector, NoOpProjector
from trak_lite.run.tables import FEATURES

# --- Every sequence of calls in the original's tests/test_class.py, on a smaller network ----------------------


def network() -> nn.Module:
    """In train mode, as torchvision makes its own."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 10),
    )


LAST_LAYER = ["5.weight", "5.bias"]
WIDTH = sum(p.numel() for p in network().parameters())


def batch_of(count: int) -> list[Tensor]:
    return [torch.randn(count, 3, 8, 8), torch.randint(low=0, high=10, size=(count,))]


def made(folder: Path, count: int, **changes: Any) -> TRAKer:
    """Return a TRAKer of which only the features are fewer than with the original's defaults."""
    settings = {"model": network(), "task": "image_classification", "proj_dim": 64, **changes}
    return TRAKer(
        save_dir=folder, train_set_size=count, logging_level=logging.DEBUG, device="cpu", **settings
    )


def narrow() -> BasicProjector:
    return BasicProjector(grad_dim=WIDTH, proj_dim=20, seed=0, proj_type="rademacher", device="cpu")


CONSTRUCTED: dict[str, dict[str, Any]] = {
    "a projector": {"projector": narrow},
    "a task of one's own": {"projector": narrow, "task": ImageClassificationModelOutput},
    "the identity": {"projector": partial(NoOpProjector, device="cpu")},
    "an iterative computer": {
        "projector": NoOpProjector,
        "proj_dim": partial(int, 0),
        "task": partial(str, "iterative_image_classification"),
        "use_half_precision": partial(bool, False),
        "gradient_computer": lambda: IterativeGradientComputer,
    },
    "a largest batch": {"proj_max_batch_size": partial(int, 16)},
    "the last layer": {"grad_wrt": lambda: LAST_LAYER},
    "full precision": {"use_half_precision": partial(bool, False)},
    "the defaults": {},
}


@pytest.mark.parametrize("ids", [1, 2])
@pytest.mark.parametrize("how", CONSTRUCTED)
def test_checkpoints_are_loaded_and_featurized(tmp_path: Path, how: str, ids: int) -> None:
    traker = made(tmp_path, 5, **{name: make() for name, make in CONSTRUCTED[how].items()})
    for model_id in range(ids):
        traker.load_checkpoint(traker.model.state_dict(), model_id=model_id)
    traker.featurize(batch_of(5), num_samples=5)

    assert traker._workspace.table(f"ckpt-{ids - 1}").complete


@pytest.mark.parametrize("ids", [1, 2])
def test_features_come_in_parts_and_are_finalized(tmp_path: Path, ids: int) -> None:
    """With 10 rows, far fewer than features, and no damping."""
    traker, batch = made(tmp_path, 10), batch_of(10)
    for model_id in range(ids):
        traker.load_checkpoint(traker.model.state_dict(), model_id=model_id)
        traker.featurize([x[:3] for x in batch], num_samples=3)
        traker.featurize([x[3:6] for x in batch], num_samples=3)
        traker.featurize([x[6:] for x in batch], num_samples=4)
    traker.finalize_features()

    assert traker._known_ids() == list(range(ids))


@pytest.mark.parametrize("how", ["the defaults", "full precision", "the last layer"])
@pytest.mark.parametrize(
    ("ids", "asked", "anew"), [(1, None, False), (2, [0], False), (2, None, False), (2, None, True)]
)
def test_five_rows_are_scored(
    tmp_path: Path, how: str, ids: int, asked: list[int] | None, anew: bool, caplog: Any
) -> None:
    """For one id, some or all of them, by the TRAKer that featurized them or another one."""
    changes = {name: make() for name, make in CONSTRUCTED[how].items()}
    traker, batch = made(tmp_path, 5, **changes), batch_of(5)
    state = traker.model.state_dict()
    for model_id in range(ids):
        traker.load_checkpoint(state, model_id=model_id)
        traker.featurize(batch, num_samples=5)
    traker.finalize_features()
    for model_id in range(ids) if asked is None else asked:
        traker.start_scoring_checkpoint("test_experiment", state, model_id, num_targets=5)
        traker.score(batch, num_samples=5)
    if anew:
        traker = made(tmp_path, 5, model=traker.model, **changes)
    scores = traker.finalize_scores(exp_name="test_experiment", model_ids=asked)

    assert scores.shape == (5, 5)
    assert np.isfinite(scores).all()
    assert np.abs(scores).max() > 0
    assert caplog.text.count("Their pseudo-inverses are used") == (2 if anew else 1)
    np.testing.assert_array_equal(open_memmap(tmp_path / "scores" / "test_experiment.mmap"), scores)


def test_featurizing_without_a_checkpoint_is_an_assertion_error(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"Load a checkpoint using traker\.load_checkpoint before featurizing"
    ):
        made(tmp_path, 5).featurize(batch_of(5), num_samples=5)


# --- What the original raises -------------------------------------------------------------------------------


class Step:
    """One TRAKer, theirs or ours, and the calls that both refuse."""

    def __init__(self, make: Any, folder: Path) -> None:
        self.make, self.folder = make, folder
        (self.state,) = checkpoints(count=1)

    def new(self, **changes: Any) -> Any:
        return self.make(self.folder, **changes)

    def loaded(self, **changes: Any) -> Any:
        traker = self.new(**changes)
        traker.load_checkpoint(self.state, model_id=0)
        return traker

    def featurize_before_loading(self) -> None:
        self.new().featurize(train_batch(), num_samples=N)

    def neither_inds_nor_number(self) -> None:
        self.loaded().featurize(train_batch())

    def both_inds_and_number(self) -> None:
        self.loaded().featurize(train_batch(), inds=np.arange(N), num_samples=N)

    def score_neither(self) -> None:
        self.scoring().score(target_batch())

    def score_both(self) -> None:
        self.scoring().score(target_batch(), inds=np.arange(M), num_samples=M)

    def scoring(self) -> Any:
        traker = self.loaded()
        traker.featurize(train_batch(), num_samples=N)
        traker.finalize_features()
        traker.start_scoring_checkpoint("test", self.state, 0, num_targets=M)
        return traker

    def finalize_an_unfinished_id(self) -> None:
        self.loaded().finalize_features()

    def finalize_an_unknown_id(self) -> None:
        self.loaded().finalize_features([3])

    def score_an_unknown_id(self) -> None:
        self.loaded().start_scoring_checkpoint("test", self.state, 3, num_targets=M)

    def no_ids(self) -> None:
        self.scoring().finalize_scores("test", model_ids=[])

    def an_unknown_experiment(self) -> None:
        self.scoring().finalize_scores("other")

    def another_width(self) -> None:
        self.finished()
        self.new(proj_dim=13)

    def another_number_of_rows(self) -> None:
        self.finished()
        self.new(train_set_size=N + 1)

    def finished(self) -> None:
        self.loaded().featurize(train_batch(), num_samples=N)

    def another_architecture(self) -> None:
        self.new().load_checkpoint({"weight": torch.zeros(1)}, model_id=0)

    def an_unknown_task(self) -> None:
        self.new(task="image_clasification")

    def an_unknown_parameter(self) -> None:
        self.new(grad_wrt=["nothing.weight"])


BUILT_IN = {
    "featurize_before_loading": AssertionError,
    "neither_inds_nor_number": AssertionError,
    "both_inds_and_number": AssertionError,
    "score_neither": AssertionError,
    "score_both": AssertionError,
    "finalize_an_unfinished_id": Exception,
    "finalize_an_unknown_id": Exception,
    "score_an_unknown_id": Exception,
    "no_ids": AssertionError,
    "an_unknown_experiment": ValueError,
    "another_width": AssertionError,
    "another_number_of_rows": AssertionError,
    "another_architecture": RuntimeError,
    "an_unknown_task": KeyError,
    "an_unknown_parameter": KeyError,
}


@pytest.mark.parametrize("call", BUILT_IN)
def test_an_error_of_the_original_is_caught_as_there(tmp_path: Path, call: str) -> None:
    """Of the original's own class ``ModelIDException`` nothing is built in but ``Exception``."""
    original()
    raised = []
    for make, name in ((make_original, "theirs"), (make_traker, "ours")):
        with quiet(), pytest.raises(Exception) as caught:  # noqa: PT011  # the original decides which
            getattr(Step(make, tmp_path / name), call)()
        raised.append(caught.value)
    theirs, ours = raised

    expected = next(cls for cls in type(theirs).__mro__ if cls.__module__ == "builtins")
    assert expected is BUILT_IN[call]
    assert isinstance(ours, expected)
    assert not str(ours).startswith(("'", '"'))


def test_errors_of_the_originals_parts_are_caught_as_there() -> None:
    theirs = original()
    g = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 1)}
    for module in (theirs.utils, trak_lite.utils):
        with pytest.raises(AssertionError):
            module.vectorize(g, device="cpu")
    for module in (theirs.projectors, trak_lite.projectors):
        with pytest.raises(KeyError):
            module.BasicProjector(4, 2, 0, "other", "cpu").project(torch.zeros(1, 4), 0)
    image, text, model = torch.zeros(2), torch.zeros(2), nn.Linear(2, 2)
    for module in (theirs.modelout_functions, trak_lite.modelout_functions):
        with pytest.raises(AssertionError):
            module.CLIPModelOutput(simulated_batch_size=2).get_output(model, {}, {}, image, text)


# --- Its examples, on data made here -----------------------------------------------------------------------


class Mul(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Residual(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(x)


def resnet9(width: int = 4) -> nn.Module:
    """The layers of the CIFAR example's network in its order, narrower."""

    def conv(channels: int, out: int, size: int = 3, stride: int = 1, padding: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, size, stride, padding, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )

    layers = nn.Sequential(
        conv(3, width),
        conv(width, 2 * width, 5, 2, 2),
        Residual(nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))),
        conv(2 * width, 4 * width),
        nn.MaxPool2d(2),
        Residual(nn.Sequential(conv(4 * width, 4 * width), conv(4 * width, 4 * width))),
        conv(4 * width, 2 * width, padding=0),
        nn.AdaptiveMaxPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(2 * width, 10, bias=False),
        Mul(0.2),
    )
    return layers.to(memory_format=torch.channels_last)


class Flipped(TensorDataset):
    """Images that are flipped at random each time, as the example's augmentation does."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), label


def test_the_cifar_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, keep the weights of some epochs, featurize augmented images, score plain ones, open the file of scores."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    train = Flipped(torch.randn(40, 3, 16, 16), torch.randint(10, (40,)))
    loader_train = DataLoader(train, batch_size=16)
    loader_targets = DataLoader(TensorDataset(*train.tensors), batch_size=16)
    model = resnet9()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        for images, labels in loader_train:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        torch.save(model.state_dict(), f"sd_0_epoch_{epoch}.pt")
    ckpts = [torch.load(file, map_location="cpu") for file in sorted(Path().rglob("*.pt"))]
    model = resnet9()
    model.load_state_dict(ckpts[-1])
    model = model.eval()

    traker = TRAKer(
        model=model, task="image_classification", proj_dim=512, train_set_size=len(loader_train.dataset)
    )
    for model_id, ckpt in enumerate(ckpts):
        traker.load_checkpoint(ckpt, model_id=model_id)
        for batch in loader_train:
            traker.featurize(batch=[x.cpu() for x in batch], num_samples=batch[0].shape[0])
    traker.finalize_features()
    for model_id, ckpt in enumerate(ckpts):
        traker.start_scoring_checkpoint(
            exp_name="quickstart", checkpoint=ckpt, model_id=model_id, num_targets=len(loader_targets.dataset)
        )
        for batch in loader_targets:
            traker.score(batch=[x.cpu() for x in batch], num_samples=batch[0].shape[0])
    scores = traker.finalize_scores(exp_name="quickstart")

    np.testing.assert_array_equal(open_memmap("./trak_results/scores/quickstart.mmap"), scores)
    assert scores[:, 7].argsort()[-5:][::-1].shape == (5,)
    own = np.diagonal(
        scores
    )  # the pseudo-inverse of 40 rows fits each row to itself, but for its random flip
    assert (own > 0).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_qnli_example_runs(tmp_path: Path) -> None:
    """A network of Hugging Face in a wrapper of one's own, batches of dicts that become lists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="needs transformers (extra: hf)")
        # It imports torchvision where that is installed, in a build for another torch, too.
        pytest.importorskip("transformers.models.bert.modeling_bert", exc_type=(ImportError, RuntimeError))
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
        num_labels=2,
        attn_implementation="eager",
    )

    class SequenceClassificationModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModelForSequenceClassification.from_config(config)
            self.model.eval()

        def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.model(
                input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask
            ).logits

    def sample(index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = 4 + index % 8
        mask = [1] * length + [0] * (12 - length)
        tokens = torch.randint(1, 30, (12,), generator=generator).tolist()
        return {
            "input_ids": [token * m for token, m in zip(tokens, mask, strict=True)],
            "token_type_ids": [int(place > 2) * m for place, m in enumerate(mask)],
            "attention_mask": mask,
            "label": index % 2,
        }

    collate = transformers.default_data_collator
    loader_train = DataLoader([sample(i) for i in range(20)], batch_size=6, collate_fn=collate)
    loader_val = DataLoader([sample(i) for i in range(5, 12)], batch_size=6, collate_fn=collate)

    def process_batch(batch: dict[str, Tensor]) -> list[Tensor]:
        return [batch[name] for name in ("input_ids", "token_type_ids", "attention_mask", "labels")]

    torch.manual_seed(0)
    model = SequenceClassificationModel()
    traker = TRAKer(
        model=model,
        task="text_classification",
        train_set_size=20,
        save_dir=tmp_path,
        device="cpu",
        proj_dim=1024,
    )
    traker.load_checkpoint(model.state_dict(), model_id=0)
    for batch in loader_train:
        batch = process_batch(batch)
        traker.featurize(batch=batch, num_samples=batch[0].shape[0])
    traker.finalize_features()
    traker.start_scoring_checkpoint(
        exp_name="qnli", checkpoint=model.state_dict(), model_id=0, num_targets=len(loader_val.dataset)
    )
    for batch in loader_val:
        batch = process_batch(batch)
        traker.score(batch=batch, num_samples=batch[0].shape[0])
    scores = traker.finalize_scores(exp_name="qnli")

    assert scores.shape == (20, 7)
    np.testing.assert_array_equal(
        np.abs(scores).argmax(0), np.arange(5, 12)
    )  # the targets are among the rows


class Asking(nn.Module):
    """Looks at values on its way, as masks of Hugging Face's networks do: vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if (x < 100).all() else x / 100)


def test_a_model_that_vmap_cannot_transform_is_featurized_by_another_computer(
    tmp_path: Path, caplog: Any
) -> None:
    torch.manual_seed(0)
    model, batch = Asking(), train_batch()
    rows = []
    for name, computer in (("default", None), ("iterative", IterativeGradientComputer)):
        changes = {} if computer is None else {"gradient_computer": computer}
        traker = make_traker(tmp_path / name, model=model, **changes)
        for model_id in range(2):
            traker.load_checkpoint(model.state_dict(), model_id)
            traker.featurize(batch, num_samples=N)
        rows.append(traker._workspace.table("ckpt-1").read(FEATURES))

    np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6 * np.abs(rows[0]).max())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Using HookGradientComputer instead" in warning
    assert "vmap cannot transform Asking" in warning


def test_the_computer_that_replaces_another_has_its_precision(tmp_path: Path) -> None:
    precision = {"autocast_dtype": torch.bfloat16, "float32_products": "tf32"}
    computer = partial(FunctionalGradientComputer, **precision)
    model = Asking()
    traker = make_traker(tmp_path, model=model, gradient_computer=computer)
    traker.load_checkpoint(model.state_dict(), 0)
    traker.featurize(train_batch(), num_samples=N)
    assert type(traker.gradient_computer) is not FunctionalGradientComputer
    assert traker.gradient_computer.fingerprint() == {
        "autocast_dtype": "bfloat16",
        "float32_products": "tf32",
    }


def test_a_computer_of_ones_own_is_not_replaced(tmp_path: Path) -> None:
    class Own(FunctionalGradientComputer):
        pass

    model = Asking()
    traker = make_traker(tmp_path, model=model, gradient_computer=Own)
    traker.load_checkpoint(model.state_dict(), 0)
    with pytest.raises(UnsupportedModelError, match="vmap cannot transform Asking"):
        traker.featurize(train_batch(), num_samples=N)
