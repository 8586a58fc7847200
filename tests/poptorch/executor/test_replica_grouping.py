"""Check `replicaGrouping`: what each replica has, learns, and gives back."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import poptorch
from poptorch import CommGroupType, VariableRetrievalMode
from tests.poptorch.executor.models import Weighted

All, Consecutive, Orthogonal, NoGrouping = CommGroupType
ONE, EACH = VariableRetrievalMode.OnePerGroup, VariableRetrievalMode.AllReplicas


def options(replicas, *, accumulation=1, rule="mean"):
    made = poptorch.Options().replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    if rule == "sum":
        made.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    return made.outputMode(poptorch.OutputMode.All)


def weighted(slices):
    """A `Weighted` whose w has these values, one for each group of replicas."""
    model = Weighted()
    model.w = nn.Parameter(torch.tensor(slices).unsqueeze(1))
    return model


def groups_of(kind, shards, replicas):
    """The documented groups, written out."""
    if kind == NoGrouping:
        return [[r] for r in range(replicas)]
    count = replicas // shards
    if kind == Consecutive:
        return [list(range(g * shards, (g + 1) * shards)) for g in range(count)]
    return [list(range(g, replicas, count)) for g in range(count)]


@st.composite
def groupings(draw):
    replicas = draw(st.sampled_from([1, 2, 4, 8]))
    kind = draw(st.sampled_from([Consecutive, Orthogonal, NoGrouping]))
    shards = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= replicas]))
    return replicas, kind, shards, draw(st.sampled_from([ONE, EACH]))


@given(grouping=groupings(), accumulation=st.integers(1, 3), rule=st.sampled_from(["mean", "sum"]))
def test_gradients_are_added_up_inside_a_group_only(grouping, accumulation, rule):
    """The gradient of w is x: after a step with lr = 1, w shows the sum of the right inputs."""
    replicas, kind, shards, mode = grouping
    groups = groups_of(kind, shards, replicas)
    model = weighted([10.0 * g for g in range(len(groups))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(
        model, options(replicas, accumulation=accumulation, rule=rule), optimizer
    )
    training.w.replicaGrouping(kind, shards, mode)
    assert training.per_replica_params == {"w": (kind, shards, mode)}
    x = torch.randint(-8, 8, (accumulation, replicas)).float()
    losses = training(x.reshape(-1, 1))
    group_of = {r: g for g, members in enumerate(groups) for r in members}
    expected = torch.tensor([[10.0 * group_of[r] for r in range(replicas)]] * accumulation) * x
    assert torch.equal(losses.view(accumulation, replicas), expected)
    divisor = accumulation * replicas if rule == "mean" else 1  # all replicas, not the group's
    weights = [10.0 * g - x[:, members].sum() / divisor for g, members in enumerate(groups)]
    if mode == EACH:
        weights = [weights[group_of[r]] for r in range(replicas)]
    assert model.w.shape == (len(weights), 1)
    torch.testing.assert_close(model.w[:, 0], torch.stack(weights))
    assert model.state_dict()["w"].shape == (len(weights), 1)


def test_a_matrix_product_split_over_replicas():
    """Tensor-parallel 4 x data-parallel 2: the losses of all replicas add up to the whole one."""

    class Shard(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x):
            return poptorch.identity_loss((x @ self.weight).pow(2), "sum")

    whole = torch.randn(4, 8)
    model = Shard(torch.stack(whole.chunk(4, dim=1)))
    opts = options(8).inputReplicaGrouping(4, Consecutive)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.5))
    training.weight.replicaGrouping(Orthogonal, 2, ONE)
    x = torch.randn(6, 4)
    losses = training(x)
    reference = whole.clone().requires_grad_()
    loss = (x @ reference).pow(2).sum()
    loss.backward()
    torch.testing.assert_close(losses.sum(), loss.detach())
    expected = whole - 0.5 * reference.grad / 8
    torch.testing.assert_close(torch.cat([*model.weight.detach()], dim=1), expected)


def test_all_replicas_may_share():
    model = Weighted(2.0)
    training = poptorch.trainingModel(model, options(2), torch.optim.SGD(model.parameters(), 1.0))
    training.w.replicaGrouping(All, "ignored", EACH)
    assert training.per_replica_params == {}
    assert training(torch.tensor([1.0, 3.0])).tolist() == [2.0, 6.0]
    assert model.w.tolist() == [0.0]


def test_weights_go_to_the_device_and_back():
    model = weighted([1.0, 2.0])
    inference = poptorch.inferenceModel(model, options(2))
    inference.w.replicaGrouping(NoGrouping, 0, EACH)
    x = torch.ones(2)
    assert inference(x).tolist() == [1.0, 2.0]
    inference.load_state_dict({"w": torch.tensor([[3.0], [4.0]])})
    assert inference(x).tolist() == [3.0, 4.0]
    with torch.no_grad():
        model.w.copy_(torch.tensor([[5.0], [6.0]]))
    assert inference(x).tolist() == [3.0, 4.0]
    inference.copyWeightsToDevice()
    assert inference(x).tolist() == [5.0, 6.0]
    inference.copyWeightsToHost()
    assert model.w.tolist() == [[5.0], [6.0]]


def test_what_came_back_for_each_replica_is_taken_again():
    model = weighted([1.0, 2.0])
    held = model.w
    inference = poptorch.inferenceModel(model, options(4))
    inference.w.replicaGrouping(Orthogonal, 2, EACH)
    x = torch.ones(4)
    assert inference(x).tolist() == [1.0, 2.0, 1.0, 2.0]
    assert model.w.tolist() == [[1.0], [2.0]]
    inference.copyWeightsToHost()
    assert model.w is held
    assert model.w.tolist() == [[1.0], [2.0], [1.0], [2.0]]
    with torch.no_grad():
        model.w.copy_(torch.tensor([[3.0], [4.0], [9.0], [9.0]]))  # of a group the first one's
    inference.copyWeightsToDevice()
    assert inference(x).tolist() == [3.0, 4.0, 3.0, 4.0]
    inference.destroy()
    assert inference(x).tolist() == [3.0, 4.0, 3.0, 4.0]
    assert model.w.shape == (4, 1)


def test_state_of_the_optimizer_comes_back_as_the_parameter_does():
    for mode, rows in ((ONE, [0, 1]), (EACH, [0, 0, 1, 1])):
        model = weighted([1.0, 2.0])
        optimizer = poptorch.optim.Adam(model.parameters(), lr=0.5)
        training = poptorch.trainingModel(model, options(4), optimizer)
        training.w.replicaGrouping(Consecutive, 2, mode)
        x = torch.tensor([4.0, 0.0, 0.0, 8.0])
        training(x)
        state = optimizer.state_dict()["ipu_state"]
        expected = torch.tensor([[0.1], [0.2]])[rows]
        torch.testing.assert_close(state["Accl1___w"], expected)
        assert state["Step___w"].tolist() == [1.0] * len(rows)
        before = model.w.detach().clone()
        training(x)
        after = model.w.detach().clone()
        training.load_state_dict({"w": before})
        restored = poptorch.optim.Adam(model.parameters(), lr=0.5)
        restored.load_state_dict({**optimizer.state_dict(), "ipu_state": state})
        training.setOptimizer(restored)
        training(x)
        torch.testing.assert_close(model.w.detach(), after)


def test_a_step_that_fails_leaves_the_hosts_shape(monkeypatch):
    model = weighted([1.0, 2.0])
    inference = poptorch.inferenceModel(model, options(4))
    inference.w.replicaGrouping(Consecutive, 2, EACH)
    inference(torch.ones(4))
    inference.copyWeightsToHost()

    def fails(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(inference._core, "write_weights", fails)
    with pytest.raises(KeyboardInterrupt):
        inference.copyWeightsToDevice()
    assert model.w.tolist() == [[1.0], [1.0], [2.0], [2.0]]


def test_an_executor_that_takes_groups_refuses_what_came_back_for_replicas():
    model = weighted([1.0, 2.0])
    each, one = (poptorch.inferenceModel(model, options(4)) for _ in range(2))
    each.w.replicaGrouping(Consecutive, 2, EACH)
    one.w.replicaGrouping(Consecutive, 2, ONE)
    for executor in (each, one):
        executor(torch.ones(4))
    each.copyWeightsToHost()
    with pytest.raises(poptorch.Error, match=r"w has shape \[4, 1\], and the program's \[2, 1\]"):
        one.copyWeightsToDevice()


def test_inference_follows_training():
    model = weighted([1.0, 2.0])
    training = poptorch.trainingModel(model, options(2), torch.optim.SGD(model.parameters(), 1.0))
    inference = poptorch.inferenceModel(training, options(2))
    for executor in (training, inference):
        executor.w.replicaGrouping(NoGrouping, 0, ONE)
    training(torch.tensor([2.0, 4.0]))
    assert inference(torch.ones(2)).tolist() == [0.0, 0.0]


def test_a_parameter_of_a_submodule_has_a_dotted_name():
    model = nn.Sequential(weighted([1.0, 2.0]))
    inference = poptorch.inferenceModel(model, options(2))
    inference.per_replica_params["0.w"] = (NoGrouping, 0, ONE)
    assert inference(torch.ones(2)).tolist() == [1.0, 2.0]


def test_a_parameter_at_any_depth_is_grouped():
    model = nn.Sequential(nn.ModuleDict({"a": weighted([1.0, 2.0])}), nn.Identity())
    model.forward = lambda x: model[0]["a"](x)
    inference = poptorch.inferenceModel(model, options(2))
    getattr(inference, "0")["a"].w.replicaGrouping(Consecutive, 1, ONE)
    assert inference.per_replica_params == {"0.a.w": (Consecutive, 1, ONE)}
    assert inference(torch.ones(2)).tolist() == [1.0, 2.0]


def test_a_submodule_of_an_executor_is_the_submodule_in_all_else():
    model = nn.Module()
    model.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.forward = lambda x: model.layers(x)
    layers = poptorch.inferenceModel(model).layers
    x = torch.ones(1, 2)
    assert isinstance(layers, nn.Sequential)
    assert isinstance(layers[0].weight, nn.Parameter)
    assert layers == model.layers
    assert hash(layers) == hash(model.layers)
    assert repr(layers) == repr(model.layers)
    assert torch.equal(layers(x), model.layers(x))
    assert len(layers) == 2
    assert bool(layers[1])
    assert list(layers) == list(model.layers)
    assert model.layers[0] in list(layers)
    layers[0].flag = 3
    assert model.layers[0].flag == 3
    del layers[0].flag
    assert not hasattr(model.layers[0], "flag")
    for twin in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert type(twin) is nn.Sequential
        assert torch.equal(twin(x), model.layers(x))
    outer = nn.Sequential(layers)
    assert [name for name, _ in outer.named_parameters()] == ["0.0.weight", "0.0.bias"]
    assert torch.equal(outer(x), model.layers(x))
    executor = poptorch.inferenceModel(layers)
    torch.testing.assert_close(executor(x), model.layers(x))


def test_the_parameter_of_an_executor_is_the_parameter_in_all_else():
    model = weighted([1.0, 2.0])
    for executor in (
        poptorch.inferenceModel(model),
        poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), 1.0)),
    ):
        w = executor.w
        assert isinstance(w, nn.Parameter)
        assert w.shape == (2, 1)
        assert len(w) == 2
        assert repr(w) == repr(model.w)
        assert torch.equal(w, model.w)
        assert torch.equal(torch.stack([w, w]), torch.stack([model.w] * 2))
        for ours, theirs in ((2 - w, 2 - model.w), (w @ w.T, model.w @ model.w.T)):
            assert torch.equal(ours, theirs)
        assert (w == model.w).all()
        assert bool(w[1] > w[0])
        assert hash(w) == hash(model.w)
        assert torch.equal(copy.deepcopy(w), model.w)
        assert torch.equal(pickle.loads(pickle.dumps(w)), model.w)
        w.requires_grad = False
        assert not model.w.requires_grad
        w.requires_grad = True
        with pytest.raises(AttributeError, match="nothing"):
            w.nothing  # noqa: B018


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Consecutive, Orthogonal])
@pytest.mark.parametrize("shards", [0, 3, 8, 2.0, None])
def test_shards_that_do_not_divide_the_replicas(kind, shards):
    inference = poptorch.inferenceModel(weighted([1.0, 2.0]), options(4))
    with pytest.raises(poptorch.Error, match=r"must divide the replication factor 4 \(got"):
        inference.w.replicaGrouping(kind, shards, ONE)
    assert not inference.per_replica_params


def test_a_scalar_has_no_slices():
    model = Weighted()
    model.w = nn.Parameter(torch.tensor(1.0))
    inference = poptorch.inferenceModel(model, options(2))
    inference.w.replicaGrouping(NoGrouping, 0, ONE)
    with pytest.raises(poptorch.Error, match="Scalars cannot be passed as per-replica weight"):
        inference(torch.ones(2))


def test_another_number_of_slices():
    inference = poptorch.inferenceModel(weighted([1.0, 2.0, 3.0]), options(4))
    inference.w.replicaGrouping(Consecutive, 2, ONE)
    with pytest.raises(poptorch.Error, match=r"Parameter w has shape \[3, 1\].*has to be 2"):
        inference(torch.ones(4))


def test_a_name_that_the_model_does_not_have():
    inference = poptorch.inferenceModel(weighted([1.0, 2.0]), options(2))
    inference.per_replica_params["v"] = (NoGrouping, 0, ONE)
    with pytest.raises(poptorch.Error, match="'v', and the model no parameter"):
        inference(torch.ones(2))


def test_a_type_or_mode_that_does_not_exist():
    inference = poptorch.inferenceModel(weighted([1.0, 2.0]), options(2))
    with pytest.raises(ValueError, match="CommGroupType"):
        inference.w.replicaGrouping(7, 1, ONE)
    with pytest.raises(ValueError, match="VariableRetrievalMode"):
        inference.w.replicaGrouping(NoGrouping, 1, 1)


def test_a_compiled_model_has_its_groups():
    inference = poptorch.inferenceModel(weighted([1.0, 2.0]), options(2))
    inference.w.replicaGrouping(NoGrouping, 0, ONE)
    inference(torch.ones(2))
    with pytest.raises(poptorch.Error, match="compiled already"):
        inference.w.replicaGrouping(NoGrouping, 0, ONE)
    inference.destroy()
    inference.w.replicaGrouping(Consecutive, 1, ONE)


@pytest.mark.inductor
@pytest.mark.parametrize(("kind", "mode"), [(NoGrouping, EACH), (Consecutive, ONE)])
def test_one_replica_has_its_slice_in_a_fused_step(kind, mode, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "inductor")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.arange(12.0).view(1, 3, 4) / 12)

        def forward(self, x):
            return poptorch.identity_loss((x @ self.w).square(), "sum")

    model = Net()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(1), optimizer)
    executor.w.replicaGrouping(kind, 1, mode)
    x = torch.rand(2, 3)
    executor(x)
    (x @ reference.w[0]).square().sum().backward()
    torch.testing.assert_close(model.w, reference.w - 0.1 * reference.w.grad)
