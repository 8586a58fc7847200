"""Check that joined results are taken apart as they were joined, where they are asked for."""

import pytest
import torch

from ipu_dynamo.keras.calls.joined_results import JoinedResults


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_have_their_own_rows_and_the_whole_has_all(replicas):
    rows, numbers = torch.arange(24.0).reshape(12, 2), torch.arange(4.0)
    joined = JoinedResults([(3, 2), ()], replicas, behind_loss=False)
    steps = joined.steps({"rows": rows, "none": None, "number": numbers})
    assert len(steps) == 4 // replicas
    batches = [single for step in steps for single in step]
    for number, batch in enumerate(batches):
        assert torch.equal(batch["rows"], rows[3 * number : 3 * number + 3])
        assert batch["number"] == number
        assert batch["none"] is None
    assert [one["number"] for one in steps[-1]] == [one["number"] for one in steps[-1:][0]]
    assert steps[-1][-1]["number"] == 3
    with pytest.raises(IndexError):
        steps[4]
    outputs = JoinedResults([(3, 2)], replicas, behind_loss=False).steps([rows]).whole()
    assert torch.equal(outputs[0], rows)


def test_rows_without_elements_are_counted():
    joined = JoinedResults([(2, 0)], 1, behind_loss=False)
    steps = joined.steps([torch.zeros(6, 0)])
    assert [step[0][0].shape for step in steps] == [(2, 0)] * 3


def test_the_loss_is_left_out():
    logs = {"loss": torch.arange(2.0)}
    steps = JoinedResults([(), ()], 1, behind_loss=True).steps((torch.zeros(2), logs))
    assert steps[1][0] == {"loss": 1.0}
