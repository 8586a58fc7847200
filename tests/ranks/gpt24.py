"""Print the training program of a language model of 24 layers on 4 IPUs, for 256 replicas.

python -m tests.ranks.gpt24 > gpt24.txt
python -m ipu_dynamo.program.rank_plan gpt24.txt --mesh 256x4
"""

import torch

from benchmarks.models import plain_language_model
from ipu_dynamo import BeginBlock, Options, Strategy, compile_training

LAYERS, WORDS, WIDTH, LENGTH, REPLICAS = 24, 512, 64, 32, 256


def program():
    """The program; nothing of it is run."""
    model = plain_language_model(LAYERS, WORDS, WIDTH)
    for ipu in range(4):
        BeginBlock(model.layers[1 + ipu * LAYERS // 4 if ipu else 0], ipu_id=ipu)
    options = Options(
        engine="eager",
        replicas=REPLICAS,
        gradient_accumulation=8,
        strategy=Strategy("pipelined"),
        seed=0,
    )
    step = compile_training(model, torch.optim.AdamW(model.parameters()), options)
    tokens = torch.zeros(REPLICAS * 8, LENGTH, dtype=torch.int64)
    step.compile(tokens, tokens)
    return step.program


if __name__ == "__main__":
    print(program().text(), end="")
