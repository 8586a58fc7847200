"""Run programs after public reports of wrong numbers, by PyTorch's compiler and by ours.

Usage: python -m benchmarks.known_wrong [NAME ...]
Prints what became of each program of `tests/known_wrong`, and how many are right. Nothing that was
compiled or checked before is used.
"""

import sys
from collections import Counter
from collections.abc import Sequence

from benchmarks.child import in_fresh_child

KINDS = ("inductor", "ipu-inductor", "ipu-eager")
Outcomes = dict[str, tuple[str, str]]  # of each program: `right`, `wrong`, ...; and words


def outcomes(kind: str, names: Sequence[str] = ()) -> Outcomes:
    """Run programs in a new process, or all of them; return their outcomes."""
    found = in_fresh_child("tests.known_wrong.run_reported:outcomes", kind, names)
    return {name: (outcome, words) for name, outcome, words in found}


def main() -> None:
    """Print the outcomes of each program, and the scores."""
    found = {}
    for kind in KINDS:
        print(f"running by {kind}", file=sys.stderr)
        found[kind] = outcomes(kind, sys.argv[1:])
    print(f"{'':45}" + "".join(f"{kind:14}" for kind in KINDS))
    for name in found[KINDS[0]]:
        print(f"{name:45}" + "".join(f"{found[kind][name][0]:14}" for kind in KINDS))
    for kind in KINDS:
        counts = Counter(outcome for outcome, _ in found[kind].values())
        others = ", ".join(f"{n} {what}" for what, n in counts.items() if what != "right")
        print(
            f"{kind}: {counts['right']} of {counts.total()} right" + f" ({others})" * bool(others)
        )


if __name__ == "__main__":
    main()
