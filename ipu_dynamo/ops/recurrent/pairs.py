"""List the operators of recurrent layers, and which results only the backward pass reads."""

from typing import Any

from ipu_dynamo.ops.recurrent.gru import gru, gru_backward
from ipu_dynamo.ops.recurrent.lstm import lstm, lstm_backward
from ipu_dynamo.ops.recurrent.rnn import rnn, rnn_backward

RECURRENT: frozenset[Any] = frozenset({gru, gru_backward, lstm, lstm_backward, rnn, rnn_backward})
# By position; the last argument of such an operator says whether they are made.
SAVED: dict[Any, frozenset[int]] = {lstm: frozenset({3, 4}), gru: frozenset({2})}
