"""Published architectures go through the whole public path with default settings: twelve of them in every run.

The others are run by ``python -m benchmarks.zoo``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo_cases import Architecture
from zoo_path import run_whole_path
from zoo_published import PUBLISHED

WHY = (
    "architectures of transformers and peft are tested where these are installed: pip install trak-lite[zoo]"
)
MORE_THAN_100 = ("resnet50", "mobilenet_v2", "mobilevit")
OTHERS = (
    "bert",
    "t5",
    "qwen2_moe",
    "mamba",
    "swinv2",
    "wav2vec2-conformer",
    "clip",
    "lora-llama",
    "patchtsmixer",
)


def architecture(name: str) -> Architecture:
    """Return an entry of the zoo; transformers is imported only for its own."""
    for entry in PUBLISHED:
        if entry.name == name:
            return entry
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=WHY)
    from zoo_hub import HUB

    return next(entry for entry in HUB if entry.name == name)


@pytest.mark.parametrize("name", [*MORE_THAN_100, *OTHERS])
def test_a_published_architecture_is_right_from_featurize_to_report(name: str, tmp_path: Path) -> None:
    entry = architecture(name)

    measured = run_whole_path(
        entry.make,
        entry.task,
        entry.output,
        entry.samples(4, 1),
        entry.samples(2, 2),
        tmp_path,
        tokens=entry.tokens,
        draws=entry.draws,
    )

    assert measured["engine"] == measured["engine in its own dtype"] == TABLE[name]["engine"]
    assert (measured["modules"] > 100) == (name in MORE_THAN_100)
