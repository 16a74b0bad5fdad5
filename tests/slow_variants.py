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
    "compilation/test_compile.py::test_inductor_generates_code_for_every_size": (
        "distributed/test_collectives.py::test_compiled_whole"
    ),
    "models/test_quantized.py::test_a_real_gguf_file": (
        "cli/test_answer.py::test_the_tokens_are_those_of_the_library"
    ),
    "platforms/test_cpu_allocator.py::test_other_c_libraries": (
        "platforms/test_cpu_allocator.py::test_a_scope_sets_it_for_the_process"
    ),
}
"""By a file or a test that is left out whole: the one that holds its claim in 'make test'."""

EVERY = {
    "cli/test_hostile_text.py::test_what_plugins_say": 2,
    "compilation/test_collective_passes.py::test_sums_of_ranks_are_normed_by_one_form": 2,
    "compilation/test_on_ranks.py::test_at_a_level": 3,
    "compilation/test_rotary_fusion.py::test_in_models_of_transformers": 3,
    "core/test_memory.py::test_what_a_model_reads_lies_in_huge_pages": 3,
    "cpu_kernels/test_attention.py::test_long_contexts": 2,
    "cpu_kernels/test_attention.py::test_long_contexts_in_codes": 3,
    "cpu_kernels/test_batch_invariant.py::test_logits_are_the_same_bits_beside_others": 3,
    "cpu_kernels/test_engine.py::test_in_chunks_after_preemption_and_from_a_prefix": 3,
    "cpu_kernels/test_engine.py::test_several_answers": 5,
    "cpu_kernels/test_forms.py::test_other_paths": 2,
    "cpu_kernels/test_forms.py::test_realistic_sizes": 3,
    "cpu_kernels/test_grafted_models.py::test_models": 3,
    "cpu_kernels/test_kernels.py::test_results_that_no_cache_keeps": 3,
    "cpu_kernels/test_linear.py::test_many_rows": 2,
    "cpu_kernels/test_linear.py::test_values": 2,
    "cpu_kernels/test_plugin.py::test_the_standard_is_that_of_the_torch_in_use": 2,
    "cpu_kernels/test_quantized.py::test_values": 2,
    "cpu_kernels/test_quantized_experts.py::test_codes_as_they_are": 2,
    "cpu_kernels/test_quantized_experts.py::test_values": 2,
    "cpu_kernels/test_shared_memory.py::test_results_are_those_of_gloo": 3,
    "cpu_kernels/test_steps.py::test_query_and_key_are_rotated_at_once": 3,
    "engine/test_cache_dtypes.py::test_however_tokens_come_to_be_computed": 2,
    "engine/test_compiled_step.py::test_strict_mode_compiles_nothing_while_requests_run": 2,
    "engine/test_compiled_step.py::test_the_tokens_are_those_of_the_modules": 3,
    "engine/test_explain.py::test_rows_that_run_are_what_a_step_calls": 2,
    "engine/test_faults.py::test_random_faults_with_preemptions_and_siblings": 3,
    "engine/test_fitted_ropes.py::test_below_and_beyond_the_first_context": 2,
    "engine/test_interrupted_steps.py::test_an_interrupt_at_any_line_of_a_step_loses_nothing": 3,
    "engine/test_largest_step.py::test_no_step_takes_more_than_the_bound": 3,
    "engine/test_lost_workers.py::test_a_lost_rank_ends_all_requests_and_starts_again": 3,
    "engine/test_parallel_forms.py::test_the_tokens_are_those_of_one_rank": 3,
    "engine/test_remote_workers.py::test_a_restart_that_fails_is_told_by_whoever_is_asked": 3,
    "engine/test_right_tokens.py::test_chunks_of_any_size": 3,
    "engine/test_right_tokens.py::test_from_a_reused_prefix_beside_random_neighbours": 3,
    "engine/test_right_tokens.py::test_in_chunks_and_after_preemption": 4,
    "engine/test_right_tokens.py::test_several_answers": 2,
    "models/test_expert_parallel.py::test_logits": 3,
    "models/test_quantized_checkpoints.py::test_a_quantized_checkpoint": 2,
    "models/test_quantized_experts.py::test_a_quantized_checkpoint": 2,
    "models/test_quantized_experts.py::test_two_ranks": 2,
    "models/test_through_transformers.py::test_logits_are_those_of_transformers": 2,
    "models/test_through_transformers.py::test_two_ranks_give_the_logits_of_one": 3,
    "ops/test_specs.py::test_realistic_sizes": 3,
    "planning/test_shards.py::test_a_shard_is_that_of_a_real_rank": 2,
    "platforms/test_broken_trees.py::test_probes_survive_broken_trees": 2,
    "plugins/test_activation.py::test_a_plugin_that_ends_the_process_is_named_by_doctor": 3,
    "plugins/test_activation.py::test_whatever_a_plugin_raises_names_it": 3,
    "plugins/test_class_source.py::test_a_class_that_may_be_fine": 3,
    "plugins/test_class_source.py::test_a_fault_that_the_source_shows": 3,
    "plugins/test_every_op.py::test_a_plugin_replaces": 2,
    "plugins/test_ipex.py::test_rotary_embedding": 3,
    "plugins/test_planted.py::test_a_defect_of_an_op_is_found": 2,
    "plugins/test_process.py::test_a_change_that_meets_others_is_set_back": 3,
    "plugins/test_uncalled_kernels.py::test_a_method_that_something_calls": 3,
    "plugins/test_uncalled_kernels.py::test_a_target_that_the_plugin_constructs": 3,
    "server/test_bad_inputs.py::test_fields_of_both": 3,
    "server/test_hostile_bodies.py::test_large_bodies": 2,
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
