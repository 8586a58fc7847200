"""Price matrix products: their plans, and rearrangements of operands that others laid out.

The factors of rearrangements are fitted; they are fields of `Ipu`. Copies cost what poplibs found
in a regression, by the alignment of the last dimension.
"""

from collections.abc import Mapping
from math import ceil, prod

from ipu_dynamo.machine.cost import Bounds, Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.costs.arguments import Operand, arguments
from ipu_dynamo.machine.figure import Figure, least_certain, mark_of_number
from ipu_dynamo.machine.ipu import ProductKind, element_bytes
from ipu_dynamo.machine.products.search import Product, plan_product, slice_cycles
from ipu_dynamo.machine.products.tile_cycles import MARK
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator
from ipu_dynamo.program.text.graph_text import MEMORY

_REGRESSION = "regression of graphcore/poplibs"
RELAYOUT_START = Figure(587, "cycles", "F", _REGRESSION)
RELAYOUT_BYTES = {  # by the bytes that the last dimension is a multiple of
    8: Figure(0.44, "cycles/B", "F", _REGRESSION),
    4: Figure(3.1, "cycles/B", "F", _REGRESSION),
    1: Figure(5.15, "cycles/B", "F", _REGRESSION),
}
ADDING = Figure(1, "cycles/vector", "F", "estimators of graphcore/poplibs popops, in place")


def planned(
    product: Product, kind: ProductKind, resources: Resources, proportion: float, nbytes: int
) -> Cost:
    """The cost of a product whose operands lie as its plan wants them.

    Args:
        nbytes: of operands and result.
    """
    ipu, tiles = resources.ipu, resources.tiles
    if not product.flops:
        return basics.run(resources)
    plan = plan_product(product, kind, ipu, tiles, proportion)
    steps, limit = plan.steps, proportion * ipu.tile_bytes
    sync, overhead = mark_of_number(ipu.sync), mark_of_number(ipu.overhead)
    load = mark_of_number(ipu.load_bytes)
    rate = least_certain(map(mark_of_number, (ipu.exchange_bytes, ipu.exchange_efficiency)))
    received = steps * sum(plan.received)
    warning = ""
    if plan.temporary > limit:
        warning = (
            f"a product needs {plan.temporary} bytes of a tile for temporary values; "
            f"{int(limit)} are allowed"
        )
    return Cost(
        compute=steps * plan.compute,
        exchange=steps * plan.exchange + slice_cycles(plan, product, kind, tiles),
        reduction=steps * plan.reduction,
        overhead=steps * (plan.barriers + ipu.overhead) + (steps - 1) * ipu.sync,
        marks={
            "compute": least_certain([MARK, load]),
            "exchange": rate,
            "reduction": sync,
            "overhead": least_certain([sync, overhead]),
        },
        plan=plan,
        temporary=plan.temporary,
        flops=product.flops,
        bounds=Bounds(
            product.flops / (2 * kind.macs * tiles),
            received / (2 * ipu.exchange_bytes),
            nbytes / (ipu.memory_bytes * tiles),
        ),
        exchanges=tuple(nbytes for nbytes in plan.received if nbytes),
        warning=warning,
    )


def rearranged(
    type_: TensorType, size: int, last: int, factor: float, resources: Resources
) -> Cost:
    """The cost of giving a tensor another layout.

    Args:
        size: bytes of an element, as a product reads it.
        last: elements of its innermost dimension on the machine.
        factor: how much of a rearrangement it is.
    """
    ipu = resources.ipu
    nbytes = basics.numel(type_) * size / resources.tiles
    aligned = next(each for each in RELAYOUT_BYTES if last * size % each == 0)
    copy = RELAYOUT_BYTES[aligned]
    rate = ipu.exchange_bytes * ipu.exchange_efficiency
    cycles = factor * (RELAYOUT_START + nbytes * (1 / rate + ipu.relayout_passes * copy))
    numbers = (factor, ipu.relayout_passes, ipu.exchange_bytes, ipu.exchange_efficiency, copy)
    return Cost(
        relayout=cycles,
        marks={"relayout": basics.worst(*numbers)},
        bounds=Bounds(exchange=factor * nbytes / (2 * ipu.exchange_bytes)),
        exchanges=(ceil(nbytes),),
    )


def proportion_of(operator: MachineOperator, resources: Resources) -> float:
    """The share of a tile's memory that an operator may use: its own, or the IPU's."""
    own = None if operator.node is None else operator.node.meta.get(MEMORY)
    return resources.proportion if own is None else float(own)


def matmul(a: Operand, b: Operand, resources: Resources, proportion: float, partials: str) -> Cost:
    """The cost of `a @ b`, of matrices, of batches of them, or of vectors."""
    ipu = resources.ipu
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    rows, inner, columns = left[-2], left[-1], right[-1]
    batched = len(left) > 2 and len(right) > 2
    groups = prod(left[:-2]) if batched else 1
    if not batched:  # the batch of one operand is more rows or columns
        rows, columns = prod(left[:-1]), columns * prod(right[:-2])
    result = TensorType(a.type.dtype, (groups, rows, columns))
    kind = ipu.kind_of(a.type.dtype, partials)
    size, result_size = kind.element_bytes, element_bytes(result.dtype)
    nbytes = (basics.numel(a.type) + basics.numel(b.type)) * size + basics.machine_bytes(result)
    product = Product(groups, rows, inner, columns)
    cost = planned(product, kind, resources, proportion, nbytes)
    by_weight = a.is_weight or b.is_weight
    factor = ipu.attention_relayout if batched else ipu.gradient_relayout
    for operand in (a, b):
        if not operand.is_weight and not operand.from_host:
            wanted = ipu.activation_relayout if by_weight else factor
            cost += rearranged(operand.type, size, operand.shape[-1], wanted, resources)
    if by_weight:
        cost += rearranged(result, result_size, columns, ipu.result_relayout, resources)
    return cost


def added(cost: Cost, term: Operand | None, result: TensorType, resources: Resources) -> Cost:
    """The cost of a product and of a term that is added to its result in place."""
    if term is None:
        return cost
    elements = basics.numel(result)
    cost += basics.elementwise(elements, result.dtype, ADDING, resources)
    cost += basics.touching(basics.machine_bytes(result, result, term.type), resources)
    if basics.numel(term.type) < elements and not term.is_weight:
        cost += basics.exchange(basics.machine_bytes(term.type), resources)
    return cost


def _product(left: str, right: str, term: str = "", partials: str = "") -> Price:
    """The price of an operator with these arguments: two factors, and a term that is added."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        kept = partials or resources.partials
        proportion = proportion_of(operator, resources)
        cost = matmul(values[left], values[right], resources, proportion, kept)
        return added(cost, values[term] if term else None, operator.results[0], resources)

    return price


def _linear(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of `input @ weight.T + bias`."""
    values = arguments(operator, roles)
    weight = values["weight"]
    transposed = TensorType(weight.type.dtype, weight.shape[::-1])
    second = Operand(transposed, weight.is_weight, weight.from_host)
    proportion = proportion_of(operator, resources)
    cost = matmul(values["input"], second, resources, proportion, resources.partials)
    return added(cost, values["bias"], operator.results[0], resources)


def _dot(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of the product of two vectors."""
    values = arguments(operator, roles)
    size = basics.numel(values["self"].type)
    a, b = (
        Operand(TensorType(each.type.dtype, shape), each.is_weight, each.from_host)
        for each, shape in zip(
            (values["self"], values["tensor" if "tensor" in values else "other"]),
            ((1, size), (size, 1)),
            strict=True,
        )
    )
    return matmul(a, b, resources, proportion_of(operator, resources), resources.partials)


def _summed(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of a sum of products: one with the sums of all of them."""
    values = arguments(operator, roles)
    left, right = values["batch1"], values["batch2"]
    batch, rows, inner = left.shape
    shapes = (rows, batch * inner), (batch * inner, right.shape[-1])
    a, b = (
        Operand(TensorType(each.type.dtype, shape), each.is_weight, each.from_host)
        for each, shape in zip((left, right), shapes, strict=True)
    )
    cost = matmul(a, b, resources, proportion_of(operator, resources), resources.partials)
    return added(cost, values["self"], operator.results[0], resources)


PRICES: Mapping[str, Price] = {
    "aten.mm.default": _product("self", "mat2"),
    "aten.mm.dtype": _product("self", "mat2"),
    "aten.bmm.default": _product("self", "mat2"),
    "aten.bmm.dtype": _product("self", "mat2"),
    "aten.mv.default": _product("self", "vec"),
    "aten.matmul.default": _product("self", "other"),
    "aten.addmm.default": _product("mat1", "mat2", "self"),
    "aten.addmm.dtype": _product("mat1", "mat2", "self"),
    "aten.addmv.default": _product("mat", "vec", "self"),
    "aten.baddbmm.default": _product("batch1", "batch2", "self"),
    "aten.baddbmm.dtype": _product("batch1", "batch2", "self"),
    "aten.addbmm.default": _summed,
    "aten.dot.default": _dot,
    "aten.vdot.default": _dot,
    "aten.linear.default": _linear,
    "ipu.serialized_matmul.default": _product("lhs", "rhs"),
    "ipu.half_partials_matmul.default": _product("a", "b", partials="half"),
}
