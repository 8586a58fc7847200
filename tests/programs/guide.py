"""List the scripts of PopTorch's user guide and examples, with what must hold when each has run.

The name of a check is the claim.
"""

import re

import torch

from tests.programs.program import Names, Program, Repository

POPTORCH = Repository(
    "poptorch",
    "https://github.com/graphcore/poptorch.git",
    "c2a8b17762f1d7106f7bf048ff011ab4fee7685e",
)


def the_bias_is_trained_to_one_and_the_tensor_was_printed(names: Names, printed: str) -> None:
    torch.testing.assert_close(
        names["model_with_loss"].model.bias, torch.tensor(1.0), rtol=1e-3, atol=1e-3
    )
    assert len(re.findall(r"^Out = ", printed, re.MULTILINE)) == 100


def a_plain_tensor_counts_once_and_a_buffer_counts_calls(names: Names, printed: str) -> None:
    assert [float(x) for x in re.findall(r"tensor\(\[(.)\.\]\)", printed)] == [1, 1, 1, 2]
    assert float(names["model"].i) == 2


def the_anchors_are_the_gradient_and_the_new_weight_of_plain_pytorch(
    names: Names, printed: str
) -> None:
    torch.manual_seed(0)
    x, label = torch.rand(10, 10), torch.rand(10, 10)
    model = names["Model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, label).backward()
        optimizer.step()
    torch.testing.assert_close(names["grad"].reshape(-1), model.fc2.bias.grad)
    torch.testing.assert_close(names["update"].reshape(10, 10), model.fc2.weight.detach())
    assert "Gradient___fc2.bias" in names["tensor_names"]


def every_example_takes_all_its_batches(names: Names, printed: str) -> None:
    assert len(re.findall(r"^\d+, tensor", printed, re.MULTILINE)) == 50 + 125 + 15
    assert len(re.findall(r"^\d+ \d+, tensor", printed, re.MULTILINE)) == 7


def every_kind_of_error_reaches_its_handler(names: Names, printed: str) -> None:
    assert "Unrecoverable error: machine needs to be taken offline" in printed
    assert "from component" in printed


def the_classes_are_those_of_plain_pytorch_and_half_stays_half(names: Names, printed: str) -> None:
    assert torch.equal(names["top_five_classes"][1], names["native_top_five_classes"][1])
    torch.testing.assert_close(
        names["top_five_classes"][0], names["native_top_five_classes"][0], rtol=1e-3, atol=1e-5
    )
    assert names["out"].dtype == torch.half


def the_trained_network_knows_most_pictures(names: Names, printed: str) -> None:
    (accuracy,) = re.findall(r"Accuracy on test set: ([\d.]+)%", printed)
    assert float(accuracy) > 60


def all_four_phased_models_compile(names: Names, printed: str) -> None:
    assert names["poptorch_model"].isCompiled()
    assert not names["m"].isCompiled()


def the_answers_have_the_scores_of_plain_pytorch(names: Names, printed: str) -> None:
    keys = ("input_ids", "attention_mask", "token_type_ids")
    given = [torch.tensor(names["encoding"][key]) for key in keys]
    start, end = names["inference_model"].model(*given)
    torch.testing.assert_close(names["start_scores"], start.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(names["end_scores"], end.detach(), rtol=1e-3, atol=1e-4)
    assert len(names["answer_string"]) == 4


def both_ways_to_train_find_the_border(names: Names, printed: str) -> None:
    borders = re.findall(r"tensor\(([\d.]+), requires_grad=True\)", printed)
    assert len(borders) == 2
    assert all(0.4 < float(border) < 0.6 for border in borders)


def every_saved_program_is_loaded_and_runs(names: Names, printed: str) -> None:
    assert printed.count("Epoch") == 4
    assert torch.isfinite(names["prediction"]).all()


def grouped_weights_train_as_the_whole_matrix(names: Names, printed: str) -> None:
    whole = torch.tensor(names["prob_W_init"], requires_grad=True)
    data = torch.tensor(names["prob_X"])
    losses = []
    for _ in range(names["prob_steps"]):
        loss = (data @ whole).square().mean()
        (gradient,) = torch.autograd.grad(loss, whole)
        losses.append(loss.item())
        with torch.no_grad():
            whole -= 0.01 * gradient
    found = torch.tensor(names["pt_losses"]).to(torch.float32)
    torch.testing.assert_close(found, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    final = torch.tensor(names["pt_W_final"])
    torch.testing.assert_close(final, whole.detach(), rtol=1e-4, atol=1e-5)


def every_accuracy_is_the_share_of_250_samples(names: Names, printed: str) -> None:
    found = [float(text) for text in re.findall(r"Accuracy: ([\d.]+)%", printed)]
    assert len(found) == 8
    assert all(0 < accuracy < 100 for accuracy in found)
    right = [accuracy / 100 * 250 for accuracy in found]
    assert all(abs(count - round(count)) < 0.02 for count in right)


def inference_follows_training_and_the_host(names: Names, printed: str) -> None:
    losses = [float(x) for x in re.findall(r"^\d+: ([\d.e-]+)", printed, re.MULTILINE)]
    assert len(losses) == 800
    assert losses[-1] < losses[0] / 100
    on_device, on_host, after = re.findall(r"tensor\(\[([^]]*)\]", printed)[-3:]
    assert on_device.split() == on_host.split()
    assert after.split() != on_host.split()


def the_questions_have_the_scores_of_plain_pytorch(names: Names, printed: str) -> None:
    given = names["input_batch"], names["attention_batch"]
    start, end = names["model"](*given)
    torch.testing.assert_close(names["start_score_pop"], start.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(names["end_scores_pop"], end.detach(), rtol=1e-3, atol=1e-4)
    assert printed.count("Answer :") == 4


def the_outputs_are_those_of_plain_pytorch(names: Names, printed: str) -> None:
    torch.manual_seed(0)
    inputs = torch.cat([torch.randn(1, 3) for _ in range(5)]).view(5, 1, -1)
    hidden = torch.randn(1, 1, 3), torch.randn(1, 1, 3)
    out, last = names["SimpleLSTM"]()(inputs, hidden)
    torch.testing.assert_close(names["inputs"], inputs)
    torch.testing.assert_close(names["out"], out.detach())
    torch.testing.assert_close(names["hidden"], tuple(state.detach() for state in last))


def twenty_steps_train_the_network_above_chance(names: Names, printed: str) -> None:
    assert "Done training" in printed
    ((samples, correct),) = re.findall(r"Validation: of (\d+) samples we got: ([\d.]+)%", printed)
    assert int(samples) == 2000
    assert float(correct) > 15


def the_sum_is_right(names: Names, printed: str) -> None:
    assert printed.endswith("Success\n")


PROGRAMS = (
    Program(
        POPTORCH,
        "docs/user_guide/api.py",
        the_bias_is_trained_to_one_and_the_tensor_was_printed,
        files={"tmp/poptorch.conf": "deviceIterations(2)\n"},
    ),
    Program(
        POPTORCH,
        "docs/user_guide/buffers.py",
        a_plain_tensor_counts_once_and_a_buffer_counts_calls,
    ),
    Program(
        POPTORCH,
        "docs/user_guide/debugging.py",
        the_anchors_are_the_gradient_and_the_new_weight_of_plain_pytorch,
    ),
    Program(POPTORCH, "docs/user_guide/device_iterations.py", every_example_takes_all_its_batches),
    Program(POPTORCH, "docs/user_guide/error_handling.py", every_kind_of_error_reaches_its_handler),
    Program(
        POPTORCH,
        "docs/user_guide/inferenceModel.py",
        the_classes_are_those_of_plain_pytorch_and_half_stays_half,
    ),
    Program(
        POPTORCH,
        "docs/user_guide/mnist.py",
        the_trained_network_knows_most_pictures,
        ("--lr=1e-3",),
    ),
    Program(POPTORCH, "docs/user_guide/phased_execution.py", all_four_phased_models_compile),
    Program(
        POPTORCH,
        "docs/user_guide/pipeline_simple.py",
        the_answers_have_the_scores_of_plain_pytorch,
        without=("assert answer_string",),
    ),
    Program(
        POPTORCH, "docs/user_guide/poptorch_training_simple.py", both_ways_to_train_find_the_border
    ),
    Program(POPTORCH, "docs/user_guide/precompilation.py", every_saved_program_is_loaded_and_runs),
    Program(
        POPTORCH,
        "docs/user_guide/replica_grouped_weights.py",
        grouped_weights_train_as_the_whole_matrix,
    ),
    Program(
        POPTORCH,
        "docs/user_guide/sumAnchorReturnType.py",
        every_accuracy_is_the_share_of_250_samples,
    ),
    Program(POPTORCH, "docs/user_guide/trainingModel.py", inference_follows_training_and_the_host),
    Program(POPTORCH, "examples/bert_ipu.py", the_questions_have_the_scores_of_plain_pytorch),
    Program(POPTORCH, "examples/lstm.py", the_outputs_are_those_of_plain_pytorch),
    Program(POPTORCH, "examples/mnist.py", twenty_steps_train_the_network_above_chance),
    Program(POPTORCH, "examples/simple_adder.py", the_sum_is_right),
)
