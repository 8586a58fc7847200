"""Check that splitting the batch of a drawn model gives plain PyTorch's numbers, or is refused."""

import pytest
import torch
from hypothesis import event, given, note
from hypothesis import strategies as st

import ipu_dynamo
from ipu_dynamo.testing import assert_close, placements_of, recipes
from ipu_dynamo.testing.kinds import KINDS
from ipu_dynamo.torch_compile.backend import ipu
from tests.torch_compile.test_torch_compile_properties import run

SPLITTABLE = set(KINDS) - {"batch_norm"}  # which has statistics of micro-batches
ENGINES = ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.examples(200)
@pytest.mark.quick(8)
@given(
    recipe=recipes(kinds=SPLITTABLE, dtypes=[torch.float64]),
    n=st.integers(2, 4),
    training=st.booleans(),
    data=st.data(),
)
def test_agrees_with_pytorch_on_the_whole_batch(engine, recipe, n, training, data):
    placement = data.draw(placements_of(recipe.build().names, kinds=("pipelined",)))
    plain = recipe.build()
    expected = run(plain, plain, recipe, training=training, micro_batches=n)
    torch._dynamo.reset()
    model = placement.place(recipe.build())
    options = {"engine": engine, "strategy": placement.strategy, "micro_batches": n}
    call = torch.compile(model, backend=ipu, fullgraph=True, options=options)
    with torch._dynamo.config.patch(allow_rnn=True):
        try:
            found = run(model, call, recipe, training=training, micro_batches=n)
        except ipu_dynamo.CompileError as error:
            event("refused")
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        known = ("needs all rows", "a result of the later stage")
        assert any(text in refusal for text in known), refusal
        return
    for program in ipu_dynamo.programs():
        note(program.short())
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        assert_close(one, other, f"tensor {i}")
