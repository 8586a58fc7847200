"""Check on syntax trees that classes have names of their own, and that no name is refused."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.repository.private_names import ROOT, files

PACKAGES = ("ipu_dynamo", "passes", "runtime", "poptorch")
CLIENTS = ("ipu_dynamo/keras/", "ipu_dynamo/saved_model/", "ipu_dynamo/optimum/")
# classes of PopTorch and PyTorch: the facade has them, and the rule or context below it
SHARED = {"Adam", "Block", "LAMB", "Options", "RMSprop", "SGD"}
REFUSED = {  # word by word, with the word of the field
    "apart": "separate, partial",
    "as_one": "stage pass",
    "bells": "waiters",
    "blame": "error attribution",
    "dependences": "dependencies",
    "expect_changes": "expect_writes",
    "fastest": "shortest_times, bottleneck",
    "first_new": "first_result",
    "home": "owner, stored tensor, device",
    "homes": "stored tensors",
    "in_float": "upcast",
    "is_mine": "held_here",
    "keep_apart": "partial gradients",
    "linked": "fused",
    "linked_step": "fused step",
    "news": "reports, changes",
    "one_sweep": "fused loss",
    "own_changes": "keep_writes",
    "packing": "weight prepacking",
    "picker": "registers",
    "recent": "program history",
    "stand": "stand-ins",
    "sweep": "fused loss",
    "turned": "transposed",
}
ALLOWED = {"passes/joint/recomputation/repeat_lstms.py": {"apart"}}  # an option, which files have


def sources():
    """The modules of the packages, by path."""
    found = (file for package in PACKAGES for file in files(ROOT / package))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in found}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What a module names itself: classes, functions, arguments, attributes and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def refused(files_of):
    """Where an identifier is a refused word, and what to say."""
    return [
        f"{path}:{line} {name}: say {REFUSED[word]}"
        for path, text in files_of.items()
        for line, name in identifiers(ast.parse(text))
        if (word := name.strip("_").lower()) in REFUSED and word not in ALLOWED.get(path, ())
    ]


def doubles(files_of):
    """Public classes that are defined in several modules, with these."""
    where = defaultdict(set)
    for path, text in files_of.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].add(path)
    return {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}


def test_no_identifier_is_a_refused_word():
    assert refused(sources()) == []


def test_a_public_class_has_a_name_of_its_own():
    core = {path: text for path, text in sources().items() if not path.startswith(CLIENTS)}
    assert {name: paths for name, paths in doubles(core).items() if name not in SHARED} == {}


def test_refused_words_are_found_wherever_they_name_something():
    text = (
        "class Sweep:\n    def f(self, home):\n        self._news = recent = 0\nas_one.tell(apart)"
    )
    words = [line.split()[1] for line in refused({"a.py": text})]
    assert sorted(words) == ["Sweep:", "_news:", "home:", "recent:"]


def test_a_class_of_two_modules_is_found_unless_it_is_private():
    text = "class Part:\n    class _Inner: ..."
    assert doubles({"a.py": text, "b.py": text}) == {"Part": ["a.py", "b.py"]}
