"""The tiers of the suite: what ``pytest`` runs without an option, and what only ``pytest -m campaign`` runs.

``conftest.py`` gives the marker ``campaign`` to the tests named here, and ``pyproject.toml`` leaves them out by
default. ``pytest -m ""`` runs both. Tests marked ``quick`` are never left out. The standard tier checks every promise
of the package once; repetitions, and what needs a kill, a browser, a compiler or minutes, are in the campaign.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

LONG: tuple[str, ...] = (
    "attributor/test_shortage.py::test_few_file_descriptors_are_named_wherever_they_run_out",
    "cli/test_cli.py::test_unroll_trains_replays_and_finds_its_scores_again",
    "cli/test_cli_commands.py::test_a_moved_store_repeats_its_run_and_records_what_differs",
    "cli/test_cli_commands.py::test_a_report_on_some_rows_shows_the_samples_of_these_rows",
    "cli/test_cli_commands.py::test_a_verification_of_selected_rows_trains_on_these_rows",
    "cli/test_shipped_configs.py::test_the_digits_config_finds_the_labels_that_were_flipped",
    "evaluation/test_evaluation.py::test_intervals_of_few_subsets_cover_the_expected_score",
    "featurizing/test_iterative_solvers.py::test_cg_is_linear_in_targets_whose_squares_leave_float32",
    "featurizing/test_iterative_solvers.py::test_scores_of_stored_rows_refine_and_parts_of_targets_agree",
    "gradient_computers/test_hook_models.py"
    "::test_a_layer_that_a_branch_captures_goes_to_a_computer_that_follows_it",
    "integrations/test_huggingface.py::test_a_resumed_training_may_save_a_step_again_and_a_new_one_may_not",
    "integrations/test_huggingface.py"
    "::test_rows_are_those_of_the_weights_where_training_ran_in_mixed_precision",
    "integrations/test_huggingface.py::test_training_is_bitwise_the_same_with_and_without_the_callback",
    "integrations/test_huggingface.py"
    "::test_traker_goes_on_after_a_pass_in_which_parameters_are_set_to_themselves",
    "models/test_borrowed_models.py::test_curvatures_do_not_depend_on_the_texts_before",
    "models/test_sharded_models.py::test_rows_and_scores_of_checkpoints_have_the_bits_of_a_whole_model",
    "parallel/test_ranks.py::test_of_several_ranks_the_first_one_drops_when_all_have_come",
    "parallel/test_ranks.py::test_of_several_ranks_the_first_one_retrains_and_tells_the_others",
    "parallel/test_ranks.py::test_the_bar_of_rank_0_counts_the_rows_of_all",
    "retraining/test_verification.py"
    "::test_a_calibration_is_fitted_to_half_of_the_subsets_and_tested_on_the_others",
    "retraining/test_verification.py"
    "::test_more_subsets_and_seeds_train_what_is_new_and_compare_what_is_stored",
    "retraining/test_what_if.py::test_intervals_hold_noise_of_seeds_that_does_not_depend_on_the_rows",
    "scoring/test_index.py::test_a_bound_is_stated_for_no_set_but_the_measured_one",
    "scoring/test_index.py::test_a_recall_is_stated_only_when_enough_targets_were_measured",
    "scoring/test_planning.py::test_a_clearly_faster_batch_size_is_proposed",
    "serve/test_serve_hostile.py::test_a_reader_that_stalls_loses_its_connection",
    "serve/test_serve_hostile.py::test_slow_clients_are_disconnected_and_hold_nobody_up",
    "serve/test_serve_pages.py::test_a_set_that_is_made_again_is_shown_as_it_is_now",
    "serve/test_serve_tokens.py::test_only_the_newest_texts_stay_in_the_store_beside_the_targets_of_the_user",
    "unrolled/test_sharing.py::test_a_block_of_a_process_that_ends_is_taken_over",
    "unrolled/test_smoothness.py::test_a_chaotic_training_is_not_smooth_and_a_smooth_one_warns_of_nothing",
)
"""Tests of a second or more, whose promise shorter tests tell as well: CI runs a third of them each day."""

CAMPAIGN: dict[str, tuple[str, ...]] = {
    "Triton's interpreter and compiler": (
        "projectors/test_triton_dense.py",
        "projectors/test_triton_sketch.py",
    ),
    "laws over many draws": (
        "gradient_computers/test_hook_rules.py::test_a_layer_at_many_options_equals_the_loop",
    ),
    "memory, and hundreds of modules": (
        "attributor/test_many_modules.py",
        "gradient_computers/test_self_check.py::test_the_check_holds_one_gradient_of_one_parameter_at_a_time",
        "store/test_store_hostile.py::test_metadata_of_a_large_model_are_within_the_bounds",
        "unrolled/test_blocks.py::test_a_larger_budget_is_used_for_larger_blocks",
        "unrolled/test_blocks.py::test_a_replay_stays_within_its_memory",
    ),
    "the stand-in accelerator": (
        "device/test_gpu_benchmark.py::test_a_case_that_crashes_or_hangs_costs_only_itself",
        "device/test_gpu_benchmark.py::test_every_part_is_rehearsed_and_not_measured_twice",
        "device/test_stand_in.py::test_the_product_runs_on_an_accelerator",
    ),
    "rounds of faults and kills": (
        "faults/test_fault_rounds.py::test_no_fault_breaks_a_promise",
        "faults/test_fault_rounds.py::test_power_cuts_before_some_changes_break_no_promise",
        "faults/test_hostile_store.py",
        "parallel/test_killed_ranks.py",
        "serve/test_serve_killed.py",
        "store/test_store_machine.py::test_many_histories_end_as_a_dict_says",
        "traker/test_traker_contract.py::test_a_process_may_end_with_rows_that_are_not_done",
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
        "examples/test_notebooks.py::test_a_notebook_reaches_what_it_claims_and_shows_what_is_stored",
        "test_readme.py::test_python_blocks_run_as_they_stand_and_again",
        "test_readme.py::test_the_main_job_command_works_in_a_fresh_folder",
    ),
    "published architectures": (
        "zoo/test_zoo.py::test_a_published_architecture_is_right_from_featurize_to_report",
        "zoo/test_zoo.py::test_gradients_of_a_mixture_are_right_in_every_precision_and_length",
        "zoo/test_zoo.py::test_the_table_has_every_architecture",
        "zoo/test_zoo_unrolled.py",
    ),
    "what the goldens hold as well": (
        "featurizing/test_iterative_solvers.py::test_lissa_converges_to_the_dense_solve",
    ),
    "integrations, told by other tests as well": (
        "attributor/test_ported_examples.py",
        "integrations/test_huggingface.py::test_rows_are_captured_in_the_training_of_a_trainer",
    ),
    "more ranks and processes": (
        "models/test_sharded_models.py::test_a_store_begun_whole_is_continued_sharded_and_the_other_way_round",
        "parallel/test_shared_runs.py::test_processes_append_rows_together",
        "modelout_functions/test_modelout_registry.py::test_identities_are_the_same_in_another_process",
        "models/test_sharded_models.py::test_copies_of_shards_change_nothing",
        "models/test_sharded_models.py::test_language_models_fit_the_fisher_kernel_and_score_tokens_in_step",
        "models/test_sharded_models.py::test_other_resharding_and_projectors_change_nothing",
        "run/test_changed_runs.py::test_another_instruction_set_continues",
    ),
    "long ways, told by shorter tests as well": LONG,
}
"""Reason to files, classes or functions, relative to this folder, all cases of which are in the campaign."""

SOME: dict[str, int] = {
    "attributor/test_attributor.py"
    "::test_a_checkpoint_file_that_is_gone_is_missed_only_where_its_weights_are_needed": 1,
    "attributor/test_attributor.py"
    "::test_an_interrupted_run_loads_only_pending_rows_and_ends_with_the_same_bits": 1,
    "attributor/test_attributor.py::test_contexts_of_the_caller_change_no_number": 2,
    "attributor/test_attributor.py"
    "::test_other_computers_are_tried_if_that_of_the_store_is_refused_or_unknown": 2,
    "attributor/test_attributor_remote.py": 1,
    "attributor/test_growing_data.py": 1,
    "attributor/test_manners.py::test_lines_of_scoring_say_how_far_all_checkpoints_are": 3,
    "attributor/test_shortage.py::test_rows_done_before_a_shortage_are_kept_and_the_others_are_right": 1,
    "attributor/test_unexpected_inputs.py::test_a_retrained_model_is_not_mixed_with_the_one_before": 1,
    "attributor/test_unexpected_inputs.py::test_layers_of_two_dtypes": 2,
    "cli/test_cli_commands.py": 2,
    "cli/test_cli_configs.py::test_a_class_path_in_any_key_is_refused_and_imports_nothing": 1,
    "cli/test_cli_security.py::test_no_command_runs_python_that_only_a_store_names": 5,
    "data/test_datasets.py::test_an_error_inside_a_dataset_names_the_sample": 3,
    "data/test_datasets.py::test_batches_of_perceptrons_are_larger_unless_a_size_is_given": 3,
    "evaluation/test_trials.py::test_intervals_of_exchangeable_sets_cover_at_least_their_level": 1,
    "featurizing/kronecker/test_ekfac.py::test_a_fit_of_other_code_is_refused_and_another_seed_fits_anew": 2,
    "featurizing/kronecker/test_ekfac.py::test_a_part_of_a_fit_that_a_repair_sets_aside_is_fitted_again": 3,
    "featurizing/kronecker/test_ekfac.py::test_drawn_labels_fit_the_basis_and_new_ones_the_eigenvalues": 1,
    "featurizing/kronecker/test_ekfac.py"
    "::test_features_of_targets_are_projections_of_the_preconditioned_gradients": 1,
    "featurizing/kronecker/test_ekfac.py::test_padding_has_no_part_in_the_factors": 2,
    "featurizing/kronecker/test_ekfac.py::test_samples_enter_the_curvature_as_they_are": 1,
    "featurizing/kronecker/test_ekfac.py::test_scores_are_those_of_dense_matrices": 3,
    "featurizing/test_capture.py::test_a_killed_training_goes_on": 1,
    "featurizing/test_capture.py::test_rows_are_those_of_autograd_and_the_training_keeps_its_bits": 2,
    "featurizing/test_capture.py::test_wrapped_models_are_captured": 1,
    "featurizing/test_fisher.py::test_a_checkpoint_that_is_fitted_is_not_fitted_again": 1,
    "featurizing/test_fisher.py::test_other_rows_and_other_weights_are_fitted_anew": 1,
    "featurizing/test_fisher.py::test_scores_are_those_of_the_gram_of_drawn_labels": 1,
    "featurizing/test_fisher.py::test_what_a_task_writes_to_changes_no_later_draw": 3,
    "featurizing/test_iterative_solvers.py::test_a_task_may_take_entries_out_of_its_batch": 1,
    "featurizing/test_iterative_solvers.py::test_cg_is_the_dense_solve_for_every_target": 1,
    "featurizing/test_iterative_solvers.py::test_exact_products_of_weights_that_a_pass_computes": 1,
    "featurizing/test_iterative_solvers.py::test_some_rows_stand_for_all": 1,
    "featurizing/test_normalized_features.py"
    "::test_an_interrupted_run_is_continued_by_what_opens_the_store": 1,
    "featurizing/test_normalized_features.py"
    "::test_less_is_the_mean_cosine_of_steps_and_gradients_of_targets": 1,
    "featurizing/test_normalized_features.py::test_one_pass_over_the_data_is_enough": 2,
    "featurizing/test_normalized_features.py"
    "::test_rows_norms_and_scores_are_those_of_gradients_changed_by_hand": 2,
    "goldens/test_goldens.py::test_every_method_has_its_scores": 1,
    "goldens/test_goldens.py::test_runs_in_parts_have_the_scores_of_the_file": 2,
    "goldens/test_goldens.py::test_traker_has_the_scores_of_the_original_release": 2,
    "gradient_computers/test_hook_models.py::test_rows_of_every_batch_equal_one_backward_pass_per_sample": 44,
    "gradient_computers/test_hook_models.py::test_the_computer_that_is_chosen_for_a_whole_model_is_exact": 4,
    "gradient_computers/test_hook_routing.py::test_experts_of_any_kind_are_exact": 4,
    "gradient_computers/test_hook_routing.py"
    "::test_gradients_of_routed_experts_equal_one_backward_pass_per_sample": 4,
    "gradient_computers/test_hook_rules.py::test_a_layer_at_any_options_equals_the_loop": 4,
    "gradient_computers/test_hook_rules.py::test_bare_parameters_that_broadcast": 24,
    "gradient_computers/test_hook_rules.py::test_layers_at_given_options_equal_the_loop": 8,
    "gradient_computers/test_hook_rules.py::test_recurrent_layers_of_given_options_equal_the_loop": 5,
    "gradient_computers/test_hook_safety.py"
    "::test_what_hooks_cannot_follow_is_refused_by_name_and_told_by_the_coverage": 9,
    "gradient_computers/test_replays.py::test_a_change_of_the_model_between_batches_counts_at_once": 12,
    "gradient_computers/test_replays.py"
    "::test_batches_in_which_code_finds_another_value_outside_the_model_run_the_pass": 8,
    "gradient_computers/test_replays.py::test_batches_of_many_shapes_keep_a_bounded_number_of_recordings": 2,
    "gradient_computers/test_replays.py::test_replays_have_the_bits_of_the_pass": 8,
    "gradient_computers/test_replays.py"
    "::test_what_a_recording_cannot_see_runs_the_pass_and_the_log_says_why": 20,
    "integrations/test_adapters.py::test_active_adapters_get_their_own_weights_from_a_folder": 1,
    "integrations/test_experts.py": 2,
    "integrations/test_huggingface.py": 1,
    "integrations/test_transformers_tasks.py": 4,
    "modelout_functions/test_modelout_laws.py::TestBuiltInModelOutputs"
    "::test_drawn_labels_of_a_sample_are_a_function_of_its_noise": 14,
    "modelout_functions/test_modelout_laws.py::TestBuiltInModelOutputs"
    "::test_output_gradient_passes_gradcheck": 6,
    "modelout_functions/test_modelout_laws.py::TestBuiltInModelOutputs"
    "::test_the_hook_computer_gives_the_gradients_of_the_plain_loss": 15,
    "modelout_functions/test_modelout_laws.py::TestBuiltInModelOutputs"
    "::test_the_mean_gradient_over_drawn_labels_is_zero": 3,
    "modelout_functions/test_modelout_laws.py::test_the_kit_notices_that_a_focal_loss_is_no_likelihood": 1,
    "modelout_functions/test_modelout_registry.py"
    "::test_the_same_made_twice_is_one_task_and_all_others_are_others": 2,
    "modelout_functions/test_post_training.py::test_rows_are_scored_from_end_to_end": 4,
    "models/test_borrowed_models.py": 2,
    "parallel/test_ranks.py::test_a_process_group_of_the_script_is_used_and_left_to_it": 1,
    "parallel/test_ranks.py::test_ranks_that_do_not_do_the_same_are_told_before_any_writes": 3,
    "parallel/test_ranks.py::test_ranks_write_every_row_once_with_the_bits_of_one_process": 1,
    "parallel/test_shared_runs.py::test_a_checkpoint_that_is_dropped_while_targets_are_scored_is_named": 2,
    "parallel/test_shared_runs.py::test_processes_featurize_every_row_once_and_end_with_the_bits_of_one": 1,
    "parallel/test_shared_runs.py::test_whoever_waits_is_told_in_time_which_process_holds_the_rows": 1,
    "projectors/test_projector_laws.py::TestRandomProjectors": 3,
    "projectors/test_projector_laws.py::test_a_block_that_does_not_fit_is_refused": 44,
    "projectors/test_projector_laws.py::test_gradients_without_a_common_sample_axis_are_refused": 8,
    "projectors/test_projector_laws.py::test_inner_products_are_unbiased_over_the_row": 1,
    "projectors/test_projector_laws.py"
    "::test_the_kit_fails_for_maps_that_are_not_what_rows_and_targets_share": 3,
    "retraining/test_changed_training.py": 3,
    "retraining/test_changed_training.py::test_the_verdict_is_that_of_the_present_training": 1,
    "retraining/test_many_models.py": 4,
    "retraining/test_verification.py": 1,
    "retraining/test_verification.py"
    "::test_retrained_models_that_merge_weights_in_eval_mode_have_their_own_outputs": 2,
    "retraining/test_what_if.py::test_a_repair_does_not_count_sets_without_an_interval": 5,
    "run/test_changed_runs.py::test_a_run_is_not_that_of_another_thing": 3,
    "run/test_changed_runs.py::test_new_targets_are_not_scored_with_a_model_that_was_changed_since": 2,
    "run/test_changed_runs.py::test_other_batch_sizes_are_the_same_run_within_rounding": 1,
    "scoring/test_index.py::test_an_interrupted_build_is_continued_and_readers_take_a_complete_index": 1,
    "scoring/test_index.py::test_narrow_rows_and_rows_of_low_rank_are_scored_as_they_are_stored": 2,
    "scoring/test_index.py"
    "::test_rows_of_an_index_have_their_scores_and_the_stated_recall_is_that_of_numpy": 1,
    "scoring/test_planning.py::test_a_plan_counts_the_bytes_that_the_run_writes_and_leaves_nothing": 2,
    "scoring/test_score_views.py::test_checkpoints_of_weight_0_change_no_uncertainty": 1,
    "scoring/test_score_views.py::test_rows_of_several_tiles_are_scored_as_they_are_stored": 2,
    "scoring/test_token_scores.py::test_tokens_add_the_product_of_their_own_gradient_with_the_target": 1,
    "scoring/test_token_scores.py::test_tokens_add_up_to_the_score_of_their_row": 1,
    "scoring/test_token_scores.py::test_tokens_are_scored_for_another_output_of_the_model": 1,
    "scoring/test_token_scores.py::test_tokens_of_models_without_forward_mode_or_in_float16": 2,
    "scoring/test_token_scores.py"
    "::test_tokens_of_texts_with_a_column_of_strings_have_the_scores_of_numbers": 1,
    "scoring/test_unprojected.py::test_few_bytes_take_more_passes_and_give_the_same_scores": 1,
    "scoring/test_unprojected.py::test_graddot_is_the_product_of_gradients_of_autograd": 1,
    "scoring/test_unprojected.py::test_streamed_scores_are_those_of_stored_whole_gradients": 1,
    "scoring/test_views.py::test_a_name_has_the_same_targets_for_all_methods": 1,
    "scoring/test_views.py::test_another_method_stores_no_gradient": 1,
    "scoring/test_views.py"
    "::test_score_fits_what_its_method_needs_once_and_reopened_stores_give_the_same_bits": 1,
    "scoring/test_views.py::test_scores_are_those_without_the_vanishing_modules": 2,
    "scoring/test_views.py::test_targets_of_a_name_that_differ_between_merged_copies_are_refused": 1,
    "scoring/test_views.py::test_the_best_and_worst_rows_are_found_and_kept_without_the_matrix": 1,
    "serve/test_serve_marks.py::test_a_kill_at_any_call_of_the_system_leaves_the_old_or_the_new_marks": 1,
    "serve/test_serve_pages.py::test_other_train_data_or_columns_ask_for_a_new_start": 1,
    "serve/test_serve_tokens.py::test_preparation_makes_what_pages_need_and_changes_none": 1,
    "store/test_store_check.py::test_a_repair_costs_exactly_the_damaged_rows": 6,
    "store/test_store_disk.py::test_any_call_may_fail": 2,
    "store/test_store_entries.py"
    "::test_verdicts_and_fits_are_beside_the_rows_until_their_scores_or_checkpoint_go": 1,
    "store/test_store_growth.py::test_any_call_of_a_growth_may_fail": 2,
    "store/test_store_hostile.py::test_metadata_that_make_no_sense_are_refused_and_cost_no_chunk": 30,
    "store/test_store_kill.py": 2,
    "store/test_store_kill.py::test_a_kill_at_any_step_loses_nothing": 5,
    "store/test_store_laws.py::TestFolderThroughObstore": 4,
    "store/test_store_laws.py::TestMemoryThroughFsspec": 1,
    "store/test_store_races.py::test_a_call_may_come_between_any_two_steps_of_another": 5,
    "unrolled/test_blocks.py": 1,
    "unrolled/test_derivatives.py": 2,
    "unrolled/test_identity.py::test_a_run_notices_changes_that_are_made_while_it_is_held": 1,
    "unrolled/test_identity.py::test_stored_scores_of_another_training_or_task_are_not_returned": 1,
    "unrolled/test_refusals.py::test_recurrent_layers_are_exact": 1,
    "unrolled/test_resume.py": 1,
    "unrolled/test_sharing.py::test_ranks_of_torchrun_divide_the_targets": 2,
}
"""How many cases of a function (of each function of a file) standard keeps: the first, the last, others between."""

EACH_VALUE: tuple[str, ...] = (
    "attributor/test_shortage.py",
    "data/test_packed.py::test_a_model_that_mixes_documents_is_refused_before_the_first_row",
    "evaluation/test_evaluation.py::test_of_all_orders_of_few_subsets_at_most_one_in_forty_is_no_chance",
    "featurizing/kronecker/test_label_sampling.py",
    "gradient_computers/test_computers.py",
    "gradient_computers/test_hook_models.py",
    "gradient_computers/test_hook_routing.py",
    "gradient_computers/test_hook_rules.py::test_complex_operands",
    "gradient_computers/test_hook_rules.py::test_inputs_of_recurrent_layers_are_not_changed_nor_derived_twice",
    "gradient_computers/test_hook_safety.py",
    "gradient_computers/test_normalization.py",
    "gradient_computers/test_self_check.py",
    "integrations/test_packed_models.py",
    "linalg/test_linalg.py",
    "modelout_functions/test_modelout_original.py",
    "modelout_functions/test_questions.py",
    "models/test_checkpoints.py",
    "projectors/test_dense_projectors.py",
    "projectors/test_projector_laws.py",
    "projectors/test_segmented_projectors.py",
    "run/test_default_settings.py",
    "scoring/test_planning.py",
    "scoring/test_score_views.py",
    "selection/test_select.py",
    "store/test_store_entries.py",
    "store/test_store_hostile.py::test_a_commit_record_counts_in_whole_numbers_and_names_its_table",
    "store/test_store_identity.py",
    "store/test_store_laws.py",
    "store/test_store_quantised.py",
    "store/test_store_races.py",
)
"""Functions, or files of them, of which standard keeps few cases, in which each value of each parameter occurs."""

TOGETHER: tuple[str, ...] = (
    "attributor/test_shortage.py",
    "cli/test_cli.py",
    "integrations/test_adapters.py",
    "integrations/test_experts.py",
    "integrations/test_huggingface.py",
    "integrations/test_packed_models.py",
    "integrations/test_transformers_tasks.py",
    "models/test_sharded_models.py",
    "parallel/test_ranks.py",
    "parallel/test_shared_runs.py",
    "report/test_report_figures.py",
    "report/test_report_page.py",
    "retraining/test_changed_training.py",
    "retraining/test_verification.py",
    "selection/test_selection_result.py",
    "store/test_store_formats.py",
    "unrolled/test_sharing.py",
)
"""Files that standard runs first, one after the other, so that one of xdist's processes alone has their costs.

These are a server that forks processes, which imports torch once more, and the packages of tables, of figures and of
language models.
"""

DAILY: dict[str, int] = {
    "featurizing": 6,
    "goldens/test_goldens.py": 6,
    "gradient_computers": 6,
    "scoring": 6,
    "zoo/test_zoo.py::test_a_published_architecture_is_right_from_featurize_to_report": 3,
}
"""Functions, files or folders, of whose campaign CI runs one of so many cases each day, the others on the next."""


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
            kept = _spread(cases, SOME[max(SOME.keys() & names, key=len)])
        elif names.intersection(EACH_VALUE):
            kept = _each_value(cases)
        for item in cases:
            if item not in kept and "quick" not in item.keywords:
                item.add_marker(pytest.mark.campaign)


def is_of_today(number: int, most: int | None = None) -> bool:
    """Return whether CI runs the case with this number today: ``TRAK_LITE_PART=k/n`` takes every n-th from case k.

    ``most`` is the largest n for these cases.
    """
    part, parts = map(int, os.environ.get("TRAK_LITE_PART", "0/1").split("/"))
    return (number - part) % min(parts, most or parts) == 0


def of_other_days(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of the campaign that CI does not run today."""
    campaign = [item for item in items if "campaign" in item.keywords]
    found = []
    for name, most in DAILY.items():
        cases = [item for item in campaign if item.nodeid.startswith(f"tests/{name}")]
        found += [item for number, item in enumerate(cases) if not is_of_today(number, most)]
    return found


def is_without_tests_of(markers: str, path: Path) -> bool:
    """Return whether no test of a file is in the tier that ``-m`` names, so that the file need not be imported."""
    if path.suffix != ".py":
        return False
    if not path.name.startswith("test_"):
        return True  # or pytest looked for examples in what it imports, and lazy packages would import everything
    if markers == "quick":
        return "mark.quick" not in path.read_text(encoding="utf-8")
    name = path.relative_to(Path(__file__).parent).as_posix()
    return markers == "not campaign" and name in {one for names in CAMPAIGN.values() for one in names}


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
    """Return cases that have every value of every parameter: next is the one with most values that are missing."""
    values = {item: _values_of(item) for item in cases}
    missing, kept = set[tuple[str, int]]().union(*values.values()), []
    while missing:
        kept.append(max(cases, key=lambda item: len(values[item] & missing)))
        missing -= values[kept[-1]]
    return kept


def _values_of(item: pytest.Item) -> set[tuple[str, int]]:
    callspec = getattr(item, "callspec", None)
    return {(name, id(value)) for name, value in callspec.params.items()} if callspec else {("", 0)}
