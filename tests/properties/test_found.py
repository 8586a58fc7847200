"""Keep the smallest cases of what drawn models have found."""

import pytest

from ipu_dynamo import Options
from ipu_dynamo.testing import BlockPlacement, Recipe, Step
from tests.properties.running import ENGINES, halves, infer, train

NOWHERE = BlockPlacement()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_returned_value_may_be_expanded(engine):
    recipe = Recipe(returns=("last", "expanded"))
    train(recipe, NOWHERE, Options(engine=engine))
    infer(recipe, NOWHERE, Options(engine=engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_may_be_added_to_their_own_tensor(engine):
    recipe = Recipe(steps=(Step("linear"), Step("add_rows")))
    assert recipe.data(1, seed=1)[1]["ids"].tolist() == [1, 1]
    train(recipe, NOWHERE, Options(engine=engine))


def test_a_returned_integer_buffer_that_changes_comes_back_every_time():
    recipe = Recipe(steps=(Step("count"),), returns=("buffer",), exact=True)
    options = Options(engine="eager", gradient_accumulation=2, replicas=2, output_mode="all")
    train(recipe, NOWHERE, options, optimizer=halves, steps=1, rtol=0, atol=0)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_first_replica_of_a_group_changes_the_input(orthogonal):
    recipe = Recipe(steps=(Step("change"),), exact=True)
    options = Options(
        engine="eager",
        gradient_accumulation=2,
        replicas=4,
        input_group_size=2,
        input_groups_orthogonal=orthogonal,
    )
    train(recipe, NOWHERE, options, optimizer=halves, steps=1, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_change_reaches_the_input_through_dropout_that_is_off(engine):
    recipe = Recipe(steps=(Step("dropout"), Step("change", y=5)))
    train(recipe, NOWHERE, Options(engine=engine))
    infer(recipe, NOWHERE, Options(engine=engine))


def test_the_sum_of_an_elementwise_loss_has_a_source_line():
    recipe = Recipe(losses=("none",))
    program = train(recipe, NOWHERE, Options(engine="eager")).program
    operators = [n for function in program.functions for n in function.operators]
    assert not [n for n in operators if n.all_input_nodes and not n.meta.get("stack_trace")]


def test_gradients_that_cancel_are_summed_in_the_same_order():
    """The bias before a batch norm has no gradient but the rounding of its terms."""
    kinds = ["convolve", "numbers", "convolve", "batch_norm", "batch_norm"]
    shares = ["own", "own", "tied", "own", "own"]
    where = [(3, 5), (3, 5), (3, 1), (1, 3), (1, 3)]
    drawn = zip(kinds, shares, where, strict=True)
    steps = [Step(kind, x=x, y=y, shares=one) for kind, one, (x, y) in drawn]
    recipe = Recipe(
        steps=tuple(steps),
        width=2,
        rows=3,
        inputs=1,
        losses=("sum",),
        returns=("expanded", "constant", "expanded"),
        strided=True,
        seed=49,
    )
    options = Options(
        engine="eager",
        device_iterations=3,
        gradient_accumulation=2,
        replicas=3,
        input_group_size=3,
        reduction="sum",
    )
    train(recipe, NOWHERE, options)
