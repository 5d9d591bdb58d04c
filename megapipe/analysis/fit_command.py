"""`megapipe fit`: which ways of training a model fit on so many devices, fastest first."""

from __future__ import annotations

import argparse
import json

from ..plan import nearest
from .command_options import parse_bytes, speeds_of
from .fit import Estimate, fit
from .fit_job import Job
from .models import NAMES, by_numbers, read_config
from .progress import doing
from .text import bytes_in_words, print_table, say
from .transformer import Transformer

LINKS = ("node_bandwidth", "bandwidth", "host_bandwidth")
OWN = {"pp": "pp", "tp": "tp", "ep": "ep", "vp": "chunks", "microbatch": "microbatch"}
"""The options of a layout of one's own, with the names of their sizes."""


def fit_command(args: argparse.Namespace) -> None:
    speeds = speeds_of(args.speeds) or [1.0]
    doing("building the model, without weights, to count it")
    job = Job(
        _model_of(args.model),
        args.sequence,
        args.batch,
        args.devices,
        list(map(parse_bytes, args.memory)),
        args.flops,
        args.efficiency,
        node=args.node,
        reserve=args.reserve,
        speeds=speeds,
        expert_efficiency=args.expert_efficiency,
        fp8_flops=args.fp8_flops,
        **{name: parse_bytes(size) for name in LINKS if (size := getattr(args, name))},
    )
    say(
        f"model: {_weights(job.model)}; {job.batch * job.sequence:,} tokens a step on "
        f"{job.devices} devices, {1 - job.reserve:.0%} of {', '.join(args.memory)} planned for"
    )
    own = {size: number for name, size in OWN.items() if (number := getattr(args, name))}
    found, smallest = fit(job, top=args.top, cp=args.cp, may_split=not args.unsplit, own=own)
    if smallest is not None:
        raise ValueError(
            f"nothing fits: the smallest way found holds {_parts(smallest)} ({_name(smallest)}). Take more devices, "
            "shorter sequences, or --cp."
        )
    layouts = [one.layout for one in found]
    columns = {
        **{name: [str(getattr(layout, name)) for layout in layouts] for name in ("pp", "dp", "tp", "ep")},
        "schedule": [layout.schedule + f" x{layout.chunks}" * (layout.chunks > 1) for layout in layouts],
        "layers": [_layers(one) for one in found] if job.is_uneven else [],
        "microbatch": [str(layout.microbatch) for layout in layouts],
        "activations": [layout.activations for layout in layouts],
        "bytes": [bytes_in_words(one.peak) for one in found],
        "step": [f"{one.step:.3g} s" for one in found],
        "TFLOP/s": [f"{one.tflops:.0f}" for one in found],
        "most of the rest": [one.limit for one in found],
    }
    print_table(
        columns, ("schedule", "most of the rest"), may_go=("microbatch", "TFLOP/s", "most of the rest", "ep", "layers")
    )
    say(
        f"fastest: {_parts(found[0])}; the step is {_shares(found[0])}"
        + f"; layers {_layers(found[0])}" * job.is_uneven
    )
    say("bytes: of the fullest rank; TFLOP/s: of the model and a device, by formula and plan, not measured")


def _model_of(given: list[str]) -> Transformer:
    if len(given) == 1 and "=" not in given[0]:
        return read_config(given[0])
    numbers = dict(pair.partition("=")[::2] for pair in given)
    if unknown := [name for name in numbers if name not in NAMES]:
        meant = nearest(unknown[0], {name: name for name in NAMES})
        raise ValueError(
            f"{unknown[0]!r} is no number of a model"
            + (f": do you mean {meant}?" if meant else f", but {', '.join(NAMES)}.")
        )
    try:
        return by_numbers({name: json.loads(text) for name, text in numbers.items()}, " ".join(given) or "nothing")
    except json.JSONDecodeError:
        raise ValueError(f"{' '.join(given)}: numbers of a model are written as NAME=NUMBER, with no spaces.") from None


def _weights(model: Transformer) -> str:
    active = f", {model.active_weights / 1e9:.3g} of them for a token" if model.experts else ""
    return f"{model.weights / 1e9:.3g} billion weights{active}"


def _layers(one: Estimate) -> str:
    return " ".join(map(str, one.sizes))


def _name(one: Estimate) -> str:
    layout = one.layout
    chunks = f" with {layout.chunks} chunks" if layout.chunks > 1 else ""
    again = "" if layout.activations == "kept" else f", activations {layout.activations}"
    return f"pp {layout.pp}, dp {layout.dp}, tp {layout.tp}, ep {layout.ep}, {layout.schedule}{chunks}{again}"


def _parts(one: Estimate) -> str:
    peak, parts = max(one.ranks, key=lambda rank: rank[0])
    return f"{bytes_in_words(peak)} = " + " + ".join(f"{bytes_in_words(size)} {name}" for name, size in parts.items())


def _shares(one: Estimate) -> str:
    return " + ".join(f"{share:.0%} {name}" for name, share in one.shares.items() if share > 0.005)
