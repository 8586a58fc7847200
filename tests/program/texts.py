"""Make programs for tests of their text, and damage it."""

from functools import cache

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import (
    AutomaticLossScaling,
    Block,
    Options,
    compile_inference,
    compile_training,
)
from ipu_dynamo.program import Program
from ipu_dynamo.torch_compile.backend import ipu


class Net(nn.Module):
    """Two stages with a changed buffer, a constant, a random operator, and odd arguments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x, y):
        with Block("a", 0):
            h = F.dropout(self.norm(self.first(x)), 0.5) * torch.tensor(
                [1.0, 2.0, -0.0, 4.0], dtype=x.dtype
            )
        with Block("b", 1):
            left, right = h.split(2, 1)
            h = torch.cat((right, left), 1).masked_fill(h > 1, float("inf")).clamp(max=3.0)
            scores = self.last(F.gelu(h, approximate="tanh"))
            return F.cross_entropy(scores, y), scores.t().half()


@cache
def training(dtype=torch.float32, **options) -> Program:
    """A training step of `Net`."""
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    step = compile_training(model, optimizer, Options(engine="eager", **options), loss=0)
    rows = 2 * step.options.replicas * step.options.gradient_accumulation
    step.compile(torch.ones(rows, 3, dtype=dtype), torch.ones(rows, dtype=torch.int64))
    return step.program


@cache
def inference() -> Program:
    """A program that only computes."""
    run = compile_inference(lambda x: (x.split(1), x.sum() + float("nan"), -0.0 * x), {})
    run.compile(torch.ones(2, 3))
    return run.program


@cache
def two_passes() -> tuple[Program, ...]:
    """The programs that `torch.compile` makes of `Net`: forward and backward."""
    torch._dynamo.reset()
    model = Net()
    call = torch.compile(model, backend=ipu, fullgraph=True, options={"engine": "eager"})
    call(torch.ones(2, 3), torch.ones(2, dtype=torch.int64))[0].backward()
    return ipu_dynamo.programs()


@cache
def programs() -> tuple[Program, ...]:
    """All of these."""
    replicated = training(replicas=2, gradient_accumulation=2, mean_strategy="running")
    checked = training(torch.float16, partials="half", floating_point_exceptions=True)
    automatic = AutomaticLossScaling(period=2)
    scaled = training(torch.float16, replicas=2, automatic_loss_scaling=automatic)
    return (training(), replicated, inference(), checked, scaled, *two_passes())


HOSTILE = (
    '__import__("os").system("true")',
    "%__import__",
    "__import__",
    "aten.__class__.default",
    "aten.from_file.default",
    "aten.save.default",
    "os.system.default",
    "torch.ops.load_library",
    "higher_order.cond.default",
    "operator.attrgetter",
    "lambda: 0",
    '"{0.__class__}"',
    '"\\ud800\\u0000\\""',
    "onnx[1]",
    "f32[9223372036854775807]",
    "f32[99999999999,99999999999]",
    "f32[2]{1,1}",
    "f32[2]@lazy",
    'device("hpu")',
    "9" * 5000,
    "-" * 20,
    "1e999",
    "(" * 300,
    "[" * 300 + "]" * 300,
    "{" + '"a": 1' + "}",
    "slice(None)",
    "complex(1.0)",
    "Record(name=1)",
    "Rule()",
    "Program()",
    "Layout()",
    "#",
    " " * 1000,
    "\t",
    "\x00",
    "\r",
    "\N{ARABIC-INDIC DIGIT ONE}",
    "\u2028",
    "self",
    "torch",
    "None=None",
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """`text` with lines or characters taken out, repeated, exchanged or replaced."""
    lines = text.split("\n")
    i, j = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    start, stop = sorted(draw(st.integers(0, len(text))) for _ in range(2))
    match draw(st.sampled_from(["lines", "cut", "character", "hostile", "word"])):
        case "lines":
            taken = lines[i] if draw(st.booleans()) else lines.pop(i)
            lines.insert(min(j, len(lines)), draw(st.sampled_from(["", "  ", "    "])) + taken)
            return "\n".join(lines if draw(st.booleans()) else lines[:i] + lines[i + 1 :])
        case "cut":
            return text[:start] + (text[stop:] if draw(st.booleans()) else "")
        case "character":
            new = draw(st.sampled_from('()[]{},:=#%@"\\ \n.-+_01e9afZ') | st.characters())
            return text[:start] + new + text[start + draw(st.integers(0, 1)) :]
        case "hostile":
            words = lines[i].split(" ")
            k = draw(st.integers(0, len(words) - 1))
            words[k] = draw(st.sampled_from(HOSTILE))
            lines[i] = " ".join(words)
            return "\n".join(lines)
    words, others = lines[i].split(" "), lines[j].split(" ")
    k, m = (draw(st.integers(0, len(found) - 1)) for found in (words, others))
    words[k] = others[m]
    return "\n".join([*lines[:i], " ".join(words), *lines[i + 1 :]])
