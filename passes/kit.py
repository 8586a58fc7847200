"""Hold the shared parts of passes: the name, the options, planning and applying, the changes."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from torch import fx

from ipu_dynamo.options import Choice
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.levels import Level


@dataclass_transform(frozen_default=True)
class Pass:
    """One step. A subclass is a frozen dataclass without a decorator; its fields are the options.

    Attributes:
        name: the class's own, on the page, in dumps, explanations, errors and `without`.
        level: of the model that the step takes.
        needed: why the step cannot be left out; empty: it can.
        choices: of a step that takes a decision; its field `forced` is that of the user, or None.
        acts_on: targets of nodes without one of which the step has no work; empty: any graph.
    """

    name: ClassVar[str]
    level: Level
    needed: ClassVar[str] = ""
    choices: ClassVar[tuple[Choice, ...]] = ()
    acts_on: ClassVar[Collection[object]] = ()

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__
        dataclass(frozen=True)(cls)

    def applies(self, model: Any, contents: Contents, /) -> bool:
        """Say whether the step may have work: a change, an error or a warning.

        The manager does not enter a step that does not apply. If in doubt, the answer is True.
        """
        return not self.acts_on or not contents.targets.isdisjoint(self.acts_on)

    def __call__(self, model: Any, /) -> Any:
        """Rewrite `model` in place and say whether anything changed, or return the new model."""
        raise NotImplementedError


class GraphPass(Pass):
    """A pass that changes the graph of a `Traced` or `Joint` model.

    A subclass has `plan` and `apply`. If these need more than the graph, it has `rewrite`.
    """

    def plan(self, graph: fx.Graph, /) -> Iterable[Any]:
        """Return the changes to make, in order. Reads the graph, changes nothing."""
        raise NotImplementedError

    def apply(self, graph: fx.Graph, planned: Any, /) -> None:
        """Make one change of the plan."""
        raise NotImplementedError

    def rewrite(self, capture: Any, /) -> bool:
        """Change the graph of `capture` and say whether anything changed."""
        graph = capture.graph.graph
        changes = list(self.plan(graph))
        for planned in changes:
            self.apply(graph, planned)
        return bool(changes)

    def __call__(self, capture: Any, /) -> bool:
        changed = self.rewrite(capture)
        if changed:
            capture.graph.recompile()
        return changed
