"""Change pages for the site: pictures for light and dark pages, and notebooks of the examples.

`mkdocs.yml` names this file as a hook. Pages themselves show a light picture, as other readers of
Markdown know no second one.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CALLS = {  # what the last cell of an example's notebook runs
    "digits": "main(epochs=12)",
    "gpt": "main()",
    "huggingface_bert": "main()",
    "keras_digits": "main(epochs=10)",
    "predict_a_model": "main()",
}
_PICTURE = re.compile(r"!\[([^\]]*)\]\((pictures/[\w-]+)-light\.svg\)")
_COMMAND = re.compile(r"^\| `python -m examples\.(\w+)` \|", re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks to the site's files."""
    from mkdocs.structure.files import File

    for name in CALLS:
        content = notebook(name)
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show each picture in the theme of the page; the page of examples links their notebooks."""
    if page.file.src_uri == "examples.md":
        markdown = _COMMAND.sub(
            r"| `python -m examples.\1`, [notebook](notebooks/\1.ipynb) |", markdown
        )
    both = r"![\1](\2-light.svg#only-light)![\1](\2-dark.svg#only-dark)"
    return _PICTURE.sub(both, markdown)


def notebook(name: str, call: str = "") -> str:
    """The text of an example's notebook: a cell for each part, the last one runs it.

    Args:
        call: what the last cell runs; empty: what a user runs.
    """
    import jupytext
    from nbformat.v4 import new_code_cell, new_markdown_cell

    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(source)) or ""
    code = source.partition('"""\n\n')[2].partition('\nif __name__ == "__main__":')[0]
    made = jupytext.reads(code.strip(), fmt="py:light")
    title, _, rest = words.partition("\n\n")
    where = "Run it in the folder of the checkout, or with that folder in `PYTHONPATH`."
    made.cells = [
        new_markdown_cell("\n\n".join(filter(None, [f"# {title.rstrip('.')}", rest, where]))),
        *made.cells,
        new_code_cell(f"figures = {call or CALLS[name]}"),
    ]
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"  # else it is another one at each run
    made.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return str(jupytext.writes(made, fmt="ipynb"))
