"""Lightning: rows of every saved checkpoint against a plain loop, and training that does not notice it is watched."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from late import Late
from reference import margin
from tiny_runs import adam_scale, labelled
from torch import nn
from torch.utils.data import DataLoader, StackDataset
from watching import EXACT, Restless, random_states, stored_rows

from trak_lite import Attributor
from trak_lite.errors import CheckpointError, InvalidInputError, ManifestMismatchError

WHY = "tested where Lightning is installed: pip install trak-lite[lightning]"
pl = pytest.importorskip("lightning.pytorch", reason=WHY)
from trak_lite.integrations import lightning  # noqa: E402 - imports Lightning

zarr = Late("zarr")
ModelCheckpoint = pl.callbacks.ModelCheckpoint
IGNORED = (
    "The '.*_dataloader' does not have many workers", "GPU available but not used",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
)  # fmt: skip
pytestmark = [pytest.mark.filterwarnings(f"ignore:{said}") for said in IGNORED]


class Digits(pl.LightningModule):
    def __init__(self, width=5):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


ROWS = labelled(12)


def built():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    return Digits()


def fit(module, folder, *callbacks, rows=ROWS, epochs=2, start=None, saves=True, package=pl):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": epochs, "accelerator": "cpu", "log_every_n_steps": 1, **quiet}
    saving = saves and bool(callbacks)
    callbacks = list(callbacks)
    trainer = package.Trainer(
        default_root_dir=folder, callbacks=callbacks, enable_checkpointing=saving, **settings
    )
    loaders = DataLoader(rows, batch_size=4, shuffle=True), DataLoader(ROWS, batch_size=6)
    trainer.fit(module, *loaders, ckpt_path=start, weights_only=False)
    return trainer


def keeping_all(folder, **settings):
    return ModelCheckpoint(folder / "ckpt", filename="{epoch}-{step}", save_top_k=-1, **settings)


def in_order(folder):
    """The saved files as they came."""
    return sorted((folder / "ckpt").glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)


def expected_rows(state):
    """Gradients of each row's margin alone, with the weights of a ``.ckpt`` file: ``(N, P)``."""
    module = Digits().eval()
    module.load_state_dict(state)
    found = []
    for x, label in ROWS:
        grads = torch.autograd.grad(margin(module(x[None]), label[None]).sum(), list(module.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]).numpy())
    return np.stack(found)


SAVES = [{}, {"save_on_train_epoch_end": True}, {"every_n_train_steps": 3}, {"save_weights_only": True}]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("settings", SAVES)
def test_every_saved_checkpoint_is_featurized_with_the_weights_in_its_file(tmp_path, inside, settings):
    """At the end of a validation, of an epoch or of a step, or without the optimizer; a whole module, or one inside."""
    module = built()
    attributed = module.model if inside else module
    attributor = Attributor(attributed, "image_classification", tmp_path / "a.zarr", **EXACT)
    saver = keeping_all(tmp_path, **settings)
    fit(module, tmp_path, saver, lightning.FeaturizeCallback(attributor, ROWS), epochs=3)
    scores = attributor.score(ROWS, name="itself", method="GradDot")
    files = in_order(tmp_path)
    assert len(files) == 3
    assert scores.shape == (12, 12)
    for number, file in enumerate(files):
        state = torch.load(file, weights_only=True)["state_dict"]
        found = stored_rows(tmp_path / "a.zarr", number)
        np.testing.assert_allclose(found, expected_rows(state), rtol=1e-5, atol=1e-6)
    assert "ckpt-3" not in zarr.open(tmp_path / "a.zarr", mode="r")


def test_a_trainer_and_a_saver_of_the_older_package_are_taken(tmp_path):
    older = pytest.importorskip(
        "pytorch_lightning", reason="tested where pytorch-lightning is installed, too"
    )

    class Older(older.LightningModule):
        forward, configure_optimizers = Digits.forward, Digits.configure_optimizers
        training_step, validation_step = Digits.training_step, Digits.validation_step

        def __init__(self):
            super().__init__()
            self.model = built().model

    module = Older()
    attributor = Attributor(module.model, "image_classification", tmp_path / "a.zarr", **EXACT)
    saver = older.callbacks.ModelCheckpoint(tmp_path / "ckpt", filename="{epoch}", save_top_k=-1)
    fit(module, tmp_path, saver, lightning.FeaturizeCallback(attributor, ROWS), package=older)
    assert len(in_order(tmp_path)) == 2
    for number, file in enumerate(in_order(tmp_path)):
        rows = expected_rows(torch.load(file, weights_only=True)["state_dict"])
        np.testing.assert_allclose(stored_rows(tmp_path / "a.zarr", number), rows, rtol=1e-5, atol=1e-6)


def test_training_is_bitwise_the_same_with_and_without_the_callback(tmp_path):
    found = []
    for name, watched in (("alone", False), ("watched", True)):
        module, folder = built(), tmp_path / name
        more = []
        if watched:
            attributor = Attributor(module, "image_classification", folder / "a.zarr", **EXACT)
            more = [lightning.FeaturizeCallback(attributor, Restless(ROWS))]
        fit(module, folder, keeping_all(folder, every_n_train_steps=2), *more, epochs=3)
        modes = [part.training for part in module.modules()]
        found.append((random_states(), modes, [p.tolist() for p in module.parameters()]))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_training_may_overwrite_its_files_and_a_new_one_may_not(tmp_path):
    def trained_again(start, epochs):
        module = built()
        attributor = Attributor(module, "image_classification", tmp_path / "a.zarr", **EXACT)
        saver = ModelCheckpoint(tmp_path, filename="best", save_top_k=1, enable_version_counter=False)
        callback = lightning.FeaturizeCallback(attributor, ROWS)
        fit(module, tmp_path, saver, callback, epochs=epochs, start=start)

    file, again = tmp_path / "best.ckpt", r"other weights of .*best\.ckpt already \(ckpt-0,"
    with pytest.warns(UserWarning, match=again):
        trained_again(None, 2)
    with pytest.warns(UserWarning, match=again):
        trained_again(file, 3)
    rows = expected_rows(torch.load(file, weights_only=True)["state_dict"])
    np.testing.assert_allclose(stored_rows(tmp_path / "a.zarr", 2), rows, rtol=1e-5, atol=1e-6)
    file.unlink()
    with pytest.raises(ManifestMismatchError, match=again):
        trained_again(None, 4)


def test_code_in_a_file_is_run_only_where_it_is_trusted_and_a_wrong_prefix_is_named(tmp_path):
    file, state = tmp_path / "a.ckpt", {"model.weight": torch.ones(2)}
    torch.save({"state_dict": state, "hyper_parameters": {"setting": Digits}}, file)
    said = (
        r"load failed: GLOBAL .*Digits\). .*without running code from them.*"
        r"that you trust.*ckpt_weights, weights_only=False\)"
    )
    with pytest.raises(CheckpointError, match=said):
        lightning.ckpt_weights(file, prefix="model.")
    found = lightning.ckpt_weights(file, prefix="model.", weights_only=False)
    assert {name: value.tolist() for name, value in found.items()} == {"weight": [1.0, 1.0]}
    with pytest.raises(CheckpointError, match=r"with the prefix 'net\.': found \['model.weight'\]"):
        lightning.ckpt_weights(file, prefix="net.", weights_only=False)


def of(model, **attributes):
    attributor = Attributor(model, "image_classification", None)
    vars(attributor).update(attributes)
    return attributor


def elsewhere(module, saver):
    saver.last_model_path = "s3://bucket/last.ckpt"
    return of(module)


NEVER = {
    "parameters of the attributor's Digits": lambda module, saver: of(built()),
    "a model without the Sequential of the attributor": lambda module, saver: of(nn.Sequential(module.model)),
    "runs on cuda, but the model is trained on cpu": lambda module, saver: of(module, device=torch.device("cuda")),
    r"saves checkpoints to s3://bucket/last\.ckpt, which is not a local path": elsewhere,
}  # fmt: skip


@pytest.mark.parametrize("said", NEVER)
def test_the_callback_refuses_what_it_could_never_featurize(said, tmp_path):
    module, saver = built(), keeping_all(tmp_path)
    attributor = NEVER[said](module, saver)
    with pytest.raises(CheckpointError if "s3" in said else InvalidInputError, match=said):
        fit(module, tmp_path, saver, lightning.FeaturizeCallback(attributor, ROWS))


def test_the_callback_refuses_data_without_an_order_and_trainers_that_save_nothing(tmp_path):
    module = built()
    with pytest.raises(InvalidInputError, match="the train data is a Tensor of tensors"):
        lightning.FeaturizeCallback(of(module), torch.zeros(3))
    with pytest.raises(InvalidInputError, match="The trainer has no ModelCheckpoint, so no"):
        fit(module, tmp_path, lightning.FeaturizeCallback(of(module), ROWS), saves=False)


@pytest.mark.parametrize("inside", [False, True])
def test_rows_are_scaled_by_the_moments_in_the_file(tmp_path, inside):
    """The optimizer of a ``.ckpt`` file numbers the parameters of the whole module."""
    module = built()
    attributed = module.model if inside else module
    settings = {**EXACT, "method": "GradDot", "normalize": "adam"}
    attributor = Attributor(attributed, "image_classification", tmp_path / "a.zarr", **settings)
    fit(module, tmp_path, keeping_all(tmp_path), lightning.FeaturizeCallback(attributor, ROWS))
    files = in_order(tmp_path)
    for number, file in enumerate(files):
        content = torch.load(file, weights_only=True)
        states = sorted(content["optimizer_states"][0]["state"].items())
        scale = torch.cat([adam_scale(entry) for _, entry in states])
        expected = expected_rows(content["state_dict"]) * scale.numpy()
        found, atol = stored_rows(tmp_path / "a.zarr", number), 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)
    loader = {"checkpoint_loader": partial(lightning.ckpt_weights, prefix="model.")} if inside else {}
    assert attributor.featurize(ROWS, files, **loader).rows_written == 0


class Capturing(Digits):
    """As the docs say; ``seen`` are the rows and the weights before each step."""

    capture = None

    def on_train_batch_start(self, batch, batch_idx):
        if self.capture is not None:
            self.seen.append((batch[1], copy.deepcopy(self.state_dict())))
            self.capture(*batch)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


def test_rows_are_captured_in_the_training_of_a_module(tmp_path):
    numbered = StackDataset(ROWS, range(len(ROWS)))
    plain, module = built(), built()
    for each in (plain, module):
        each.__class__, each.seen = Capturing, []
    attributor = Attributor(module, "image_classification", tmp_path / "a.zarr", **EXACT)
    torch.manual_seed(1)
    fit(plain, tmp_path, rows=numbered, epochs=1)
    torch.manual_seed(1)
    with attributor.capture(ROWS, "epoch-0") as module.capture:
        fit(module, tmp_path, rows=numbered, epochs=1)
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    found = stored_rows(tmp_path / "a.zarr", 0)
    assert len(module.seen) == 3
    for numbers, weights in module.seen:
        np.testing.assert_allclose(found[numbers], expected_rows(weights)[numbers], rtol=1e-5, atol=1e-6)
