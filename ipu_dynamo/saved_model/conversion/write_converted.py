"""Write a converted program into a folder: index, archive, settings and options."""

import json
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.conversion.convert_program import Converted
from ipu_dynamo.saved_model.conversion.drafts.to_exported import to_exported
from ipu_dynamo.saved_model.conversion.executable.embed import Embedded
from ipu_dynamo.saved_model.conversion.pipelines.plan import PipelinePlan
from ipu_dynamo.saved_model.conversion.settings.config_file import SOLUTION
from ipu_dynamo.saved_model.conversion.settings.ipu_config import FILE as IPU_CONFIG
from ipu_dynamo.saved_model.conversion.settings.ipu_config import settings_of, write_settings
from ipu_dynamo.saved_model.conversion.settings.options import ConversionOptions
from ipu_dynamo.saved_model.exported.program_file import program_bytes
from ipu_dynamo.saved_model.files.index import FILE, MetaGraph, SignatureEntry, write_index
from ipu_dynamo.saved_model.files.placement_entry import PlacementEntry
from ipu_dynamo.saved_model.save import file_name, program_folder

PARAMS = "conversion_params.json"
_ASSETS = "assets"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of converting a signature.

    Attributes:
        tags, key: of the signature.
        pipeline, embedded: None without stages, without an executable.
        num_ipus: the number of IPUs that the program needs.
    """

    tags: frozenset[str]
    key: str
    options: ConversionOptions
    converted: Converted
    pipeline: PipelinePlan | None
    embedded: Embedded | None
    num_ipus: int

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch."""
        return self.embedded.batch_size if self.embedded else self.options.batch_size or 1

    @property
    def batch_per_step(self) -> int:
        """Micro-batches of a step, for each stage of a pipeline."""
        return self.embedded.batch_per_step if self.embedded else self.options.batch_per_step


def write_converted(folder: Path, result: Result, executable: str | None) -> None:
    """Fill a folder.

    Args:
        executable: its path, as the index has it; None without one.
    """
    draft = result.embedded.draft if result.embedded else result.converted.draft
    exported = to_exported(draft)
    content = program_bytes(exported.program)
    path = f"{program_folder(result.tags)}/{file_name(result.key)}.pt2"
    digest = sha256(content).hexdigest()
    entry = SignatureEntry(
        path,
        digest,
        exported.inputs,
        exported.outputs,
        draft.method_name,
        exported.parameter_names,
        _placement(result, executable),
        {name: v.tolist() for name, v in draft.defaults.items() if name in exported.inputs},
    )
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    (folder / IPU_CONFIG).write_bytes(write_settings(settings_of(result.options, result.num_ipus)))
    (folder / PARAMS).write_bytes(_params(result, digest))
    (folder / FILE).write_bytes(write_index([MetaGraph(result.tags, {result.key: entry})]))


def copy_assets(source: Path, folder: Path) -> None:
    """Copy the files next to a program unchanged."""
    if (source / _ASSETS).is_dir():
        shutil.copytree(source / _ASSETS, folder / _ASSETS, symlinks=True)


def _placement(result: Result, executable: str | None) -> PlacementEntry:
    """Where nodes are, with the stages that they have by now; those of an executable, too."""
    solution = None if result.pipeline is None else result.pipeline.solution
    return PlacementEntry(
        tuple((part.device, part.nodes) for part in result.converted.partitions),
        result.converted.draft.placement.ipus,
        None if solution is None else solution.pipeline_mapping,
        () if solution is None else solution.device_mapping,
        executable,
        result.batch_size,
        result.batch_per_step,
    )


def _params(result: Result, digest: str) -> bytes:
    """The options as a configuration file that repeats the conversion."""
    params: dict[str, Any] = {
        **result.options.to_json(),
        "num_ipus": result.num_ipus,
        "batch_size": result.batch_size,
        "batch_per_step": result.batch_per_step,
        "sha256": digest,
    }
    if result.pipeline is not None and result.pipeline.measured:
        params[SOLUTION] = result.pipeline.solution.to_json()
    return f"{json.dumps(params, indent=1)}\n".encode()
