"""Check which states a step may overwrite while it reads them."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.passes.host.recipes.overwritten_states import overwritten_states

aten = torch.ops.aten


def graph_of(step, *shapes) -> fx.Graph:
    return make_fx(step)(*(torch.rand(shape) + 1 for shape in shapes)).graph


def elementwise(w, g):
    return [w - 0.1 * g.tanh()]


def row_by_row(w, row):
    return [w * 0.9 + row]


def a_matmul_reads_it_too(w, x):
    return [w - (x @ w.t()).t() @ x]


def transposed(w, g):
    return [w - 0.1 * g * w.t()]


def normed(w, g):
    return [w - g * w.norm()]


def chosen(w, g):
    return [torch.where(g > 1, w, g)]


def signed(m, g):
    return [m * 0.9 + 0.1 * torch.sign(m * 0.5 + g)]


def clamped(w, g):
    return [(w - 0.1 * g).clamp(5, 6)]


def the_larger(v, g):
    return [torch.maximum(v, g)]


def masked(w, g):
    return [(w - g).masked_fill(g > 1, 0)]


def rounded(w, g):
    return [torch.div(w, g, rounding_mode="floor")]


def another_layout(w, g):
    return [(w + g).t()]


def a_product_of_one_row_may_be_a_loop(w, x):
    return [w - x.t() @ (x @ w)]


def begun(m, g, started):
    return [torch.where(aten.eq.Scalar(started, 0.0), g, m * 0.9 + g)]


def begun_with_itself(m, g, started):
    return [torch.where(aten.eq.Scalar(started, 0.0), m + g, g)]


@pytest.mark.parametrize(
    ("step", "shapes", "free"),
    [
        (elementwise, [(4, 4), (4, 4)], True),
        (row_by_row, [(4, 4), (4,)], True),
        (a_matmul_reads_it_too, [(4, 4), (4, 4)], True),
        (transposed, [(4, 4), (4, 4)], False),
        (normed, [(4, 4), (4, 4)], False),
        (chosen, [(4, 4), (4, 4)], False),
        (signed, [(4, 4), (4, 4)], False),
        (clamped, [(4, 4), (4, 4)], False),
        (the_larger, [(4, 4), (4, 4)], False),
        (masked, [(4, 4), (4, 4)], False),
        (rounded, [(4, 4), (4, 4)], False),
        (another_layout, [(4, 4), (4, 4)], False),
        (a_product_of_one_row_may_be_a_loop, [(4, 4), (1, 4)], False),
        (begun, [(4, 4), (4, 4), ()], True),
        (begun_with_itself, [(4, 4), (4, 4), ()], False),
    ],
)
def test_a_state_is_free_if_each_element_counts_where_it_is_written(step, shapes, free):
    assert overwritten_states(graph_of(step, *shapes), 1) == ((0,) if free else ())


def test_another_state_that_reads_it_elsewhere_keeps_it():
    def step(w, m, g):
        return [w - 0.1 * m, m * 0.9 + g + w.t()]

    graph = graph_of(step, (4, 4), (4, 4), (4, 4))
    assert overwritten_states(graph, 2) == (1,)
