"""Check what is written to a program's variables from outside of its steps."""

import copy
import threading
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import Block, InputError, IpuError, Strategy, compile_training, identity_loss

PATIENCE = 20.0  # seconds; a test that waits so long has failed
ROWS, STEPS = 4, 4
SCALED = {"loss_scale_is_variable": True}


def nothing():
    """What a model does within a step, where that is not the point."""


watch = [nothing]  # what the operator below calls


@torch.library.custom_op("tests::watched", mutates_args=())
def watched(x: Tensor) -> Tensor:
    watch[0]()
    return x.clone()


watched.register_fake(torch.empty_like)
watched.register_autograd(lambda context, gradient: gradient)


@pytest.fixture(autouse=True)
def nothing_is_watched():
    yield
    watch[0] = nothing


class Two(nn.Module):
    """Two layers on one IPU or two, a buffer that counts, and an operator in Python."""

    def __init__(self, *, ipus=1, watches=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))
        self.ipus, self.watches = ipus, watches

    def forward(self, x):
        with Block("first", ipu_id=0):
            hidden = self.first(x).tanh()
            self.count += 1
        with Block("second", ipu_id=self.ipus - 1):
            y = self.second(watched(hidden) if self.watches else hidden)
            return y * self.count, identity_loss(y.square(), "mean")


def trained(*, ipus=1, watches=True, **options):
    """The training of a model by momentum."""
    model = Two(ipus=ipus, watches=watches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = compile_training(model, optimizer, {"engine": "eager", **options})
    optimizers[compiled] = optimizer
    return compiled


def weights(compiled):
    with torch.no_grad():
        changed = {name: 0.5 * tensor + 0.1 for name, tensor in STATE.items()}
        compiled.model.load_state_dict(changed)
    compiled.write_weights()


def optimizer_state(compiled):
    optimizers[compiled].load_state_dict(copy.deepcopy(MOMENTA))
    compiled.write_optimizer_state()


def states(compiled):
    compiled.write_states(
        {
            name: {state: torch.full_like(tensor, 0.25) for state, tensor in of_each.items()}
            for name, of_each in compiled.states().items()
        }
    )


def loss_scale(compiled):
    compiled.set_loss_scale(4.0)


def made_momenta():
    """The state of an optimiser after a step."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(ROWS, 3))[1].backward()
    optimizer.step()
    return optimizer.state_dict()


STATE, MOMENTA = copy.deepcopy(Two().state_dict()), made_momenta()
optimizers = WeakKeyDictionary()
PATHS = [weights, optimizer_state, states, loss_scale]


def variables(executable):
    """What the variables hold on each replica."""
    return [
        executable.tensor(variable.name, replica).clone()
        for variable in executable.program.variables
        for replica in executable.replicas.holders(variable)
    ]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("write", PATHS[1:], ids=lambda path: path.__name__)
def test_a_write_waits_for_the_call_of_another_thread(write):
    begun, go_on, written = (threading.Event() for _ in range(3))

    def wait():
        begun.set()
        assert go_on.wait(PATIENCE)

    def write_meanwhile():
        write(ours)
        written.set()

    ours, theirs = trained(**SCALED), trained(**SCALED)
    x = torch.randn(ROWS, 3)
    ours(x), theirs(x)
    results, watch[0] = [], wait
    call = threading.Thread(target=lambda: results.append(ours(x)))
    call.start()
    assert begun.wait(PATIENCE)
    writer = threading.Thread(target=write_meanwhile)
    writer.start()
    assert not written.wait(0.1)
    go_on.set()
    for thread in (call, writer):
        thread.join(PATIENCE)
    watch[0] = nothing
    assert same(results[0], theirs(x))
    assert written.is_set()
    write(theirs)
    assert same(variables(ours.executable), variables(theirs.executable))
    assert same(ours(x), theirs(x))
    assert same(variables(ours.executable), variables(theirs.executable))


FORMS = [
    pytest.param({}, id="loop"),
    pytest.param({"ipus": 2, "workers": 2}, id="workers"),
    pytest.param({"replicas": 2, "gradient_accumulation": 2}, id="replicas"),
    pytest.param({"force": {"FuseStep": True}}, id="fused"),
    pytest.param({"engine": "inductor"}, id="replayed", marks=pytest.mark.slow),
]


@pytest.mark.few(9)
@pytest.mark.parametrize("form", [*FORMS, pytest.param(SCALED, id="scaled")])
@pytest.mark.parametrize("write", PATHS, ids=lambda path: path.__name__)
def test_a_write_within_a_call_counts_from_the_next_step_on(write, form):
    if write is loss_scale and form is not SCALED:
        pytest.skip("the loss scale is part of the program")
    if write is weights and ("force" in form or "engine" in form):
        pytest.skip("a fused step refuses it, see below")
    rows = ROWS * form.get("replicas", 1) * form.get("gradient_accumulation", 1)
    ours, theirs = trained(device_iterations=STEPS, **form), trained(**form)
    x = torch.randn(STEPS, rows, 3)
    results = []

    def sent(step, result):
        results.append(result)
        if step == 1:
            write(ours)

    ours(x.flatten(0, 1), on_send=sent)
    for step in range(STEPS):
        assert same(results[step], theirs(x[step]))
        if step == 1:
            write(theirs)
    assert same(variables(ours.executable), variables(theirs.executable))


FUSED = FORMS[3:]


@pytest.mark.parametrize("form", FUSED)
def test_a_fused_step_refuses_values_from_before_its_call(form):
    """Model and program share memory, which a fused step writes at the end of a call."""
    ours, theirs = (
        trained(device_iterations=STEPS, **form),
        trained(device_iterations=STEPS, **form),
    )
    x = torch.randn(STEPS * ROWS, 3)

    def sent(step, result):
        if step == 1:
            with pytest.raises(IpuError, match="with the value of before it"):
                ours.write_weights()

    assert same(ours(x, on_send=sent), theirs(x))
    assert same(variables(ours.executable), variables(theirs.executable))


@pytest.mark.parametrize("form", [{}, {"ipus": 2, "workers": 2}], ids=["loop", "workers"])
def test_weights_that_the_model_holds_already_stay_as_they_are(form):
    ours, theirs = (
        trained(device_iterations=STEPS, **form),
        trained(device_iterations=STEPS, **form),
    )
    x = torch.randn(STEPS * ROWS, 3)
    assert same(ours(x, on_send=lambda step, result: ours.write_weights()), theirs(x))
    assert same(variables(ours.executable), variables(theirs.executable))


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(form):
    ours, theirs = (
        trained(device_iterations=STEPS, **form),
        trained(device_iterations=STEPS, **form),
    )
    x = torch.randn(STEPS * ROWS, 3)
    wrong = {"first.weight": {"momentum_buffer": torch.zeros(5, 7)}}

    def sent(step, result):
        with pytest.raises(InputError, match=r"has shape \[5, 7\], and the variable \[3, 3\]"):
            ours.write_states(wrong)

    assert same(ours(x, on_send=sent), theirs(x))
    assert same(ours(x), theirs(x))


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_values_of_a_call_that_ends_early_are_written_before_it_returns(form):
    ours = trained(device_iterations=STEPS, **form)

    def sent(step, result):
        states(ours)
        raise KeyError

    x = torch.randn(STEPS * ROWS, 3)
    ours(x)
    with pytest.raises(KeyError):
        ours(x, on_send=sent)
    for of_each in ours.states().values():
        assert (of_each["momentum_buffer"] == 0.25).all()


def test_the_loss_scale_does_not_depend_on_the_default_dtype():
    compiled = trained(**SCALED)
    compiled(torch.randn(ROWS, 3))
    torch.set_default_dtype(torch.float16)
    try:
        compiled.set_loss_scale(131072.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled.loss_scale == 131072.0


def test_a_write_of_one_variable_leaves_what_other_replicas_have():
    """Each replica counts its own micro-batches; the user's change of a weight is for all."""
    compiled = trained(replicas=2, gradient_accumulation=2)
    compiled(torch.randn(4 * ROWS, 3))
    executable = compiled.executable
    executable.tensor("count", 1).fill_(7.0)
    executable.write({"first.bias": torch.ones(3)})
    assert executable.tensor("count", 0) == 2
    assert executable.tensor("count", 1) == 7
    assert (executable.tensor("first.bias", 1) == 1).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_write_of_a_worker_changes_no_value_of_its_step(workers):
    x = torch.randn(ROWS, 3)
    calls = []

    def write_at_the_second_call():
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            states(compiled)
            compiled.set_loss_scale(4.0)

    model = {"ipus": 2, "workers": workers, "gradient_accumulation": 4, **SCALED}
    model["strategy"] = Strategy("pipelined")
    compiled, plain = trained(**model), trained(**model)
    expected = plain(x.repeat(4, 1))
    watch[0] = write_at_the_second_call
    assert same(compiled(x.repeat(4, 1)), expected)
    assert ("ipu worker 1" in calls) == (workers == 2)
    assert compiled.loss_scale == 4.0
    assert same(compiled.model.parameters(), plain.model.parameters())
    for of_each in compiled.states().values():
        assert (of_each["momentum_buffer"] == 0.25).all()


def test_a_loaded_program_takes_weights_while_it_runs(tmp_path):
    compiled = trained(device_iterations=STEPS, watches=False)
    x = torch.randn(STEPS * ROWS, 3)
    compiled(x)
    ipu_dynamo.save(compiled, tmp_path / "program")
    ours, theirs = (ipu_dynamo.load(tmp_path / "program") for _ in range(2))
    seen = []

    def sent(step, result):
        seen.append(result)
        if step == 0:
            ours.load_state_dict(STATE)

    ours(x, on_send=sent)
    theirs(x, on_send=lambda step, result: theirs.load_state_dict(STATE) if step == 0 else None)
    assert same(variables(ours.executable), variables(theirs.executable))
    for name, tensor in ours.state_dict().items():
        assert name == "count" or not torch.equal(tensor, STATE[name])  # trained on from there
    assert ours.state_dict()["count"] == STEPS - 1
