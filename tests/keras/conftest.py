"""Choose Keras' backend before anything imports Keras."""

import os

os.environ["KERAS_BACKEND"] = "torch"
