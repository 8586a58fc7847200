"""Price convolutions and their gradients as products of their fields.

A few channels in are expanded by the positions of the kernel. Grouped convolutions of few channels
in half use another unit, which is four elements wide (SLIC). Everything else uses the units for
products. Images have their channels innermost on the machine, whatever PyTorch's strides say.

Source: graphcore/poplibs, 2023-08, `PerformanceEstimation.hpp`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from ipu_dynamo.machine.cost import Bounds, Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.costs.arguments import Operand, arguments
from ipu_dynamo.machine.costs.products import added, planned, proportion_of, rearranged
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.ipu import ProductKind
from ipu_dynamo.machine.products.search import Product
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

_SLIC_STARTS = {  # of a tile, by channels of a group
    1: Figure(125, "cycles", "F", "graphcore/poplibs"),
    2: Figure(125, "cycles", "F", "graphcore/poplibs"),
    4: Figure(60, "cycles", "F", "graphcore/poplibs"),
}


@dataclass(frozen=True, slots=True)
class _Geometry:
    """A convolution of images `[batch, groups * inputs, *image]` to `[..., *result]`.

    Args:
        inputs, outputs: channels of a group.
        kernel, stride, dilation, image, result: sizes by dimension of the image.
    """

    batch: int
    groups: int
    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    image: tuple[int, ...]
    result: tuple[int, ...]

    @property
    def gradient(self) -> "_Geometry":
        """The convolution that gives the gradient of the images, with channels swapped.

        With a stride its field is that of the result: the zeros between are not multiplied.
        """
        strided = any(size != 1 for size in self.stride)
        return replace(
            self,
            inputs=self.outputs,
            outputs=self.inputs,
            stride=(1,) * len(self.kernel),
            image=self.result,
            result=self.result if strided else self.image,
        )

    @property
    def read(self) -> int:
        """Elements of the images that the convolution reads."""
        of_image = min(prod(self.image), prod(self.result) * prod(self.kernel))
        return self.batch * self.groups * self.inputs * of_image

    @property
    def of_weights(self) -> Product:
        """The product that gives the gradient of the weights."""
        positions, field = prod(self.kernel), self.batch * prod(self.result)
        return Product(self.groups, self.inputs * positions, field, self.outputs)

    def product(self, kind: ProductKind) -> Product:
        """The product that the units for products calculate."""
        field, positions = self.batch * prod(self.result), prod(self.kernel)
        if positions == 1 or self.inputs < kind.inputs:
            return Product(self.groups, field, self.inputs * positions, self.outputs)
        sizes = self.kernel, self.stride, self.dilation, self.result[-1]
        return Product(self.groups, field, self.inputs, self.outputs, *sizes)


def _convolution(
    geometry: _Geometry,
    images: Operand,
    weight: Operand,
    resources: Resources,
    proportion: float,
    partials: str,
) -> Cost:
    """The cost of a convolution, or of the gradient of its images."""
    kind = resources.ipu.kind_of(images.type.dtype, partials)
    made = geometry.batch * geometry.groups * geometry.outputs * prod(geometry.result)
    size = kind.element_bytes
    nbytes = (geometry.read + made + basics.numel(weight.type)) * size
    small = geometry.groups > 1 and geometry.inputs < kind.inputs
    if small and kind.element_bytes == 2 and made:
        cost = _slic(geometry, kind, nbytes, resources)
    else:
        cost = planned(geometry.product(kind), kind, resources, proportion, nbytes)
    factor = resources.ipu.convolution_relayout
    if not images.from_host:
        cost += rearranged(images.type, size, geometry.inputs, factor, resources)
    if not weight.is_weight:
        cost += rearranged(weight.type, size, weight.shape[1], factor, resources)
    return cost


def _slic(geometry: _Geometry, kind: ProductKind, nbytes: int, resources: Resources) -> Cost:
    """The cost of a grouped convolution of few channels in half."""
    ipu, tiles = resources.ipu, resources.tiles
    channels = geometry.groups * geometry.outputs
    *heights, width = geometry.result
    of_tile = ceil(geometry.batch * prod(heights) * channels / 4 / tiles)
    rows, outputs = ceil(of_tile / ipu.workers), max(width, 5)
    stride = geometry.stride[-1]
    float_partials = kind.partial_bytes == 4
    passes = 1 if kind.units == 16 else 2
    row = outputs - 5 - float_partials if stride == 1 else stride * (outputs - 3)
    worker = 17 + rows * (10 + 3 * float_partials + passes * (15 + row))
    start = _SLIC_STARTS.get(geometry.inputs, _SLIC_STARTS[4])
    # the unit reads four channels of a group at once
    kernels = prod(geometry.kernel[:-1])
    kernels *= ceil(geometry.kernel[-1] / 4) * ceil(geometry.inputs / 4)
    field = min(of_tile * width, geometry.batch * prod(geometry.result))
    product = Product(1, 1, 1, 1, geometry.kernel, geometry.stride, geometry.dilation, width)
    halo = float(product.halo(float(field)))
    image = geometry.batch * geometry.groups * geometry.inputs * prod(geometry.image)
    read, made = (
        image * halo * kind.element_bytes,
        channels * geometry.batch * prod(geometry.result),
    )
    flops = 2 * made * geometry.inputs * prod(geometry.kernel)
    own = Cost(
        compute=kernels * (ipu.workers * worker + start),
        marks={"compute": "F"},
        temporary=ceil((read + made * kind.partial_bytes) / tiles),
        flops=flops,
        bounds=Bounds(flops / (2 * kind.macs * tiles), memory=nbytes / (ipu.memory_bytes * tiles)),
    )
    return own + basics.exchange(read, resources) + basics.run(resources)


def _weight_gradient(
    geometry: _Geometry,
    images: Operand,
    gradient: Operand,
    weight: TensorType,
    resources: Resources,
    proportion: float,
    partials: str,
) -> Cost:
    kind = resources.ipu.kind_of(images.type.dtype, partials)
    size = kind.element_bytes
    nbytes = (basics.numel(images.type) + basics.numel(gradient.type)) * size
    nbytes += basics.machine_bytes(weight)
    cost = planned(geometry.of_weights, kind, resources, proportion, nbytes)
    for operand, channels in ((images, geometry.inputs), (gradient, geometry.outputs)):
        if not operand.from_host:
            factor = resources.ipu.gradient_relayout
            cost += rearranged(operand.type, size, channels, factor, resources)
    return cost


def _sizes(values: Mapping[str, Any], name: str, dimensions: int) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in values[name])
    return sizes * dimensions if len(sizes) == 1 else sizes


def _geometry(
    values: Mapping[str, Any],
    image: tuple[int, ...],
    result: tuple[int, ...],
    weight: tuple[int, ...],
) -> _Geometry:
    """That of a convolution of `[batch, channels, ...]`; without a batch there is one image."""
    dimensions, groups = len(weight) - 2, int(values["groups"])
    return _Geometry(
        image[0] if len(image) == len(weight) else 1,
        groups,
        weight[1],
        weight[0] // groups,
        weight[2:],
        _sizes(values, "stride", dimensions),
        _sizes(values, "dilation", dimensions),
        image[-dimensions:],
        result[-dimensions:],
    )


def _forward(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of `aten.convolution`; transposed, it is the gradient of another one's images."""
    values = arguments(operator, roles)
    images, weight, result = values["input"], values["weight"], operator.results[0]
    if values.get("transposed"):
        geometry = _geometry(values, result.shape, images.shape, weight.shape).gradient
    else:
        geometry = _geometry(values, images.shape, result.shape, weight.shape)
    proportion = proportion_of(operator, resources)
    cost = _convolution(geometry, images, weight, resources, proportion, resources.partials)
    return added(cost, values["bias"], result, resources)


def _backward(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of the gradients of images, weight and bias, each an operator of its own."""
    values = arguments(operator, roles)
    gradient, images, weight = values["grad_output"], values["input"], values["weight"]
    proportion, partials = proportion_of(operator, resources), resources.partials
    transposed = values["transposed"]
    ends = (gradient, images) if transposed else (images, gradient)
    geometry = _geometry(values, ends[0].shape, ends[1].shape, weight.shape)
    parts = basics.PartCosts(operator)
    if values["output_mask"][0]:
        back = geometry if transposed else geometry.gradient
        cost = _convolution(back, gradient, weight, resources, proportion, partials)
        parts.add(operator.operator, (gradient.type, weight.type), (images.type,), cost)
    if values["output_mask"][1]:
        cost = _weight_gradient(geometry, *ends, weight.type, resources, proportion, partials)
        parts.add(operator.operator, (gradient.type, images.type), (weight.type,), cost)
    if values["output_mask"][2]:
        channels = gradient.shape[-1 - len(geometry.kernel)]
        bias = TensorType(gradient.type.dtype, (channels,))
        elements = basics.numel(gradient.type)
        cost = basics.reduce(elements, channels, gradient.type.dtype, resources)
        cost += basics.touching(basics.machine_bytes(gradient.type), resources)
        parts.add("aten.sum.dim_IntList", (gradient.type,), (bias,), cost)
    return parts.cost()


def _half_forward(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    values, result = arguments(operator, roles), operator.results[0]
    images, weight = values["x"], values["weight"]
    geometry = _geometry(values, images.shape, result.shape, weight.shape)
    proportion = proportion_of(operator, resources)
    return _convolution(geometry, images, weight, resources, proportion, "half")


def _half_input(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    values, result = arguments(operator, roles), operator.results[0]
    gradient, weight = values["gradient"], values["weight"]
    geometry = _geometry(values, result.shape, gradient.shape, weight.shape).gradient
    proportion = proportion_of(operator, resources)
    return _convolution(geometry, gradient, weight, resources, proportion, "half")


def _half_weight(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    values, result = arguments(operator, roles), operator.results[0]
    gradient, images = values["gradient"], values["x"]
    geometry = _geometry(values, images.shape, gradient.shape, result.shape)
    proportion = proportion_of(operator, resources)
    return _weight_gradient(geometry, images, gradient, result, resources, proportion, "half")


PRICES: Mapping[str, Price] = {
    "aten.convolution.default": _forward,
    "aten.conv1d.default": _forward,
    "aten.conv2d.default": _forward,
    "aten.conv3d.default": _forward,
    "aten.convolution_backward.default": _backward,
    "ipu.half_partials_conv.default": _half_forward,
    "ipu.half_partials_conv_input.default": _half_input,
    "ipu.half_partials_conv_weight.default": _half_weight,
}
