"""The cases that the tests run: every schedule, every feature alone and with another one, and pairs drawn by a seed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import combinations

import torch

from .between import Between, goes
from .calls import CALLS
from .case import SCHEDULES, Case, draw_case, draw_sizes
from .changes import KINDS
from .given import Called, Given
from .model import (
    AsPipelineStage,
    Autocast,
    Auxiliary,
    Companions,
    Delays,
    Double,
    Forms,
    Frozen,
    KeptSums,
    Mask,
    Message,
    Number,
    NumTokens,
    OddLayers,
    Offload,
    Planned,
    Recompute,
    Settings,
    Shapes,
    Slices,
)
from .training import (
    Accumulated,
    Failure,
    Optimizer,
    Recorded,
    Replicas,
    Saved,
    Scaled,
    Tied,
    TiedByMegatron,
    Validated,
    WarmUp,
    Wrapped,
)

DEFERRING = Forms(["deferring"])
TAKEN_BACK = Optimizer("post-validated", 5.0, (1.0, 256.0, 1.0, "nan"))
DROPOUT = OddLayers({0: "dropout", 2: "dropout"})
ADAMW = Optimizer("adamw", 0.5)
FEW_GATHERED = Settings(max_gathered_chunks=1)
GATHERED = (("interleaved_1f1b", None), ("zbv", "all"), ("dualpipev", None))
DOWN_FROZEN = Frozen([("layers.1.down.",)])
FROZEN = ("embedding.", "layers.0.", "layers.1.", "layers.2.")
OF_SLICES = ["seq1f1b", "seq_zb1p", "seq_interleaved_1f1b"]
PLAIN = [name for name in SCHEDULES if name not in ("no_pipelining", *OF_SLICES)]

OF_SCHEDULES = [
    Case("no_pipelining", 1, 3, [OddLayers({0: "dropout"})], steps=2),
    Case("no_pipelining", 1, 2, [Tied()], chunks=3),
    Case("gpipe", 2, 5),
    Case("gpipe", 4, 2, [Offload(1.0)]),
    Case("1f1b", 1, 5),
    Case("1f1b", 2, 1),
    Case("1f1b", 3, 2, [OddLayers({1: "dropout", 3: "dropout"})]),
    Case("1f1b", 4, 8, steps=2),
    Case("looped_bfs", 2, 5, chunks=2),
    Case("looped_bfs", 3, 4, chunks=3),
    Case("looped_bfs", 4, 8, chunks=2, layers=12),
    Case("interleaved_1f1b", 1, 5, chunks=2),
    Case("interleaved_1f1b", 2, 5, chunks=3),
    Case("interleaved_1f1b", 3, 7, chunks=2),
    Case("interleaved_1f1b", 4, 8, chunks=2),
    Case("interleaved_1f1b", 2, 7, [Settings(microbatch_group_size_per_vp_stage=3)], chunks=2),
    Case("interleaved_1f1b", 2, 6, [Settings(microbatch_group_size_per_vp_stage=5)], chunks=2),
    Case("combined_1f1b", 2, 5, [Forms(["in segments"])], chunks=2),
    Case("combined_1f1b", 4, 8, chunks=2),
    Case("zb1p", 2, 5, [DEFERRING]),
    Case("zb1p", 4, 8, [DEFERRING], steps=2),
    Case("zb2p", 2, 1, [DEFERRING]),
    Case("zb2p", 4, 5, [DEFERRING]),
    Case("zb2p", 3, 8),
    *(Case(name, 2, 3, chunks=2) for name in ("interleaved_zb1p", "combined_zb1p", "zbv", "v_half", "dualpipev")),
    Case("interleaved_zb1p", 2, 5, [DEFERRING], chunks=2),
    Case("interleaved_zb1p", 4, 8, [DEFERRING], chunks=3),
    Case("combined_zb1p", 2, 5, [Forms(["in segments deferring"])], chunks=2),
    Case("combined_zb1p", 4, 5, [DEFERRING], chunks=2),
    Case("zbv", 1, 5, [DEFERRING]),
    Case("zbv", 2, 5, [DEFERRING]),
    Case("zbv", 4, 8, [DEFERRING]),
    Case("v_half", 2, 2, [DEFERRING]),
    Case("v_half", 4, 5, [DEFERRING]),
    Case("v_min", 2, 5, [DEFERRING]),
    Case("v_min", 4, 8, [DEFERRING]),
    Case("dualpipev", 2, 5, [Forms(["in segments deferring"])]),
    Case("dualpipev", 4, 8, [Forms(["in segments deferring"])]),
    Case("dualpipev", 3, 6, [DEFERRING]),
    Case("seq1f1b", 2, 3, [Slices([3, 2, 1])]),
    Case("seq1f1b", 4, 5, [Slices([1, 4, 1], 3)]),
    Case("seq1f1b", 3, 2, [Slices(2)], steps=2),
    Case("seq_zb1p", 2, 3, [Slices([3, 2, 1]), DEFERRING]),
    Case("seq_zb1p", 4, 2, [Slices(4), DEFERRING]),
    Case("seq_interleaved_1f1b", 2, 4, [Slices([2, 3, 1])], chunks=2),
    Case("seq_interleaved_1f1b", 4, 2, [Slices(3)], chunks=2),
]

OF_FEATURES = [
    *(Case("1f1b", 2, 3, [Message(kind)]) for kind in ("tuple", "list of one", "nested", "registered class")),
    *(Case("interleaved_1f1b", 2, 3, [Companions(), Message(kind)], chunks=2) for kind in ("dict", "named tuple")),
    *(
        Case("gpipe", 2, 3, [Companions(), Message(kind), *taken, Recompute()])
        for kind in ("written dict", "written list")
        for taken in ([AsPipelineStage()], [])  # as an argument, or by set_input_tensor
    ),
    Case("zb1p", 3, 3, [Message("complex"), OddLayers({0: "complex", 2: "complex"}), DEFERRING, Shapes("computed")]),
    Case(
        "gpipe",
        2,
        4,
        [Message("complex"), OddLayers({0: "complex", 2: "complex"}), Offload(0.3), Recompute([None, "all"])],
    ),
    Case("zbv", 2, 5, [Auxiliary(0.0), Message("registered dict"), DEFERRING]),
    Case("1f1b", 2, 3, [Auxiliary(0.25), Message("nested"), Recompute()]),
    *(Case(name, 2, 3, [Number(), Message("dict")], steps=3) for name in ("1f1b", "zbv")),
    Case("zb1p", 2, 3, [Mask(), DEFERRING]),
    Case("looped_bfs", 2, 3, [AsPipelineStage(), Message("list"), Mask()], chunks=2),
    Case("1f1b", 3, 4, [Double(), Frozen([("layers.0.",), ()])], steps=2),
    Case("gpipe", 2, 3, [OddLayers({1: "lazy"}), Offload()]),
    Case("zb1p", 2, 5, [Frozen([("embedding.", "layers.0.", "layers.1."), ()]), DEFERRING], steps=2),
    Case("zbv", 2, 3, [AsPipelineStage(), Frozen([FROZEN, FROZEN[:3], (), FROZEN[:3]])], steps=4),
    Case("1f1b", 2, 5, [Forms(["recomputed", "reentrant recomputed"])]),
    Case("zb1p", 2, 5, [Forms(["recomputed deferring"]), OddLayers({0: "dropout"})]),
    Case("1f1b", 2, 4, [Shapes("described", [3, 1, 7, 2])], steps=2),
    Case("interleaved_1f1b", 2, 5, [Shapes("described", [4, 9, 2, 9, 7])], steps=2, chunks=2),
    *(Case(name, 2, 6, [Shapes("described", [8200, 4, 8192, 2, 7, 8200])]) for name in ("1f1b", "zbv")),  # MiBs
    Case("1f1b", 2, 4, [Shapes("computed"), Message("tuple")]),
    Case("zbv", 2, 4, [Shapes("config"), DEFERRING]),
    Case("1f1b", 2, 3, [NumTokens()]),
    Case("seq1f1b", 2, 3, [Slices([4, 1, 1]), Double(), NumTokens()]),
    Case("seq_zb1p", 2, 3, [Slices([4, 1, 1]), NumTokens(per_token=True), DEFERRING]),
    *(Case(name, 2, 3, [NumTokens(per_token=True), Accumulated()], steps=2) for name in ("1f1b", "zbv")),
    Case("seq1f1b", 2, 3, [Slices(3), KeptSums(1, "stack", "view"), Recompute()]),
    Case("seq_zb1p", 2, 3, [Slices([3, 2, 1]), KeptSums(0, "views"), DEFERRING]),
    Case("seq1f1b", 2, 2, [Slices(6), KeptSums(2, "stack")]),
    Case("seq_zb1p", 2, 2, [Slices(3), Forms(["recomputed deferring"])]),
    Case("seq1f1b", 2, 3, [Slices([3, 2, 1]), AsPipelineStage()], steps=2),
    Case("1f1b", 4, 8, [Settings(max_in_flight=8.0, overlap_p2p_comm=False)]),
    Case("zb1p", 2, 6, [Settings(max_pending_weights=0), DEFERRING]),
    Case("zbv", 2, 6, [Settings(min_pending_weights=2, weights_per_window=2), Forms(["in segments deferring"])]),
    Case("1f1b", 2, 5, [Recompute(), OddLayers({0: "dropout", 2: "dropout"})]),
    Case("zb1p", 3, 6, [Recompute(["all", None, "all"]), DEFERRING]),
    Case("v_half", 2, 5, [Recompute(), Offload(0.3), DEFERRING]),
    Case("dualpipev", 2, 6, [Recompute(), DEFERRING]),
    Case("1f1b", 4, 8, [Offload(1.0), OddLayers({1: "dropout"})]),
    Case("zbv", 2, 8, [Offload(2.5), DEFERRING]),
    Case("zb1p", 2, 6, [Planned([1.0, 0.5, 2.0]), DEFERRING]),
    Case("zbv", 4, 6, [Planned([1.0, 3.0, 0.5], "plan.csv"), DEFERRING]),
    Case("1f1b", 2, 3, [Replicas()], steps=2),
    Case("no_pipelining", 1, 2, [Replicas("reducer", (3,))]),
    Case("zbv", 2, 4, [Replicas(), DEFERRING, ADAMW], steps=2),
    Case("1f1b", 2, 3, [Tied(), Optimizer("adamw", 0.5, (256.0,)), Saved()], steps=2),
    Case("1f1b", 2, 3, [TAKEN_BACK, Saved(1, asynchronous=True)], steps=4),
    Case("interleaved_1f1b", 2, 3, [Accumulated(), Validated(), Tied()], steps=2),
    Case("1f1b", 2, 3, [WarmUp(), OddLayers({0: "dropout", 1: "lazy"})]),
    Case("1f1b", 2, 2, [Number(), Frozen([("embedding.", "layers.0.", "layers.1."), ()]), WarmUp(1)], steps=2),
    Case("looped_bfs", 1, 2, [Message("list of one"), AsPipelineStage(), WarmUp()], chunks=2),
    Case("seq1f1b", 2, 2, [Slices(2), Shapes("config"), WarmUp()]),
    Case("zb1p", 2, 3, [WarmUp(1), Wrapped("_orig_mod"), DEFERRING], steps=2),
    Case("1f1b", 2, 3, [OddLayers({0: "late buffer", 2: "weight in closure"})], steps=2),
    Case("zb1p", 2, 3, [OddLayers({0: "idle", 1: "strided", 2: "weight in list"}), DEFERRING]),
    Case("zb1p", 2, 5, [OddLayers({0: "used twice", 2: "Python's random numbers"}), DEFERRING], steps=2),
    Case("zb1p", 2, 3, [OddLayers({0: "experts", 2: "rows of a mask"}), DEFERRING]),
    Case("zbv", 2, 3, [OddLayers({0: "experts", 2: "rows of a mask"}), Forms(["captured", "captured recomputed"])]),
    Case(
        "zbv", 2, 5, [OddLayers({1: "used twice", 3: "used twice"}), DEFERRING, Frozen([("layers.1.",), ()])], steps=2
    ),
    *(Case(name, 2, 5, [Delays("assigned", "every second"), DOWN_FROZEN]) for name in ("1f1b", "zb1p", "zbv")),
    *(Case(name, 2, 5, [Delays("with its bias", "twice"), Accumulated()]) for name in ("1f1b", "zb1p", "zbv")),
    Case("zbv", 2, 5, [Delays("kept"), Accumulated()]),
    Case("interleaved_zb1p", 2, 5, [Delays("added"), Accumulated()], chunks=2),
    *(Case(name, 2, 5, [Delays("to main_grad"), Accumulated()]) for name in ("1f1b", "zb1p")),
    *(Case(name, 2, 5, [Delays("assigned beside main_grad"), Accumulated()]) for name in ("1f1b", "zbv")),
    *(Case(name, 2, 3, [Autocast(), DEFERRING, Recompute()], steps=2) for name in ("1f1b", "zbv")),
    *(Case(name, 2, 3, [Optimizer("adamw", 5.0, (1.0, "nan", 256.0)), Scaled()], steps=3) for name in ("1f1b", "zbv")),
    *(Case(name, 2, 3, [DEFERRING, Recorded()], steps=2) for name in ("1f1b", "zbv")),
    Case("1f1b", 3, 4, [Failure(1, 3)]),
    Case("zbv", 2, 4, [Failure(0, 9), DEFERRING]),
]
for name in PLAIN:
    OF_FEATURES += [
        Case(name, 3, 1, [DEFERRING]),
        Case(name, 2, 5, [DROPOUT, DEFERRING, Offload(1.0)]),
        Case(name, 2, 3, [DEFERRING, Planned([1.0, 3.0, 0.5], "plan.json"), Replicas(), Tied(), ADAMW], steps=2),
        Case(name, 2, 3, [DROPOUT, DEFERRING, Recompute(), Replicas("fully_shard")], steps=2),
    ]
for name in OF_SLICES:
    OF_FEATURES += [
        Case(name, 2, 3, [Slices([3, 2, 1]), Double(), DEFERRING]),
        Case(name, 2, 3, [Slices([3, 2, 1]), DEFERRING, Recompute(), Tied()]),
        Case(name, 2, 2, [Slices([2, 4]), Forms(["recomputed"]), Replicas()]),
        Case(name, 2, 2, [Slices([2, 4]), Planned([1.0, 3.0, 0.5], "plan.json"), DEFERRING]),
    ]
for name in ("zb1p", "interleaved_zb1p", "combined_zb1p", "zbv", "v_half"):
    OF_FEATURES += [Case(name, 3, 7, [DEFERRING, Settings(max_pending_weights=most)]) for most in (0, 1)]
OF_FEATURES += [
    *(Case("1f1b", 2, 2, [Replicas("fully_shard", sizes), ADAMW]) for sizes in ((1, 2), (2, 1))),
    Case("zbv", 1, 2, [Replicas("fully_shard", (2, 2)), DEFERRING]),
    *(Case(name, 2, 2, [Replicas("fully_shard"), FEW_GATHERED, Recompute(what)]) for name, what in GATHERED),
    Case("seq_zb1p", 2, 3, [Slices([3, 2, 1]), DEFERRING, Replicas("fully_shard")]),
    Case("zbv", 2, 3, [DEFERRING, Replicas("fully_shard"), TAKEN_BACK, Saved()], steps=4),
]
if torch.__version__ >= "2.13":
    OF_FEATURES += [Case("zbv", 2, 3, [DEFERRING, Replicas("replicate"), ADAMW], steps=2)]
OF_FEATURES += [
    Case("1f1b", 2, 4, [Forms(["captured", "captured recomputed"]), WarmUp(1)], steps=2),
    Case("zb1p", 2, 3, [Forms(["captured"]), AsPipelineStage()]),
    *(Case(name, 1, 3, [Forms(["captured"]), Replicas("fully_shard")]) for name in ("1f1b", "zb1p")),
]


OF_CHANGES = [
    Case("1f1b", 2, 3, [Accumulated(), Between("gradients forgotten", when="midway")], steps=3),
    Case("1f1b", 2, 3, [Between("module of another type"), Between("requires_grad", 1, 1)], steps=4),
    Case("1f1b", 2, 3, [Between("captured later")], steps=3),
    Case("1f1b", 2, 3, [AsPipelineStage(), Between("a wrong setting")], steps=3),
    Case("zbv", 1, 3, [DEFERRING, Between("a call failed")], steps=3),
    Case("zbv", 1, 3, [DEFERRING, Between("part of another model")], steps=3),
    Case("zbv", 2, 3, [DEFERRING, Between("wrapped later", seed=1)], steps=3),
    Case("zbv", 2, 3, [Tied(), Between("sharded later")], steps=3),
    Case("zbv", 2, 3, [Tied("scale", in_steps=True), Accumulated(), Between("another schedule")], steps=3),
    *(
        Case("zbv", 2, 3, [Accumulated(), Between(kind, 2, when="midway")], steps=2)
        for kind in ("requires_grad", "noise")
    ),
    Case("interleaved_zb1p", 2, 3, [ADAMW, Between("parametrized", 2), Between("adapters added", 1)], steps=3),
    Case("1f1b", 2, 3, [ADAMW, Replicas(), Between("module of the same type", 1)], steps=3),
    Case("1f1b", 2, 3, [TAKEN_BACK, Between("module of another type")], steps=4),
]
for number, name in enumerate(sorted([*KINDS, *CALLS])):
    plain = [Case("zbv", 2, 3, [DEFERRING], steps=3), Case("1f1b", 2, 3, steps=3)][number % 2]
    if goes(name, plain) and not any(name in row.changes for row in OF_CHANGES):
        OF_CHANGES += [replace(plain, features=[*plain.features, Between(name, number % plain.num_stages, seed=1)])]


# Of tied weights: a module that has one is exchanged, no stage uses it, a call is refused that would have begun to sum.
OF_CHANGES += [
    Case("1f1b", 2, 3, [Tied(), Between("module of the same type", 1)], steps=3),
    Case("zbv", 2, 3, [Tied(), Between("module of the same type", 3)], steps=3),
    Case("zbv", 2, 3, [Tied(), Between("module of another dtype", 3)], steps=3),
    Case("1f1b", 2, 3, [Tied(), Between("parametrized", 1)], steps=3),
    Case("zbv", 2, 3, [Tied("scale"), Between("scale left out", seed=1)], steps=3),
    Case("zbv", 2, 3, [Tied(in_steps=True), Accumulated(), Between("a call refused", when="midway")], steps=3),
]
if importlib.util.find_spec("megatron") is not None:
    OF_CHANGES += [Case("zbv", 2, 3, [TiedByMegatron(), *more], steps=2) for more in ([], [Accumulated()])]
# Of tokens: gradients are thrown away, also where their rank has none, or gathered elsewhere.
PER_TOKEN = [NumTokens(per_token=True), Accumulated()]
OF_CHANGES += [
    Case("zbv", 2, 3, [*PER_TOKEN, Between("gradients forgotten", when="midway", seed=1)], steps=3),
    Case(
        "1f1b", 2, 3, [*PER_TOKEN, Between("stage frozen", 1), Between("gradients forgotten", 0, 1, "midway")], steps=4
    ),
    Case("1f1b", 2, 3, [*PER_TOKEN, Between("gradients gathered by a hook", 1)], steps=3),
]
# Of what was looked at in a chunk's first step only.
OF_CHANGES += [
    Case("1f1b", 2, 3, [Recompute(), Between("noise", seed=1)], steps=3),
    Case("zbv", 2, 3, [DEFERRING, Recompute(), Between("noise", seed=1)], steps=3),
    Case("1f1b", 3, 3, [Between("stage unfrozen"), Between("output detached", 0, 1)], steps=4),
    Case("1f1b", 2, 3, [AsPipelineStage(), Between("a wrong setting", seed=1)], steps=4),
]
# Of the pass over all weights behind the last W, for those who watch the nodes that accumulate gradients. A hook of a
# weight itself was called there with None in place of a gradient.
OF_CHANGES += [Case("zb1p", 2, 3, [Called("no_sync_func"), Between("hook of a parameter", 1)], steps=3)]
# Of a step of the optimizer that is rolled back.
OF_CHANGES += [
    Case("zbv", 2, 3, [DEFERRING, Optimizer("post-validated", 0.5), Between("parameter assigned", 2)], steps=3),
    Case("1f1b", 2, 3, [Optimizer("post-validated", 0.5), Between("requires_grad", 1, 0, "trained")], steps=3),
]
# Of messages: stages that are on other ranks, chunks that are new on one end only, gradients that are none.
OF_CHANGES += [
    Case("zbv", 2, 3, [Between("another placement")], steps=3),
    Case("1f1b", 2, 3, [Between("wrapped later", 1)], steps=3),
    Case("zbv", 2, 3, [Message("empty"), Between("input detached", 2)], steps=3),
]
# Of forwards in segments.
OF_CHANGES += [
    Case("combined_1f1b", 2, 3, [Forms(["in segments"]), Between("forward of a stage replaced", 1)], steps=3),
    Case("dualpipev", 1, 3, [Forms(["in segments"]), Between("part of another model", 1)], steps=3),
]
# Of stages that run as graphs: what these cannot know is refused.
OF_CHANGES += [
    Case("zb1p", 2, 3, [Forms(["captured", "deferring"]), Between(kind)], steps=2)
    for kind, one in KINDS.items()
    if one.graphs == "refuse"
]

WAITING = {"min_pending_weights": 1, "max_pending_weights": 2}
IN_PART = Settings(**WAITING, num_microbatches_with_partial_activation_checkpoints=1)
PLAN = Planned([1.0, 3.0, 0.5])
CALLED = [Called("timers"), Called("no_sync_func")]
TRAINED = [ADAMW, Scaled(), Recorded(), Validated()]
TOKENS = NumTokens(per_token=True)
CAPTURED = Forms(["captured"])
DELAYED = Delays("assigned")
ROLLED_BACK = Optimizer("post-validated", 5.0)
FIRST_FROZEN = Frozen([("layers.0.",)])

OF_TRAITS = [  # many at a time: each pair of traits that may go together is in some row (test_combinations.py)
    Case("zbv", 2, 3, [CAPTURED, TOKENS, IN_PART, *TRAINED, *CALLED], steps=2),
    Case("dualpipev", 2, 3, [CAPTURED, FIRST_FROZEN, Recompute(), Shapes("described"), Replicas(), CALLED[1]]),
    Case("zb1p", 2, 3, [CAPTURED, PLAN, Offload()]),
    Case("1f1b", 2, 3, [CAPTURED, ROLLED_BACK], steps=2),
    Case("1f1b", 2, 3, [CAPTURED, Autocast()]),
    Case("dualpipev", 2, 3, [Forms(["in segments deferring"]), TOKENS, IN_PART, *TRAINED, *CALLED]),
    Case("zbv", 2, 3, [DEFERRING, FIRST_FROZEN, IN_PART, Replicas("fully_shard"), Validated(), *CALLED]),
    Case("1f1b", 2, 3, [DEFERRING, TOKENS, Replicas("fully_shard"), Called("grad_sync_func"), Offload()]),
    Case("zb1p", 2, 3, [DEFERRING, PLAN, Replicas("fully_shard"), *CALLED]),
    Case("dualpipev", 2, 3, [DELAYED, TOKENS, Shapes("described"), IN_PART, Recompute(), *TRAINED, *CALLED], steps=2),
    Case("1f1b", 2, 3, [DELAYED, Offload(), TOKENS, IN_PART, *CALLED]),
    Case("zb1p", 2, 3, [DELAYED, PLAN, Replicas(), CALLED[1]]),
    Case("zb1p", 2, 3, [DELAYED, Autocast(), Replicas("fully_shard")]),
    Case("seq_zb1p", 2, 3, [Slices([3, 2, 1]), DELAYED, Settings(**WAITING), *CALLED]),
    Case("1f1b", 2, 3, [DELAYED, ROLLED_BACK, Scaled()], steps=2),
    Case(
        "1f1b", 2, 3, [DELAYED, Shapes("described"), IN_PART, Recompute(), Replicas(), ROLLED_BACK, CALLED[1]], steps=2
    ),
    Case("zbv", 2, 3, [Autocast(), DEFERRING, TOKENS, IN_PART, ADAMW, Scaled(), *CALLED], steps=2),
    Case("zbv", 2, 3, [Autocast(), DEFERRING, PLAN, Replicas(), CALLED[1]]),
    Case("zbv", 2, 3, [Autocast(), DEFERRING, TOKENS, ROLLED_BACK, CALLED[0]], steps=2),
    Case("1f1b", 2, 3, [Autocast(), DEFERRING, FIRST_FROZEN, Shapes("described"), Offload()]),
    Case("seq1f1b", 2, 3, [Slices([3, 2, 1]), Autocast()]),
    Case("seq1f1b", 2, 3, [Slices([3, 2, 1]), FIRST_FROZEN, *TRAINED], steps=2),
    Case("zb1p", 2, 3, [DEFERRING, Offload(), ROLLED_BACK, Recorded()], steps=2),
    Case(
        "dualpipev",
        2,
        3,
        [Autocast(), FIRST_FROZEN, Forms(["in segments deferring"]), Replicas(), *TRAINED, CALLED[0]],
        steps=2,
    ),
    Case("zb1p", 2, 3, [Shapes("described"), DEFERRING, PLAN, Replicas("fully_shard"), ADAMW, Scaled(), Recorded()]),
    Case("dualpipev", 2, 3, [FIRST_FROZEN, Shapes("described"), PLAN, TOKENS, ROLLED_BACK, Validated()], steps=2),
    Case("1f1b", 2, 3, [DEFERRING, Planned([1.0, 3.0, 0.5], recompute=True), Recompute()]),
    Case("1f1b", 2, 5, [DEFERRING, PLAN, Offload(), Settings(num_microbatches_with_partial_activation_checkpoints=1)]),
    Case("zb1p", 2, 3, [DEFERRING, Recompute(), IN_PART, Offload(), TOKENS, CALLED[1], *TRAINED], steps=2),
]


def with_given(row: Case) -> Case:
    """With all that it may be given."""
    for kind in Given.kinds(row):
        more = replace(row, features=[*row.features, Given(kind)])
        row = row if more.is_refused else more
    return row


OF_TRAITS = [with_given(row) for row in OF_TRAITS]


def draw_pairs(seed: int, tries: int, most_units: int = 16) -> list[Case]:
    """Of so many random cases, small ones that have a pair of features that no case before them has."""
    kept, seen = [], set()
    for number in range(tries):
        if units_of(draw_sizes(seed, number)) > most_units:
            continue
        case = draw_case(seed, number)
        pairs = {*combinations([type(feature).__name__ for feature in case.features], 2)}
        if units_of(case) <= most_units and not pairs <= seen and not is_slow(case):
            seen |= pairs
            kept.append(case)
    return kept


def units_of(case: Case) -> int:
    """How much it computes: forwards of one slice by one stage."""
    return case.steps * case.m * len(case.slice_lengths) * case.num_stages


def is_slow(case: Case) -> bool:
    """It starts processes anew, compiles, or waits until collectives are aborted."""
    fails = case.get("Failure") is not None or (case.get("WarmUp") is not None and "weight" in str(case.odd))
    is_long = case.kills or "captured" in case.forms or "captured later" in case.changes
    return is_long or (fails and case.num_ranks > 2) or (fails and case.num_replicas > 1)


WRITTEN = [*OF_SCHEDULES, *OF_FEATURES, *OF_CHANGES, *OF_TRAITS]
ROWS = [*WRITTEN, *draw_pairs(1, 1000)]
