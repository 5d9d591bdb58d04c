"""Bugs that were mended, to be put back by `mutations.py`: the newest whose mend is a few lines.

Each: its story; the test that is tried first; the file; its text as it is; and as it was. Where a text has changed
since, change it here: a bug that cannot be put back is reported as gone.
"""

PUT_BACK = [
    (
        "Hooks of weight.register_hook were called with None behind the last W of a chunk with no_sync_func.",
        "tests/cases/test_rows.py",
        "megapipe/weight_grad/grad_hooks.py",
        "for weight in weights if (of_weight := weight._backward_hooks)}",
        "for weight in () if (of_weight := weight._backward_hooks)}",
    ),
    (
        "Nested tensors that the last stage of a V reports arrived as their values alone.",
        "tests/runtime/test_sharing.py::test_nested_tensors",
        "megapipe/runtime/sharing.py",
        "tensor.offsets().tolist() if tensor.is_nested else None",
        "None",
    ),
    (
        "An error of the model about any list was told as one about the list of set_input_tensor.",
        "tests/stages/test_stage.py::test_an_error_about_another_list_is_left_as_it_is",
        "megapipe/stages/stage.py",
        "and _took_list_for_tensor(error, unit):",
        'and "list" in str(error):',
    ),
    (
        "A chunk that was wrapped on one rank later forgot the messages that its peers still knew.",
        "tests/cases/test_rows.py",
        "megapipe/runtime/found_shapes.py",
        "kept_for(_stage_in(call.models[chunk]))",
        "kept_for(call.models[chunk])",
    ),
    (
        "A W that takes rows which a mask has chosen did not get their number, which only the backward knows.",
        "tests/graph/test_graph_experts.py",
        "megapipe/graph/symbolic_sizes.py",
        'enumerate(node.meta["val"].shape):',
        "enumerate(()):",
    ),
    (
        "All connections to the store's port number were cut, whichever host they led to.",
        "tests/failures/test_store_alarm.py::test_connections_to_other_hosts_are_left",
        "megapipe/failures/store_alarm.py",
        "_address(peer) in addresses:",
        "peer[1] in {port for _, port in addresses}:",
    ),
    (
        "A forward that was replaced in a part of a captured stage had no effect, without a word.",
        "tests/cases/test_rows.py",
        "megapipe/structure.py",
        'if vars(now).get("forward") is not self._forwards[number]:',
        "if False:",
    ),
    (
        "A layer of a split stage that fully_shard shards was refused as changed.",
        "tests/integrations/test_split.py::test_layers_that_are_sharded",
        "megapipe/structure.py",
        "if number == 0 or _is_sharded(now):",
        "if number == 0:",
    ),
    (
        "A training step with collect_non_loss_data trained nothing, without a word.",
        "tests/runtime/test_pipeline.py::test_collect_non_loss_data",
        "megapipe/runtime/combinations.py",
        "lambda of: of.call.collect_non_loss_data,",
        "lambda of: False,",
    ),
    (
        "What a stage had sent was kept without whom to: under another schedule its messages were refused for ever.",
        "tests/runtime/test_between_steps.py::test_a_new_peer_has_not_seen_the_messages",
        "megapipe/runtime/found_shapes.py",
        "(stages[chunk], side, peer, step_key)",
        "(stages[chunk], side, step_key)",
    ),
    (
        "Which modules have the copies of a tied weight was checked once: of those exchanged later nothing was summed.",
        "tests/cases/test_rows.py",
        "megapipe/training/tied_weights.py",
        "        modules = {module for chunk in chunks for module in chunk.modules()}\n",
        '        if vars(self).setdefault("known", set()).issuperset(map(id, chunks)):\n'
        "            return\n"
        '        vars(self)["known"].update(map(id, chunks))\n'
        "        modules = {module for chunk in chunks for module in chunk.modules()}\n",
    ),
    (
        "A step that failed left the copies of tied weights without the gradients of earlier calls.",
        "tests/runtime/test_between_steps.py::test_a_refused_call_leaves_the_gradients_of_tied_weights",
        "megapipe/training/tied_weights.py",
        "                parameter.grad = grad\n",
        "                pass\n",
    ),
    (
        "Tokens whose gradients were set to zeros counted in the next call.",
        "tests/runtime/test_between_steps.py::test_tokens_of_gradients_that_were_dropped",
        "megapipe/gradients.py",
        "grad is None or (grad._version != version and not grad.count_nonzero().item())",
        "grad is None",
    ),
    (
        "Tied embeddings of Megatron's chunks in a V counted the first call's sum twice where calls add up.",
        "tests/cases/test_rows.py",
        "megapipe/integrations/megatron/ties.py",
        "in _copies(step)[1:]:",
        "in _copies(step)[:0]:",
    ),
    (
        "What is computed again was compared in a chunk's first step only, whatever was exchanged or set later.",
        "tests/runtime/test_recompute.py::test_what_is_recomputed_in_later_steps_is_compared_too",
        "megapipe/options/activations.py",
        "kept.get(type(self)) != self._like[info]:",
        "kept.get(type(self)) is None:",
    ),
    (
        "Channels were kept by the name of a placement, and all placements of plans had one name.",
        "tests/runtime/test_between_steps.py::test_two_placements_that_are_neither_a_loop_nor_a_v",
        "megapipe/runtime/session.py",
        'ranks = ",".join(str(placement.rank(stage, len(self.ranks))) for stage in stages)',
        "ranks = placement.name",
    ),
    (
        "A tied weight that no stage has used got zeros, so its optimizer decayed it.",
        "tests/cases/test_rows.py",
        "megapipe/training/tied_weights.py",
        "if self._have_gradients(copies, trained):",
        "if self._have_gradients(copies, trained) or trained:",
    ),
    (
        "A second asynchronous Checkpointer of a folder removed what the first was writing.",
        "tests/checkpoint/test_checkpoint.py::test_two_checkpointers_of_one_folder",
        "megapipe/checkpoint/files.py",
        'glob(f"*{INCOMPLETE}")) - UNDER_WAY:',
        'glob(f"*{INCOMPLETE}")):',
    ),
    (
        "Gradients in float16 with norms of 1e6 and more were clipped by a coefficient in float16, which is 0 there.",
        "tests/training/test_clipping.py::test_norms_whose_reciprocal_is_no_number_in_16_bits",
        "megapipe/training/clipping.py",
        "if dtype.itemsize >= 4:",
        "if dtype.itemsize:",
    ),
    (
        'Weight gradients within a Function with "Checkpoint" in its name were left to W, and its backward read none.',
        "tests/weight_grad/test_deferred.py::test_a_backward_that_is_run_within_b_defers_nothing",
        "megapipe/weight_grad/deferred.py",
        'f"{function.__module__}.{function.__qualname__}" in CHECKPOINTS',
        '"Checkpoint" in function.__qualname__',
    ),
]
