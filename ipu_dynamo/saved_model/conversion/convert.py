"""Convert a signature of a saved program, and write it as a saved program of its own."""

import json
import os
import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.conversion.combinations import check_combinations
from ipu_dynamo.saved_model.conversion.config_file import Request, read_request
from ipu_dynamo.saved_model.conversion.convert_program import Converted, convert_program
from ipu_dynamo.saved_model.conversion.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.ipu_config import FILE as IPU_CONFIG
from ipu_dynamo.saved_model.conversion.ipu_config import settings_of, write_settings
from ipu_dynamo.saved_model.conversion.to_exported import to_exported
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.exported.program_file import program_bytes
from ipu_dynamo.saved_model.files.index import FILE, MetaGraph, SignatureEntry, write_index
from ipu_dynamo.saved_model.files.new_folder import new_folder
from ipu_dynamo.saved_model.files.placement_entry import PlacementEntry
from ipu_dynamo.saved_model.save import file_name, program_folder

PARAMS = "conversion_params.json"
_ASSETS = "assets"


def convert(
    dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    tags: Iterable[str] = ("serve",),
    signature_def: str = "serving_default",
    trust: bool = False,
    config_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Convert one signature for IPUs, and write `output_dir` as a whole or not at all.

    Args:
        dir: as in `load`.
        output_dir: absent, or an empty folder.
        trust: the user's word for the files in `dir`.
        config_file: options as a JSON object; those that are given here go before it.
        options: by name, as `ipu-saved-model convert ipu --help` lists them.

    Raises:
        ValueError: an option is wrong, excludes another one, or does not fit the program.
        TypeError: an option has a wrong type.
        AssertionError: `output_dir` is there and not empty.
        RuntimeError: there is no such tag set.
        NotImplementedError: the program has what is not converted.
    """
    if isinstance(tags, str):
        raise TypeError("tags are a list of texts, not a text")
    request, out = read_request(options, config_file), Path(os.path.abspath(output_dir))
    check_combinations(request.options)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AssertionError(f"output folder {out} is there and not empty")
    programs = SavedPrograms(dir, trust=trust)
    names = frozenset(tags)
    with programs.signature(names, signature_def) as signature:
        converted = convert_program(from_exported(signature), request.options)
    with new_folder(out, overwrite=False) as folder:
        _write(folder, programs.path, converted, request, names, signature_def)


def _write(
    folder: Path,
    source: Path,
    converted: Converted,
    request: Request,
    tags: frozenset[str],
    key: str,
) -> None:
    """Fill the output folder."""
    options, draft = request.options, converted.draft
    exported = to_exported(draft)
    content = program_bytes(exported.program)
    path = f"{program_folder(tags)}/{file_name(key)}.pt2"
    batch_size = options.batch_size or 1
    placement = PlacementEntry(
        tuple((part.device, part.nodes) for part in converted.partitions),
        draft.placement.ipus,
        batch_size=batch_size,
        batch_per_step=options.batch_per_step,
    )
    digest = sha256(content).hexdigest()
    entry = SignatureEntry(
        path,
        digest,
        exported.inputs,
        exported.outputs,
        draft.method_name,
        exported.parameter_names,
        placement,
    )
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_bytes(content)
    (folder / IPU_CONFIG).write_bytes(write_settings(settings_of(options, options.num_ipus)))
    params = {**options.to_json(), "batch_size": batch_size, "sha256": digest}
    (folder / PARAMS).write_bytes(f"{json.dumps(params, indent=1)}\n".encode())
    if (source / _ASSETS).is_dir():
        shutil.copytree(source / _ASSETS, folder / _ASSETS)
    (folder / FILE).write_bytes(write_index([MetaGraph(tags, {key: entry})]))
