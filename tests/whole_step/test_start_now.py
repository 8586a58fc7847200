"""Check that steps run before their functions are compiled, and that these take over."""

import copy
import logging
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    Options,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.errors import CompileError, ExecutionError, OptionError
from ipu_dynamo.options.loss_scaling import AutomaticLossScaling
from ipu_dynamo.options.options import START
from ipu_dynamo.runtime.engines.pending_code import OnlyHere, begin_compiling
from ipu_dynamo.saved.options_json import read_options, write_options
from ipu_dynamo.saved.refusal import SavedProgramError
from ipu_dynamo.testing import assert_same_bits
from tests.whole_step import start_now
from tests.whole_step.start_now import HeldEngine

EAGER_CALLS, COMPILED_CALLS = 4, 3


class Net(nn.Module):
    """Layers with dropout and running statistics, on two IPUs if wanted."""

    def __init__(self, ipus=1):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        if ipus == 2:
            BeginBlock(self.a, ipu_id=0)
            BeginBlock(self.b, ipu_id=1)

    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.norm(self.a(x))), 0.25, self.training)
        return F.mse_loss(self.b(hidden), x[:, :3])


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.b = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, rows):
        return F.mse_loss(self.b(self.table(rows)), torch.ones(len(rows), 2).to(self.b.weight))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.5)


def traced(parameters):
    """Its step is traced, and the first one differs from the others."""
    return torch.optim.NAdam(parameters, lr=0.05)


# IPUs, the optimiser, rows of a call, options, and whether compiled steps are fused
FORMS = {
    "fused": (1, adamw, 8, {}, True),
    "micro-batches": (1, adamw, 8, {"gradient_accumulation": 2}, False),
    "iterations": (1, adamw, 16, {"device_iterations": 2}, True),
    "pipeline": (
        2,
        adamw,
        16,
        {"gradient_accumulation": 4, "strategy": Strategy("pipelined"), "workers": 2},
        False,
    ),
    "replicas": (1, adamw, 16, {"replicas": 2}, False),
    "traced": (1, traced, 8, {"gradient_accumulation": 2}, False),
    "traced and fused": (1, traced, 8, {}, None),
    "guarded": (1, adamw, 8, {"gradient_accumulation": 2, "guard_updates": True}, False),
    "on the host": (1, traced, 8, {"gradient_accumulation": 2, "update": "host"}, False),
    "momentum": (1, momentum, 8, {"gradient_accumulation": 2}, False),
}


def started(monkeypatch, form, held=None, **more):
    """A model in training with `start="now"`, its engine, and the rows of each call."""
    ipus, optimizer, rows, options, _ = FORMS[form]
    engine = start_now.use(monkeypatch, held or HeldEngine())
    model = Net(ipus)
    given = {"engine": "inductor", "start": "now", "seed": 1} | options | more
    update = given.pop("update", "program")
    step = compile_training(model, optimizer(model.parameters()), Options(**given), update=update)
    torch.manual_seed(1)
    return step, engine, torch.randn(EAGER_CALLS + COMPILED_CALLS, rows, 6)


def states_of(step):
    step.read_optimizer_state()
    return [step.model.state_dict(), step._link.optimizer.state_dict()["state"]]


def resumed(monkeypatch, form, step, **options):
    """A further training that goes on from the state of another one, without `start`."""
    states = copy.deepcopy(states_of(step))
    other, engine, _ = started(monkeypatch, form, start="compiled", **options)
    engine.kept = None  # it is asked nothing
    other.model.load_state_dict(states[0])
    whole = other._link.optimizer.state_dict() | {"state": states[1]}
    other._link.optimizer.load_state_dict(whole)
    return other


@pytest.mark.parametrize(
    "form",
    [
        "fused",
        "pipeline",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in FORMS
            if name not in ("fused", "pipeline")
        ),
    ],
)
def test_four_calls_run_operator_by_operator_and_the_next_one_compiled(monkeypatch, form):
    step, engine, calls = started(monkeypatch, form)
    alone, _, _ = started(monkeypatch, form, engine, engine="eager", start="compiled")
    for x in calls[:EAGER_CALLS]:
        assert_same_bits(step(x), alone(x))
    assert engine.compiled == 0
    assert engine.asked == 1
    assert step.executable.host_program.plan.engine == "eager"
    assert_same_bits(states_of(step), states_of(alone))
    compiled = resumed(monkeypatch, form, step)
    compiled.compile(calls[0])
    compiled.executable.set_random_state(step.executable.seed, step.executable.step)
    engine.let_go.set()
    for x in calls[EAGER_CALLS:]:
        assert_same_bits(step(x), compiled(x))
    assert engine.compiled > 0
    assert_same_bits(states_of(step), states_of(compiled))
    iterations = step.options.device_iterations
    assert step.executable.step == len(calls) * iterations
    fused = FORMS[form][-1]
    assert fused is None or bool(step.executable.fused) is fused
    text = str(step.executable.host_program)
    assert f"compiled functions: from step {EAGER_CALLS * iterations} on" in text
    assert "host program: inductor" in text


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["momentum", "traced"])
def test_what_is_written_after_the_takeover_acts(monkeypatch, form):
    step, engine, calls = started(monkeypatch, form)
    step(calls[0])
    engine.let_go.set()
    step(calls[1])
    assert engine.compiled
    other = resumed(monkeypatch, form, step)
    other.compile(calls[0])
    other.executable.set_random_state(step.executable.seed, step.executable.step)
    for x in calls[2:4]:
        for each in (step, other):
            optimizer = each._link.optimizer
            if form == "momentum":
                optimizer.state.clear()  # the next step begins the momenta anew
            for state in optimizer.state.values():
                state["step"] += 5
            each.write_optimizer_state()
            optimizer.param_groups[0]["weight_decay"] += 0.25  # also one that was 0
        assert_same_bits(step(x), other(x))
        assert_same_bits(states_of(step), states_of(other))


def test_variables_stay_where_they_are(monkeypatch):
    step, engine, calls = started(monkeypatch, "replicas")
    step(calls[0])
    executable = step.executable
    places = [(v.name, r) for v in executable.program.variables for r in range(2)]
    before = [executable.tensor(*place) for place in places]
    engine.let_go.set()
    step(calls[1])
    assert engine.compiled
    assert all(executable.tensor(*p) is t for p, t in zip(places, before, strict=True))


def test_an_automatic_loss_scale_goes_on(monkeypatch):
    engine, steps = start_now.use(monkeypatch, HeldEngine()), []
    scaling = AutomaticLossScaling(edge=0.001, period=2)
    for name, start in (("inductor", "now"), ("eager", "compiled")):
        model = Lookup().half()
        options = {"loss_scale": 8192.0, "automatic_loss_scaling": scaling}
        options = Options(name, gradient_accumulation=2, start=start, **options)
        steps.append(compile_training(model, momentum(model.parameters()), options))
    rows, seen = torch.arange(5).repeat(2), set()
    for number in range(6):
        for step in steps:
            step(rows)
        if number == 3:  # the scale has just changed
            engine.let_go.set()
            steps[0].executable.finish_compiling()
            assert engine.compiled
        held, alone = ((step.loss_scale, step.last_loss_scale) for step in steps)
        assert held == alone
        seen.add(held)
    assert len(seen) > 2


def test_hyperparameters_may_change_while_functions_are_compiled(monkeypatch):
    """Also to others that a compiled step leaves out: then its function is compiled elsewhere."""
    step, engine, calls = started(monkeypatch, "fused")
    alone, _, _ = started(monkeypatch, "fused", engine, engine="eager", start="compiled")
    for number, x in enumerate(calls[:EAGER_CALLS]):
        for each in (step, alone):
            each._link.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        assert_same_bits(step(x), alone(x))
    for each in (step, alone):
        each._link.optimizer.param_groups[0]["weight_decay"] = 0.0
    engine.let_go.set()
    engine.let_go, first = threading.Event(), engine.let_go
    assert first.is_set()
    monkeypatch.setattr(step.executable._later._pending, "ready", lambda: True)
    assert_same_bits(step(calls[4]), alone(calls[4]))
    assert (engine.compiled, engine.asked) == (0, 2)
    engine.let_go.set()
    step(calls[5])
    assert engine.compiled == 1
    assert step.executable.fused.now.fused.zeros == {(0, "weight_decay")}


def test_inference_starts_now(monkeypatch):
    engine = start_now.use(monkeypatch, HeldEngine())
    model = Net().eval()
    run = compile_inference(model, Options("inductor", start="now"))
    x = torch.randn(8, 6)
    with torch.inference_mode():
        assert_same_bits(run(x), model(x))
        assert engine.compiled == 0
        engine.let_go.set()
        torch.testing.assert_close(run(x), model(x))
    assert engine.compiled == 1


def test_all_code_that_was_kept_begins_with_the_first_step(monkeypatch):
    step, engine, calls = started(monkeypatch, "fused")
    step(calls[0])
    engine.let_go.set()
    step(calls[1])
    again, _, _ = started(monkeypatch, "fused", engine)
    engine.let_go.clear()
    again(calls[0])
    assert again.executable.fused
    assert "compiled functions: from the first step on" in str(again.executable.host_program)


def test_compile_and_a_saved_program_wait(monkeypatch, tmp_path):
    step, engine, calls = started(monkeypatch, "fused")
    step(calls[0])
    timer = threading.Timer(0.2, engine.let_go.set)
    timer.start()
    ipu_dynamo.save(step, str(tmp_path / "saved"))
    timer.join()
    assert step.executable.fused
    other, engine, _ = started(monkeypatch, "micro-batches")
    timer = threading.Timer(0.2, engine.let_go.set)
    timer.start()
    other.compile(calls[0])
    timer.join()
    assert engine.compiled == 1
    assert other.executable.step == 0


def test_a_checkpoint_does_not_wait(monkeypatch, tmp_path):
    step, engine, calls = started(monkeypatch, "fused")
    step(calls[0])
    ipu_dynamo.save_checkpoint(tmp_path, step)
    alone = [step(x) for x in calls[1:3]]
    again, _, _ = started(monkeypatch, "fused", engine)
    ipu_dynamo.load_checkpoint(tmp_path, again)
    assert_same_bits([again(x) for x in calls[1:3]], alone)
    assert engine.compiled == 0


def test_errors_of_steps_undo_them_before_and_after_the_takeover(monkeypatch):
    rows, wrong = torch.arange(5), torch.tensor([0, 1, 2, 3, 9])
    engine, steps = start_now.use(monkeypatch, HeldEngine()), []
    for options in (Options("inductor", start="now"), Options("inductor")):
        model = Lookup()
        steps.append(compile_training(model, adamw(model.parameters()), options))
    held, compiled = steps
    held(rows)
    with pytest.raises(ExecutionError):
        held(wrong)
    engine.let_go.set()
    with pytest.raises(ExecutionError):
        held(wrong)
    assert held.executable.step == 1
    assert held.executable.fused
    held(rows)
    for _ in range(2):
        compiled(rows)
    torch.testing.assert_close(held.model.state_dict(), compiled.model.state_dict())
    assert held.executable.step == 2


def test_an_interrupted_takeover_is_made_up_by_the_next_call(monkeypatch):
    step, engine, calls = started(monkeypatch, "micro-batches")
    step(calls[0])
    engine.let_go.set()
    compile_ = engine.compile

    def interrupted(recipes):
        engine.compile = compile_
        raise KeyboardInterrupt

    engine.compile = interrupted
    with pytest.raises(KeyboardInterrupt):
        step(calls[1])
    assert step.executable.step == 1
    step(calls[1])
    assert step.executable.step == 2
    assert step.executable.host_program.plan.engine == "inductor"


@pytest.mark.parametrize("form", ["fused", "micro-batches"])
def test_training_goes_on_if_functions_cannot_be_compiled(monkeypatch, caplog, form):
    step, engine, calls = started(monkeypatch, form)
    alone, _, _ = started(monkeypatch, form, engine, engine="eager", start="compiled")
    assert_same_bits(step(calls[0]), alone(calls[0]))
    engine.fail("@step0: g++: fatal error")
    with caplog.at_level(logging.WARNING, "ipu_dynamo"):
        for x in calls[1:]:
            assert_same_bits(step(x), alone(x))
        step.executable.finish_compiling()
    (warning,) = caplog.records
    assert "@step0: g++: fatal error" in warning.getMessage()
    assert "g++: fatal error" in str(step.executable.host_program)
    assert engine.compiled == 0


def test_code_that_cannot_be_kept_is_asked_for_once(monkeypatch, caplog):
    step, engine, calls = started(monkeypatch, "micro-batches")
    step(calls[0])
    engine.kept = frozenset()  # whatever is added, it stays empty
    monkeypatch.setattr(step.executable._later._pending, "ready", lambda: True)
    with caplog.at_level(logging.WARNING, "ipu_dynamo"):
        for x in calls[1:]:
            step(x)
    assert ["could not be kept" in r.getMessage() for r in caplog.records] == [True]
    assert engine.asked == 2


def test_functions_that_only_this_process_can_compile_come_first(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "ipu_dynamo"):
        step, engine, calls = started(monkeypatch, "fused", HeldEngine("it has mylib::f"))
        step(calls[0])
    assert engine.compiled == 1
    (warning,) = caplog.records
    assert "it has mylib::f" in warning.getMessage()
    assert "it has mylib::f" in str(step.executable.host_program)


@pytest.mark.slow
def test_functions_are_compiled_here_if_another_process_would_make_other_code(monkeypatch):
    step, engine, calls = started(monkeypatch, "traced")
    alone, _, _ = started(monkeypatch, "traced", engine, engine="eager", start="compiled")
    for x in calls[:3]:
        assert_same_bits(step(x), alone(x))
    variants = len(step.executable.other_updates)
    assert variants
    engine.failure = OnlyHere("settings")
    for x in calls[3:]:
        torch.testing.assert_close(step(x), alone(x))
    assert engine.compiled
    assert step.executable.host_program.plan.engine == "inductor"
    assert len(step.executable.other_updates) == variants


def test_errors_of_passes_are_raised(monkeypatch):
    step, engine, calls = started(monkeypatch, "fused")
    step(calls[0])
    engine.let_go.set()

    def refuse(*_):
        raise CompileError("a pass refuses it")

    later = step.executable._later
    monkeypatch.setattr(later, "_inputs", replace(later._inputs, fuse_again=refuse))
    step._link.optimizer.param_groups[0]["weight_decay"] = 0.0
    for _ in range(2):
        with pytest.raises(CompileError, match="a pass refuses it"):
            step(calls[1])


def test_an_operator_of_others_is_such_a_reason(monkeypatch):
    """Its process alone has it, and the key of the code cannot name what it computes."""
    with torch.library._scoped_library("start_now_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("double", torch.empty_like, "Meta")

        def model(x):
            return torch.ops.start_now_test.double(x) + 1

        engine = start_now.use(monkeypatch, HeldEngine())
        engine.begin = begin_compiling
        run = compile_inference(model, Options("inductor", start="now"))
        x = torch.randn(3)
        torch.testing.assert_close(run(x), model(x))
        text = str(run.executable.host_program)
    assert "operators, or Inductor passes, that only this process has" in text


def test_a_new_program_drops_the_one_that_waits(monkeypatch):
    step, engine, calls = started(monkeypatch, "fused")
    alone, _, _ = started(monkeypatch, "fused", engine, engine="eager", start="compiled")
    for each in (step, alone):
        each(calls[0])
    pending = step.executable._later._pending
    for each in (step, alone):
        each.prepare(calls[1][:4])
    assert pending.stopped
    assert_same_bits(step(calls[1][:4]), alone(calls[1][:4]))
    assert engine.compiled == 0
    engine.let_go.set()
    step(calls[2][:4])
    assert engine.compiled == 1


@pytest.fixture
def one_thread():
    """A fork has no other; and with as many in both, the keys of their code are the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_forked_process_waits_for_none_and_lets_its_functions_be_compiled(monkeypatch):
    step, engine, calls = started(monkeypatch, "micro-batches")
    alone, _, _ = started(monkeypatch, "micro-batches", engine, engine="eager", start="compiled")
    for each in (step, alone):
        each(calls[0])
    expected = alone(calls[1])
    same = asked = None
    if (child := os.fork()) == 0:
        signal.alarm(120)
        try:
            same, asked = torch.equal(step(calls[1]), expected), engine.asked
            engine.let_go.set()
            step(calls[2])
        finally:
            os._exit(0 if same and asked == 2 and engine.compiled else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert_same_bits(step(calls[1]), expected)


def test_the_variable_decides_for_programs_that_leave_it_open(monkeypatch):
    monkeypatch.delenv(START, raising=False)
    assert not Options().starts_now
    monkeypatch.setenv(START, "now")
    assert Options().starts_now
    assert not Options(start="compiled").starts_now
    monkeypatch.setenv(START, "later")
    with pytest.raises(OptionError, match=START):
        _ = Options().starts_now
    with pytest.raises(OptionError, match="start"):
        Options(start="soon")


def test_torch_compile_refuses_the_option_and_ignores_the_variable(monkeypatch):
    monkeypatch.setenv(START, "now")
    model = torch.compile(lambda x: x * 2, backend="ipu", options={"start": "now"})
    with pytest.raises(Exception, match="option start has no meaning"):
        model(torch.ones(2))
    ignored = torch.compile(lambda x: x * 2, backend="ipu", options={"engine": "eager"})
    assert_same_bits(ignored(torch.ones(2)), torch.full((2,), 2.0))


def test_a_saved_program_has_no_start(monkeypatch):
    assert write_options(Options(start="now")) == {}
    with pytest.raises(SavedProgramError, match="no option start"):
        read_options({"start": "now"})
