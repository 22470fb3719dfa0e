"""The notebooks run, reach what they claim, and the outputs that are stored in them are those of their code."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from late import script

if not all(map(find_spec, ("nbclient", "ipykernel"))):
    pytest.skip("needs nbclient and ipykernel (extra: test)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LARGEST = 200_000  # bytes of a notebook
FACTS = {
    "mislabelled_digits": """{
        "auc": {name: one.auc for name, one in found.items()},
        "wrong": float(flipped[suspects[:150]].mean()),
        "after": after,
    }""",
    "tracing_a_sentence": """{
        "traced": list(traced.values()),
        "wrong": wrong_rows,
        "said": {name: said[NAMES.index(name)] for name in WRONG},
        "corrected": {name: complete(corrected, f"{name} lives in ") for name in WRONG},
        "control": {name: complete(control, f"{name} lives in ") for name in WRONG},
        "right": {name: city_of[name] for name in WRONG},
    }""",
    "choosing_fine_tuning_data": """{
        "lds": verdict.lds.low,
        "accuracies": accuracies,
        "sideways": {name: float((scanner[rows] == "sideways").mean()) for name, rows in choices.items() if len(rows)},
        "wrong": {name: float(wrong[rows].mean()) for name, rows in choices.items() if len(rows)},
    }""",
}
"""What the last cell of a test prints, by notebook. Who is right is known from the data, not from scores."""


@cache
def notebooks() -> ModuleType:
    """Return the script that executes them, which imports Jupyter."""
    return script(ROOT / "docs" / "notebooks.py")


def stored(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_every_notebook_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == sorted(FACTS)


@pytest.mark.quick
@pytest.mark.parametrize("name", FACTS)
def test_a_stored_notebook_was_executed_in_order_and_holds_nothing_of_the_machine(name: str) -> None:
    text, content = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"), stored(name)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]

    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["metadata"] == {} for cell in content["cells"])
    assert content["metadata"] == notebooks().METADATA
    assert {output["output_type"] for cell in code for output in cell["outputs"]} <= {
        "stream",
        "display_data",
        "execute_result",
    }
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


@pytest.mark.parametrize("name", FACTS)
def test_a_notebook_reaches_what_it_claims_and_shows_what_is_stored(name: str) -> None:
    executed = notebooks().execute(name, more=f"import json\nprint(json.dumps({FACTS[name]}))")

    *cells, facts = executed.cells
    for new, old in zip(shown(cells), shown(stored(name)["cells"]), strict=True):
        assert [one[:2] for one in new] == [one[:2] for one in old], f"Run: python docs/notebooks.py {name}"
        for (*_, values), (*_, expected) in zip(new, old, strict=True):
            assert values == pytest.approx(expected, rel=0.15)  # processors round differently
    CLAIMS[name](json.loads(facts.outputs[0].text))


def finds_wrong_labels(facts: dict[str, Any]) -> None:
    assert facts["auc"]["self-influence"] > max(0.98, facts["auc"]["loss after training"])
    assert facts["wrong"] > 0.85
    assert facts["after"]["without the 150 suspects"] > max(
        facts["after"]["all rows"] + 0.02, facts["after"]["without 150 random rows"] + 0.02, 0.97
    )


def traces_wrong_sentences(facts: dict[str, Any]) -> None:
    assert facts["traced"] == facts["wrong"]
    assert facts["corrected"] == {name: f"{name} lives in {city}." for name, city in facts["right"].items()}
    assert facts["control"] == facts["said"]
    assert not any(city in facts["said"][name] for name, city in facts["right"].items())


def chooses_better_rows(facts: dict[str, Any]) -> None:
    accuracies, sideways, wrong = facts["accuracies"], facts["sideways"], facts["wrong"]
    assert facts["lds"] > 0.4
    assert accuracies["chosen"] > max(accuracies["random"], accuracies["none"]) + 0.04
    assert sideways["chosen"] > 2 * sideways["random"]
    assert wrong["chosen"] < min(wrong["similar"], wrong["whole pool"]) - 0.05


CLAIMS = {
    "mislabelled_digits": finds_wrong_labels,
    "tracing_a_sentence": traces_wrong_sentences,
    "choosing_fine_tuning_data": chooses_better_rows,
}
