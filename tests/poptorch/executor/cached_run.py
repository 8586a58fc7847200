"""Train with the executable cache, and say which passes ran and which processes were started.

python -m tests.poptorch.executor.cached_run FOLDER
"""

import json
import sys

started: list[str] = []
sys.addaudithook(
    lambda event, args: (
        started.append(f"{args[0]} {args[1]}")
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")
        else None
    )
)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import poptorch  # noqa: E402
from ipu_dynamo.passes.manager import PassManager  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(4, 8), ipu_id=0)
        self.last = poptorch.BeginBlock(nn.Linear(8, 3), ipu_id=1)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.last(torch.relu(self.first(x))), y)


def main() -> None:
    run, passes = PassManager.run, []

    def counted(self, steps, model):
        passes.extend(step.name for step in steps)
        return run(self, steps, model)

    PassManager.run = counted
    torch.manual_seed(0)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.enableExecutableCaching(sys.argv[1])
    options.Training.gradientAccumulation(3)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    training = poptorch.trainingModel(model, options, optimizer)
    losses = [training(torch.randn(6, 4), torch.randint(3, (6,))).tolist() for _ in range(2)]
    print(json.dumps({"losses": losses, "passes": passes, "started": started}))


if __name__ == "__main__":
    main()
