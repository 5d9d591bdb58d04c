"""Every kind of causal language model of the installed transformers, cut in three: `make test-models`.

Each is made small and random, and its stages, in a row in this process, are compared with the whole model. The result
is a table of docs/huggingface_models.md. The command fails where a kind is neither right nor refused. It is no test,
since it takes three minutes and what it finds depends on the release of transformers.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tools import hf_kinds

from megapipe.integrations.transformers import CannotCutError
from megapipe.integrations.transformers.cut_check import check_cut
from megapipe.integrations.transformers.whole_model import check_kind, has_towers, make_meta_model

PAGE = Path(__file__).parents[2] / "docs" / "huggingface_models.md"
MARK = "<!-- kinds -->"


class Line(NamedTuple):
    kind: str
    result: str
    """ "equal", "close", "refused", "not made", or "fails"."""
    why: str
    writes: str = ""
    """Whether it generates through a pipeline: "yes", or why not."""


def try_kind(kind: str) -> Line:
    try:
        config = hf_kinds.make_config(kind)
    except Exception as error:
        return Line(kind, "not made", f"no config with few layers: {_short(error)}")
    try:
        check_kind(config)
        if has_towers(config):
            return Line(kind, "not made", "it has towers: `towers_of_transformers.py` tries some of these")
        make_meta_model(config, torch.float32, "eager")
    except CannotCutError as error:
        return Line(kind, "refused", _short(error))
    except Exception as error:
        return Line(kind, "not made", f"no model of its default config: {_short(error)}")
    number = config.get_text_config().num_hidden_layers
    try:
        checked = check_cut(config, [range(1), range(1, 3), range(3, number)])
    except CannotCutError as error:
        return Line(kind, "refused", _short(error))
    except Exception as error:
        return Line(kind, "fails", _short(error))
    assert checked is not None
    writes = _short(CannotCutError(checked.flow.cannot_generate)) or "yes"
    names = {name for border in checked.flow.borders[1:] for name in (*border.takes, *border.passes)}
    also = sorted({re.sub(r" of layer \d+|\.\d+$", "", name) for name in names})
    why = "" if checked.flow.is_plain else "travel: " + ", ".join(f"`{name}`" for name in also)
    if len(also) == 1 and why:
        why = "hidden states of another shape, or tokens are read on every stage"
    if checked.difference:
        return Line(kind, "close", f"added in another order, {checked.difference:.0e}", writes)
    return Line(kind, "equal", why, writes)


def _short(error: Exception) -> str:
    text = re.sub(r"^\w+ cannot be cut into stages: ", "", " ".join(str(error).split()).replace("|", "\\|"))
    return (text if isinstance(error, CannotCutError) else f"{type(error).__name__}: {text}")[:160]


def as_table(lines: list[Line]) -> str:
    count = Counter(line.result for line in lines)
    head = (
        f"{len(lines)} kinds of transformers {transformers.__version__}: {count['equal']} equal, "
        f"{count['close']} close, "
        f"{count['refused']} refused, {count['not made']} whose whole model could not be made small, "
        f"{count['fails']} that fail. {sum(line.writes == 'yes' for line in lines)} generate.\n\n"
        "| kind | stages in a row | why | generates |\n|---|---|---|---|\n"
    )
    return head + "\n".join(f"| `{line.kind}` | {line.result} | {line.why} | {line.writes} |" for line in lines)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    begin, lines = time.monotonic(), []
    for kind in sys.argv[1:] or hf_kinds.KINDS:
        start = time.monotonic()
        lines.append(try_kind(kind))
        print(f"{time.monotonic() - start:5.1f} s  {'  '.join(lines[-1])}", flush=True)
    print(as_table(lines).splitlines()[0], f"{time.monotonic() - begin:.0f} s")
    if len(sys.argv) == 1:
        before, _, behind = PAGE.read_text().split(MARK)
        PAGE.write_text(f"{before}{MARK}\n{as_table(lines)}\n{MARK}{behind}")
    if wrong := [line for line in lines if line.result == "fails"]:
        sys.exit(f"neither right nor refused: {wrong}")


if __name__ == "__main__":
    main()
