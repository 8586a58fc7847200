"""Write a prediction as one HTML file that loads nothing.

The page holds its style, a script, the library uPlot and the view model as JSON. Its content
security policy allows these by hash, and nothing else.
"""

import base64
import json
import os
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files

from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.replace_file import replacing
from ipu_dynamo.report.views.page_view import page_view
from ipu_dynamo.runtime.execute.timeline import Span, Timeline

_SCRIPTS = (
    "state",
    "table",
    "overview",
    "peak",
    "operators",
    "time",
    "main",
)  # joined in this order


def write_report(
    prediction: Prediction, path: str | os.PathLike[str], *, timeline: Timeline | None = None
) -> None:
    """Write the report of a prediction: an HTML file that opens without a network.

    Args:
        prediction: what `ipu_dynamo.predict` returns.
        path: of the HTML file.
        timeline: of the same program on this computer; its times are shown next to the prediction.

    Raises:
        OSError: it cannot be written; a file that is there stays as it was.
    """
    page = html_page(prediction, () if timeline is None else timeline.spans)
    with replacing(path) as file:
        file.write(page.encode())


def html_page(prediction: Prediction, measured: Sequence[Span] = ()) -> str:
    """The text of a report; `measured` are spans of a timeline."""
    library = "\n".join([_asset("guard.js"), _asset("uplot/uPlot.iife.min.js")])
    body = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    script = f'(function () {{\n"use strict";\n{body}\n}})();'
    style = "\n".join([_asset("uplot/uPlot.min.css"), _asset("report.css")])
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "style": style,
        "view": escaped_json(
            page_view(prediction, measured, json.loads(_asset("calibration.json")))
        ),
        "library": library,
        "script": script,
    }
    head, *pieces = _asset("page.html").split("{")
    page = [head]
    for piece in pieces:
        name, _, rest = piece.partition("}")
        page += [parts[name], rest]
    return "".join(page)


def escaped_json(value: object) -> str:
    """JSON in ASCII that ends no element and begins no comment where it stands in HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("ipu_dynamo.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = base64.b64encode(sha256(content.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"
