"""Hold the flat graph of a stage; equal graphs are one function, compiled once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from torch import fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.bodies import Body, all_bodies, bodies_of, known
from ipu_dynamo.ops.graph_queries import only_looks, owner, written_arguments
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_marks import MACHINE
from ipu_dynamo.program.text.graph_text import (
    DIRECTION,
    FUNCTION,
    GROUP,
    MEMORY,
    RECOMPUTED,
    SERIAL_STEP,
    GraphForm,
    node_text,
)
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.program.text.operator_text import operator_text


@dataclass(frozen=True, slots=True)
class Function:
    """A stage of computation: tensors in, tensors out; variables are passed like inputs.

    Those of a program write nothing that they are given. Those of a HostProgram write accumulators
    and buffers in place, by operators that say so.

    Args:
        name: unique within the program.
        key: digest of everything that decides what is computed: operators, their arguments, which
            inputs are written, and dtype, shape, stride and device of every value. Equal keys
            compute equal results, here and on an IPU.
        inputs, outputs: types in calling order.
        graph: the computation; not part of comparisons, `key` stands for it.
    """

    name: str
    key: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]
    graph: fx.GraphModule = field(compare=False, repr=False)

    @property
    def operators(self) -> list[fx.Node]:
        """The computing nodes, in order."""
        return [n for n in self.graph.graph.nodes if n.op not in ("placeholder", "output")]

    @property
    def code_key(self) -> str:
        """A digest of the machine code on this computer: `key` without marks for an IPU only."""
        return structural_key(self.graph, CODE)

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the inputs that it writes in place."""
        written = written_inputs(self.graph.graph)
        return tuple(i for i, node in enumerate(_placeholders(self.graph)) if node in written)

    @property
    def repetitions(self) -> int:
        """How many operators of the forward pass it computes again, views aside."""
        return sum(bool(n.meta.get(RECOMPUTED)) and not only_looks(n) for n in self.operators)

    def listing(self) -> str:
        """One operator per line, with its type and the user's source line."""
        lines = []
        for node in self.operators:
            call = f"  {operator_text(node)}"
            again = "again: " if node.meta.get(RECOMPUTED) else ""
            group = f"group, {node.meta[GROUP]}: " if GROUP in node.meta else ""
            machine = f"on an IPU {node.meta[MACHINE]}: " if MACHINE in node.meta else ""
            lines.append(f"{call:<88}  # {again}{group}{machine}{source_line(node)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        takes = ", ".join(
            f"%{n.name}: {t}" for n, t in zip(_placeholders(self.graph), self.inputs, strict=True)
        )
        gives = ", ".join(str(t) for t in self.outputs)
        return f"function @{self.name}({takes}) -> ({gives})"


def make_function(name: str, graph: fx.GraphModule) -> Function:
    """Describe `graph`, whose nodes carry meta["val"] and whose output is a flat tuple."""
    values = [node.meta["val"] for node in _placeholders(graph)]
    results = [n.meta["val"] if isinstance(n, fx.Node) else None for n in graph_outputs(graph)]
    return Function(
        name=name,
        key=structural_key(graph),
        inputs=tuple(TensorType.of(v) for v in values),
        outputs=tuple(None if v is None else TensorType.of(v) for v in results),
        graph=graph,
    )


def body_of(graph: fx.GraphModule) -> Body:
    """Make a body of `graph`; its name is a digest of the operators."""
    return known(Body(f"body_{structural_key(graph)}", graph))


def with_bodies(functions: Iterable[Function]) -> tuple[Function, ...]:
    """`functions`, before each those that are the bodies of its loops and branches."""
    by_name: dict[str, Function] = {}
    for function in functions:
        for body in all_bodies(function.graph.graph):
            if body.name not in by_name:
                by_name[body.name] = make_function(body.name, body.graph)
        by_name[function.name] = function
    return tuple(by_name.values())


def structural_key(graph: fx.GraphModule, form: GraphForm = FUNCTION) -> str:
    """A digest of the operators and layouts of `graph`; names and source lines do not count."""
    number: dict[fx.Node, str] = {}
    text = partial(write, name_of=lambda node: number[node], otherwise=repr)
    digest = sha256()
    for node in graph.graph.nodes:
        digest.update(f"{node_text(node, text, str, form)}\n".encode())
        number[node] = str(len(number))
    return digest.hexdigest()[:16]


_NO_CODE = (MACHINE, SERIAL_STEP, MEMORY, DIRECTION)  # marks that only an IPU would follow


def _code_marks(node: fx.Node) -> dict[str, Any]:
    marks = FUNCTION.marks(node)
    return {key: mark for key, mark in marks.items() if key not in _NO_CODE}


def _code_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, with digests of code in place of the names of bodies."""
    codes = {body.name: structural_key(body.graph, CODE) for body in bodies_of(node)}
    return tuple(codes.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)


CODE = GraphForm(marks=_code_marks, arguments=_code_arguments)  # what decides machine code


def graph_outputs(graph: fx.GraphModule) -> tuple[Any, ...]:
    """The values that `graph` returns, nodes or None."""
    (result,) = graph.graph.find_nodes(op="output")
    return tuple(result.args[0])


def written_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """The placeholders that operators write in place."""
    written = (root for node in graph.nodes for root in written_by(node))
    return frozenset(node for node in written if node.op == "placeholder")


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that an operator writes in place; for a view, the node that owns the memory."""
    return tuple(map(owner, written_arguments(node)))


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))
