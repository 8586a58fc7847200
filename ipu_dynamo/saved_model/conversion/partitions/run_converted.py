"""Run a converted program: the host's partitions as they are, those of IPUs compiled."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved_model.conversion.drafts.draft import IPU, Draft
from ipu_dynamo.saved_model.conversion.drafts.specialize import sizes_of, specialize
from ipu_dynamo.saved_model.conversion.partitions.mark_blocks import mark_blocks
from ipu_dynamo.saved_model.conversion.partitions.partition_order import Partition
from ipu_dynamo.saved_model.conversion.partitions.split import Split, Step, split
from ipu_dynamo.saved_model.conversion.settings.ipu_config import IpuSettings
from ipu_dynamo.saved_model.exported.flat_program import FlatProgram, Watch, without_shared_memory
from ipu_dynamo.saved_model.signature import Signature
from ipu_dynamo.whole_step.api import compile_inference

_MOST_SHAPES = 32  # for which compiled partitions stay
Call = Callable[..., Any]


class ConvertedProgram:
    """A draft that is run; IPU partitions are compiled at the first call with some shapes.

    Invariant: `_ready` has the steps for the shapes of the latest calls, the latest last.

    Args:
        partitions: in the order in which they run.
        signature: of the program that the draft is of, with the positions of inputs and results.
    """

    def __init__(
        self,
        draft: Draft,
        partitions: Sequence[Partition],
        settings: IpuSettings,
        signature: Signature,
    ) -> None:
        self._draft, self._partitions, self._settings = draft, tuple(partitions), settings
        self._ready: OrderedDict[tuple[torch.Size, ...], _Ready] = OrderedDict()
        self._inputs = [spec.position for spec in signature.inputs.values()]
        self._results = [spec.position for spec in signature.outputs.values()]
        self._signature = signature
        needed = max(draft.placement.ipus.values(), default=0) + 1
        if needed > settings.num_ipus:
            raise ValueError(
                f"the program is placed on {needed} IPUs, and num_ipus is {settings.num_ipus}"
            )

    def run(self, inputs: Sequence[Any], watch: Watch | None = None) -> list[Any]:
        """All user outputs, by position; with `watch` the host computes all of it."""
        if watch is not None:
            return FlatProgram(self._signature.program).run(inputs, watch)
        values = self._run([inputs[position] for position in self._inputs])
        by_position = dict(zip(self._results, values, strict=True))
        return [by_position.get(position) for position in range(max(by_position, default=-1) + 1)]

    def close(self) -> None:
        """Free the compiled code."""
        self._ready.clear()

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results, in the order of the draft; they share no memory with inputs or weights."""
        key = tuple(value.shape for value in inputs)
        if key not in self._ready:
            self._ready[key] = _Ready(self._split(inputs), self._draft, self._settings)
            while len(self._ready) > _MOST_SHAPES:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        results = self._ready[key].run(inputs)
        return without_shared_memory(results, [*inputs, *self._draft.tensors.values()])

    def _split(self, inputs: Sequence[Tensor]) -> Split:
        described = [node.meta["val"] for node in self._draft.inputs.values()]
        shapes = [value.shape for value in inputs]
        sizes = sizes_of(zip(described, shapes, strict=True))
        graph, new = specialize(self._draft.graph, sizes)
        return split(
            graph,
            [new[node] for node in self._draft.inputs.values()],
            {new[node]: tensor for node, tensor in self._draft.tensors.items()},
            self._partitions,
        )


class _Ready:
    """The steps for some shapes, with what runs each."""

    def __init__(self, parts: Split, draft: Draft, settings: IpuSettings) -> None:
        self._parts = parts
        self._calls = [_callable(step, draft, settings) for step in parts.steps]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        values: dict[str, Any] = dict(self._parts.tensors)
        values.update(zip(self._parts.inputs, inputs, strict=True))
        with torch.no_grad():
            for step, call in zip(self._parts.steps, self._calls, strict=True):
                result = call(*(values[name] for name in step.inputs))
                results = [result] if step.single else result
                values.update(zip(step.outputs, results, strict=True))
        return [values[name] for name in self._parts.results]


def _callable(step: Step, draft: Draft, settings: IpuSettings) -> Call:
    if step.device != IPU:
        return step.module
    ipus = draft.placement.ipus
    if len(set(ipus.values())) > 1:
        mark_blocks(step.module.graph_module.graph, ipus)
        step.module.graph_module.recompile()
    return compile_inference(step.module, settings.core_options())
