"""Hold options in a tree of attributes that know their names and types."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any

from ipu_dynamo.keras.ipu.config_choices import (
    DeviceConnectionType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)

_SIZES = (
    "cross_replica_sum_buffer",
    "reduce_scatter_buffer",
    "inter_ipu_copies_buffer",
    "send_recv_cluster",
    "reduce_many_buffer",
    "all_gather_buffer",
)

# a mapping that is not empty is a category; {} is an option whose default is an empty mapping
DEFAULTS: Mapping[str, Any] = {
    "auto_select_ipus": [],
    "select_ipus": [],
    "allow_recompute": False,
    "selection_order": SelectionOrder.AUTO,
    "serialization_output_folder": "",
    "compilation_poplar_options": {},
    "gcl_poplar_options": {},
    "convolutions": {"poplar_options": {}},
    "device_connection": {
        "type": DeviceConnectionType.ALWAYS,
        "version": "",
        "enable_remote_buffers": False,
    },
    "experimental": {
        "always_rearrange_copies_on_the_host": False,
        "enable_remote_buffer_embedding": False,
        "enable_prng_stability": False,
        "multi_replica_distribution": {"process_index": 0, "process_count": 0},
    },
    "floating_point_behaviour": {
        "inv": False,
        "div0": False,
        "oflo": False,
        "nanoo": False,
        "set_all": False,
        "esr": StochasticRoundingBehaviour.OFF,
    },
    "io_tiles": {
        "num_io_tiles": 0,
        "place_ops_on_io_tiles": False,
        "available_memory_proportion": 0.9,
    },
    "ipu_model": {"compile_ipu_code": True, "tiles_per_ipu": 0, "version": "ipu2"},
    "matmuls": {"poplar_options": {}, "clear_pass_type": False},
    "norms": {
        "use_stable_statistics": False,
        "experimental": {"distributed_batch_norm_replica_group_size": 1},
    },
    "optimizations": {
        "prefetch_data_streams": True,
        "enable_graph_outlining": True,
        "enable_gather_simplifier": True,
        "combine_embedding_lookups": False,
        "combine_matmuls": False,
        "merge_infeed_io_copies": False,
        "enable_fast_math": False,
        **{f"maximum_{name}_size": 0 for name in _SIZES},
        "minimum_remote_tensor_size": 128,
        "merge_remote_buffers": MergeRemoteBuffersBehaviour.IF_BENEFICIAL,
        "triangular_solve_expander_block_size": 0,
        "cholesky_block_size": 0,
        "math": {"fast": False, "dot_strength": True},
    },
    "pooling": {"poplar_options": {}},
    "scheduling": {
        "algorithm": SchedulingAlgorithm.CHOOSE_BEST,
        "maximum_scheduler_lookahead_depth": 5,
        "maximum_scheduler_search_space_size": 64,
    },
    "slices": {"poplar_options": {}},
}

_OTHER_TYPES: Mapping[str, tuple[type, ...]] = {
    "auto_select_ipus": (int, list, tuple),
    "select_ipus": (int, list, tuple),
    "floating_point_behaviour.esr": (StochasticRoundingBehaviour, bool),
}


class Category:
    """A part of the tree: options and further categories.

    Invariant: it has exactly the attributes of `defaults`, each of its default's type.
    """

    def __init__(self, path: str, defaults: Mapping[str, Any]) -> None:
        values = {
            name: Category(_join(path, name), default)
            if _is_category(default)
            # lists and mappings may be changed in place
            else default.copy()
            if isinstance(default, list | dict)
            else default
            for name, default in defaults.items()
        }
        vars(self).update(_path=path, _defaults=defaults, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise AttributeError(self._unknown(name))
        path, default = _join(self._path, name), self._defaults[name]
        if _is_category(default):
            raise TypeError(f"{path} is a category: set its attributes, {', '.join(default)}")
        if not _fits(path, default, value):
            raise TypeError(
                f"{path} is {value!r}, a {type(value).__name__}, and takes {_types(path, default)}"
            )
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_defaults" not in vars(self):  # while it is being copied
            raise AttributeError(name)
        raise AttributeError(self._unknown(name))

    def changed(self) -> Iterator[str]:
        """The paths of all options that are not at their default."""
        for name, default in self._defaults.items():
            value = vars(self)[name]
            if isinstance(value, Category):
                yield from value.changed()
            elif value != default:
                yield _join(self._path, name)

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self._defaults, n=3) or list(self._defaults)
        return f"IPUConfig has no {_join(self._path, name)}; near names: {', '.join(near)}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_category(default: Any) -> bool:
    return isinstance(default, Mapping) and bool(default)


def _fits(path: str, default: Any, value: Any) -> bool:
    types = _OTHER_TYPES.get(path, (type(default),))
    if isinstance(value, bool) and bool not in types:
        return False
    if isinstance(default, float) and isinstance(value, int):
        return True
    return isinstance(value, types)


def _types(path: str, default: Any) -> str:
    types = _OTHER_TYPES.get(path, (type(default),))
    names = [
        f"a member of {cls.__name__}" if issubclass(cls, Enum) else f"type {cls.__name__}"
        for cls in types
    ]
    return " or ".join(names)
