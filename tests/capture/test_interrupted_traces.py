"""Check that a signal waits for the end of a trace, in which it could end the process."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Options, compile_inference, compile_training


class Told(Exception):
    """What the handler raises."""


@pytest.fixture
def handler():
    def tell(number, frame):
        raise Told(number)

    before = signal.signal(signal.SIGUSR1, tell)
    yield tell
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_handler_waits_for_the_end_of_forward_but_not_twice(signals, handler):
    seen = []

    def forward(x):
        y = torch.vmap(lambda row: row + 1)(x)  # a trace of its own
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGUSR1)
        seen.append(y)
        return y

    run = compile_inference(forward, options=Options(engine="eager"))
    with pytest.raises(Told):
        run(torch.ones(2, 3))
    assert len(seen) == (signals == 1)
    assert signal.getsignal(signal.SIGUSR1) is handler
    signals = 0
    assert torch.equal(run(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def interrupt_compiling(seed: int, count: int) -> None:
    """Compile a training step so many times, with a signal at any time; it does not come back."""

    def tell(number, frame):
        raise Told

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return ipu_dynamo.identity_loss(x.square(), "mean")

    def compile_once():
        net = Loss()
        step = compile_training(
            net, torch.optim.SGD(net.parameters(), lr=0.1), options=Options(engine="eager")
        )
        step.compile(torch.ones(2, 4))

    compile_once()
    signal.signal(signal.SIGALRM, tell)
    draw = random.Random(seed)
    for _ in range(count):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + 0.5 * draw.random())
            compile_once()
            time.sleep(0.6)  # unless it came, and what it raised was lost in a `__del__`
        except Told:
            pass
    compile_once()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_signals_while_compiling_do_not_end_the_process(seed):
    """Without waiting, one of about 300 ended it."""
    code = f"from {__name__} import interrupt_compiling; interrupt_compiling({seed}, 300)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1700)
