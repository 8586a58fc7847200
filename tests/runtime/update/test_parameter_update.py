"""Check that updates do what torch's optimisers do, and with flags what PopTorch's did."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program.ir.update_rules import SGD, Adam, RMSprop, Rule
from ipu_dynamo.runtime.update.gradient_scale import GradientScale
from ipu_dynamo.runtime.update.parameter_update import ParameterUpdate
from ipu_dynamo.runtime.update.update_tensors import new_states

SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 3, 4, 5), (33, 17))
STEPS = 4

rates = st.floats(1e-4, 0.5)
fractions = st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.999))
decays = st.sampled_from((0.0, 0.01, 0.3))


def random_tensors(seed: int, dtype: torch.dtype, shapes=SHAPES) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def train_with_torch(make, dtype=torch.float32, *, divisor=1.0, values=None, steps=STEPS):
    """The weights after `steps` steps of `make(parameters)`, whose numbers `values(step)` gives."""
    parameters = [torch.nn.Parameter(p) for p in random_tensors(0, dtype)]
    optimizer = make(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, random_tensors(step + 1, dtype), strict=True):
            parameter.grad = gradient / divisor
        if values is not None:
            optimizer.param_groups[0].update(values(step))
        optimizer.step()
    return [p.detach() for p in parameters], optimizer


def train(rule: Rule, values, dtype=torch.float32, *, scale=None, steps=STEPS):
    """The weights and states after `steps` steps of `rule`; `values(step)` are its numbers."""
    parameters = random_tensors(0, dtype)
    gradients = [torch.zeros_like(p) for p in parameters]
    states = new_states(rule, parameters)
    update = ParameterUpdate(rule, parameters, gradients, states, scale=scale)
    for step in range(steps):
        for accumulator, gradient in zip(gradients, random_tensors(step + 1, dtype), strict=True):
            accumulator.copy_(gradient)
        update(values(step))
    return parameters, states


def scale_of(divisor: float) -> GradientScale | None:
    """As a program has it: what divides by 1 is left out, and halves are updated in half then."""
    return None if divisor == 1.0 else GradientScale(divisor)


def assert_equal(got, expected):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        same = a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
        assert same, f"tensor {index} differs by up to {(a - b).abs().max()}"


def assert_close(got, expected, tolerance=1e-6):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.numel():
            largest = max(1.0, b.abs().max().item())
            error = (a.double() - b.double()).abs().max().item()
            assert error <= tolerance * largest, f"tensor {index} differs by {error}"


# --- The same as torch ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    lr=rates,
    momentum=fractions,
    dampening=st.sampled_from((0.0, 0.2)),
    decay=decays,
    nesterov=st.booleans(),
    maximize=st.booleans(),
    divisor=st.sampled_from((1.0, 3.0, 8.0)),
)
def test_sgd_has_the_bits_of_torch(
    dtype, lr, momentum, dampening, decay, nesterov, maximize, divisor
):
    nesterov = nesterov and momentum > 0.0 and dampening == 0.0
    expected, optimizer = train_with_torch(
        lambda p: torch.optim.SGD(
            p, lr, momentum, dampening, decay, nesterov, maximize=maximize, fused=True
        ),
        dtype,
        divisor=divisor,
    )
    rule = SGD(momentum=momentum > 0.0, nesterov=nesterov, maximize=maximize)
    values = (lr, momentum, dampening, decay)
    got, states = train(rule, lambda step: values, dtype, scale=scale_of(divisor))
    assert_equal(got, expected)
    if momentum:
        buffers = [s["momentum_buffer"] for s in optimizer.state.values()]
        assert_equal(states["momentum_buffer"], buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@given(
    lr=rates,
    betas=st.tuples(fractions, fractions),
    eps=st.sampled_from((1e-8, 1e-4)),
    decay=decays,
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    divisor=st.sampled_from((1.0, 3.0, 8.0)),
)
def test_adam_has_the_bits_of_torch(dtype, lr, betas, eps, decay, flags, divisor):
    decoupled, amsgrad, maximize = flags
    divisor = divisor if dtype.itemsize >= 4 else 1.0  # divided narrow ones are updated in float32
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected, optimizer = train_with_torch(
        lambda p: kind(p, lr, betas, eps, decay, amsgrad, maximize=maximize, fused=True),
        dtype,
        divisor=divisor,
    )
    rule = Adam(decoupled_weight_decay=decoupled, amsgrad=amsgrad, maximize=maximize)
    values = (lr, *betas, eps, decay)
    got, states = train(rule, lambda step: values, dtype, scale=scale_of(divisor))
    assert_equal(got, expected)
    for name, tensors in states.items():
        assert_equal(tensors, [s[name] for s in optimizer.state.values()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@given(
    lr=rates,
    alpha=st.sampled_from((0.0, 0.5, 0.99, 1.0 - 1e-12, 1.0)),
    eps=st.sampled_from((1e-2, 1e-4)),
    decay=decays,
    momentum=fractions,
    flags=st.tuples(st.booleans(), st.booleans()),
    divisor=st.sampled_from((1.0, 3.0, 8.0)),
)
def test_rmsprop_follows_torch(dtype, tolerance, lr, alpha, eps, decay, momentum, flags, divisor):
    centered, maximize = flags

    def make(parameters):
        return torch.optim.RMSprop(
            parameters, lr, alpha, eps, decay, momentum, centered, maximize=maximize
        )

    runs = [train_with_torch(make, dtype, divisor=divisor, steps=n) for n in range(1, STEPS + 1)]
    expected, optimizer = runs[-1]
    rule = RMSprop(centered=centered, momentum=momentum > 0.0, maximize=maximize)
    values = (lr, alpha, eps, decay, momentum)
    got, states = train(rule, lambda step: values, dtype, scale=scale_of(divisor))
    if centered or alpha == 1.0:  # by the same operators
        assert_equal(got, expected)
    else:
        way = zip(random_tensors(0, dtype), *(weights for weights, _ in runs), strict=True)
        for a, places in zip(got, way, strict=True):
            # steps over a small eps may be larger than their sum, and are rounded as they are
            steps = [(after - before).abs() for before, after in pairwise(places)]
            scale = torch.stack([*steps, *(place.abs() for place in places)]).amax(0)
            error = (a - places[-1]).abs()
            assert (error <= tolerance * scale.clamp(min=1.0)).all()
    assert {"step", *states} == set(states)
    assert states["step"][0].item() == next(iter(optimizer.state.values()))["step"].item() == STEPS


def test_numbers_may_change_at_every_step():
    def sgd(step):
        return {"lr": 0.1 / (step + 1), "momentum": 0.9 * (step % 2), "weight_decay": 0.1 * step}

    expected, _ = train_with_torch(lambda p: torch.optim.SGD(p, 0.1, 0.9, fused=True), values=sgd)
    got, _ = train(
        SGD(momentum=True),
        lambda step: (sgd(step)["lr"], sgd(step)["momentum"], 0.0, sgd(step)["weight_decay"]),
    )
    assert_equal(got, expected)

    def adam(step):
        return {"lr": 0.1 / (step + 1), "betas": (0.1 * step, 0.9), "eps": 10.0**-step}

    expected, _ = train_with_torch(lambda p: torch.optim.Adam(p, fused=True), values=adam)
    got, _ = train(
        Adam(), lambda step: (adam(step)["lr"], *adam(step)["betas"], adam(step)["eps"], 0.0)
    )
    assert_equal(got, expected)


def test_dampening_that_comes_later_does_not_make_a_first_step():
    def values(step):
        return {"dampening": 0.0 if step < 2 else 0.5}

    expected, _ = train_with_torch(
        lambda p: torch.optim.SGD(p, 0.1, 0.9, fused=True), values=values
    )
    got, _ = train(SGD(momentum=True), lambda step: (0.1, 0.9, values(step)["dampening"], 0.0))
    assert_equal(got, expected)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (SGD(momentum=True), (0.1, 0.9, 0.0, 0.0)),
        (Adam(), (0.1, 0.9, 0.99, 1e-8, 0.0)),
        (RMSprop(momentum=True), (0.1, 0.9, 1e-4, 0.0, 0.5)),
        (RMSprop(centered=True), (0.1, 0.9, 1e-4, 0.0, 0.0)),
    ],
)
def test_learning_rate_may_be_a_tensor(rule, values):
    tensor = torch.tensor(values[0], dtype=torch.float64)
    expected, _ = train(rule, lambda step: values)
    got, _ = train(rule, lambda step: (tensor, *values[1:]))
    assert_equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_sgd_rounds_after_every_operator_as_torch_does(dtype):
    expected, _ = train_with_torch(
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.1, 0.01, foreach=False), dtype
    )
    got, _ = train(SGD(momentum=True), lambda step: (0.1, 0.9, 0.1, 0.01), dtype)
    assert_equal(got, expected)


# --- Tensors that do not fit each other ----------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (SGD(momentum=True, momentum_dtype=torch.float32), (0.1, 0.9, 0.1, 0.01)),
        (SGD(), (0.1, 0.0, 0.0, 0.01)),
        (
            Adam(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float32),
            (0.1, 0.9, 0.99, 1e-6, 0.01),
        ),
        (
            RMSprop(momentum=True, square_avg_dtype=torch.float32, momentum_dtype=torch.float32),
            (0.1, 0.9, 1e-3, 0.01, 0.5),
        ),
    ],
)
def test_mixed_dtypes_compute_in_the_widest_and_round_once(rule, values):
    """Every tensor is what a float32 step from the same values gives, rounded to its dtype."""
    parameters = random_tensors(0, torch.float16)
    gradients = random_tensors(1, torch.float32)
    states = new_states(rule, parameters)
    like_parameter = [spec for spec in rule.state_names() if spec.shape == "like_parameter"]
    for name, _, _, dtype in like_parameter:
        assert {s.dtype for s in states[name]} == {dtype}
    update = ParameterUpdate(rule, parameters, gradients, states)
    for _ in range(3):
        wide = [p.float() for p in parameters]
        wide_states = copy.deepcopy(states)  # a shared step stays shared
        for name, *_ in like_parameter:
            wide_states[name] = [s.float() for s in wide_states[name]]
        ParameterUpdate(rule, wide, [g.clone() for g in gradients], wide_states)(values)
        update(values)
        assert_equal(parameters, [w.half() for w in wide])
        for name, *_ in like_parameter:
            narrow = [w.to(s.dtype) for w, s in zip(wide_states[name], states[name], strict=True)]
            assert_equal(states[name], narrow)


def test_one_group_may_hold_several_dtypes():
    dtypes = (torch.float32, torch.float64, torch.float16, torch.float32)
    rule, values = Adam(), (0.1, 0.9, 0.99, 1e-6, 0.01)
    tensors = [random_tensors(7, dtype, [(5,)])[0] for dtype in dtypes]
    expected = [t.clone() for t in tensors]
    states = new_states(rule, tensors)
    update = ParameterUpdate(rule, tensors, [t.clone() for t in tensors], states)
    for t in expected:
        ParameterUpdate(rule, [t], [t.clone()], new_states(rule, [t]))(values)
    update(values)
    assert_equal(tensors, expected)
    assert states["step"][0].item() == 1.0  # counted once, not once per dtype


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (SGD(momentum=True), (0.1, 0.9, 0.0, 0.01)),
        (Adam(), (0.1, 0.9, 0.99, 1e-6, 0.01)),
        (RMSprop(), (0.1, 0.9, 1e-3, 0.01, 0.0)),
    ],
)
def test_memory_layout_does_not_matter(rule, values):
    """The fused operators walk raw memory, so tensors of other strides must not reach them."""
    weight, gradient = random_tensors(3, torch.float32, [(4, 3, 5, 5)] * 2)
    expected = weight.clone()
    ParameterUpdate(rule, [expected], [gradient.clone()], new_states(rule, [expected]))(values)
    sparse = torch.zeros(4, 3, 5, 10)[..., ::2]  # with gaps
    for laid_out in (weight.to(memory_format=torch.channels_last), sparse.copy_(weight)):
        ParameterUpdate(rule, [laid_out], [gradient.clone()], new_states(rule, [laid_out]))(values)
        torch.testing.assert_close(laid_out, expected, rtol=1e-6, atol=1e-7)


# --- PopTorch's equations ------------------------------------------------------------------------


@given(
    lr=rates,
    momentum=fractions,
    dampening=fractions,
    decay=decays,
    nesterov=st.booleans(),
)
def test_sgd_with_momentum_as_in_poptorch(lr, momentum, dampening, decay, nesterov):
    weights = random_tensors(0, torch.float64)
    velocities = [torch.zeros_like(w) for w in weights]
    for step in range(STEPS):
        for w, v, a in zip(
            weights, velocities, random_tensors(step + 1, torch.float64), strict=True
        ):
            s = a + decay * w
            v.copy_(momentum * v + (1 - dampening) * s)
            w -= lr * (s + momentum * v if nesterov else v)
    rule = SGD(momentum=True, nesterov=nesterov, dampen_first_step=True)
    values = (lr, momentum, dampening, decay)
    got, states = train(rule, lambda step: values, torch.float64)
    assert_close(got, weights, 1e-13)
    assert_close(states["momentum_buffer"], velocities, 1e-13)


@given(lr=rates, dampening=fractions, decay=decays)
def test_sgd_without_momentum_as_in_poptorch(lr, dampening, decay):
    weights = random_tensors(0, torch.float64)
    for step in range(STEPS):
        for w, g in zip(weights, random_tensors(step + 1, torch.float64), strict=True):
            rate = lr * (1 - dampening)
            w.copy_(w * (1 - rate * decay) - rate * g)
    values = (lr, 0.0, dampening, decay)
    got, states = train(SGD(stateless_dampening=True), lambda step: values, torch.float64)
    assert_close(got, weights, 1e-13)
    assert states == {}


@given(lr=rates, betas=st.tuples(fractions, fractions), decay=decays, decoupled=st.booleans())
def test_adam_as_in_poptorch(lr, betas, decay, decoupled):
    weights = random_tensors(0, torch.float64)
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    (b1, b2), eps = betas, 1e-4
    for t in range(1, STEPS + 1):
        for i, g in enumerate(random_tensors(t, torch.float64)):
            s = g if decoupled else g + decay * weights[i]
            m[i] = b1 * m[i] + (1 - b1) * s
            v[i] = b2 * v[i] + (1 - b2) * s * s
            x = (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps)
            weights[i] = weights[i] - lr * (x + decay * weights[i] if decoupled else x)
    rule = Adam(decoupled_weight_decay=decoupled)
    got, _ = train(rule, lambda step: (lr, b1, b2, eps, decay), torch.float64)
    assert_close(got, weights, 1e-12)


@given(
    lr=rates,
    alpha=st.sampled_from((0.5, 0.9, 0.99)),
    decay=decays,
    momentum=fractions,
    centered=st.booleans(),
)
def test_rmsprop_as_in_poptorch(lr, alpha, decay, momentum, centered):
    weights = random_tensors(0, torch.float64)
    v1, v2, v3 = ([torch.zeros_like(w) for w in weights] for _ in range(3))
    eps = 1e-3
    for t in range(1, STEPS + 1):
        for i, g in enumerate(random_tensors(t, torch.float64)):
            s = g + decay * weights[i]
            v1[i] = alpha * v1[i] + (1 - alpha) * s * s
            v2[i] = alpha * v2[i] + (1 - alpha) * s
            d = v1[i] - v2[i] * v2[i] if centered else v1[i]
            v3[i] = momentum * v3[i] + s / (d.sqrt() + eps)
            weights[i] = weights[i] - lr * v3[i]
    rule = RMSprop(centered=centered, momentum=momentum > 0.0)
    got, _ = train(rule, lambda step: (lr, alpha, eps, decay, momentum), torch.float64)
    assert_close(got, weights, 1e-11)


# --- Division -----------------------------------------------------------------------------------


def test_divisor_follows_the_loss_scale():
    weight, gradient, loss_scale = torch.zeros(3), torch.ones(3), torch.ones(())
    scale = GradientScale(2.0, factors=[loss_scale])
    scale.follow()
    update = ParameterUpdate(SGD(), [weight], [gradient], {}, scale=scale)
    update((1.0, 0.0, 0.0, 0.0))
    gradient.fill_(1.0)
    loss_scale *= 2
    scale.follow()
    update((1.0, 0.0, 0.0, 0.0))
    assert weight.tolist() == [-0.75] * 3


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (SGD(momentum=True, nesterov=True), (0.1, 0.9, 0.0, 0.01)),
        (Adam(), (0.1, 0.9, 0.99, 1e-8, 0.01)),
        (RMSprop(centered=True), (0.1, 0.9, 1e-4, 0.01, 0.0)),
    ],
)
def test_updates_do_not_depend_on_threads(rule, values):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            weight, *gradients = random_tensors(0, torch.float32, [(100_003,)] * 3)
            states = new_states(rule, [weight])
            for gradient in gradients:
                ParameterUpdate(rule, [weight], [gradient], states, scale=GradientScale(3.0))(
                    values
                )
            results.append(weight)
    finally:
        torch.set_num_threads(threads)
    assert_equal(results[1:], results[:1] * 2)


# --- Which tensors change ------------------------------------------------------------------------


def test_parameters_without_gradient_and_their_states_stay():
    rule, parameters = Adam(), random_tensors(0, torch.float32, [(3,), (4,)])
    before = [p.clone() for p in parameters]
    states = {name: [t.clone() for t in ts] for name, ts in new_states(rule, parameters).items()}
    update = ParameterUpdate(rule, parameters, [None, torch.ones(4)], states)
    update((0.1, 0.9, 0.99, 1e-8, 0.0))
    assert torch.equal(parameters[0], before[0])
    assert not torch.equal(parameters[1], before[1])
    assert [s.item() for s in states["step"]] == [0.0, 1.0]
    assert not states["exp_avg"][0].any()


@pytest.mark.parametrize("rule", [SGD(momentum=True), Adam(), RMSprop()])
@pytest.mark.parametrize("gradients", [[], [None, None]])
def test_nothing_to_update_is_no_error(rule, gradients):
    parameters = [torch.ones(2) for _ in gradients]
    update = ParameterUpdate(rule, parameters, gradients, new_states(rule, parameters))
    update((0.1, 0.9, 0.9, 0.1, 0.1)[: len(rule.hyperparameters)])
    assert all(torch.equal(p, torch.ones(2)) for p in parameters)


def test_updates_parameters_that_require_gradients_in_place():
    weight = torch.nn.Parameter(torch.ones(3))
    address = weight.data_ptr()
    ParameterUpdate(SGD(), [weight], [torch.ones(3)], {})((1.0, 0.0, 0.0, 0.0))
    assert weight.tolist() == [0.0] * 3
    assert weight.data_ptr() == address
    assert weight.is_leaf


def test_reload_notices_states_that_were_overwritten():
    """The first step is undampened until there is a momentum, wherever that came from."""
    rule, weight, values = SGD(momentum=True), torch.zeros(1), (1.0, 0.5, 0.5, 0.0)
    states = new_states(rule, [weight])
    update = ParameterUpdate(rule, [weight], [torch.ones(1)], states)
    states["momentum_buffer"][0].fill_(4.0)
    states["momentum_started"][0].fill_(1.0)
    update.reload()
    update(values)
    assert weight.item() == -(0.5 * 4.0 + 0.5)
    states["momentum_started"][0].zero_()
    update.reload()
    update(values)
    assert weight.item() == -2.5 - 1.0


def test_momenta_that_start_at_different_steps():
    rule, weights = SGD(momentum=True), [torch.zeros(1), torch.zeros(1)]
    started = [torch.tensor(1.0), torch.tensor(0.0)]
    states = {"momentum_buffer": [torch.ones(1), torch.ones(1)], "momentum_started": started}
    ParameterUpdate(rule, weights, [torch.ones(1), torch.ones(1)], states)((1.0, 0.5, 0.5, 0.0))
    assert [w.item() for w in weights] == [-1.0, -1.0]
    assert [s.item() for s in states["momentum_buffer"]] == [1.0, 1.0]
    assert [s.item() for s in started] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("parameter", "gradient", "said"),
    [
        (torch.ones(2), torch.ones(3), r"shape \[2\], one of its tensors \[3\]"),
        (torch.ones(2), torch.ones(2, device="meta"), "a tensor on meta, not on cpu"),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2), "dtype torch.complex64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(parameter, gradient, said):
    with pytest.raises(ValueError, match=said):
        ParameterUpdate(SGD(), [parameter], [gradient], {})


def test_lists_that_do_not_align_are_refused():
    with pytest.raises(ValueError, match="1 gradients for 2 parameters"):
        ParameterUpdate(SGD(), [torch.ones(1)] * 2, [torch.ones(1)], {})


# --- Rules as text -------------------------------------------------------------------------------

dtypes = st.sampled_from((None, torch.float16, torch.float32, torch.bfloat16))
rules = st.one_of(
    st.builds(SGD, st.just(True), *[st.booleans()] * 4, dtypes),
    st.builds(Adam, *[st.booleans()] * 3, dtypes, dtypes),
    st.builds(RMSprop, *[st.booleans()] * 4, dtypes, dtypes, dtypes),
)


@given(rules)
def test_printed_rules_are_read_back(rule):
    assert Rule.parse(str(rule)) == rule
    assert hash(Rule.parse(str(rule))) == hash(rule)


def test_rules_print_what_differs_from_the_default():
    assert str(SGD()) == "sgd()"
    assert str(SGD(momentum=True, nesterov=True)) == "sgd(momentum, nesterov)"
    rule = Adam(decoupled_weight_decay=True, exp_avg_dtype=torch.float16)
    assert str(rule) == "adam(decoupled_weight_decay, exp_avg_dtype=float16)"


@pytest.mark.parametrize("text", ["", "adagrad()", "sgd", "sgd(speed)", "adam(exp_avg_dtype=f)"])
def test_other_text_is_not_a_rule(text):
    with pytest.raises(ValueError, match=r"not an update rule|has no field|not a dtype"):
        Rule.parse(text)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="needs momentum"):
        SGD(nesterov=True)
