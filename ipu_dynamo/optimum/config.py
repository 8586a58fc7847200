"""Hold what Hugging Face programs say of the machine: `IPUConfig`, its fields and its modes."""

import copy
import logging
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ipu_dynamo.optimum.files.config_files import BASE_KEYS, GONE, IPU_CONFIG_NAME
from ipu_dynamo.optimum.files.stored import Stored
from ipu_dynamo.optimum.incompatible import IncompatibleIPUConfigError
from ipu_dynamo.optimum.values import pod_types
from ipu_dynamo.optimum.values.coherence import check_coherence, layer_count
from ipu_dynamo.optimum.values.fields import OUTPUT_MODES, field, fields_of, plain
from ipu_dynamo.optimum.values.update_text import read_update

if TYPE_CHECKING:
    from ipu_dynamo.options import Options

log = logging.getLogger(__name__)
Layers = list[int] | Literal["auto"]
_TWIN = "inference_"
_PROPORTION = 0.6  # of an IPU's memory, for what products need for a while


class _Managed:
    """An underscore name: the field of training, or its twin, as the mode is."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = name.removeprefix("_")

    def __get__(self, config: "IPUConfig", owner: type | None = None) -> Any:
        return getattr(config, config._get_managed_attr_mode_name(self._field))

    def __set__(self, config: "IPUConfig", value: Any) -> None:
        setattr(config, config._get_managed_attr_mode_name(self._field), value)


class IPUConfig(Stored):
    """The settings of a Hugging Face program for the machine.

    Every field is a keyword of the constructor and an attribute; each assignment is checked. A
    field may be a dictionary from type of POD ("pod4" to "pod64", or "default") to its value. The
    guide has a table of all fields.

    Args:
        values: fields by name.

    Raises:
        IncompatibleIPUConfigError: an unknown keyword, or values that contradict each other.
        TypeError: a value of another type than declared.
        ValueError: a value below its bound, or that makes no sense.

    Source: Optimum Graphcore's documentation, "IPUConfig".
    """

    CONFIG_NAME: ClassVar[str] = IPU_CONFIG_NAME
    FULL_CONFIGURATION_FILE: ClassVar[str] = IPU_CONFIG_NAME
    modes: ClassVar[tuple[str, str]] = ("training", "inference")
    model_type: ClassVar[str] = ""

    seed: int | None = field(
        None, "randomSeed", "random numbers, such as those of dropout; also of torch's generator"
    )
    replication_factor: int = field(
        1, "replicationFactor", "copies of the model; the batch of a call", lowest=1
    )
    inference_replication_factor: int = field(1, "replicationFactor", "the same", lowest=1)
    gradient_accumulation_steps: int = field(
        1,
        "Training.gradientAccumulation",
        "micro-batches for each update; the batch of a call",
        lowest=1,
    )
    device_iterations: int = field(
        1, "deviceIterations", "updates in one call; the batch of a call", lowest=1
    )
    inference_device_iterations: int = field(
        1,
        "deviceIterations",
        "micro-batches of a call; fewer than stages run sharded, not as a pipeline",
        lowest=1,
    )
    layers_per_ipu: Layers = field(
        [-1],
        "`parallelize`",
        'the IPU of each layer; -1 shares out what is left, "auto" cuts by cost',
        lowest=-1,
    )
    inference_layers_per_ipu: Layers | None = field(None, "`parallelize`", "the same", lowest=-1)
    ipus_per_replica: int | None = field(
        None,
        "setAvailableMemoryProportion",
        "IPUs that layers are shared out to; how many memory proportions there are",
        lowest=1,
    )
    inference_ipus_per_replica: int | None = field(
        None, "setAvailableMemoryProportion", "the same", lowest=1
    )
    matmul_proportion: float | list[float] = field(
        _PROPORTION,
        "setAvailableMemoryProportion",
        "for predictions: the share of memory that a product may use for temporary values",
        lowest=0,
    )
    inference_matmul_proportion: float | list[float] | None = field(
        None, "setAvailableMemoryProportion", "the same", lowest=0
    )
    optimizer_state_offchip: bool = field(
        True,
        "TensorLocations.setOptimizerLocation",
        "the optimizer's state is in streaming memory, loaded and stored around each update",
    )
    sharded_execution_for_inference: bool = field(
        False, "setExecutionStrategy", "stages of inference run one after the other"
    )
    replicated_tensor_sharding: bool = field(
        False,
        "TensorLocations.setOptimizerLocation",
        "each replica keeps a part of the optimizer's state",
    )
    enable_half_partials: bool = field(
        True, "Precision.setPartialsType", "how products of halves are summed"
    )
    embedding_serialization_factor: int | None = field(
        None, "`parallelize`", "the embedding in parts, or the product with a tied one", lowest=1
    )
    inference_embedding_serialization_factor: int | None = field(
        None, "`parallelize`", "the same", lowest=1
    )
    projection_serialization_factor: int | None = field(
        None, "`parallelize`", "the head's product in parts, one after the other", lowest=1
    )
    inference_projection_serialization_factor: int | None = field(
        None, "`parallelize`", "the same", lowest=1
    )
    serialized_embedding_splits_per_ipu: list[int] | None = field(
        None, "`parallelize`", "parts of the embedding on each IPU", lowest=0, splits=True
    )
    inference_serialized_embedding_splits_per_ipu: list[int] | None = field(
        None, "`parallelize`", "the same", lowest=0, splits=True
    )
    serialized_projection_splits_per_ipu: list[int] | None = field(
        None, "`parallelize`", "parts of the head on each IPU", lowest=0, splits=True
    )
    inference_serialized_projection_splits_per_ipu: list[int] | None = field(
        None, "`parallelize`", "the same", lowest=0, splits=True
    )
    recompute_checkpoint_every_layer: bool = field(
        False, "`parallelize`", "outputs of layers are kept, and all else is computed again"
    )
    output_mode: str = field(
        "final", "outputMode", "which micro-batches training returns", choices=OUTPUT_MODES
    )
    auto_loss_scaling: bool = field(
        False, "Training.setAutomaticLossScaling", "the loss scale follows the gradients"
    )
    executable_cache_dir: str = field(
        "", "enableExecutableCaching", 'programs are kept there; "disabled" keeps none'
    )
    explicit_ir_inference: bool = field(
        False, '_Popart.set("enableExplicitIR", True)', "recorded: programs are explicit anyway"
    )
    parallelize_kwargs: dict[str, Any] | None = field(
        {}, "", "what trainers pass to `model.parallelize`", by_pod=False
    )
    inference_parallelize_kwargs: dict[str, Any] | None = field({}, "", "the same", by_pod=False)
    execute_encoder_on_cpu_for_generation: bool = field(
        False, "", "recorded: generation is left to the program"
    )

    _layers_per_ipu = _Managed()
    _ipus_per_replica = _Managed()
    _matmul_proportion = _Managed()
    _embedding_serialization_factor = _Managed()
    _projection_serialization_factor = _Managed()
    _serialized_embedding_splits_per_ipu = _Managed()
    _serialized_projection_splits_per_ipu = _Managed()
    _parallelize_kwargs = _Managed()

    def __init__(self, **values: Any) -> None:
        self.mode = "training"
        known = fields_of(IPUConfig)
        unknown = {
            name: value
            for name, value in values.items()
            if not (name in known or name in GONE or name in BASE_KEYS)
        }
        if unknown:
            raise IncompatibleIPUConfigError("\n".join(map(_unknown, unknown.items())))
        for name in GONE & values.keys():
            if values[name]:
                log.warning("`%s=%r` of an IPUConfig is ignored: it is gone", name, values[name])
        for name, one in known.items():
            default = dict(one.default) if isinstance(one.default, dict) else one.default
            default = list(default) if isinstance(default, list) else default
            value = values.get(name, default)
            if one.default == {} and value is None:
                value = {}
            setattr(self, name, value)
        self._derive()
        check_coherence(self)

    def _derive(self) -> None:
        """Derive omitted fields from others, except from those that are dictionaries."""
        if not self.inference_layers_per_ipu:
            self.inference_layers_per_ipu = _unless_by_pod(self.layers_per_ipu)
        count, count_inference = map(
            layer_count, (self.layers_per_ipu, self.inference_layers_per_ipu)
        )
        if not self.ipus_per_replica:
            self.ipus_per_replica = count
        if not self.inference_ipus_per_replica:
            ipus, layers = self.ipus_per_replica, self.inference_layers_per_ipu
            if None not in (count_inference, count, _unless_by_pod(ipus)):
                own = ipus == count or layers not in ([-1], "auto")
                self.inference_ipus_per_replica = count_inference if own else ipus
        if not self.inference_matmul_proportion:
            proportion = _unless_by_pod(self.matmul_proportion)
            ipus = _unless_by_pod(self.inference_ipus_per_replica)
            if isinstance(proportion, list):
                fits = ipus is None or len(proportion) in (1, ipus)
                proportion = list(proportion) if fits else _PROPORTION
            self.inference_matmul_proportion = proportion
        for twin in ("", _TWIN):
            for kind in ("embedding", "projection"):
                factor = f"{twin}{kind}_serialization_factor"
                if getattr(self, f"{twin}serialized_{kind}_splits_per_ipu") is None:
                    setattr(self, factor, getattr(self, factor) or 1)

    # modes

    @property
    def mode(self) -> str:
        """ "training" or "inference": which fields the underscore names mean."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in self.modes:
            raise ValueError(
                f"`IPUConfig` mode can only take the values {', '.join(self.modes)}, got {mode!r}"
            )
        self._mode = mode

    def train(self) -> Self:
        """Mean the fields of training from here on; return the configuration."""
        self.mode = "training"
        return self

    def eval(self) -> Self:
        """Use the fields of inference from here on; return the configuration."""
        self.mode = "inference"
        return self

    def _get_managed_attr_mode_name(self, name: str) -> str:
        """The field that `name` means in this mode: itself, or its twin if it has one."""
        twin = _TWIN + name
        return twin if self.mode == "inference" and twin in fields_of(IPUConfig) else name

    # Uses of a configuration

    def for_pod_type(self, pod_type: str | None = None) -> "IPUConfig":
        """A configuration with the values of one type of POD, by default those of "default".

        Args:
            pod_type: such as "pod16"; None: "default".

        Raises:
            ValueError: an unknown type of POD.
            KeyError: a field that is a dictionary has no entry for it.
            RuntimeError: no type, and a field without "default"; or more IPUs than the POD has.
        """
        pod_types.check_pod_type(pod_type)
        values = {
            name: plain(name, getattr(self, name), pod_type if one.by_pod else None)
            if one.takes_by_pod(getattr(self, name))
            else getattr(self, name)
            for name, one in fields_of(IPUConfig).items()
        }
        config = IPUConfig(**copy.deepcopy(values))
        config.mode = self.mode
        if pod_type is not None:
            for twin in ("", _TWIN):
                replicas, ipus = f"{twin}replication_factor", f"{twin}ipus_per_replica"
                pod_types.check_size(
                    pod_type, (replicas, getattr(config, replicas)), (ipus, getattr(config, ipus))
                )
        return config

    def _plain(self, pod_type: str | None = None) -> "IPUConfig":
        """This configuration, or where a type of POD counts the one for that."""
        by_pod = any(
            one.takes_by_pod(getattr(self, name)) for name, one in fields_of(IPUConfig).items()
        )
        return self.for_pod_type(pod_type) if by_pod or pod_type is not None else self

    def batch_size_factor(self, for_inference: bool = False, pod_type: str | None = None) -> int:
        """Micro-batches of one call: replicas, device iterations and accumulation multiplied.

        Args:
            for_inference: count those of inference, which has no accumulation.
            pod_type: as for `for_pod_type`.
        """
        config = self._plain(pod_type)
        if for_inference:
            return config.inference_replication_factor * config.inference_device_iterations
        return (
            config.replication_factor
            * config.gradient_accumulation_steps
            * config.device_iterations
        )

    def to_options(
        self,
        for_inference: bool = False,
        compile_only: bool = False,
        pod_type: str | None = None,
    ) -> Any:
        """The `poptorch.Options` of a PopTorch program.

        Args:
            for_inference: for `poptorch.inferenceModel`, else for `poptorch.trainingModel`.
            compile_only: compile without a device.
            pod_type: the POD that it runs on, if fields depend on that.

        Raises:
            RuntimeError: the machine is configured as one that the original does not run on, and
                all that `for_pod_type` raises.
        """
        from ipu_dynamo.optimum.to_options import to_options

        return to_options(self._plain(pod_type), inference=for_inference, compile_only=compile_only)

    def to_core_options(
        self, for_inference: bool = False, pod_type: str | None = None
    ) -> "Options":
        """The same as `to_options`, for `compile_training` and `compile_inference`.

        Args:
            for_inference: for `compile_inference`, else for `compile_training`.
            pod_type: as for `for_pod_type`.
        """
        from ipu_dynamo.optimum.to_core_options import to_core_options

        return to_core_options(self._plain(pod_type), inference=for_inference)

    def update_from_string(self, update_str: str) -> None:
        """Set fields from a text such as "seed=3,matmul_proportion=[0.1 0.2]".

        Args:
            update_str: pairs of a field and its value, separated by commas.

        Raises:
            ValueError: an unknown field, or a text that it cannot have; nothing is changed then.
        """
        for name, value in read_update(update_str, fields_of(IPUConfig)).items():
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IPUConfig):
            return NotImplemented
        return all(getattr(self, n) == getattr(other, n) for n in fields_of(IPUConfig))

    __hash__ = None  # type: ignore[assignment]


IPUConfig.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.declared)
        for name, one in fields_of(IPUConfig).items()
    ]
)


def own_config(config: Any) -> IPUConfig:
    """An IPUConfig of this package from one, or from Optimum Graphcore's, with its mode.

    Raises:
        TypeError: anything else.
    """
    if isinstance(config, IPUConfig):
        return config
    if type(config).__name__ != IPUConfig.__name__ or not hasattr(config, "to_dict"):
        raise TypeError(f"an IPUConfig is needed, got {config!r}, a {type(config).__name__}")
    own: IPUConfig = IPUConfig.from_dict(config.to_dict())
    own.mode = getattr(config, "mode", own.mode)
    return own


def _unless_by_pod(value: Any) -> Any:
    """A value that others follow from: a copy of a list, None of a dictionary."""
    if isinstance(value, dict):
        return None
    return list(value) if isinstance(value, list) else value


def _unknown(item: tuple[str, Any]) -> str:
    """What to say of an unknown keyword."""
    name, value = item
    near = get_close_matches(name, fields_of(IPUConfig), n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"an IPUConfig has no field `{name}` (given {value!r}){hint}"
