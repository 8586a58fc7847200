"""Parse the sizes of a program, and print them again from the tree, for sympy evaluates text.

PyTorch writes a size with sympy's `srepr`, `Add(Symbol('s0', integer=True), Integer(1))`, and reads
it with `sympify`, which runs Python. The printed text has only constructors of a closed list, with
limits under which sympy's own rewriting takes little time.
"""

import math
import re
from dataclasses import dataclass, field

from ipu_dynamo.saved_model.gate.refusal import Refusal

MOST_CHARACTERS = 4096
DEEPEST = 32
MOST_EXTREMA = 16  # operands of Max and Min in all: sympy needs 2 s for 40
MOST_TERMS = 128  # of a dividend, multiplied out: sympy needs 2 s for 256, and doubles
LARGEST_EXPONENT = 8
LARGEST_SHIFT = 63

_OF_SYMPY = [
    "Add",
    "Mul",
    "Pow",
    "Max",
    "Min",
    "Abs",
    "floor",
    "ceiling",
    "And",
    "Or",
    "Not",
    "Equality",
    "Unequality",
    "StrictLessThan",
    "LessThan",
    "StrictGreaterThan",
    "GreaterThan",
    "Piecewise",
    "ExprCondPair",
]
_OF_TORCH = [
    "FloorDiv",
    "ModularIndexing",
    "Where",
    "PythonMod",
    "Mod",
    "CleanDiv",
    "CeilToInt",
    "FloorToInt",
    "CeilDiv",
    "LShift",
    "RShift",
    "PowByNatural",
    "FloatPow",
    "FloatTrueDiv",
    "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator",
    "TruncToFloat",
    "TruncToInt",
    "RoundToInt",
    "RoundDecimal",
    "ToFloat",
    "Identity",
]
CONSTRUCTORS = frozenset(_OF_SYMPY + _OF_TORCH)
_BEYOND = 1 << 20  # as good as endless
_DIVISIONS = {"FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing"}
_POWERS = {"Pow", "PowByNatural", "FloatPow"}
_ASSUMPTIONS = frozenset(
    [
        "integer",
        "positive",
        "negative",
        "nonnegative",
        "nonpositive",
        "nonzero",
        "zero",
        "real",
        "finite",
    ]
)
_SYMBOL = re.compile(r"(?:s|u|zf|zuf)[0-9]{1,9}", re.ASCII)
_FLOAT = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?", re.ASCII)
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>-?[0-9]{1,19})"
    r"|'(?P<text>[^'\\]{0,60})'|(?P<mark>[(),=]))",
    re.ASCII,
)


@dataclass
class _Call:
    """A constructor and its arguments; a leaf has its text only."""

    name: str
    text: str = ""
    arguments: list["_Call"] = field(default_factory=list)
    terms: int = 1  # once products of sums are multiplied out, and nested divisors with them

    def __str__(self) -> str:
        return self.text or f"{self.name}({', '.join(map(str, self.arguments))})"


def checked(text: str) -> str:
    """The expression in `text`, printed from its tree.

    Raises:
        Refusal: it is not in the grammar, or beyond a limit; the part is quoted.
    """
    if len(text) > MOST_CHARACTERS:
        raise Refusal(f"a size of {len(text)} characters, of at most {MOST_CHARACTERS}")
    parser = _Parser(text)
    tree = parser.expression(1)
    if parser.kind:
        raise Refusal(f"a size goes on behind its end: {parser.value!r} in {text[:80]!r}")
    return str(tree)


class _Parser:
    """Reads an expression from left to right; `kind` and `value` are of the next token."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._extrema = text.rstrip(), 0, 0
        self._advance()

    def _advance(self) -> None:
        if self._at == len(self._text):
            self.kind = self.value = ""
            return
        if not (match := _TOKEN.match(self._text, self._at)):
            raise self._refused(self._text[self._at : self._at + 20])
        self._at = match.end()
        self.kind = match.lastgroup or ""
        self.value = match.group(self.kind)

    def _refused(self, part: str) -> Refusal:
        return Refusal(f"{part!r} in the size {self._text[:80]!r}")

    def _take(self, kind: str, value: str = "") -> str:
        taken = self.value
        if self.kind != kind or (value and taken != value):
            raise self._refused(taken)
        self._advance()
        return taken

    def expression(self, depth: int) -> _Call:
        if depth > DEEPEST:
            raise Refusal(f"a size is nested more than {DEEPEST} deep")
        name = self._take("name")
        if name in ("true", "false"):
            return _Call(name, name)
        self._take("mark", "(")
        match name:
            case "Symbol":
                return self._symbol()
            case "Integer" | "Rational":
                return self._numbers(name)
            case "Float":
                return self._float()
        if name not in CONSTRUCTORS:
            raise self._refused(name)
        call = _Call(name)
        while self.value != ")" or self.kind != "mark":
            call.arguments.append(self.expression(depth + 1))
            if not (self.kind == "mark" and self.value == ")"):
                self._take("mark", ",")
        self._take("mark", ")")
        self._check(call)
        return call

    def _symbol(self) -> _Call:
        name = self._take("text")
        if not _SYMBOL.fullmatch(name):
            raise self._refused(name)
        parts = [f"'{name}'"]
        while self.value == ",":
            self._take("mark", ",")
            assumption = self._take("name")
            self._take("mark", "=")
            value = self._take("name")
            if assumption not in _ASSUMPTIONS or value not in ("True", "False"):
                raise self._refused(f"{assumption}={value}")
            parts.append(f"{assumption}={value}")
        self._take("mark", ")")
        return _Call("Symbol", f"Symbol({', '.join(parts)})")

    def _numbers(self, name: str) -> _Call:
        numbers = [self._take("number")]
        if name == "Rational":
            self._take("mark", ",")
            numbers.append(self._take("number"))
            if int(numbers[1]) == 0:
                raise self._refused("0")
        self._take("mark", ")")
        if beyond := [number for number in numbers if not -(2**63) <= int(number) < 2**63]:
            raise self._refused(beyond[0])
        return _Call(name, f"{name}({', '.join(numbers)})")

    def _float(self) -> _Call:
        digits = self._take("text")
        if not _FLOAT.fullmatch(digits):
            raise self._refused(digits)
        for kind, value in (("mark", ","), ("name", "precision"), ("mark", "="), ("number", "53")):
            self._take(kind, value)
        self._take("mark", ")")
        return _Call("Float", f"Float('{digits}', precision=53)")

    def _check(self, call: _Call) -> None:
        """Refuse what makes sympy compute for long."""
        if call.name in ("Max", "Min"):
            self._extrema += len(call.arguments)
            if self._extrema > MOST_EXTREMA:
                raise Refusal(f"a size has more than {MOST_EXTREMA} operands of Max and Min")
        call.terms = _terms(call)
        if call.name in _DIVISIONS and call.terms > MOST_TERMS:
            raise Refusal(
                f"a size divides what has more than {MOST_TERMS} terms: {str(call)[:80]!r}"
            )
        if call.name in _POWERS:
            small = _number(call.arguments[-1]) if len(call.arguments) == 2 else None
            if small is None or not -LARGEST_EXPONENT <= small <= LARGEST_EXPONENT:
                raise self._refused(str(call)[:80])
            if any(_has_power(argument) for argument in call.arguments):
                raise self._refused(str(call)[:80])
        if call.name in ("LShift", "RShift"):
            shift = call.arguments[-1] if len(call.arguments) == 2 else _Call("")
            number = _number(shift)
            if shift.name != "Symbol" and (number is None or not 0 <= number <= LARGEST_SHIFT):
                raise self._refused(str(call)[:80])


def _number(call: _Call) -> int | None:
    """The value of an integer; that of a fraction such as `Rational(1, 2)`, rounded up."""
    if call.name not in ("Integer", "Rational"):
        return None
    above, *below = (int(part) for part in call.text[len(call.name) + 1 : -1].split(","))
    return -(-above // below[0]) if below else above


def _terms(call: _Call) -> int:
    """How many terms a size has at most once it is multiplied out."""
    terms = [argument.terms for argument in call.arguments]
    if call.name == "Mul" or call.name in _DIVISIONS:
        return min(math.prod(terms), _BEYOND)
    if call.name in _POWERS:
        return min(math.prod([max(terms, default=1)] * LARGEST_EXPONENT), _BEYOND)
    return min(max(sum(terms), 1), _BEYOND)


def _has_power(call: _Call) -> bool:
    return call.name in _POWERS or any(_has_power(argument) for argument in call.arguments)
