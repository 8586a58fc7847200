"""Decode the label sequences of connectionist temporal classification."""

from torch import Tensor

from ipu_dynamo.ops.library.ctc_beam_search import ctc_beam_search
from poptorch.errors import createPoptorchError


def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable label sequences of each sequence of a batch, also outside of models.

    Args:
        probs: logarithms of probabilities, `[time, batch, classes]`.
        lengths: how many time steps each sequence has, `[batch]`.
        blank: the class that is no label.
        beam_width: how many prefixes the search keeps.
        top_paths: how many sequences it returns.

    Returns:
        Logarithms of the paths' probabilities `[batch, top_paths]`, in decreasing order; their
        lengths; their labels `[batch, top_paths, time]`, with `blank` behind the end.

    Raises:
        poptorch.Error: arguments of other types or shapes.
    """
    for name, tensor in (("probs", probs), ("lengths", lengths)):
        if not isinstance(tensor, Tensor):
            raise createPoptorchError(
                f"ctc_beam_search_decoder: {name} must be a torch.tensor, got {tensor!r}",
                id="operator",
            )
    if probs.dim() != 3:
        raise createPoptorchError(
            f"Incorrect shape for first input to CTC beam search decoder: {list(probs.shape)} is "
            "not [time, batch, classes]",
            id="operator",
        )
    try:
        return ctc_beam_search(probs, lengths, blank, beam_width, top_paths)
    except ValueError as error:
        raise createPoptorchError(f"ctc_beam_search_decoder: {error}", id="operator") from error


__all__ = ["ctc_beam_search_decoder"]
