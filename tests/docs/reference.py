"""Write the pages of the reference when the site is built, from the code: names and passes.

`mkdocs.yml` names this file as a hook. A page of names has an entry for each, which mkdocstrings
fills with signature and docstring; that of passes has the docstrings of their modules.
"""

import sys
from collections.abc import Iterator
from inspect import cleandoc
from types import ModuleType
from typing import Any

from ipu_dynamo.passes.pipeline import all_passes
from tests.docs.public_names import PACKAGES, modules_of, names_of

FOLDER = "reference"
_FOLDERS = {  # of passes/, in the order in which a model meets them
    "traced": "Traced models",
    "aot": "Graphs of AOTAutograd",
    "joint": "Joint graphs",
    "micro_batch": "Micro-batches through torch.compile",
    "program": "Programs",
    "update": "Steps of optimisers that are traced",
    "host": "Programs for this computer",
}


def pages() -> dict[str, str]:
    """The text of each generated page, by its path in the site."""
    texts = {f"{FOLDER}/{page}.md": names_page(page) for page in PACKAGES}
    return {**texts, f"{FOLDER}/passes.md": passes_page()}


def names_page(page: str) -> str:
    """A page with the names of a package, and of the modules that it exports."""
    entries: dict[int, str] = {}  # by the id of the value
    sections = [f"# {page}\n"]
    for module in modules_of(page):
        sections += _module_section(module, module.__name__ == page, entries)
    return "\n".join(sections)


def passes_page() -> str:
    """A page with the docstring of each pass, in the order of the pipeline."""
    lines = [
        "# Passes",
        "",
        "Every step from a model to its program. `passes/pipeline.py` lists them in their order.",
        "`Options(without=...)` leaves passes out by these names.",
        "",
    ]
    steps = {folder: [] for folder in _FOLDERS}
    for step in all_passes():
        steps[type(step).__module__.split(".")[2]].append(step)
    for folder, title in _FOLDERS.items():
        lines += [f"## {title}", "", f"In `passes/{folder}/`.", ""]
        for step in steps[folder]:
            lines += _pass_section(type(step))
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages; mkdocs calls this before it reads the navigation."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def _module_section(module: ModuleType, first: bool, entries: dict[int, str]) -> Iterator[str]:
    """The entries of a module; names that have one already are links to it."""
    path = module.__name__
    if not first:
        yield f"## {path}\n"
    yield _entry(path, "members: false", "show_root_heading: false")
    links = []
    for name in names_of(module):
        if id(name.value) in entries:
            links.append(f"[`{name.path}`][{entries[id(name.value)]}]")
            continue
        entries[id(name.value)] = name.path
        yield _entry(name.path, f"heading_level: {2 if first else 3}")
    if links:
        yield f"The same as above: {', '.join(links)}.\n"


def _entry(path: str, *options: str) -> str:
    return "\n".join([f"::: {path}", "    options:", *(f"      {line}" for line in options), ""])


def _pass_section(kind: type) -> list[str]:
    """The docstring of the module of a pass: a sentence, then Before, After, Keeps and Source."""
    docstring = cleandoc(sys.modules[kind.__module__].__doc__ or "")
    summary, _, rest = docstring.partition("\n\n")
    own = cleandoc(kind.__doc__ or "").removeprefix("The pass.").strip()
    return [f"### {kind.__name__}", "", summary, "", "```text", rest, "```", "", own, ""]
