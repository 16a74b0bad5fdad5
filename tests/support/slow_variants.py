"""The variants of tests that 'make test-slow' runs and 'make test' leaves out, as they take long.

A test of many variants says the same of each. 'make test' runs some of them, chosen here; a fault of
the kind that the test is for meets these too. A test that is left out whole names the test that
holds its claim. A variant that needs a reason of its own is marked in its file.
"""

from __future__ import annotations

from collections import Counter

import pytest

HELD_BY = {
    "engine/test_ray.py": "engine/test_remote_workers.py",
    "serving/test_smollm2.py": "cli/test_answer.py::test_the_tokens_are_those_of_transformers",
    "compilation/test_compile.py::test_inductor_generates_code_for_every_size": (
        "distributed/test_collectives.py::test_compiled_whole"
    ),
    "models/test_quantized.py::test_a_real_gguf_file": (
        "cli/test_answer.py::test_the_tokens_are_those_of_transformers"
    ),
    "platforms/test_cpu_allocator.py::test_other_c_libraries": (
        "platforms/test_cpu_allocator.py::test_a_scope_sets_it_for_the_process"
    ),
}
"""By a file or a test that is left out whole: the one that holds its claim in 'make test'."""

EVERY = {
    "cli/test_commands.py::test_doctor_reports_findings_by_exit_code": 2,
    "cli/test_commands.py::test_errors_are_one_message_and_their_exit_code": 2,
    "cli/test_doctor.py::test_a_misspelt_entry_point_group": 3,
    "cli/test_doctor.py::test_a_plugin_for_another_device": 2,
    "cli/test_doctor.py::test_a_plugin_that_ends_the_process_is_named": 3,
    "cli/test_hostile_text.py::test_what_plugins_say": 4,
    "cli/test_kept_results.py::test_a_change_makes_another_result": 2,
    "cli/test_new.py::test_what_is_made_passes_its_own_linters": 3,
    "cli/test_origins.py::test_a_provider_that_is_not_there_is_a_bad_value": 2,
    "cli/test_origins.py::test_what_outranks_the_environment_is_named": 2,
    "cli/test_outcomes.py::TestDoctor::test_one_failure_is_told_once": 2,
    "cli/test_outcomes.py::TestShow::test_the_exit_code_is_the_doctors": 2,
    "cli/test_outcomes.py::test_a_plugin_of_vllm_is_seen": 2,
    "cli/test_output.py::test_terminals_are_never_overrun": 3,
    "cli/test_run.py::test_the_plugin_swaps_ops_in_the_real_encoder": 2,
    "cli/test_scrubbing.py::test_variables_go_on_naming_amd_devices": 2,
    "cli/test_scrubbing.py::test_variables_go_on_naming_nvidia_devices": 2,
    "cli/test_stdout.py::test_json_is_the_whole_of_stdout": 2,
    "cli/test_wrong_answers.py::test_numbers_that_are_no_answer": 2,
    "compilation/test_collective_passes.py::test_parts_are_quantised_before_they_are_gathered": 2,
    "compilation/test_collective_passes.py::test_sums_of_ranks_are_normed_by_one_form": 4,
    "compilation/test_compile.py::test_strict_mode_compiles_nothing_anew": 2,
    "compilation/test_on_ranks.py::test_at_a_level": 3,
    "compilation/test_rotary_fusion.py::test_in_models_of_transformers": 6,
    "core/test_memory.py::test_what_a_model_reads_lies_in_huge_pages": 6,
    "cpu_kernels/test_attention.py::test_layer": 2,
    "cpu_kernels/test_attention.py::test_long_contexts": 4,
    "cpu_kernels/test_attention.py::test_long_contexts_in_codes": 5,
    "cpu_kernels/test_batch_invariant.py::test_logits_are_the_same_bits_beside_others": 3,
    "cpu_kernels/test_dtypes.py::test_compiled_under_autocast": 2,
    "cpu_kernels/test_dtypes.py::test_factors_that_are_no_floating_point": 3,
    "cpu_kernels/test_engine.py::test_in_chunks_after_preemption_and_from_a_prefix": 3,
    "cpu_kernels/test_engine.py::test_several_answers": 5,
    "cpu_kernels/test_forms.py::test_other_paths": 4,
    "cpu_kernels/test_forms.py::test_realistic_sizes": 3,
    "cpu_kernels/test_grafted_models.py::test_models": 3,
    "cpu_kernels/test_kernels.py::test_results_that_no_cache_keeps": 3,
    "cpu_kernels/test_linear.py::test_many_rows": 3,
    "cpu_kernels/test_linear.py::test_values": 3,
    "cpu_kernels/test_plugin.py::test_the_standard_is_that_of_the_torch_in_use": 2,
    "cpu_kernels/test_plugin.py::test_without_a_compiler": 2,
    "cpu_kernels/test_quantized.py::test_compilation": 2,
    "cpu_kernels/test_quantized.py::test_sizes": 3,
    "cpu_kernels/test_quantized.py::test_values": 2,
    "cpu_kernels/test_quantized_experts.py::test_codes_as_they_are": 4,
    "cpu_kernels/test_quantized_experts.py::test_values": 4,
    "cpu_kernels/test_rotary_variants.py::test_what_does_not_fit_sections": 3,
    "cpu_kernels/test_shared_memory.py::test_a_rank_that_is_not_there": 2,
    "cpu_kernels/test_shared_memory.py::test_results_are_those_of_gloo": 5,
    "cpu_kernels/test_steps.py::test_a_gated_mlp": 3,
    "cpu_kernels/test_steps.py::test_query_and_key_are_rotated_at_once": 5,
    "engine/test_cache_dtypes.py::test_however_tokens_come_to_be_computed": 2,
    "engine/test_compiled_step.py::test_at_a_level": 3,
    "engine/test_compiled_step.py::test_strict_mode_compiles_nothing_while_requests_run": 2,
    "engine/test_compiled_step.py::test_the_tokens_are_those_of_the_modules": 3,
    "engine/test_explain.py::test_rows_that_run_are_what_a_step_calls": 2,
    "engine/test_faults.py::test_after_an_interrupt_the_step_is_computed_anew": 3,
    "engine/test_faults.py::test_random_faults_with_preemptions_and_siblings": 9,
    "engine/test_faults.py::test_the_requests_of_the_step_fail_and_the_others_go_on": 3,
    "engine/test_filters.py::test_shares_are_those_of_their_definitions": 3,
    "engine/test_fitted_ropes.py::test_below_and_beyond_the_first_context": 2,
    "engine/test_interrupted_steps.py::test_an_interrupt_at_any_line_of_a_step_loses_nothing": 5,
    "engine/test_largest_step.py::test_no_step_takes_more_than_the_bound": 5,
    "engine/test_largest_step.py::test_the_bound_is_above_what_a_step_takes": 2,
    "engine/test_lost_workers.py::test_a_lost_rank_ends_all_requests_and_starts_again": 5,
    "engine/test_parallel_forms.py::test_the_tokens_are_those_of_one_rank": 3,
    "engine/test_remote_workers.py::test_a_restart_that_fails_is_told_by_whoever_is_asked": 3,
    "engine/test_right_tokens.py::test_chunks_of_any_size": 3,
    "engine/test_right_tokens.py::test_from_a_reused_prefix_beside_random_neighbours": 5,
    "engine/test_right_tokens.py::test_in_chunks_and_after_preemption": 7,
    "engine/test_right_tokens.py::test_several_answers": 2,
    "engine/test_sampler.py::test_tokens_are_distributed_as_they_should": 3,
    "engine/test_stages_on_ranks.py::test_two_stages": 3,
    "engine/test_states.py::test_a_preempted_sequence_goes_on_where_it_was": 3,
    "engine/test_states_on_ranks.py::test_two_ranks": 4,
    "faults/test_distributions.py::test_distributions": 2,
    "faults/test_hangs.py::test_platforms": 2,
    "faults/test_hangs.py::test_plugins": 2,
    "faults/test_neighbours.py::test_a_plugin_that_harms_another_one": 2,
    "faults/test_probes.py::test_probes": 2,
    "faults/test_stores.py::test_two_that_write_at_once_and_are_killed": 2,
    "faults/test_wrong_kernels.py::test_numbers_of_a_decoder": 3,
    "faults/test_wrong_kernels.py::test_numbers_of_an_encoder": 2,
    "faults/test_wrong_kernels.py::test_whatever_a_decoder_calls": 4,
    "graft/test_experts.py::test_families": 2,
    "graft/test_norms.py::test_norms_agree": 3,
    "graft/test_norms.py::test_what_is_nearly_a_gated_norm_stays": 3,
    "graft/test_parity.py::test_bfloat16": 2,
    "graft/test_parity.py::test_float32": 2,
    "graft/test_questions.py::test_modules_that_branch_stay": 3,
    "graft/test_questions.py::test_modules_without_questions_are_replaced": 2,
    "graft/test_scans.py::test_families": 3,
    "graft/test_transformers.py::test_families_agree_and_come_back": 2,
    "graft/test_transformers.py::test_nothing_recognisable_stays": 2,
    "layers/test_attention.py::test_chunks": 2,
    "layers/test_attention.py::test_one_sequence": 2,
    "models/test_expert_balance.py::test_balancing": 2,
    "models/test_expert_parallel.py::test_logits": 6,
    "models/test_models.py::TestDecoders::test_two_ranks": 2,
    "models/test_quantized_checkpoints.py::test_a_quantized_checkpoint": 3,
    "models/test_quantized_checkpoints.py::test_through_transformers": 2,
    "models/test_quantized_checkpoints.py::test_two_ranks_have_a_half_each": 3,
    "models/test_quantized_experts.py::test_a_quantized_checkpoint": 4,
    "models/test_quantized_experts.py::test_quantized_while_loading": 3,
    "models/test_quantized_experts.py::test_two_ranks": 4,
    "models/test_quantized_settings.py::test_a_quantized_head": 3,
    "models/test_quantized_settings.py::test_biases_of_zeros_are_left_out": 3,
    "models/test_quantized_settings.py::test_layers_hold_the_numbers_that_the_format_defines": 2,
    "models/test_quantized_settings.py::test_plain_layers_by_the_settings": 2,
    "models/test_through_transformers.py::test_logits_are_those_of_transformers": 5,
    "models/test_through_transformers.py::test_two_ranks_give_the_logits_of_one": 5,
    "ops/test_machinery.py::test_a_wrong_op_fails": 3,
    "ops/test_packed_linear_choice.py::test_the_table_decides": 3,
    "ops/test_quantization.py::test_fewer_than_two_in_a_thousand_differ": 4,
    "ops/test_quantization_to_4_bits.py::test_fewer_than_two_in_a_thousand_differ": 2,
    "ops/test_rotary_variants.py::test_compilation": 3,
    "ops/test_specs.py::test_realistic_sizes": 6,
    "ops/test_weight_writes.py::test_joint_layer_written": 3,
    "ops/test_weight_writes.py::test_written": 2,
    "planning/test_shards.py::test_a_shard_is_that_of_a_real_rank": 2,
    "platforms/test_broken_trees.py::test_probes_survive_broken_trees": 4,
    "platforms/test_torch_cuda.py::test_a_process_may_fork_after_asking_a_platform": 3,
    "plugins/test_activation.py::test_a_plugin_that_ends_the_process_is_named_by_doctor": 3,
    "plugins/test_activation.py::test_whatever_a_plugin_raises_names_it": 3,
    "plugins/test_class_source.py::test_a_class_that_may_be_fine": 3,
    "plugins/test_class_source.py::test_a_fault_that_the_source_shows": 3,
    "plugins/test_discovery.py::test_an_impostor_is_not_built_in": 3,
    "plugins/test_every_op.py::test_a_plugin_replaces": 4,
    "plugins/test_host.py::test_a_failing_plugin_is_taken_back_recorded_and_reported_once": 2,
    "plugins/test_ipex.py::test_rotary_embedding": 3,
    "plugins/test_latent_attention.py::test_a_plugin_replaces_it": 3,
    "plugins/test_left_out.py::test_nothing_of_a_platform_of_vllm_that_is_left_out_stays": 3,
    "plugins/test_left_out.py::test_nothing_of_a_platform_that_is_left_out_stays": 3,
    "plugins/test_left_out.py::test_nothing_of_a_plugin_that_is_left_out_stays": 3,
    "plugins/test_planted.py::test_a_defect_of_an_op_is_found": 2,
    "plugins/test_process.py::test_a_change_that_meets_others_is_set_back": 5,
    "plugins/test_process.py::test_what_a_plugin_adds_stays_as_long_as_it_does": 3,
    "plugins/test_quarantine.py::test_a_record_that_cannot_be_used": 3,
    "plugins/test_selection.py::test_a_platform_class_that_cannot_be_used": 3,
    "plugins/test_uncalled_kernels.py::test_a_method_that_something_calls": 3,
    "plugins/test_uncalled_kernels.py::test_a_target_that_the_plugin_constructs": 3,
    "server/test_bad_inputs.py::test_fields_of_both": 3,
    "server/test_bad_inputs.py::test_fields_of_one": 2,
    "server/test_behaviour.py::test_without_a_key_nothing_is_told": 3,
    "server/test_hostile_bodies.py::test_large_bodies": 4,
    "server/test_sockets.py::test_clients_that_leave": 2,
    "server/test_sockets.py::test_what_is_no_http": 2,
    "serving/test_chat_template.py::test_limits": 2,
    "serving/test_embed.py::test_texts_beside_each_other_keep_their_vectors": 2,
}
"""By a test: of how many variants, in the order of their numbers, 'make test' runs one."""


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark what the tables leave out of 'make test' as slow."""
    numbers: Counter[str] = Counter()
    for item in items:
        file, _, function = item.nodeid.removeprefix("tests/").partition("::")
        test = f"{file}::{function.partition('[')[0]}"
        if file in HELD_BY or test in HELD_BY:
            item.add_marker(pytest.mark.slow)
        elif test in EVERY and not item.get_closest_marker("slow"):
            if numbers[test] % EVERY[test]:
                item.add_marker(pytest.mark.slow)
            numbers[test] += 1
