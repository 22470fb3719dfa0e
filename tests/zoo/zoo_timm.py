"""The models that timm keeps for tests: its families at a few thousand parameters. Only the benchmark runs them."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import torch
from zoo_cases import CLASSES, Architecture, classifier, image

_declared: list[torch.library.Library] = []


def let_torchvision_import() -> None:
    """Declare the operators of torchvision where its compiled part cannot be loaded.

    The wheels of the package index are built for CUDA and load beside no other torch. Their Python part, which is all
    that timm and transformers need here, refuses to be imported without these names; no model of the zoo calls them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _declared:
        return
    for compiled in Path(found.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            break
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def timm_models() -> list[Architecture]:
    """Return one entry for each model that timm keeps for tests."""
    let_torchvision_import()
    import timm

    found = []
    for name in timm.list_models("test_*"):
        size = timm.get_pretrained_cfg(name).input_size[-1]
        build = partial(timm.create_model, name, pretrained=False, num_classes=CLASSES)
        found.append(classifier(f"timm {name}", "vision", build, image(size)))
    return found
