"""Check that views are dropped where they show the same, and nowhere else."""

from functools import partial
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.passes.joint.drop_same_views import DropSameViews
from ipu_dynamo.testing import assert_same_bits, aten_graphs
from ipu_dynamo.testing.graphs import append
from tests.models import tied
from tests.properties.evaluate import captured

aten, run = torch.ops.aten, DropSameViews()


@given(aten_graphs(), st.sampled_from([-0.0, torch.nan, torch.inf]))
def test_keeps_results(case, number):
    (module, inputs), make = case, partial(append, case[0].graph)
    inputs[0][0, 0], x, output = number, next(iter(module.graph.nodes)), module.graph.output_node()
    with module.graph.inserting_before(output):
        m = make(aten.cumsum.default, make(aten.new_ones.default, x, [3, 3]), 0)
        pair, row = make(aten.complex.default, m, m), make(aten.slice.Tensor, m, 0, 0, 1)
        same = [make(aten.t.default, make(aten.t.default, y)) for y in (x, m)]
        of = [(aten.t, m), (aten._neg_view, m), (aten._conj, pair)]
        kept = [make(view.default, y) for view, y in of]
        kept += [make(aten.view.dtype, m, torch.int64), make(aten.slice.Tensor, m, 0, 0, 2)]
        kept += [make(aten.as_strided.default, row, [1, 3], [3, 1], 3)]
        sums = [make(aten.add.Tensor, view, view) for view in (*same, *kept)]
    output.args = ((*output.args[0], same[0], *sums),)
    module.recompile()
    expected, capture = module(*inputs), SimpleNamespace(graph=module)
    assert run(capture)
    assert_same_bits(results := module(*inputs), expected)
    looks = [[(t.stride(), *(t is i for i in inputs)) for t in ts] for ts in (results, expected)]
    assert looks[0] == looks[1]
    assert not run(capture)


def test_a_training_step_has_fewer_operators():
    capture, one = captured(*tied(), before="DropSameViews")
    before, _ = len(capture.graph.graph.nodes), one(capture)
    assert len(capture.graph.graph.nodes) < before
