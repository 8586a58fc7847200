"""Write a program of one file that shows a difference, and needs nothing else of the model."""

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_EMBEDDED_NBYTES = 2**20  # larger tensors are written to a file next to the program
_TEMPLATE = '''"""Show a difference that ipu_dynamo.bisect found: {title}

{text}

Run it: python {file}
"""

{imports}


{expected}

{found}

def inputs():
{inputs}


def main():
    given = inputs()
    ours = found(*[given[name].clone() for name in {found_names}])
    theirs = expected(*[given[name].clone() for name in {expected_names}])
    if isinstance(ours, (tuple, list)):
        pairs = list(zip(ours, theirs, strict=True))
    else:
        pairs = [(ours, theirs)]
    off = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    scale = max(float(b.double().abs().max()) for _, b in pairs)
    print("found   ", *(a.flatten()[:6].tolist() for a, _ in pairs))
    print("expected", *(b.flatten()[:6].tolist() for _, b in pairs))
    print(f"largest difference {{off:.3g}}, largest expected number {{scale:.3g}}")


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Repro:
    """The parts of a repro, a program that shows a difference.

    Args:
        text: the finding, for its docstring.
        expected, found: sources of two functions with these names.
        expected_names, found_names: names of the tensors that they take, in order.
        imports: further lines before the functions.
        seeded: the inputs are drawn from a seed, except whole numbers.
    """

    title: str
    text: str
    expected: str
    found: str
    expected_names: Sequence[str]
    found_names: Sequence[str]
    imports: Sequence[str]
    tensors: Mapping[str, Tensor]
    seeded: bool

    def write(self, path: Path) -> Path:
        """Write the program to `path`."""
        lines = ["import base64", "import math", "import operator", "import zlib", ""]
        lines += ["import torch", *dict.fromkeys(self.imports)]
        content = _TEMPLATE.format(
            title=self.title,
            text=self.text.replace("\\", "/").replace('"""', "'''"),
            file=path.name,
            imports="\n".join(lines),
            expected=self.expected,
            found=self.found,
            expected_names=list(self.expected_names),
            found_names=list(self.found_names),
            inputs=self._inputs(path),
        )
        path.write_text(content, encoding="utf-8")
        return path

    def _inputs(self, path: Path) -> str:
        lines = ["    torch.manual_seed(0)", "    given = {}"]
        saved = {}
        for name, tensor in self.tensors.items():
            if self.seeded and is_drawn(tensor):
                made = f"torch.randn({list(tensor.shape)}, dtype=torch.float64).to({tensor.dtype})"
            elif tensor.nbytes <= _EMBEDDED_NBYTES:
                made = _embedded(tensor)
            else:
                saved[name] = tensor.detach().contiguous()
                made = f"saved[{name!r}]"
            lines.append(f"    given[{name!r}] = {_strided(made, tensor)}")
        if saved:
            other = path.with_suffix(".pt")
            torch.save(saved, other)
            load = f"saved = torch.load(Path(__file__).with_name({other.name!r}))"
            lines = ["    from pathlib import Path", f"    {load}", *lines]
        return "\n".join([*lines, "    return given"])


def is_drawn(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def drawn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that a seeded repro draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(
                torch.randn(t.shape, dtype=torch.float64).to(t.dtype)
            )
            if is_drawn(t)
            else t
            for name, t in tensors.items()
        }


def _embedded(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    raw = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    if not raw:
        return f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    text = base64.b64encode(zlib.compress(raw, 9)).decode()
    return (
        f"torch.frombuffer(bytearray(zlib.decompress(base64.b64decode({text!r}))), "
        f"dtype={tensor.dtype}).reshape({list(tensor.shape)})"
    )


def _strided(made: str, tensor: Tensor) -> str:
    """`made`, in the memory layout of `tensor`."""
    if tensor.is_contiguous():
        return made
    layout = f"{tuple(tensor.shape)}, {tuple(tensor.stride())}, dtype={tensor.dtype}"
    return f"torch.empty_strided({layout}).copy_({made})"
