"""Published architectures go through the whole public path with default settings: twelve of them in every run.

The others are run by ``python -m benchmarks.zoo``, whose committed table is held here to be
complete and without failure.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from zoo_cases import Architecture
from zoo_path import run_whole_path
from zoo_published import PUBLISHED

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "benchmarks" / "results" / "zoo.json").read_text(encoding="utf-8"))["models"]
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
        entry.samples(6, 1),
        entry.samples(2, 2),
        tmp_path,
        tokens=entry.tokens,
        draws=entry.draws,
    )

    assert measured["engine"] == measured["engine in its own dtype"] == TABLE[name]["engine"]
    assert (measured["modules"] > 100) == (name in MORE_THAN_100)


def entries() -> dict[str, Architecture]:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=WHY)
    from zoo_hub import HUB

    return {entry.name: entry for entry in (*PUBLISHED, *HUB)}


def test_the_table_has_every_architecture_and_none_that_failed() -> None:
    known = entries()

    assert {name for name in TABLE if not name.startswith("timm ")} == set(known)
    assert {row["outcome"] for row in TABLE.values()} <= {"right", "refused"}
    assert sum(row["outcome"] == "right" for row in TABLE.values()) >= 40
    for row in TABLE.values():
        if row["outcome"] == "right":
            assert row["gradient_error"] < 1e-5
            assert row["score_error"] < 2e-3


def test_every_refusal_is_a_named_error_that_the_docs_list() -> None:
    named = exported_errors()
    page = (ROOT / "docs" / "pages" / "architectures.md").read_text(encoding="utf-8")

    refused: dict[str, Any] = {name: row for name, row in TABLE.items() if row["outcome"] == "refused"}
    for name, row in refused.items():
        assert row["error"] in named
        assert f"| {name} |" in page
        assert row["error"] in page


def exported_errors() -> list[str]:
    tree = ast.parse((ROOT / "trak_lite" / "errors.py").read_text(encoding="utf-8"))
    assigned = next(
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return ast.literal_eval(assigned.value)
