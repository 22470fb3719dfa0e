"""The notebooks run, reach what they claim, and the outputs that are stored in them are those of their code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from late import script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = script(ROOT / "docs" / "notebooks.py")
LARGEST = 200_000  # bytes of a notebook
CLAIMS = {
    "mislabelled_digits": """
auc = {name: one.auc for name, one in found.items()}
assert auc["self-influence"] > max(0.98, auc["loss after training"]), auc
assert flipped[suspects[:150]].mean() > 0.85
cleaned = after["without the 150 suspects"]
assert cleaned > max(after["all rows"] + 0.02, after["without 150 random rows"] + 0.02, 0.97), after
""",
    "tracing_a_sentence": """
right = {name: city_of[name] for name in WRONG}
assert list(traced.values()) == list(wrong_rows), traced
assert {name: complete(corrected, f"{name} lives in ") for name in WRONG} == {
    name: f"{name} lives in {city}." for name, city in right.items()
}
before = {name: said[NAMES.index(name)] for name in WRONG}
assert {name: complete(control, f"{name} lives in ") for name in WRONG} == before
assert not any(city in before[name] for name, city in right.items()), before
""",
    "choosing_fine_tuning_data": """
assert verdict.lds.low > 0.4, verdict
assert accuracies["chosen"] > max(accuracies["random"], accuracies["none"]) + 0.04, accuracies
some = {name: rows for name, rows in choices.items() if len(rows)}
sideways = {name: (scanner[rows] == "sideways").mean() for name, rows in some.items()}
assert sideways["chosen"] > 2 * sideways["random"], sideways
from_wrong = {name: wrong[rows].mean() for name, rows in some.items()}
assert from_wrong["chosen"] < min(from_wrong["similar"], from_wrong["whole pool"]) - 0.05, from_wrong
""",
}
"""What the last cell of a test asserts, by notebook. Who is right is known from the data, not from scores."""


def stored(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_every_notebook_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == sorted(CLAIMS)


@pytest.mark.quick
@pytest.mark.parametrize("name", CLAIMS)
def test_a_stored_notebook_was_executed_in_order_and_holds_nothing_of_the_machine(name: str) -> None:
    text, content = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"), stored(name)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]

    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["metadata"] == {} for cell in content["cells"])
    assert content["metadata"] == NOTEBOOKS.METADATA
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert len(text) < LARGEST
    assert not re.search(r"/(?:home|root|tmp|usr|work|Users)/|stderr", text)


def shown(cells: list[dict[str, Any]]) -> list[list[tuple[str, list[str], list[float]]]]:
    """Kind, words and numbers of every output of every cell; numbers of printed text only."""
    return [[_shown(output) for output in cell.get("outputs", [])] for cell in cells]


def _shown(output: dict[str, Any]) -> tuple[str, list[str], list[float]]:
    data = output.get("data", {})
    text = output.get("text", data.get("text/html", data.get("text/plain", "")))
    text = re.sub(r"<style>.*?</style>", "", text if isinstance(text, str) else "".join(text), flags=re.S)
    number = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    values = [float(value) for value in re.findall(number, text)] if "text" in output else []
    return " ".join([output["output_type"], *sorted(data)]), re.sub(number, "#", text).split(), values


@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_reaches_what_it_claims_and_shows_what_is_stored(name: str) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (extra: dev)")
    cells = NOTEBOOKS.execute(name, more=CLAIMS[name]).cells[:-1]
    for new, old in zip(shown(cells), shown(stored(name)["cells"]), strict=True):
        assert [one[:2] for one in new] == [one[:2] for one in old], f"Run: python docs/notebooks.py {name}"
        for (*_, values), (*_, expected) in zip(new, old, strict=True):
            assert values == pytest.approx(expected, rel=0.15)  # processors round differently
