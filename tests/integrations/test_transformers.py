"""Three models of transformers: a dense one, one with tied embeddings, one of experts whose load the loss balances.
models_of_transformers.py has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import transformers
from tools import hf_kinds, hf_models
from transformers.pytorch_utils import Conv1D

import megapipe
from megapipe.integrations.transformers import CannotCutError, ChunkConfig, build_chunks, count_items


@pytest.mark.parametrize(
    ("name", "schedule"), [("qwen2", "interleaved_1f1b"), ("gemma2", "dualpipev"), ("mixtral", "zbv")]
)
@on_ranks(2)
def test_losses_gradients_and_files_are_those_of_the_whole_model(
    rank: int, name: str, schedule: str, tmp_path: Path
) -> None:
    chunks = hf_models.check(name, schedule, tmp_path / "given", num_microbatches=4, deferred=True)
    max_file_size = 10**9 if name == "mixtral" else 2 * 10**4
    hf_models.assert_saved(chunks, hf_models.make_model(name), tmp_path / "saved", max_file_size=max_file_size)


def test_linear_layers_with_transposed_weights_defer() -> None:
    (chunk,) = build_chunks(hf_models.make_config("gpt2"), megapipe.get_forward_backward_func("no_pipelining"))
    layers = [module for module in chunk.modules() if isinstance(module, Conv1D)]
    megapipe.weight_grad.convert(chunk)
    assert len(layers) == 4 * hf_models.LAYERS
    assert all(type(layer) is not Conv1D and isinstance(layer, Conv1D) for layer in layers)


@on_ranks(2)
def test_new_weights_do_not_depend_on_the_cut(rank: int) -> None:
    hf_models.initialise(2)
    weights: list[dict[str, Any]] = []
    for schedule in ("1f1b", "zbv"):
        chunks = build_chunks(hf_models.make_config("qwen2"), schedule, seed=5)
        own = {name: parameter.data for chunk in chunks for name, parameter in chunk.named_parameters()}
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, own)
        weights.append(gathered[0] | gathered[1])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_only_a_constructor_sets_has_its_value() -> None:
    """Chunks are made without memory, and had what lay there: Apertus was trained wrong, or refused."""
    (chunk,) = build_chunks(hf_kinds.make_config("apertus"), "no_pipelining", dtype=torch.float32)
    activation = chunk.model.layers[1].mlp.act_fn
    assert activation.beta == 0.5
    assert torch.equal(activation.alpha_p, torch.tensor([0.8]).expm1().log())


@on_ranks(2)
def test_in_16_bits(rank: int, tmp_path: Path) -> None:
    """What transformers keeps in float32 was rounded: the bias by which tokens are routed, which was saved so, too, and
    the logits of routers on their way to the loss."""
    dtype = torch.bfloat16
    for name, changes in (
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
        ("granitemoe", {"output_router_logits": True, "router_aux_loss_coef": 1.0}),
    ):
        torch.manual_seed(0)
        whole = transformers.AutoModelForCausalLM.from_config(
            hf_kinds.make_config(name, num_hidden_layers=2, **changes)
        )
        for key, buffer in whole.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(8 + torch.rand_like(buffer) / 500)
        hf_models.save_on_first(whole, tmp_path / name)
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype)
        chunks = hf_models.load_chunks(tmp_path / name, "1f1b", dtype=dtype)
        for chunk in chunks:
            chunk.eval()
        hf_models.compare("1f1b", chunks, whole, count_items(hf_models.batches(2)))
        hf_models.assert_saved(chunks, whole, tmp_path / name / "saved")


@on_ranks(2)
def test_a_kind_whose_layers_are_initialised_from_outside(rank: int) -> None:
    """Falcon-H1 goes through all layers, of which a stage has some."""
    hf_models.initialise(2)
    for seed in (0, None):
        (chunk,) = build_chunks(hf_kinds.make_config("falcon_h1", num_hidden_layers=2), "1f1b", seed=seed)
    with pytest.raises(ValueError, match="resize those of the whole model"):
        chunk.resize_token_embeddings(99)


@on_ranks(2)
def test_layers_are_where_they_are_wanted(rank: int, tmp_path: Path) -> None:
    """By counts, of which one is zero, by letters, and by costs: the first layer is worth five, the head two."""

    def assert_sizes(chunks: list[Any], sizes: list[int]) -> None:
        assert [len(chunk.own_layers) for chunk in chunks] == [len(chunk.layers) for chunk in chunks] == sizes

    chunks = hf_models.check("qwen3-moe", "zbv", tmp_path / "given", 2, layout=[1, 0, 2, 1])
    assert_sizes(chunks, [[1, 1], [0, 2]][rank])
    hf_models.assert_saved(chunks, hf_models.make_model("qwen3-moe"), tmp_path / "saved")
    assert_sizes(build_chunks(hf_models.make_config("gpt2"), "1f1b", layout="E|t*4L"), [[0], [4]][rank])
    costs = {"costs": [5.0, 1.0, 1.0, 1.0], "num_virtual_layers_post": 2.0}
    assert_sizes(build_chunks(hf_models.make_config("llama"), "1f1b", **costs), [[1], [3]][rank])


PACKED = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])}
GIVEN = {"packed": PACKED, "padded": PACKED | {"attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12])}}


def _read_at_the_ends(chunks: list[Any], microbatches: list[dict[str, Any]]) -> list[Any]:
    return [iter(microbatches) if chunk.stage.is_first or chunk.stage.is_last else None for chunk in chunks]


@pytest.mark.parametrize(
    ("name", "schedule", "given", "options", "sizes"),
    [
        ("mixtral", "interleaved_1f1b", "padded", {}, {"seq_length": None, "micro_batch_size": None}),
        ("gemma3", "zbv", "packed", {"variable_seq_lengths": True}, {}),
    ],
)
@on_ranks(2)
def test_masks_and_positions_travel_to_stages_that_read_no_data(
    rank: int, name: str, schedule: str, given: str, options: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Stages in the middle took it that there were none: documents saw each other, and padding was read. Losses were
    wrong without a word. In the second step, shapes are those that the first has found; in the third, all read all."""
    model, chunks = hf_models.load_both(name, tmp_path, schedule, **options)
    microbatches = count_items([batch | GIVEN[given] for batch in hf_models.batches(2)])

    def forward_step(data: Any, chunk: Any) -> Any:  # a user's own
        return chunk(**({} if data is None else next(data))), lambda loss: (loss, 1, {"loss": loss.detach()})

    for _ in range(2):
        own = {"data_iterator": _read_at_the_ends(chunks, microbatches), "forward_step_func": forward_step}
        hf_models.compare(schedule, chunks, model, microbatches, **own, **sizes)
    hf_models.compare(schedule, chunks, model, microbatches, **sizes)


@on_ranks(1)
def test_sequences_in_slices_are_refused(rank: int) -> None:
    hf_models.initialise(1)
    chunks = build_chunks(hf_models.make_config("llama"), "seq1f1b", num_sequence_slices=2)
    with pytest.raises((ValueError, megapipe.PipelineError), match="LlamaForCausalLM sees whole sequences: leave num_"):
        hf_models.run("seq1f1b", chunks, hf_models.batches(2))


@on_ranks(2)
def test_a_mask_that_does_not_travel_is_missed(rank: int, tmp_path: Path) -> None:
    """One for each query is as large as the hidden states: it is to be read on every rank, and was passed over."""
    model, chunks = hf_models.load_both("qwen2", tmp_path, "zbv")
    mask = torch.zeros(hf_models.BATCH, 1, hf_models.SEQUENCE, hf_models.SEQUENCE)
    mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu(1), float("-inf"))[..., 4:, :4] = float("-inf")
    microbatches = count_items([batch | {"attention_mask": mask} for batch in hf_models.batches(2)])
    hf_models.compare("zbv", chunks, model, microbatches)
    with pytest.raises((ValueError, megapipe.PipelineError), match=r"stage 1 of .* was given no attention_mask, but"):
        hf_models.run("zbv", chunks, microbatches, data_iterator=_read_at_the_ends(chunks, microbatches))


def _mean(self: Any, *inputs: Any, **options: Any) -> Any:
    """A forward as in the files of some models: its loss counts nothing."""
    labels = options.pop("labels")
    output = transformers.LlamaForCausalLM.forward(self, *inputs, **options)
    output.loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return output


@pytest.mark.parametrize("kind", ["XLNetLMHeadModel", "LlamaForCausalLM", "LlamaForTokenClassification"])
def test_a_loss_that_counts_nothing_is_not_given_a_number_of_items(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLNet's is the mean over its microbatch in any case: gradients were the number of microbatches too large. So they
    were again with a model's own code that calls `cross_entropy`: whether it counts was told from names in it. The
    losses of classifiers are means, too."""
    options = {"architectures": [kind], "num_labels": hf_models.VOCABULARY}
    config = hf_kinds.make_config("xlnet") if kind.startswith("XL") else hf_models.make_config("llama", **options)
    if kind == "LlamaForCausalLM":
        own = type(kind, (transformers.LlamaForCausalLM,), {"forward": _mean})
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda config, **options: own(config))
    (chunk,) = build_chunks(config, "no_pipelining", dtype=torch.float32)
    batch = hf_models.batches(1)[0]
    assert chunk(**batch).requires_grad
    with pytest.raises(ValueError, match=f"{kind} is the mean over its microbatch"):
        chunk(**count_items([batch])[0])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (lambda: transformers.T5Config(num_layers=2), "encoder"),
        (lambda: transformers.ViTConfig(), "is no decoder with a head"),
        (lambda: hf_kinds.make_config("opt", layerdrop=0.5), "leaves out layers at random: set layerdrop=0"),
        (
            lambda: hf_models.make_config("llama", quantization_config={"quant_method": "bitsandbytes"}),
            r"its weights are quantised \(bitsandbytes\)\. Save it with model\.deq",
        ),
        *[  # a reward or value model was built as a model of language, and the weights of its head dropped
            (
                lambda head=head: hf_models.make_config("llama", architectures=[head]),
                f"{head} .* without the weights of its",
            )
            for head in ("LlamaForQuestionAnswering", "Qwen2ForTokenClassification", "LlamaForRewardModel")
        ],
    ],
)
def test_what_cannot_be_cut_is_refused(config: Any, why: str) -> None:
    with pytest.raises(CannotCutError, match=why):
        build_chunks(config(), megapipe.get_forward_backward_func("no_pipelining"))


def test_new_weights_need_memory() -> None:
    with pytest.raises(ValueError, match="device='meta' has no memory for new weights"):
        build_chunks(hf_models.make_config("llama"), "zbv", device="meta")


def test_a_config_is_the_pipelines_and_the_models() -> None:
    model_config = hf_models.make_config("qwen2")
    config = ChunkConfig(model_config, timeout=5.0)
    config.max_in_flight = 2
    config.rms_norm_eps = 0.5
    assert (config.timeout, config.vocab_size, model_config.rms_norm_eps) == (5.0, hf_models.VOCABULARY, 0.5)
    assert not hasattr(model_config, "max_in_flight")
    with pytest.raises(AttributeError):
        _ = config.nothing_of_this_name
