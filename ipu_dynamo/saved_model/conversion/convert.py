"""Convert a signature of a saved program, and write it as a saved program of its own."""

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ipu_dynamo.progress import begin, job
from ipu_dynamo.saved_model.conversion.convert_program import Converted, convert_program
from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, Placement
from ipu_dynamo.saved_model.conversion.drafts.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.executable.embed import embed
from ipu_dynamo.saved_model.conversion.executable.place_executable import (
    OPTION,
    cache_folder,
    place_executable,
)
from ipu_dynamo.saved_model.conversion.pipelines.plan import PipelinePlan, plan_pipeline
from ipu_dynamo.saved_model.conversion.settings.combinations import check_combinations
from ipu_dynamo.saved_model.conversion.settings.config_file import Request, read_request
from ipu_dynamo.saved_model.conversion.settings.option_checks import integer
from ipu_dynamo.saved_model.conversion.write_converted import (
    Result,
    copy_assets,
    write_converted,
)
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.files.locked_folder import locked_folder
from ipu_dynamo.saved_model.files.named_errors import naming
from ipu_dynamo.saved_model.files.new_folder import new_folder
from ipu_dynamo.saved_model.files.publish import Content, place_inside, publish
from ipu_dynamo.saved_model.signature import Signature

_SCRATCH = ".executable"  # in the folder that is being made: files on their way
Say = Callable[[str], object]


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
) -> str:
    """Convert one signature for IPUs, and write `output_dir` as a whole or not at all.

    With stages it prints where their costs come from.

    Args:
        dir: as in `load`.
        output_dir: absent, or an empty folder.
        trust: the user's word for the files in `dir`.
        config_file: options as a JSON object; options of this call take precedence.
        memory_per_ipu: bytes that stages of a pipeline may take; None: those of a Mk2 IPU.
        options: by name, as `ipu-saved-model convert ipu --help` lists them.

    Returns:
        Where the program is and its nodes are, in a line.

    Raises:
        ValueError: an option is wrong, excludes another one, or does not fit the program.
        TypeError: an option has a wrong type.
        AssertionError: `output_dir` exists and is not empty.
        RuntimeError: the program does not have this tag set.
        NotImplementedError: a part of the program cannot be converted.
        OSError: a file cannot be written; the option that its path comes from is named.
    """
    if isinstance(tags, str):
        raise TypeError("tags are a list of texts, not a text")
    if memory_per_ipu is not None:
        integer("memory_per_ipu", memory_per_ipu, 1, most=1 << 62)
    return convert_signature(
        dir,
        output_dir,
        read_request(options, config_file),
        tags=frozenset(tags),
        key=signature_def,
        trust=trust,
        memory_per_ipu=memory_per_ipu,
        say=print,
    )


def convert_signature(
    dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    request: Request,
    *,
    tags: frozenset[str] = frozenset(["serve"]),
    key: str = "serving_default",
    trust: bool = False,
    memory_per_ipu: int | None = None,
    say: Say = lambda text: None,
) -> str:
    """Convert as `convert` does, for callers that show messages in another way.

    Args:
        say: called with each message, in place of printing it.

    Returns:
        As `convert`.
    """
    options, out = request.options, Path(os.path.abspath(output_dir))
    check_combinations(options)
    _check_empty(out)
    with job(f"converting {os.fspath(dir)}"):
        begin("reading")
        return _convert(dir, request, tags, key, trust, memory_per_ipu, say, out)


def _convert(
    dir: str | os.PathLike[str],
    request: Request,
    tags: frozenset[str],
    key: str,
    trust: bool,
    memory_per_ipu: int | None,
    say: Say,
    out: Path,
) -> str:
    options = request.options
    programs = SavedPrograms(dir, trust=trust)
    with programs.signature(tags, key) as signature:
        _check_source(signature, programs.path)
        converted = convert_program(from_exported(signature), options)
    pipeline = None
    if options.pipeline_cfg is not None:
        begin("planning stages")
        pipeline = plan_pipeline(
            converted.draft, options, memory_per_ipu=memory_per_ipu, solution=request.solution
        )
        converted.draft.placement = pipeline.placement
        say(pipeline.message)
        for problem in pipeline.warnings:
            warnings.warn(problem, stacklevel=4)
    where = _where_nodes_are(converted.draft.placement)  # an executable takes the place of some
    with naming("output_dir"), new_folder(out, overwrite=False) as folder:
        result = _result(converted, pipeline, request, tags, key, folder)
        begin("writing")
        copy_assets(programs.path, folder)
        _finish(result, folder, out)
    return f"{out} is written: {where}"


def _where_nodes_are(placement: Placement) -> str:
    ipus = Counter(placement.ipus.values())
    counts = [(f"IPU {ipu}", ipus[ipu]) for ipu in sorted(ipus)]
    counts.append(("the host", sum(device == HOST for device in placement.devices.values())))
    texts = [f"{count} node{'s' * (count != 1)} on {place}" for place, count in counts if count]
    return ", ".join(texts) or "no nodes"


def _check_empty(out: Path) -> None:
    with naming("output_dir"):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise AssertionError(f"output_dir: output folder {out} is there and not empty")


def _check_source(signature: Signature, path: Path) -> None:
    """Raise ValueError for a program that was converted already."""
    if signature.placement is None:
        return
    if signature.placement.executable is not None:
        raise ValueError(
            f"{path} calls the executable {signature.placement.executable!r}: convert the program "
            "that it was made of"
        )
    raise ValueError(f"{path} is converted already: convert the program that it is made of")


def _result(
    converted: Converted,
    pipeline: PipelinePlan | None,
    request: Request,
    tags: frozenset[str],
    key: str,
    folder: Path,
) -> Result:
    """Collect the parts to write; the executable is in a folder of its own."""
    options = request.options
    num_ipus = options.num_ipus if pipeline is None else pipeline.num_ipus
    embedded = None
    if options.embedded_runtime_save_config is not None:
        embedded = embed(
            converted.draft,
            options,
            num_ipus=num_ipus,
            solution=None if pipeline is None else pipeline.solution,
            folder=folder / _SCRATCH,
        )
    return Result(tags, key, options, converted, pipeline, embedded, num_ipus)


def _finish(result: Result, folder: Path, out: Path) -> None:
    """Write the folder that becomes `out`, and publish the files outside of it.

    Two conversions may share a folder of executables. It is locked from the choice of a name until
    the file exists, so that neither overwrites the other's file.
    """
    files: dict[Path, Content] = {} if result.pipeline is None else {**result.pipeline.files}
    names = {} if result.pipeline is None else {**result.pipeline.file_options}
    config, embedded = result.options.embedded_runtime_save_config, result.embedded
    if config is None or embedded is None:
        write_converted(folder, result, None)
        _publish(files, names, folder, out)
        return
    cache = cache_folder(config, out)
    outside = place_inside(out, cache) is None
    with naming(OPTION), locked_folder(cache) if outside else nullcontext():
        placed = place_executable(embedded, cache, out)
        with naming("output_dir"):
            write_converted(folder, result, placed.path)
        names |= dict.fromkeys(placed.files, OPTION)
        _publish({**files, **placed.files}, names, folder, out)
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)


def _publish(
    files: Mapping[Path, Content], names: Mapping[Path, str], folder: Path, out: Path
) -> None:
    inside = {path: place for path in files if (place := place_inside(out, path)) is not None}
    with naming("output_dir"):
        publish({folder / place: files[path] for path, place in inside.items()})
    _check_empty(out)  # nothing appears for a folder that somebody has filled meanwhile
    publish({path: content for path, content in files.items() if path not in inside}, names)
