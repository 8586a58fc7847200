"""Run the notebooks of the examples, for fewer steps than a user does."""

import pytest

from tests.docs.site_pages import CALLS, ROOT, notebook

SHORT = {
    "digits": "main(epochs=1)",
    "gpt": "main(steps=3, width=16, length=16)",
    "huggingface_bert": "main(steps=2)",
    "keras_digits": "main(epochs=1)",
    "predict_a_model": "main([(4, 'all')], words=128, width=32, layers=4, heads=2, length=16)",
}


def test_every_example_with_a_page_of_figures_has_a_notebook():
    helpers = {"__init__", "digits_ranks"}  # the second needs several processes
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} - helpers == CALLS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    page = nbformat.reads(notebook(name, SHORT[name]), as_version=4)
    nbformat.validate(page)
    assert page.cells[0].cell_type == "markdown"
    assert len(page.cells) > 5
    run = nbclient.NotebookClient(
        page, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    run.execute()
    outputs = [o for cell in run.nb.cells for o in cell.get("outputs", ())]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert printed.strip()
    assert notebook(name) == notebook(name)
