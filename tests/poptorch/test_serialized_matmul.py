"""Check `poptorch.serializedMatMul` as PopTorch programs call it."""

import pytest
import torch

import poptorch

Mode = poptorch.MatMulSerializationMode


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


def compiled(mode, factor, **more):
    return poptorch.inferenceModel(
        lambda a, b: poptorch.serializedMatMul(a, b, mode, factor, **more)
    )


@pytest.mark.parametrize("mode", Mode)
def test_is_a_product(mode):
    a, b = torch.randn(2, 4, 6), torch.randn(6, 8)
    factor = 0 if mode is Mode.Disabled else 2
    torch.testing.assert_close(compiled(mode, factor)(a, b), a @ b)
    assert torch.equal(poptorch.serializedMatMul(a, b, mode, factor), a @ b)


@pytest.mark.parametrize(
    ("mode", "factor"),
    [(Mode.InputChannels, 3), (Mode.ReducingDim, 4), (Mode.OutputChannels, 3),
     (Mode.OutputChannels, 16), (Mode.OutputChannels, 0), (Mode.InputChannels, -2)],
)  # fmt: skip
def test_refuses_a_factor_that_does_not_divide(mode, factor):
    with pytest.raises(poptorch.Error, match="Invalid serialisation factor"):
        compiled(mode, factor)(torch.ones(2, 4, 6), torch.ones(6, 8))


@pytest.mark.parametrize(
    "arguments",
    [
        (1.0, torch.ones(2, 2), Mode.Disabled),
        (torch.ones(2, 2), [1], Mode.Disabled),
        (torch.ones(2, 2), torch.ones(2, 2), "output_channels"),
        (torch.ones(2, 2), torch.ones(2, 2), Mode.OutputChannels, 1.0),
        (torch.ones(2, 2), torch.ones(2, 2), Mode.OutputChannels, 1, 1),
    ],
)
def test_refuses_arguments_of_other_types(arguments):
    with pytest.raises(AssertionError):
        poptorch.serializedMatMul(*arguments)
