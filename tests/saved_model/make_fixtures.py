"""Save small models with TensorFlow, and what it computes with them: run by hand, see README.md.

Everything is written beside this file into `fixtures/`: a folder for each model, with `results.npz`
of its inputs (`in/...`) and outputs (`out/...`), and `op_cases.npz`.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent / "fixtures"
v1 = tf.compat.v1
rng = np.random.default_rng(0)


def values(*shape, scale=0.5):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def record(folder, key, inputs, tags=("serve",)):
    """Store what TensorFlow computes for inputs."""
    with v1.Session(graph=tf.Graph()) as session:
        graph = v1.saved_model.load(session, list(tags), str(folder))
        signature = graph.signature_def[key]
        feeds = {signature.inputs[name].name: value for name, value in inputs.items()}
        fetches = {name: info.name for name, info in signature.outputs.items()}
        outputs = session.run(fetches, feeds)
    texts = {name for name, value in inputs.items() if value.dtype == object}
    parts = {f"in/{name}": value for name, value in inputs.items() if name not in texts}
    parts |= {f"out/{name}": value for name, value in outputs.items()}
    np.savez(folder / f"{'+'.join(tags)}-{key}.npz", **parts)


def save_module(name, function, inputs, signatures=None, owner=None):
    """Save a function of tensors, with the variables that `owner` holds."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    module = owner or tf.Module()
    specs = [
        tf.TensorSpec([None, *value.shape[1:]], value.dtype, name=key)
        for key, value in inputs.items()
    ]
    module.call = tf.function(function, input_signature=specs)
    tf.saved_model.save(module, str(folder), signatures=signatures or module.call)
    (folder / "fingerprint.pb").unlink(missing_ok=True)
    return folder


def simple(name, function, inputs, owner=None):
    record(save_module(name, function, inputs, owner=owner), "serving_default", inputs)


class Layers(tf.Module):
    """Variables by name."""

    def weight(self, name, *shape):
        if not hasattr(self, name):
            setattr(self, name, tf.Variable(values(*shape), name=name))
        return getattr(self, name)


def mlp():
    layers = Layers()
    w, b = layers.weight("kernel", 4, 8), layers.weight("bias", 8)

    def call(x):
        with tf.name_scope("dense"):
            h = tf.nn.relu(tf.matmul(x, w) + b)
        return {"y": h, "n": tf.reshape(h, [tf.shape(h)[0] * 2, -1])}

    simple("mlp", call, {"x": values(3, 4)}, layers)


def resnet_block():
    layers = Layers()
    w0, w1 = layers.weight("w0", 3, 3, 3, 8), layers.weight("w1", 3, 3, 8, 8)
    w2 = layers.weight("w2", 1, 1, 3, 8)
    scale, offset = layers.weight("scale", 8), layers.weight("offset", 8)
    mean, variance = layers.weight("mean", 8), tf.Variable(np.abs(values(8)) + 1, name="variance")
    layers.variance = variance

    def norm(x):
        return v1.nn.fused_batch_norm(x, scale, offset, mean, variance, is_training=False)[0]

    def call(x):
        h = tf.nn.relu(norm(tf.nn.conv2d(x, w0, 2, "SAME")))
        h = norm(tf.nn.conv2d(h, w1, 1, "SAME"))
        h = tf.nn.relu(h + tf.nn.conv2d(x, w2, 2, "VALID"))
        pooled = tf.nn.max_pool2d(h, 3, 2, "SAME")
        return {"pooled": tf.reduce_mean(pooled, [1, 2]), "mean": tf.nn.avg_pool2d(h, 3, 1, "SAME")}

    simple("resnet_block", call, {"x": values(2, 11, 9, 3)}, layers)


def mobilenet_block():
    layers = Layers()
    depth, point = layers.weight("depth", 3, 3, 4, 2), layers.weight("point", 1, 1, 8, 6)

    def call(x):
        h = tf.nn.relu6(tf.nn.depthwise_conv2d(x, depth, [1, 2, 2, 1], "SAME") * 4)
        h = tf.pad(h, [[0, 0], [1, 0], [0, 1], [0, 0]])
        return {"y": tf.nn.conv2d(h, point, 1, "VALID")}

    simple("mobilenet_block", call, {"x": values(2, 10, 7, 4)}, layers)


def dilated():
    layers = Layers()
    w = layers.weight("w", 3, 3, 2, 4)

    def call(x):
        return {
            "attribute": tf.nn.conv2d(x, w, 1, "SAME", dilations=2),
            "space": tf.nn.convolution(x, w, padding="VALID", dilations=[2, 3]),
            "back": tf.nn.conv2d_transpose(x, w[:, :, :2, :2], [2, 23, 20, 2], 2, "SAME"),
        }

    folder = HERE / "dilated"
    shutil.rmtree(folder, ignore_errors=True)
    layers.call = tf.function(call, input_signature=[tf.TensorSpec([2, 12, 10, 2], name="x")])
    tf.saved_model.save(layers, str(folder), signatures=layers.call)
    record(folder, "serving_default", {"x": values(2, 12, 10, 2)})


def attention():
    layers = Layers()
    table, position = layers.weight("table", 20, 8), layers.weight("position", 6, 8)
    q, k, v = (layers.weight(n, 8, 2, 4) for n in ("query", "key", "value"))
    out, gamma, beta = (
        layers.weight("out", 2, 4, 8),
        layers.weight("gamma", 8),
        layers.weight("beta", 8),
    )

    def norm(x):
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * gamma + beta

    def call(ids, mask):
        x = tf.nn.embedding_lookup(table, ids) + position[: tf.shape(ids)[1]]
        scores = tf.einsum("bqhd,bkhd->bhqk", *(tf.einsum("bse,ehd->bshd", x, w) for w in (q, k)))
        scores -= 1e4 * (1 - tf.cast(mask[:, tf.newaxis, tf.newaxis, :], tf.float32))
        mixed = tf.einsum(
            "bhqk,bkhd->bqhd", tf.nn.softmax(scores / 2.0), tf.einsum("bse,ehd->bshd", x, v)
        )
        y = norm(x + tf.einsum("bqhd,hde->bqe", mixed, out))
        return {"y": y, "first": y[:, 0], "last": y[..., ::-1]}

    ids = rng.integers(0, 20, (3, 6)).astype(np.int32)
    mask = (rng.random((3, 6)) < 0.8).astype(np.int64)
    simple("attention", call, {"ids": ids, "mask": mask}, layers)


def gelus():
    def call(x):
        return {
            "exact": tf.nn.gelu(x),
            "tanh": tf.nn.gelu(x, approximate=True),
            "erf": x * 0.5 * (1.0 + tf.math.erf(x / tf.sqrt(2.0))),
        }

    simple("gelus", call, {"x": values(4, 5, scale=2)})


def two_signatures():
    layers = Layers()
    w = layers.weight("w", 4, 3)
    spec = [tf.TensorSpec([None, 4], name="x")]
    layers.scores = tf.function(lambda x: {"scores": x @ w}, input_signature=spec)
    layers.best = tf.function(
        lambda x: {"best": tf.argmax(x @ w, -1), "top": tf.math.top_k(x @ w, 2).values},
        input_signature=spec,
    )
    folder = HERE / "two_signatures"
    shutil.rmtree(folder, ignore_errors=True)
    tf.saved_model.save(layers, str(folder), {"scores": layers.scores, "best": layers.best})
    for key in ("scores", "best"):
        record(folder, key, {"x": values(5, 4)})


def tf1(name, build, *, frozen=False, tags=(("serve",),)):
    """Save a graph in the style of TensorFlow 1.15, with variables or with constants for them."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    builder = v1.saved_model.Builder(str(folder))
    for index, tag in enumerate(tags):
        with v1.Session(graph=tf.Graph()) as session:
            inputs, outputs, fed = build(v1)
            session.run(v1.global_variables_initializer())
            if frozen:
                names = [tensor.op.name for tensor in outputs.values()]
                graph = v1.graph_util.convert_variables_to_constants(
                    session, session.graph.as_graph_def(), names
                )
        with v1.Session(graph=tf.Graph()) as session:
            v1.set_random_seed(index)
            if frozen:
                tf.import_graph_def(graph, name="")
                get = session.graph.get_tensor_by_name
                inputs = {key: get(tensor.name) for key, tensor in inputs.items()}
                outputs = {key: get(tensor.name) for key, tensor in outputs.items()}
            else:
                inputs, outputs, fed = build(v1)
                session.run(v1.global_variables_initializer())
            signature = v1.saved_model.signature_def_utils.predict_signature_def(inputs, outputs)
            arguments = (session, list(tag)), {"signature_def_map": {"serving_default": signature}}
            if index:
                builder.add_meta_graph(list(tag), **arguments[1])
            else:
                builder.add_meta_graph_and_variables(*arguments[0], **arguments[1])
    builder.save()
    for tag in tags:
        record(folder, "serving_default", fed, tag)


def tf1_variable(name, shape):
    init = v1.random_uniform_initializer(-0.5, 0.5)
    return v1.get_variable(name, shape, initializer=init, use_resource=False)


def tf1_mlp(v1):
    x = v1.placeholder(tf.float32, [None, 4], "x")
    w, b = tf1_variable("dense/kernel", [4, 6]), tf1_variable("dense/bias", [6])
    h = v1.nn.relu(v1.nn.bias_add(v1.matmul(x, w, name="dense/MatMul"), b), name="dense/Relu")
    return {"x": x}, {"y": v1.div(h, 2.0, name="y")}, {"x": values(3, 4)}


def tf1_branches(v1):
    """Branches of a learning phase, as `tf.layers` wrote them."""
    x = v1.placeholder(tf.float32, [None, 4], "x")
    training = v1.placeholder_with_default(False, [], "training")
    w = tf1_variable("w", [4, 4])
    y = v1.cond(training, lambda: v1.matmul(x, w) * 3.0, lambda: v1.matmul(x, w) + 1.0)
    z = v1.cond(v1.logical_not(training), lambda: v1.tanh(y), lambda: y)
    return {"x": x}, {"z": v1.identity(z, name="z")}, {"x": values(3, 4)}


def tf1_examples(v1):
    """What estimators export: a text that is parsed into features, one with a default."""
    text = v1.placeholder(tf.string, [None], "input_example_tensor")
    features = v1.io.parse_example(
        text,
        {
            "ids": v1.io.FixedLenFeature([6], tf.int64),
            "weight": v1.io.FixedLenFeature([1], tf.float32, [0.5]),
        },
    )
    ids = v1.cast(features["ids"], tf.int32)
    table = tf1_variable("table", [9, 5])
    y = v1.reduce_mean(v1.gather(table, ids), 1) * features["weight"]

    def example(ids, **weight):
        lists = {"ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids))}
        for name, value in weight.items():
            lists[name] = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()

    texts = np.array([example([0, 1, 2, 3, 4, 8]), example([5] * 6)], dtype=object)
    return {"examples": text}, {"y": v1.identity(y, name="y")}, {"examples": texts}


def tf1_bert(v1):
    """A layer of BERT as its authors write it: one-hot embeddings, masks, shapes from tensors."""
    ids = v1.placeholder(tf.int32, [None, 6], "input_ids")
    mask = v1.placeholder(tf.int32, [None, 6], "input_mask")
    assertion = v1.Assert(v1.equal(v1.shape(ids)[1], 6), [v1.shape(ids)], name="Assert")
    with v1.control_dependencies([assertion]):
        flat = v1.reshape(ids, [-1])
    one_hot = v1.one_hot(flat, depth=12)
    size = v1.shape(ids)
    x = v1.reshape(v1.matmul(one_hot, tf1_variable("embeddings", [12, 8])), [size[0], size[1], 8])
    position = v1.slice(tf1_variable("position_embeddings", [9, 8]), [0, 0], [6, -1])
    x += v1.reshape(position, [1, 6, 8])
    extended = v1.cast(v1.reshape(mask, [size[0], 1, size[1]]), tf.float32)
    extended = v1.ones([size[0], size[1], 1], tf.float32) * extended
    rows = v1.reshape(x, [-1, 8])

    def heads(name):
        y = v1.matmul(
            rows, tf1_variable(f"layer_0/{name}/kernel", [8, 8]), name=f"layer_0/{name}/MatMul"
        )
        y = v1.nn.bias_add(y, tf1_variable(f"layer_0/{name}/bias", [8]))
        return v1.transpose(v1.reshape(y, [size[0], size[1], 2, 4]), [0, 2, 1, 3])

    scores = v1.multiply(v1.matmul(heads("query"), heads("key"), transpose_b=True), 0.5)
    scores += (1.0 - v1.expand_dims(extended, [1])) * -10000.0
    y = v1.transpose(v1.matmul(v1.nn.softmax(scores), heads("value")), [0, 2, 1, 3])
    y = v1.reshape(y, [-1, 8])
    mean = v1.reduce_mean(y, [-1], keepdims=True)
    variance = v1.reduce_mean(v1.squared_difference(y, v1.stop_gradient(mean)), [-1], keepdims=True)
    y = (y - mean) * v1.rsqrt(variance + 1e-12)
    inner = v1.matmul(y, tf1_variable("layer_0/intermediate/dense/kernel", [8, 16]))
    inner = inner * 0.5 * (1.0 + v1.erf(inner / v1.sqrt(2.0)))
    first = v1.squeeze(v1.reshape(y, [size[0], size[1], 8])[:, 0:1, :], axis=1)
    outputs = {"logits": v1.tanh(first, name="logits"), "inner": v1.identity(inner, name="inner")}
    feeds = rng.integers(0, 12, (2, 6)).astype(np.int32), np.ones((2, 6), np.int32)
    feeds[1][0, 4:] = 0
    return (
        {"input_ids": ids, "input_mask": mask},
        outputs,
        dict(zip(("input_ids", "input_mask"), feeds, strict=True)),
    )


def lstm():
    layers = Layers()
    w = layers.weight("w", 6, 4)

    def call(x):
        state = tf.zeros([tf.shape(x)[0], 4])
        for step in tf.range(tf.shape(x)[1]):
            state = tf.tanh(tf.concat([x[:, step], state], -1) @ w)
        return {"y": state}

    save_module("loop", call, {"x": values(2, 5, 2)}, owner=layers)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from fixture_operators import write_cases

    HERE.mkdir(exist_ok=True)
    for make in (
        mlp,
        resnet_block,
        mobilenet_block,
        dilated,
        attention,
        gelus,
        two_signatures,
        lstm,
    ):
        make()
    tf1("tf1_variables", tf1_mlp)
    tf1("tf1_frozen", tf1_mlp, frozen=True)
    tf1("tf1_bert", tf1_bert)
    tf1("tf1_examples", tf1_examples)
    v1.disable_control_flow_v2()
    tf1("tf1_branches", tf1_branches)
    v1.enable_control_flow_v2()
    tf1("tf1_tag_sets", tf1_mlp, tags=(("serve",), ("serve", "gpu")))
    write_cases(HERE / "op_cases.npz")
    for path in HERE.rglob("fingerprint.pb"):
        path.unlink()
    print("written with TensorFlow", tf.__version__)
