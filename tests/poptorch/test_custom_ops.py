"""Check `poptorch.custom_op`."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ipu_dynamo
import poptorch
from ipu_dynamo.capture.custom import custom_operators
from poptorch import custom_ops


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')
    monkeypatch.setattr(custom_operators, "_known", dict(custom_operators._known))


X = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])


def leaky(x, attributes):
    return poptorch.custom_op([x], "LeakyRelu", "com.acme", 1, [x], attributes)[0]


def test_an_operator_of_the_registry_computes():
    model = poptorch.inferenceModel(lambda x: leaky(x, {"alpha": 0.02}))
    assert torch.allclose(model(X), torch.where(X >= 0, X, 0.02 * X))


def test_attributes_reach_the_function_as_they_were_given():
    given = {"f": 1.5, "i": 2**40, "s": "text", "fs": [1.0, 2.0], "ss": ("a", "b")}
    seen = []
    ipu_dynamo.register_custom_operator(
        lambda x, **attributes: seen.append(attributes) or x * 2, name="Any", domain="tests"
    )
    model = poptorch.inferenceModel(
        lambda x: poptorch.custom_op([x], "Any", "tests", 1, [x], attributes=given)
    )
    assert torch.equal(model(X)[0], X * 2)
    assert seen == [given]


def test_attributes_are_found_by_the_id_of_their_call():
    leaky(X, {"alpha": 0.5})
    last = f"attr:{len(custom_ops._known) - 1:x}"
    assert poptorch.accessAttributes(last) == {"alpha": 0.5}
    assert poptorch.accessAttributes('{"beta": [1, 2]}') == {"beta": [1, 2]}
    for wrong in (3, "alpha", "attr:", "attr:ffffff"):
        with pytest.raises(ValueError, match=r"attribute_id|attribute id|No call"):
            poptorch.accessAttributes(wrong)


def test_outside_of_models_results_are_zeros_like_the_examples():
    found = poptorch.custom_op([X], "Unknown", "tests", 1, [X.int(), X[:2]])
    assert [(t.dtype, t.tolist()) for t in found] == [
        (torch.int32, [0] * 5),
        (torch.float32, [0.0, 0.0]),
    ]


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({3: 1.0}, "All attribute keys must be strings."),
        ({"a": None}, "Attribute values must be"),
        ({"a": [1, 2.0]}, "The types in a list/tuple attribute must all be the same."),
        ({"ü": 1}, "ü contains non-ASCII characters."),
        ({"a": ["ok", "ü"]}, "ü contains non-ASCII characters."),
    ],
)
def test_attributes_of_other_types_are_refused(attributes, problem):
    with pytest.raises(ValueError, match=problem):
        leaky(X, attributes)


@pytest.mark.parametrize(("value", "side"), [(1e39, "high"), (-1e39, "low")])
def test_floats_have_to_fit_32_bits(value, side):
    with pytest.raises(poptorch.Error, match=f"is too {side} for a Popart float attribute"):
        leaky(X, {"alpha": value})


def test_an_unregistered_operator_is_an_error_that_shows_how_to_register_it():
    model = poptorch.inferenceModel(lambda x: poptorch.custom_op([x], "Cube", "com.none", 1, [x]))
    with pytest.raises(
        poptorch.Error, match=r"Cube, version 1[^$]*register_custom_operator\("
    ) as e:
        model(X)
    assert 'poptorch.custom_op([x], "Cube", "com.none", 1, [x])' in str(e.value)


def test_a_result_that_is_not_like_its_example_is_refused():
    model = poptorch.inferenceModel(
        lambda x: poptorch.custom_op([x], "LeakyRelu", "com.acme", 1, [x[:2]])
    )
    with pytest.raises(poptorch.Error, match=r"result 0 is float32\[5\], and example_outputs says"):
        model(X)


@pytest.mark.skipif(sys.platform != "linux", reason="the guide names a library of Linux")
def test_the_library_that_the_guide_names_loads_without_torch(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "custom_operators.md"
    (name,) = set(re.findall(r"\blibm[\w.]+", guide.read_text()))
    ctypes.CDLL(name)
    with open("/proc/self/maps") as maps:
        link = tmp_path / "custom_ops.so"
        link.symlink_to(next(line.split()[-1] for line in maps if line.rstrip().endswith(name)))
    program = f"import ctypes; ctypes.cdll.LoadLibrary({str(link)!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
