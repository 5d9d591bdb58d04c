"""The command: see the package."""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from tools.ranks import RankPool  # noqa: E402

import fuzz  # noqa: E402

MAY_TAKE = 20  # seconds of a case that is tried again with less


def shrink(pool: RankPool, case: fuzz.Case, text: str) -> tuple[fuzz.Case, str]:
    """Without the features that it is wrong without."""
    for feature in reversed(case.features):
        less, begin = case.without(repr(feature)), time.monotonic()
        if (still := fuzz.run_case(pool, less)) is not None:
            case, text = less, still
        if time.monotonic() - begin > MAY_TAKE:
            break
    return case, text


def main() -> None:
    parser = argparse.ArgumentParser(description=fuzz.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: another one each time")
    parser.add_argument("--case", type=int, default=None, help="only this one")
    parser.add_argument("--without", nargs="*", default=[], help="features that have one of these texts")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    pool = RankPool()
    end = time.monotonic() + 60 * args.minutes
    wrong: list[int] = []
    seen: Counter[str] = Counter()
    number = args.case or 0
    while True:
        whole = fuzz.make_case(args.seed, number)
        case = whole.without(*args.without)
        seen.update([case.schedule, *(type(feature).__name__ for feature in case.features)])
        begin = time.monotonic()
        if (text := fuzz.run_case(pool, case)) is not None:
            wrong.append(number)
            if time.monotonic() - begin < MAY_TAKE:
                case, text = shrink(pool, case, text)
            pool.stop()  # so that the next case finds nothing of this one
            dropped = [type(feature).__name__ for feature in whole.features if feature not in case.features]
            print(f"case {number} of seed {args.seed} is wrong: {case}\n{text}")
            again = f"{sys.executable} tests/fuzz --seed {args.seed} --case {number}"
            print("Again:", again, *(["--without", *dropped] if dropped else []), "\n", flush=True)
        number += 1
        if args.case is not None or time.monotonic() > end:
            break
    pool.stop()
    print(f"{number - (args.case or 0)} cases of seed {args.seed} ({dict(seen)}): {len(wrong)} wrong {wrong or ''}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
