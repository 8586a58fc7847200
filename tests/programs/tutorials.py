"""List the scripts of Graphcore's tutorials, with what must hold when each has run.

The name of a check is the claim.
"""

import re

import torch

from tests.programs.program import Names, Program, Repository

EXAMPLES = Repository(
    "examples",
    "https://github.com/graphcore/examples.git",
    "3cc8f81f13728dd8c17d0d3c8d2fc1549b159485",
)
_TUTORIALS = "tutorials/tutorials/pytorch"


def every_batch_is_loaded_and_trained_on(names: Names, printed: str) -> None:
    assert names["steps"] == 192 // (names["device_iterations"] * 8 * names["replicas"])
    assert printed.count("items/s") == 2
    torch.manual_seed(0)
    before = names["ClassificationModel"]().state_dict()
    after = names["model"].state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    same = {name for name in before if torch.equal(after[name], before[name])}
    assert same <= {"fc2.bias"}  # the softmax is over the batch, which it does not change


def the_network_learns(names: Names, printed: str) -> None:
    assert {p.dtype for p in names["model"].parameters()} == {torch.float32}
    (accuracy,) = re.findall(r"Eval accuracy on IPU: ([\d.]+)%", printed)
    assert float(accuracy) > 50  # of ten classes


def the_anchors_are_the_gradients_of_the_last_batch(names: Names, printed: str) -> None:
    executor, trained = names["poptorch_model"], names["model"]
    anchors = {name: executor.getAnchoredTensor(name) for name in names["tensors"]}
    model = names["BasicLinearModel"]()
    model.load_state_dict(trained.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # back to before the last update
            parameter += 0.01 * anchors[f"Gradient___{name}"].view_as(parameter)
    _, loss = model(names["data"], names["labels"])
    loss.backward()
    for name, parameter in model.named_parameters():
        found = anchors[f"Gradient___{name}"].view_as(parameter)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-5)


_LOADING = {
    "128, 128": "32, 32",
    "41772": "1452",
    "10000": "192",
    "batch_size = 16": "batch_size = 8",
    "device_iterations = 50": "device_iterations = 3",
    "num_workers = 32": "num_workers = 2",
}
_MIXED = {
    "Resize(128)": "Resize(32)",
    "41772": "1452",
    "num_workers=40": "num_workers=0",
    "epochs = 10": "epochs = 1",
}

PROGRAMS = (
    Program(
        EXAMPLES,
        f"{_TUTORIALS}/efficient_data_loading/tuto_data_loading.py",
        every_batch_is_loaded_and_trained_on,
        sizes=_LOADING,
    ),
    Program(
        EXAMPLES,
        f"{_TUTORIALS}/mixed_precision/walkthrough_code_only.py",
        the_network_learns,
        sizes=_MIXED,
    ),
    Program(
        EXAMPLES,
        f"{_TUTORIALS}/observing_tensors/anchor_tensor_example.py",
        the_anchors_are_the_gradients_of_the_last_batch,
        without=("import matplotlib", "fig, axs", "axs.", "plt."),
    ),
)
