"""Check what comes back from a call, and what the model sees while it is traced."""

import collections
import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import poptorch

ONE = torch.ones(1)
Pair = collections.namedtuple("Pair", ["left", "right"])


class Ordered(collections.OrderedDict):
    """A dictionary of the user's own."""


def test_structures_come_back():
    marker = object()

    def forward(x):
        return Pair([x, (x + 1, "text")], Ordered(b=x * 2, a={"none": None, "own": marker}))

    executor = poptorch.inferenceModel(forward)
    for x in (1.0, 2.0):
        result = executor(torch.tensor([x]))
        assert type(result) is Pair
        assert type(result.left[1]) is tuple
        assert list(result.right) == ["b", "a"]
        assert type(result.right) is Ordered
        assert result.right["a"]["own"] is marker
        assert [*map(float, (result.left[0], result.left[1][0], result.right["b"]))] == [
            x,
            x + 1,
            2 * x,
        ]


def test_classes_of_the_user_pass_through():
    class Box:
        def __init__(self, content):
            self.content = content

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):  # noqa: N802 (PopTorch's name)
            yield struct.content

        def reconstruct(self, original_structure, tensor_iterator):
            return Box(next(tensor_iterator))

    poptorch.registerCustomArgParser(Box, Parser())
    try:
        executor = poptorch.inferenceModel(lambda box: Box(box.content + 1))
        assert [float(executor(Box(ONE * n)).content) for n in (1, 2)] == [2, 3]
    finally:
        poptorch.registerCustomArgParser(Box, None)


def test_wide_types_come_back_narrow():
    outputs = poptorch.inferenceModel(lambda x: (x, x.double(), x.argmax()))(torch.arange(3))
    assert [o.dtype for o in outputs] == [torch.int32, torch.float32, torch.int32]


def test_changed_inputs_are_written_back():
    x = torch.arange(4.0)

    def forward(x):
        x.mul_(2)
        return x.sum()

    executor = poptorch.inferenceModel(forward, poptorch.Options().deviceIterations(2))
    assert executor(x).tolist() == [2, 10]
    assert x.tolist() == [0, 2, 4, 6]


def test_nothing_comes_back_for_nothing():
    assert poptorch.inferenceModel(lambda x: None)(ONE) is None


def test_python_runs_once():
    seen = []

    def forward(x, factor):
        seen.append((poptorch.isRunningOnIpu(), x.shape))
        return x * factor

    executor = poptorch.inferenceModel(forward, poptorch.Options().deviceIterations(3))
    for _ in range(2):
        assert executor(torch.ones(6), 4).tolist() == [4] * 6
    assert seen == [(True, (2,))]
    assert not poptorch.isRunningOnIpu()


def test_constants_come_back_once():
    options = poptorch.Options().deviceIterations(3)
    constant, value = poptorch.inferenceModel(lambda x: (torch.arange(2), x), options)(
        ONE.repeat(3)
    )
    assert constant.tolist() == [0, 1]
    assert value.shape == (3,)


def test_reading_a_value_is_refused_with_its_line():
    executor = poptorch.inferenceModel(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(poptorch.Error, match="aten::item is only supported in eager mode") as e:
        executor(ONE)
    assert "test_results.py" in str(e.value)
    assert "poptorch.cond" in str(e.value)


@pytest.mark.parametrize("move", [lambda x: x.cpu(), lambda x: x.to("cpu")])
def test_values_stay_on_the_device(move):
    with pytest.raises(poptorch.Error, match="Illegal move to CPU"):
        poptorch.inferenceModel(move)(ONE)


def test_sequences_in_any_order_are_packed():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, last = self.lstm(packed)
            return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1]), last

    model, x, lengths = Layer(), torch.randn(3, 5, 3), torch.tensor([2, 5, 3])
    torch.testing.assert_close(
        poptorch.inferenceModel(model)(x, lengths), model(x, lengths), check_dtype=False
    )


@pytest.mark.parametrize("device", ["ipu", "xla"])
def test_moves_to_the_device_are_no_moves(device):
    def forward(x):
        table = torch.ones(1, device=device) + torch.zeros(1).to(device)
        return x.to(device) + table.to(x.device).to(torch.device(device), dtype=torch.float32)

    assert poptorch.inferenceModel(forward)(ONE) == 2


class OnTheDevice(nn.Module):
    """A model that takes its branch by the device of its tensors, and makes others there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        made = torch.zeros(3)
        h = self.linear(x) * self.scale + made
        seen = [t.device.type for t in (x, self.linear.weight, self.scale, made, h)]
        if x.device.type != "ipu":
            assert (x < 100).all()
        where = x.device
        generator = torch.Generator(device=where)
        assert isinstance(generator, torch.Generator)
        with torch.autocast(where.type, enabled=False), torch.device(where):
            h = h + torch.arange(3, device=where) + torch.zeros(3)
        for place in (where, str(where), where.type, torch.device(where)):
            h = h.to(place) + torch.full((3,), 1.0, device=place) + torch.tensor(1, device=place)
        return h, seen, (where == made.device, x.is_ipu, x.is_cpu, torch.is_autocast_enabled("ipu"))


def test_tensors_are_on_the_ipu_in_forward_alone():
    model, x = OnTheDevice(), torch.randn(2, 3)
    h, seen, said = poptorch.inferenceModel(model)(x)
    assert set(seen) == {"ipu"}
    assert said == (True, True, False, False)
    torch.testing.assert_close(h, model.linear(x).detach() + torch.arange(3) + 8)
    assert model.linear.weight.device.type == h.device.type == "cpu"
    assert torch.Generator(device="cpu").device.type == "cpu"


def test_tensors_show_the_cpu_where_an_option_says_so():
    options = poptorch.Options()
    options._device_of_tensors = "cpu"
    assert poptorch.inferenceModel(lambda x: (x, x.device.type), options)(ONE) == (1, "cpu")


def test_generators_draw_nothing_in_forward():
    def forward(x):
        return x + torch.rand(1, generator=torch.Generator().manual_seed(1))

    with pytest.raises(poptorch.Error, match=r"rand in forward draws.*randomSeed"):
        poptorch.inferenceModel(forward)(ONE)


def test_outputs_are_saved_as_plain_tensors():
    output = poptorch.inferenceModel(lambda x: x + 1)(ONE)
    output.note = "kept"
    plain = poptorch.inferenceModel(lambda x: x + 2)(ONE)
    file = io.BytesIO()
    torch.save({"output": output, "plain": plain}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == {"output": 2, "plain": 3}
    assert vars(loaded["output"]) == {"note": "kept"}
    assert not vars(loaded["plain"])
    assert pickle.loads(pickle.dumps(output)).note == "kept"
    for tensor in (output, copy.deepcopy(output)):
        with pytest.raises(poptorch.Error, match="cannot be called explicitly"):
            tensor.backward()


def test_a_copy_of_an_output_is_saved_with_its_own_attributes():
    output = poptorch.inferenceModel(lambda x: x + 1)(ONE)
    twin = copy.deepcopy(output)
    twin.note = "twin"
    assert pickle.loads(pickle.dumps(twin)).note == "twin"
    assert not vars(pickle.loads(pickle.dumps(output)))


def test_a_tensor_from_outside_is_a_constant_with_a_warning():
    outside = torch.tensor([5.0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        executor = poptorch.inferenceModel(lambda x: x + outside + outside)
        assert executor(ONE) == 11
    outside.fill_(0)
    assert executor(ONE) == 11
    assert len([w for w in caught if "constant of the program" in str(w.message)]) == 1


@pytest.mark.parametrize("training", [False, True])
def test_integer_and_bool_buffers_count(training):
    class Counters(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("odd", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("table", torch.arange(3))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.calls += 1
            self.odd.logical_not_()
            loss = poptorch.identity_loss(self.weight * x, "sum")
            return self.calls, self.odd & True, self.table * 2, loss

    model = Counters()
    options = poptorch.Options().deviceIterations(2)
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    executor = wrap(model, options)
    for _ in range(3):
        results = executor(torch.ones(2))
    assert results[0].tolist() == (6 if training else [5, 6])
    assert results[1].tolist() == ([False] * 2 if training else [True] * 2 + [False] * 2)
    assert results[2].tolist() == [0, 2, 4]
    executor.copyWeightsToHost()
    assert model.calls == 6
    assert model.calls.dtype == torch.int64
    model.calls.fill_(10)
    executor.copyWeightsToDevice()
    assert executor(torch.ones(2))[0].reshape(-1)[-1] == 12


def test_a_buffer_that_replicas_would_change_apart():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x):
            self.total += x
            return self.total

    options = poptorch.Options().replicationFactor(2)
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers"):
        poptorch.inferenceModel(Sum(), options)(torch.ones(2))
    apart = options.clone().broadcastBuffers(False)
    assert poptorch.inferenceModel(Sum(), apart)(torch.tensor([1.0, 2.0])).tolist() == [1, 2]


def test_masks_may_be_of_type_uint8():
    mask = torch.tensor([[1, 0, 1]], dtype=torch.uint8)

    def forward(x, mask):
        return x.masked_fill(mask, -1.0), torch.where(mask, x, -x)

    filled, chosen = poptorch.inferenceModel(forward)(torch.ones(1, 3), mask)
    assert filled.tolist() == [[-1, 1, -1]]
    assert chosen.tolist() == [[1, -1, 1]]


def test_values_below_a_known_number_are_counted():
    values = torch.tensor([1, 2, 2, 5])
    counts = poptorch.inferenceModel(lambda x: torch.bincount(x, minlength=6))(values)
    assert torch.equal(counts, torch.bincount(values, minlength=6).int())
    with pytest.raises(poptorch.Error, match="not below minlength=3"):
        poptorch.inferenceModel(lambda x: torch.bincount(x, minlength=3))(values)
    with pytest.raises(poptorch.Error, match="minlength=n"):
        poptorch.inferenceModel(torch.bincount)(values)
