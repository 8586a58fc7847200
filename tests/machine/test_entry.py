"""Check every way to ask for a prediction; without a question nothing of it is loaded."""

import json
import os
import random
import subprocess
import sys
from functools import reduce
from importlib.util import find_spec
from operator import getitem

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Block, InputError, Options, Strategy, compile_training, predict, programs
from ipu_dynamo.errors import IpuError, OptionError
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.products.search import plan_product
from ipu_dynamo.program import Program
from ipu_dynamo.runtime.engines import engines
from tests.machine.test_column_json import JUNK, places
from tests.saved_model.converting import converted, embedded, inputs, save_branches


class Net(nn.Module):
    """Layers on two IPUs with a loss."""

    def __init__(self, layers=2, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, y):
        for number, layer in enumerate(self.layers):
            with Block(f"b{2 * number // len(self.layers)}", 2 * number // len(self.layers)):
                x = layer(x).relu()
        with Block("loss", 1):
            return nn.functional.mse_loss(x, y)


OPTIONS = Options(gradient_accumulation=4, strategy=Strategy(kind="pipelined"), engine="eager")


def net(device="cpu", **sizes):
    with torch.device(device):
        model = Net(**sizes)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 16)


def without_names(prediction):
    """A prediction as data, without what names the model and how it was asked for."""
    value = json.loads(prediction.to_json())
    return {k: v for k, v in value.items() if k not in ("model", "reproduce")}


@pytest.fixture
def no_engine(monkeypatch):
    """Raise where an engine is made."""

    def refuse(*_, **__):
        raise AssertionError("a prediction needs no engine")

    monkeypatch.setattr(engines, "make_engine", refuse)
    monkeypatch.setattr("ipu_dynamo.whole_step.lowering.make_engine", refuse)


def test_a_model_on_meta_a_compiled_model_a_program_and_its_text_agree(monkeypatch):
    model, optimizer, x = net("meta")
    with monkeypatch.context() as patch:
        patch.setattr("ipu_dynamo.whole_step.lowering.make_engine", None)
        asked = predict(model, x, x, optimizer=optimizer, options=OPTIONS, machine="bow")
        model, optimizer, x = net()
        step = compile_training(model, optimizer, OPTIONS)
        rows = x.repeat(4, 1)
        before = predict(step, rows, rows)
    with pytest.raises(IpuError):  # it stayed as it was
        _ = step.program
    step(rows, rows)
    after = predict(step)
    program = programs()[-1]
    of_program, of_text = predict(program), predict(Program.parse(program.text()))
    expected = without_names(asked)
    for other in (before, after, of_program, of_text):
        assert without_names(other) == expected
    assert asked.model == after.model == "Net"
    assert asked.cycles > 0
    assert asked.items_per_second == pytest.approx(16 / asked.step_seconds)


@pytest.mark.usefixtures("no_engine")
def test_inference_of_a_function_is_predicted():
    prediction = predict(lambda x: x.exp() @ x.T, torch.ones(8, 8, device="meta"), machine="mk2")
    assert prediction.kind == "inference"
    assert [row.operator for row in prediction.operators] == [
        "aten.exp.default",
        "aten.mm.default",
    ]


def test_programs_of_torch_compile_are_predicted_each_for_itself():
    torch._dynamo.reset()
    model = nn.Linear(16, 16)
    compiled = torch.compile(model, backend="ipu", options={"engine": "eager"})
    compiled(torch.ones(4, 16)).sum().backward()
    forward, backward = (predict(program) for program in programs()[-2:])
    assert (forward.kind, backward.kind) == ("forward", "backward")
    for prediction in (forward, backward):
        assert prediction.cycles > 0
        assert any("no update" in note for note in prediction.notes)


KERAS = """
import numpy, keras
from ipu_dynamo import predict, programs
from ipu_dynamo.keras import IPUStrategy
with IPUStrategy(1).scope():
    model = keras.Sequential([keras.layers.Dense(4, input_shape=(8,))])
    model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(numpy.ones((8, 8)), numpy.ones((8, 4)), batch_size=4, verbose=0)
prediction = predict(programs()[-1])
assert prediction.cycles > 0
print(prediction.kind, prediction.micro_batch_rows, end="")
"""


@pytest.mark.slow
def test_programs_of_a_keras_fit_are_predicted():
    if find_spec("keras") is None:
        pytest.skip("keras is not installed")
    assert python(KERAS, KERAS_BACKEND="torch") == "training 4"


def test_programs_of_a_saved_model_conversion_are_predicted(tmp_path):
    save_branches(tmp_path / "saved")
    made = set(map(id, programs()))
    signature = converted(tmp_path / "saved", tmp_path / "out", **embedded())
    signature(**inputs(4))
    new = [program for program in programs() if id(program) not in made]
    assert new
    for program in new:
        prediction = predict(program, machine="mk2")
        assert prediction.kind == "inference"
        assert prediction.cycles > 0


ASK_NOTHING = """
import sys, torch
import ipu_dynamo
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return torch.nn.functional.mse_loss(self.model(x), x)
step = ipu_dynamo.compile_training(Loss(), optimizer, {"engine": "eager"})
step(torch.ones(4, 4))
print([name for name in sys.modules if name.startswith("ipu_dynamo.machine")], end="")
"""

ASK = """
import sys, torch
from ipu_dynamo import Options, predict
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        y = x
        for layer in self.layers:
            y = torch.nn.functional.dropout(layer(y).tanh(), 0.1)
        return torch.nn.functional.mse_loss(y, x)
with torch.device("meta"):
    model, x = Loss().half(), torch.ones(4, 8).half()
prediction = predict(model, x, optimizer=torch.optim.AdamW(model.parameters()), options={})
open(sys.argv[1], "wb").write(prediction.to_json())
"""


def python(code, *arguments, **environment):
    """What a fresh process prints."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_training_without_a_question_loads_nothing_of_the_machine():
    assert python(ASK_NOTHING) == "[]"


@pytest.mark.slow
def test_json_of_processes_with_other_hash_seeds_is_equal_and_reads_back(tmp_path):
    files = [tmp_path / name for name in ("one", "two")]
    for seed, file in enumerate(files):
        python(ASK, str(file), PYTHONHASHSEED=str(seed + 1))
    one, two = (file.read_bytes() for file in files)
    assert one == two
    assert Prediction.from_json(one).to_json() == one


def test_mutations_of_a_prediction_are_read_or_refused_in_one_line():
    model, optimizer, x = net("meta")
    content = predict(model, x, x, optimizer=optimizer, options=OPTIONS).to_json()
    drawn, refused = random.Random(0), 0
    every = places(json.loads(content))[1:]
    for _ in range(500):
        value = json.loads(content)
        *path, last = drawn.choice(every)
        parent = reduce(getitem, path, value)
        if drawn.random() < 0.5:
            parent[last] = drawn.choice(JUNK)
        else:
            del parent[last]
        try:
            Prediction.from_json(json.dumps(value).encode())
        except ValueError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017  # some are read
            refused += 1
    assert refused > 250


@pytest.mark.parametrize("position", [-1, 10**6])
@pytest.mark.parametrize(
    "path",
    [
        ("verdict", "ipu"),
        ("operators", "uses", 0, "module", 0),
        ("blocks", "operators", 0, 0),
        ("calls", "block", 0),
        ("calls", "ipu", 0),
    ],
)
def test_a_position_outside_of_its_list_is_refused(path, position):
    model, optimizer, x = net("meta")
    prediction = predict(model, x, x, optimizer=optimizer, options=OPTIONS)
    value = json.loads(prediction.to_json())
    *inner, last = path
    reduce(getitem, inner, value)[last] = position
    with pytest.raises(ValueError, match=f"is {position}; there are"):
        Prediction.from_json(json.dumps(value).encode())


def test_twice_as_many_layers_search_no_more_plans():
    searched = []
    for layers in (24, 48):
        plan_product.cache_clear()
        model, optimizer, x = net("meta", layers=layers)
        predict(model, x, x, optimizer=optimizer, options=OPTIONS)
        searched.append(plan_product.cache_info().misses)
    assert searched[0] == searched[1] > 0


def test_too_many_ipus_are_refused_with_both_numbers():
    model, optimizer, x = net("meta")
    options = Options(gradient_accumulation=4, strategy=Strategy(kind="pipelined"), replicas=8)
    with pytest.raises(OptionError, match=r"needs 16 IPUs.* pod4 has 4"):
        predict(model, x, x, optimizer=optimizer, options=options, machine="pod4")


def test_what_is_no_question_is_refused():
    model, optimizer, x = net()
    step = compile_training(model, optimizer, OPTIONS)
    with pytest.raises(InputError, match="has its optimizer and options already"):
        predict(step, x, options=OPTIONS)
    with pytest.raises(InputError, match="no model and no program"):
        predict(3)
    with pytest.raises(OptionError, match="no machine is named"):
        predict(model, x, x, machine="mk9")
    assert "predict" in ipu_dynamo.__all__
