"""Check the printed table of an assignment, character by character."""

import keras
import pytest

from ipu_dynamo.keras import extend
from tests.keras.stages.keras_graphs import D, branches, fill, nesting


def lines(model, line_length=None):
    printed = []
    model.print_pipeline_stage_assignment_summary(line_length, printed.append)
    return printed


def row(ends, *fields):
    text = ""
    for field, end in zip(fields, ends, strict=True):
        text = (text + field).ljust(end)
    return text


def test_a_functional(capsys):
    model = extend(branches())
    model.set_pipeline_stage_assignment(fill(model.get_pipeline_stage_assignment(), [0, 0, 1, 1]))
    ends = (35, 71, 89)
    expected = [
        'Model: "branches"',
        "_" * 89,
        row(ends, "Layer (type) (node index)", "Input Layers", "Pipeline Stage"),
        "=" * 89,
        row(ends, "shared (Dense) (0)", "x", "0"),
        "_" * 89,
        row(ends, "shared (Dense) (1)", "shared", "0"),
        "_" * 89,
        row(ends, "right (Dense) (0)", "shared", "1"),
        "_" * 89,
        row(ends, "last (Dense) (0)", "shared", "1"),
        row(ends, "", "right", ""),
        "=" * 89,
    ]
    assert lines(model) == expected
    model.print_pipeline_stage_assignment_summary()
    assert capsys.readouterr().out == "\n".join(expected) + "\n"


def test_a_nested_model_without_stages():
    model = extend(nesting())
    index = model.get_pipeline_stage_assignment()[1].node_index
    assert index >= 0
    ends = (40, 80, 100)
    inner = [
        'Nested Model: "inner"',
        "-" * 100,
        row(ends, "a (Dense)", "", "None"),
        "_" * 100,
        row(ends, "b (Dense)", "", "None"),
        "=" * 100,
    ]
    assert lines(model, 100)[4:] == [
        row(ends, "first (Dense) (0)", "x", "None"),
        "=" * 100,
        *inner,
        *inner,
        row(ends, "last (Dense) (0)", "inner", "None"),
        "=" * 100,
    ]


def test_a_sequential():
    model = extend(keras.Sequential([D(3, name="a"), D(1, name="b")], name="chain"))
    model.set_pipeline_stage_assignment([0, 1])
    ends = (30, 60)
    assert lines(model) == [
        'Model: "chain"',
        "_" * 60,
        row(ends, "Layer (type)", "Pipeline Stage"),
        "=" * 60,
        row(ends, "a (Dense)", "0"),
        "_" * 60,
        row(ends, "b (Dense)", "1"),
        "=" * 60,
    ]


@pytest.mark.parametrize("length", [20, 33])
def test_what_overruns_its_column_is_cut(length):
    layers = [D(3, name="a_long_name_of_a_layer"), D(1, name="b" * 60)]
    printed = lines(extend(keras.Sequential(layers, name="s")), length)
    middle = length // 2
    assert printed[4] == ("a_long_name_of_a_layer"[: middle - 1] + " None").ljust(length)
    assert printed[6] == ("b" * (middle - 1) + " None").ljust(length)
    assert (
        printed[2] == ("Layer (type)"[: middle - 1] + " " + "Pipeline Stage")[:length].ljust(length)
        or len("Layer (type)") <= middle
    )
