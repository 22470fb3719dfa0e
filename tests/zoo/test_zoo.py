"""Published architectures go through the whole public path with default settings: twelve of them, four a day in CI.

The others are run by ``python -m benchmarks.zoo``, whose table is held here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiers import is_of_today

import trak_lite.errors
from benchmarks.architectures import Architecture
from benchmarks.architectures.published import PUBLISHED
from benchmarks.whole_path import gradients_by_precision, run_whole_path

ROOT = Path(__file__).parents[2]


def table_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the results of a run of the benchmark by architecture."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["models"]


TABLE = table_of("zoo")
WHY = (
    "architectures of transformers and peft are tested where these are installed: pip install trak-lite[zoo]"
)
MORE_THAN_100 = ("resnet50", "t5", "lora-vit", "switch_transformers")
OTHERS = (
    "gpt2",
    "efficientnet",
    "videomae",
    "hubert",
    "segformer",
    "whisper",
    "patchtst",
    "clap",
)


def hub() -> list[Architecture]:
    """Return the entries that need transformers and peft, which are imported for them only."""
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=WHY)
    from benchmarks.architectures.hub import HUB

    return HUB


def architecture(name: str) -> Architecture:
    """Return an entry of the zoo."""
    for entry in PUBLISHED:
        if entry.name == name:
            return entry
    return next(entry for entry in hub() if entry.name == name)


@pytest.mark.filterwarnings("ignore:.* loses .* of the norm of the features of module")  # of random weights
@pytest.mark.parametrize("name", [*MORE_THAN_100, *OTHERS])
def test_a_published_architecture_is_right_from_featurize_to_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CI, two of them a day with the whole self-check, all figures and a second fit."""
    entry, briefly = architecture(name), not is_of_today([*MORE_THAN_100, *OTHERS].index(name))
    if briefly:
        monkeypatch.setattr("trak_lite.gradient_computers.self_check._SAMPLES_AT_FIRST", 1)
        monkeypatch.setattr(
            "trak_lite.gradient_computers.self_check.is_scheduled", lambda number: number % 64 == 0
        )

    measured = run_whole_path(entry, tmp_path, briefly=briefly)

    assert measured["engine"] == measured["engine in its own dtype"] == TABLE[name]["engine"]
    assert (measured["modules"] > 100) == (name in MORE_THAN_100)


def test_gradients_of_a_mixture_are_right_in_every_precision_and_length() -> None:
    hub()
    from benchmarks.architectures.mixtures import mixtures

    entry = next(entry for entry in mixtures() if entry.name.startswith("mixtral"))
    found = gradients_by_precision(entry.make(), entry.task, entry.output, entry.samples(2, 1))

    assert {name: row.get("engine", row) for name, row in found.items()} == {
        f"{dtype}, {length}": "hook"
        for length in ("as drawn", "one token less")
        for dtype in ("float64", "float32", "bfloat16")
    }


def test_the_table_has_every_architecture() -> None:
    assert {entry.name for entry in (*hub(), *PUBLISHED)} <= set(TABLE)


@pytest.mark.quick
def test_every_architecture_of_the_table_is_right_or_refused_by_a_named_error_that_the_docs_list() -> None:
    page = (ROOT / "docs" / "pages" / "architectures.md").read_text(encoding="utf-8")

    assert len(TABLE) > 150
    for name, row in TABLE.items():
        if row["outcome"] != "right":
            assert row["outcome"] == "refused", name
            assert issubclass(getattr(trak_lite.errors, row["error"]), trak_lite.errors.TrakLiteError)
            assert f"| {name} | `{row['error']}` |" in page


def test_gradients_in_every_precision_and_replays_of_every_architecture_that_was_run_are_right() -> None:
    gradients, replays = table_of("zoo_gradients"), table_of("zoo_replays")

    assert sum(row["domain"] == "mixtures and hybrids" for row in gradients.values()) >= 40
    assert {row["outcome"] for row in gradients.values()} == {"right"}
    assert replays.keys() == TABLE.keys()
    assert {row["outcome"] for row in replays.values()} == {"right", "refused"}
    assert sum(row.get("replayed", False) for row in replays.values()) > 150
