"""Which tests `mutations.py` runs for which room, and which drawn mistakes are none."""

NUM_DRAWN = 40

UNPROTECTED = ("megapipe/analysis", "megapipe/proving", "megapipe/names.py", "megapipe/first_use.py")
"""Not drawn from: commands, which print, and what finds names."""

NUMBERS = [
    "tests/cases",
    "tests/runtime",
    "tests/stages",
    "tests/weight_grad",
    "tests/training",
    "tests/graph",
    "tests/overlap",
    "tests/sharding",
    "tests/slices",
]
"""Behind the tests of the room."""

ALONE = ("checkpoint", "integrations", "safetensors_files", "weights_out")
"""Rooms that the tests of numbers do not enter."""

_R, _I, _T = "tests/runtime", "tests/integrations", "tests/training"
ROOMS = {
    "": ["tests/runtime/test_pipeline.py"],
    "activations": [f"{_R}/test_recompute.py", f"{_R}/test_offload.py"],
    "all_ranks": ["tests/checkpoint", f"{_T}/test_optimizer.py"],
    "calling": [f"{_R}/test_step.py", f"{_R}/test_pipeline.py", f"{_I}/test_installed.py"],
    "checkpoint": ["tests/checkpoint"],
    "chunks": [f"{_R}/test_step.py", f"{_R}/test_pipeline.py", "tests/overlap", "tests/sharding"],
    "config": ["tests/test_config.py", f"{_R}/test_step.py", "tests/plan/test_plan.py", f"{_I}/test_megatron.py"],
    "failures": ["tests/failures"],
    "failures/positions": ["tests/failures/test_status.py", "tests/failures/test_watchdog.py", "tests/failures"],
    "frameworks": [f"{_R}/test_step.py", f"{_I}/test_megatron.py"],
    "gradients": [f"{_T}/test_data_parallel.py", f"{_T}/test_tied_weights.py"],
    "graph": ["tests/graph", f"{_I}/test_tensor_parallel.py"],
    "graph/symbolic_sizes": ["tests/graph/test_graph_experts.py", "tests/graph/test_graph_reads.py", "tests/graph"],
    "graph/side_effects": ["tests/graph/test_graph_refusals.py", "tests/graph/test_graph_capture.py"],
    "integrations": [f"{_I}/test_split.py"],
    "integrations/megatron": [f"{_I}/test_megatron.py", f"{_I}/test_megatron_experts.py", f"{_I}/test_installed.py"],
    "integrations/torch_pipelining": [f"{_I}/test_torch_pipelining.py"],
    "integrations/transformers": [
        f"{_I}/test_transformers.py",
        f"{_I}/test_files_of_transformers.py",
        f"{_I}/test_in_memory.py",
        f"{_I}/test_heads_of_transformers.py",
        f"{_I}/test_weights_of_transformers.py",
        f"{_I}/test_cut_of_transformers.py",
        f"{_I}/test_generation.py",
        f"{_I}/test_transformers_experts.py",
        f"{_I}/test_towers_of_transformers.py",
    ],
    "integrations/transformers/trainer": [f"{_I}/test_trainer.py"],
    "layouts": ["tests/test_layouts.py"],
    "messages": ["tests/test_trees.py", f"{_R}/test_pipeline.py"],
    "options/activations": [f"{_R}/test_offload.py", f"{_R}/test_recompute.py"],
    "options/autocast": [f"{_R}/test_pipeline.py", "tests/test_config.py"],
    "options/post_validation": [f"{_T}/test_post_validation.py"],
    "options/slicing": [f"{_R}/test_sliced.py", "tests/slices"],
    "options/timers": ["tests/analysis/test_timeline.py", f"{_R}/test_pipeline.py"],
    "options/fully_shard": ["tests/sharding"],
    "options": [f"{_R}/test_recompute.py", f"{_R}/test_sliced.py", "tests/analysis/test_timeline.py", "tests/sharding"],
    "overlap": ["tests/overlap"],
    "p2p_communication": ["tests/transports/test_p2p_communication.py"],
    "parallel_state": [f"{_R}/test_parallel_state.py", "tests/failures/test_session.py"],
    "plan": ["tests/plan", "tests/analysis/test_cli.py"],
    "process_groups": ["tests/test_security.py", "tests/transports/test_p2p_communication.py", "tests/failures"],
    "runtime": [f"{_R}/test_step.py", f"{_R}/test_pipeline.py", "tests/runtime"],
    "runtime/grad_sync": [f"{_R}/test_pipeline.py", f"{_T}/test_data_parallel.py", "tests/runtime"],
    "runtime/step": [f"{_R}/test_pipeline.py", f"{_T}/test_data_parallel.py", "tests/runtime"],
    "runtime/shapes": [f"{_R}/test_pipeline.py", "tests/runtime"],
    "safetensors_files": ["tests/checkpoint/test_export.py", f"{_I}/test_files_of_transformers.py"],
    "schedules": ["tests/plan"],
    "sharding": ["tests/sharding"],
    "slices": ["tests/slices", f"{_R}/test_sliced.py"],
    "stages": ["tests/stages"],
    "stages/overlapped": ["tests/stages/test_pairs.py", "tests/overlap", "tests/stages"],
    "structure": ["tests/test_structure.py", f"{_R}/test_between_steps.py", "tests/graph/test_graph_refusals.py"],
    "timing": ["tests/analysis/test_timeline.py", "tests/failures"],
    "training": ["tests/training"],
    "transports": ["tests/transports/test_devices.py", "tests/transports"],
    "trees": ["tests/test_trees.py", f"{_R}/test_pipeline.py"],
    "weight_grad/grouped": [
        "tests/weight_grad/test_products.py",
        "tests/graph/test_graph_experts.py",
        "tests/weight_grad",
    ],
    "weight_grad": ["tests/weight_grad/test_deferred.py", "tests/weight_grad/test_layers.py", "tests/weight_grad"],
    "weights_out": [f"{_I}/test_weights_of_transformers.py"],
}
"""By the room of the changed file, or the beginning of its path: the quickest and likeliest first."""

EQUIVALENT: dict[str, str] = {
    "megapipe/graph/autograd_function.py, _as_captured: device is None or autocast_dtype(device) is None -> "
    "((device is None) and (autocast_dtype(device) is None))": "autocast is switched off where it is off already"
}
"""Drawn mistakes that change nothing, each with the reason. Another one is drawn in the place of each."""
