"""Make the first step of one training in this process, and print what it took, as JSON.

Usage: python -m first_call.child TRAINING CONTENDER, where `first_call` is this folder.
"""

import json
import resource
import sys
import time


def main() -> None:
    training, contender = sys.argv[1:]
    import torch  # not counted: everybody has to

    from .models import STEPS, TRAININGS

    torch.manual_seed(0)
    wall, cpu = time.perf_counter(), cpu_seconds()
    step = STEPS[contender](TRAININGS[training]())
    loss = step()
    seconds = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    python = {"compilers": compilers.ru_utime + compilers.ru_stime}
    print(json.dumps(seconds | python | {"loss": float(loss.sum())}))


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
