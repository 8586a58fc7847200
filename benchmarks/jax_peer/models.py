"""Write the models of the cases in JAX, over PyTorch's parameters by name."""

from typing import Any

from benchmarks.jax_peer.peer import Arrays, jax


def perceptron(p: Arrays, x: Any, y: Any) -> Any:
    """The loss of `Linear, ReLU, Linear`."""
    h = jax().nn.relu(_linear(p, "classifier.0", x))
    return _cross_entropy(_linear(p, "classifier.2", h), y)


def classifier(p: Arrays, x: Any, y: Any, *, layers: int) -> Any:
    """The loss of linear layers with ReLU between them."""
    for number in range(layers - 1):
        x = jax().nn.relu(_linear(p, f"layers.{number}", x))
    return _cross_entropy(_linear(p, f"layers.{layers - 1}", x), y)


def digits(p: Arrays, x: Any, y: Any) -> Any:
    """The loss of the network of the example."""
    tanh, lax = jax().numpy.tanh, jax().lax
    h = tanh(_convolution(p, "conv1", x, padding="SAME"))
    h = tanh(_convolution(p, "conv2", h, padding="SAME"))
    h = lax.reduce_window(h, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4
    h = tanh(_linear(p, "hidden", h.reshape(len(h), -1)))
    return _cross_entropy(_linear(p, "output", h), y)


def stack(p: Arrays, x: Any, y: Any, *, layers: int, heads: int) -> Any:
    """The mean square distance of what layers between two linear ones make from `y`."""
    x = _linear(p, "first", x)
    for number in range(layers):
        x = _layer(p, f"layers.{number}", x, heads)
    return ((_linear(p, "last", x) - y) ** 2).mean()


def mnist(p: Arrays, x: Any, y: Any) -> Any:
    """The loss of PopTorch's first network."""
    relu = jax().nn.relu
    h = relu(_max_pool(_convolution(p, "classifier.0", x)))
    h = relu(_max_pool(_convolution(p, "classifier.3", h)))
    h = relu(_linear(p, "classifier.7", h.reshape(len(h), -1)))
    return _cross_entropy(_linear(p, "classifier.9", h), y)


def language_model(p: Arrays, tokens: Any, targets: Any, *, layers: int, heads: int) -> Any:
    """The loss of predicting the next tokens; the head is the table of words."""
    h = p["words.weight"][tokens] + p["places.weight"]
    for number in range(layers):
        h = _layer(p, f"layers.{number}", h, heads, causal=True)
    logits = _norm(p, "norm", h) @ p["words.weight"].T
    return _cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def encoder(p: Arrays, x: Any, *, layers: int, heads: int) -> Any:
    """Layers, and a norm behind them."""
    for number in range(layers):
        x = _layer(p, str(number), x, heads)
    return _norm(p, str(layers), x)


def lstm(p: Arrays, x: Any, y: Any, *, layers: int) -> Any:
    """The mean square distance of an LSTM's outputs from `y`; one product for all inputs."""
    jnp, sigmoid = jax().numpy, jax().nn.sigmoid
    for number in range(layers):
        w_in, w_hidden, b_in, b_hidden = (
            p[f"layers.{kind}_l{number}"]
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )

        def cell(state: Any, gates: Any, w_hidden: Any = w_hidden) -> Any:
            h, c = state
            i, f, g, o = jnp.split(gates + h @ w_hidden.T, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
            h = sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[1], w_hidden.shape[1]))
        x = jax().lax.scan(cell, (zeros, zeros), x @ w_in.T + (b_in + b_hidden))[1]
    return jnp.mean((x - y) ** 2)


def repeated(p: Arrays, x: Any, *, count: int) -> Any:
    """A layer with tanh, so many times."""
    jnp = jax().numpy
    return jax().lax.fori_loop(0, count, lambda _, h: jnp.tanh(_linear(p, "layer", h)), x)


def _linear(p: Arrays, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _norm(p: Arrays, name: str, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax().lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def _convolution(p: Arrays, name: str, x: Any, padding: str = "VALID") -> Any:
    result = jax().lax.conv(x, p[f"{name}.weight"], (1, 1), padding)
    return result + p[f"{name}.bias"][:, None, None]


def _max_pool(x: Any) -> Any:
    lax, lowest = jax().lax, -jax().numpy.inf
    return lax.reduce_window(x, lowest, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def _cross_entropy(logits: Any, classes: Any) -> Any:
    jnp = jax().numpy
    chosen = jnp.take_along_axis(jax().nn.log_softmax(logits), classes[:, None], axis=1)
    return -chosen.mean()


def _layer(p: Arrays, name: str, x: Any, heads: int, *, causal: bool = False) -> Any:
    """A pre-norm transformer layer on `[batch, length, width]`."""
    nn, (batch, length, width) = jax().nn, x.shape
    attend = _linear(p, f"{name}.attend", _norm(p, f"{name}.norm1", x))
    parts = jax().numpy.moveaxis(attend.reshape(batch, length, 3, heads, -1), 2, 0)
    mixed = nn.dot_product_attention(*parts, is_causal=causal)
    x = x + _linear(p, f"{name}.project", mixed.reshape(batch, length, width))
    h = nn.gelu(_linear(p, f"{name}.up", _norm(p, f"{name}.norm2", x)), approximate=False)
    return x + _linear(p, f"{name}.down", h)
