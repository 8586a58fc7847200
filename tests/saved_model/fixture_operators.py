"""List calls of TensorFlow's operators with each attribute that changes a result, and record them.

A case is a graph with one operator, its inputs and what TensorFlow computes. Inputs that are sizes
are constants in the graph. Imported by `make_fixtures.py` only.
"""

import numpy as np
import tensorflow as tf

v1, raw = tf.compat.v1, tf.raw_ops
rng = np.random.default_rng(1)


def f(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def positive(*shape):
    return np.abs(f(*shape)) + np.float32(0.5)


def ints(*shape, low=-9, high=9):
    return rng.integers(low, high, shape).astype(np.int32)


class Host:
    """A value that is a constant of the graph."""

    def __init__(self, value, dtype=np.int32):
        self.value = np.array(value, dtype)


def cases():
    """Operator, attributes, and inputs by name."""
    x, y, n = f(2, 3, 4), f(2, 3, 4), ints(2, 3, 4)
    m = np.where(ints(2, 3, 4) == 0, 1, ints(2, 3, 4))
    m = np.where(m == 0, 2, m)
    flags, other = rng.random((2, 3, 4)) < 0.5, rng.random((2, 3, 4)) < 0.5
    ties = np.array([[1, 3, 3, 2], [5, 5, 5, 5]], np.float32)
    half = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.7], np.float32)
    image = f(2, 7, 6, 4)
    for name in (
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "Maximum",
        "Minimum",
        "SquaredDifference",
        "RealDiv",
        "Div",
    ):
        yield name, {}, {"x": x, "y": y}
    for name in ("Add", "Sub", "Mul", "FloorDiv", "FloorMod", "Maximum", "Div"):
        yield name, {}, {"x": n, "y": m}
    for name in ("FloorDiv", "FloorMod"):
        yield name, {}, {"x": x, "y": y}
    for name in ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"):
        yield name, {}, {"x": n, "y": m}
    for name in ("LogicalAnd", "LogicalOr"):
        yield name, {}, {"x": flags, "y": other}
    yield "LogicalNot", {}, {"x": flags}
    yield "Pow", {}, {"x": positive(3), "y": f(3)}
    yield "AddV2", {}, {"x": x, "y": f(4)}
    for name in (
        "Neg",
        "Abs",
        "Square",
        "Exp",
        "Expm1",
        "Erf",
        "Erfc",
        "Tanh",
        "Sin",
        "Cos",
        "Sigmoid",
    ):
        yield name, {}, {"x": x}
    for name in ("Sqrt", "Rsqrt", "Log", "Log1p", "Reciprocal"):
        yield name, {}, {"x": positive(2, 3)}
    for name in ("Floor", "Ceil", "Round", "Sign"):
        yield name, {}, {"x": half}
    for name in ("Relu", "Relu6", "Elu", "Selu", "Softplus"):
        yield name, {}, {"features": 4 * x}
    for alpha in (0.2, 0.5):
        yield "LeakyRelu", {"alpha": alpha}, {"features": x}
    for name in ("Softmax", "LogSoftmax"):
        yield name, {}, {"logits": x}
    yield "AddN", {}, {"inputs": [x, y, x]}
    low, high = np.float32(-0.5), np.float32(0.5)
    yield "ClipByValue", {}, {"t": x, "clip_value_min": low, "clip_value_max": high}
    for dtype in (tf.int32, tf.int64, tf.bool, tf.float16):
        yield "Cast", {"DstT": dtype}, {"x": half}
    yield "Select", {}, {"condition": flags, "x": x, "y": y}
    yield "Select", {}, {"condition": np.array([True, False]), "x": x, "y": y}
    yield "SelectV2", {}, {"condition": flags[0], "t": x, "e": f(1, 3, 4)}
    a, b = f(3, 4), f(4, 5)
    yield "MatMul", {}, {"a": a, "b": b}
    yield "MatMul", {"transpose_a": True, "transpose_b": True}, {"a": a.T.copy(), "b": b.T.copy()}
    for name in ("BatchMatMul", "BatchMatMulV2"):
        yield name, {}, {"x": f(2, 3, 4), "y": f(2, 4, 5)}
        yield name, {"adj_x": True, "adj_y": True}, {"x": f(2, 4, 3), "y": f(2, 5, 4)}
    yield (
        "BatchMatMulV3",
        {"Tout": tf.float32, "adj_y": True},
        {"x": f(2, 1, 3, 4), "y": f(2, 5, 4)},
    )
    yield "Einsum", {"equation": "bij,bjk->bik"}, {"inputs": [f(2, 3, 4), f(2, 4, 5)]}
    yield "Einsum", {"equation": "...i,ij->...j"}, {"inputs": [f(2, 3, 4), f(4, 5)]}
    yield "BiasAdd", {}, {"value": image, "bias": f(4)}
    yield "BiasAdd", {"data_format": "NCHW"}, {"value": f(2, 4, 3, 3), "bias": f(4)}
    for out in (tf.int32, tf.int64):
        yield "Shape", {"out_type": out}, {"input": x}
        yield "Size", {"out_type": out}, {"input": x}
    yield "Rank", {}, {"input": x}
    yield "Reshape", {}, {"tensor": x, "shape": Host([4, -1])}
    yield "ExpandDims", {}, {"input": x, "axis": Host(-2)}
    yield "Squeeze", {}, {"input": f(1, 3, 1)}
    yield "Squeeze", {"axis": [-1]}, {"input": f(1, 3, 1)}
    yield "Transpose", {}, {"x": x, "perm": Host([2, 0, 1])}
    yield "BroadcastTo", {}, {"input": f(3, 1), "shape": Host([2, 3, 4])}
    yield "Fill", {}, {"dims": Host([2, 3]), "value": np.float32(1.5)}
    yield "Fill", {}, {"dims": Host([3]), "value": Host(2)}
    yield "ZerosLike", {}, {"x": x}
    yield "OnesLike", {}, {"x": n}
    yield "Range", {}, {"start": Host(2), "limit": Host(11), "delta": Host(3)}
    yield "Range", {}, {"start": Host(100), "limit": Host(0), "delta": Host(-1)}
    slices = {"begin": Host([0, 2, 3]), "end": Host([2, 0, 1]), "strides": Host([1, -1, -2])}
    yield "StridedSlice", {}, {"input": x, **slices}
    yield "StridedSlice", {"begin_mask": 6, "end_mask": 2}, {"input": x, **slices}
    yield "StridedSlice", {"shrink_axis_mask": 1, "end_mask": 2}, {"input": x, **slices}
    more = {"begin": Host([0, 0, 1]), "end": Host([0, 0, 3]), "strides": Host([1, 1, 1])}
    yield "StridedSlice", {"ellipsis_mask": 1, "new_axis_mask": 2}, {"input": x, **more}
    yield "StridedSlice", {"ellipsis_mask": 2, "shrink_axis_mask": 5}, {"input": x, **more}
    yield "Slice", {}, {"input": x, "begin": Host([0, 1, 1]), "size": Host([2, 1, -1])}
    for axis in (0, -1):
        yield "ConcatV2", {}, {"values": [x, y], "axis": Host(axis)}
        yield "Pack", {"axis": axis}, {"values": [x, y]}
        yield "Unpack", {"axis": axis, "num": 2 if axis == 0 else 4}, {"value": x}
    yield "Split", {"num_split": 2}, {"axis": Host(2), "value": x}
    yield "SplitV", {"num_split": 2}, {"value": x, "size_splits": Host([-1, 1]), "axis": Host(1)}
    yield "Tile", {}, {"input": x, "multiples": Host([1, 2, 3])}
    picked = np.array([[2, 0], [1, 1]], np.int32)
    yield "Gather", {}, {"params": f(3, 4), "indices": picked}
    yield "GatherV2", {}, {"params": x, "indices": picked, "axis": Host(1)}
    yield "GatherV2", {}, {"params": x, "indices": picked, "axis": Host(-1)}
    yield "GatherV2", {"batch_dims": 1}, {"params": x, "indices": picked, "axis": Host(1)}
    yield "GatherV2", {"batch_dims": 1}, {"params": x, "indices": picked, "axis": Host(2)}
    yield "GatherNd", {}, {"params": x, "indices": np.array([[1, 2], [0, 0]], np.int32)}
    yield "ReverseV2", {}, {"tensor": x, "axis": Host([0, -1])}
    pads = Host([[0, 0], [1, 2], [2, 1]])
    yield "Pad", {}, {"input": x, "paddings": pads}
    yield "PadV2", {}, {"input": x, "paddings": pads, "constant_values": np.float32(3)}
    for mode in ("REFLECT", "SYMMETRIC"):
        yield "MirrorPad", {"mode": mode}, {"input": x, "paddings": pads}
    hot = {"indices": np.array([[0, -1], [3, 2]], np.int32), "depth": Host(3)}
    for axis in (-1, 0, 1):
        yield (
            "OneHot",
            {"axis": axis},
            {**hot, "on_value": np.float32(2), "off_value": np.float32(-1)},
        )
    yield "OneHot", {}, {**hot, "on_value": np.int32(5), "off_value": np.int32(7)}
    for limits in ((1, 0), (-1, 1), (0, -1), (-1, -1)):
        yield (
            "MatrixBandPart",
            {},
            {"input": x, "num_lower": Host(limits[0]), "num_upper": Host(limits[1])},
        )
    for name in ("Sum", "Mean", "Max", "Min", "Prod"):
        for axes, keep in (([0, -1], False), ([1], True), ([], False)):
            yield name, {"keep_dims": keep}, {"input": x, "axis": Host(axes)}
    yield "Sum", {}, {"input": n, "axis": Host([0])}
    for name in ("All", "Any"):
        for axes, keep in (([0, 2], False), ([1], True)):
            yield name, {"keep_dims": keep}, {"input": flags, "axis": Host(axes)}
    for axis in (0, 1, -1):
        yield "ArgMax", {}, {"input": ties, "dimension": Host(axis)}
    yield "ArgMax", {"output_type": tf.int32}, {"input": x, "dimension": Host(2)}
    yield "TopKV2", {}, {"input": ties, "k": Host(3)}
    yield "TopKV2", {}, {"input": x, "k": Host(2)}
    for exclusive in (False, True):
        for backwards in (False, True):
            yield (
                "Cumsum",
                {"exclusive": exclusive, "reverse": backwards},
                {"x": x, "axis": Host(1)},
            )
    yield "L2Loss", {}, {"t": x}
    four = {"strides": [1, 2, 1, 1], "dilations": [1, 1, 1, 1]}
    kernel = f(3, 2, 4, 5)
    for padding in ("SAME", "VALID"):
        yield (
            "Conv2D",
            {**four, "strides": [1, 2, 3, 1], "padding": padding},
            {"input": image, "filter": kernel},
        )
        yield (
            "MaxPool",
            {"ksize": [1, 3, 2, 1], "strides": [1, 2, 1, 1], "padding": padding},
            {"input": image},
        )
        yield (
            "AvgPool",
            {"ksize": [1, 3, 2, 1], "strides": [1, 2, 1, 1], "padding": padding},
            {"value": image},
        )
        yield (
            "DepthwiseConv2dNative",
            {"strides": [1, 2, 2, 1], "padding": padding},
            {"input": image, "filter": f(3, 3, 4, 2)},
        )
    explicit = [0, 0, 2, 1, 0, 3, 0, 0]
    yield (
        "Conv2D",
        {"strides": [1, 1, 1, 1], "padding": "EXPLICIT", "explicit_paddings": explicit},
        {"input": image, "filter": kernel},
    )
    yield (
        "Conv2D",
        {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": [1, 2, 2, 1]},
        {"input": image, "filter": kernel},
    )
    for padding, size in (("SAME", [2, 9, 7, 3]), ("VALID", [2, 10, 7, 3])):
        small = f(2, 5, 4, 4) if padding == "SAME" else f(2, 4, 3, 4)
        yield (
            "Conv2DBackpropInput",
            {"strides": [1, 2, 2, 1], "padding": padding},
            {"input_sizes": Host(size), "filter": f(3, 2, 3, 4), "out_backprop": small},
        )
    norm = {"scale": f(4), "offset": f(4), "mean": f(4), "variance": positive(4)}
    for name in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
        yield name, {"is_training": False, "epsilon": 0.01}, {"x": image, **norm}
        yield name, {"is_training": False}, {"x": image, **norm}
    none = {**norm, "mean": np.zeros(0, np.float32), "variance": np.zeros(0, np.float32)}
    yield "FusedBatchNormV3", {"is_training": True}, {"x": image, **none}
    yield "LRN", {}, {"input": image}
    yield "LRN", {"depth_radius": 1, "bias": 2.0, "alpha": 0.3, "beta": 0.7}, {"input": image}
    for name in ("ResizeBilinear", "ResizeNearestNeighbor"):
        for size in ([11, 4], [3, 12], [1, 1]):
            for half_pixel, corners in ((False, False), (True, False), (False, True)):
                attributes = {"half_pixel_centers": half_pixel, "align_corners": corners}
                yield name, attributes, {"images": image, "size": Host(size)}
    yield (
        "SpaceToBatchND",
        {},
        {"input": image, "block_shape": Host([2, 3]), "paddings": Host([[1, 0], [0, 0]])},
    )
    yield (
        "BatchToSpaceND",
        {},
        {"input": f(12, 4, 2, 3), "block_shape": Host([2, 3]), "crops": Host([[1, 0], [0, 2]])},
    )
    yield "DepthToSpace", {"block_size": 2}, {"input": f(2, 3, 4, 8)}
    yield "SpaceToDepth", {"block_size": 2}, {"input": f(2, 4, 6, 3)}


def write_cases(path):
    """Store each case: `<i>/graph`, `<i>/in/<name>`, `<i>/out/<index>`."""
    parts, count = {}, 0
    for index, (name, attributes, inputs) in enumerate(cases()):
        with v1.Session(graph=tf.Graph()) as session:
            feeds, arguments = {}, {}
            for key, value in inputs.items():
                items = value if isinstance(value, list) else [value]
                tensors = []
                for place, item in enumerate(items):
                    if isinstance(item, Host):
                        tensors.append(tf.constant(item.value))
                    else:
                        tensors.append(v1.placeholder(item.dtype, item.shape, f"{key}_{place}"))
                        feeds[tensors[-1]] = item
                arguments[key] = tensors if isinstance(value, list) else tensors[0]
            result = getattr(raw, name)(**arguments, **attributes, name="case")
            results = list(result) if isinstance(result, list | tuple) else [result]
            results = results[:1] if name.startswith("FusedBatchNorm") else results
            outputs = session.run(results, feeds)
            parts[f"{index}/graph"] = np.frombuffer(
                session.graph.as_graph_def().SerializeToString(), np.uint8
            )
        parts |= {f"{index}/in/{tensor.op.name}": value for tensor, value in feeds.items()}
        parts |= {f"{index}/out/{i}": value for i, value in enumerate(outputs)}
        count = index + 1
    np.savez_compressed(path, count=count, **parts)
