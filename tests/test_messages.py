"""Check that messages which first-time users meet say what to write instead."""

import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

from ipu_dynamo import (
    BackendOptions,
    IpuError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.saved_model import save
from ipu_dynamo.saved_model.command.main import main

SERVE = ("--tag_set", "serve", "--signature_def", "serving_default")


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids):
        return self.table(ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Options(strategy="pipelined"),
            'option strategy takes an ipu_dynamo.Strategy, such as Strategy(kind="pipelined"), '
            "not the str 'pipelined'",
        ),
        (
            lambda: BackendOptions(micro_batches="4"),
            "option micro_batches takes an int of at least 1, not the str '4'",
        ),
        (lambda: Options(replicas=0), "option replicas takes an int of at least 1, not 0"),
        (
            lambda: Options(replicas=True),
            "option replicas takes an int of at least 1, not the bool",
        ),
        (
            lambda: Options(workers=1.5),
            "option workers takes an int of at least 1, or None, not the",
        ),
        (
            lambda: Strategy(ipus="2"),
            "strategy ipus takes an int of at least 1, or None, not the str",
        ),
        (lambda: Options(narrow=1), "option narrow takes True or False, not 1"),
        (lambda: Options(seed="3"), "option seed takes an int or None, not the str '3'"),
        (
            lambda: Options(gradient_acumulation=2),
            "there is no option 'gradient_acumulation'; did you mean: gradient_accumulation?",
        ),
        (
            lambda: BackendOptions(max_autotune=True),
            "there is no option 'max_autotune'; it is one of Inductor: torch.compile(model, "
            'backend="inductor") takes it, and torch._inductor.config.max_autotune = ... sets it',
        ),
        (
            lambda: BackendOptions.read({"max_autotune": True}),
            "there is no option 'max_autotune'; it is one of Inductor",
        ),
        (lambda: BackendOptions.read({"xyz": 1}), "there is no option 'xyz'; there are engine, "),
        (
            lambda: BackendOptions.read({"devices": "cuda"}),
            "option devices has no meaning for torch.compile: each layer runs where its weights ",
        ),
    ],
)
def test_an_option_that_cannot_be_says_what_can(make, message):
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_a_wrong_variable_for_the_start_is_told_on_the_eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_START", "later")
    with pytest.raises(OptionError, match="IPU_DYNAMO_START is 'later'; choose one of compiled, n"):
        compile_inference(nn.Linear(3, 1), Options(engine="eager"))(torch.ones(2, 3))


def test_options_that_exist_are_taken_by_name_and_position():
    assert Options("eager", gradient_accumulation=2).gradient_accumulation == 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("table", {"serving_default": (Table().eval(), (torch.zeros(2, dtype=torch.int64),))})
    return tmp_path


def last_line(capsys, *words, status):
    try:
        done = main(words)
    except SystemExit as wrong_usage:
        done = wrong_usage.code
    printed = capsys.readouterr()
    assert done == status, printed
    return (printed.err or printed.out).splitlines()[-1]


def test_backward_of_what_a_step_returns_says_that_it_is_done():
    class Summed(nn.Linear):
        def forward(self, x):
            return identity_loss(super().forward(x), "sum")

    model = Summed(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = compile_training(model, sgd, Options(engine="eager"))(torch.ones(2, 3))
    with pytest.raises(IpuError, match="the call has done the backward pass and the update"):
        loss.backward()
    assert "backward" not in vars(pickle.loads(pickle.dumps(loss)))
    inferred = compile_inference(nn.Linear(3, 1), Options(engine="eager"))(torch.ones(2, 3))
    assert not vars(inferred)


def nothing():
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "it does not exist"),
        (
            lambda: torch.jit.script(nn.Linear(3, 3)).save("there"),
            "it is TorchScript; export the model, torch.export.export, and write it with torch.",
        ),
        (
            lambda: torch.save(nn.Linear(3, 3).state_dict(), "there"),
            "torch.save wrote it, which keeps no program; export the model, torch.export.export",
        ),
        (lambda: open("there", "w").close(), "it is no .pt2 file, and no folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_path_without_a_program_says_what_is_there(make, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make()
    line = last_line(capsys, "show", "--dir", "there", status=1)
    assert line.startswith(f"error: no saved program found in there: {message}")


def test_a_folder_without_a_program_says_what_is_missing(tmp_path, capsys):
    line = last_line(capsys, "show", "--dir", str(tmp_path), status=1)
    assert re.search("no saved program found in .*: it has no .pt2 file and no ", line)


def test_an_operator_that_fails_names_its_node_and_inputs(folder, capsys):
    np.save("ids.npy", np.array([3, 12]))
    line = last_line(capsys, "run", "--dir", "table", *SERVE, "--inputs", "ids=ids.npy", status=1)
    assert line == "error: index out of range in self, in node table/embedding, input ids"


def test_options_of_a_conversion_before_its_method_are_told_where_to_go(folder, capsys):
    words = ["convert", "--dir", "table", "--output_dir", "out", *SERVE, "--num_ipus", "2"]
    line = last_line(capsys, *words, status=2)
    assert "options of a conversion come after ipu: convert ... ipu --num_ipus 2" in line


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_conversion_says_where_nodes_went(engine, folder, capsys, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", engine)
    words = ["convert", "--dir", "table", "--output_dir", "out", *SERVE, "ipu"]
    assert last_line(capsys, *words, status=0) == f"{folder / 'out'} is written: 1 node on IPU 0"
    words = [*words[:4], "other", *words[5:], "--excluded_nodes", "table/"]
    line = last_line(capsys, *words, status=0)
    assert line == f"{folder / 'other'} is written: 1 node on the host"


def test_a_function_of_numpy_without_its_module_is_told_its_name(folder, capsys):
    words = ["run", "--dir", "table", *SERVE, "--input_exprs", "ids=random.randint(3,size=(2,))"]
    assert last_line(capsys, *words, status=1).endswith("write np.random.randint")


def test_a_warning_is_at_the_line_of_the_user(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")

    def broken(x):
        return x * 2 if x.sum().item() > 0 else x

    with pytest.warns(UserWarning, match="PyTorch breaks the graph") as caught:
        torch.compile(broken, backend="ipu")(torch.ones(2))
    assert caught[0].filename == __file__
