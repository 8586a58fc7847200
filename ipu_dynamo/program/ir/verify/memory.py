"""Check that results of functions have memory of their own, as far as operators show it.

A value may share the memory of another one only while it is read, or on its way to the host. An
instruction that keeps or moves a value, or writes it to a variable, needs one that no other write
changes. Calls of one stage pass are parts of one function, so they may return views of each other's
values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ipu_dynamo.ops.graph_queries import root
from ipu_dynamo.program.ir.base_instruction import Moved, Use
from ipu_dynamo.program.ir.function import Function, graph_outputs
from ipu_dynamo.program.ir.instructions import Call, Plain


@dataclass
class MemoryChecks:
    """Follows the instructions of a micro-batch.

    Args:
        functions: by name.

    Attributes:
        lent: results that share the memory of one of their call's arguments, by name.
        shared: results that share memory with another value, and the name of that.
        makers: the call that returned a value, by its name.
    """

    functions: Mapping[str, Function]
    lent: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    makers: dict[str, Call] = field(default_factory=dict)

    def follow(self, instruction: Plain, reads: Sequence[Use], moves: Sequence[Moved]) -> None:
        """Take notice of an instruction that reads and moves these.

        Raises:
            ValueError: it takes a value from a memory that is not the value's own.
        """
        kept = [move.value for move in moves if move.reads and move.dst != "host"]
        read = [use.name for use in reads]
        for name in (*kept, *read):
            if name in self.lent:
                raise ValueError(f"%{name} lies in the memory of %{self.lent[name]}")
        for name in read if instruction.writes else ():
            if name in self.shared:
                other = self.shared[name]
                raise ValueError(f"%{name}, which is written, shares its memory with %{other}")
        if isinstance(instruction, Call):
            self._call(instruction)

    def _call(self, call: Call) -> None:
        graph = self.functions[call.function].graph
        argument_of = dict(
            zip(graph.graph.find_nodes(op="placeholder"), call.arguments, strict=True)
        )
        first: dict[object, str] = {}  # result by the node whose memory it is
        for name, node in zip(call.results, graph_outputs(graph), strict=True):
            if name is None or node is None:
                continue
            base = root(node)
            self.makers[name] = call
            if base in argument_of and not self._same_pass(argument_of[base], call):
                self.lent[name] = argument_of[base]
            elif base in argument_of:
                self.shared |= {name: argument_of[base], argument_of[base]: name}
            elif (other := first.setdefault(base, name)) != name:
                self.shared |= {name: other, other: name}

    def _same_pass(self, name: str, call: Call) -> bool:
        """Whether a value was made, with memory of its own, in the stage pass of a call."""
        maker = self.makers.get(name)
        return maker is not None and name not in self.lent and maker.stage_pass == call.stage_pass
