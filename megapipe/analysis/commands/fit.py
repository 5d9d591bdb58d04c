"""`megapipe fit`: which ways of training a model fit on so many devices, fastest first."""

from __future__ import annotations

import argparse
from typing import Any

from ...plan import Transformer, read_config
from ..fit import Estimate, Job, Layout, fit
from ..memory import bytes_in_words, parse_bytes
from .terminal import print_table, say

__all__ = ["add_fit"]

SIZES = (
    ("layers", "layers"),
    ("hidden", "hidden size"),
    ("heads", "attention heads"),
    ("vocabulary", "entries of the vocabulary"),
    ("kv-heads", "heads of keys and values; default: as many as heads"),
    ("ffn", "units of an MLP, or of one expert; default: 4 times the hidden size"),
    ("experts", "experts of a layer; default: none"),
    ("experts-per-token", "of these, for each token"),
)


LINKS = ("node_bandwidth", "bandwidth", "host_bandwidth")


def add_fit(commands: Any) -> None:
    parser = commands.add_parser(
        "fit",
        help="which ways of training a model fit, by its sizes",
        description="Predict bytes and step times of all ways to share a model out over devices, and print those that "
        "fit. By formulas and the plans of schedules: nothing was measured on a device.",
    )
    parser.add_argument("model", nargs="?", help="a config.json of Hugging Face; or give the sizes")
    sizes = parser.add_argument_group("the model, where there is no config.json")
    for name, what in SIZES:
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=what)
    sizes.add_argument("--gated", action="store_true", help="an MLP has three matrices, as in Llama")
    sizes.add_argument("--tied", action="store_true", help="the head's matrix is the embedding's")
    job = parser.add_argument_group("the job")
    for name, what in (("devices", "how many"), ("sequence", "tokens of one"), ("batch", "sequences of a step")):
        job.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    job.add_argument("--memory", required=True, metavar="SIZE", help="of a device, such as 80GB")
    job.add_argument("--flops", type=float, required=True, metavar="F", help="operations a second of a device")
    job.add_argument(
        "--efficiency", type=float, required=True, metavar="E", help="the share that your stages reach of them"
    )
    job.add_argument("--node", type=int, default=8, metavar="N", help="devices of a node; default: 8")
    job.add_argument("--node-bandwidth", metavar="SIZE", help="bytes a second of a device in its node, one way")
    job.add_argument("--bandwidth", metavar="SIZE", help="the same between nodes")
    job.add_argument(
        "--host-bandwidth",
        metavar="SIZE",
        help="the same between a device and its host's memory; none: activations are not moved there",
    )
    job.add_argument("--cp", type=int, default=1, metavar="N", help="devices that share a sequence; default: 1")
    job.add_argument(
        "--reserve", type=float, default=0.1, metavar="R", help="share of the memory kept free; default: 0.1"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many are shown; default: 10")
    parser.add_argument("--unsplit", action="store_true", help="for layers that do not defer their weight gradients")
    parser.set_defaults(run=_fit)


def _fit(args: argparse.Namespace) -> None:
    job = Job(
        _model_of(args),
        args.sequence,
        args.batch,
        args.devices,
        parse_bytes(args.memory),
        args.flops,
        args.efficiency,
        node=args.node,
        reserve=args.reserve,
        **{name: parse_bytes(size) for name in LINKS if (size := getattr(args, name))},
    )
    say(
        f"model: {job.model.weights / 1e9:.3g} billion weights; {job.batch * job.sequence:,} tokens a step on "
        f"{job.devices} devices, {bytes_in_words(job.room)} of {bytes_in_words(job.memory)} planned for"
    )
    found, smallest = fit(job, top=args.top, cp=args.cp, may_split=not args.unsplit)
    if smallest is not None:
        raise ValueError(
            f"nothing fits into {bytes_in_words(job.room)}: the smallest way found holds {_parts(smallest)} "
            f"({_name(smallest.layout)}). Take more devices, shorter sequences, or --cp."
        )
    layouts = [one.layout for one in found]
    columns = {
        "pp": [str(layout.pp) for layout in layouts],
        "dp": [str(layout.dp) for layout in layouts],
        "tp": [str(layout.tp) for layout in layouts],
        "ep": [str(layout.ep) for layout in layouts],
        "schedule": [layout.schedule + f" x{layout.chunks}" * (layout.chunks > 1) for layout in layouts],
        "microbatch": [str(layout.microbatch) for layout in layouts],
        "activations": [layout.activations for layout in layouts],
        "bytes": [bytes_in_words(one.peak) for one in found],
        "step": [f"{one.step:.3g} s" for one in found],
        "TFLOP/s": [f"{one.tflops:.0f}" for one in found],
        "most of the rest": [one.limit for one in found],
    }
    print_table(columns, ("schedule", "most of the rest"), may_go=("most of the rest", "microbatch", "TFLOP/s"))
    say(f"fastest: {_parts(found[0])}; the step is {_shares(found[0])}")
    say("bytes: of the fullest rank; TFLOP/s: of the model and a device, by formula and plan, not measured")


def _model_of(args: argparse.Namespace) -> Transformer:
    sizes = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, _ in SIZES}
    given = {name: size for name, size in sizes.items() if size is not None}
    if args.model is not None:
        if given or args.gated or args.tied:
            raise ValueError(f"{args.model} has all sizes of the model: leave out the options for them.")
        return read_config(args.model)
    needed = ("layers", "hidden", "heads", "vocabulary")
    if not set(needed) <= given.keys() or min(given.values()) < 1:
        raise ValueError("a model is a config.json, or --layers, --hidden, --heads and --vocabulary, all more than 0.")
    return Transformer(**given, gated=args.gated, tied=args.tied)


def _name(layout: Layout) -> str:
    chunks = f" with {layout.chunks} chunks" if layout.chunks > 1 else ""
    again = "" if layout.activations == "kept" else f", activations {layout.activations}"
    return f"pp {layout.pp}, dp {layout.dp}, tp {layout.tp}, ep {layout.ep}, {layout.schedule}{chunks}{again}"


def _parts(one: Estimate) -> str:
    peak, parts = max(one.ranks, key=lambda rank: rank[0])
    return f"{bytes_in_words(peak)} = " + " + ".join(f"{bytes_in_words(size)} {name}" for name, size in parts.items())


def _shares(one: Estimate) -> str:
    return " + ".join(f"{share:.0%} {name}" for name, share in one.shares.items() if share > 0.005)
