"""Check that schedules which workers cannot follow are refused, and say where."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, CompileError, Options, Strategy, compile_inference
from ipu_dynamo.program.schedule.schedule import Schedule
from tests.program.schedule.programs import deferred_program, schedules_of, training_program


@pytest.fixture(scope="module")
def pipeline():
    """A training program of two stages, each on an IPU, four micro-batches."""
    return training_program(2, 4)


def changed(program, *edits):
    """The program's schedule for two workers, with pieces of its text replaced."""
    text = str(schedules_of(program)[0])
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return Schedule.parse(text)
