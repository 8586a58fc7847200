"""Make a signature of a converted program, which runs where the index says."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.conversion.drafts.draft import IPU, Placement
from ipu_dynamo.saved_model.conversion.drafts.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.executable.bind import bind, nodes_behind
from ipu_dynamo.saved_model.conversion.partitions.partition_order import Partition
from ipu_dynamo.saved_model.conversion.partitions.run_converted import ConvertedProgram
from ipu_dynamo.saved_model.conversion.settings.ipu_config import IpuSettings, read_settings
from ipu_dynamo.saved_model.exported.node_names import Kind
from ipu_dynamo.saved_model.files.index import SignatureEntry
from ipu_dynamo.saved_model.files.placement_entry import PlacementEntry
from ipu_dynamo.saved_model.files.tensor_spec import DTYPES
from ipu_dynamo.saved_model.signature import Runner, Signature


class ConvertedSignature(Signature):
    """A signature that knows its placement, and the settings of its IPUs.

    Attributes:
        settings: those saved with it, or of `configure`.
    """

    def __init__(
        self, program: ExportedProgram, entry: SignatureEntry, what: str, folder: Path
    ) -> None:
        super().__init__(program, entry, what, defaults=_defaults(entry), make_runner=_runner)
        assert entry.placement is not None
        self._entry, self._folder, self._what = entry.placement, folder, what
        self.settings = read_settings(folder)

    def configure(self, settings: IpuSettings) -> None:
        """Use other settings than those saved with it, from the first call on.

        Those of an executable are compiled into it: others are ignored, with a warning.
        """
        if self._entry.executable is None:
            self.settings = settings
        elif settings != self.settings:
            warnings.warn(
                f"the executable was compiled with {self.settings}; {settings} is ignored",
                stacklevel=2,
            )

    def compiled_nodes(self) -> list[dict[str, Any]]:
        """The nodes in its executable, as `show --nodes` lists nodes; none without one.

        Raises:
            RuntimeError: the executable is missing, another one, or damaged.
        """
        if self._entry.executable is None:
            return []
        return nodes_behind(self.program, self._folder, self._entry.executable)

    def make_runner(self) -> Runner:
        """What runs it.

        Raises:
            ValueError: the placement names other nodes than the program has.
        """
        if self._entry.executable is not None:
            return bind(self.program, self._folder, self._entry.executable)
        draft = from_exported(self)
        names = {g.name for g in draft.groups() if g.kind is Kind.OP and not g.is_size}
        check_names(self._entry, names, self._what)
        draft.placement = Placement(self._entry.nodes, self._entry.ipu)
        parts = [Partition(device, names) for device, names in self._entry.partitions]
        return ConvertedProgram(draft, parts, self.settings, self)


def _defaults(entry: SignatureEntry) -> dict[str, Tensor]:
    """The values of a row of inputs that may be left out."""
    dtypes = {name: DTYPES[entry.inputs[name].dtype] for name in entry.defaults}
    return {name: torch.tensor(row, dtype=dtypes[name]) for name, row in entry.defaults.items()}


def _runner(signature: Signature) -> Runner:
    assert isinstance(signature, ConvertedSignature)
    return signature.make_runner()


def check_names(entry: PlacementEntry, names: set[str], what: str) -> None:
    """Compare the nodes that an index places with those that there are.

    Raises:
        ValueError: they differ, or a node of an IPU has none.
    """
    listed = [name for _, part in entry.partitions for name in part]
    wrong = sorted(names.symmetric_difference(listed)) or sorted(
        name for name, count in Counter(listed).items() if count > 1
    )
    on_ipu = {name for name, device in entry.nodes.items() if device == IPU}
    wrong = wrong or sorted(on_ipu.symmetric_difference(entry.ipu))
    if wrong:
        raise ValueError(f"{what}: placement does not fit the program at node {wrong[0]!r}")


def open_converted(
    program: ExportedProgram, entry: SignatureEntry, what: str, folder: Path
) -> Signature:
    """The signature of a program with a placement.

    Args:
        what: names the entry in errors.
        folder: of the index.

    Raises:
        ValueError: the settings of the IPUs are missing or damaged.
    """
    return ConvertedSignature(program, entry, what, folder)
