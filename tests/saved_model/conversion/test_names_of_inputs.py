"""Check that inputs keep their names where parameters or operators would have the same."""

import json
import re

import pytest
import torch
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model import convert, load, save
from tests.saved_model.converting import embedded
from tests.saved_model.test_command import SERVE, run  # noqa: F401  a fixture

ROWS = {0: Dim("rows", min=1, max=64)}


class Named(nn.Module):
    """Inputs named as a parameter, as another name that is near it, and as an operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, weight, weight_1, mul):
        return {"weight": weight * self.weight + weight_1, "mul": (mul * 2).relu()}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named") / "p"
    example = tuple(torch.randn(3, 4) for _ in range(3))
    save(folder, {"serving_default": (Named(), example, (ROWS, ROWS, ROWS))})
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision_mode": "FP16", "int64_to_int32_conversion": True},
        {"excluded_nodes": ["^mul_1$"], "num_ipus": 2, "manual_sharding": [["."], ["relu"]]},
        embedded(),
        embedded(pipeline_cfg={"converter": "auto"}),
    ],
)
def test_programs_are_converted_and_called_by_these_names(source, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    convert(source, tmp_path / "out", **options)
    torch.manual_seed(0)
    feeds = {name: torch.randn(5, 4) for name in ("weight", "weight_1", "mul")}
    with load(tmp_path / "out")["serving_default"] as signature, torch.no_grad():
        assert set(signature.inputs) == set(feeds)
        results, expected = signature(**feeds), Named()(**feeds)
        off = 2e-2 if "precision_mode" in options else 1e-6
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=0, atol=off)
    if "embedded_runtime_save_config" in options:
        described = json.loads((tmp_path / "out/cache/application.json").read_text())
        assert set(described["inputs"]) == set(feeds)


def test_show_tells_inputs_parameters_and_operators_apart(source, tmp_path, run):  # noqa: F811
    for folder in (source, tmp_path / "out"):
        if folder != source:
            convert(source, folder)
        _, text, _ = run("show", "--dir", folder, *SERVE, "--nodes", "--json")
        nodes = [(node["name"], node["kind"]) for node in json.loads(text)]
        assert len({name for name, _ in nodes}) == len(nodes)
        kinds = dict(nodes)
        assert [kinds[name] for name in ("weight", "weight_1")] == ["input", "input"]
        assert [name for name, kind in nodes if kind == "param"] == ["weight_2"]
        operators = [name for name, kind in nodes if kind == "op"]
        assert len(operators) == 4
        assert not {"weight", "weight_1", "mul"} & set(operators)


def test_an_index_may_name_an_input_as_an_operator(source, tmp_path):
    """Then the input's node has a number, and expressions still match the operator."""
    save(tmp_path / "p", {"serving_default": (nn.ReLU(), (torch.randn(3, 4),), (ROWS,))})
    index = tmp_path / "p/saved_model.json"
    index.write_text(re.sub(r'"input": \{', '"relu": {', index.read_text()))
    convert(tmp_path / "p", tmp_path / "out", excluded_nodes=["^relu$"])
    x = torch.randn(2, 4)
    with load(tmp_path / "out")["serving_default"] as signature:
        assert torch.equal(signature(relu=x)["output_0"], x.relu())
        assert signature.placement.partitions == (("host", ("relu",)),)
        assert signature.border_nodes()["input", "relu"] == "relu_1"


def test_a_value_out_of_range_is_told_by_the_users_name(tmp_path):
    class Integers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", torch.arange(4))

        def forward(self, ids):
            return ids + self.ids

    save(tmp_path / "p", {"serving_default": (Integers(), (torch.arange(4),))})
    convert(tmp_path / "p", tmp_path / "out", int64_to_int32_conversion=True)
    with load(tmp_path / "out")["serving_default"] as signature:
        assert torch.equal(signature(ids=torch.arange(4))["output_0"], 2 * torch.arange(4))
        with pytest.raises(ValueError, match=r"input 'ids'.*int32"):
            signature(ids=torch.tensor([0, 1, 2, 2**40]))
