"""Check the planner of products against published rows, and what must hold for all shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.machine.cost import Resources
from ipu_dynamo.machine.costs.products import planned
from ipu_dynamo.machine.ipu import BOW, C600, MK1, MK2
from ipu_dynamo.machine.products.search import Product, plan_product, slice_cycles, total_cycles

KINDS = [(ipu, kind) for ipu in (MK1, MK2, BOW, C600) for kind in ipu.kinds]
SIZES = st.integers(1, 5000) | st.sampled_from([1, 2, 3, 16, 64, 197, 768, 1024, 4096, 30528])


@st.composite
def products(draw):
    """A product of matrices, a batch of them, or a convolution of two dimensions."""
    groups = draw(st.sampled_from([1, 1, 2, 12, 96]))
    product = Product(groups, draw(SIZES), draw(SIZES), draw(SIZES))
    if draw(st.booleans()):
        return product
    kernel = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    stride = draw(st.sampled_from([(1, 1), (2, 2)]))
    width = draw(st.integers(1, 224))
    return Product(1, product.field, product.inputs, product.outputs, kernel, stride, (1, 1), width)


def cost(product, ipu, kind, proportion, tiles=None):
    tiles = tiles or int(ipu.tiles)
    resources = Resources(ipu, proportion, int(ipu.tiles) - tiles)
    return planned(product, kind, resources, proportion, 0)


@pytest.mark.parametrize(
    ("proportion", "cycles", "kib", "steps"),
    [
        (0.05, 192e3, 26, 16),
        (0.1, 133e3, 61, 4),
        (0.15, 124e3, 75, 4),
        (0.2, 106e3, 106, 2),
        (0.3, 94e3, 166, 1),
        (0.9, 94e3, 166, 1),
    ],
)
def test_a_smaller_share_of_memory_takes_more_steps_as_published(proportion, cycles, kib, steps):
    product, kind, tiles = Product(1, 1024, 1024, 4096), BOW.kind("16.16"), int(BOW.tiles)
    plan = plan_product(product, kind, BOW, tiles, proportion)
    without_slices = total_cycles(plan, product, kind, BOW, tiles) - slice_cycles(
        plan, product, kind, tiles
    )
    assert without_slices == pytest.approx(cycles, rel=0.03)
    assert plan.temporary / 1024 == pytest.approx(kib, abs=1)
    assert plan.steps == steps


def test_a_large_product_is_cut_as_published():
    plan = plan_product(Product(1, 4096, 4096, 1024), BOW.kind("16.16"), BOW, 1472, 0.6)
    assert str(plan) == "16.16: 9 x 20 x 8, 2 serial steps"
    assert plan.temporary / 1024 == pytest.approx(325, abs=1)


@pytest.mark.parametrize(
    ("ipu", "kind", "sizes", "measured"),
    [
        (BOW, "16.16", (4096, 4096, 1024), 197.7),
        (MK2, "32", (3584, 3584, 3584), 44.2),
        (MK1, "16.32", (2944, 2944, 2944), 58.9),
    ],
)
def test_products_reach_the_measured_teraflops(ipu, kind, sizes, measured):
    price = cost(Product(1, *sizes), ipu, ipu.kind(kind), 0.6)
    assert price.flops / price.cycles * ipu.clock / 1e12 == pytest.approx(measured, rel=0.1)


@given(
    product=products(),
    machine=st.sampled_from(KINDS),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    tiles=st.sampled_from([None, 1152]),
)
def test_a_larger_share_of_memory_is_never_slower(product, machine, shares, tiles):
    less, more = (cost(product, *machine, share, tiles) for share in sorted(shares))
    assert more.cycles <= less.cycles


@given(product=products(), machine=st.sampled_from(KINDS), share=st.floats(0, 1))
def test_a_product_is_no_faster_than_its_bounds(product, machine, share):
    ipu, kind = machine
    price = cost(product, ipu, kind, share)
    flops = 2.0 * product.groups * product.field * product.inputs * product.outputs
    for size in product.kernel:
        flops *= size
    assert price.flops == flops
    assert price.cycles >= flops / (2 * kind.macs * ipu.tiles)
    assert price.cycles >= price.bounds.largest


@given(product=products(), machine=st.sampled_from(KINDS))
def test_a_plan_fits_or_says_how_much_is_missing(product, machine):
    ipu, kind = machine
    price = cost(product, ipu, kind, 0.01)
    fits = price.temporary <= 0.01 * ipu.tile_bytes
    assert fits == (not price.warning)
    assert fits or str(price.temporary) in price.warning


@given(product=products(), machine=st.sampled_from(KINDS), share=st.floats(0, 1))
def test_parts_cover_the_product_on_the_tiles_that_there_are(product, machine, share):
    ipu, kind = machine
    plan = plan_product(product, kind, ipu, int(ipu.tiles), share)
    assert plan.groups * plan.rows * plan.inner * plan.columns <= ipu.tiles
    assert plan.kind == kind.name
    assert (plan.inner > 1) == bool(plan.received[2])  # else there are no partial sums to add
