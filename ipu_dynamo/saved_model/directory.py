"""Recognise the program at a path: an index, one archive, or a SavedModel of TensorFlow."""

import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ipu_dynamo.saved_model.exported.node_names import operators
from ipu_dynamo.saved_model.exported.program_file import load_program
from ipu_dynamo.saved_model.exported.program_interface import interface_of
from ipu_dynamo.saved_model.files.index import FILE, MetaGraph, SignatureEntry, read_index
from ipu_dynamo.saved_model.files.named_errors import naming
from ipu_dynamo.saved_model.signature import Signature
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import FILE as TF_FILE
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import TEXT_FILE as TF_TEXT_FILE
from ipu_dynamo.saved_model.tf_graphs.meta_graphs import TfMetaGraph
from ipu_dynamo.saved_model.tf_graphs.tf_programs import TfPrograms

TAGS, KEY = frozenset({"serve"}), "serving_default"


class SavedPrograms:
    """The programs at a path: tag sets, the signatures of each, and their programs.

    Args:
        path: a saved program directory, a `.pt2` file, a folder with one such file, or a
            SavedModel of TensorFlow.
        trust: whether programs are read without the gate.

    Raises:
        ValueError: there is no saved program, or its index is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], *, trust: bool = False) -> None:
        self.path, self._trust = Path(path), trust
        self._alone: Path | None = None
        self._tensorflow: TfPrograms | None = None
        self._graphs: Sequence[MetaGraph] = ()
        with naming("dir"):
            self._find()

    def _find(self) -> None:
        if (self.path / FILE).is_file():
            self._graphs = read_index(self.path / FILE)
        elif (self.path / TF_FILE).is_file() or (self.path / TF_TEXT_FILE).is_file():
            self._tensorflow = TfPrograms(self.path)
        else:
            self._alone = _archive(self.path)

    def tag_sets(self) -> list[list[str]]:
        """The tag sets, sorted."""
        if self._alone:
            return [sorted(TAGS)]
        if self._tensorflow:
            return self._tensorflow.tag_sets()
        return sorted(sorted(graph.tags) for graph in self._graphs)

    def keys(self, tags: Iterable[str]) -> list[str]:
        """The keys of the signatures of a tag set, sorted.

        Raises:
            RuntimeError: the program does not have this tag set.
        """
        graph = self._graph(tags)
        return [KEY] if graph is None else sorted(graph.signatures)

    def operators(self, tags: Iterable[str], key: str) -> list[str]:
        """The operators of a signature, sorted; of TensorFlow's graphs by their own names.

        Raises:
            RuntimeError: the program does not have this tag set.
            ValueError: the signature does not exist, or its program is refused.
        """
        graph = self._graph(tags)
        if self._tensorflow and isinstance(graph, TfMetaGraph):
            self._check(tags, key)
            return self._tensorflow.operators(graph, key)
        with self.signature(tags, key) as signature:
            return sorted({name for group in signature.groups() for name in operators(group)})

    def signature(self, tags: Iterable[str], key: str) -> Signature:
        """A signature, read from its file.

        Raises:
            RuntimeError: the program does not have this tag set.
            ValueError: the signature does not exist, or its program is refused.
        """
        self._check(tags, key)
        with naming("dir"):
            return self._signature(tags, key)

    def _signature(self, tags: Iterable[str], key: str) -> Signature:
        graph = self._graph(tags)
        if graph is None:
            return _of_archive(self._alone or self.path, self._trust)
        if isinstance(graph, TfMetaGraph):
            return (self._tensorflow or TfPrograms(self.path)).signature(graph, key)
        entry, what = graph.signatures[key], f"{self.path / FILE}: signature {key!r}"
        path = _inside(self.path, entry.program)
        program = load_program(path, digest=entry.sha256, trust=self._trust)
        if entry.placement is None:
            return Signature(program, entry, what)
        from ipu_dynamo.saved_model.conversion.open_converted import open_converted

        return open_converted(program, entry, what, self.path)

    def _check(self, tags: Iterable[str], key: str) -> None:
        keys = self.keys(tags)
        if key not in keys:
            valid = ", ".join(map(repr, keys)) or "none"
            raise ValueError(f"{self.path} has no signature {key!r}; available are {valid}")

    def _graph(self, tags: Iterable[str]) -> MetaGraph | TfMetaGraph | None:
        wanted = frozenset(tags)
        if self._tensorflow and (found := self._tensorflow.find(wanted)):
            return found
        for graph in self._graphs:
            if graph.tags == wanted:
                return graph
        if self._alone and wanted == TAGS:
            return None
        available = "; ".join(",".join(tags) for tags in self.tag_sets()) or "none"
        raise RuntimeError(
            f"{self.path} has no meta graph with the tags {','.join(sorted(wanted))}; "
            f"available are {available}"
        )


def _archive(path: Path) -> Path:
    """The one archive at a path."""
    if path.is_file() and path.suffix == ".pt2":
        return path
    found = sorted(path.glob("*.pt2")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    raise ValueError(f"no saved program found in {path}: {_what_is_there(path, len(found))}")


def _what_is_there(path: Path, archives: int) -> str:
    """Describe the file or folder at a path that has no saved program."""
    if not path.exists():
        return "it does not exist"
    if path.is_dir():
        return f"it has {archives or 'no'} .pt2 file{'s' * (archives > 1)} and no {FILE}"
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.rpartition("/")[2] for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        members = set()
    export = "export the model, torch.export.export, and write it with torch.export.save"
    if "constants.pkl" in members:
        return f"it is TorchScript; {export}"
    if "data.pkl" in members:
        return f"torch.save wrote it, which keeps no program; {export}"
    return "it is no .pt2 file, and no folder"


def _of_archive(path: Path, trust: bool) -> Signature:
    program = load_program(path, trust=trust)
    try:
        interface = interface_of(program)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    entry = SignatureEntry(path.name, "", interface.inputs, interface.outputs)
    return Signature(program, entry, str(path))


def _inside(folder: Path, program: str) -> Path:
    """The path of a program, which no link leads out of the folder."""
    path = folder / program
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} leads out of {folder}")
    return path
