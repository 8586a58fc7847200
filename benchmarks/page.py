"""Write the figures of a run into a page of the guide, with the machine that they come from."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.cases import CASES

_TABLE = re.compile(r"(<!-- benchmarks -->\n).*?(<!-- end of benchmarks -->\n)", re.DOTALL)


def refreshed(page: str, content: Mapping[str, Any]) -> str:
    """`page` with the table of a run's JSON between its two comments."""
    table = "\n".join(_lines(content))
    return _TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    commit = (content["commit"] or "unknown")[:10] + (", modified" if content["modified"] else "")
    yield (
        f"Measured {content['date'][:10]} on {content['cpu']} with {content['cores']} cores "
        f"({content['vector']}), "
        f"PyTorch {content['torch']}, Python {content['python']}, commit {commit}."
    )
    yield ""
    yield "| Work | Contender | Call, median | Times ours | First call |"
    yield "|---|---|---:|---:|---:|"
    for name, timings in content["benchmarks"].items():
        what = CASES[name].what
        for who, timing in timings.items():
            figures = f"wrong | by {timing['apart']:.1e} | |" if "apart" in timing else _row(timing)
            yield f"| {what} | {who} | {figures}"
            what = ""
    for name, facts in content["facts"].items():
        title = CASES[name].what if name in CASES else name
        yield from ("", f"{title[0].upper()}{title[1:]}:", "")
        yield from (f"- {what}: {value:.2f}" for what, value in facts.items())


def _row(timing: Mapping[str, float]) -> str:
    return f"{_time(timing['median'])} | {timing['ratio']:.2f} | {timing['first']:.1f} s |"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
