"""Convert a signature of a saved program, and write it as a saved program of its own."""

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.conversion.combinations import check_combinations
from ipu_dynamo.saved_model.conversion.config_file import SOLUTION, Request, read_request
from ipu_dynamo.saved_model.conversion.convert_program import Converted, convert_program
from ipu_dynamo.saved_model.conversion.executable.embed import embed
from ipu_dynamo.saved_model.conversion.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.ipu_config import FILE as IPU_CONFIG
from ipu_dynamo.saved_model.conversion.ipu_config import settings_of, write_settings
from ipu_dynamo.saved_model.conversion.option_checks import integer
from ipu_dynamo.saved_model.conversion.pipelines.plan import PipelinePlan, plan_pipeline
from ipu_dynamo.saved_model.conversion.to_exported import to_exported
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.exported.program_file import program_bytes
from ipu_dynamo.saved_model.files.index import FILE, MetaGraph, SignatureEntry, write_index
from ipu_dynamo.saved_model.files.new_folder import new_folder
from ipu_dynamo.saved_model.files.placement_entry import PlacementEntry
from ipu_dynamo.saved_model.files.publish import place_inside, publish
from ipu_dynamo.saved_model.save import file_name, program_folder
from ipu_dynamo.saved_model.signature import Signature

PARAMS = "conversion_params.json"
_ASSETS = "assets"
_SCRATCH = ".executable"  # in the folder that is being made: files on their way


def convert(
    dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    tags: Iterable[str] = ("serve",),
    signature_def: str = "serving_default",
    trust: bool = False,
    config_file: str | os.PathLike[str] | None = None,
    memory_per_ipu: int | None = None,
    **options: Any,
) -> None:
    """Convert one signature for IPUs, and write `output_dir` as a whole or not at all.

    Args:
        dir: as in `load`.
        output_dir: absent, or an empty folder.
        trust: the user's word for the files in `dir`.
        config_file: options as a JSON object; those that are given here go before it.
        memory_per_ipu: bytes that stages of a pipeline may take; None: those of a Mk2 IPU.
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
    if memory_per_ipu is not None:
        integer("memory_per_ipu", memory_per_ipu, 1, most=1 << 62)
    request, out = read_request(options, config_file), Path(os.path.abspath(output_dir))
    check_combinations(request.options)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AssertionError(f"output folder {out} is there and not empty")
    programs = SavedPrograms(dir, trust=trust)
    names = frozenset(tags)
    with programs.signature(names, signature_def) as signature:
        _check_source(signature, programs.path)
        if signature.placement is not None:
            raise ValueError(f"{dir} is converted already: convert the program that it is made of")
        converted = convert_program(from_exported(signature), request.options)
    pipeline = None
    if request.options.pipeline_cfg is not None:
        pipeline = plan_pipeline(
            converted.draft,
            request.options,
            memory_per_ipu=memory_per_ipu,
            solution=request.solution,
        )
        converted.draft.placement = pipeline.placement
        print(pipeline.message)
        for problem in pipeline.warnings:
            warnings.warn(problem, stacklevel=2)
    with new_folder(out, overwrite=False) as folder:
        written = _write(
            folder, out, programs.path, converted, pipeline, request, names, signature_def
        )
        files: dict[Path, bytes | Path] = {} if pipeline is None else {**pipeline.files}
        files.update(written)
        inside = {path: place for path in files if (place := place_inside(out, path)) is not None}
        publish({folder / place: files[path] for path, place in inside.items()})
        publish({path: content for path, content in files.items() if path not in inside})
        shutil.rmtree(folder / _SCRATCH, ignore_errors=True)


def _check_source(signature: Signature, path: Path) -> None:
    """Raise ValueError for a program of which a part is compiled already."""
    if signature.placement is not None and signature.placement.executable is not None:
        raise ValueError(
            f"{path} calls the executable {signature.placement.executable!r}: convert the program "
            "that it was made of"
        )


def _write(
    folder: Path,
    out: Path,
    source: Path,
    converted: Converted,
    pipeline: PipelinePlan | None,
    request: Request,
    tags: frozenset[str],
    key: str,
) -> Mapping[Path, Path]:
    """Fill the output folder; where the files of an executable are, by their paths to be."""
    options, draft = request.options, converted.draft
    num_ipus = options.num_ipus if pipeline is None else pipeline.num_ipus
    solution = None if pipeline is None else pipeline.solution
    placed = draft.placement
    batch_size, batch_per_step, executable = options.batch_size or 1, options.batch_per_step, None
    files: Mapping[Path, Path] = {}
    if options.embedded_runtime_save_config is not None:
        embedded = embed(
            draft,
            options,
            num_ipus=num_ipus,
            solution=solution,
            out=out,
            folder=folder / _SCRATCH,
        )
        draft, executable = embedded.draft, embedded.executable
        batch_size, batch_per_step = embedded.batch_size, embedded.batch_per_step
        files = embedded.files
    exported = to_exported(draft)
    content = program_bytes(exported.program)
    path = f"{program_folder(tags)}/{file_name(key)}.pt2"
    placement = PlacementEntry(
        tuple((part.device, part.nodes) for part in converted.partitions),
        placed.ipus,
        None if solution is None else solution.pipeline_mapping,
        () if solution is None else solution.device_mapping,
        executable,
        batch_size,
        batch_per_step,
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
        {name: v.tolist() for name, v in draft.defaults.items() if name in exported.inputs},
    )
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    (folder / IPU_CONFIG).write_bytes(write_settings(settings_of(options, num_ipus)))
    params = {
        **options.to_json(),
        "num_ipus": num_ipus,
        "batch_size": batch_size,
        "batch_per_step": batch_per_step,
        "sha256": digest,
    }
    if pipeline is not None and pipeline.measured:
        params[SOLUTION] = pipeline.solution.to_json()
    (folder / PARAMS).write_bytes(f"{json.dumps(params, indent=1)}\n".encode())
    if (source / _ASSETS).is_dir():
        shutil.copytree(source / _ASSETS, folder / _ASSETS, symlinks=True)
    (folder / FILE).write_bytes(write_index([MetaGraph(tags, {key: entry})]))
    return files
