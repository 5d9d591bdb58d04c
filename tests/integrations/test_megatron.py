"""Megatron's own model, trained by its schedules and by ours: the same losses and gradients to the last bit."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.megatron_on_cpu import with_optimizers
from tools import models, replicas
from tools.against import assert_same_gradients, gradients
from tools.megatron_models import HIDDEN, batches, copy_of, forward_step, megatron, provider, step
from tools.models import Stage, run
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, PipelineStage, StageInfo, get_forward_backward_func, stages_for_rank
from megapipe.integrations.megatron import framework, global_name
from megapipe.plan import find_schedule
from megapipe.proving import toy
from megapipe.proving.whole import Whole
from megapipe.weight_grad import DeferredGrads

# Looked for, not imported: importing takes two seconds in each process that hands out tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="make test installs megatron-core; pip install --no-deps megatron-core==0.16.1",
)


def token_step(data_iterator: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
    """As `forward_step`, but for microbatches with different numbers of tokens that count."""
    tokens = next(data_iterator)
    mask = tokens[:, :-1] % 3 != 0
    losses, _ = forward_step(iter([tokens]), model)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, num_tokens = (output * mask).sum(), mask.sum().to(torch.int)
        return loss, num_tokens, {"loss": (loss / num_tokens).detach().clone()}

    return losses, loss_func


def own_batches(num_microbatches: int, number: int) -> list[Tensor]:
    from megatron.core import parallel_state

    return batches(num_microbatches, 10 * number + parallel_state.get_data_parallel_rank())


class Trainer:
    """Chunks in Megatron's wrapper, finalized by its function, with its optimizer: clipping, loss scaling, checkpoints.

    Args:
        is_distributed: replicas share the optimizer's state, and both of its collectives overlap.
        is_tied: embeddings are, and the loss is one per token.
    """

    def __init__(
        self, schedule: str, vp_size: int | None, is_distributed: bool, is_tied: bool = True, **precision: Any
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.config = config = megatron(2, vp_size, calculate_per_token_loss=is_tied, **precision)
        self.forward_step = token_step if is_tied else forward_step
        if precision:
            config.pipeline_dtype = config.params_dtype
        build = megapipe.integrations.megatron.build_model_chunks
        self.models = build(provider(config, is_tied), schedule)
        overlaps = {"overlap_param_gather": is_distributed, "use_distributed_optimizer": is_distributed}
        wrap = DistributedDataParallelConfig(overlap_grad_reduce=is_distributed, bucket_size=3000, **overlaps)
        self.chunks = [
            DistributedDataParallel(config, wrap, Float16Module(config, one) if precision else one)
            for one in self.models
        ]
        settings = OptimizerConfig(
            lr=1e-2, min_lr=1e-2, initial_loss_scale=2.0**8, hysteresis=1, **overlaps, **precision
        )
        self.optimizer = get_megatron_optimizer(settings, self.chunks)
        config.no_sync_func = [one.no_sync for one in self.chunks] if vp_size else self.chunks[0].no_sync
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

    def train(self, function: Any, number: int) -> tuple[list[float], bool, float | None]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = own_batches(4, number)
        losses = step(function, self.chunks, data, forward_step_func=self.forward_step)
        was_stepped, norm, _ = self.optimizer.step()
        return losses, was_stepped, norm

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """As Megatron's trainer describes it to its checkpoints."""
        from megatron.core import parallel_state

        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = {f"model{number}": one.sharded_state_dict(metadata=metadata) for number, one in enumerate(self.models)}
        return state | {"optimizer": self.optimizer.sharded_state_dict(state, is_loading, metadata=metadata)}

    def values_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """The weight and its moments."""
        (optimizer,) = self.optimizer.chained_optimizers
        state = optimizer.optimizer.state[parameter]
        return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]]

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        for number, one in enumerate(self.models):
            one.load_state_dict(loaded[f"model{number}"])
        self.optimizer.load_state_dict(loaded["optimizer"])


@on_ranks(2)
def test_same_training_as_megatron(rank: int) -> None:
    """Two steps under its schedule and ours: losses and the norms of all gradients are the same to the last bit."""
    with with_optimizers():
        from megatron.core.pipeline_parallel import get_forward_backward_func

        found = []
        for function in (get_forward_backward_func, megapipe.get_forward_backward_func):
            trainer = Trainer("interleaved_1f1b", 2, False, is_tied=False)
            found.append([trainer.train(function(), number) for number in range(2)])
        assert found[0] == found[1]
        assert all(bool(losses) == (rank == 1) for losses, *_ in found[0])


@on_ranks(4)
def test_distributed_optimizer_in_a_v(rank: int) -> None:
    """The norm is that of all ranks."""
    with with_optimizers():
        from megatron.core.pipeline_parallel import get_forward_backward_func

        trainer = Trainer("1f1b", None, True)
        expected = [trainer.train(get_forward_backward_func(), number) for number in range(2)]
        trainer = Trainer("1f1b", None, True)
        assert expected == [trainer.train(megapipe.get_forward_backward_func(), number) for number in range(2)]
        trainer = Trainer("zbv", 2, True)
        for number, (losses, _, norm) in enumerate(expected):
            found, _, found_norm = trainer.train(megapipe.get_forward_backward_func("zbv"), number)
            assert found_norm == pytest.approx(norm, rel=1e-5)
            if losses:  # which both report on the last rank
                assert found == pytest.approx(losses, rel=1e-5)
        if megapipe.parallel_state.get_pipeline_model_parallel_rank() == 0:
            embedding, head = trainer.models[0].embedding.word_embeddings.weight, trainer.models[1].output_layer.weight
            assert torch.equal(embedding, head)


@on_ranks(2)
def test_megatrons_scaler_in_a_v(rank: int) -> None:
    """One rank finds an Inf, and all skip the step and halve the scale."""
    with with_optimizers():
        trainer = Trainer("zbv", 2, True, fp16=True, params_dtype=torch.float16)
        finalize = trainer.config.finalize_model_grads_func

        def with_inf(models: list[nn.Module], *args: Any, **keywords: Any) -> None:
            finalize(models, *args, **keywords)
            if rank == 1:
                for parameter in models[0].parameters():
                    parameter.main_grad.fill_(torch.inf)

        trainer.config.finalize_model_grads_func = with_inf
        before = [p.detach().clone() for one in trainer.models for p in one.parameters()]
        assert trainer.train(megapipe.get_forward_backward_func("zbv"), 0)[1:] == (False, None)
        assert trainer.optimizer.get_loss_scale() == 2.0**7
        assert all(torch.equal(p, q) for p, q in zip(before, (p for one in trainer.models for p in one.parameters())))
        trainer.config.finalize_model_grads_func = finalize
        assert trainer.train(megapipe.get_forward_backward_func("zbv"), 0)[1]


@on_ranks(2)
def test_megatrons_checkpoints_in_a_v(rank: int, tmp_path: Path) -> None:
    """Saved in a V and loaded into 1F1B, with the optimizer's state."""
    with with_optimizers():
        from megatron.core import dist_checkpointing

        saved, loaded = Trainer("zbv", 2, False), Trainer("1f1b", None, False)
        saved.train(megapipe.get_forward_backward_func("zbv"), 0)
        dist_checkpointing.save(saved.state(), str(tmp_path))
        loaded.load(tmp_path)
        first, second = (gathered(one.models, one.values_of) for one in (saved, loaded))
        assert first.keys() == second.keys()
        for name, values in first.items():
            assert all(torch.equal(*both) for both in zip(values, second[name], strict=True)), name


def gathered(chunks: list[nn.Module], value_of: Callable[[nn.Parameter], Any]) -> dict[str, Any]:
    """Something of every parameter under its name in the whole model, on every rank."""
    own = {global_name(chunk, name): value_of(p) for chunk in chunks for name, p in chunk.named_parameters()}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return {name: value for part in everybody for name, value in part.items()}


@on_ranks(2)
def test_chunks_for_v_placement(rank: int) -> None:
    config = megatron(2, 2)
    build = megapipe.integrations.megatron.build_model_chunks
    loop_chunks = build(provider(config), "interleaved_1f1b")
    v_chunks = build(provider(config), "zbv")
    layers = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in v_chunks]
    assert layers == [[[1], [4]], [[2], [3]]][rank]
    assert [chunk.pre_process for chunk in v_chunks] == [rank == 0, False]
    assert [chunk.post_process for chunk in v_chunks] == [False, rank == 0]
    data = batches(3, 0)
    expected = step(megapipe.get_forward_backward_func("interleaved_1f1b"), loop_chunks, data)
    losses = step(megapipe.get_forward_backward_func("zbv"), v_chunks, data)
    assert len(losses) == 3  # the last stage is on the first rank, and Megatron's trainers read them on the last
    assert expected == (losses if rank == 1 else [])
    first, second = (gathered(chunks, lambda p: p.grad) for chunks in (loop_chunks, v_chunks))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class OfMegatron(toy.Layers):
    """A stage of Megatron's protocol."""

    def __init__(self, info: StageInfo, config: Any) -> None:
        super().__init__(info, 8)
        self.config, self.info, self.model_type = config, info, None
        self.received: Any = None

    def set_input_tensor(self, received: Any) -> None:
        self.received = received[0] if isinstance(received, list) else received

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens if self.info.is_first else self.received)


@on_ranks(2)
def test_its_own_schedule_is_proved(rank: int) -> None:
    config = megatron(2, 2)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[Any], chunk: nn.Module) -> Any:
        tokens, labels = next(data)
        return chunk(tokens), lambda output: ((loss := toy.loss_of(output, labels)), loss.detach().clone())

    sizes = {"seq_length": toy.BATCH, "micro_batch_size": toy.LENGTH, "decoder_seq_length": toy.BATCH}
    proof = megapipe.prove(
        lambda info: OfMegatron(info, config),
        forward_step,
        schedule=get_forward_backward_func(),
        data=toy.microbatches(4),
        pp_size=2,
        num_chunks=2,
        options=sizes,
    )
    assert proof, proof


@on_ranks(2)
def test_functions_at_the_stages_of_a_v(rank: int) -> None:
    """As Megatron's trainer calls what it is given, with its own idea of where the chunk is."""
    config = megatron(2, 2)
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    def ends(vp_stage: int) -> tuple[bool, bool]:
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        return is_first, parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)

    def build(pg_collection: Any, pre_process: bool, post_process: bool, vp_stage: int) -> nn.Module:
        assert (pre_process, post_process) == ends(vp_stage)
        is_end = {"pre_process": pre_process, "post_process": post_process}
        model = provider(config, is_tied=True)(**is_end, vp_stage=vp_stage, pg_collection=pg_collection)
        if post_process:
            model.output_layer.weight.data.fill_(7.0)
        return model

    def datasets(num_samples: int, vp_stage: int | None = None) -> tuple[bool, bool]:
        assert num_samples == 3
        return ends(vp_stage or 0)

    def forward(data_iterator: Any, model: nn.Module) -> tuple[bool, bool]:
        return ends(model.vp_stage)

    place = megapipe.integrations.megatron.at_its_stage
    groups = ProcessGroupCollection.use_mpu_process_groups()
    before = vars(groups).copy()
    wrongly = {"pre_process": rank == 1, "post_process": rank == 1}
    provide = place(build, "zbv")
    chunks = [provide(groups, **wrongly, vp_stage=vp_stage) for vp_stage in (0, 1)]
    for vp_stage, stage in enumerate(megapipe.stages_for_rank("zbv")):
        expected = (stage.is_first, stage.is_last)
        assert (chunks[vp_stage].pre_process, chunks[vp_stage].post_process) == expected
        assert place(datasets, "zbv")(3, vp_stage=vp_stage) == expected
        assert place(forward, "zbv")(None, chunks[vp_stage]) == expected
        # Elsewhere all is as before, and without a V always.
        assert ends(vp_stage) == (rank == 0 == vp_stage, rank == 1 == vp_stage)
        assert place(datasets, "interleaved_1f1b")(3, vp_stage=vp_stage) == ends(vp_stage)
    assert vars(groups) == before
    assert parallel_state.get_embedding_group(check_initialized=False) is before["embd"]
    if rank == 0:
        embedding, head = chunks[0].embedding.word_embeddings.weight, chunks[1].output_layer.weight
        assert torch.equal(embedding, head)
        assert head.shared
        assert not getattr(embedding, "shared", False)


@on_ranks(1)
def test_layers_that_leave_their_weight_gradients_to_w(rank: int) -> None:
    """In B the layers' weights have no gradient yet; after W all have the same as without."""
    plain = provider(megatron(1))()
    (model,) = copy_of([plain])
    assert megapipe.integrations.megatron.defer_weight_gradients(model) is model
    losses = [forward_step(iter(batches(1, 0)), one)[0].mean() for one in (plain, model)]
    assert torch.equal(*losses)
    losses[0].backward()
    later = DeferredGrads()
    with later:
        losses[1].backward()
    waiting = {name for name, p in model.named_parameters() if p.grad is None}
    assert waiting == {name for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name}
    later.run()
    assert_same_gradients([model], plain)


@on_ranks(2)
def test_scales_of_auxiliary_losses(rank: int) -> None:
    config = megatron(2, None)
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    (chunk,) = megapipe.integrations.megatron.build_model_chunks(provider(config), "1f1b")
    config.num_moe_experts = 2
    config.grad_scale_func = lambda loss: loss * 8
    step(megapipe.get_forward_backward_func("1f1b"), [chunk], batches(4, 0))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale == 2
    assert chunk.decoder.layers[0].current_microbatch == 3
    config.calculate_per_token_loss = True
    step(megapipe.get_forward_backward_func("1f1b"), [chunk], batches(4, 0))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale == 8
    config.mtp_num_layers, config.calculate_per_token_loss = 1, False
    around = framework.around_forwards(chunk, 2, torch.device("cpu"))
    assert around is not None
    around.after()
    assert MTPLossAutoScaler.main_loss_backward_scale == 4


def settings_of(schedule: str, **fields: Any) -> dict[str, Any]:
    """What the integration makes of a config with these fields."""
    config, found = SimpleNamespace(**fields), find_schedule(schedule)
    return framework.read_config(config, found)


@pytest.mark.parametrize(
    ("schedule", "field", "value", "message"),
    [
        ("1f1b", "moe_paged_stash", True, "moe_paged_stash is part of"),
        ("1f1b", "cuda_graph_impl", "local", "cuda_graph_impl='local' captures Megatron's own schedules"),
        ("zb1p", "cuda_graph_impl", "transformer_engine", "which zb1p does not keep to"),
        ("interleaved_1f1b", "overlap_moe_expert_parallel_comm", True, "take combined_1f1b, Megatron's schedule"),
        ("dualpipev", "mtp_standalone", True, "dualpipev ties embeddings on the first rank only"),
        ("zbv", "fine_grained_activation_offloading", True, "zbv does not keep to: set it to False, and config"),
    ],
)
def test_settings_that_are_refused(schedule: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(schedule, **{field: value})


def test_settings_that_are_followed() -> None:
    """Captured by transformer-engine, microbatches must come in Megatron's order. A stage of its own for multi-token
    prediction sends more than the others."""
    for schedule in ("no_pipelining", "1f1b", "interleaved_1f1b"):
        assert settings_of(schedule, cuda_graph_impl="transformer_engine") == {}
        with pytest.raises(ValueError, match="without max_in_flight"):
            settings_of(schedule, cuda_graph_impl="transformer_engine", max_in_flight=4)
    assert settings_of("interleaved_1f1b", mtp_standalone=True) == {"variable_seq_lengths": True}


@on_ranks(2)
def test_megatrons_own_offloading_is_reset_by_each_training_step(rank: int) -> None:
    """Its modules, which make the copies, count on the schedule for that. Both kinds of offloading are one too many."""
    config = megatron(2, None)
    chunks = megapipe.integrations.megatron.build_model_chunks(provider(config), "1f1b")
    module = importlib.import_module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    interface = module.FineGrainedActivationOffloadingInterface
    config.fine_grained_activation_offloading = True
    resets: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_chunk_handler", "mark_not_offloadable"):
            patch.setattr(interface, name, lambda *args, **options: None)
        patch.setattr(interface, "reset", lambda: resets.append(rank))
        for forward_only in (False, True):
            step(megapipe.get_forward_backward_func("1f1b"), chunks, batches(4, 0), forward_only=forward_only)
    assert resets == [rank]
    with pytest.raises(ValueError, match="both move activations to host memory"):
        settings_of("1f1b", fine_grained_activation_offloading=True, offload_activations=1.0)


class MultiModuleProcessGroupCollection:
    """Stands for Megatron's, which has this name from 0.17 on."""


@on_ranks(1)
def test_pipelines_of_several_models_are_refused(rank: int) -> None:
    """They were taken for the default pipeline."""
    import megatron.core  # noqa: F401, whose rules are followed where it has been imported

    groups = MultiModuleProcessGroupCollection()
    with pytest.raises(ValueError, match="a MultiModuleProcessGroupCollection describes several models"):
        megapipe.get_forward_backward_func(schedule_pg_collection=groups)
    for keyword in ("pg_collection", "p2p_communicator"):
        with pytest.raises(ValueError, match="describes several models"):
            megapipe.get_forward_backward_func("1f1b")(
                forward_step_func=forward_step,
                data_iterator=None,
                model=nn.Linear(1, 1),
                num_microbatches=1,
                **{keyword: groups},
            )


@on_ranks(1)
def test_functions_that_trainers_import(rank: int) -> None:
    """They were written anew with the arguments of one release. `backward_step` of a later one, without `model_type`,
    took the config for it, and so left out `grad_scale_func`."""
    from megatron.core.pipeline_parallel import schedules

    ours = megapipe.integrations.megatron
    for name in ("forward_step", "backward_step", "get_tensor_shapes", "custom_backward", "deallocate_output_tensor"):
        assert getattr(ours, name) is getattr(schedules, name)
    assert not hasattr(ours, "get_forward_backward_func")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(schedules, "get_schedule_table")
        with pytest.raises(ImportError, match="get_schedule_table is Megatron's own, but the installed release has no"):
            from megapipe.integrations.megatron import get_schedule_table  # noqa: F401
        patch.setitem(sys.modules, schedules.__name__, None)
        with pytest.raises(ImportError, match=r"forward_step is Megatron's own, .* install megatron-core"):
            from megapipe.integrations.megatron import forward_step  # noqa: F401


@on_ranks(1)
def test_scales_are_set_by_the_megatron_that_is_there(rank: int) -> None:
    """Each release has more of them: 0.19 asks `moe_grad_scale_func`, `mtp_grad_scale_func` and attention's own."""
    from megatron.core.pipeline_parallel import schedules

    config = megatron(1)
    config.timers = object()
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "set_current_microbatch", lambda model, microbatch: calls.append(microbatch))
        patch.setattr(schedules, "forward_step_calc_loss", lambda *args, **options: calls.append(options))
        chunk, device = provider(config)(), torch.device("cpu")
        around = framework.around_forwards(chunk, 4, device)
    assert around is not None
    around.before(3)
    around.after()
    assert calls[0] == 3
    assert calls[1]["num_microbatches"] == 4
    assert calls[1]["is_last_stage"] is False
    assert calls[1]["config"].timers is None
    assert calls[1]["config"].hidden_size == HIDDEN
    assert config.timers is not None


def rng_tracker() -> Any:
    from megatron.core.tensor_parallel import random

    return random.get_cuda_rng_tracker()


class Dropping(nn.Linear):
    """Draws from a state of Megatron's tracker, as dropout in tensor-parallel regions does."""

    def forward(self, x: Tensor) -> Tensor:
        tracker = rng_tracker()
        generator = torch.Generator()
        generator.set_state(tracker.get_states()["own"])
        mask = torch.rand(x.shape, generator=generator) < 0.5
        tracker.set_states({"own": generator.get_state()})
        return torch.tanh(super().forward(x)) * mask


@on_ranks(1)
def test_replays_draw_from_the_tracker_what_forwards_drew(rank: int) -> None:
    """They went on from the state that the last forward had left: gradients were those of other masks."""
    megatron(1)
    gradients = []
    (info,) = stages_for_rank("gpipe", 0, 1)
    for recompute in (None, "all"):
        torch.manual_seed(0)
        rng_tracker().set_states({"own": torch.Generator().manual_seed(1).get_state()})
        chunk = PipelineStage(Dropping(4, 4), info, PipelineConfig(recompute=recompute))
        get_forward_backward_func("gpipe")(
            forward_step_func=lambda items, chunk: (chunk(next(items)), lambda out: (out.sum(), 0)),
            data_iterator=iter(torch.ones(4, 2, 4)),
            model=chunk,
            num_microbatches=4,
        )
        gradients.append(chunk.module.weight.grad)
    assert torch.equal(*gradients)


@on_ranks(4)
def test_gradients_in_their_data_parallelism(rank: int) -> None:
    """Two replicas of two stages in Megatron's wrapper, with reductions that overlap: started by its own hooks, each
    bucket when its gradients are complete, or by grad_sync_func for the chunk."""
    config = megatron(2)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500)
    replica = megapipe.parallel_state.get_data_parallel_rank()
    model = Stage(StageInfo(0, 1), replicas.NUM_LAYERS)
    expected = []
    for number in range(2):
        data = [[*models.batches(3, 2 * number + one)] for one in range(2)]
        Whole([model], models.forward_step).step_of_replicas(data)
        expected.append(gradients(model))
    for schedule, by_hooks in (("1f1b", False), ("zbv", True)):
        chunks = replicas.build_replicas(schedule, 2)
        wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        config.no_sync_func = [one.no_sync for one in wrapped]
        config.grad_sync_func = None if by_hooks else [one.start_grad_sync for one in wrapped]
        config.finalize_model_grads_func = lambda models, tokens: [one.finish_grad_sync() for one in models]
        for number in range(2):
            for one in wrapped:
                one.zero_grad_buffer()
            run(schedule, wrapped, 3, seed=2 * number + replica)
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    assert torch.equal(parameter.main_grad, expected[number][name]), f"{schedule}, {by_hooks}, {name}"


def test_only_the_integration_knows_the_package() -> None:
    package = Path(megapipe.__file__).parent
    for path in package.rglob("*.py"):
        if "integrations" not in path.relative_to(package).parts:
            assert not re.search(r"\bmegatron\b", path.read_text()), path


PAGE, TUTORIAL = (
    (Path(__file__).parents[2] / "docs" / page).read_text() for page in ("megatron.md", "tutorials/from_megatron.md")
)


def test_the_page_names_what_exists() -> None:
    """Its diffs and scripts import what is there, and its tables have every schedule and every setting."""
    imports = re.findall(r"^\+?\s*(?:from|import) .+$", PAGE + TUTORIAL, flags=re.MULTILINE)
    lines = [line.lstrip("+ ") for line in imports]
    ours = [line for line in lines if "megapipe" in line]
    assert len(ours) == 6
    for line in ours:
        exec(line, {})
    for name in set(re.findall(r"megapipe\.(\w+)", PAGE)) - {"integrations"}:
        assert hasattr(megapipe, name)
    rows = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|.*\|$", PAGE, flags=re.MULTILINE)
    assert rows == megapipe.schedule_names()
    for row in rows:
        try:
            settings_of(row, cuda_graph_impl="transformer_engine")
            expected = "as they are"
        except ValueError:
            expected = "no"
        assert re.search(rf"^\| `{row}` \|.*\| {expected}", PAGE, flags=re.MULTILINE), row
    for setting in megapipe.integrations.megatron.settings._UNSUPPORTED:
        assert f"`{setting}`" in PAGE


def test_the_page_names_what_megatron_has() -> None:
    """Where Megatron's trainer can be imported, as from a checkout: the release's wheel has the core only."""
    training = pytest.importorskip("megatron.training.training", exc_type=ImportError)
    assert "get_forward_backward_func" in vars(training)
