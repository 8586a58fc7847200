"""Check the passes of a conversion one by one: which nodes change, and how."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model import convert, load, save
from ipu_dynamo.saved_model.conversion.convert_program import passes
from ipu_dynamo.saved_model.conversion.drafts.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.settings.options import read_options
from ipu_dynamo.saved_model.directory import SavedPrograms
from tests.saved_model.converting import embedded

BERT = Path(__file__).parent.parent / "fixtures" / "tf1_bert"


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


def saved(folder, module, *example, shapes=None):
    save(folder, {"serving_default": (module.eval(), example, shapes)})
    return folder


def draft(folder, **options):
    """A signature after all passes, and what `nodes` says of it."""
    with SavedPrograms(folder).signature(["serve"], "serving_default") as signature:
        result = from_exported(signature)
    for rewrite in passes(read_options(options)):
        rewrite(result)
        result.graph.lint()
    return result


def types(result):
    """The type of each group of operators."""
    return {
        group.name: str(group.value.meta["val"].dtype).removeprefix("torch.")
        for group in result.groups()
        if group.operator and not group.is_size
    }


def results(folder, **inputs):
    with load(folder)["serving_default"] as signature, torch.no_grad():
        return signature(**inputs)


# precision


class AddMul(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.other = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x + self.weight) * self.other


def test_operators_compute_in_float16_but_for_results(tmp_path):
    result = draft(saved(tmp_path / "p", AddMul(), torch.randn(2, 4)), precision_mode="FP16")
    assert types(result) == {
        "add/CastInsertion_0": "float16",
        "add": "float16",
        "mul/CastInsertion_0": "float32",
        "mul": "float32",
    }
    held = {name: tensor.dtype for name, tensor in zip("ab", result.tensors.values(), strict=True)}
    assert held == {"a": torch.float16, "b": torch.float32}


def test_excluded_operators_keep_their_type(tmp_path):
    folder = saved(tmp_path / "p", AddMul(), torch.randn(2, 4))
    result = draft(folder, precision_mode="FP16", precision_conversion_excluded_nodes=["^add$"])
    assert types(result) == {"add": "float32", "mul": "float32"}
    # exclusions of casts match nothing
    result = draft(folder, precision_mode="FP16", excluded_nodes=["CastInsertion"])
    assert set(result.placement.devices.values()) == {"ipu"}


class SharedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return nn.functional.linear(nn.functional.linear(x, self.weight).relu(), self.weight)


def test_a_weight_follows_its_readers(tmp_path):
    result = draft(saved(tmp_path / "p", SharedWeight(), torch.randn(2, 4)), precision_mode="FP16")
    (tensor,) = result.tensors.values()
    assert tensor.dtype == torch.float32  # the result reads it, too
    assert types(result)["linear/CastInsertion_1"] == "float16"


class Masked(nn.Module):
    def forward(self, x, mask):
        low = torch.finfo(torch.float32).min
        return torch.softmax(x.masked_fill(mask, low), -1) * 1.0

    def example(self):
        return torch.randn(2, 4), torch.tensor([[True] * 4, [False, True, False, True]])


def test_masks_beyond_float16_stay_finite(tmp_path):
    module = Masked()
    x, mask = module.example()
    convert(saved(tmp_path / "p", module, x, mask), tmp_path / "o", precision_mode="FP16")
    value = results(tmp_path / "o", x=x, mask=mask)["output_0"]
    torch.testing.assert_close(value, module(x, mask), rtol=0, atol=2e-2)


def test_float16_programs_compute_in_float32(tmp_path):
    module = AddMul().half()
    x = torch.randn(2, 4).half()
    result = draft(saved(tmp_path / "p", module, x), precision_mode="FP32")
    assert types(result)["add"] == "float32"
    assert types(result)["mul"] == "float16"


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x):
        return self.layers(x.permute(0, 3, 1, 2)).mean((2, 3))


def test_sizes_that_calls_choose_stay_so(tmp_path):
    example = torch.randn(3, 5, 6, 2)
    shapes = ({0: Dim("batch")},)
    folder = saved(tmp_path / "p", Convolution(), example, shapes=shapes)
    convert(folder, tmp_path / "o", precision_mode="FP16", int64_to_int32_conversion=True)
    with load(tmp_path / "o")["serving_default"] as signature:
        assert signature.inputs["x"].shape == (None, 5, 6, 2)
        assert signature(x=torch.randn(2, 5, 6, 2))["output_0"].shape == (2, 3)


# int64


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.register_buffer("offset", torch.tensor([1, 0, 2]))

    def forward(self, ids):
        moved = (ids + self.offset).clamp(0, 5)
        picked = torch.gather(moved, 1, moved.argmax(1, keepdim=True))
        return self.table(moved).sum(1), moved, picked


IDS = torch.tensor([[0, 5, 1], [2, 2, 2]])


def test_ipus_carry_32_bits(tmp_path):
    result = draft(saved(tmp_path / "p", Embedded(), IDS), int64_to_int32_conversion=True)
    found = types(result)
    assert found["add/CastInsertion_0"] == "int32"
    assert {found[n] for n in ("add", "clamp", "argmax", "gather")} == {"int32"}
    assert (
        result.tensors[next(n for n in result.tensors if "offset" in n.name)].dtype == torch.int32
    )
    assert found["output_1/CastInsertion_0"] == found["output_2/CastInsertion_0"] == "int64"
    devices = result.placement.devices
    assert {name for name, device in devices.items() if device == "host"} == {
        "add/CastInsertion_0", "output_1/CastInsertion_0", "output_2/CastInsertion_0",
    }  # fmt: skip


def test_narrowed_programs_compute_the_same(tmp_path):
    module = Embedded()
    folder = saved(tmp_path / "p", module, IDS)
    for number, options in enumerate(
        [{}, {"excluded_nodes": ["clamp"]}, {"excluded_nodes": ["add"]}]
    ):
        out = tmp_path / f"o{number}"
        convert(folder, out, int64_to_int32_conversion=True, **options)
        for value, wanted in zip(results(out, ids=IDS).values(), module(IDS), strict=True):
            torch.testing.assert_close(value, wanted)


def test_values_that_do_not_fit_are_refused(tmp_path):
    folder = saved(tmp_path / "p", Embedded(), IDS)
    convert(folder, tmp_path / "o", int64_to_int32_conversion=True)
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match=rf"input 'ids'.*{value}.*int32"):
            results(tmp_path / "o", ids=torch.full((2, 3), value))
    assert results(tmp_path / "o", ids=IDS)["output_1"].dtype == torch.int64  # usable afterwards
    convert(folder, tmp_path / "q", int64_to_int32_conversion=True, excluded_nodes=["add"])
    with pytest.raises(ValueError, match=r"node 'add'.*int32"):
        results(tmp_path / "q", ids=torch.full((2, 3), 2**31))


class Large(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held
        if held:
            self.register_buffer("large", torch.tensor([2**40]))

    def forward(self, ids):
        return (ids + self.large if self.held else ids + 2**40).float()


@pytest.mark.parametrize(("held", "name"), [(True, "large"), (False, "add")])
def test_constants_that_do_not_fit_are_refused(tmp_path, held, name):
    folder = saved(tmp_path / "p", Large(held), IDS)
    with pytest.raises(ValueError, match=rf"'{name}'.*{2**40}.*int32"):
        convert(folder, tmp_path / "o", int64_to_int32_conversion=True)
    convert(folder, tmp_path / "o", int64_to_int32_conversion=True, excluded_nodes=["^add$"])


# GELU


class Layer(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.first, self.second, self.form = nn.Linear(4, 8), nn.Linear(8, 4), form

    def forward(self, x):
        h = self.first(x)
        if self.form == "erf":
            g = h * 0.5 * (1.0 + torch.erf(h / 2.0**0.5))
        elif self.form == "tanh":
            g = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))
        elif self.form == "wrong":
            g = h * 0.5 * (1.0 + torch.erf(h))
        else:
            g = nn.functional.gelu(h, approximate=self.form)
        return self.second(g)


class Layers(nn.Module):
    def __init__(self, *forms):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, forms))

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], -1)


INNER = [r"layers/\d/(mul|div|erf|add|pow|tanh|gelu)(_\d)?$"]
GELU = {
    "nodes": INNER,
    "node_as_gelu_input": [r"layers/\d/first/linear"],
    "node_use_gelu_output": [r"layers/\d/second/linear"],
}


def test_gelus_become_one_operator(tmp_path):
    torch.manual_seed(0)
    module = Layers("erf", "tanh", "none")
    folder = saved(tmp_path / "p", module, torch.randn(2, 4))
    result = draft(folder, gelu_replacement=GELU)
    gelus = [g for g in result.groups() if g.operator == "aten.gelu.default"]
    assert [g.name for g in gelus] == [f"layers/{i}/first/linear/IpuGelu" for i in range(3)]
    assert [g.nodes[0].kwargs["approximate"] for g in gelus] == ["none", "tanh", "none"]
    assert not {"erf", "tanh", "pow"} & {g.name.rpartition("/")[2] for g in result.groups()}
    convert(folder, tmp_path / "o", gelu_replacement=GELU)
    x = torch.randn(7, 4)[:2]
    value = results(tmp_path / "o", x=x)["output_0"]
    torch.testing.assert_close(value, module(x), rtol=0, atol=1e-6)


def test_two_readers_share_a_gelu(tmp_path):
    class Two(Layer):
        def forward(self, x):
            h = self.first(x)
            g = h * 0.5 * (1.0 + torch.erf(h / 2.0**0.5))
            return self.second(g) + self.second(g)

    folder = saved(tmp_path / "p", Two("erf"), torch.randn(2, 4))
    config = {
        **GELU,
        "nodes": ["^(mul|mul_1|div|erf|add)$"],
        "node_as_gelu_input": ["first/linear"],
    }
    result = draft(folder, gelu_replacement={**config, "node_use_gelu_output": ["second/linear"]})
    assert [g.name for g in result.groups() if "Gelu" in g.name] == ["first/linear/IpuGelu"]


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("wrong", {}, "no GELU"),
        ("erf", {"node_as_gelu_input": ["second"]}, "layers/0/second/linear.*starts at"),
        (
            "erf",
            {"node_use_gelu_output": ["nothing"]},
            "second/linear.*node_use_gelu_output",
        ),
        ("erf", {"nodes": [r"layers/0/(mul|div|add|mul_1)$"]}, "erf"),
        ("erf", {"nodes": [r"layers/0/(mul_1|add)$"]}, "starts at"),
        ("erf", {"nodes": ["layers", "cat"]}, "node_as_gelu_input matches no node"),
    ],
)
def test_what_is_no_gelu_is_refused(tmp_path, form, changes, words):
    folder = saved(tmp_path / "p", Layers(form), torch.randn(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, UserWarning), match=words):
            draft(folder, gelu_replacement={**GELU, **changes})


def test_nothing_matched_is_a_warning_that_changes_nothing(tmp_path):
    folder = saved(tmp_path / "p", Layers("erf"), torch.randn(2, 4))
    with pytest.warns(UserWarning, match="matches no node"):
        result = draft(folder, gelu_replacement={**GELU, "node_as_gelu_input": ["input_3"]})
    assert types(result) == types(draft(folder))


def test_a_gelu_that_is_a_result_is_refused():
    pytest.importorskip("google.protobuf")
    config = {
        "nodes": ["^(mul_4|Sqrt|truediv|Erf|add_3|mul_5)$", "Sqrt/x$"],
        "node_as_gelu_input": ["^MatMul_3$"],
        "node_use_gelu_output": ["^Reshape_9$"],
    }
    with pytest.raises(ValueError, match="result 'inner'"):
        draft(BERT, gelu_replacement=config)


# sharding


def test_the_last_list_that_matches_has_the_node(tmp_path):
    folder = saved(tmp_path / "p", Layers("erf", "tanh"), torch.randn(2, 4))
    shards = [["."], ["layers/1", "cat"], ["second"]]
    result = draft(
        folder, manual_sharding=shards, num_ipus=3, precision_mode="FP16",
        excluded_nodes=["layers/1/tanh"],
    )  # fmt: skip
    ipus = result.placement.ipus
    assert (ipus["layers/0/first/linear"], ipus["layers/1/first/linear"]) == (0, 1)
    assert (ipus["layers/1/second/linear"], ipus["cat"]) == (2, 1)
    assert "layers/1/tanh" not in ipus
    # a cast is where its reader is
    assert ipus["cat/CastInsertion_0"] == 1
    assert ipus["layers/1/first/linear/CastInsertion_0"] == 1


class Numbered(nn.Linear):
    """Reads a number of an input."""

    def __init__(self, use):
        super().__init__(6, 6)
        self.use = use

    def forward(self, x, count):
        number = count.item()
        torch._check(number > 0)
        torch._check(number < 4)
        return self.use(super().forward(x), number)


NUMBERS = {
    "factor": lambda h, number: h * number,
    "arithmetic": lambda h, number: h + (number * 2 + 1),
    "between IPU nodes": lambda h, number: (h * number).tanh(),
    "index": lambda h, number: h[number],
    "start": lambda h, number: h.narrow(0, number, 1),
    "constant": lambda h, number: h + torch.full((6,), number),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("factor", "start") else [pytest.mark.slow])
        for name in NUMBERS
    ],
)
def test_a_number_of_an_input_may_change_between_calls(tmp_path, name):
    """What reads it is on the host, in a program and before and behind an executable."""
    module = Numbered(NUMBERS[name])
    x = torch.randn(4, 6)
    folder = saved(tmp_path / "p", module, x, torch.tensor(3))
    convert(folder, tmp_path / "o")
    if "between" in name:
        with pytest.raises(ValueError, match="host node 'mul' lies between IPU nodes"):
            convert(folder, tmp_path / "e", **embedded())
    else:
        convert(folder, tmp_path / "e", **embedded())
    for out in ("o", "e") if "between" not in name else "o":
        with load(tmp_path / out)["serving_default"] as signature:
            for number in (3, 2, 1):
                count = torch.tensor(number)
                (found,) = signature(x=x, count=count).values()
                torch.testing.assert_close(found, module(x, count))


def test_a_size_that_a_number_tells_is_refused_on_an_ipu(tmp_path):
    module = Numbered(lambda h, number: h[:, :number].sum(1))
    folder = saved(tmp_path / "p", module, torch.randn(4, 6), torch.tensor(3))
    with pytest.raises(ValueError, match=r"node 'sum'.* reads a size that only computing tells"):
        convert(folder, tmp_path / "o")
    convert(folder, tmp_path / "o", excluded_nodes=["^sum"])
    x, count = torch.randn(4, 6), torch.tensor(2)
    (found,) = results(tmp_path / "o", x=x, count=count).values()
    torch.testing.assert_close(found, module(x, count))


def test_no_option_changes_nothing(tmp_path):
    folder = saved(tmp_path / "p", Layers("erf"), torch.randn(2, 4))
    with SavedPrograms(folder).signature(["serve"], "serving_default") as signature:
        plain = from_exported(signature)
    before = str(plain.graph)
    assert [rewrite.name for rewrite in passes(read_options({})) if rewrite(plain)] == [
        "PlaceNodes"
    ]
    assert str(plain.graph) == before


def test_a_second_run_changes_nothing(tmp_path):
    folder = saved(tmp_path / "p", Layers("erf", "tanh"), torch.randn(2, 4))
    options = read_options(
        {"gelu_replacement": GELU, "precision_mode": "FP16", "int64_to_int32_conversion": True}
    )
    with SavedPrograms(folder).signature(["serve"], "serving_default") as signature:
        result = from_exported(signature)
    for rewrite in passes(options):
        rewrite(result)
        text = str(result.graph)
        if rewrite.name not in ("ReplaceGelu", "PlaceNodes"):
            rewrite(result)
            assert str(result.graph) == text
