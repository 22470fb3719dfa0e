"""The tiers of the suite: what ``pytest`` runs without an option, and what only ``pytest -m campaign`` runs.

``conftest.py`` gives the marker ``campaign`` to the tests named here, and ``pyproject.toml`` leaves them out by default.
``pytest -m ""`` runs both. Tests marked ``quick`` are never left out. The standard tier checks every promise of the package
once; repetitions of it, and what needs a kill, a browser, a compiler or minutes, are in the campaign.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

CAMPAIGN: dict[str, tuple[str, ...]] = {
    "Triton's interpreter and compiler": (
        "projectors/test_triton_sketch.py",
        "projectors/test_triton_targets.py",
    ),
    "laws over many draws": (
        "gradient_computers/test_hook_rules_drawn.py",
        "projectors/test_countsketch_statistics.py",
        "projectors/test_mask_projectors.py::test_every_entry_is_equally_likely",
    ),
    "the stand-in accelerator": (
        "device/test_gpu_benchmark.py::test_the_parts_are_rehearsed_and_not_measured_twice",
        "device/test_stand_in.py::test_the_product_runs_on_an_accelerator",
    ),
    "rounds of faults and kills": (
        "faults/test_fault_machine.py",
        "faults/test_fault_rounds.py::test_no_fault_breaks_a_promise",
        "parallel/test_killed_ranks.py",
        "serve/test_serve_killed.py",
        "unrolled/test_resume.py::test_kills_at_random_moments_end_in_the_same_bits",
    ),
    "a browser": (
        "report/test_report_browser.py",
        "serve/test_serve_browser.py",
    ),
    "examples, notebooks and the site": (
        "docs/test_docs.py::test_the_code_of_a_page_runs_from_top_to_bottom",
        "docs/test_docs.py::test_the_site_builds_strictly_is_complete_and_asks_nobody_else_for_anything",
        "examples/test_digits.py",
        "examples/test_example_scripts.py",
        "examples/test_fsdp_example.py",
        "examples/test_notebooks.py::test_a_notebook_reaches_what_it_claims_and_shows_what_is_stored",
        "test_readme.py::test_the_main_job_command_works_in_a_fresh_folder",
    ),
}
"""Reason to files, classes or functions, relative to this folder, all cases of which are in the campaign."""

SOME: dict[str, int] = {
    "gradient_computers/test_hook_recurrent.py": 3,
    "integrations/test_huggingface.py": 2,
    "models/test_sharded_models.py": 1,
    "parallel/test_shared_runs.py": 1,
    "projectors/test_countsketch_factors.py": 8,
    "projectors/test_mask_projectors.py": 4,
    "projectors/test_projector_laws.py": 2,
    "projectors/test_triton_dense.py": 2,
    "projectors/test_two_sided_projector.py": 4,
    "store/test_store_kill.py": 2,
    "zoo/test_zoo.py": 2,
    "zoo/test_zoo_unrolled.py": 1,
}
"""Functions or classes to the number of cases that the standard tier keeps: the first, the last, others between them."""

EACH_VALUE: tuple[str, ...] = ()
"""Functions or classes of which the standard tier keeps cases until each value of each parameter was in one."""


def mark_campaign(items: Iterable[pytest.Item]) -> None:
    """Mark what the standard tier leaves out. A case that is alone because it was named is kept."""
    whole = {name for names in CAMPAIGN.values() for name in names}
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0].removeprefix("tests/"), []).append(item)
    for name, cases in groups.items():
        names = _prefixes(name)
        kept = cases
        if whole & names:
            kept = []
        elif SOME.keys() & names:
            kept = _spread(cases, next(SOME[prefix] for prefix in SOME if prefix in names))
        elif names.intersection(EACH_VALUE):
            kept = _each_value(cases)
        for item in cases:
            if item not in kept and "quick" not in item.keywords:
                item.add_marker(pytest.mark.campaign)


def _prefixes(name: str) -> set[str]:
    """Return ``file::Class::function`` and what it begins with: ``file::Class`` and ``file``."""
    parts = name.split("::")
    return {"::".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    if len(cases) <= count:
        return cases
    if count == 1:
        return cases[:1]
    return [cases[round(number * (len(cases) - 1) / (count - 1))] for number in range(count)]


def _each_value(cases: list[pytest.Item]) -> list[pytest.Item]:
    seen: set[tuple[str, int]] = set()
    kept = []
    for item in cases:
        callspec = getattr(item, "callspec", None)
        values = {(name, id(value)) for name, value in callspec.params.items()} if callspec else {("", 0)}
        if values - seen:
            kept.append(item)
            seen |= values
    return kept
