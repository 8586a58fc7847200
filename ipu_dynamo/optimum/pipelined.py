"""Let classes of users place their own models, and make such a model of a plain one."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from ipu_dynamo.blocks import remove_blocks
from ipu_dynamo.optimum.checkpoint import CheckpointOutputs
from ipu_dynamo.optimum.config import IPUConfig, own_config
from ipu_dynamo.optimum.placement import place_model
from ipu_dynamo.optimum.placement.traced_layers import Sample
from ipu_dynamo.optimum.serialized.serialized_embedding import SerializedEmbedding

_Class = TypeVar("_Class", bound=type)
_pipelined: dict[type, type] = {}


class PipelineMixin:
    """A base for model classes that place themselves on IPUs by an `IPUConfig`.

    A class has it as a base next to the plain class, and extends `parallelize` and `deparallelize`.
    Hooks whose handles are in `self._hooks` are removed with the blocks:

        class PipelinedNet(Net, PipelineMixin):
            def parallelize(self):
                super().parallelize()
                for layer, ipu in zip(self.layers, get_layer_ipu(self.ipu_config, self.layers)):
                    BeginBlock(layer, ipu_id=ipu)
                    self._hooks.append(recomputation_checkpoint(layer))
                return self

    Source: Optimum Graphcore's documentation, "PipelineMixin".
    """

    _ipu_config: IPUConfig
    _hooks: list[RemovableHandle]  # of subclasses, which add theirs: deparallelize removes them

    @classmethod
    def from_transformers(cls, model: Any, ipu_config: Any) -> Self:
        """A model of this class with the weights of a plain one of transformers.

        Args:
            model: its configuration makes the new model, whose weights are in the same precision
                and frozen where its own are. It is left as it is.
            ipu_config: of which the new model has a copy.
        """
        pipelined: Any = cls(copy.deepcopy(model.config))  # type: ignore[call-arg]
        _take_kinds(pipelined, model)
        pipelined.load_state_dict(model.state_dict())
        if getattr(model, "generation_config", None) is not None:
            pipelined.generation_config = copy.deepcopy(model.generation_config)
        pipelined.train(model.training)
        pipelined.ipu_config = copy.deepcopy(ipu_config)
        return pipelined  # type: ignore[no-any-return]

    @classmethod
    def from_pretrained_transformers(
        cls, model_name_or_path: Any, ipu_config: Any, *args: Any, **kwargs: Any
    ) -> Self:
        """A model of this class with the weights of a folder or repository.

        Args:
            model_name_or_path: folder, or repository of the Hub.
            ipu_config: of which the model has a copy.
            args: as for the class's own `from_pretrained`.
            kwargs: as for the class's own `from_pretrained`.
        """
        plain: Any = cls.from_pretrained(model_name_or_path, *args, **kwargs)  # type: ignore[attr-defined]
        plain.ipu_config = copy.deepcopy(ipu_config)
        return plain  # type: ignore[no-any-return]

    @classmethod
    def from_model(cls, model: nn.Module, ipu_config: Any = None) -> Self:
        """A deep copy of any module, of this class.

        Args:
            model: the module; it stays as it is.
            ipu_config: of which it has a copy; None: the one that it has, or a default one.
        """
        pipelined: Any = copy.deepcopy(model)
        pipelined.__class__ = cls
        if ipu_config is not None:
            pipelined.ipu_config = copy.deepcopy(ipu_config)
        elif not isinstance(vars(pipelined).get("_ipu_config"), IPUConfig):
            pipelined.ipu_config = IPUConfig()
        return pipelined  # type: ignore[no-any-return]

    @property
    def ipu_config(self) -> IPUConfig:
        """The configuration that the model is placed by.

        Raises:
            AttributeError: it is not set.
            TypeError: when it is set to anything else.
        """
        if "_ipu_config" not in vars(self):
            raise AttributeError("ipu_config")  # torch.nn.Module says the rest
        return self._ipu_config

    @ipu_config.setter
    def ipu_config(self, config: Any) -> None:
        self._ipu_config = own_config(config)

    def parallelize(self, **kwargs: Any) -> Self:
        """Check that there is a configuration, and remove earlier blocks and marks.

        Subclasses extend this method.

        Args:
            kwargs: of subclasses.
        """
        self.ipu_config  # noqa: B018 (raises)
        PipelineMixin.deparallelize(self)
        self._hooks = []
        return self

    def deparallelize(self) -> Self:
        """Remove all blocks, marks of recomputation, and the hooks of subclasses."""
        assert isinstance(self, nn.Module)
        remove_blocks(self)
        for handle in vars(self).pop("_hooks", ()):
            handle.remove()
        for module in self.modules():
            for key, hook in list(module._forward_hooks.items()):
                if isinstance(hook, CheckpointOutputs):
                    del module._forward_hooks[key]
        return self

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the parameters have.

        Args:
            only_trainable: count those only that need a gradient.
            exclude_embeddings: leave out embeddings, also those in parts.
        """
        assert isinstance(self, nn.Module)
        left_out: set[int] = set()
        if exclude_embeddings:
            for module in self.modules():
                if isinstance(module, nn.Embedding | SerializedEmbedding):
                    left_out.update(map(id, module.parameters()))
        return sum(
            parameter.numel()
            for parameter in self.parameters()
            if id(parameter) not in left_out and (parameter.requires_grad or not only_trainable)
        )


class _PlacedByRule(PipelineMixin):
    """The methods of unregistered classes: they call the functions of these names."""

    def parallelize(  # type: ignore[override]
        self, layers: str | Sequence[str] | None = None, sample: Sample | None = None
    ) -> Self:
        """See `ipu_dynamo.optimum.parallelize`."""
        assert isinstance(self, nn.Module)
        return place_model.parallelize(self, self.ipu_config, layers, sample)

    def deparallelize(self) -> Self:
        """See `ipu_dynamo.optimum.deparallelize`."""
        assert isinstance(self, nn.Module)
        return place_model.deparallelize(self)

    _plain_class: ClassVar[type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain class with a mixin, which is made again on loading."""
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return (_new_instance, (self._plain_class,), *reduced[2:])


def register(plain: type | None = None) -> Callable[[_Class], _Class]:
    """Decorate a pipelined class, so that `to_pipelined` makes it of a plain one.

    Args:
        plain: the plain class; None: the base of the decorated one that is not the mixin.
    """

    def add(pipelined: _Class) -> _Class:
        base = plain
        if base is None:
            bases = [b for b in pipelined.__bases__ if not issubclass(b, PipelineMixin)]
            if len(bases) != 1:
                raise ValueError(
                    f"{pipelined.__name__} has {len(bases)} bases beside the mixin: name the plain "
                    "class, as in @register(Net)"
                )
            (base,) = bases
        _pipelined[base] = pipelined
        return pipelined

    return add


def to_pipelined(model: nn.Module, ipu_config: Any, force: bool = False) -> Any:
    """A new model with the same weights that a configuration places.

    Args:
        model: of a registered class, or any other: that one is placed by rule.
        ipu_config: of which the new model has a copy.
        force: changes nothing; older programs pass it.

    Raises:
        RuntimeError: the model is parallelized.
    """
    if place_model.is_parallelized(model):
        raise RuntimeError(
            f"this {type(model).__name__} is parallelized: call deparallelize first, and make "
            "another model of it then"
        )
    if isinstance(model, PipelineMixin):
        twin: Any = copy.deepcopy(model)
        twin.ipu_config = copy.deepcopy(ipu_config)
        return twin
    if type(model) in _pipelined:
        pipelined: Any = _pipelined[type(model)]
        if hasattr(model, "config"):
            return pipelined.from_transformers(model, ipu_config)
        return pipelined.from_model(model, ipu_config)
    return _class_by_rule(type(model)).from_model(model, ipu_config)


def _take_kinds(model: nn.Module, plain: nn.Module) -> None:
    """Give parameters and buffers the precision of another model's; parameters are frozen alike."""
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (other := tensors.get(name)) is not None:
            tensor.data = tensor.data.to(other.dtype)
            tensor.requires_grad_(other.requires_grad)


_by_rule: dict[type, Any] = {}


def _class_by_rule(plain: type) -> Any:
    """A class that is `plain` and is placed by rule; one for each."""
    if plain not in _by_rule:
        own = {"_plain_class": plain, "__module__": plain.__module__}
        _by_rule[plain] = type(f"Pipelined{plain.__name__}", (_PlacedByRule, plain), own)
    return _by_rule[plain]


def _new_instance(plain: type) -> Any:
    """A module that has nothing yet, for unpickling."""
    kind = _class_by_rule(plain)
    return kind.__new__(kind)
