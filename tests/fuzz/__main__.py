"""Random cases against the unpartitioned model: `make fuzz`, or

    python tests/fuzz --minutes 10 --seed 1

Every second one is a forward of forwards.py. What a case is depends on the seed and its number alone, and on what this
torch can do. One that is wrong is tried with fewer features or lines, and printed with the command that runs it again
by itself: python tests/fuzz "Case(...)".
"""

import argparse
import random
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

import cases  # noqa: E402
import torch  # noqa: E402
from cases import parts  # noqa: E402
from fuzz import forwards  # noqa: E402
from tools.ranks import RankPool  # noqa: E402

MAY_TAKE = 20  # seconds of a case that is tried again with less


AnyCase = cases.Case | forwards.Forward


def run(pool: RankPool, case: AnyCase) -> str | None:
    """What was wrong with it, if anything."""
    return forwards.run_forward(case) if isinstance(case, forwards.Forward) else cases.run_case(pool, case)


def shrink(pool: RankPool, case: AnyCase, text: str) -> tuple[AnyCase, str]:
    """Without the features that it is wrong without."""
    for feature in reversed(case.features):
        less, begin = case.without(feature), time.monotonic()
        if (still := run(pool, less)) is not None:
            case, text = less, still
        if time.monotonic() - begin > MAY_TAKE:
            break
    return case, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", help="only this one, as it was printed")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: another one each time")
    args = parser.parse_args()
    pool = RankPool()
    torch.set_num_threads(1)  # as on the ranks
    if args.case is not None:
        text = run(pool, eval(args.case, vars(cases) | vars(parts) | vars(forwards)))
        pool.stop()
        sys.exit(text)
    print(f"seed {args.seed}", flush=True)
    end = time.monotonic() + 60 * args.minutes
    seen: Counter[str] = Counter()
    number = num_wrong = 0
    while time.monotonic() < end:
        if number % 2:
            case: AnyCase = forwards.draw_forward(args.seed, number)
            seen[case.way] += 1
        else:
            case = cases.draw_case(args.seed, number)
            seen.update([case.schedule, *(type(feature).__name__ for feature in case.features)])
        begin = time.monotonic()
        if (text := run(pool, case)) is not None:
            num_wrong += 1
            print(f"case {number} of seed {args.seed} is wrong: {case}", flush=True)
            if time.monotonic() - begin < MAY_TAKE:
                case, text = shrink(pool, case, text)
            pool.stop()  # so that the next case finds nothing of this one
            print(f"{text}\nAgain: {sys.executable} tests/fuzz {shlex.quote(repr(case))}\n", flush=True)
        number += 1
    pool.stop()
    print(f"{number} cases of seed {args.seed} ({dict(seen)}): {num_wrong} wrong")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
