"""Decide where blocks of a model begin, so that its layers are on their IPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ipu_dynamo.optimum.placement.find_layers import LayerList
from ipu_dynamo.optimum.serialized.serialize import Choice
from ipu_dynamo.optimum.serialized.serialized_embedding import SerializedEmbedding
from ipu_dynamo.optimum.serialized.serialized_linear import SplitProjection
from ipu_dynamo.optimum.serialized.serialized_parts import first_parts


@dataclass(frozen=True)
class Begin:
    """A block begins where a module is called.

    Args:
        name: of the block; the module's path. A model may come back to it: that is another one.
    """

    name: str
    module: nn.Module
    ipu: int


@dataclass(frozen=True)
class Part:
    """A line of the logged table: a module with parameters, and its IPU.

    Args:
        begins: it begins a block; else it runs where it is called, by its place in the model there.
    """

    path: str
    ipu: int
    begins: bool
    parameters: int
    nbytes: int


@dataclass
class Placed:
    """The decision."""

    begins: tuple[Begin, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Owner:
    """The first module that has a parameter: a layer, or another module."""

    path: str
    ipu: int
    in_layers: bool
    parameter: nn.Parameter


class _Walk:
    """Goes through a model in the order of `named_modules`, and knows the open block's IPU."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.begins: list[Begin] = []
        self.paths: dict[str, int] = {}  # of modules with parameters: the IPU
        self.owners: dict[int, _Owner] = {}
        self.open_ipu, self.before_layers = 0, True

    def layer(self, path: str, module: nn.Module, ipu: int) -> None:
        """A layer with all that is in it."""
        for name, parameter in module.named_parameters():
            owner = self.owners.get(id(parameter))
            if owner is not None and owner.ipu != ipu:
                raise ValueError(
                    f"{owner.path} on IPU {owner.ipu} and {path} on IPU {ipu} share the parameter "
                    f"{name}: put them on one IPU by layers_per_ipu"
                )
        self._begin(path, module, ipu)
        self._own(path, list(module.parameters()), ipu, in_layers=True)

    def other(self, path: str, module: nn.Module) -> None:
        """A module outside the lists that owns parameters."""
        split = _splits(module, self.choice)
        parameters = (
            list(module.parameters()) if _is_unit(module) else list(_direct(module).values())
        )
        if split:
            for ipu, part in first_parts(list(next(iter(module.children())).children()), split):
                self._begin(f"{path} from {ipu}", part, ipu)
        elif module in (self.choice.table, self.choice.head) and self.choice.tied_ipu is not None:
            self._begin(path, module, self.choice.tied_ipu)
        elif self.before_layers and not self.choice.embedding_splits:
            self._begin(path, module, 0)
        elif earlier := self._earlier(parameters, self.open_ipu):
            self._begin(path, module, min(earlier))
        self._own(path, parameters, self.open_ipu, in_layers=False)

    def _earlier(self, parameters: Sequence[nn.Parameter], ipu: int) -> list[int]:
        """The IPUs before `ipu` that own one of these parameters already."""
        owners = (self.owners.get(id(parameter)) for parameter in parameters)
        return [owner.ipu for owner in owners if owner is not None and owner.ipu < ipu]

    def _begin(self, path: str, module: nn.Module, ipu: int) -> None:
        self.begins.append(Begin(path, module, ipu))
        self.open_ipu = ipu

    def _own(
        self, path: str, parameters: Sequence[nn.Parameter], ipu: int, *, in_layers: bool
    ) -> None:
        self.paths[path] = ipu
        for parameter in parameters:
            owner = self.owners.get(id(parameter))
            # A module outside the lists has handed it to one that reads it earlier.
            if owner is None or (not owner.in_layers and ipu < owner.ipu):
                self.owners[id(parameter)] = _Owner(path, ipu, in_layers, parameter)

    def placed(self) -> Placed:
        """The decision, once all modules are known."""
        parts = []
        begun = {begin.name for begin in self.begins}
        for path, ipu in self.paths.items():
            own = [o.parameter for o in self.owners.values() if o.path == path]
            nbytes = sum(p.numel() * p.element_size() for p in own)
            parts.append(Part(path, ipu, path in begun, sum(p.numel() for p in own), nbytes))
        return Placed(tuple(self.begins), tuple(parts))


def place(
    model: nn.Module, lists: Sequence[LayerList], ipus: Sequence[int], choice: Choice
) -> Placed:
    """Decide where blocks begin. Reads the model, changes nothing.

    Every layer begins a block. Modules with parameters before the first list, the embeddings, begin
    a block on IPU 0 at each call. Any other module runs in the block that is open when it is
    called. But if a module on an earlier IPU owns one of its parameters, it begins a block there.

    Args:
        lists: of layers, in the order in which these are numbered.
        ipus: the IPU of each layer.
        choice: the layers in parts.

    Raises:
        ValueError: a layer is on two IPUs, or shares a parameter with something on another one.
    """
    ipu_of = _ipu_of_each(lists, ipus)
    heads = {model.get_submodule(one.path) for one in lists}
    walk = _Walk(choice)
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in heads:
            walk.before_layers = False
        if module in inside:
            continue
        if module in ipu_of:
            walk.layer(path, module, ipu_of[module])
            inside.update(module.modules())
        elif _is_unit(module) or _direct(module):
            walk.other(path or type(model).__name__, module)
            if _is_unit(module):
                inside.update(module.modules())
    return walk.placed()


def _ipu_of_each(lists: Sequence[LayerList], ipus: Sequence[int]) -> dict[nn.Module, int]:
    """The IPU of each layer; one that stands in the lists twice has one."""
    places: dict[nn.Module, tuple[str, int]] = {}
    layers = (
        (path, layer) for one in lists for path, layer in zip(one.paths, one.layers, strict=True)
    )
    for (path, layer), ipu in zip(layers, ipus, strict=True):
        other, place = places.setdefault(layer, (path, ipu))
        if place != ipu:
            raise ValueError(
                f"{other} on IPU {place} and {path} on IPU {ipu} are one layer: put it on one IPU "
                'by layers_per_ipu, or name other lists, as in layers="a.b"'
            )
    return {layer: ipu for layer, (_, ipu) in places.items()}


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, SerializedEmbedding | SplitProjection)


def _direct(module: nn.Module) -> Mapping[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _splits(module: nn.Module, choice: Choice) -> tuple[int, ...]:
    """The parts of a layer on each IPU, if splits place it."""
    if isinstance(module, SerializedEmbedding):
        return choice.embedding_splits
    return choice.projection_splits if isinstance(module, SplitProjection) else ()
