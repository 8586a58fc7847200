"""Check that the judge finds a fault that is planted in a result of a drawn program.

No compiler takes part: what is compared is the reference itself, with one fault.
"""

from collections import Counter
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import fx, nn

import ipu_dynamo
import ipu_dynamo.whole_step.lowering as lowering
from ipu_dynamo import IpuError, Options, compile_training
from ipu_dynamo.program import graph_outputs
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.checks import Checks, by_operators
from ipu_dynamo.runtime.engines.check.classes import result_classes, why_unchecked
from ipu_dynamo.runtime.engines.check.copies import copies_of
from ipu_dynamo.runtime.engines.check.judge import Spread, is_sharp, judge, largest, spread_of
from ipu_dynamo.runtime.engines.check.runs import Runs
from ipu_dynamo.testing import recipes
from tests.runtime.engines.check.small_functions import faulty

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class RecordingEngine:
    """Runs operator by operator, and keeps each function with the arguments of its first run."""

    name = "eager"

    def __init__(self) -> None:
        self.compiled, self.checks, self.seen = 0, Checks("off"), []

    def compile(self, recipes):
        return [self._stage(recipe.function) for recipe in recipes]

    def _stage(self, function):
        run, kept = by_operators(function), []

        def stage(arguments):
            if not kept:
                kept.append(True)
                copies = copies_of(arguments, range(len(arguments))).tensors
                self.seen.append((function, copies, torch.get_rng_state()))
            return run(arguments)

        return stage


def functions_of(recipe, force):
    """The functions of a step of a drawn model, with their first arguments."""
    engine = RecordingEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "make_engine", lambda *_: engine)
        model = recipe.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = compile_training(model, optimizer, Options("eager", force=force))
        x, more = recipe.data(1)
        step(x, more)
    return engine.seen


class KeptRuns(Runs):
    """Further runs for several comparisons: runs of one number are equal, whatever the places."""

    def __init__(self, function, arguments, state, places):
        super().__init__(function, arguments, state)
        self._kept, self._places = {}, range(places)

    def moved(self, number, places):
        if number not in self._kept:
            self._kept[number] = super().moved(number, self._places)
        return self._kept[number]

    def wide(self, places):
        if "wide" not in self._kept:
            self._kept["wide"] = super().wide(self._places)
        return self._kept["wide"]


def plant(function, arguments, state, counts):
    """Compare the reference with itself, and with one fault in each of its results."""
    if why_unchecked(function.graph.graph):
        return
    torch.set_rng_state(state)
    given = copies_of(arguments, function.written).tensors
    results = by_operators(function)(list(given))
    expected = [*results, *(given[place] for place in function.written)]
    runs = KeptRuns(function, arguments, state, len(expected))
    classes = result_classes(function)
    old = [arguments[place] for place in function.written]

    def found(place, planted):
        made = [planted if i == place else one for i, one in enumerate(expected)]
        failures = judge(made, expected, classes, runs, old).failures
        return [failure.place for failure in failures] == [place]

    assert not judge(expected, expected, classes, runs, old).failures
    moved = [runs.moved(i, range(len(expected))) for i in range(limits.MORE_MOVED_RUNS)]
    for place, (right, of) in enumerate(zip(expected, classes, strict=True)):
        if of is None or not of.defined or place in runs.undefined():
            continue
        floating = right.dtype.is_floating_point
        spread = Spread()
        for one in moved:
            spread = spread_of(right, one[place], spread)
        sharp = not of.rounded or is_sharp(right, spread)
        if floating:
            counts["floating"] += 1
            counts["sharp"] += sharp
        other = torch.float64 if right.dtype == torch.float32 else torch.float32
        assert found(place, right.to(other))
        if not sharp:
            continue
        half = right.dtype in (torch.float16, torch.bfloat16)
        for planted in _planted(right, half):
            counts["planted"] += 1
            assert found(place, planted), (function.graph.graph, place, right, planted)
    for place, before in enumerate(old, len(expected) - len(old)):
        up, down = expected[place] > before, expected[place] < before
        for run in moved:
            up, down = up & (run[place] > before), down & (run[place] < before)
        if (up | down).any():
            counts["lost"] += 1
            assert found(place, before.clone())


def _planted(right, half):
    """The result with one fault."""
    if right.is_complex() or not right.numel():
        return
    if not right.dtype.is_floating_point:
        wrong = right.contiguous().clone()
        wrong.view(-1)[0] = (
            ~wrong.view(-1)[0] if right.dtype == torch.bool else wrong.view(-1)[0] + 1
        )
        yield wrong
        return
    size = largest(right)
    scaled = right * (1.5 if half else 1.001)
    if size > torch.finfo(right.dtype).tiny * 1e3 and scaled.isfinite().all():
        yield scaled
    flat = right.reshape(-1)
    apart = (flat.double() - flat[0].double()).abs()
    if apart.isfinite().all() and float(apart.max()) > size / (2 if half else 1000):
        wrong = flat.clone()
        wrong[0] = flat[int(apart.argmax())]
        yield wrong.view(right.shape)


def check(dtypes, examples):
    """Plant faults in so many drawn programs, each with its step on its own, and fused."""
    counts = Counter()

    @seed(1)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],  # a failure would take minutes to shrink
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=recipes(random=True, dtypes=dtypes))
    def run(recipe):
        for fused in (False, True):
            if fused and recipe.dtype != torch.float32:
                continue  # steps of other types are not fused
            try:
                seen = functions_of(recipe, {"FuseStep": fused})
            except IpuError:  # a model that cannot be fused
                continue
            for function, arguments, state in seen:
                plant(function, arguments, state, counts)

    run()
    return counts


class Small:
    """A model of a few layers, in place of a drawn one."""

    def build(self):
        torch.manual_seed(0)
        return Net()

    def data(self, micro_batches):
        return torch.linspace(-1, 1, 12).view(3, 4), torch.tensor([0, 2, 1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x, ids):
        y = self.last(self.norm(self.first(x)).relu())
        return ipu_dynamo.identity_loss(F.cross_entropy(y, ids), "none"), y.argmax(1)


@pytest.mark.parametrize("fused", [False, True])
def test_each_planted_fault_is_found(fused):
    counts = Counter()
    for function, arguments, state in functions_of(Small(), {"FuseStep": fused}):
        plant(function, arguments, state, counts)
    assert counts["planted"] > 10


def test_a_backend_that_is_wrong_on_purpose_is_caught_unless_nothing_is_checked():
    caught = Counter()
    for function, arguments, state in functions_of(Small(), {"FuseStep": True}):
        results = filter(is_floating_result, graph_outputs(function.graph))
        for node in islice(results, 3):  # the second is moved by a gradient of pure rounding
            for option in ("first", "off"):
                torch.set_rng_state(state)
                recipe = FunctionRecipe(function, function, "inductor", written=function.written)
                wrong = faulty(function, {node.name: lambda result: result * 1.001})
                stage = Checks(option).checked(recipe, wrong)
                stage(copies_of(arguments, function.written).tensors)
                caught[option] += stage is not wrong and stage.state == "failed"
    assert caught["first"] == 2
    assert not caught["off"]


def is_floating_result(node):
    """Whether an operator makes a floating result."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def test_each_planted_fault_in_a_few_programs_is_found():
    assert check(DTYPES, 2)["planted"] > 10


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_planted_fault_in_many_programs_is_found(dtype):
    counts = check([dtype], 200)
    allowed = 0.15 if dtype in (torch.float32, torch.float64) else 0.20
    assert counts["floating"] - counts["sharp"] <= allowed * counts["floating"], counts
