"""Check which options of a conversion go together, as far as no program is needed for it."""

import warnings

from ipu_dynamo.saved_model.conversion.settings.options import ConversionOptions

_EXECUTABLE = "embedded_runtime_save_config"


def check_combinations(options: ConversionOptions) -> None:
    """Raise ValueError for options that exclude each other, or miss another one."""
    embedded = options.embedded_runtime_save_config is not None
    if options.pipeline_cfg is not None and not embedded:
        raise ValueError(f"pipeline_cfg needs {_EXECUTABLE}: only executables are pipelined")
    if embedded and not options.int64_to_int32_conversion:
        raise ValueError(f"{_EXECUTABLE} needs int64_to_int32_conversion")
    if embedded and options.merge_subgraphs:
        raise ValueError(
            f"{_EXECUTABLE} excludes merge_subgraphs, as an executable is one program anyway: drop "
            "merge_subgraphs"
        )
    if options.no_ipu_placement and (needing := needs_ipu(options)):
        raise ValueError(f"{needing} with no_ipu_placement: no node is placed on an IPU")
    if options.manual_sharding and len(options.manual_sharding) != options.num_ipus:
        lists = len(options.manual_sharding)
        raise ValueError(
            f"manual_sharding has {lists} lists and num_ipus is {options.num_ipus}: they should be "
            f"equal, so set num_ipus to {lists}"
        )
    if options.manual_sharding and options.pipeline_cfg is not None:
        warnings.warn(
            "manual_sharding has no effect beside pipeline_cfg: the stages decide", stacklevel=2
        )
    devices = options.pipeline_cfg.device_info if options.pipeline_cfg is not None else ()
    if beyond := [ipu for ipu in devices if ipu >= options.num_ipus]:
        raise ValueError(
            f"pipeline_cfg: device_info names IPU {beyond[0]}, and num_ipus is {options.num_ipus}"
        )


def needs_ipu(options: ConversionOptions) -> str:
    """The option that needs a node on an IPU; "" if none does."""
    if options.embedded_runtime_save_config is not None:
        return _EXECUTABLE
    return "manual_sharding" if options.manual_sharding else ""
