"""Check that what is stored leaves the chip, comes back unchanged, and is counted."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, StageSpec, Strategy, compile_training
from ipu_dynamo.program import Traffic
from ipu_dynamo.runtime.execute.memory.streaming_memory import Kept, StreamingMemory

DTYPES = [torch.float32, torch.float16, torch.int32, torch.bool]
activations: list[weakref.ref] = []  # of each call of the operator below, in order
alive: list[list[bool]] = []  # at each call, which of the earlier results are on the chip


@torch.library.custom_op("ipu_test::watch", mutates_args=())
def watch(h: Tensor) -> Tensor:
    alive.append([one() is not None for one in activations])
    result = h.clone()
    activations.append(weakref.ref(result))
    return result


watch.register_fake(torch.empty_like)
watch.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Watched(nn.Module):
    """Three layers in three phases; each watches what the ones before have left on the chip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for i, layer in enumerate(self.layers):
            BeginBlock(layer, str(i))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = watch(layer(x))
        return F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("liveness", "expected"),
    [
        ("always_live", [[], [True], [True, True]]),
        ("off_chip_after_fwd", [[], [True], [True, True]]),
        ("off_chip_after_each_phase", [[], [False], [False, False]]),
    ],
)
def test_what_is_stored_leaves_the_chip(liveness, expected):
    phases = tuple((StageSpec((str(i),), 0),) for i in range(3))
    strategy = Strategy("serial_phased", phases=phases, liveness=liveness)
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, Options("eager", strategy=strategy))
    data = torch.randn(2, 4)
    step.compile(data)
    memory = step.executable.memory
    memory.store = lambda value: Kept(value.clone(), value.device)  # memory of its own
    activations.clear(), alive.clear()
    step(data)
    assert alive == expected
    assert [one() for one in activations] == [None] * 3  # nothing stays after the call


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_comes_back_as_it_was_and_is_counted(dtype):
    memory = StreamingMemory()
    value = torch.randint(0, 2, (3, 5)).to(dtype)
    kept = memory.store(value)
    assert memory.traffic == Traffic(stored=value.nbytes)
    for times in (1, 2):
        back = memory.load(kept)
        assert (back.dtype, back.device) == (value.dtype, value.device)
        assert torch.equal(back, value)
        assert memory.traffic == Traffic(value.nbytes, times * value.nbytes)


@pytest.mark.cuda
def test_what_leaves_a_device_lies_in_host_memory():
    value = torch.randn(3, 4, device="cuda").t()
    memory = StreamingMemory()
    kept = memory.store(value)
    assert kept.tensor.device.type == "cpu"
    back = memory.load(kept)
    assert (back.device, back.stride()) == (value.device, value.stride())
    assert torch.equal(back, value)
