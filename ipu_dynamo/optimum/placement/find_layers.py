"""Find the lists of equal layers in a model, which are divided among IPUs.

A table of paths by model would go stale: the lists move from one version of transformers to the
next.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_MODELING_LAYERS = "transformers.modeling_layers"


@dataclass(frozen=True)
class LayerList:
    """Layers that run one after the other.

    Args:
        path: of the list in the model.
        names: of its elements in it.
    """

    path: str
    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the layers in the model."""
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names)


def find_layer_lists(
    model: nn.Module, layers: str | Sequence[str] | None = None
) -> tuple[LayerList, ...]:
    """The lists of layers of a model, in the order of `layers`, else of `named_modules()`.

    Without `layers` the first rule that finds any decides:

    1. lists of the classes that the model names in `_no_split_modules`;
    2. lists of transformers' checkpointed layers;
    3. the only list of at least two layers with equal parameters.

    Args:
        layers: the path of a list, or several.

    Raises:
        ValueError: a path does not exist; there is no list; a layer is named twice; or the last
            rule finds several lists.
    """
    if layers is not None:
        paths = [layers] if isinstance(layers, str) else list(layers)
        if not paths:
            raise ValueError(
                f"layers={layers!r} names no list; lists of {type(model).__name__}: "
                f"{_described(_lists(model, any))}"
            )
        named = tuple(_named(model, path) for path in paths)
        _check_each_once(named)
        return named
    names = set(getattr(model, "_no_split_modules", None) or ())
    checkpointed = getattr(sys.modules.get(_MODELING_LAYERS), "GradientCheckpointingLayer", ())
    rules: tuple[Callable[[Sequence[nn.Module]], bool], ...] = (
        lambda layers: type(layers[0]).__name__ in names,
        lambda layers: isinstance(layers[0], checkpointed),
    )
    for fits in rules:
        if found := _lists(model, fits):
            return found
    alike = _lists(model, lambda layers: len(layers) > 1 and _equal(layers))
    if len(alike) == 1:
        return alike
    what = "several lists may be" if alike else "no list of equal modules seems to be"
    raise ValueError(
        f"{what} the layers of {type(model).__name__}: {_described(alike or _lists(model, any))}; "
        'say which, as in layers="a.b", or several in the order in which they run'
    )


def _lists(model: nn.Module, fits: Callable[[Sequence[nn.Module]], Any]) -> tuple[LayerList, ...]:
    """The lists whose elements are of one class and fit; none in an element of another one."""
    taken: list[LayerList] = []
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside or not isinstance(module, nn.ModuleList) or not len(module):
            continue
        layers = tuple(module)
        if len({type(layer) for layer in layers}) == 1 and fits(layers):
            taken.append(LayerList(path, layers, tuple(module._modules)))
            inside.update(part for layer in layers for part in layer.modules())
    return tuple(taken)


def _named(model: nn.Module, path: str) -> LayerList:
    try:
        found = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(
            f"layers={path!r}: {type(model).__name__} has no such module; lists in it: "
            f"{_described(_lists(model, any))}"
        ) from error
    if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
        raise ValueError(f"layers={path!r} is a {type(found).__name__}, no list of layers")
    return LayerList(path, tuple(found), tuple(found._modules))


def _check_each_once(lists: Sequence[LayerList]) -> None:
    """Refuse lists with a layer that is in them twice, or in another layer: it has one IPU."""
    paths: dict[nn.Module, str] = {}
    for one in lists:
        for path, layer in zip(one.paths, one.layers, strict=True):
            if layer in paths:
                again = path if path == paths[layer] else f"{path}, which is {paths[layer]},"
                raise ValueError(
                    f"layers={[one.path for one in lists]} name {again} twice: it is on one IPU"
                )
            paths[layer] = path
    for outer, path in paths.items():
        for part in outer.modules():
            if part is not outer and part in paths:
                raise ValueError(
                    f"layers={[one.path for one in lists]} name {paths[part]}, and {path} that it "
                    "is in: a layer is on one IPU"
                )


def _equal(layers: Sequence[nn.Module]) -> bool:
    """Whether layers have parameters of the same names and shapes, and any."""
    shapes = [
        [(name, parameter.shape) for name, parameter in layer.named_parameters()]
        for layer in layers
    ]
    return bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def _described(lists: Sequence[LayerList]) -> str:
    """Path, class and length of each list."""
    texts = (
        f"{one.path or '(the model)'}: {len(one.layers)} {type(one.layers[0]).__name__}"
        for one in lists
    )
    return ", ".join(texts) or "there is no list at all"
