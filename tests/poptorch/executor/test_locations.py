"""Check that tensors live where their location settings say, and that this changes no result."""

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.program import Load, ReduceScatter, Store
from poptorch import TensorLocationSettings as Settings
from poptorch import translate
from tests.poptorch.executor.models import Classifier, batch

KINDS = {
    "weight": ("setWeightLocation", "parameter"),
    "optimizer": ("setOptimizerLocation", "state"),
    "accumulator": ("setAccumulatorLocation", "accumulator"),
}


def trained(options, optimizer_of=None):
    """An executor that trains a classifier with momentum, what two calls return, its weights."""
    options.showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    model = Classifier()
    make = optimizer_of or (lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9))
    executor = poptorch.trainingModel(model, options, make(model.parameters()))
    losses = [executor(*batch(4, seed))[1] for seed in range(2)]
    return executor, losses, dict(model.state_dict())


def off_chip(executor):
    return {v.kind for v in executor._core.program.variables if v.off_chip}


def by_kind(executor):
    """The variables that each kind of instruction moves, by kind of variable."""
    program = executor._core.program
    kinds = {v.name: v.kind for v in program.variables}
    moved = {}
    for instruction in program.walk():
        if isinstance(instruction, Load | Store):
            moved.setdefault(kinds[instruction.value], []).append(type(instruction).__name__)
    return moved


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_moved_by_its_own_setting(kind):
    plain, losses, weights = trained(poptorch.Options())
    assert off_chip(plain) == set()
    options = poptorch.Options()
    setter, of_program = KINDS[kind]
    getattr(options.TensorLocations, setter)(Settings().useOnChipStorage(False))
    executor, their_losses, their_weights = trained(options)
    assert off_chip(executor) == {of_program}
    assert set(by_kind(executor)) == {of_program}
    assert {"Load", "Store"} == set(by_kind(executor)[of_program])
    assert executor._core.executable.memory.traffic == executor._core.program.traffic * 2
    assert torch.equal(torch.stack(losses), torch.stack(their_losses))
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)


def test_small_tensors_stay_on_the_chip():
    options = poptorch.Options()
    settings = Settings().useOnChipStorage(False).minElementsForOffChip(9)
    options.TensorLocations.setWeightLocation(settings)
    executor, *_ = trained(options)
    away = {v.name: v.off_chip for v in executor._core.program.variables if v.kind == "parameter"}
    assert away == {
        "first.weight": True,  # 8 x 4
        "first.bias": False,  # 8
        "second.weight": True,  # 3 x 8
        "second.bias": False,  # 3
    }


@pytest.mark.parametrize(
    ("setter", "above", "expected"),
    [
        ("setWeightLocation", 7, {"first.weight", "second.weight", "first.bias"}),  # 32, 24, 8
        ("setWeightLocation", 8, {"first.weight", "second.weight"}),
        ("setWeightLocation", None, set()),
        ("setOptimizerLocation", 24, {"first.weight..momentum_buffer"}),
        ("setAccumulatorLocation", 0, set()),
    ],
)
def test_tensors_of_more_elements_are_in_shards(setter, above, expected):
    def options(settings=None):
        options = poptorch.Options().replicationFactor(2)
        if settings is not None:
            getattr(options.TensorLocations, setter)(settings)
        return options

    settings = Settings().useReplicatedTensorSharding()
    if above is not None:
        settings.minElementsForReplicatedTensorSharding(above)
    _, losses, weights = trained(options())
    executor, their_losses, their_weights = trained(options(settings))
    program = executor._core.program
    assert {v.name for v in program.variables if v.shards > 1} == expected
    assert any(isinstance(i, ReduceScatter) for i in program.walk()) == bool(expected)
    assert executor._core.executable.memory.traffic == program.traffic * 2
    assert torch.equal(torch.stack(losses), torch.stack(their_losses))
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)


def test_shards_follow_a_new_optimizer_and_new_weights():
    def run(options):
        options.replicationFactor(2).showCompilationProgressBar(False)
        model = Classifier()
        executor = poptorch.trainingModel(
            model, options, poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        executor(*batch(4, 0))
        executor.setOptimizer(poptorch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5))
        executor(*batch(4, 1))
        executor.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        executor(*batch(4, 2))
        return dict(model.state_dict())

    divided = poptorch.Options()
    settings = Settings().useReplicatedTensorSharding().minElementsForReplicatedTensorSharding(0)
    divided.TensorLocations.setWeightLocation(settings).setOptimizerLocation(settings)
    whole, found = run(poptorch.Options()), run(divided)
    assert all(torch.equal(whole[name], found[name]) for name in whole)


@pytest.mark.parametrize("combined", [True, False])
def test_the_velocity_of_a_combined_sgd_follows_the_accumulators(combined):
    options = poptorch.Options()
    options.TensorLocations.setOptimizerLocation(Settings().useOnChipStorage(False))
    executor, *_ = trained(
        options,
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=combined),
    )
    assert off_chip(executor) == (set() if combined else {"state"})


def test_phases_send_everything_off_the_chip_unless_told_otherwise():
    def of_phases(**locations):
        strategy = poptorch.SerialPhasedExecution("first", "second")
        strategy.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd)
        strategy.phase(0).ipus(0)
        strategy.phase(1).ipus(1)
        options = poptorch.Options().setExecutionStrategy(strategy)
        for setter, settings in locations.items():
            getattr(options.TensorLocations, setter)(settings)
        options.showCompilationProgressBar(False)
        model = Classifier(second=1)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        executor = poptorch.trainingModel(model, options, optimizer)
        executor(*batch(4))
        program = executor._core.program
        return program, {v.kind for v in program.variables if v.off_chip}

    program, away = of_phases()
    assert away == {"parameter", "state", "accumulator"}
    assert any(isinstance(i, Store) and i.value != i.result for i in program.walk())
    here = Settings().useOnChipStorage(True)
    program, away = of_phases(setWeightLocation=here, setActivationLocation=here)
    assert away == {"state", "accumulator"}
    assert not any(isinstance(i, Store) and i.value != i.result for i in program.walk())


def test_the_states_of_adam_are_moved_around_the_update():
    options = poptorch.Options()
    options.TensorLocations.setOptimizerLocation(Settings().useOnChipStorage(False))
    executor, *_ = trained(options, lambda p: poptorch.optim.AdamW(p, lr=0.01))
    names = [type(i).__name__ for i in executor._core.program.walk()]
    update = names.index("Update")
    assert names.index("Load") < update < names.index("Store")
    assert names.count("Load") == names.count("Store") == 2 * 4 + 1  # two averages, and a step


def test_shards_of_accumulators_are_said_to_be_recorded_only(capfd):
    translate._say_not_sharded.cache_clear()
    shards = Settings().useReplicatedTensorSharding(True)
    options = poptorch.Options()
    options.TensorLocations.setAccumulatorLocation(shards).setWeightLocation(shards)
    for _ in range(2):
        poptorch.inferenceModel(nn.Linear(2, 2), options).compile(torch.ones(1, 2))
    said = capfd.readouterr().err
    assert said.count("useReplicatedTensorSharding is recorded only for accumulators") == 1
    assert "for weights" not in said
