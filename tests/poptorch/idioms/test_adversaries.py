"""Train two networks against each other by two executors that share both, as GANs do."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import poptorch

STEPS, ROWS, ACCUMULATION = 4, 3, 2


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 4)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, noise):
        return torch.tanh(self.second(F.leaky_relu(self.norm(self.first(noise)), 0.2)))


class Discriminator(nn.Module):
    """One whose layers have spectral norms, each with a vector that `forward` changes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = spectral_norm(nn.Linear(4, 6)), spectral_norm(nn.Linear(6, 1))

    def forward(self, x):
        return self.second(F.leaky_relu(self.first(x), 0.2)).squeeze(-1)


class Discriminate(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise, real):
        with torch.no_grad():
            fake = self.generator(noise)
        loss = F.relu(1 - self.discriminator(real)).mean()
        loss = loss + F.relu(1 + self.discriminator(fake)).mean()
        return poptorch.identity_loss(loss, "none")


class Generate(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise):
        fake = self.generator(noise)
        return fake, poptorch.identity_loss(-self.discriminator(fake), "mean")


def batches():
    drawn = torch.Generator().manual_seed(8)
    rows = ROWS * ACCUMULATION
    return [
        (torch.randn(rows, 2, generator=drawn), torch.randn(rows, 4, generator=drawn))
        for _ in range(STEPS)
    ]


def optimizers(kinds, generator, discriminator):
    arguments = {"lr": 2e-2, "betas": (0.5, 0.9), "eps": 1e-3}
    return [kinds.Adam(net.parameters(), **arguments) for net in (discriminator, generator)]


def plain(generator, discriminator):
    modules = Discriminate(generator, discriminator), Generate(generator, discriminator)
    both = optimizers(torch.optim, generator, discriminator)
    losses = []
    for noise, real in batches():
        for module, optimizer, inputs in zip(modules, both, ((noise, real), (noise,)), strict=True):
            module.zero_grad()
            for part in zip(*(x.chunk(ACCUMULATION) for x in inputs), strict=True):
                result = module(*part)
                loss = result[1] if isinstance(result, tuple) else result
                (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
            optimizer.step()
    return losses


def on_ipus(generator, discriminator):
    both = optimizers(poptorch.optim, generator, discriminator)
    options = poptorch.Options()
    options.Training.gradientAccumulation(ACCUMULATION)
    steps = [
        poptorch.trainingModel(module, options, optimizer)
        for module, optimizer in zip(
            (Discriminate(generator, discriminator), Generate(generator, discriminator)),
            both,
            strict=True,
        )
    ]
    losses = []
    for noise, real in batches():
        losses += [steps[0](noise, real), steps[1](noise)[1]]
    for step in steps:
        step.detachFromDevice()
    return losses


def test_both_networks_are_those_of_a_plain_loop():
    torch.manual_seed(0)
    expected = Generator(), Discriminator()
    trained = copy.deepcopy(expected)
    losses = plain(*expected)
    torch.testing.assert_close(on_ipus(*trained), losses, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(trained, expected, strict=True):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-3, atol=1e-5)
