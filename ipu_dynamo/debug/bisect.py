"""Find the first operator of a program that computes something else than the user's model."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import (
    ACCUMULATION_WEIGHT,
    BACKWARD,
    RANDOM_KEY,
    REPLICA_INDEX,
    STAGE,
    Joint,
)
from ipu_dynamo.capture.private.tracing import flatten
from ipu_dynamo.capture.swap import Model, named_tensors, swapped
from ipu_dynamo.capture.trace import Arguments, read_arguments, trace
from ipu_dynamo.debug.mismatch import faulty_backward, mismatch
from ipu_dynamo.debug.repro import Repro
from ipu_dynamo.debug.repro_of import (
    repro_of_call,
    repro_of_engine,
    repro_of_gradient,
    repro_of_pass,
)
from ipu_dynamo.debug.snapshots import NAME, PassWatcher, Snapshot, compute, gradients
from ipu_dynamo.debug.stepping import (
    WrongCall,
    expected_values,
    first_wrong_call,
    first_wrong_operator,
    result_node,
    step_of_wrong_call,
)
from ipu_dynamo.debug.values import differ, error
from ipu_dynamo.errors import source_line
from ipu_dynamo.options import OptionError, Options
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import (
    host_passes,
    lower,
    run_host_passes,
    start_gradient,
    whole_step,
)
from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.made_names import is_made
from ipu_dynamo.program.random_keys import random_keys
from ipu_dynamo.progress import begin, job
from ipu_dynamo.runtime.engines.engines import make_engine
from ipu_dynamo.whole_step.lowering import model_name

REPRO = "bisect_repro.py"


@dataclass(frozen=True)
class Difference:
    """The first place where a program differs from the model.

    Args:
        step: the origin of the difference: a pass, the engine, or the trace.
        operator: the operator that computes another value.
        source: its line in the model.
        instruction: the instruction of the program that runs it.
        error: the largest difference, relative to the largest expected number.
        repro: a program that shows the difference alone; None where only the model itself can.
    """

    step: str
    operator: str
    source: str
    instruction: str
    error: float
    repro: Path | None

    def __str__(self) -> str:
        lines = [
            f"{self.step} changes a value, by {self.error:.2g} of the largest number in it",
            f"  operator:    {self.operator}",
            f"  from:        {self.source}",
            f"  instruction: {self.instruction}",
        ]
        return "\n".join([*lines, f"  repro:       {self.repro}"] if self.repro else lines)


def bisect(
    model: Model,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    training: bool = False,
    loss: int | None = None,
    options: Options | dict[str, Any] | None = None,
    repro: str | Path = REPRO,
) -> Difference | None:
    """Compare a model's program with eager PyTorch, and find the first operator that differs.

    The model is traced. Eager PyTorch computes the graph after each pass, operator by operator, and
    the values are compared with those before the pass. Then the program runs call by call on the
    engine. So the last comparison is, step by step, one with the model. The model does not change.

    Args:
        model: a module or a function on tensors.
        inputs: one micro-batch of the model's positional arguments.
        kwargs: one micro-batch of its keyword arguments.
        rtol: how far values may lie apart, relative to the largest number in a tensor; None: by
            dtype, 1e-4 for float32. Whole numbers have to be equal.
        training: check forward, loss and backward; otherwise the forward pass.
        loss: index of the returned tensor to minimise; None: the marked value.
        options: as for `compile_training`; the first micro-batch of one replica runs.
        repro: where to write a program that shows the difference.

    Returns:
        The first difference; None when there is none.

    Raises:
        OptionError: groups of replicas have weights of their own.
    """
    chosen = Options.read(options)
    if chosen.grid[1] > 1:
        raise OptionError(
            "option mesh has a dimension ipu, and bisect runs a model in one process\n"
            "  try:  replace(options, mesh=None)"
        )
    if chosen.replica_groups:
        raise OptionError(
            "option replica_groups does not work with bisect, which runs one replica; give it the "
            "model with the slices of one group"
        )
    arguments = read_arguments(model, inputs, kwargs or {})
    with job(f"bisecting {model_name(model)}", show=chosen.progress, then="comparisons"):
        begin("tracing")
        found = _Search(model, arguments, rtol, training, loss, chosen).find()
    if found is None:
        return None
    difference, shown = found
    if shown is None:
        return difference
    text = f"{difference}"
    written = replace(shown, title=difference.step, text=text).write(Path(repro))
    return replace(difference, repro=written)


_Found = tuple[Difference, Repro | None]


class _Search:
    """One search: the program, its snapshots, and their values."""

    def __init__(
        self,
        model: Model,
        arguments: Arguments,
        rtol: float | None,
        training: bool,
        loss: int | None,
        options: Options,
    ) -> None:
        self.model, self.arguments, self.rtol, self.options = model, arguments, rtol, options
        traced = trace(model, self.arguments, training=training)
        names = [role.name for role in traced.placeholders if role.kind == "input"]
        self.given: dict[str, Tensor] = dict(zip(names, self.arguments.tensors, strict=True))
        (self.given[RANDOM_KEY],) = random_keys(
            seed=0, step=0, iterations=1, accumulation=1, replicas=range(1)
        )
        self.given[ACCUMULATION_WEIGHT] = torch.tensor(1.0)
        self.given[REPLICA_INDEX] = torch.tensor(0)
        self.start = start_gradient(options)
        self.watcher = PassWatcher(self.start)
        self.snapshots = self.watcher.snapshots
        passes = whole_step(options, training=training, loss=loss)
        manager = PassManager("bisect", watch=self.watcher)
        program = lower(traced, passes, manager)
        assert isinstance(self.watcher.last, Joint), "parts are cut out of a joint graph"
        self.joint = self.watcher.last
        host = run_host_passes(program, host_passes(options), manager)
        self.program: Program = host.inlined  # the program that runs: its functions write
        tensors = traced.report.tensors  # of streams of random numbers, if passes have made any
        self.given |= {name: tensor for name, tensor in tensors.items() if is_made(name)}
        if self.joint.loss_scale is not None:
            self.given[self.joint.loss_scale.name] = torch.tensor(options.loss_scale)
        self.returned = traced.report.structure.tensors

    def find(self) -> _Found | None:
        """Look at the trace, then at each pass, then at the program."""
        values = compute(self.snapshots[0], self.given)
        if found := self._trace(values):
            return found
        count = len(self.snapshots) - 1
        for number, (before, after) in enumerate(pairwise(self.snapshots), 1):
            begin("comparisons", number, count)
            new = compute(after, self.given)
            wrong = mismatch(before, values, after, new, self.rtol)
            if wrong is not None:
                step = f"pass {after.made_by}"
                off = error(new[wrong.found], values[wrong.expected])
                shown = repro_of_pass(wrong, values, new, self.rtol)
                return self._at(wrong.found, after, step, off), shown
            at_once = before.loss is not None and after.differentiated
            if at_once and (found := self._gradients(before, after, new)):
                return found
            values = new
        return self._program(values)

    def _trace(self, values: Mapping[fx.Node, Any]) -> _Found | None:
        first = self.snapshots[0]
        if first.random():
            return None  # the model draws its own numbers
        results = _run(self.model, self.arguments)
        for position, (node, _) in zip(self.returned, first.outputs, strict=True):
            if node is not None and differ(values[node], results[position], self.rtol):
                off = error(values[node], results[position])
                return self._at(node, first, "the trace", off), None
        return None

    def _gradients(
        self, before: Snapshot, after: Snapshot, values: Mapping[fx.Node, Any]
    ) -> _Found | None:
        """The first gradient, in the order of computation, that autograd gives otherwise."""
        if before.random():
            return None  # another mask is drawn, and the gradients belong to that
        expected = gradients(before, self.given, self.start)
        made = {node: role.name for node, role in after.outputs if role.kind == "gradient"}
        for node in after.graph.graph.nodes:
            name = made.get(node, "")
            value = expected.parameters.get(name)
            if value is None or not differ(values[node], value, self.rtol):
                continue
            step, off = f"pass {after.made_by}", error(values[node], value)
            shown = repro_of_gradient(before, after, node, name, self.given, self.start)
            operator = faulty_backward(expected.values, after, values, self.rtol)
            operator = node if operator is None else operator
            snapshot = before if operator in before.by_name.values() else after
            difference = self._at(operator, snapshot, step, off)
            text = f"{difference.operator}, backward; it reaches the gradient of {name}"
            return replace(difference, operator=text), shown
        return None

    def _program(self, values: Mapping[fx.Node, Any]) -> _Found | None:
        engine, last = make_engine(self.options.engine, "off"), self.snapshots[-1]
        expected = expected_values(self.joint, last, values)
        wrong = first_wrong_call(self.program, engine, last, self.given, expected, self.rtol)
        if wrong is None:
            return None
        node, off = result_node(wrong.function, wrong.call, wrong.name), None
        shown: Repro | None
        if wrong.engine:
            step = f"engine {engine.name}"
            if operator := first_wrong_operator(wrong, engine, self.rtol):
                node, ours, theirs = operator
                off = error(ours, theirs)
            shown = repro_of_engine(wrong, node, engine.name, self.rtol)
        else:
            steps = self.watcher.parts, self.watcher.programs
            blamed = step_of_wrong_call(*steps, last, self.given, expected, self.rtol)
            step = f"pass {blamed}"
            shown = repro_of_call(wrong)
        return self._in_call(wrong, node, step, off), shown

    def _in_call(
        self, wrong: WrongCall, node: fx.Node | None, step: str, off: float | None
    ) -> Difference:
        return Difference(
            step=step,
            operator=_text(node) if node is not None else f"%{wrong.name}",
            source=source_line(node) if node is not None else wrong.call.source,
            instruction=str(wrong.call),
            error=error(wrong.found, wrong.expected) if off is None else off,
            repro=None,
        )

    def _at(self, node: fx.Node, snapshot: Snapshot, step: str, off: float) -> Difference:
        return Difference(
            step=step,
            operator=_text(node),
            source=source_line(node),
            instruction=self._instruction(node, snapshot),
            error=off,
            repro=None,
        )

    def _instruction(self, node: fx.Node, snapshot: Snapshot) -> str:
        """The call of the final program that runs `node`, as passes have rewritten it."""
        (name,) = (name for name, copy in snapshot.by_name.items() if copy is node)
        final = self.joint.graph.graph.nodes
        if snapshot.differentiated:
            became = [n for n in final if n.meta.get(NAME) == name]
        else:
            made = self.snapshots[-1].made_from().get(name, [])
            names = {n for n, copy in self.snapshots[-1].by_name.items() if copy in made}
            became = [n for n in final if n.meta.get(NAME) in names]
        line = node.meta.get("stack_trace")
        became += [n for n in final if line and n.meta.get("stack_trace") == line]
        for one in became:
            for call in self.program.calls:
                direction = "backward" if one.meta.get(BACKWARD) else "forward"
                both = call.direction == "forward_backward"
                if call.stage == one.meta.get(STAGE) and (both or call.direction == direction):
                    return str(call)
        return "none: nothing in the program stands for it"


def _text(node: fx.Node) -> str:
    return f"%{node.name} = {node.target}"


def _run(model: Model, arguments: Arguments) -> list[Any]:
    """Run the model itself on copies of its tensors; return its results, flat."""
    held = named_tensors(model)
    copies = {id(tensor): tensor.detach().clone() for _, tensor in held}
    args, kwargs = arguments.rebuild([tensor.detach().clone() for tensor in arguments.tensors])
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(swapped(model, copies))
        torch.manual_seed(0)
        leaves: list[Any] = flatten(model(*args, **kwargs))[0]
    return leaves
