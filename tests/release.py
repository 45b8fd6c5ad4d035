"""Tests that run before a release (`make proofs PARTS="types matrices"`): further cases of what other parts
test in a few.

All cases take more than an hour of two cores, and what CI runs for every change is to be short.
"""

KEPT: dict[str, dict[str, list[str]]] = {
    "artifacts/test_publish_checkpoints.py": {
        "test_steps_are_branches_with_the_files_of_the_export": ["full-fsdp-2"],
    },
    "data/test_order.py": {
        "test_runs_train_the_rows_of_the_order": ["ddp 4 1", "fsdp 2 1"],
    },
    "data/test_packing.py": {
        "test_the_table_says_under_which_attention_packed_samples_are_as_alone": [
            "llama",
            "qwen3",
            "gemma3_text",
            "mixtral",
            "mamba",
            "gpt2",
        ],
    },
    # `make proofs PARTS=chaos` does the same with 200 faults.
    "end_to_end/test_chaos.py": {
        "test_a_run_with_ten_faults_equals_the_undisturbed_one": [],
    },
    "end_to_end/test_failures.py": {
        "test_a_pod_that_is_killed_twice_in_the_same_phase_is_not_retried": [],
        "test_a_full_gpu_is_final_unless_the_recipe_takes_a_smaller_micro_batch": [],
    },
    "end_to_end/test_from_recipe_to_answers.py": {
        "test_a_run_that_holds_nothing_out_stores_a_model_and_says_that_nothing_was_measured": [
            "dpo",
            "kto",
            "reward",
            "classify",
            "embed",
        ],
    },
    "end_to_end/test_two_pods.py": {
        "test_two_pods_are_one_run": ["zero2"],
        "test_each_retry_survives_a_preemption_of_one_of_two_nodes_and_the_last_failure_names_all": [],
        "test_two_pods_fill_one_matrix_of_the_selftest": [],
    },
    "end_to_end/test_workflows.py": {
        "test_a_finetune_its_parts_and_answers_of_its_model": [],
        "test_preferences_after_supervised_tuning": [],
        "test_a_refresh_and_its_rollback": [],
        "test_a_selftest": [],
    },
    "flyte2/test_runs.py": {
        "test_both_faces_make_the_same_weights": ["lora"],
        "test_a_killed_worker_is_another_attempt_that_resumes": [],
        "test_a_run_that_began_on_one_face_resumes_on_the_other": [],
        "test_a_point_fails_alone_and_the_others_are_compared": [],
        "test_a_model_answers_prompts_in_parts": [],
    },
    "fuzz/test_fuzz.py": {
        "test_every_removed_protection_is_noticed": [],
    },
    "models/test_adapter_kinds.py": {
        "test_each_kind_trains_sharded_as_in_one_process": ["dora-zero3", "patterns-fsdp"],
        "test_the_export_and_the_merged_model_are_the_live_model": ["dora-rslora-patterns", "pissa"],
    },
    "models/test_cpu_features.py": {
        "test_an_export_passes_the_gate_on_an_older_cpu": ["full-bfloat16", "qlora-bfloat16"],
    },
    "models/test_host_memory.py": {
        "test_a_run_on_a_cpu_takes_what_is_planned": ["qlora-device_map"],
    },
    "models/test_initial_adapter.py": {
        "test_a_run_goes_on_from_the_adapter": ["lora-none", "lora-fsdp", "qlora-zero2"],
    },
    "models/test_model_types.py": {
        "test_a_tiny_instance_is_trained_exported_and_reloaded": [
            "falcon_h1",
            "gemma3_text",
            "glm4_moe",
            "gpt_oss",
            "granite",
            "mixtral",
            "nemotron_h",
            "olmo2",
            "phi3",
            "qwen2",
            "qwen3_next",
        ],
    },
    "models/test_own_logits.py": {
        "test_the_table_has_what_every_field_of_a_configuration_does_to_the_loss": [
            "cohere2",
            "deepseek_v3",
            "gemma3_text",
            "gpt_oss",
            "granite",
            "llama",
            "mixtral",
            "qwen3_moe",
        ],
    },
    "models/test_quantized.py": {
        "test_training_export_evaluation_and_merge_read_the_same_weights": ["int8", "nf4_double", "fp4"],
        "test_scoring_in_mid_training_changes_no_gradient": ["none", "fsdp", "device_map"],
    },
    "models/test_vocabulary.py": {
        "test_a_killed_run_resumes_bit_for_bit": ["none", "fsdp"],
        "test_the_rows_train_as_in_one_process_and_the_export_is_what_was_trained": [
            "method0-untied-fsdp",
            "method4-untied-ddp",
            "method8-tied-zero3",
            "method9-tied-fsdp",
        ],
    },
    "objectives/test_grpo.py": {
        "test_two_processes_draw_and_train_what_one_does": ["full-zero2-0"],
        "test_a_run_that_is_killed_within_a_step_goes_on_to_the_bit": ["update"],
    },
    "objectives/test_kto.py": {
        "test_the_intervals_of_margin_and_loss_cover_the_truth_as_often_as_they_say": [],
    },
    "dryrun/test_dryrun.py": {
        "test_a_dry_step_holds_what_a_real_one_does": [
            "full",
            "full-own-logits",
            "full-packed",
            "qlora",
            "fsdp-lora-checkpointed",
            "full-8bit-optimizer",
            "lora-dora-rows",
            "dpo-fsdp-lora",
            "lora-experts",
            "kto-full",
            "reward-full",
        ],
        "test_zeros_partitions_are_counted_beside_the_trace": ["zero2", "zero3"],
        "test_a_few_layers_are_traced_as_all": [
            "llama full",
            "llama lora, zero2",
            "dpo lora, fsdp",
            "experts",
            "ranks by layer",
        ],
    },
    "dryrun/test_engines.py": {
        "test_the_closed_form_is_near_to_the_trace": [
            "lora-none-sft-False",
            "lora-none-kto-True",
            "lora-none-reward-False",
            "lora-fsdp-sft-True",
            "qlora-none-sft-True",
            "qlora-none-dpo-False",
            "qlora-zero2-sft-True",
        ],
    },
    "selftest/test_selftest.py": {
        "test_every_pair_computes_what_plain_training_does": [
            "full/fsdp",
            "full/zero3",
            "full/ddp/reward",
            "lora/fsdp/packed",
            "lora/none/kto",
            "lora/zero2/dpo",
            "lora/fsdp/experts",
            "lora/zero3/packed/experts",
            "lora/fsdp/kto/balance",
            "qlora/device_map",
            "qlora/ddp",
        ],
        "test_the_workflow_returns_the_matrix": [],
    },
    "tasks/test_job_life.py": {
        "test_two_nodes_one_of_which_is_drained": ["training-rank-0", "upload-another"],
        "test_one_node_that_is_drained": ["training-cpu-1", "upload-cpu-1", "export-cpu-2"],
        "test_an_interrupted_upload_is_repeated": ["cpu-1"],
        "test_the_cause_is_shown_and_not_the_error_of_a_peer": ["bug"],
        "test_logs_of_pods_end_without_errors": ["cpu-1"],
    },
    "training/test_loop.py": {
        "test_a_killed_run_resumes_from_its_last_checkpoint_bit_for_bit": [
            "qlora device_map",
            "full fsdp",
            "lora zero3",
        ],
        "test_activation_checkpointing_changes_no_loss": ["qlora device_map", "lora fsdp"],
        "test_neftune_adds_noise_in_training_alone": ["full none", "lora fsdp"],
        "test_bfloat16_masters_are_trained_and_exported": ["fsdp"],
        "test_fsdp_resumes_without_reading_the_base_model_again": ["none"],
    },
    "workflows/test_sft_then_dpo.py": {
        "test_preferences_are_tuned_on_the_supervised_model": ["lora"],
    },
}
"""By file and test, the cases that the other parts run; none of a test that it leaves out."""
