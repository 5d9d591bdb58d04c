"""Runs the solutions of all labs, and thirty mistakes: solutions are proved, and mistakes said in words.

python labs/check.py [LAB ...]
"""

import runpy
import sys
import time
from pathlib import Path

from megapipe.plan import registry
from megapipe.proving import prove_schedule

ANSWERS = Path(__file__).parent / "answers"
LABS = ("gpipe", "one_f_one_b", "interleaving", "split_backward", "zbv", "hang")


def check(lab: str, tell=print) -> list[str]:
    """What is not as it is to be."""
    before = dict(registry._schedules)
    try:
        found = runpy.run_path(str(ANSWERS / f"{lab}.py"))
        like = found["solution"] if found["LIKE"].endswith(":solution") else found["LIKE"]
        wrong = []
        proof = prove_schedule(found["solution"], like=like)
        tell(f"{lab}: the solution is {'proved' if proof else 'WRONG'}")
        if not proof:
            wrong.append(f"{lab}: {proof.mistakes}")
        for name, text in found["MISTAKES"].items():
            begin = time.monotonic()
            said = " ".join(prove_schedule(found[name], like=like).mistakes)
            tell(f"  {name} ({time.monotonic() - begin:.1f} s): {said}")
            if text not in said:
                wrong.append(f"{lab}, {name}: {text!r} is not in {said!r}")
        return wrong
    finally:
        registry._schedules.clear()
        registry._schedules.update(before)


if __name__ == "__main__":
    wrong = [text for lab in sys.argv[1:] or LABS for text in check(lab)]
    print("\n".join(wrong) or "all labs are as they are to be")
    sys.exit(bool(wrong))
