"""Build small models for tests of stages; call inside or outside of a scope, as a test needs."""

import keras

D = keras.layers.Dense


def branches():
    """Two branches of one layer that is called twice, an operation, and a layer on both."""
    inputs = keras.Input((3,), name="x")
    shared = D(3, name="shared")
    left = shared(inputs)
    right = D(3, name="right")(shared(left))
    summed = keras.ops.relu(left + right)
    return keras.Model(inputs, D(1, name="last")(summed), name="branches")


def nesting(kind="functional"):
    """A model with a model inside that is called twice."""
    inner = keras.Sequential([keras.Input((3,)), D(4, name="a"), D(3, name="b")], name="inner")
    if kind == "functional":
        inputs = keras.Input((3,), name="x")
        hidden = D(3, name="first")(inputs)
        outputs = D(1, name="last")(inner(inner(hidden)))
        return keras.Model(inputs, outputs, name="outer")
    return keras.Sequential([keras.Input((3,)), D(3, name="first"), inner, D(1, name="last")])


class Subclass(keras.Model):
    """A subclass with a shared layer, dropout, an operation and a nested model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shared = D(3, name="shared")
        self.inner = keras.Sequential([keras.Input((3,)), D(3, name="a")], name="inner")
        self.dropout = keras.layers.Dropout(0.5, name="dropout")
        self.last = D(1, name="last")

    def call(self, x, training=None):
        x = self.shared(self.shared(x))
        x = self.dropout(self.inner(x) + 1.0, training=training)
        return self.last(x)


def fill(assignment, stages):
    """Set the stages of elements, in order at every depth; return the list."""
    stages = iter(stages)

    def walk(elements):
        for element in elements:
            if element.is_nested_model:
                walk(element.pipeline_stage_assignments)
            else:
                element.pipeline_stage = next(stages)

    walk(assignment)
    return assignment


def names(assignment):
    """Name and node index of each element; of a nested model its own list."""
    return [
        (element.layer.name, element.node_index)
        if not element.is_nested_model
        else (element.layer.name, element.node_index, names(element.pipeline_stage_assignments))
        for element in assignment
    ]
