"""Check that the comparison of two checkouts sees what differs, and only that."""

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.against.comparison import Comparison
from benchmarks.against.configurations import CONFIGURATIONS, MODELS, STRATEGIES, Configuration
from benchmarks.against.expected import EXPECTED, Expected
from benchmarks.against.graphs import graph_text
from benchmarks.measure import Timing

CONFIGURATION = Configuration("training", "mlp", "sequential", 1)
ANSWER = {"graphs": {"a": 2}, "bits": {"weights": "1", "outputs": "2"}, "peak": 10**6, "first": 1.0}


def text(function, *inputs):
    with FakeTensorMode() as mode:
        graph = make_fx(function)(*map(mode.from_tensor, inputs)).graph
    return graph_text(graph)


def compared(*, again=ANSWER, new=ANSWER, listed=()):
    timings = {who: Timing(1.0, 2.0, 2.0, 5, 1.0, 1.0, 1.0) for who in ("old", "again", "new")}
    texts = {"a": "1\n", "b": "2\n"}
    return Comparison(CONFIGURATION, ANSWER, again, new, timings, texts, listed)


def test_graphs_have_a_text_without_names():
    x, y = torch.randn(2, 3), torch.randn(2, 3)

    def renamed(first, second):
        return first.sub(second)

    assert text(renamed, x, y) == text(lambda x, y: x.sub(y), x, y)


def test_the_order_of_inputs_does_not_count():
    x, y, unread = torch.randn(2, 3), torch.randn(3), torch.randn(1)
    plain = text(lambda x, y, unread: x.sub(y), x, y, unread)
    assert text(lambda unread, y, x: x.sub(y), unread, y, x) == plain


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y: x.sub(x.sub(y)), [(2, 3), (2, 3)]),
        (lambda x, y: x.sub(y, alpha=2), [(2, 3), (2, 3)]),
        (lambda x, y: x.add(y), [(2, 3), (2, 3)]),
        (lambda x, y: x.sub(y), [(2, 3), (1, 3)]),  # shapes
        (lambda x, y: x.sub(y), [(2, 3), (3,)]),
    ],
)
def test_graphs_that_compute_something_else_have_another_text(function, inputs):
    plain = text(lambda x, y: x.sub(y), torch.randn(2, 3), torch.randn(2, 3))
    assert text(function, *map(torch.randn, inputs)) != plain


def test_dtypes_and_strides_count():
    x = torch.randn(3, 3)
    texts = {text(lambda x: x.neg(), x) for x in (x, x.double(), x.t())}
    assert len(texts) == 3


def test_attributes_count_by_their_values():
    def holding(value):
        module = torch.nn.Module()
        module.register_buffer("kept", torch.tensor(value))
        graph = fx.Graph()
        graph.output((graph.get_attr("kept"),))
        return graph_text(fx.GraphModule(module, graph).graph)

    assert holding(1.0) == holding(1.0) != holding(2.0)


def test_equal_answers_pass():
    same = compared()
    assert not same.fails
    assert not same.differences
    assert not same.details()


@pytest.mark.parametrize(
    ("new", "kind", "words"),
    [
        ({"graphs": {"a": 1, "b": 1}}, "graphs", "1 graphs gone, 1 new"),
        ({"graphs": {"a": 3}}, "graphs", "0 graphs gone, 1 new"),
        ({"bits": {"weights": "1", "outputs": "3"}}, "bits", "outputs"),
        ({"bits": {"weights": "1"}}, "bits", "outputs"),
        ({"bits": ANSWER["bits"] | {"states": "3"}}, "states", "states"),
    ],
)
def test_differences_fail_unless_they_are_expected(new, kind, words):
    other = "bits" if kind == "graphs" else "graphs"
    different = compared(new=ANSWER | new)
    assert different.differences == {kind: words}
    assert different.fails
    assert words in different.details()
    for kinds, pattern, fails in (
        ({kind}, "training/mlp/*", False),
        ({other}, "training/mlp/*", True),
        ({kind}, "training/cnn/*", True),
    ):
        entry = Expected(pattern, frozenset(kinds), "wanted")
        assert compared(new=ANSWER | new, listed=(entry,)).fails is fails


def test_what_raises_or_differs_from_itself_fails():
    assert compared(new={"error": "ValueError: no"}).fails
    assert "new raises ValueError: no" in compared(new={"error": "ValueError: no"}).details()
    unstable = compared(again=ANSWER | {"bits": {}})
    assert unstable.fails
    assert unstable.unstable == ["bits"]


def test_memory_is_marked_and_does_not_fail():
    more = compared(new=ANSWER | {"peak": 2 * 10**6})
    assert more.needs_more_memory
    assert not more.fails
    assert "MORE" in more.row()


def test_every_model_and_strategy_is_run_once_under_a_name_of_its_own():
    everything = CONFIGURATIONS.values()
    assert len({c.name for c in everything}) == len(everything) == 213
    assert {c.model for c in everything} == set(MODELS) == {c.model for c in everything if c.quick}
    assert {c.strategy for c in everything} == set(STRATEGIES)
    assert replace(CONFIGURATION, accumulation=4) in everything


@pytest.mark.parametrize("entry", EXPECTED, ids=lambda entry: entry.pattern)
def test_an_expected_difference_is_one_of_configurations_and_of_no_other_entry(entry):
    found = {(name, k) for name in CONFIGURATIONS for k in entry.kinds if entry.covers(name, k)}
    others = [other for other in EXPECTED if other is not entry]
    assert found
    assert found - {(n, k) for n, k in found for other in others if other.covers(n, k)}, "all known"
