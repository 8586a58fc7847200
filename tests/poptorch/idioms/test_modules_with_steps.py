"""Train modules that know their own steps, as programs of Lightning's kind do."""

import io

import torch
import torch.nn.functional as F
from torch import nn

import poptorch

EPOCHS, ROWS = 3, 4


class Module(nn.Module):
    """A module with a training and a validation step, and its optimiser."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.decoder = nn.Linear(8, 6)

    def training_step(self, batch):
        (x,) = batch
        code = self.encoder(x)
        reconstruction = F.mse_loss(self.decoder(code), x)
        sparsity = code.abs().mean()
        return {"loss": reconstruction + 0.01 * sparsity, "log": (reconstruction, sparsity)}

    def validation_step(self, batch):
        (x,) = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self, kind):
        optimizer = kind(self.parameters(), lr=1e-2, eps=1e-3)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


class Wrapper(nn.Module):
    """What is compiled: the step that the module's mode asks for."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *batch):
        if self.training:
            result = self.module.training_step(batch)
            return poptorch.identity_loss(result["loss"], "none"), *result["log"]
        return self.module.validation_step(batch)


def data(seed):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, 6, generator=drawn) for _ in range(3)]


def plain():
    torch.manual_seed(3)
    module = Module()
    optimizer, rates = module.configure_optimizers(torch.optim.Adam)
    logged = []
    for _ in range(EPOCHS):
        wrapper = Wrapper(module.train())
        for x in data(1):
            optimizer.zero_grad()
            loss, *log = wrapper(x)
            loss.backward()
            optimizer.step()
            logged += [loss.detach(), *(value.detach() for value in log)]
        wrapper.eval()
        with torch.no_grad():
            score = torch.stack([wrapper(x) for x in data(2)]).mean()
        logged.append(score)
        rates.step(10 - score)  # it gets worse, so that the rate falls
    return module, logged, optimizer.param_groups[0]["lr"]


def on_ipus():
    torch.manual_seed(3)
    module = Module()
    optimizer, rates = module.configure_optimizers(poptorch.optim.Adam)
    options = poptorch.Options()
    training = poptorch.trainingModel(Wrapper(module), options, optimizer)
    evaluating = poptorch.inferenceModel(Wrapper(module).eval(), options)
    logged, checkpoint = [], io.BytesIO()
    for epoch in range(EPOCHS):
        module.train()
        if training.isCompiled():
            training.attachToDevice()
        for x in data(1):
            logged += training(x)
        training.detachFromDevice()
        module.eval()
        if evaluating.isCompiled():
            evaluating.attachToDevice()
        score = torch.stack([evaluating(x) for x in data(2)]).mean()
        evaluating.detachFromDevice()
        logged.append(score)
        rates.step(10 - score)
        training.setOptimizer(optimizer)
        if epoch == EPOCHS - 1:
            torch.save({"state_dict": module.state_dict()}, checkpoint)
    checkpoint.seek(0)
    loaded = Module()
    loaded.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    return loaded, logged, optimizer.param_groups[0]["lr"]


def test_fit_and_validate_are_those_of_a_plain_loop():
    module, logged, rate = plain()
    loaded, on_device, same_rate = on_ipus()
    assert rate == same_rate < 1e-2
    torch.testing.assert_close(on_device, logged, rtol=1e-4, atol=1e-5)
    weights, expected = loaded.state_dict(), module.state_dict()
    for state in (weights, expected):
        del state["encoder.1.num_batches_tracked"]  # an integer, and so a constant of programs
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=2e-5)
