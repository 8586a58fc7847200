"""Predict the memory and the speed of a GPT on four IPUs, and choose its micro-batches.

The model is that of `examples/gpt.py` with the layers of GPT-2. It is on the `meta` device, so it
takes no memory and does not run. Next to it a quarter of its layers trains in plain PyTorch here.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

import ipu_dynamo
from examples.gpt import GPT
from ipu_dynamo import Options, Strategy
from ipu_dynamo.machine.prediction import Prediction

MACHINE, IPUS = "bow-pod4", 4
SIZES = {"words": 16_384, "width": 768, "layers": 12, "heads": 12, "length": 256}
ROWS = 64  # of an update: micro-batches times their rows
CHOICES = ((1, "all"), (2, "off"), (2, "all"), (4, "off"), (4, "all"))


def predicted(rows: int, recompute: str = "all", **sizes: int) -> Prediction:
    """The prediction of a training step with micro-batches of so many rows, in float16."""
    sizes = SIZES | sizes
    with torch.device("meta"):
        model = GPT(**sizes, ipus=IPUS).half()
        tokens = torch.empty(rows, sizes["length"], dtype=torch.long)
    return ipu_dynamo.predict(
        model,
        tokens,
        tokens,
        machine=MACHINE,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=Options(
            strategy=Strategy(kind="pipelined"),
            gradient_accumulation=ROWS // rows,
            recompute=recompute,
        ),
    )


def rows_per_second_here(rows: int, **sizes: int) -> float:
    """What plain PyTorch trains on this computer, by a model of these sizes, in float32."""
    torch.manual_seed(0)
    sizes = SIZES | sizes
    model = GPT(**sizes, ipus=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(sizes["words"], (rows, sizes["length"]))
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return rows / min(times)


def main(choices: Sequence[tuple[int, str]] = CHOICES, **sizes: int) -> dict[str, Any]:
    """Print a line for each choice, and the prediction of the best that fits; write its report.

    Args:
        choices: rows of a micro-batch, and the option `recompute`.
        sizes: of the model, where they differ from `SIZES`.
    """
    made = dict[tuple[int, str], Prediction]()
    print("rows  recompute  verdict       step       rows/s  fullest tile")
    for rows, recompute in choices:
        made[rows, recompute] = of = predicted(rows, recompute, **sizes)
        milliseconds, tile = 1e3 * of.step_seconds, of.verdict.tile.central // 2**10
        print(
            f"{rows:>4}  {recompute:9}  {of.verdict.word:12} {milliseconds:>6.1f} ms"
            f"  {of.items_per_second:>7,.0f}  {tile:>8,} KiB"
        )
    fitting = {choice: of for choice, of in made.items() if of.verdict.word == "fits"}
    choice, best = max((fitting or made).items(), key=lambda of: of[1].items_per_second or 0)
    print(f"\nmicro-batches of {choice[0]} rows, recompute {choice[1]!r}:\n")
    print(best)
    ipu_dynamo.write_report(best, "report.html")
    layers = max(1, (SIZES | sizes)["layers"] // 4)
    here = rows_per_second_here(1, **sizes | {"layers": layers})
    print(f"\nplain PyTorch on this computer, {layers} layers: {here:.2f} rows/s")
    return {"best": best, "choice": choice, "choices": made, "rows_per_second_here": here}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
