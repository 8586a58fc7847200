"""Compare the operators that read no values with those of Keras' torch backend."""

import keras
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.keras.step.value_free_operators import operators_value_free


@given(seed=st.integers(0, 99), index_length=st.integers(1, 2), rows=st.integers(1, 6))
def test_scatter_adds_what_keras_adds(seed, index_length, rows):
    generator = torch.Generator().manual_seed(seed)
    shape = 3, 4, 2
    sizes = torch.tensor(shape[:index_length])
    draws = torch.rand(rows, index_length, generator=generator)
    indices = (draws * sizes).long()  # some occur twice
    values = torch.randn(rows, *shape[index_length:], generator=generator)
    expected = keras.ops.scatter(indices, values, shape)
    with operators_value_free():
        traced = make_fx(lambda i, v: keras.ops.scatter(i, v, shape), tracing_mode="fake")(
            indices, values
        )
    torch.testing.assert_close(traced(indices, values), expected)


@pytest.mark.parametrize("reduce", [keras.ops.segment_sum, keras.ops.segment_max])
@given(seed=st.integers(0, 99), width=st.integers(0, 2), rows=st.integers(1, 6))
def test_segments_are_reduced_as_in_keras(reduce, seed, width, rows):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(rows, *(3,) * width, generator=generator)
    ids = torch.randint(-1, 6, (rows,), generator=generator)  # 4 segments: some are outside
    expected = reduce(data, ids, num_segments=4)
    with operators_value_free():
        traced = make_fx(lambda d, i: reduce(d, i, num_segments=4), tracing_mode="fake")(data, ids)
    torch.testing.assert_close(traced(data, ids), expected)


def test_the_number_of_segments_is_keras_own_where_nobody_gives_it():
    data, ids = torch.ones(3), torch.tensor([0, 1, 1])
    with operators_value_free():
        assert keras.ops.segment_sum(data, ids).tolist() == [1, 2]
