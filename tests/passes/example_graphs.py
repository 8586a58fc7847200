"""Build the graph that the text of an example describes, for `docstring_examples.py`.

A line is Python, with `%` before the names of values: `%y: f16[m,n] = aten.mm(%x: f16[m,k], %w)`.
`ast` reads it. Nothing runs but operators on fake tensors, constructors, and functions of numbers.
The result is a record of `passes/level_records.py`, of which `capture_of` makes a capture.
"""

import ast
import base64
import builtins
import operator
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, get_args

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
from ipu_dynamo.passes.level_text import capture_of
from ipu_dynamo.passes.levels import Directions, Level, Model, Part
from ipu_dynamo.passes.node_marks import MARKS
from ipu_dynamo.program.ir.function import body_of
from ipu_dynamo.program.ir.layout import Layout, dense_strides
from ipu_dynamo.program.ir.types import TensorType
from tests.passes.example_text import Function, Line, bare, is_value, read_lines

_MODULES = (builtins, operator, ipu_dynamo, level_records, descriptors, pipeline)  # of names
_NAMESPACES = ("aten", "ipu", "prims", "higher_order")
_PROBLEMS = (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RuntimeError)
Result = tuple[str | None, OutputKind, str]  # the name of a node, and its role


class ExampleGraph:
    """The graph of an example, which grows line by line.

    Args:
        level: of the graph.
        names: Python objects that the text may name.
        sizes: the letters.
        origin: the Before of an After, which begins with the same inputs and facts.
    """

    def __init__(
        self,
        level: Level,
        names: Mapping[str, Any],
        sizes: Mapping[str, int],
        origin: "ExampleGraph | None" = None,
    ) -> None:
        self.level, self.names, self.sizes, self.origin = level, names, dict(sizes), origin
        self.graph, self.holder = fx.Graph(), torch.nn.Module()
        self.mode = origin.mode if origin else _fake_mode()
        self.env: dict[str, Any] = {}
        self.functions: dict[str, ExampleGraph] = {}
        self.bodies: list[Body] = []
        self.flows: list[GraphFlow] = []
        self.roles: dict[fx.Node, GraphInput] = {}
        self.attributes: list[GraphAttribute] = []
        self.lines: Sequence[Line | Function] = ()
        self.last: Model | None = None
        self.returned: list[tuple[str | None, OutputKind, str]] | None = None
        self.output_meta: dict[str, Any] = origin.output_meta if origin else {}
        self.facts: dict[str, Any] = dict(origin.facts) if origin else {}
        for node, role in origin.roles.items() if origin else ():
            self.input(node.name, node.meta["val"], role)
            self.env[node.name].meta |= {k: v for k, v in node.meta.items() if k in MARKS}

    # --- Statements -------------------------------------------------------------------------------

    def read(self, text: str) -> None:
        """Append the lines of a text; those of Before, if it begins with `the same`."""
        if self.origin is not None and text.startswith("the same"):
            self.append(self.origin.lines)
            text = text.removeprefix("the same")
        self.lines = (*read_lines(text),)
        self.append(self.lines)

    def append(self, lines: Sequence[Line | Function]) -> None:
        """Append lines, and keep functions.

        Raises:
            ValueError: a line is impossible.
        """
        for line in lines:
            if isinstance(line, Function):
                names = {**self.names, **self.functions}
                self.functions[line.name] = ExampleGraph(self.level, names, self.sizes)
                self.functions[line.name].mode = self.mode
                self.functions[line.name].lines = line.lines
                self.functions[line.name].append(line.lines)
                continue
            try:
                self.line(line)
            except _PROBLEMS as error:
                raise ValueError(f"{line.text!r}: {error}") from error

    def line(self, line: Line) -> None:
        """Append a line; its marks are those of every operator in it."""
        before = set(self.graph.nodes)
        named = {node for statement in line.statements for node in self.statement(statement)}
        meta = {self.value(key): self.value(value) for key, value in line.marks}
        if unknown := meta.keys() - MARKS.keys():
            raise ValueError(f"no pass reads meta{[*unknown]}")
        places = {STAGE: line.stage, BACKWARD: line.backward, "stack_trace": line.stack_trace}
        meta |= {key: value for key, value in places.items() if value is not None}
        if any(isinstance(statement, ast.Return) for statement in line.statements):
            self.output_meta = meta or self.output_meta
        for node in self.graph.nodes:
            if node in named or (node not in before and node.op != "placeholder"):
                node.meta |= meta

    def statement(self, statement: ast.stmt) -> Sequence[fx.Node]:
        """Append a statement; the nodes that it only names, to mark them."""
        match statement:
            case ast.AnnAssign(ast.Name("capture"), ast.Name(kind)):
                self.level = kind.lower()
                self.facts.pop("loss", None)  # of a traced graph
            case ast.AnnAssign(target=ast.Name(name), annotation=type_, value=value):
                self.declare(bare(name), self.type(type_), value)
                return [self.env[bare(name)]]
            case ast.Assign([ast.Attribute(attr="whole")], value):
                function = self.value(value)
                if function is not None:
                    function.level = "traced"
                self.facts["whole"] = () if function is None else (function.record(),)
            case ast.Assign([ast.Attribute(attr=fact)], value):
                self.facts[fact] = self.value(value)
            case ast.Assign([ast.Name(name)], value):
                self.env[bare(name)] = self.named(bare(name), self.value(value))
            case ast.Assign([ast.Tuple(targets)], value):
                whole = self.value(value)
                for index, target in enumerate(targets):
                    assert isinstance(target, ast.Name)
                    if target.id != "_":
                        item = self.call(operator.getitem, (whole, index), {})
                        self.env[bare(target.id)] = self.named(bare(target.id), item)
            case ast.Return(value):
                self.returned = [*self.results(value)]
            case ast.Delete([ast.Name(name)]):
                node = self.env.pop(bare(name))
                del self.roles[node]
                self.graph.erase_node(node)
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
        """Append an input, or the result of an operator, with its type."""
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
            self.input(name, self.fake(wanted), role)
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
        """Name a node, if it is new; return it."""
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
                return self.typed(bare(name), self.type(type_))
            case ast.Subscript(of, index):
                return self.part(self.value(of), index)
            case ast.Call(called, args, keywords):
                function = self.value(called)
                named = {str(k.arg): self.value(k.value) for k in keywords}
                open_ = bool(args) and isinstance(args[-1], ast.Constant) and args[-1].value is ...
                values = tuple(map(self.value, args[:-1] if open_ else args))
                if open_:
                    values += tuple(_filled(function, len(values), named))
                if isinstance(function, ExampleGraph):
                    return self.inlined(function, values)
                if function is GraphFlow:
                    named["bodies"] = tuple(body.record() for body in named["bodies"])
                if function in (Part, Directions):
                    values = tuple(
                        v.record().graph if isinstance(v, ExampleGraph) else v for v in values
                    )
                plain = isinstance(function, FunctionType) and not _nodes_in(values)
                if isinstance(function, type) or plain:
                    return function(*values, **named)
                if isinstance(function, OpOverloadPacket) and not _in_torch(called):
                    function = self.overload(function, values, named)
                return self.call(function, values, named)
        raise ValueError(f"{ast.unparse(tree) if tree else None} is no value of an example")

    def typed(self, name: str, wanted: Layout) -> fx.Node:
        """A value with its type: an input, if it has no value before."""
        if name not in self.env:
            self.input(name, self.fake(wanted), GraphInput(name, name, "input"))
        node = self.env[name]
        if self.origin and node.op == "placeholder":
            self.input(name, self.fake(wanted), self.roles[node])
        self.check_type(name, node.meta["val"], wanted)
        return node

    def value_of(self, name: str) -> Any:
        """The value of that name in the example."""
        if name not in self.env:
            raise ValueError(f"%{name} has neither a type nor a value before")
        return self.env[name]

    def look_up(self, name: str) -> Any:
        """The value or the Python object of that name."""
        if is_value(name):
            return self.value_of(bare(name))
        if name == "capture":
            return capture_of(self.record())
        if name in _NAMESPACES:
            return getattr(torch.ops, name)
        for known in (self.sizes, self.functions, self.names):
            if name in known:
                return known[name]
        if name == "torch":
            return torch
        imported = (sys.modules.get(getattr(v, "__module__", "")) for v in self.names.values())
        for module in (*_MODULES, *imported):
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
        if not isinstance(value, ExampleGraph):
            return value
        name = f"graph_{len(list(self.holder.children()))}"
        module = value.record().graph
        setattr(self.holder, name, module)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = module
        return node

    def body_name(self, value: Any) -> Any:
        """The name of a function as the body of a loop or branch."""
        if not isinstance(value, ExampleGraph):
            return value
        body = body_of(value.record().graph)
        self.bodies.append(body)
        return body.name

    def inlined(self, function: "ExampleGraph", values: Sequence[Any]) -> Any:
        """Append the operators of a function of the example; return its results."""
        env, returned = self.env, self.returned
        inputs = [role.name for role in function.roles.values()]
        self.env = dict(zip(inputs, values, strict=True))
        self.append(function.lines[len(inputs) :])
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
        """The capture of the lines, or the model of the last line."""
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
                yield (self.value_of(name).name if name else None), kind, of
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
    """A mode in which sizes are numbers, except those of `Sym`."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
