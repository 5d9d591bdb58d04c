"""Classifiers of torchvision and timm, cut by `split` into 2 and into 4 stages: `make test-images`.

One of each family is made, with random weights and small images. Its stages run two microbatches in this process, with
dropout and stochastic depth, and with messages as they are between ranks. They are compared with the whole model, in
float32 and under autocast: losses, gradients, all buffers, and the losses of an evaluation. The result is a table of
docs/images.md. The command fails where a model is neither right nor refused. It is no test, since it takes a quarter of
an hour.
"""

from __future__ import annotations

import copy
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import megapipe
from megapipe import CannotSplitError

try:
    import torchvision
except RuntimeError:  # made for torch with CUDA: beside another one it lacks operators, which no classifier calls
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision
import timm

PAGE = Path(__file__).parents[2] / "docs" / "images.md"
MARK = "<!-- models -->"
NAMES = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3:299 maxvit_t:224
    mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnet50 shufflenet_v2_x0_5 squeezenet1_0
    swin_t swin_v2_t vgg11_bn vit_b_16:224
    timm/cait_xxs24_224:224 timm/convnextv2_atto timm/edgenext_xx_small timm/eva02_tiny_patch14_224:224
    timm/ghostnet_100 timm/levit_128s:224 timm/mixer_s32_224:224 timm/mobilenetv4_conv_small timm/nf_regnet_b0
    timm/pvt_v2_b0 timm/resnet26d timm/swin_tiny_patch4_window7_224:224 timm/vit_tiny_patch16_224:224
"""
"""Behind a colon: the size of images, where the model takes no small ones."""


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("timm/"):
        try:
            return timm.create_model(name.removeprefix("timm/"), num_classes=10, drop_rate=0.1, drop_path_rate=0.1)
        except TypeError:  # it has no stochastic depth
            return timm.create_model(name.removeprefix("timm/"), num_classes=10, drop_rate=0.1)
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}  # which is slow
    return torchvision.models.get_model(name, num_classes=10, **options)


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Some models give the logits of auxiliary classifiers too."""
    outputs = [output] if torch.is_tensor(output) else output
    return sum((F.cross_entropy(one.float(), labels) for one in outputs), torch.zeros(()))


def forward_step(batches: Iterator[Any], chunk: nn.Module) -> Any:
    images, labels = next(batches)
    return chunk(images), lambda output: (loss := loss_of(output, labels), loss.detach())


class Sent(torch.autograd.Function):
    """What a message between ranks is: plain memory, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.contiguous().view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def send(module: nn.Module, _: Any, output: Any) -> Any:
    return pytree.tree_map(lambda one: Sent.apply(one) if torch.is_tensor(one) else one, output)


def run_stages(chunks: list[Any], batches: list[Any], forward_only: bool) -> list[Tensor]:
    torch.manual_seed(1)
    train = megapipe.get_forward_backward_func("no_pipelining")
    options = {"data_iterator": iter(batches), "num_microbatches": len(batches), "forward_only": forward_only}
    return train(forward_step_func=forward_step, model=chunks, **options)  # type: ignore[no-any-return]


def run_whole(model: nn.Module, batches: list[Any], autocast: bool, forward_only: bool) -> list[Tensor]:
    torch.manual_seed(1)
    losses = []
    with torch.set_grad_enabled(not forward_only):
        for images, labels in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(images)
            loss = loss_of(output, labels)
            losses.append(loss.detach())
            if not forward_only:
                (loss / len(batches)).backward()
    return losses


def try_model(name: str, size: int, num_stages: int, autocast: bool) -> str:
    model = make_model(name)
    batches = [(torch.randn(2, 3, size, size), torch.randint(10, (2,))) for _ in range(2)]
    config = megapipe.PipelineConfig(enable_autocast=autocast, autocast_dtype=torch.bfloat16)
    options = {"num_chunks": num_stages, "config": config}
    try:
        chunks = megapipe.split(copy.deepcopy(model), batches[0][0], "no_pipelining", **options)
    except CannotSplitError as error:
        return "refused: " + " ".join(str(error).split()).replace("|", "\\|")[:300]
    for chunk in chunks[:-1]:
        chunk.module.register_forward_hook(send)
    parameters = {name: one for chunk in chunks for name, one in chunk.named_parameters()}
    buffers = {name: one for chunk in chunks for name, one in chunk.named_buffers()}
    most = 0.0
    for training in (True, False):
        for one in (model, *chunks):
            one.train(training).zero_grad()
        found, wanted = run_stages(chunks, batches, not training), run_whole(model, batches, autocast, not training)
        gradients = [(parameters[name].grad, one.grad) for name, one in model.named_parameters()]
        largest = max((float(one.abs().max()) for _, one in gradients if one is not None), default=1.0)
        pairs = [*zip(found, wanted), *gradients, *((buffers[name], one) for name, one in model.named_buffers())]
        most = max(most, *(difference(*pair) / largest for pair in pairs))
    return "equal" if most == 0.0 else f"{'fails by ' if most > 1e-2 else ''}{most:.0e}"


def difference(one: Tensor | None, other: Tensor | None) -> float:
    """0 only where both are equal to the last bit."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if torch.equal(one, other):
        return 0.0
    return max(float((one - other).abs().max()), 1e-99)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.backends.mha.set_fastpath_enabled(False)  # of nn.MultiheadAttention in evaluation, which rounds otherwise
    lines, begin = [], time.process_time()
    for entry in sys.argv[1:] or NAMES.split():
        name, _, size = entry.partition(":")
        results = []
        for num_stages, autocast in ((2, False), (4, False), (4, True)):
            start = time.process_time()
            try:
                results.append(try_model(name, int(size or 64), num_stages, autocast))
            except Exception as error:
                results.append(f"fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print(
                f"{time.process_time() - start:5.1f} s  {name} {num_stages} {'autocast' * autocast}  {results[-1]}",
                flush=True,
            )
        lines.append(f"| `{name}` | {' | '.join(results)} |")
    print(f"{time.process_time() - begin:.0f} s of processor time")
    if len(sys.argv) == 1:
        before, _, behind = PAGE.read_text().split(MARK)
        equal = sum(line.count("| equal") == 3 for line in lines)
        versions = [f"{one.__name__} {one.__version__.partition('+')[0]}" for one in (torchvision, timm, torch)]
        head = f"{len(lines)} models of {versions[0]} and {versions[1]}, with {versions[2]}: {equal} equal."
        table = "\n".join([head, "", "| model | 2 stages | 4 stages | 4, autocast |", "|---|---|---|---|", *lines])
        PAGE.write_text(f"{before}{MARK}\n{table}\n{MARK}{behind}")
    if wrong := [line for line in lines if "fails" in line]:
        sys.exit(f"neither right nor refused: {wrong}")


if __name__ == "__main__":
    main()
