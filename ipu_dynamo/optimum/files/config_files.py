"""Read the files that releases 0.1.0 to 0.7.1 of Optimum Graphcore wrote, or people by hand.

Each repair is logged once, with key and value. They are made in the order of this page, to each
entry of a dictionary by type of POD.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

IPU_CONFIG_NAME = "ipu_config.json"
GONE = frozenset(  # options of 0.1.0 to 0.3.2 that later releases have not
    {
        "compile_only",
        "decompose_grad_sum",
        "enable_half_first_order_momentum",
        "profile_dir",
        "synthetic_data",
        "use_popdist",
    }
)
# Keys that transformers' base class of configurations writes into each file, and the two versions.
_BASE = """
    _name_or_path add_cross_attention architectures attn_implementation bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length model_type name_or_path no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences optimum_version output_attentions
    output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p use_bfloat16
"""
BASE_KEYS = frozenset(_BASE.split())
_DEEPEST = 100  # objects and lists in each other
_CONVERTED = "matmul_amp"  # in the file of this name of `ipu-saved-model convert`
log = logging.getLogger(__name__)


def read_file(path: str | Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        OSError: it cannot be read, is no JSON, no object, nested too deep, or another tool's.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        read = json.loads(
            text,
            object_pairs_hook=lambda pairs: _last_of_each(pairs, path),
            parse_constant=_refused,
        )
    except OSError as error:
        raise OSError(f"cannot read the configuration {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise OSError(f"the configuration {path} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise OSError(f"the configuration {path} is a {type(read).__name__}, not an object")
    if _deeper_than(read, _DEEPEST):
        raise OSError(f"the configuration {path} is nested deeper than {_DEEPEST}")
    if _CONVERTED in read:
        raise OSError(
            f"{path} is no IPUConfig: with the key {_CONVERTED!r} it is the file of the same name "
            "that `ipu-saved-model convert` writes, for a saved model"
        )
    return read


def _refused(constant: str) -> Any:
    """Refuse NaN and infinite numbers, which only Python reads as JSON."""
    raise ValueError(f"JSON has no {constant}")


def _last_of_each(pairs: list[tuple[str, Any]], path: str | Path) -> dict[str, Any]:
    """An object in which the last of equal keys counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        kept = ", ".join(f"{key}={values[key]!r}" for key in twice)
        log.warning("keys stand twice in %s, and the last ones count: %s", path, kept)
    return values


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested in each other more than so often."""
    inside: list[Any] = [value]
    for _ in range(levels):
        inside = [
            part
            for one in inside
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
    return bool(inside)


def repaired(written: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of a file's object in the form of today.

    Args:
        written: left as it is.
        known: names of all fields.
    """
    values = dict(written)
    _each(values, "embedding_serialization_factor", _is_zero, lambda _: 1)
    _each(values, "layers_per_ipu", _is_int, lambda count: [count])
    _each(values, "executable_cache_dir", lambda folder: folder is None, lambda _: "")
    if "random_seed" in values:
        seed = values.pop("random_seed")
        if values.get("seed") is None:
            values["seed"] = seed
        _say("random_seed", seed, f"seed={values['seed']!r}")
    ipus = values.get("ipus_per_replica")
    if any(_is_int(one) and one > 1 for one in _entries(ipus)):
        _each(values, "layers_per_ipu", lambda layers: layers == [1], lambda _: [-1])
    elif ipus is not None and all(_is_int(one) and one == 1 for one in _entries(ipus)):
        layers = _entries(values.get("layers_per_ipu"))
        if any(isinstance(one, list) and len(one) > 1 and -1 not in one for one in layers):
            del values["ipus_per_replica"]
            _say("ipus_per_replica", ipus, "the length of layers_per_ipu")
    unknown = {
        name: values.pop(name)
        for name in list(values)
        if not (name in known or name in GONE or name in BASE_KEYS)
    }
    if unknown:
        listed = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        log.warning("a configuration has keys that are none of an IPUConfig, ignored: %s", listed)
    return {name: value for name, value in values.items() if name not in BASE_KEYS}


def _each(
    values: dict[str, Any], name: str, old: Callable[[Any], bool], new: Callable[[Any], Any]
) -> None:
    """Replace a value, or each entry of a dictionary by type of POD, if it is of an old form."""
    if name not in values or not any(map(old, _entries(value := values[name]))):
        return
    if isinstance(value, dict):
        values[name] = {key: new(one) if old(one) else one for key, one in value.items()}
    else:
        values[name] = new(value)
    _say(name, value, repr(values[name]))


def _entries(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_zero(value: Any) -> bool:
    return _is_int(value) and value == 0


def _say(name: str, value: Any, read_as: str) -> None:
    log.warning("%s=%r of an old configuration is read as %s", name, value, read_as)
