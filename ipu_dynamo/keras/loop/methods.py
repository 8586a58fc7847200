"""Replace the methods of Keras models that execute: in a scope by ours, elsewhere by Keras' own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ipu_dynamo.keras.attach.refusals import check_execution, refuse_in_callback
from ipu_dynamo.keras.attach.thread_state import extensions_active
from ipu_dynamo.keras.loop.evaluate import evaluate
from ipu_dynamo.keras.loop.execution import is_execution_function, make_function
from ipu_dynamo.keras.loop.fit import fit
from ipu_dynamo.keras.loop.on_batch import evaluate_on_batch, predict_on_batch, train_on_batch
from ipu_dynamo.keras.loop.predict import predict
from ipu_dynamo.keras.loop.results import metrics_result

if TYPE_CHECKING:
    from keras import Model as _Base
else:
    _Base = object


class ExecutionMethods(_Base):  # type: ignore[misc]
    """The methods of an extended model that run it; arguments and results are those of Keras."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as a program of the IPUs if a strategy's scope is active.

        Args:
            args: as for Keras.
            kwargs: as for Keras.
        """
        refuse_in_callback(self, "fit")
        if extensions_active():
            check_execution(self, "fit")
            return fit(self, *args, **kwargs)
        return super().fit(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, as a program of the IPUs if a strategy's scope is active.

        Args:
            args: as for Keras.
            kwargs: as for Keras.
        """
        refuse_in_callback(self, "evaluate")
        if extensions_active():
            check_execution(self, "evaluate")
            return evaluate(self, *args, **kwargs)
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict, as a program of the IPUs if a strategy's scope is active.

        Args:
            args: as for Keras.
            kwargs: as for Keras.
        """
        refuse_in_callback(self, "predict")
        if extensions_active():
            check_execution(self, "predict")
            return predict(self, *args, **kwargs)
        return super().predict(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of `fit`, where one batch is a whole execution.

        Args:
            args: as for Keras.
            kwargs: as for Keras.
        """
        refuse_in_callback(self, "train_on_batch")
        if extensions_active():
            check_execution(self, "fit", method="train_on_batch")
            return train_on_batch(self, *args, **kwargs)
        return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of `evaluate`, where one batch is a whole execution.

        Args:
            args: as for Keras.
            kwargs: as for Keras.
        """
        refuse_in_callback(self, "test_on_batch")
        if extensions_active():
            check_execution(self, "evaluate", method="test_on_batch")
            return evaluate_on_batch(self, *args, **kwargs)
        return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of `predict`, where one batch is a whole execution.

        Args:
            args: as for Keras.
            kwargs: as for Keras.
        """
        refuse_in_callback(self, "predict_on_batch")
        if extensions_active():
            check_execution(self, "predict", method="predict_on_batch")
            return predict_on_batch(self, *args, **kwargs)
        return super().predict_on_batch(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """Make `train_function`, which runs an execution of `fit` on a list of batches.

        Args:
            force: as for Keras: make it anew.
        """
        if extensions_active():
            return make_function(self, "fit", force)
        with _steps_need_a_strategy():
            make = super().make_train_function
            return make(force or is_execution_function(self.train_function))

    def make_test_function(self, force: bool = False) -> Any:
        """Make `test_function`, which runs an execution of `evaluate` on a list of batches.

        Args:
            force: as for Keras: make it anew.
        """
        if extensions_active():
            return make_function(self, "evaluate", force)
        with _steps_need_a_strategy():
            make = super().make_test_function
            return make(force or is_execution_function(self.test_function))

    def make_predict_function(self, force: bool = False) -> Any:
        """Make `predict_function`, which runs an execution of `predict` on a list of batches.

        Args:
            force: as for Keras: make it anew.
        """
        if extensions_active():
            return make_function(self, "predict", force)
        with _steps_need_a_strategy():
            make = super().make_predict_function
            return make(force or is_execution_function(self.predict_function))

    def get_metrics_result(self) -> dict[str, Any]:
        """The metrics of the last execution, until the host assigns a variable of theirs."""
        return metrics_result(self, super().get_metrics_result)


@contextmanager
def _steps_need_a_strategy() -> Iterator[None]:
    """Add to Keras' refusal of several steps in one execution that a strategy runs them."""
    try:
        yield
    except ValueError as error:
        if "steps_per_execution" in str(error):
            error.add_note("IPUs run several steps: call this method in `with strategy.scope():`")
        raise
