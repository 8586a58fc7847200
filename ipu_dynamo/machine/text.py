"""Write a prediction as a page of text: at most 40 lines of 100 ASCII characters."""

from collections import Counter
from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.types import counted

if TYPE_CHECKING:
    from ipu_dynamo.machine.predicted_operators import OperatorRow
    from ipu_dynamo.machine.prediction import IpuPrediction, Prediction

_WIDTH = 100  # characters of a line
_BAR = 30  # characters of an IPU's bar: its limit
_ALL_IPUS = 8  # of more, only the fullest and the slowest have a line
_NAMED = 3  # of each
_SENTENCE, _ROWS, _TENSORS, _UNKNOWN = 2, 10, 5, 2
_OPERATOR, _TENSOR = 30, 46  # characters of names


def prediction_text(prediction: "Prediction") -> str:
    """The prediction for a terminal: verdict, IPUs, costliest operators, largest tensors, marks."""
    lines = [
        *wrap(_ascii(headline(prediction)), _WIDTH)[:_SENTENCE],
        *_figures(prediction),
        "",
        *_ipu_lines(prediction),
        "",
        *_operator_lines(prediction),
        *_tensor_lines(prediction),
        "",
        *_certainty(prediction),
        f"report: {report_command(prediction)}",
    ]
    return "\n".join(_cut(_ascii(line), _WIDTH).rstrip() for line in lines)


def headline(prediction: "Prediction") -> str:
    """One sentence: the model, the system, the verdict, and the IPU that decides it."""
    verdict = prediction.verdict
    tile, limit = verdict.tile, nbytes(verdict.limit)
    words = {
        "fits": f"fits: the fullest tile, on IPU {verdict.ipu}, needs at most "
        f"{nbytes(tile.high)} of its {limit}",
        "tight": f"is tight: the fullest tile, on IPU {verdict.ipu}, needs {nbytes(tile.low)} to "
        f"{nbytes(tile.high)} and has {limit}",
        "does not fit": f"does not fit: the fullest tile, on IPU {verdict.ipu}, holds {limit} and "
        f"needs {nbytes(tile.low)} to {nbytes(tile.high)}{_too_small(prediction)}",
    }
    return f"{title(prediction)} {words[verdict.word]}."


def _too_small(prediction: "Prediction") -> str:
    """How many IPUs are too small, if the program has several."""
    memories = [ipu.memory for ipu in prediction.ipus]
    small = sum(memory.profile.fullest.low > memory.tile_limit for memory in memories)
    return f"; {small} of {len(memories)} IPUs are too small" if len(memories) > 1 else ""


def title(prediction: "Prediction") -> str:
    """The model and the system: `Bert on bow-pod4`."""
    return f"{prediction.model or 'The program'} on {prediction.system}"


def report_command(prediction: "Prediction") -> str:
    """The command that writes the report, in a shell or in Python."""
    made = prediction.reproduce.command
    shell = "ipu-dynamo predict "
    if made.startswith(shell):
        return f"ipu-dynamo report {made.removeprefix(shell)}"
    return 'ipu_dynamo.write_report(prediction, "report.html")'


def nbytes(count: float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1: `1.5 MiB`."""
    if abs(count) < 1024:
        return f"{round(count)} B"
    units = ("KiB", "MiB", "GiB")
    power = min((int(abs(count)).bit_length() - 1) // 10, len(units))
    return f"{_digits(count / 1024**power)} {units[power - 1]}"


def seconds(time: float) -> str:
    """A time in s, ms or us with three digits."""
    if time >= 1:
        return f"{_digits(time)} s"
    return f"{_digits(1e3 * time)} ms" if time >= 1e-3 else f"{_digits(1e6 * time)} us"


def percent(share: float) -> str:
    """A share as `12.3 %`."""
    return f"{100 * share:.1f} %"


def step_name(prediction: "Prediction") -> str:
    """The word for the work whose time is `step_seconds`."""
    return "step" if prediction.kind == "training" else "call"


def items(prediction: "Prediction") -> str:
    """Items in a second; a program without a host input has none."""
    rate = prediction.items_per_second
    return "no host input" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def sizes(prediction: "Prediction") -> str:
    """Replicas, IPUs and micro-batches."""
    rows = prediction.micro_batch_rows
    return (
        f"{counted(prediction.replicas, 'replica')} of {counted(prediction.num_ipus, 'IPU')}, "
        f"{counted(prediction.micro_batches, 'micro-batch', 'micro-batches')}"
        + (f" of {counted(rows, 'row')}" if rows else "")
    )


def precision(prediction: "Prediction") -> str:
    """Machine dtypes of the parameters, and the kinds of products."""
    dtypes = ", ".join(prediction.dtypes) or "no parameters"
    kinds = ", ".join(prediction.partials)
    return f"{dtypes}; products in {kinds}" if kinds else dtypes


def _figures(prediction: "Prediction") -> Iterator[str]:
    yield (
        f"{step_name(prediction)} {seconds(prediction.step_seconds)}, "
        f"items/s {items(prediction)}, idle {percent(prediction.idle)}, "
        f"re-layout {percent(prediction.relayout)}, {prediction.cycles:,} cycles in a call"
    )
    yield f"{sizes(prediction)}; {precision(prediction)}"
    yield prediction.limits


def _ipu_lines(prediction: "Prediction") -> Iterator[str]:
    """A line for each IPU, or for the fullest and the slowest of many."""
    ipus = prediction.ipus
    numbers = range(len(ipus))
    yield f"{'':7}{'memory, low to high':21}{'limit |':>{_BAR + 1}} {'cycles':>14}  most bytes"
    shown = list(numbers)
    if len(ipus) > _ALL_IPUS:
        fullest = sorted(numbers, key=lambda i: -ipus[i].memory.total.central)[:_NAMED]
        slowest = sorted(numbers, key=lambda i: -ipus[i].cycles.busy)[:_NAMED]
        shown = sorted({*fullest, *slowest})
    yield from (_ipu_line(i, ipus[i]) for i in shown)
    if rest := [ipus[i] for i in numbers if i not in shown]:
        bytes_, busy = [i.memory.total.central for i in rest], [i.cycles.busy for i in rest]
        yield (
            f"the other {counted(len(rest), 'IPU')}: {nbytes(min(bytes_))} to "
            f"{nbytes(max(bytes_))}, {min(busy):,} to {max(busy):,} cycles"
        )


def _ipu_line(number: int, ipu: "IpuPrediction") -> str:
    memory = ipu.memory
    filled = round(_BAR * memory.total.central / max(memory.limit, 1))
    bar = "#" * min(filled, _BAR) + "." * (_BAR - filled) + ("+" if filled > _BAR else "|")
    largest = max(memory.categories, key=lambda c: c.nbytes.central, default=None)
    most = "" if largest is None else largest.name
    interval = f"{nbytes(memory.total.low)} to {nbytes(memory.total.high)}"
    return f"IPU {number:<3}{interval:21}{bar} {ipu.cycles.busy:>14,}  {most}"


def runs_in_step(prediction: "Prediction", row: "OperatorRow") -> int:
    """How often a row runs in a step, on all IPUs of a replica."""
    return row.count * (1 if row.direction == "around" else prediction.micro_batches)


def _operator_lines(prediction: "Prediction") -> Iterator[str]:
    """The costliest operators; equal ones are one line, whatever their costs."""
    runs: Counter[tuple[object, ...]] = Counter()
    cycles: Counter[tuple[object, ...]] = Counter()
    for row in prediction.operators:
        kind = (row.operator, row.operands, row.results, row.line, row.direction)
        count = runs_in_step(prediction, row)
        runs[kind] += count
        cycles[kind] += count * row.cycles.total
    total = cycles.total() or 1
    yield "share of operators' cycles, runs in a step, pass, operator, line"
    for key, number in cycles.most_common(_ROWS):
        name, _, _, line, direction = key
        yield (
            f"{percent(number / total):>8} {f'{runs[key]:,}':>10}  "
            f"{direction!s:9}{_cut(_ascii(str(name)), _OPERATOR):{_OPERATOR}} {line}"
        )


def _tensor_lines(prediction: "Prediction") -> Iterator[str]:
    if not prediction.ipus:
        return
    ipu = prediction.verdict.ipu
    yield f"largest tensors at the peak of IPU {ipu}"
    for tensor in prediction.ipus[ipu].memory.peak.tensors[:_TENSORS]:
        name = _cut(_ascii(f"{tensor.name}: {tensor.type}"), _TENSOR)
        yield (
            f"{nbytes(tensor.nbytes):>10}  {name:{_TENSOR}} {tensor.category}; "
            f"{tensor.line or tensor.maker}"
        )


def _certainty(prediction: "Prediction") -> Iterator[str]:
    words = {"F": "read", "D": "derived", "fitted": "fitted", "M": "recalled"}
    shares = [f"{percent(mark.share)} {words[mark.mark]}" for mark in prediction.marks]
    yield f"cycles by their constants: {', '.join(shares) or 'none'}"
    if unknown := prediction.unknown:
        named = ", ".join(f"{u.operator} {percent(u.share)}" for u in unknown[:_UNKNOWN])
        more = f" and {len(unknown) - _UNKNOWN} more" if len(unknown) > _UNKNOWN else ""
        share = percent(sum(u.share for u in unknown))
        yield f"without a formula: {share} of the cycles: {named}{more}"
    else:
        yield "every operator has a formula"


def _digits(number: float) -> str:
    places = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{places}f}"


def _ascii(text: str) -> str:
    """The text in printable ASCII: names are data."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
