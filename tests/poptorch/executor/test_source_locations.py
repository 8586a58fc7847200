"""Check that users choose which files an operator is traced back to."""

import importlib.util

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.errors import ExecutionError

HELPER = """from torch import nn


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()
"""


@pytest.fixture
def helper(tmp_path):
    file = tmp_path / "helpers_of_others.py"
    file.write_text(HELPER)
    spec = importlib.util.spec_from_file_location("helpers_of_others", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executor(helper, change):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.logarithm = helper.Logarithm()

        def forward(self, x):
            return self.logarithm(x)

    options = poptorch.Options().showCompilationProgressBar(False)
    options.Precision.enableFloatingPointExceptions(True)
    change(options)
    return poptorch.inferenceModel(Model(), options)


def lines(helper, change):
    """What an operator is traced back to, in the program, and in an error of a run."""
    model = executor(helper, change)
    model(torch.ones(2))
    text = str(model._core.program)
    with pytest.raises(poptorch.Error) as caught:
        model(-torch.ones(2))
    assert isinstance(caught.value.__cause__, ExecutionError)
    return text, caught.value.__cause__.where


def test_default_is_the_innermost_line_outside_of_pytorch_and_this_package(helper):
    text, where = lines(helper, lambda options: None)
    assert "helpers_of_others.py:6 in forward: return x.log()" in text
    assert where.startswith("helpers_of_others.py:6")


def test_files_that_are_appended_are_skipped_too(helper):
    text, where = lines(helper, lambda options: options.appendToLocationExcludes("helpers_of"))
    assert "test_source_locations.py" in text
    assert where.endswith("in forward: return self.logarithm(x)")


def test_a_list_of_ones_own_takes_the_place_of_the_default(helper):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    found = []
    for excludes in (None, []):
        options = poptorch.Options().showCompilationProgressBar(False)
        if excludes is not None:
            options.sourceLocationExcludes(excludes)
        model = poptorch.inferenceModel(Model(), options)
        model.compile(torch.ones(1, 2))
        found.append(str(model._core.program))
    assert "test_source_locations.py" in found[0]
    assert "linear.py" not in found[0]
    assert "test_source_locations.py" not in found[1]
    assert "linear.py" in found[1]
