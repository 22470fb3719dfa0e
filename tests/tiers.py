"""The tiers of the suite: what ``pytest`` runs without an option, and what only ``pytest -m campaign`` runs.

``conftest.py`` gives the marker ``campaign`` to the tests named here, and ``pyproject.toml`` leaves them out by
default. ``pytest -m ""`` runs both. Tests marked ``quick`` are never left out. The standard tier checks every promise
of the package once; repetitions, and what needs a kill, a browser, a compiler or minutes, are in the campaign.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

CAMPAIGN: dict[str, tuple[str, ...]] = {
    "Triton's interpreter and compiler": (
        "projectors/test_triton_dense.py",
        "projectors/test_triton_sketch.py",
        "projectors/test_triton_targets.py",
    ),
    "laws over many draws": (
        "featurizing/test_iterative_solvers.py::test_cg_with_drawn_labels_is_close_to_cg",
        "featurizing/test_iterative_solvers.py::test_products_with_drawn_labels_estimate_the_dense_matrix",
        "gradient_computers/test_hook_rules_drawn.py",
        "projectors/test_countsketch_statistics.py",
        "projectors/test_mask_projectors.py::test_every_entry_is_equally_likely",
        "store/test_store_check.py::test_what_is_called_sound_is_right_and_a_repair_makes_it_sound",
    ),
    "memory, and hundreds of modules": (
        "attributor/test_many_modules.py",
        "gradient_computers/test_self_check.py::test_the_check_holds_one_gradient_of_one_parameter_at_a_time",
        "unrolled/test_blocks.py::test_a_replay_stays_within_its_memory",
    ),
    "the stand-in accelerator": (
        "device/test_gpu_benchmark.py::test_the_parts_are_rehearsed_and_not_measured_twice",
        "device/test_stand_in.py::test_the_product_runs_on_an_accelerator",
    ),
    "rounds of faults and kills": (
        "store/test_store_machine.py::test_many_histories_end_as_a_dict_says",
        "faults/test_fault_rounds.py::test_no_fault_breaks_a_promise",
        "parallel/test_killed_ranks.py",
        "serve/test_serve_killed.py",
        "store/test_store_identity.py::test_a_flipped_bit_of_metadata_is_named_or_harmless",
        "traker/test_traker_contract.py::test_a_killed_process_is_continued_by_another",
        "traker/test_traker_contract.py::test_a_process_may_end_with_rows_that_are_not_done",
        "unrolled/test_resume.py::test_kills_at_random_moments_end_in_the_same_bits",
    ),
    "a browser": (
        "report/test_report_browser.py",
        "serve/test_serve_browser.py",
    ),
    "examples, notebooks and the site": (
        "cli/test_shipped_configs.py::test_a_config_gives_scores_of_its_shape_and_renders_its_rows",
        "docs/test_docs.py::test_the_code_of_a_page_runs_from_top_to_bottom",
        "docs/test_docs.py::test_the_site_builds_strictly_is_complete_and_asks_nobody_else_for_anything",
        "examples/test_digits.py",
        "examples/test_example_scripts.py",
        "examples/test_fsdp_example.py",
        "examples/test_notebooks.py::test_a_notebook_reaches_what_it_claims_and_shows_what_is_stored",
        "test_readme.py::test_python_blocks_run_as_they_stand_and_again",
        "test_readme.py::test_the_main_job_command_works_in_a_fresh_folder",
    ),
    "published architectures": (
        "unrolled/test_derivatives.py::test_scores_of_a_hugging_face_gpt2",
        "zoo/test_zoo.py::test_a_published_architecture_is_right_from_featurize_to_report",
        "zoo/test_zoo_unrolled.py",
    ),
    "what the goldens hold as well": (
        "featurizing/test_iterative_solvers.py::test_lissa_converges_to_the_dense_solve",
        "methods/test_methods_conform.py::TestCG",
        "methods/test_methods_conform.py::TestLiSSA",
        "traker/test_traker_parity.py",
    ),
    "more ranks and processes": (
        "modelout_functions/test_modelout_registry.py::test_a_description_without_source_is_the_same_in_another_process",
        "models/test_sharded_models.py::test_a_store_begun_whole_is_continued_sharded_and_the_other_way_round",
        "models/test_sharded_models.py::test_copies_of_shards_change_nothing",
        "models/test_sharded_models.py::test_four_ranks_write_the_bits_of_one",
        "models/test_sharded_models.py::test_language_models_fit_the_fisher_kernel_and_score_tokens_in_step",
        "models/test_sharded_models.py::test_other_resharding_and_projectors_change_nothing",
        "run/test_changed_runs.py::test_another_instruction_set_continues",
    ),
}
"""Reason to files, classes or functions, relative to this folder, all cases of which are in the campaign."""

SOME: dict[str, int] = {
    "attributor/test_attributor.py": 3,
    "attributor/test_attributor_dtypes.py": 2,
    "attributor/test_attributor_remote.py": 1,
    "attributor/test_growing_data.py": 2,
    "cli/test_cli_configs.py::test_a_class_path_in_any_key_is_refused_and_imports_nothing": 12,
    "cli/test_cli_security.py::test_beside_a_typed_recipe_the_store_adds_no_code": 3,
    "cli/test_cli_security.py::test_no_command_runs_python_that_only_a_store_names": 6,
    "cli/test_cli_commands.py": 1,
    "cli/test_cli_security.py::test_a_verdict_that_cannot_be_read_is_told": 2,
    "cli/test_cli_security.py::test_settings_of_a_manifest_that_are_none_are_refused_by_name": 4,
    "featurizing/test_adam_rows.py": 3,
    "featurizing/test_fisher.py": 1,
    "featurizing/test_normalized_features.py": 2,
    "gradient_computers/test_hook_recurrent.py": 3,
    "gradient_computers/test_hook_routing.py": 4,
    "gradient_computers/test_hook_rules.py::test_bare_parameters_that_broadcast": 24,
    "integrations/test_experts.py": 3,
    "integrations/test_huggingface.py": 1,
    "modelout_functions/test_modelout_registry.py::test_a_carried_value_counts_by_its_content": 24,
    "modelout_functions/test_post_training_transformers.py": 3,
    "parallel/test_shared_runs.py": 1,
    "projectors/test_countsketch_factors.py": 8,
    "projectors/test_mask_projectors.py::test_inner_products_are_unbiased": 1,
    "projectors/test_projector_laws.py": 2,
    "projectors/test_two_sided_projector.py": 4,
    "retraining/test_changed_training.py": 3,
    "retraining/test_many_models.py": 4,
    "retraining/test_verification.py": 1,
    "run/test_changed_runs.py::test_a_finished_run_is_not_taken_for_that_of_another_thing": 6,
    "run/test_changed_runs.py::test_a_run_that_broke_off_is_not_continued_with_another_thing": 6,
    "run/test_changed_runs.py::test_other_batch_sizes_are_the_same_run": 3,
    "run/test_changed_runs.py::test_targets_of_another_thing_do_not_get_the_stored_scores": 6,
    "scoring/test_ekfac_scores.py": 1,
    "scoring/test_index.py": 1,
    "scoring/test_token_scores.py": 1,
    "scoring/test_unprojected.py": 1,
    "scoring/test_views.py": 1,
    "store/test_store_kill.py": 4,
    "traker/test_traker_original_calls.py::test_five_rows_are_scored": 4,
    "unrolled/test_blocks.py": 2,
    "unrolled/test_derivatives.py": 5,
    "unrolled/test_resume.py": 1,
}
"""How many cases of a function (of each function of a file) standard keeps: the first, the last, others between."""

EACH_VALUE: tuple[str, ...] = ("attributor/test_product.py",)
"""Functions, or files of them, of which standard keeps cases until each value of each parameter was in one."""


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
