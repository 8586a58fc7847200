"""Run the Before and After of a pass's docstring: build one, run the pass, compare with the other.

    With     matmuls=True
    Before   %y: f16[m,n] = aten.mm(%x: f16[m,k], %w: f16[k,n])
    After    %y = ipu.half_partials_matmul(%x, %w, 64)

CONTRIBUTING.md describes the form. A line is Python, with `%` before the names of values. `ast`
reads it, and only operators run, on fake tensors. Both sides become captures. They are compared in
the text of `write_level`, up to the names of values.
"""

import ast
import base64
import builtins
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from functools import partial
from itertools import takewhile
from types import FunctionType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

import ipu_dynamo
import ipu_dynamo.ops.operators
from ipu_dynamo.capture.capture import BACKWARD, STAGE, OutputKind, PlaceholderKind
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import FLOW, register_flow
from ipu_dynamo.passes import level_records, pipeline
from ipu_dynamo.passes.level_records import (
    GraphAttribute,
    GraphFlow,
    GraphInput,
    GraphOutput,
    JointGraph,
    TracedGraph,
)
from ipu_dynamo.passes.level_text import capture_of, write_level
from ipu_dynamo.passes.levels import Directions, Model, Part, Pass
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.node_marks import MARKS
from ipu_dynamo.program.ir.function import body_of
from ipu_dynamo.program.ir.layout import Layout, dense_strides
from ipu_dynamo.program.ir.types import TensorType

_SIZES = (4, 8, 12, 16, 20, 24)  # of letters, in the order in which types name them
_WIDTH = 9  # of the column that names a section
_SECTION = re.compile(r"([A-Z][a-z]+) {2,}(?=\S)")
_TYPE = r"[a-z]+\d+\[[^\]]*\]"
_INLINE = re.compile(rf"(?<=[(\[ ])(\$\w+): ({_TYPE}(?:\{{[\d,]*\}})?)(?=[,)\]])")
_STRING = r'"[^"]*"'
_STRIDES = re.compile(rf"({_TYPE})\{{([^}}]*)\}}")
_PLACE = re.compile(r"(.*\S) {2,}in (stage \d+)?(?:, )?(forward|backward)?(?=  |$)(.*)")
_MARKS = re.compile(r"(.*\S) {2,}with (meta\[.*)")
_COMMENT = re.compile(r"(.*\S|) {2,}# (.*)")
_DEFINED = re.compile(r" *%(\w+): ")
_SEVERAL = re.compile(r"^( *(?:%\w+: |return ))\((.*?),?\)(?= = |  |$)")  # a list or a tuple
_NAMED = re.compile(r'(%|\b(?:node|loss)=")(\w+)')
_MODULES = (builtins, operator, ipu_dynamo, level_records, descriptors, pipeline)  # of names
_PROBLEMS = (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RuntimeError)
_SOURCE = re.compile(r"(.+?):(\d+) in (\S+): (.+)")


@dataclass(frozen=True)
class Example:
    """A Before and an After, with options of the pass that differ from those of the page."""

    before: str
    after: str
    options: str = ""


def examples(docstring: str) -> Iterator[Example]:
    """The examples of a docstring, in order."""
    sections: dict[str, list[str]] = {}
    name = ""
    for line in [*docstring.splitlines(), "Keeps    all"]:
        if match := _SECTION.match(line):
            if name == "After":
                texts = ("\n".join(sections.get(k, ())) for k in ("Before", "After", "With"))
                yield Example(*texts)
            name = match[1]
            sections[name] = []
        elif not line.startswith(" "):
            name = ""
        if name:
            sections[name].append(line[_WIDTH:])


def run_example(
    example: Example,
    step: Pass,
    names: Mapping[str, Any],
    run: Callable[[Pass, Model], Model] | None = None,
) -> None:
    """Run a pass on its Before, and assert that the result is its After.

    Args:
        step: as the page has it.
        names: of Python objects that the example may name, such as those of the pass's module.
        run: in place of the manager.

    Raises:
        ValueError: a line does not have the form of an example.
        AssertionError: the pass makes something else.
    """
    sizes = _letters(example)
    before = _Side(step, names, sizes)
    if example.options:
        given = _parse(f"dict({example.options})").value
        step = replace(step, **{k.arg: before.value(k.value) for k in given.keywords})
    before.read(example.before)
    model = before.model()
    run = run or (lambda step, model: PassManager("example", first=step.level).run([step], model))
    if example.after.startswith("raise "):
        raised = _parse(example.after).exc
        kind, words = before.value(raised.func), before.value(raised.args[0])
        with pytest.raises(kind, match=re.escape(words)):
            run(step, model)
        return
    after = _Side(step, names, sizes, before)
    after.read(example.after)
    wanted = _canonical(after.model())
    made = _canonical(run(step, model))
    if made != wanted:
        lines = unified_diff(wanted, made, "After", step.name, lineterm="", n=99)
        raise AssertionError("\n".join([f"{step.name} does not make its After:", *lines]))


def _letters(example: Example) -> dict[str, int]:
    """The sizes of letters in types."""
    letters = [
        letter
        for type_ in re.findall(rf"{_TYPE}|Sym\[.\]", example.before + example.after)
        for letter in re.findall(r"\b[A-Za-z]\b", type_.partition("[")[2])
    ]
    return dict(zip(dict.fromkeys(letters), _SIZES, strict=False))


class _Side:
    """A graph that grows statement by statement, and what the text says of it.

    Args:
        step: the pass.
        names: Python objects that the text may name.
        sizes: the letters.
        origin: the Before of an After, which begins with the same inputs and facts.
    """

    def __init__(
        self,
        step: Pass,
        names: Mapping[str, Any],
        sizes: Mapping[str, int],
        origin: "_Side | None" = None,
    ) -> None:
        self.level = step.level
        self.step, self.names, self.sizes, self.origin = step, names, dict(sizes), origin
        self.graph, self.holder = fx.Graph(), torch.nn.Module()
        self.mode = origin.mode if origin else _fake_mode()
        self.env: dict[str, Any] = {}
        self.functions: dict[str, _Side] = {}
        self.bodies: list[Body] = []
        self.flows: list[GraphFlow] = []
        self.roles: dict[fx.Node, GraphInput] = {}
        self.attributes: list[GraphAttribute] = []
        self.last: Model | None = None
        self.returned: list[tuple[str | None, OutputKind, str]] | None = None
        self.output_meta: dict[str, Any] = origin.output_meta if origin else {}
        self.facts: dict[str, Any] = dict(origin.facts) if origin else {}
        for node, role in origin.roles.items() if origin else ():
            self.input(node.name, node.meta["val"], role)
            self.env[node.name].meta |= {k: v for k, v in node.meta.items() if k in MARKS}

    # --- Statements -------------------------------------------------------------------------------

    def read(self, text: str) -> None:
        """Append the statements of a text."""
        if self.origin is not None and (match := re.match(r"the same\b,?", text)):
            self.read(self.origin.text)
            text = " " * match.end() + text[match.end() :]
        self.text = text
        lines = deque(_lines(text))
        while lines:
            line = lines.popleft()
            try:
                if match := re.fullmatch(r"def (\w+)\((.*)\):", line):
                    block = takewhile(lambda below: below.startswith("    "), [*lines])
                    body = [lines.popleft()[4:] for _ in block]
                    self.functions[match[1]] = self.function(match[2], body)
                else:
                    self.line(line)
            except _PROBLEMS as error:
                raise ValueError(f"{line.strip()!r}: {error}") from error

    def function(self, inputs: str, body: Sequence[str]) -> "_Side":
        """Another graph, which this one may run."""
        side = _Side(self.step, {**self.names, **self.functions}, self.sizes)
        side.mode = self.mode
        for name, type_ in re.findall(rf"%(\w+): ({_TYPE})", inputs):
            side.read(f"%{name}: {type_} = input")
        side.read("\n".join(body))
        return side

    def line(self, line: str) -> None:
        """Append a line; its marks are those of every operator in it."""
        meta: dict[str, Any] = {}
        if match := _COMMENT.fullmatch(line):
            line = match[1]
            if source := _SOURCE.fullmatch(match[2]):
                trace = '  File "{}", line {}, in {}\n    {}\n'.format(*source.groups())
                meta["stack_trace"] = trace
        if match := _MARKS.fullmatch(line):
            line = match[1]
            for part in re.split(r",? (?:and )?(?=meta\[)", match[2]):
                statement: Any = _parse(part)
                (target,) = statement.targets
                meta[self.value(target.slice)] = self.value(statement.value)
        if match := _PLACE.fullmatch(line):
            line = match[1] + match[4]
            meta |= {STAGE: int(match[2].split()[1])} if match[2] else {}
            meta |= {BACKWARD: match[3] == "backward"} if match[3] else {}
        before = set(self.graph.nodes)
        statements = ast.parse(_python(line.strip())).body
        named = {node for statement in statements for node in self.statement(statement)}
        before -= named
        if unknown := meta.keys() - MARKS.keys() - {"stack_trace"}:
            raise ValueError(f"no pass reads meta{[*unknown]}")
        if any(isinstance(statement, ast.Return) for statement in statements):
            self.output_meta = meta or self.output_meta
        for node in self.graph.nodes:
            if node not in before and (node in named or node.op != "placeholder"):
                node.meta |= meta

    def statement(self, statement: ast.stmt) -> Sequence[fx.Node]:
        """Append a statement; the nodes that it only names, to mark them."""
        match statement:
            case ast.AnnAssign(ast.Name("capture"), ast.Name(kind)):
                self.level = kind.lower()
                self.facts.pop("loss", None)  # of a traced graph
            case ast.AnnAssign(target=ast.Name(name), annotation=type_, value=value):
                self.declare(name[1:], self.type(type_), value)
                return [self.env[name[1:]]]
            case ast.Assign([ast.Attribute(attr=fact)], value):
                self.facts[fact] = self.value(value)
            case ast.Assign([ast.Name(name)], value):
                self.env[name[1:]] = self.named(name[1:], self.value(value))
            case ast.Assign([ast.Tuple(targets)], value):
                whole = self.value(value)
                for index, target in enumerate(targets):
                    assert isinstance(target, ast.Name)
                    if target.id != "_":
                        item = self.call(operator.getitem, (whole, index), {})
                        self.env[target.id[1:]] = self.named(target.id[1:], item)
            case ast.Return(value):
                self.returned = [*self.results(value)]
            case ast.Delete([ast.Name(name)]):
                node = self.env.pop(name[1:])
                del self.roles[node]
                self.graph.erase_node(node)
            case ast.Expr(ast.Name(name)):
                return [self.env[name[1:]]]
            case ast.Expr(ast.Tuple(items)):
                return [*map(self.value, items)]
            case ast.Expr(value):
                made = self.value(value)
                if isinstance(made, fx.Node):
                    return [made]
                self.last = made
            case _:
                raise ValueError("this is no statement of an example")
        return ()

    def declare(self, name: str, wanted: Any, value: ast.expr | None) -> None:
        """A value of which the type is known: an input, or what an operator makes."""
        kind, args, keywords = value, [], {}
        if isinstance(value, ast.Call):
            kind = value.func
        if isinstance(kind, ast.Name) and kind.id == "attribute":
            self.attribute(name, wanted)
        elif isinstance(kind, ast.Name) and kind.id in get_args(PlaceholderKind):
            if isinstance(value, ast.Call):
                args = [*map(self.value, value.args)]
                keywords = {k.arg: self.value(k.value) for k in value.keywords}
            role = GraphInput(name, *args or [name], kind.id, **keywords)
            if kind.id == "parameter":
                role = replace(role, trainable=keywords.get("trainable", True))
            self.input(
                name, wanted if isinstance(wanted, torch.SymInt) else self.fake(wanted), role
            )
        else:
            made = self.value(value)
            self.env[name] = node = self.named(name, made)
            self.check_type(name, node.meta["val"], wanted)

    def input(self, name: str, value: Any, role: GraphInput) -> None:
        """A placeholder, after the others, or one of Before with another type."""
        if self.origin and name in self.env:
            node = self.env[name]
            self.roles[node] = replace(role, node=name, values=self.roles[node].values)
            node.meta["val"] = node.meta["example_value"] = value
            return
        last = next(reversed(self.roles), None)
        place = self.graph.inserting_after(last) if last else self.graph.inserting_before()
        with place:
            node = self.graph.create_node("placeholder", name, name=name)
        values = ""
        if role.kind == "constant" and not role.values:
            values = base64.b64encode(bytes(value.numel() * value.itemsize)).decode()
        self.roles[node] = replace(role, node=node.name, values=values or role.values)
        node.meta["val"] = node.meta["example_value"] = value
        self.env[name] = node

    def attribute(self, name: str, layout: Layout) -> None:
        """A tensor that the graph holds."""
        tensor = torch.zeros(layout.type.shape, dtype=layout.type.dtype)
        setattr(self.holder, name, tensor)
        values = base64.b64encode(bytes(tensor.nbytes)).decode()
        self.attributes.append(GraphAttribute(name, name, layout, values))
        self.env[name] = node = self.graph.create_node("get_attr", name, name=name)
        node.meta["val"] = self.fake(layout)

    def named(self, name: str, made: Any) -> Any:
        """What a name stands for: the node is called so, if it is new."""
        if isinstance(made, fx.Node) and made not in self.env.values():
            made._rename(name)
        return made

    def results(self, value: ast.expr | None) -> Iterator[tuple[str | None, OutputKind, str]]:
        """The outputs of a graph: `(%loss, gradient(%w) = ...)`."""
        items = value.elts if isinstance(value, ast.Tuple) else [value]
        count = 0
        for item in items:
            kind: Any = "value"
            if isinstance(item, ast.Call) and getattr(item.func, "id", "") in get_args(OutputKind):
                kind, of, item = item.func.id, *item.args  # type: ignore[union-attr]
                name = self.value(of)
                name = self.roles[name].name if isinstance(name, fx.Node) else name
            else:
                name, count = str(count), count + 1
            node = self.value(item)
            if node is not None and not isinstance(node, fx.Node):
                raise ValueError(f"a graph does not return {node}")
            yield (node.name if node is not None else None), kind, name

    # --- Values -----------------------------------------------------------------------------------

    def value(self, tree: ast.expr | None) -> Any:
        """The value of an expression; operators are appended."""
        match tree:
            case ast.Constant(value):
                return value
            case ast.List(items):
                return [*map(self.value, items)]
            case ast.Tuple(items):
                return tuple(map(self.value, items))
            case ast.Dict(keys, values):
                return dict(zip(map(self.value, keys), map(self.value, values), strict=True))
            case ast.Name(name):
                return self.look_up(name)
            case ast.Attribute(of, name):
                return getattr(self.value(of), name)
            case ast.UnaryOp(ast.USub(), of):
                return -self.value(of)
            case ast.BinOp(left, sign, right):
                return _ARITHMETIC[type(sign)](self.value(left), self.value(right))
            case ast.NamedExpr(ast.Name(name), type_):
                wanted = self.type(type_)
                if name[1:] not in self.env:
                    role = GraphInput(name[1:], name[1:], "input")
                    self.input(name[1:], self.fake(wanted), role)
                node = self.env[name[1:]]
                if self.origin and node.op == "placeholder":
                    self.input(name[1:], self.fake(wanted), self.roles[node])
                self.check_type(name[1:], node.meta["val"], wanted)
                return node
            case ast.Subscript(of, index):
                return self.part(self.value(of), index)
            case ast.Call(called, args, keywords):
                function = self.value(called)
                named = {str(k.arg): self.value(k.value) for k in keywords}
                open_ = bool(args) and isinstance(args[-1], ast.Constant) and args[-1].value is ...
                values = tuple(map(self.value, args[:-1] if open_ else args))
                if open_:
                    values += tuple(_filled(function, len(values), named))
                if isinstance(function, _Side):
                    return self.inlined(function, values)
                if function is GraphFlow:
                    named["bodies"] = tuple(body.record() for body in named["bodies"])
                if function in (Part, Directions):
                    values = tuple(v.record().graph if isinstance(v, _Side) else v for v in values)
                plain = isinstance(function, FunctionType) and not _nodes_in(values)
                if isinstance(function, type) or plain:
                    return function(*values, **named)
                if isinstance(function, OpOverloadPacket) and not _in_torch(called):
                    function = self.overload(function, values, named)
                return self.call(function, values, named)
        raise ValueError(f"{ast.unparse(tree) if tree else None} is no value of an example")

    def look_up(self, name: str) -> Any:
        if name.startswith("V"):
            if name[1:] not in self.env:
                raise ValueError(f"%{name[1:]} has neither a type nor a value before")
            return self.env[name[1:]]
        if name == "capture":
            return capture_of(self.record())
        for known in (self.sizes, self.functions, self.names):
            if name in known:
                return known[name]
        if name in ("aten", "ipu", "prims", "higher_order"):
            return getattr(torch.ops, name)
        if name == "torch":
            return torch
        imported = (sys.modules.get(getattr(v, "__module__", "")) for v in self.names.values())
        for module in (
            builtins,
            operator,
            ipu_dynamo,
            level_records,
            descriptors,
            pipeline,
            *imported,
        ):
            if hasattr(module, name):
                return getattr(module, name)
        raise ValueError(f"nothing is called {name}")

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Append a call, with its fake value."""
        if isinstance(function, HigherOrderOperator):
            args = tuple(map(self.held, args))
        else:
            args = tuple(map(self.body_name, args))
        if flow := next((arg for arg in args if isinstance(arg, GraphFlow)), None):
            self.flows.append(flow)
            bodies = [capture_of(body) for body in flow.bodies]
            parts = flow.kind, bodies, flow.carried, flow.scanned, flow.count, flow.where
            kept = ControlFlow(*parts)  # type: ignore[arg-type]
            args = tuple(register_flow(kept) if arg is flow else arg for arg in args)
        fakes, named = map_arg((args, kwargs), lambda node: node.meta["val"])
        with self.mode, torch.no_grad():
            value = function(*fakes, **named)
        node = self.graph.call_function(function, args, kwargs)
        node.meta["val"] = node.meta["example_value"] = value
        if flow:
            node.meta[FLOW] = kept
        return node

    def held(self, value: Any) -> Any:
        """A function as a module that the graph holds, which Dynamo's operators take."""
        if not isinstance(value, _Side):
            return value
        name = f"graph_{len(list(self.holder.children()))}"
        module = value.record().graph
        setattr(self.holder, name, module)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = module
        return node

    def body_name(self, value: Any) -> Any:
        """The name of a function as the body of a loop or branch."""
        if not isinstance(value, _Side):
            return value
        body = body_of(value.record().graph)
        self.bodies.append(body)
        return body.name

    def inlined(self, function: "_Side", values: Sequence[Any]) -> Any:
        """What a function of the example gives, whose operators are appended here."""
        env, returned = self.env, self.returned
        inputs = [role.name for role in function.roles.values()]
        self.env = dict(zip(inputs, values, strict=True))
        self.read(function.text)
        assert self.returned is not None
        nodes = {node.name: node for node in self.graph.nodes}
        results = [nodes[name] for name, _, _ in self.returned if name]
        self.env, self.returned = env, returned
        return results[0] if len(results) == 1 else results

    def overload(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The overload of an operator that takes these arguments."""
        names = packet.overloads()
        if len(names) == 1:
            return getattr(packet, names[0])
        fakes, named = map_arg((args, kwargs), lambda node: node.meta["val"])
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *fakes, **named)
        return getattr(packet, name or "default")

    def part(self, whole: Any, index: ast.expr) -> Any:
        """A result of several, or a part of a tensor."""
        value = whole.meta["val"] if isinstance(whole, fx.Node) else whole
        if not isinstance(value, Tensor):
            return self.call(operator.getitem, (whole, self.value(index)), {})
        items, dim = index.elts if isinstance(index, ast.Tuple) else [index], 0
        for item in items:
            if not isinstance(item, ast.Slice):
                whole = self.call(torch.ops.aten.select.int, (whole, dim, self.value(item)), {})
                continue
            if item.lower or item.upper:
                start = self.value(item.lower) if item.lower else 0
                stop = self.value(item.upper) if item.upper else value.shape[dim]
                whole = self.call(torch.ops.aten.slice.Tensor, (whole, dim, start, stop), {})
            dim += 1
        return whole

    def type(self, tree: ast.expr) -> Layout:
        """A type such as `f32[m, n]`, or with strides `f32[m, n](1, m)`."""
        strides = None
        if isinstance(tree, ast.Call):
            tree, strides = tree.func, tuple(map(self.value, tree.args))
        if not (isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name)):
            raise ValueError(f"{ast.unparse(tree)} is no type")
        if tree.value.id == "Sym":
            return self.symbol(tree.slice)
        sizes = self.value(tree.slice)
        shape = sizes if isinstance(sizes, tuple) else (sizes,)
        dtype = TensorType.parse(f"{tree.value.id}[]").dtype
        return Layout(TensorType(dtype, shape), strides or dense_strides(shape))

    def symbol(self, letter: Any) -> Any:
        """A size that is not fixed. On this side the letter stands for it."""
        sizes = torch.empty(self.sizes[letter.id])
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        fake = self.mode.from_tensor(sizes, symbolic_context=dynamic)
        self.sizes[letter.id] = fake.shape[0]
        return fake.shape[0]

    def fake(self, layout: Any) -> Any:
        """A value of this type."""
        if not isinstance(layout, Layout):
            return layout
        with self.mode:
            return layout.empty()

    def check_type(self, name: str, value: Any, wanted: Layout) -> None:
        if TensorType.of(value) != wanted.type:
            raise ValueError(f"%{name} is {TensorType.of(value)}, and not {wanted}")

    # --- The model --------------------------------------------------------------------------------

    def model(self) -> Model:
        """What the text describes: a capture, or the model at another level that it ends with."""
        return capture_of(self.record()) if self.last is None else self.last

    def record(self) -> Any:
        """The graph, with the roles of its inputs and outputs."""
        if self.returned is None:
            self.returned = [*self.default_results()]
        named = {node.name: node for node in self.graph.nodes}
        results = [node and named[node] for node, _, _ in self.returned]
        self.graph.output(tuple(results)).meta |= {"val": None, **self.output_meta}
        module = fx.GraphModule(self.holder, self.graph)
        return (TracedGraph if self.level == "traced" else JointGraph)(
            graph=module,
            inputs=tuple(self.roles.values()),
            outputs=tuple(GraphOutput(*one) for one in self.returned),
            attributes=tuple(self.attributes),
            bodies=tuple(self.bodies),
            flows=tuple(self.flows),
            **{k: map_arg(v, lambda n: n.name) for k, v in self.facts.items()},
        )

    def default_results(self) -> Iterator[tuple[str | None, OutputKind, str]]:
        """The outputs of a text that does not say what it returns: what nothing reads, or those of
        its Before."""
        if self.origin is not None:
            assert self.origin.returned is not None
            for name, kind, of in self.origin.returned:
                yield (self.look_up(f"V{name}").name if name else None), kind, of
            return
        unread = (n for n in self.graph.nodes if n.op == "call_function" and not n.users)
        tensors = (n for n in unread if isinstance(n.meta["val"], Tensor))
        for number, node in enumerate(tensors):
            yield node.name, "value", str(number)


_FILLED = {"int": 1, "bool": False, "Optional[Tensor]": None}
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}


def _filled(called: Any, count: int, named: Collection[str]) -> Iterator[Any]:
    """Values of any kind for the arguments of an operator that an example leaves out."""
    (overload,) = called.overloads()
    for argument in getattr(called, overload)._schema.arguments[count:]:
        if argument.name not in named:
            yield _FILLED.get(str(argument.type), "")


def _nodes_in(values: Any) -> list[fx.Node]:
    """The nodes among arguments."""
    nodes: list[fx.Node] = []
    map_arg(values, nodes.append)
    return nodes


def _in_torch(tree: ast.expr) -> bool:
    """Whether it begins with `torch.`: an operator of which no overload is chosen yet."""
    return ast.unparse(tree).startswith("torch.")


def _fake_mode() -> FakeTensorMode:
    """A mode in which sizes are numbers, but those that are asked to be symbols."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def _lines(text: str) -> Iterator[str]:
    """The lines of a text; those within brackets are one."""
    whole = ""
    for line in text.splitlines():
        whole = f"{whole} {line.strip()}" if whole else line
        code = re.sub(_STRING, "", whole)
        if sum(map(code.count, "([{")) <= sum(map(code.count, ")]}")):
            if whole.strip():
                yield whole
            whole = ""


def _python(line: str) -> str:
    """A line as Python reads it: `%y` is called `Vy`."""
    strings = re.findall(_STRING, line)
    line = re.sub(_STRING, '"', line)
    line = re.sub(r"\b([a-z]+\d+)\[\]", r"\1[()]", line)
    line = re.sub(r"%(?=\w)", "$", line)
    line = _INLINE.sub(r"(\1 := \2)", line)
    line = _STRIDES.sub(r"\1(\2)", line).replace("$", "V")
    return re.sub('"', lambda _: strings.pop(0), line)


def _parse(line: str) -> Any:
    (statement,) = ast.parse(_python(line.strip())).body
    return statement


def _canonical(model: Model) -> list[str]:
    """The text of a model. The values of each graph are numbered, in their order."""
    lines = [line for line in write_level(model).splitlines() if not re.match(" *erased ", line)]
    numbers: dict[int, dict[str, str]] = {}  # by the indentation of a graph and of its roles
    written = []
    while lines:
        line = lines.pop()
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("return "):  # the last line of a graph
            graph = takewhile(bool, map(_DEFINED.match, reversed(lines)))
            names = [match[1] for match in graph]
            numbers[indent] = {name: str(n) for n, name in enumerate(reversed(names))}
        known = numbers.get(indent + 4 if "loss=" in line else indent, {})
        line = _SEVERAL.sub(r"\1[\2]", line)
        written.append(_NAMED.sub(partial(_numbered, known), line))
    return written[::-1]


def _numbered(numbers: Mapping[str, str], match: re.Match[str]) -> str:
    return f"{match[1]}{numbers.get(match[2], match[2])}"
