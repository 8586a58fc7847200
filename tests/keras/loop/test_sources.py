"""Check that arrays are read for a whole execution at once, as the loader of Keras has them."""

import numpy as np
import pytest
import torch

from ipu_dynamo.keras.calls.call_buffers import CallBuffers, JoinedBatches, leaves
from ipu_dynamo.keras.loop.data.sources import source_of
from ipu_dynamo.keras.private.keras_private import make_adapter

X = np.arange(60.0).reshape(20, 3)
ARRAYS = {
    "an array": X.astype("float32"),
    "doubles": X,
    "a tensor": torch.from_numpy(X).float(),
    "several": [X.astype("float32"), {"a": X[:, 0].astype("int32")}],
}


def plain(adapter):
    torch.manual_seed(1)
    return list(adapter.get_torch_dataloader())


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("name", ARRAYS)
def test_batches_are_views_of_what_was_read_at_once(name, shuffle):
    x, y = ARRAYS[name], np.arange(20)
    adapter = make_adapter(x=x, y=y, batch_size=4, shuffle=shuffle)
    expected = plain(adapter)
    torch.manual_seed(1)
    source, seen = source_of(adapter), []
    groups = [source.take(3, seen.append), source.take(3, seen.append)]
    assert [len(group) for group in groups] == [3, 2]
    assert source.take(1, seen.append) == []
    for group in groups:
        assert isinstance(group, JoinedBatches)
        filled = leaves(CallBuffers(group[0], len(group)).filled(group))
        for column, whole, input_ in zip(
            zip(*map(leaves, group), strict=True), leaves(group.whole), filled, strict=True
        ):
            if whole is not None:
                assert torch.equal(torch.cat(column), whole)
                assert input_.data_ptr() == whole.data_ptr() == column[0].data_ptr()
    batches = [batch for group in groups for batch in group]
    for batch, other in zip(batches, expected, strict=True):
        ours, theirs = leaves(batch[:2]), leaves(other)
        for mine, value in zip(ours, theirs, strict=True):
            assert torch.equal(mine, value)
    assert [len(batch[1]) for batch in seen] == [4, 4]


def test_a_batch_of_fewer_rows_is_looked_at():
    adapter, seen = make_adapter(x=X, batch_size=8, shuffle=False), []
    group = source_of(adapter).take(3, seen.append)
    assert [len(batch[0]) for batch in group] == [len(batch[0]) for batch in seen] == [8, 8, 4]
