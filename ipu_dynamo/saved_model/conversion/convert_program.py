"""Convert a draft: run all passes in their order, and check the program after each."""

from collections.abc import Callable
from dataclasses import dataclass

from ipu_dynamo.progress import begin
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.partitions.partition_order import Partition, partitions
from ipu_dynamo.saved_model.conversion.passes.convert_precision import ConvertPrecision
from ipu_dynamo.saved_model.conversion.passes.narrow_int64 import NarrowInt64
from ipu_dynamo.saved_model.conversion.passes.place_nodes import PlaceNodes
from ipu_dynamo.saved_model.conversion.passes.remove_excluded import RemoveExcluded
from ipu_dynamo.saved_model.conversion.passes.replace_gelu import ReplaceGelu
from ipu_dynamo.saved_model.conversion.passes.replace_in_place import ReplaceInPlace
from ipu_dynamo.saved_model.conversion.passes.shard_manually import ShardManually
from ipu_dynamo.saved_model.conversion.settings.combinations import needs_ipu
from ipu_dynamo.saved_model.conversion.settings.options import ConversionOptions

Pass = Callable[[Draft], bool]


def passes(options: ConversionOptions) -> tuple[Pass, ...]:
    """The passes in their order; a pass whose option is unset changes nothing."""
    return (
        ReplaceInPlace(),
        ReplaceGelu(options.gelu_replacement),
        PlaceNodes(options.excluded_nodes, options.no_ipu_placement),
        RemoveExcluded(options.remove_excluded_nodes and not options.no_ipu_placement),
        NarrowInt64(options.int64_to_int32_conversion),
        ConvertPrecision(options.precision_mode, options.precision_conversion_excluded_nodes),
        ShardManually(options.manual_sharding),
    )


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted draft with its partitions, in the order in which they run."""

    draft: Draft
    partitions: tuple[Partition, ...]


def convert_program(draft: Draft, options: ConversionOptions) -> Converted:
    """Convert a draft in place, up to where executables begin.

    Raises:
        ValueError: an option does not fit the program.
    """
    steps = passes(options)
    for number, rewrite in enumerate(steps, 1):
        begin("passes", number, len(steps))
        rewrite(draft)
        draft.graph.lint()
        if isinstance(rewrite, PlaceNodes):
            _check_some_on_ipu(draft, options)
    draft.module.recompile()
    return Converted(draft, partitions(draft, merged=options.merge_subgraphs))


def _check_some_on_ipu(draft: Draft, options: ConversionOptions) -> None:
    needing = needs_ipu(options)
    if needing and not draft.placement.ipus:
        raise ValueError(f"{needing} with excluded_nodes: no node is placed on an IPU")
