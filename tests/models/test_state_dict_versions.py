"""Versions of modules, which state dicts record, reach the modules' own loading on every path of a checkpoint."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import labelled
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from versioned import Versioned

from trak_lite import Attributor, TRAKer
from trak_lite.cli.recipes import last_trained
from trak_lite.data.datasets import Rows
from trak_lite.modelout_functions import ImageClassificationModelOutput, ModelCall
from trak_lite.models.checkpoints import iterate_checkpoints, load_into
from trak_lite.retraining.verify import _target_outputs


def build(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Versioned(5, 3)).eval()


def version_1(model: nn.Module) -> OrderedDict[str, Tensor]:
    """What a version of the module before the present one would have saved of this model."""
    state = model.state_dict()
    *_, last = (name for name in state if name.endswith("weight"))
    state[last] = -state[last]
    for entry in state._metadata.values():
        entry["version"] = 1
    return state


def prefixed(model: nn.Module) -> nn.Module:
    """The model under the names that ``DataParallel`` and ``torch.compile`` give it."""
    compiled = nn.Module()
    compiled._modules["_orig_mod"] = model
    wrapped = nn.Module()
    wrapped._modules["module"] = compiled
    return wrapped


def pt_file(content: Any, folder: Path) -> Path:
    torch.save(content, folder / "a.pt")
    return folder / "a.pt"


def safetensors_file(state: Any, folder: Path) -> Path:
    save_file(dict(state), folder / "a.safetensors")
    return folder / "a.safetensors"


def shards(state: Any, folder: Path) -> Path:
    """Two shards with the versions of their own modules, and the list of them."""
    listed = {}
    for name in state:
        part = f"{name.partition('.')[0]}.bin"
        listed[name] = part
    for part in set(listed.values()):
        names = [name for name in state if listed[name] == part]
        shard = OrderedDict((name, state[name]) for name in names)
        module = part.removesuffix(".bin")
        shard._metadata = OrderedDict({module: state._metadata[module]})
        torch.save(shard, folder / part)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


SOURCES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "state dict": lambda model, folder: model.state_dict(),
    "state dict of version 1": lambda model, folder: version_1(model),
    "plain dict": lambda model, folder: dict(model.state_dict()),
    "prefixed, of version 1": lambda model, folder: version_1(prefixed(model)),
    "pt file": lambda model, folder: pt_file(model.state_dict(), folder),
    "pt file of version 1": lambda model, folder: pt_file(version_1(model), folder),
    "pt file, wrapped": lambda model, folder: pt_file({"state_dict": version_1(model), "epoch": 1}, folder),
    "pt file, prefixed": lambda model, folder: pt_file(version_1(prefixed(model)), folder),
    "pt file, plain dict": lambda model, folder: pt_file(dict(model.state_dict()), folder),
    "shards": lambda model, folder: shards(version_1(model), folder),
    "safetensors": lambda model, folder: safetensors_file(model.state_dict(), folder),
}


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for p, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, expected)


@pytest.mark.parametrize("source", SOURCES)
def test_modules_see_the_version_that_their_weights_were_saved_with(tmp_path: Path, source: str) -> None:
    """Where none was saved, the present one."""
    saved = build(1)
    (checkpoint,) = iterate_checkpoints(SOURCES[source](saved, tmp_path))
    for model in (build(), prefixed(build())):
        load_into(model, checkpoint)
        assert_same_weights(model, saved)


def test_the_versions_of_a_checkpoint_are_not_changed_by_loading_it() -> None:
    state = version_1(build(1))
    before = {name: dict(entry) for name, entry in state._metadata.items()}
    load_into(build(), next(iterate_checkpoints(state)))

    assert state._metadata == before


def test_a_lightning_checkpoint_keeps_the_versions_of_a_module_inside(tmp_path: Path) -> None:
    lightning = pytest.importorskip("trak_lite.integrations.lightning", exc_type=ImportError)
    outer = nn.Module()
    outer.model, outer.loss = build(1), Versioned(1, 1)
    file = pt_file({"state_dict": version_1_of_both(outer)}, tmp_path)
    model = build()
    load_into(model, next(iterate_checkpoints(lightning.ckpt_weights(file, prefix="model."))))

    assert_same_weights(model, outer.model)


def version_1_of_both(outer: nn.Module) -> OrderedDict[str, Tensor]:
    state = outer.state_dict()
    state["model.2.weight"] = -state["model.2.weight"]
    state._metadata["model.2"]["version"] = 1
    return state


# --- The whole path --------------------------------------------------------------------------------------


class Plain(nn.Linear):
    """Has the weights of :class:`Versioned`, and no version to look at."""


def without_versions() -> nn.Module:
    model = build()
    model[2] = Plain(5, 3)
    return model


@pytest.mark.parametrize("given", ["none", "state dicts", "files"])
def test_an_attributor_scores_a_model_that_looks_at_versions(tmp_path: Path, given: str) -> None:
    states = [build(seed).state_dict() for seed in (1, 2)]
    checkpoints: Any = None
    if given == "state dicts":
        checkpoints = [version_1(build(1)), states[1]]
    if given == "files":
        torch.save(version_1(build(1)), tmp_path / "1.pt")
        save_file(states[1], tmp_path / "2.safetensors")
        checkpoints = [tmp_path / "1.pt", tmp_path / "2.safetensors"]
    found = []
    for model, known in ((build(), checkpoints), (without_versions(), checkpoints and states)):
        model.load_state_dict(build().state_dict())
        attributor = Attributor(model, "image_classification", None, proj_dim=4, layout="joint")
        attributor.featurize(labelled(12, 0), known)
        found.append(attributor.score(labelled(3, 1), name="test").numpy())
        assert_same_weights(model, build())

    np.testing.assert_array_equal(*found)


def test_a_traker_loads_a_model_that_looks_at_versions(tmp_path: Path) -> None:
    train, targets = labelled(12, 0).tensors, labelled(3, 1).tensors
    for number, state in enumerate((build(1).state_dict(), version_1(build(1)), dict(build(1).state_dict()))):
        traker = TRAKer(
            build(), "image_classification", 12, save_dir=tmp_path / str(number), proj_dim=4, lambda_reg=0.1
        )
        traker.load_checkpoint(state, 0)
        traker.featurize(train, num_samples=12)
        traker.finalize_features()
        traker.start_scoring_checkpoint("test", state, 0, num_targets=3)
        assert_same_weights(traker.model, build(1))
        traker.score(targets, num_samples=3)
        scores = traker.finalize_scores("test")
        if number == 0:
            expected = scores

        np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("form", ["module", "state dict", "version 1", "plain dict"])
def test_a_retrained_model_may_look_at_versions(form: str) -> None:
    """Also where its weights come from the command line's recipe."""
    trained = {
        "module": lambda: build(1),
        "state dict": lambda: build(1).state_dict(),
        "version 1": lambda: version_1(build(1)),
        "plain dict": lambda: dict(build(1).state_dict()),
    }[form]
    targets, task = labelled(3, 1), ImageClassificationModelOutput()
    rows = Rows(targets)
    images, labels = targets.tensors
    expected = task.evaluate(ModelCall(build(1)), (images, labels)).output.detach().double()

    for weights in (trained(), last_trained(lambda indices, seed: trained(), np.arange(12), 0)):
        model = build()
        assert torch.equal(_target_outputs(model, task, rows, torch.device("cpu"), weights), expected)
        assert_same_weights(model, build())


def test_mnasnet_of_torchvision_is_attributed(tmp_path: Path) -> None:
    """It raises for weights without a version, and so for any file of safetensors."""
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    model = models.mnasnet0_5(num_classes=3).eval()
    generator = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(3, 3, 32, 32, generator=generator), torch.tensor([0, 1, 2]))
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    torch.save(model.state_dict(), tmp_path / "b.pt")
    for source in (tmp_path / "a.safetensors", tmp_path / "b.pt"):
        load_into(model, next(iterate_checkpoints(source)))
    attributor = Attributor(model, "image_classification", None, proj_dim=4)
    attributor.featurize(images)

    assert attributor.score(images, name="test").shape == (3, 3)
