"""Check updates that are one function of all gradients, weights and states."""

import copy
import random

import pytest
import torch

from ipu_dynamo import (
    ClipGradNorm,
    CompileError,
    InputError,
    Location,
    Locations,
    TracedUpdate,
    compile_training,
    identity_loss,
    load,
    save,
)
from ipu_dynamo.program import JointUpdate, Program, UpdatePart
from ipu_dynamo.runtime.engines import compiled_stages, kernel_units
from ipu_dynamo.tune.artifact_store import CACHE_DIR
from tests.whole_step.optimizer.test_traced_optimizers import PLACES, Layers


def scaled(gradients, weights, states, numbers):
    """A momentum behind a global norm; a step that is not finite is left out, and not counted."""
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    finite = torch.isfinite(norm)
    factor = torch.clamp(numbers["limit"] / (norm + 1e-6), max=1.0)
    count = states["count"] + torch.where(finite, 1.0, 0.0)
    new, kept = {}, {"count": count, "scale": torch.where(finite, states["scale"] * 2, 1.0)}
    for name, gradient in gradients.items():
        mean = states[f"{name}.mean"] * 0.9 + gradient * factor * 0.1
        kept[f"{name}.mean"] = torch.where(finite, mean, states[f"{name}.mean"])
        rate = numbers["lr"] * states["rate"] / (1 - 0.9**count)
        new[name] = torch.where(finite, weights[name] - mean * rate, weights[name])
    return new, kept


def update_of(model, apply=scaled):
    zeros = {f"{name}.mean": torch.zeros_like(p) for name, p in model.named_parameters()}
    numbers = {"count": 0.0, "scale": 1.0, "rate": 1.0}
    return TracedUpdate({**zeros, **numbers}, apply, {"lr": 0.1, "limit": 0.5})


def pair(options, *, ipus=1, apply=scaled, clip=None):
    """A model that is compiled, and the same with its update in Python."""
    model = Layers(ipus=ipus)
    theirs = copy.deepcopy(model)
    ours, reference = update_of(model, apply), update_of(theirs, apply)
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {"engine": "eager", **options}, clip=clip)
    return run, model, ours, theirs, reference


def batches(count, rows):
    """Batches, of which one makes gradients that are not finite."""
    made = torch.randn(count, rows, 3, generator=torch.Generator().manual_seed(0))
    made[2:3, 0, 0] = float("nan")
    return made


def train(theirs, reference, x, clip=None):
    reference.zero_grad()
    theirs(x).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    reference.step()


def check(model, ours, theirs, reference):
    for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    mine, expected = ours.state_dict()["state"], reference.state_dict()["state"]
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("place", PLACES)
def test_it_does_what_its_function_does(place):
    ipus, options = PLACES[place]
    run, model, ours, theirs, reference = pair(options, ipus=ipus)
    for x in batches(4, 4 * options.get("device_iterations", 1)):
        run(x)
        for part in x.split(4):
            train(theirs, reference, part)
        for one in (ours, reference):
            one.param_groups[0]["lr"] *= 0.7
    check(model, ours, theirs, reference)
    assert Program.parse(run.program.text()) == run.program


def test_a_norm_is_a_barrier_behind_all_sums_and_clipping():
    options = {"replicas": 2, "gradient_accumulation": 2}
    run, model, ours, theirs, reference = pair(options, clip=ClipGradNorm(0.01))
    for x in batches(2, 8):
        run(x)
        train(theirs, reference, x, clip=0.01)
    check(model, ours, theirs, reference)
    kinds = [type(i).__name__ for i in run.program.body[0].body]
    joint = kinds.index("JointUpdate")
    assert max(i for i, kind in enumerate(kinds) if kind == "AllReduce") < kinds.index("UpdatePart")
    assert kinds.index("ClipFactor") < kinds.index("UpdatePart") < joint < kinds.index("Update")


def test_states_live_with_their_parameters():
    run, *_ = pair({}, ipus=2)
    run(torch.ones(4, 3))
    where = {v.name: v.ipu for v in run.program.variables if v.kind == "state"}
    assert where == {
        "first.weight..mean": 0,
        "first.bias..mean": 0,
        "second.weight..mean": 1,
        ".optimizer.count": 0,
        ".optimizer.scale": 0,
    }


def test_equal_parameters_share_functions():
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return identity_loss(x, "sum")

    model = Deep()
    run = compile_training(model, update_of(model), {"engine": "eager"})
    run(torch.ones(2, 3))
    parts = {i.function for i in run.program.walk() if isinstance(i, UpdatePart)}
    assert len(parts) == 2  # of weights, and of biases
    assert len(run.program.update_functions) == 6  # with their updates, a joint one and factors


def test_parameters_without_a_gradient_are_left_out():
    class Part(Layers):
        def forward(self, x):
            return identity_loss(self.first(x).square(), "mean")

    model = Part()
    theirs = copy.deepcopy(model)
    ours, reference = update_of(model), update_of(theirs)
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {"engine": "eager"})
    for x in batches(2, 4):
        run(x)
        train(theirs, reference, x)
    check(model, ours, theirs, reference)


def test_a_state_that_was_saved_goes_on(tmp_path):
    run, model, ours, theirs, reference = pair({})
    x = batches(6, 4)
    for part in x[:3]:
        run(part)
    saved = copy.deepcopy((model.state_dict(), ours.state_dict()))
    save(run, tmp_path / "file")
    loaded = load(tmp_path / "file")
    for part in x[3:]:
        run(part)
        loaded(part)
    assert torch.equal(loaded.state_dict()["first.weight"], model.first.weight)
    theirs.load_state_dict(saved[0])
    reference.load_state_dict(saved[1])
    for part in x[3:]:
        train(theirs, reference, part)
    check(model, ours, theirs, reference)
    expected = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])  # into the program that made it
    for part in x[3:]:
        run(part)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_its_tensors_are_read_and_written_in_place():
    run, model, ours, theirs, reference = pair({})
    mean, count = ours.state["first.weight.mean"], ours.state["count"]
    x = batches(2, 4)
    run(x[0])
    run.read_optimizer_state()
    assert count == 1.0
    assert bool(mean.any())
    train(theirs, reference, x[0])
    for one in (ours, reference):
        one.state["first.weight.mean"].zero_()
        one.state["rate"].fill_(0.5)  # a number that no step changes
    run.write_optimizer_state()
    run(x[1])
    train(theirs, reference, x[1])
    check(model, ours, theirs, reference)
    assert ours.state["first.weight.mean"] is mean


def test_half_weights_are_updated_in_float32():
    model = Layers(dtype=torch.half)
    exact = copy.deepcopy(model).float()
    reference = update_of(exact)
    reference.use_parameters_of(exact)
    x = torch.randn(4, 3).half()
    gradients = copy.deepcopy(model)
    gradients(x).backward()
    for p, g in zip(exact.parameters(), gradients.parameters(), strict=True):
        p.grad = g.grad.float()
    reference.step()
    means = {f"{n}.mean": torch.zeros(p.shape) for n, p in model.named_parameters()}
    numbers = {"count": 0.0, "scale": 1.0, "rate": 1.0}
    ours = TracedUpdate({**means, **numbers}, scaled, {"lr": 0.1, "limit": 0.5})
    compile_training(model, ours, {"engine": "eager"})(x)
    for mine, expected in zip(model.parameters(), exact.parameters(), strict=True):
        step = torch.finfo(torch.half).eps * expected.abs().clamp(min=2.0**-14)
        assert ((mine.float() - expected).abs() <= step * 0.51).all()


def test_results_are_of_the_old_values():
    """A state that becomes the weight before the step, and a weight that becomes a state."""

    def swapped(gradients, weights, states, numbers):
        new = {n: states[f"{n}.mean"] + g for n, g in gradients.items()}
        return new, {f"{n}.mean": weights[n] for n in gradients}

    run, model, ours, theirs, reference = pair({}, apply=swapped)
    for x in batches(2, 4):
        run(x)
        train(theirs, reference, x)
    check(model, ours, theirs, reference)


def test_rounds_follow_one_another():
    """What hangs on all weights after the step that a norm of all gradients has made."""

    def twice(gradients, weights, states, numbers):
        norm = sum(g.square().sum() for g in gradients.values())
        new = {n: weights[n] - g / (1 + norm) for n, g in gradients.items()}
        size = sum(w.abs().sum() for w in new.values())
        return {n: w / (1 + size * numbers["lr"]) for n, w in new.items()}, {"scale": size}

    run, model, ours, theirs, reference = pair({}, ipus=2, apply=twice)
    for x in batches(2, 4):
        run(x)
        train(theirs, reference, x)
    check(model, ours, theirs, reference)
    assert sum(isinstance(i, JointUpdate) for i in run.program.walk()) == 2


class Squares(torch.nn.Module):
    """Parameters of one shape, which updates can exchange."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return identity_loss(x.square(), "mean")


def swapping(gradients, weights, states, numbers):
    """Each weight becomes the next one, and the last state the first weight."""
    names = list(weights)
    new = {n: weights[other] for n, other in zip(names, [*names[1:], names[0]], strict=True)}
    return new, {f"{names[-1]}.mean": weights[names[0]], f"{names[0]}.mean": gradients[names[0]]}


def of_another_state(gradients, weights, states, numbers):
    """A weight by a state that lives with another one."""
    first, second, third = weights
    new = {first: weights[first] - states[f"{second}.mean"], third: states[f"{second}.mean"]}
    return new, {f"{second}.mean": gradients[second] + states[f"{second}.mean"]}


def at_random(seed):
    """A random update: operators on gradients, weights and states, and any values as results."""
    rng = random.Random(seed)
    kinds = ["sum", "scale", "add", "matmul", "where", "write"]
    operators = [(rng.choice(kinds), rng.random(), rng.random()) for _ in range(rng.randint(3, 8))]
    ends = [(rng.random(), rng.random()) for _ in range(8)]

    def apply(gradients, weights, states, numbers):
        names = list(gradients)
        tensors = [*gradients.values(), *weights.values(), *(states[f"{n}.mean"] for n in names)]
        scalars = [states["count"], states["scale"], states["rate"] * numbers["lr"]]

        def pick(values, at):
            return values[int(at * len(values))]

        for kind, one, two in operators:
            first, second = pick(tensors, one), pick(tensors, two)
            if kind == "sum":
                scalars.append(first.square().sum().sqrt())
            elif kind == "scale":
                tensors.append(first * torch.tanh(pick(scalars, two)))
            elif kind == "add":
                tensors.append(first + second * 0.5)
            elif kind == "matmul":
                tensors.append(torch.tanh(first @ second))
            elif kind == "where":
                tensors.append(torch.where(pick(scalars, two) > 0.1, first, second))
            else:
                tensors.append(first.clone().mul_(0.5).add_(0.1))
        new, kept = {}, {}
        for name, (kind, at), (keep, of) in zip(names, ends[:3], ends[3:6], strict=True):
            if kind > 0.4:
                new[name] = weights[name] - 0.1 * torch.tanh(pick(tensors, at))
            elif kind > 0.1:
                new[name] = pick(tensors, at)
            if keep > 0.3:
                kept[f"{name}.mean"] = pick(tensors, of)
        for name, (keep, of) in zip(("count", "scale"), ends[6:], strict=True):
            if keep > 0.3:
                kept[name] = torch.tanh(pick(scalars, of))
        return new, kept

    return apply


@pytest.mark.few(6)
@pytest.mark.parametrize("apply", [swapping, of_another_state, *map(at_random, range(10))])
def test_parameters_take_values_of_each_other(apply):
    model = Squares().double()
    theirs = copy.deepcopy(model)
    ours, reference = update_of(model, apply), update_of(theirs, apply)
    reference.use_parameters_of(theirs)
    run = compile_training(model, ours, {"engine": "eager"})
    for x in torch.randn(3, 4, 2, dtype=torch.float64):
        run(x)
        train(theirs, reference, x)
    check(model, ours, theirs, reference)


def by_value(gradients, weights, states, numbers):
    norm = sum(g.square().sum() for g in gradients.values())
    return ({n: weights[n] - g for n, g in gradients.items()} if norm > 1 else {}), {}


def unknown(gradients, weights, states, numbers):
    return {"third": weights["first.weight"]}, {}


def of_another_shape(gradients, weights, states, numbers):
    return {}, {"count": torch.zeros(2)}


def test_what_no_program_can_keep_is_refused():
    run, *_ = pair({}, apply=by_value)
    message = r"values of gradients or weights\n.*test_function_update\.py:\d+ in by_value"
    with pytest.raises(CompileError, match=message):
        run(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (unknown, "returns a weight 'third', and has none of that name"),
        (of_another_shape, r"returns a state 'count' of shape \[2\], which was \[\]"),
        (lambda *_: ({}, {"count": 1.0}), "returns a state 'count' that is a float"),
        (lambda *_: None, "returns a NoneType instead of new weights and new states"),
        (lambda *_: ({}, None), "returns a NoneType as new states"),
    ],
)
def test_what_is_no_update_is_refused(apply, message):
    run, _, _, theirs, reference = pair({}, apply=apply)
    with pytest.raises(InputError, match=message):
        run(torch.ones(4, 3))
    with pytest.raises(InputError, match=message):
        train(theirs, reference, torch.ones(4, 3))


def test_shards_are_refused_where_the_whole_is_needed():
    options = {"replicas": 2, "locations": Locations(optimizer_state=Location(sharded=True))}
    run, *_ = pair(options)
    with pytest.raises(CompileError, match=r"whole of first\.weight .*locations has it"):
        run(torch.ones(4, 3))


def test_one_update_is_for_one_model():
    update = update_of(Layers())
    compile_training(Layers(), update)
    with pytest.raises(InputError, match="has the parameters of another model"):
        compile_training(Layers(), update)


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_computes_the_same_in_one_run_of_the_compiler(monkeypatch, tmp_path):
    commands, original = [], kernel_units.run_compiler

    def run_compiler(command, folder):
        commands.append(command)
        original(command, folder)

    monkeypatch.setattr(kernel_units, "run_compiler", run_compiler)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    compiled_stages.forget()
    run, model, ours, theirs, reference = pair({"engine": "inductor"})
    for x in batches(3, 4):
        run(x)
        train(theirs, reference, x)
    check(model, ours, theirs, reference)
    assert len(commands) == 1
