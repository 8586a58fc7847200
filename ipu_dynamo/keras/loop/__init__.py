"""Do what `fit`, `evaluate`, `predict` and the like of extended models do.

Steps, data, results and callbacks; the programs themselves are made in `step/`. Every thread that
is started here has ended when the method returns or raises.
"""

from ipu_dynamo.keras.loop.evaluate import evaluate as evaluate
from ipu_dynamo.keras.loop.execution import is_execution_function as is_execution_function
from ipu_dynamo.keras.loop.execution import make_predict_function as make_predict_function
from ipu_dynamo.keras.loop.execution import make_test_function as make_test_function
from ipu_dynamo.keras.loop.execution import make_train_function as make_train_function
from ipu_dynamo.keras.loop.fit import fit as fit
from ipu_dynamo.keras.loop.on_batch import evaluate_on_batch as evaluate_on_batch
from ipu_dynamo.keras.loop.on_batch import predict_on_batch as predict_on_batch
from ipu_dynamo.keras.loop.on_batch import train_on_batch as train_on_batch
from ipu_dynamo.keras.loop.predict import predict as predict
from ipu_dynamo.keras.loop.results import metrics_result as metrics_result
