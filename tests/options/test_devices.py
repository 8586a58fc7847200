"""Check that IPUs do their work on the torch devices that they are mapped onto."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import poptorch
from ipu_dynamo import (
    BeginBlock,
    Block,
    CompileError,
    Options,
    compile_inference,
    compile_training,
    for_loop,
)
from ipu_dynamo.capture.trace import read_arguments
from ipu_dynamo.ops.bodies import all_bodies
from ipu_dynamo.ops.control_flow import hold_bodies
from ipu_dynamo.options import Location, Locations, OptionError, StageSpec, Strategy
from ipu_dynamo.passes.host.functions.set_stage_device import set_device
from ipu_dynamo.program import Copy, Load, Receive, TensorType
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.engines import make_engine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import (
    bind_instructions,
    bind_passes,
    stages_of,
)
from ipu_dynamo.runtime.execute.tasks.task_code import Binding
from ipu_dynamo.testing import (
    BlockAt,
    BlockPlacement,
    Recipe,
    assert_close,
    assert_same_bits,
    options_for,
    recipes,
)
from ipu_dynamo.testing.private.testing_names import pytree
from ipu_dynamo.testing.recipe import Step as RecipeStep
from ipu_dynamo.whole_step.compile_model import compile_model
from ipu_dynamo.whole_step.optimizer.torch_optimizers import describe
from ipu_dynamo.whole_step.weights.initial_state import initial_tensors
from tests.properties.running import calls, draw_placement, outcome, slow

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # one memory, but copies are made
EAGER = Options(engine="eager")


@pytest.fixture
def two_cuda_devices(monkeypatch):
    """Have the compiler think that there are two: it makes programs for them, without running."""
    monkeypatch.setattr("ipu_dynamo.options.devices.cuda_devices", lambda: (2, 1))


class Net(nn.Module):
    """Two layers on two IPUs; makes a tensor, draws numbers, changes a buffer."""

    def __init__(self, second=1):
        super().__init__()
        self.first = BeginBlock(nn.Linear(3, 4), "first", 0)
        self.second = BeginBlock(nn.Linear(4, 2), "second", second)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y):
        hidden = nn.functional.dropout(self.first(x), 0.5) + torch.arange(4.0)
        self.seen += 1
        return nn.functional.mse_loss(self.second(torch.tanh(hidden)), y)


def compiled(options, model=None, inputs=None):
    """A `Net` compiled for inference with these options, without what would run it.

    Torch cannot differentiate for a device that it does not have.
    """
    model = model or Net()
    inputs = inputs or (torch.randn(2, 3), torch.randn(2, 2))
    example = read_arguments(model, inputs, {})
    return compile_model(model, example, options, training=False)


# --- Options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        ("cpu", ("cpu",)),
        ("cpu:0", ("cpu",)),
        (torch.device("cpu"), ("cpu",)),
        (["cpu", torch.device("cpu")], ("cpu", "cpu")),
    ],
)
def test_devices_are_read_once(given, read):
    assert Options(devices=given).devices == read
    assert replace(Options(devices=given), replicas=2).devices == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gpu", "'gpu', which is no torch device"),
        ("mps", "'mps'; choose one of cpu, cuda"),
        ([], "names none"),
        ([0], "0; name devices such as 'cpu'"),
    ],
)
def test_devices_that_cannot_be_are_refused(given, message):
    with pytest.raises(OptionError, match=f"option devices (has )?{message}"):
        Options(devices=given)


def test_a_machine_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="'cuda:0', and this PyTorch finds no CUDA device"):
        Options(devices=["cuda:0", "cuda:1"])


@pytest.mark.usefixtures("two_cuda_devices")
def test_cuda_devices_are_those_of_the_machine():
    assert Options(devices="cuda").devices == ("cuda:1",)
    with pytest.raises(OptionError, match="'cuda:2', and there are 2 CUDA devices"):
        Options(devices="cuda:2")
    with pytest.raises(OptionError, match=r"cuda:0, cpu; all IPUs .* devices of one kind"):
        Options(devices=["cuda:0", "cpu"])


# --- Programs --------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize("names", [("cuda:0",), ("cuda:1",), ("cuda:0", "cuda:1")])
def test_stages_are_compiled_for_the_devices_of_their_ipus(names):
    result = compiled(replace(EAGER, devices=names))
    expected = [torch.device(name) for name in (names * 2)[:2]]
    assert list(result.devices) == expected
    program = result.host.inlined
    for call in program.calls:
        (function,) = (f for f in program.functions if f.name == call.function)
        for node in function.graph.graph.nodes:
            values = [node.meta["val"]] if isinstance(node.meta["val"], torch.Tensor) else []
            named = [v for v in (*node.args, *node.kwargs.values()) if isinstance(v, torch.device)]
            assert {*named, *(v.device for v in values)} <= {expected[call.ipu]}


def test_a_training_stage_is_moved_as_a_whole():
    model, device = Net(), torch.device("cuda:1")
    step = compile_training(model, torch.optim.Adam(model.parameters()), EAGER)
    step.compile(torch.randn(2, 3), torch.randn(2, 2))
    for function in step.program.functions:
        graph = copy.deepcopy(function.graph)
        before = str(graph.graph)
        assert set_device(graph, device)
        graph.graph.lint()
        assert str(graph.graph) == before.replace("device: cpu", "device: cuda:1")
        for old, new in zip(function.graph.graph.nodes, graph.graph.nodes, strict=True):
            value = new.meta["val"]
            if isinstance(value, torch.Tensor):
                assert value.device == device
                assert TensorType.of(value) == TensorType.of(old.meta["val"])
                assert value.stride() == old.meta["val"].stride()
            assert new.meta.get("stack_trace") == old.meta.get("stack_trace")
        assert not set_device(graph, device)


class Loops(nn.Module):
    """A loop on each of two IPUs: equal ones, with a loop in them, whose bodies make tensors."""

    def forward(self, x):
        def inner(x):
            return x.sin() + torch.ones(3, device=x.device)

        def outer(x):
            return for_loop(2, inner, [x * torch.full((2, 1), 0.5, device=x.device)])

        with Block("first", 0):
            (x,) = for_loop(3, outer, [x])
        with Block("second", 1):
            return for_loop(3, outer, [x])[0]


@pytest.mark.usefixtures("two_cuda_devices")
def test_bodies_of_loops_are_compiled_for_the_devices_of_their_ipus():
    result = compiled(replace(EAGER, devices=("cuda:0", "cuda:1")), Loops(), (torch.randn(2, 3),))
    program = result.host.inlined
    by_name = {function.name: function for function in program.functions}
    assert len(by_name) == 6  # a function and two bodies for each device
    for call in program.calls:
        device = torch.device("cuda", call.ipu)
        graph = by_name[call.function].graph.graph
        bodies = [body.graph.graph for body in all_bodies(graph)]
        assert len(bodies) == 2
        for node in (node for each in (graph, *bodies) for node in each.nodes):
            leaves = pytree.tree_leaves((node.args, node.kwargs, node.meta["val"]))
            tensors = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
            named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
            assert {*tensors, *named} <= {device}
    for function in result.program.functions:  # the program's own stay where they were
        values = pytree.tree_leaves([node.meta["val"] for node in function.graph.graph.nodes])
        devices = {value.device for value in values if value is not None}
        assert devices == {torch.device("cuda:0")}


def test_a_moved_loop_runs_on_its_device():
    step = compile_inference(Loops(), EAGER)
    x = torch.randn(2, 3)
    expected = step(x)
    graph = copy.deepcopy(step.program.functions[-1].graph)
    hold_bodies(graph.graph)
    assert set_device(graph, torch.device("meta"))
    (moved,) = graph(x.to("meta"))
    assert moved.device.type == "meta"
    assert moved.shape == expected.shape
    assert not set_device(graph, torch.device("meta"))


@pytest.mark.usefixtures("two_cuda_devices")
def test_equal_stages_on_two_devices_are_two_functions():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [BeginBlock(nn.Linear(4, 4), f"layer {i}", i) for i in range(3)]
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x)

    def functions(*names):
        model, x = Chain(), read_arguments(Chain(), (torch.randn(2, 4),), {})
        options = replace(EAGER, devices=names or None)
        return len(compile_model(model, x, options, training=False).host.inlined.functions)

    assert functions() == functions("cuda:0") == 1
    assert functions("cuda:0", "cuda:0", "cuda:1") == 2


def test_too_few_devices_are_refused():
    with pytest.raises(CompileError, match="on 3 IPUs, and option devices names 2"):
        compiled(replace(EAGER, devices=["cpu", "cpu"]), Net(second=2))


@pytest.mark.usefixtures("two_cuda_devices")
def test_shared_tensors_must_lie_on_the_device_of_their_ipu():
    x, y = torch.randn(2, 3), torch.randn(2, 2)
    step = compile_inference(Net(), replace(EAGER, devices="cuda:0"))
    with pytest.raises(CompileError, match=r"parameter .* is on cpu, and IPU 0, .* on cuda:0"):
        step.compile(x, y)


# --- Running ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.examples(15)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_naming_the_cpu_changes_no_bit(recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    options = replace(options, seed=7)
    default = outcome(recipe, placement, options, training=training)
    named = replace(options, devices=data.draw(st.sampled_from(["cpu", ["cpu"] * 8])))
    assert_same_bits(outcome(recipe, placement, named, training=training), default)


def run(recipe, placement, options, training, devices):
    """All that two calls leave behind, on these devices."""
    model = placement.place(recipe.build())
    groups = describe(slow(model), dict(model.named_parameters())) if training else ()
    micro_batch = recipe.data(1)
    example = read_arguments(model, micro_batch, {})
    result = compile_model(model, example, options, groups, training=training)
    devices = devices[: result.program.num_ipus]
    executable = Executable(
        result.host,
        initial_tensors(result, {}, private=True),
        make_engine(options.engine),
        options.input_replica_groups.of(options.replicas),
        seed=7,
        workers=options.workers,
        devices=devices,
    )
    outputs = []
    for call in calls(recipe, options, training=training):
        tensors = [t.contiguous() for t in read_arguments(model, call, {}).tensors]
        fed = dict(zip(result.input_names, tensors, strict=True))
        outputs.append(executable(fed, [group.values for group in groups]))
    replicas = range(options.replicas)
    names = [v.name for v in result.program.variables]
    held = {name: [executable.tensor(name, r) for r in replicas] for name in names}
    apart = any(
        isinstance(i, Copy) and devices[i.src] != devices[i.dst] for i in result.program.walk()
    )
    return {"outputs": outputs, "tensors": held}, apart


@pytest.mark.examples(15)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_devices_of_their_own_change_no_bit(recipe, training, data):
    """Values, weights and gradients are copied between IPUs that share no device."""
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    options = replace(options, workers=data.draw(st.sampled_from([1, 3])))
    one, _ = run(recipe, placement, options, training, [CPU] * 8)
    two, _ = run(recipe, placement, options, training, [CPU, OTHER] * 4)
    assert_same_bits(two, one)


@pytest.mark.parametrize("training", [True, False])
def test_ipus_with_devices_of_their_own_copy(training):
    """The property above is about copies: here they are."""
    recipe = Recipe(steps=(RecipeStep("linear"),))
    placement = BlockPlacement((BlockAt("layers.0", "0", 0), BlockAt("head", "1", 1)))
    one, apart = run(recipe, placement, EAGER, training, [CPU, CPU])
    assert not apart
    two, apart = run(recipe, placement, EAGER, training, [CPU, OTHER])
    assert apart
    assert_same_bits(two, one)


@dataclass(frozen=True)
class Place:
    """What stands for a tensor where only its device matters."""

    device: torch.device
    nbytes: int = 0

    def to(self, device):
        return Place(device)

    def numel(self):
        return 0

    def element_size(self):
        return 1


class Following:
    """An engine whose stages look where their arguments are, in the order of a program's calls."""

    name = "following"

    def __init__(self, program, devices):
        self.calls, self.devices = iter(program.calls), devices

    def compile(self, recipes):
        return [self.look for _ in recipes]

    def look(self, arguments):
        call = next(self.calls)
        here = Place(self.devices[call.ipu])
        assert arguments == [here] * len(call.arguments)
        return [here] * len(call.results)


def assert_arguments_are_there(host):
    """Follow one micro-batch over IPUs with a device each: every call finds all on its own."""
    program = host.runs
    devices = [torch.device("cuda", ipu) for ipu in range(program.num_ipus)]
    cut, registers = sections(program), number_registers(program, devices=devices)
    receives = [i for i in cut.loop if isinstance(i, Receive)]
    copies = [i for i in cut.before if isinstance(i, Copy)]
    stay = [*(v.name for v in program.variables), *(copy.result for copy in copies)]
    binding = Binding(
        program,
        registers,
        {registers[name] for name in stay},
        stages_of(host, Following(program, devices).compile),
        lambda number, error, arguments, micro_batch: error,
        received={receive.result: place for place, receive in enumerate(receives)},
        devices=devices,
    )
    frame = [None] * (max(registers.values()) + 1)
    for variable in program.variables:
        frame[registers[variable.name]] = Place(devices[variable.ipu])
    bind_instructions(binding, copies)(frame, 0, (), ())
    kept = {register: value for register, value in enumerate(frame) if value is not None}
    received = [[Place(devices[receive.ipu])] for receive in receives]
    for task in bind_passes(binding):
        task(frame, 0, received, ())
    assert {register: value for register, value in enumerate(frame) if value is not None} == kept


@pytest.mark.examples(30)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_calls_find_their_arguments_on_their_device(recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    model = placement.place(recipe.build())
    groups = describe(slow(model), dict(model.named_parameters())) if training else ()
    example = read_arguments(model, recipe.data(1), {})
    assert_arguments_are_there(
        compile_model(model, example, options, groups, training=training).host
    )


@pytest.mark.parametrize("off_chip", [False, True])
def test_a_shared_weight_comes_to_both_devices(off_chip):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            with Block("a", 0):
                h = torch.tanh(x @ self.weight)
            with Block("b", 1):
                return nn.functional.mse_loss(h @ self.weight, x)

    model = Tied()
    locations = Locations(weights=Location(off_chip))
    step = compile_training(model, slow(model), replace(EAGER, locations=locations))
    step.compile(torch.randn(2, 3))
    assert_arguments_are_there(step.executable.host_program)


@pytest.mark.parametrize("training", [True, False])
def test_activations_are_loaded_onto_the_device_that_reads_them(training):
    phases = tuple((StageSpec((name,), ipu),) for name, ipu in (("first", 0), ("second", 1)))
    strategy = Strategy("serial_phased", phases=phases, liveness="off_chip_after_each_phase")
    model, options = Net(), replace(EAGER, strategy=strategy)
    groups = describe(slow(model), dict(model.named_parameters())) if training else ()
    example = read_arguments(model, (torch.randn(2, 3), torch.randn(2, 2)), {})
    compiled = compile_model(model, example, options, groups, training=training, loss=0)
    program = compiled.host.inlined
    assert any(isinstance(i, Load) and i.ipu == 1 for i in program.walk())
    assert_arguments_are_there(compiled.host)


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_poptorch_takes_devices_from_the_environment(monkeypatch, name):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    monkeypatch.setenv("IPU_DYNAMO_DEVICES", "cpu, cpu")
    assert_close(poptorch.inferenceModel(model)(x), model(x))
    monkeypatch.setenv("IPU_DYNAMO_DEVICES", name)
    with pytest.raises(poptorch.Error, match=f"option devices has '{name}'"):
        poptorch.inferenceModel(model)(x)


# --- CUDA ------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.examples(15)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_cuda_agrees_with_the_cpu(engine, recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, placement=placement, training=training))
    cpu, _ = run(recipe, placement, options, training, [CPU] * 8)
    options = replace(options, devices="cuda:0")
    cuda, _ = run(recipe, placement, options, training, [torch.device("cuda:0")] * 8)
    assert {t.device for t in pytree.tree_leaves(cuda["outputs"])} <= {CPU}
    assert {t.device.type for t in pytree.tree_leaves(cuda["tensors"])} == {"cuda"}
    on_host = pytree.tree_map(lambda t: t.cpu(), cuda)
    assert_close(on_host, cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_models_on_cuda_are_trained_there():
    model = Net().cuda()
    step = compile_training(model, slow(model), EAGER)
    loss = step(torch.randn(2, 3, device="cuda"), torch.randn(2, 2, device="cuda"))
    assert loss.device == model.seen.device == model.first.weight.device
    assert model.seen == 1
    assert step(torch.randn(2, 3), torch.randn(2, 2)).device == CPU


@pytest.mark.cuda
def test_uniform_numbers_have_the_same_bits():
    def drawn(device):
        options = Options("eager", seed=3, devices=device)
        run = compile_inference(lambda x: torch.rand_like(x), options)
        return run(torch.zeros(1000))

    assert_same_bits(drawn("cuda"), drawn("cpu"))


@pytest.mark.cuda
def test_poptorch_trains_on_cuda(monkeypatch):
    class Squares(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.plain = torch.ones(1)  # a constant of the program

        def forward(self, x):
            value = super().forward(x) * self.plain + torch.zeros(1, device="ipu")
            return poptorch.identity_loss(value.pow(2), "mean")

    def trained():
        torch.manual_seed(0)
        model = Squares()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        losses = [training(torch.ones(2, 3)) for _ in range(3)]
        assert {tensor.device for tensor in (*losses, model.weight)} == {CPU}
        return losses, model.weight.detach()

    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    expected = trained()
    monkeypatch.setenv("IPU_DYNAMO_DEVICES", "cuda")
    assert_close(trained(), expected)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:the tensor .* is neither an input")
def test_what_the_host_sees_of_poptorch_is_on_the_host(monkeypatch):
    """Plain tensors that forward changes, packed sequences, anchors, the state of the optimiser."""

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.calls = torch.zeros(())

        def forward(self, x, lengths):
            self.calls += 1
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=5)
            return poptorch.identity_loss(out.square() * self.calls, "mean")

    def trained():
        torch.manual_seed(0)
        model, options = Sequences(), poptorch.Options()
        options.anchorTensor("bias", "lstm.bias_ih_l0")
        optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, options, optimizer)
        losses = [training(torch.randn(3, 5, 3), torch.tensor([2, 5, 3])) for _ in range(2)]
        state = optimizer.state_dict()["ipu_state"]
        seen = losses, state, training.getAnchoredTensor("bias"), model.calls
        assert {tensor.device for tensor in pytree.tree_leaves(seen)} == {CPU}
        return seen

    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    expected = trained()
    monkeypatch.setenv("IPU_DYNAMO_DEVICES", "cuda")
    assert_close(trained(), expected, rtol=1e-4, atol=1e-5)
