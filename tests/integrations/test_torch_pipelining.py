"""Schedules of torch.distributed.pipelining that megapipe runs: the digits are torch's, or those of one process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as theirs
from tools.failing import heard
from tools.ranks import on_ranks, start_again
from tools.torchs import OF_ONE_CHUNK, V_SHAPED, against_torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_flatten, tree_map_only

import megapipe
from megapipe.integrations import torch_pipelining
from megapipe.integrations.torch_pipelining import adopt, get_schedule_class
from megapipe.plan import make_plan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
D, CPU = 16, torch.device("cpu")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
CLASSES = (*OF_ONE_CHUNK, "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", *SPLIT)

Wrap = Callable[[Any], Any]


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, scale: Tensor | None = None, **others: Any) -> Any:
        y: Tensor = self.outer(torch.tanh(self.inner(x)))
        return y if scale is None else y * scale


class Pipe:
    """The stages of this rank for a class of torch's, which has one or two of them."""

    def __init__(self, name: str, make: Callable[[int], nn.Module] = Layer, group: Any = None, **options: Any) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.is_single = name in OF_ONE_CHUNK
        self.num_stages = size if self.is_single else 2 * size
        second = 2 * size - 1 - rank if name in V_SHAPED else rank + size
        self.indices = [rank] if self.is_single else [rank, second]
        self.modules = [make(index) for index in self.indices]
        self.stages = [
            PipelineStage(module, index, self.num_stages, CPU, group=group, **options)
            for module, index in zip(self.modules, self.indices)
        ]
        self.is_first, self.is_last = 0 in self.indices, self.num_stages - 1 in self.indices

    def schedule(self, cls: Any, num_microbatches: int = 4, loss_fn: Any = mse_loss, **options: Any) -> Any:
        return cls(self.stages[0] if self.is_single else self.stages, num_microbatches, loss_fn=loss_fn, **options)

    def step(self, schedule: Any, x: Tensor, y: Tensor, run: str = "step", **options: Any) -> Any:
        """What `step` or `eval` returns, and the losses."""
        losses: list[Tensor] | None = [] if self.is_last else None
        batch = [x] if self.is_first else []
        output = getattr(schedule, run)(*batch, target=y if self.is_last else None, losses=losses, **options)
        return output, losses

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for module in self.modules for parameter in module.parameters()]


def data(size: int = 8, *shape: int) -> Tensor:
    return torch.randn(2, size, *(shape or (D,)), generator=torch.Generator().manual_seed(9))


def assert_same(found: Any, expected: Any, what: str) -> None:
    ours, theirs = (tree_flatten(tree_map_only(DTensor, DTensor.to_local, one)) for one in (found, expected))
    assert ours[1] == theirs[1], what
    for one, other in zip(ours[0], theirs[0]):
        is_same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert is_same, f"{what}: {one} instead of {other}"


def as_it_is(schedule: Any) -> Any:
    return schedule


def same_as_torch(run: Callable[..., Any], *args: Any) -> None:
    """`run` is called with `args`, and with what wraps a schedule."""
    assert_same(run(*args, adopt), run(*args, as_it_is), f"{run.__name__} {args}")


def gradients_of_one_process(
    pipe: Pipe, num_microbatches: int, x: Tensor, y: Tensor, make: Callable[[int], nn.Module] = Layer
) -> list[Tensor | None]:
    """Those of this rank's stages."""
    whole = [make(index) for index in range(pipe.num_stages)]
    for output, target in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches)):
        for module in whole:
            output = module(output)
        mse_loss(output, target).backward()
    parameters = [parameter for index in pipe.indices for parameter in whole[index].parameters()]
    return [None if one.grad is None else one.grad / num_microbatches for one in parameters]


# Against torch's own


@against_torch
@on_ranks(2)
def test_every_class_has_torchs_digits(rank: int) -> None:
    """Half of them scale gradients."""

    def run(name: str, wrap: Wrap, **options: Any) -> Any:
        pipe, (x, y) = Pipe(name), data()
        schedule = wrap(pipe.schedule(getattr(theirs, name), **options))
        assert isinstance(schedule, getattr(theirs, name))
        return [pipe.step(schedule, x, y) for _ in range(2)], pipe.gradients()

    for number, name in enumerate(CLASSES):
        ours, gradients = run(name, adopt, scale_grads=number % 2 == 0)
        expected, torchs = run(name, as_it_is, scale_grads=number % 2 == 0)
        assert_same(ours, expected, name)
        if name == "ScheduleLoopedBFS":  # torch runs its backwards last to first, and so adds them up
            torch.testing.assert_close(gradients, torchs, rtol=1e-4, atol=1e-6)
        else:
            assert_same(gradients, torchs, name)


def steps(
    name: str,
    wrap: Wrap,
    make: Callable[[int], nn.Module] = Layer,
    num_steps: int = 2,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Some steps without zero_grad, by a schedule of torch's with these options: torch divides what was there once
    more."""
    pipe, (x, y) = Pipe(name, make), data()
    schedule = wrap(pipe.schedule(getattr(theirs, name), **options))
    return [pipe.step(schedule, x, y, **(given or {})) for _ in range(num_steps)], pipe.gradients()


def eval_and_train(name: str, wrap: Wrap) -> Any:
    pipe, (x, y) = Pipe(name), data()
    schedule = wrap(pipe.schedule(getattr(theirs, name)))
    first = pipe.step(schedule, x, y, "eval")
    assert pipe.gradients() == [None] * len(pipe.gradients())
    with torch.no_grad():
        second = pipe.step(schedule, x, y, "eval")
    return first, second, pipe.step(schedule, x, y, return_outputs=False), pipe.gradients()


def keywords(name: str, wrap: Wrap) -> Any:
    return steps(
        name, wrap, num_steps=3, given={"scale": data()[1][:, :1], "note": 3, "loss_kwargs": {"reduction": "sum"}}
    )


def specs(name: str, wrap: Wrap) -> Any:
    """The batch in dimension 1, a keyword that is whole in each microbatch, and outputs merged."""
    pipe, (x, y) = Pipe(name), data(3, 8, D)
    options = {"args_chunk_spec": (TensorChunkSpec(1),), "output_merge_spec": TensorChunkSpec(1)}
    loss_fn = lambda output, target: mse_loss(output.transpose(0, 1), target)  # noqa: E731
    schedule = wrap(pipe.schedule(getattr(theirs, name), loss_fn=loss_fn, **options))
    schedule._kwargs_chunk_spec = {"scale": _Replicate}  # as Automodel does
    found = [pipe.step(schedule, x, y.transpose(0, 1), scale=torch.full((1,), 2.0)) for _ in range(2)]
    return found, pipe.gradients()


class WithMask(Layer):
    """Gives the next stage two tensors, one of whole numbers."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        mask = (x[:, 0] > 0).long() if mask is None else mask
        return super().forward(x) * mask[:, None].float(), mask


def tuples(name: str, wrap: Wrap) -> Any:
    return steps(name, wrap, WithMask, loss_fn=lambda outputs, target: mse_loss(outputs[0], target))


def frozen(name: str, wrap: Wrap) -> Any:
    return steps(name, wrap, lambda index: Layer(index).requires_grad_(index > 0))


@against_torch
@on_ranks(2)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_steps_of_all_sorts_have_torchs_digits(rank: int, name: str) -> None:
    for case in (eval_and_train, keywords, specs, tuples, *[frozen] * (name not in SPLIT)):
        same_as_torch(case, name)


class Ordered(theirs._PipelineScheduleRuntime):
    """Has an order of its own, as schedules derived from torch's do."""

    rows: tuple[str, ...]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        order = {rank: [theirs._Action.from_str(cell) for cell in row.split()] for rank, row in enumerate(self.rows)}
        self._prepare_schedule_with_comms(order)  # type: ignore[arg-type]
        self.pipeline_order = order  # type: ignore[assignment]


class VShaped(Ordered):
    rows = ("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")


class WithWeights(Ordered):
    rows = ("0F0 0F1 2F0 2F1 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1", "1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1")


class Logged(theirs.ScheduleInterleaved1F1B):
    """Has a step of its own, and the order of its base."""

    def step(self, *args: Any, **options: Any) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return super().step(*args, **options)


def run_with_order(cls: Any, wrap: Wrap) -> Any:
    pipe, (x, y) = Pipe("ScheduleZBVZeroBubble" if cls is VShaped else cls.__name__), data()
    schedule = wrap(pipe.schedule(cls, 2))
    result = [pipe.step(schedule, x, y) for _ in range(2)], pipe.gradients()
    assert getattr(schedule, "num_steps", 2) == 2
    return result


def run_from_csv(name: str, folder: Path, before: bool, wrap: Wrap) -> Any:
    """`before`: the file is loaded before the schedule is adopted."""
    pipe, (x, y) = Pipe(name), data()
    made = pipe.schedule(getattr(theirs, name))
    results = []
    for form in ("compute_only", "compute_comms"):
        path = folder / f"{dist.get_rank()}.csv"
        made._dump_csv(path, format=form)
        schedule = theirs._PipelineScheduleRuntime(pipe.stages, 4, loss_fn=mse_loss)
        schedule = schedule if before else wrap(schedule)
        schedule._load_csv(str(path), format=form)  # type: ignore[arg-type]
        schedule = wrap(schedule) if before else schedule
        results.append(pipe.step(schedule, x, y))
    return results, pipe.gradients()


@against_torch
@on_ranks(2)
def test_orders_are_run_as_they_are(rank: int, tmp_path: Path) -> None:
    for cls in (VShaped, WithWeights, Logged):
        same_as_torch(run_with_order, cls)
    for name, before in (("ScheduleInterleaved1F1B", True), ("ScheduleZBVZeroBubble", False)):
        same_as_torch(run_from_csv, name, tmp_path, before)


class Chain(nn.Module):
    """Cut before each layer but the first. The first stage returns what no stage takes, and if `skips` what the last
    one takes."""

    def __init__(self, num_layers: int, skips: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(num_layers)))
        self.skips = skips

    def forward(self, x: Tensor, y: Tensor) -> Any:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x + y)
        return x + first if self.skips else (x, first.sin())


def traced(model: Chain, rank: int) -> Any:
    x, y = data()
    spec = {f"layers.{index}": pipelining.SplitPoint.BEGINNING for index in range(1, len(model.layers))}
    return pipelining.pipeline(model, mb_args=(x[:2], y[:2]), split_spec=spec).build_stage(rank, CPU)


@against_torch
@on_ranks(2)
def test_traced_stages(rank: int) -> None:
    """A stage is called with those outputs of the stage before that it takes."""

    def run(wrap: Wrap) -> Any:
        (x, y), stage = data(), traced(Chain(2), rank)
        schedule = wrap(theirs.Schedule1F1B(stage, 4, loss_fn=lambda outputs, target: mse_loss(outputs[0], target)))
        losses: list[Tensor] = []
        keywords = {} if rank == 0 else {"target": y, "losses": losses}
        outputs = [schedule.step(*[x, y] * (rank == 0), **keywords) for _ in range(2)]
        return outputs, losses, [one.grad for one in stage.submod.parameters()]

    same_as_torch(run)


@against_torch
@on_ranks(2)
def test_dtensors_between_stages(rank: int) -> None:
    """torch asks `get_mesh` for the mesh of what it has received."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))

    class Spread(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None, **others: Any) -> Any:
            if not isinstance(x, DTensor):
                x = distribute_tensor(x, mesh["tp"], [Shard(0)])
            y = super().forward(x)
            return y if self.ends else y.redistribute(placements=[Shard(1)])

    def make(index: int) -> nn.Module:
        layer = Spread(index)
        layer.ends = index == 3  # type: ignore[assignment]
        for module in (layer.inner, layer.outer):
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [Replicate()])))
        return layer

    def run(wrap: Wrap) -> Any:
        own = {"group": mesh.get_group("pp"), "get_mesh": lambda names, layout: mesh["tp"]}
        pipe, (x, y) = Pipe("ScheduleInterleaved1F1B", make, **own), data()
        loss_fn = lambda output, target: mse_loss(output.full_tensor(), target)  # noqa: E731
        schedule = wrap(pipe.schedule(theirs.ScheduleInterleaved1F1B, loss_fn=loss_fn))
        return [pipe.step(schedule, x, y) for _ in range(2)], pipe.gradients()

    same_as_torch(run)


# Against one process


def gives_gradients_of_one_process(pipe: Pipe, cls: Any, num_microbatches: int, size: int = 15) -> None:
    x, y = data(size)
    output, losses = pipe.step(pipe.schedule(cls, num_microbatches), x, y)
    assert_same(pipe.gradients(), gradients_of_one_process(pipe, num_microbatches, x, y), f"{cls.__name__}")
    assert losses is None or (len(losses), output.shape) == (num_microbatches, (size, D))


@on_ranks(2)
def test_any_number_of_microbatches(rank: int) -> None:
    """torch takes no fewer than there are stages under some schedules, and multiples under others. Nor does it take
    batches that do not divide."""
    for name in CLASSES:
        for num_microbatches in (1, 5):
            gives_gradients_of_one_process(Pipe(name), getattr(torch_pipelining, name), num_microbatches)
    pipe, (x, y) = Pipe("Schedule1F1B"), data(15)
    schedule = adopt(pipe.schedule(theirs.Schedule1F1B))
    for num_microbatches in (4, 2, 5):
        schedule._n_microbatches = num_microbatches
        assert len(pipe.step(schedule, x, y)[1] or [None] * num_microbatches) == num_microbatches


@on_ranks(2)
def test_our_schedules_by_name(rank: int, tmp_path: Path) -> None:
    assert get_schedule_class("1f1b") is get_schedule_class("Schedule1F1B") is torch_pipelining.Schedule1F1B
    assert get_schedule_class("interleavedzerobubble") is torch_pipelining.ScheduleInterleavedZeroBubble
    assert get_schedule_class("zbv") is torch_pipelining.ScheduleZBVZeroBubble
    assert issubclass(get_schedule_class("zb1p"), theirs.PipelineScheduleSingle)
    make_plan("v_min", 2, 5).save_json(path := tmp_path / f"{rank}.json")
    for name, like in (("V-Half", "ScheduleZBVZeroBubble"), (str(path), "ScheduleZBVZeroBubble")):
        assert issubclass(get_schedule_class(name), theirs.PipelineScheduleMulti)
        gives_gradients_of_one_process(Pipe(like), get_schedule_class(name), 5)
    for name, like in (("combined_1f1b", "ScheduleInterleaved1F1B"), ("zb1p", "Schedule1F1B")):
        gives_gradients_of_one_process(Pipe(like), get_schedule_class(name), 5)
    with pytest.raises(ValueError, match=r"no schedule 'interleved1f1b' \(do you mean 'interleaved_1f1b'\?\)"):
        get_schedule_class("interleved1f1b")


def sharded(mesh: Any, reshard_after_forward: bool | None) -> Callable[[int], nn.Module]:
    """`fully_shard` is called for both linear layers of a stage, and for the stage."""
    from torch.distributed.fsdp import fully_shard

    def make(index: int) -> nn.Module:
        layer = Layer(index)
        for module in (layer.inner, layer.outer, layer):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
        return layer

    return make


def gradients_of_sharded(cls: Any, reshard_after_forward: bool | None, mesh: Any, num_steps: int = 1) -> Any:
    """What the gradients are, and what they should be."""
    pipe, (x, y) = Pipe(cls.__name__, sharded(mesh, reshard_after_forward), mesh.get_group("pp")), data()
    schedule = pipe.schedule(cls)
    for _ in range(num_steps):
        for module in pipe.modules:
            module.zero_grad()
        pipe.step(schedule, x, y)
    found = [None if one is None else one.full_tensor() for one in pipe.gradients()]
    return found, gradients_of_one_process(pipe, 4, x, y)


@on_ranks(4)
def test_fully_shard_at_its_default(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found, expected = gradients_of_sharded(torch_pipelining.ScheduleDualPipeV, None, mesh, num_steps=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@against_torch
@on_ranks(2)
def test_adopted_between_steps(rank: int) -> None:
    """torch's step leaves sharded modules told not to reduce their gradients."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    pipe, (x, y) = Pipe("Schedule1F1B", sharded(mesh, None), mesh.get_group("pp")), data()
    schedule = pipe.schedule(theirs.Schedule1F1B)
    gradients = []
    for get in (lambda: schedule, lambda: adopt(schedule), lambda: pipe.schedule(theirs.Schedule1F1B)):
        for module in pipe.modules:
            module.zero_grad()
        pipe.step(get(), x + rank, y)
        gradients.append([one.full_tensor() for one in pipe.gradients()])  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-4, atol=1e-6)


WRONG = {(2, 13), (2, 15)}
"""Versions of torch whose split backward was seen to lose gradients, without an error."""


def is_close(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected)
    return all(a is b if a is None or b is None else torch.allclose(a, b, 1e-3, 1e-5) for a, b in pairs)


@pytest.mark.skipif(TORCH not in WRONG, reason="not looked at")
@on_ranks(2)
def test_torchs_own_split_backward_is_wrong(rank: int) -> None:
    """Where this fails, torch has mended it: docs/comparison.md says since which version, and WRONG lacks that."""
    name = "ScheduleInterleavedZeroBubble"
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    assert is_close(*gradients_of_sharded(getattr(theirs, name), False, mesh))
    assert not is_close(*gradients_of_sharded(getattr(theirs, name), None, mesh))
    make = lambda index: Layer(index).requires_grad_(index > 0)  # noqa: E731
    pipe, (x, y) = Pipe(name, make), data()
    pipe.step(pipe.schedule(getattr(theirs, name)), x, y)
    expected = gradients_of_one_process(pipe, 4, x, y, make)
    assert rank == 0 or (pipe.gradients()[:4] == [None] * 4 and None not in expected)
    pipe = Pipe(name, make)
    pipe.step(pipe.schedule(torch_pipelining.ScheduleInterleavedZeroBubble), x, y)
    assert_same(pipe.gradients(), expected, "frozen")


# What trainers and scripts do


@on_ranks(2)
def test_trainers_set_things_afterwards(rank: int) -> None:
    """A loss function, a module in the place of another, longer sequences behind a reset, as Automodel makes it, lists
    of microbatches, as torchtitan passes them, and the eval of a teacher."""
    name = "ScheduleInterleavedZeroBubble"
    pipe, (x, y) = Pipe(name), data()
    schedule = adopt(pipe.schedule(getattr(theirs, name), loss_fn=None))
    output, losses = pipe.step(schedule, x, y)
    assert not losses
    assert output is None or output.shape == (8, D)
    assert pipe.gradients() == [None] * len(pipe.gradients())
    schedule._loss_fn, schedule._has_backward = mse_loss, True
    pipe.step(schedule, x, y)
    assert_same(pipe.gradients(), gradients_of_one_process(pipe, 4, x, y), "loss")
    for stage, module in zip(pipe.stages, pipe.modules):
        module.zero_grad()
        stage.submod = nn.Sequential(module)
    longer, target = data(12)
    for flag in [name for name in vars(schedule) if name.endswith("_initialized")]:
        setattr(schedule, flag, False)
    with torch.inference_mode():
        pipe.step(schedule, longer, target, "eval")
    losses = []
    schedule.step(
        arg_mbs=[(one,) for one in longer.chunk(4)] if rank == 0 else None,
        kwarg_mbs=[{}] * 4,
        target_mbs=list(target.chunk(4)) if rank == 1 else None,
        losses=losses if rank == 1 else None,
        return_outputs=False,
        loss_kwargs={"reduction": "sum"} if TORCH >= (2, 12) else None,
    )
    assert len(losses) == 4 * rank
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"arg_mbs|lists"):
        schedule.step(x, arg_mbs=[(x,)])


class Own(nn.Linear):
    """Inherits its forward, as torchtitan's linear layers do."""


@on_ranks(2)
def test_w_has_the_gradients_of_linear_layers(rank: int) -> None:
    def make(index: int) -> nn.Module:
        layer = Layer(index)
        layer.outer.__class__ = Own
        return layer

    for convert in (False, True):
        pipe, (x, y) = Pipe("ScheduleZBVZeroBubble", make), data()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(adopt(pipe.schedule(theirs.ScheduleZBVZeroBubble), convert=convert), x, y)
        unsplit = [one for one in caught if one.category is megapipe.UnsplitBackwardWarning]
        assert len(unsplit) == (not convert and rank == 0)
        assert all(one.filename == __file__ for one in unsplit), "the warning points at the line that called step"
        assert isinstance(pipe.modules[0].inner, megapipe.weight_grad.Linear) == convert
        assert isinstance(pipe.modules[0].outer, megapipe.weight_grad.Linear) == convert
        assert_same(pipe.gradients(), gradients_of_one_process(pipe, 4, x, y), f"convert={convert}")


@on_ranks(2)
def test_settings(rank: int) -> None:
    """Batches of other sizes are refused with a remedy, which is a setting; and timelines are recorded."""
    pipe = Pipe("Schedule1F1B")
    made = pipe.schedule(theirs.Schedule1F1B)
    recorder = megapipe.TimelineRecorder()
    schedule = adopt(made, config=megapipe.PipelineConfig(variable_seq_lengths=True, record_timeline=recorder))
    for size in (8, 16, 10):
        pipe.step(schedule, *data(size))
    assert schedule is made
    assert len(recorder.gather(dist.group.WORLD).steps) == 3
    assert adopt(schedule) is schedule
    pipe.step(schedule, *data(8))
    text = heard(lambda: pipe.step(schedule, *data(16)), ValueError)
    assert re.search(
        r"stage 0 returned float32\[4, 16\] for microbatch 0, but stage 1 expects .*variable_seq_lengths", text
    )


# What is refused


class Unbalanced(Ordered):
    rows = ("0F0 1F0 3F0 3B0 1B0 0B0", "2F0 2B0")


def own_step(schedule: Any, *microbatches: Any, **others: Any) -> None:
    """Of a schedule that runs microbatches by itself."""


@on_ranks(2)
def test_what_would_not_be_called_is_refused(rank: int) -> None:
    def refused(text: str, change: Callable[[Any, Any], Any], cls: Any = theirs.ScheduleInterleavedZeroBubble) -> None:
        pipe = Pipe(cls.__name__ if cls.__name__ in CLASSES else "ScheduleInterleaved1F1B")
        schedule = pipe.schedule(cls)
        change(schedule, pipe.stages[0])
        with pytest.raises((NotImplementedError, ValueError), match=text):
            adopt(schedule)

    refused(f"stage {rank} has a dw_builder", lambda _, stage: setattr(stage, "dw_builder", lambda: lambda: None))
    for name in ("backward_maybe_with_nosync", "forward_one_chunk"):
        refused(f"stage {rank} has another {name} than torch's, from test", lambda _, s: setattr(s, name, own_step))  # noqa: B023
    if hasattr(theirs._PipelineScheduleRuntime, "register_custom_function"):
        forward = theirs.FORWARD
        refused("register_custom_function", lambda one, _: one.register_custom_function(forward, own_step))
    own = type("ScheduleGPipe", (theirs.ScheduleGPipe,), {"_step_microbatches": own_step})
    refused("ScheduleGPipe runs microbatches by its own _step_microbatches", no_change, own)
    pipe = Pipe("ScheduleInterleaved1F1B")
    with pytest.raises(ValueError, match="_PipelineScheduleRuntime has no order to run: call _load_csv"):
        pipe.step(adopt(pipe.schedule(theirs._PipelineScheduleRuntime)), *data())
    indices = [0, 1, 3] if rank == 0 else [2]
    unbalanced = Unbalanced([PipelineStage(Layer(index), index, 4, CPU) for index in indices], 1, loss_fn=mse_loss)
    with pytest.raises(ValueError, match=r"the stages \[\[0, 1, 3\], \[2\]\] of the ranks are no placement"):
        adopt(unbalanced).step(*[data()[0]] * (rank == 0), target=data()[1])
    with pytest.raises(NotImplementedError, match="stage 2 takes an output of stage 0"):
        adopt(theirs.Schedule1F1B(traced(Chain(3, skips=True), 2), 4))
    with pytest.raises(TypeError, match=r"takes a schedule of torch\.distributed\.pipelining, got a str"):
        adopt("1f1b")
    with pytest.raises(TypeError, match=r"must be a megapipe\.PipelineConfig or None, got a dict"):
        adopt(Pipe("Schedule1F1B").schedule(theirs.Schedule1F1B), config={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave num_sequence_slices at 1"):
        adopt(Pipe("Schedule1F1B").schedule(theirs.Schedule1F1B), config=megapipe.PipelineConfig(num_sequence_slices=2))


def no_change(schedule: Any, stage: Any) -> None:
    """The schedule is as it was made."""


@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_told_to_all(rank: int) -> None:
    def lacks_target(pipe: Pipe, schedule: Any) -> Any:
        return schedule.step(*[data()[0]] * pipe.is_first)

    def is_patched(pipe: Pipe, schedule: Any) -> Any:
        if rank == 0:
            pipe.stages[0].backward_one_chunk = own_step  # type: ignore[method-assign]
        return pipe.step(schedule, *data())

    def fails(pipe: Pipe, schedule: Any) -> Any:
        if rank == 1:
            pipe.modules[0].forward = None  # type: ignore[assignment]
        return pipe.step(schedule, *data())

    texts = {lacks_target: "with target= there", is_patched: "another backward_one", fails: "not callable"}
    for call, text in texts.items():
        pipe = Pipe("Schedule1F1B")
        schedule = adopt(pipe.schedule(theirs.Schedule1F1B))
        assert re.search(text, heard(lambda: call(pipe, schedule), ValueError, NotImplementedError, TypeError))  # noqa: B023
        start_again()
    pipe = Pipe("ScheduleInterleaved1F1B")  # stages in a loop
    schedule = get_schedule_class("v_half")(pipe.stages, 4, loss_fn=mse_loss)
    with pytest.raises(ValueError, match=r"a chunk was made for stage [23] of 4, but the schedule runs it as stage"):
        pipe.step(schedule, *data())


@on_ranks(3)
def test_a_placement_that_fits_one_rank_only_is_refused_on_all(rank: int) -> None:
    """Rank 1 of three has the same stages in a loop as in a V."""
    pipe = Pipe("ScheduleInterleaved1F1B")
    schedule = torch_pipelining.ScheduleZBVZeroBubble(pipe.stages, 4, loss_fn=mse_loss)
    assert "but the schedule runs it as stage" in heard(lambda: pipe.step(schedule, *data()), ValueError)
