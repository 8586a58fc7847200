"""Check that stages that are equal but for what they draw share functions, and draw as before."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import Block, Options, Strategy, bisect, compile_inference, compile_training
from ipu_dynamo.program import Program
from ipu_dynamo.testing import assert_same_bits

ROWS, WIDTH, COUNT = 4, 6, 9  # micro-batches enough for five stages


def drawn_in_a_loop(x):
    (result,) = ipu_dynamo.for_loop(2, lambda h: h * torch.rand_like(h), [x])
    return result


DRAWS = {  # of a value of [rows, width]
    "dropout": lambda x: F.dropout(x, 0.3),
    "feature dropout": lambda x: x * F.dropout1d(torch.ones_like(x)[:, :, None], 0.4)[:, :, 0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "normal": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "integers": lambda x: x * torch.randint_like(x.detach(), 3),
    "permutation": lambda x: x[:, torch.randperm(WIDTH)],
    "slopes": lambda x: F.rrelu(x, training=True),
    "loop": drawn_in_a_loop,
}


class Stages(nn.Module):
    """Equal stages that draw, each on the IPU that is given for it.

    Args:
        draws: names of `DRAWS`, which each stage applies in this order.
        probability: of dropping an element after these.
    """

    def __init__(self, ipus, draws=("dropout",), probability=0.0):
        super().__init__()
        self.ipus, self.draws, self.probability = ipus, draws, probability
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ipus)

    def forward(self, x):
        for number, (ipu, layer) in enumerate(zip(self.ipus, self.layers, strict=True)):
            with Block(f"stage {number}", ipu):
                x = torch.tanh(layer(x))
                for name in self.draws:
                    x = DRAWS[name](x)
                x = torch.dropout(x, self.probability, True)
        with Block("loss", self.ipus[-1]):
            return ipu_dynamo.identity_loss((x * x).sum(), "none")


def trained(model, *, steps=2, **options):
    """The program of a model, and what some steps leave behind."""
    options = Options(**{"engine": "eager", "seed": 5, "gradient_accumulation": COUNT, **options})
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.01), options)
    rows = ROWS * options.gradient_accumulation * options.replicas
    generator = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(rows, WIDTH, generator=generator)) for _ in range(steps)]
    return step.program, [*losses, *(p.detach() for p in model.parameters())]


def constants(program):
    return [variable for variable in program.variables if variable.kind == "constant"]


def called(program, direction, stages):
    """The functions that stages call in one direction."""
    return {c.function for c in program.calls if c.direction == direction and c.stage in stages}


PLACES = {
    "pipelined": {"strategy": Strategy("pipelined"), "recompute": "stages"},
    "without recomputation": {"strategy": Strategy("pipelined"), "recompute": "off"},
    "sharded": {"strategy": Strategy("sharded")},
    "zero bubble": {"strategy": Strategy("pipelined", schedule="zero_bubble")},
    "replicas": {"strategy": Strategy("pipelined"), "replicas": 2},
    "not outlined": {"strategy": Strategy("pipelined"), "outline": False},
    "outlined": {"strategy": Strategy("pipelined"), "outline": True},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_equal_layers_with_dropout_have_as_many_functions_as_without(options):
    """Eight layers on four IPUs."""
    ipus = [0, 0, 1, 1, 2, 2, 3, 3]
    program, left = trained(Stages(ipus, probability=0.1), **options)
    plain, _ = trained(Stages(ipus, probability=0.0), steps=1, **options)
    apart, expected = trained(Stages(ipus, probability=0.1), without=("LiftStreams",), **options)
    assert len(program.functions) == len(plain.functions) < len(apart.functions)
    assert [c.function for c in program.calls] == [c.function for c in plain.calls]
    assert_same_bits(left, expected)


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_stages_that_share_a_function_draw_as_those_that_do_not():
    options = {"strategy": Strategy("pipelined"), "engine": "inductor", "steps": 2}
    draws = ("dropout", "normal")
    program, left = trained(Stages([0, 1, 2], draws), **options)
    _, expected = trained(Stages([0, 1, 2], draws), **options, without=("LiftStreams",))
    assert constants(program)
    torch.testing.assert_close(left, expected)


@pytest.mark.examples(200)
@pytest.mark.quick(6)
@given(
    draws=st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=3),
    ipus=st.sampled_from([(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 0), (0, 1, 0, 2, 1)]),
    training=st.booleans(),
    kind=st.sampled_from(["pipelined", "sharded"]),
    recompute=st.sampled_from(["off", "stages", "all"]),
)
def test_equal_stages_share_functions_and_draw_as_if_they_did_not(
    draws, ipus, training, kind, recompute
):
    """Stages of a pipeline may be on one IPU if others are between them."""
    last = len(ipus) - 1
    common = {"seed": 3, "recompute": recompute, "strategy": Strategy(kind)}

    def run(**options):
        model = Stages(ipus, draws)
        if training:
            return trained(model, steps=2, **common, **options)
        options = Options(engine="eager", device_iterations=COUNT, **common, **options)
        infer = compile_inference(model, options)
        batch = torch.linspace(-1, 1, COUNT * ROWS * WIDTH).view(-1, WIDTH)
        results = [infer(batch), infer(batch)]
        return infer.program, results

    program, found = run()
    _, expected = run(without=("LiftStreams",))
    assert_same_bits(found, expected)
    assert len(called(program, "forward", range(last))) == 1
    if training:  # the first stage gives no gradient of its input
        assert len(called(program, "backward", range(1, last))) == 1
    assert Program.parse(program.text()) == program


def test_stages_that_draw_otherwise_keep_their_numbers():
    """Three stages, of which no two draw alike: nothing is shared, and nothing is passed."""

    class Other(Stages):
        def forward(self, x):
            for ipu, layer in enumerate(self.layers):
                with Block(f"stage {ipu}", ipu):
                    x = F.dropout(torch.tanh(layer(x)), 0.1 * (ipu + 1))
            with Block("loss", len(self.layers) - 1):
                return ipu_dynamo.identity_loss(x.square().sum(), "none")

    program, _ = trained(Other([0, 1, 2]), steps=1, strategy=Strategy("pipelined"))
    assert constants(program) == []
    program, _ = trained(Stages([0], ("dropout",) * 2), steps=1)
    assert constants(program) == []


def test_streams_are_kept_where_forward_and_backward_share_them():
    """A stage that computes its forward pass again draws by the same constant."""
    program, _ = trained(
        Stages([0, 1, 2, 3]), steps=1, strategy=Strategy("pipelined"), recompute="stages"
    )
    held = {variable.name: variable.ipu for variable in constants(program)}
    read = {
        call.direction: {name for name in call.arguments if name in held}
        for call in program.calls
        if call.stage == 1
    }
    assert read["forward"] == read["backward"] != set()
    for call in program.calls:
        assert {held[name] for name in call.arguments if name in held} <= {call.ipu}


def test_a_saved_and_a_cached_program_draw_on(tmp_path):
    x = torch.linspace(-1, 1, COUNT * ROWS * WIDTH).view(-1, WIDTH)
    options = Options(
        engine="eager",
        seed=4,
        gradient_accumulation=COUNT,
        strategy=Strategy("pipelined"),
        program_cache=str(tmp_path / "cache"),
    )

    def begun():
        model = Stages([0, 1, 2])
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.01), options)
        return step, [step(x)]

    step, losses = begun()
    cached, again = begun()
    assert constants(cached.program) == constants(step.program) != []
    assert_same_bits(again, losses)
    ipu_dynamo.save(step, tmp_path / "saved")
    loaded = ipu_dynamo.load(tmp_path / "saved")
    on = [step(x) for _ in range(2)]
    assert_same_bits([loaded(x) for _ in range(2)], on)
    assert_same_bits([cached(x) for _ in range(2)], on)


def test_bisect_runs_functions_that_take_their_streams():
    x = torch.ones(ROWS, WIDTH)
    options = Options("eager", strategy=Strategy("sharded"))
    assert bisect(Stages([0, 1, 2]), x, training=True, options=options) is None
