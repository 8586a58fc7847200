"""Check that errors say what, where and what to try."""

import pytest
import torch
from torch import fx

from ipu_dynamo import CompileError, ExecutionError, InputError, IpuError
from ipu_dynamo.errors import (
    called_from,
    keep_user_line,
    raised_at,
    skipping_sources,
    source_line,
)


def node(stack_trace=None):
    result = fx.Graph().call_function(torch.sin, (1,))
    result.meta["stack_trace"] = stack_trace
    return result


FRAME = '  File "{}", line {}, in {}\n    {}\n'


def test_compile_error_has_problem_node_line_and_hint():
    at = node(FRAME.format("/project/model.py", 12, "forward", "return x @ self.w"))
    lines = str(CompileError("it is wrong", node=at, hint="do otherwise")).splitlines()
    assert lines[0] == "it is wrong"
    assert lines[1].startswith("  node: %sin = ")
    assert lines[2] == "  from: model.py:12 in forward: return x @ self.w"
    assert lines[3] == "  try:  do otherwise"


def test_parts_that_are_not_known_are_left_out():
    assert str(CompileError("it is wrong")) == "it is wrong"
    assert str(CompileError("a", where="here")) == "a\n  from: here"
    assert str(InputError("a")) == "a"
    assert str(InputError("a", hint="b")) == "a\n  try:  b"


def test_source_is_the_innermost_frame_of_the_user():
    trace = FRAME.format("/project/model.py", 3, "forward", "y = self.layer(x)")
    trace += FRAME.format(torch.nn.__file__, 9, "forward", "return F.linear(x)")
    assert source_line(node(trace)) == "model.py:3 in forward: y = self.layer(x)"


def test_source_inside_a_library_is_better_than_none():
    trace = FRAME.format(torch.nn.__file__, 9, "forward", "return F.linear(x)")
    assert source_line(node(trace)) == "__init__.py:9 in forward: return F.linear(x)"
    assert source_line(node()) == "unknown source"


def test_place_of_an_exception_is_the_users():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert raised_at(caught.tb).endswith(": torch.ones(2) @ torch.ones(3)")
    assert raised_at(None) == "unknown source"


def test_caller_is_the_users():
    place = called_from()
    assert place.startswith("test_errors.py:")
    assert place.endswith("in test_caller_is_the_users: place = called_from()")


def test_execution_error_knows_its_place():
    error = ExecutionError("E: bad", stage=3, instruction="call @f", micro_batch=5, where="m.py:1")
    assert str(error) == "E: bad\n  stage: 3, micro-batch 5\n  in:    call @f\n  from:  m.py:1"
    assert (error.stage, error.micro_batch, error.where) == (3, 5, "m.py:1")


@pytest.mark.parametrize("kind", [CompileError, ExecutionError, InputError])
def test_one_class_catches_all(kind):
    assert issubclass(kind, IpuError)


def test_a_user_says_which_files_are_no_model():
    trace = FRAME.format("/project/model.py", 3, "forward", "y = self.layer(x)")
    trace += FRAME.format("/project/layers.py", 7, "forward", "return self.inner(x)")
    trace += FRAME.format(torch.nn.__file__, 9, "forward", "return F.linear(x)")
    model, layers, torchs = "model.py:3", "layers.py:7", "__init__.py:9"
    for parts, line in [(None, layers), (["layers.py", "torch"], model), ([], torchs)]:
        at = node(trace)
        with skipping_sources(parts):
            assert source_line(at).startswith(line)
            keep_user_line(at)
        assert source_line(at).startswith(line)  # also when it is asked for later
