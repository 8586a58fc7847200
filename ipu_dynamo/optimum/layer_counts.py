"""Share the layers of a model out to the IPUs of a replica."""

import copy
from collections.abc import Sized
from itertools import accumulate
from typing import Any

from ipu_dynamo.optimum.config import IPUConfig, own_config
from ipu_dynamo.optimum.incompatible import IncompatibleIPUConfigError


def layer_counts(config: IPUConfig, layers: int) -> list[int]:
    """How many layers each IPU has, by the fields of the configuration's mode.

    Args:
        layers: of the model. The wildcards -1 divide the layers that the other entries leave; the
            last one gets the remainder.

    Raises:
        ValueError: fewer than 0 layers.
        IncompatibleIPUConfigError: they do not add up, or the list is no list of counts.
    """
    if layers < 0:
        raise ValueError(f"a model cannot have {layers} layers")
    config = own_config(config)._plain()
    counts, ipus = config._layers_per_ipu, config._ipus_per_replica
    name = config._get_managed_attr_mode_name("layers_per_ipu")
    ipus_name = config._get_managed_attr_mode_name("ipus_per_replica")
    if counts == "auto":
        raise IncompatibleIPUConfigError(
            f'{name}="auto" depends on what layers cost, and their number does not say that: use '
            "plan_layers, or parallelize"
        )
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= -1 for n in counts):
        raise IncompatibleIPUConfigError(f"{name}={counts!r} is no list of counts from -1")
    if not isinstance(ipus, int) or ipus < 1:
        raise IncompatibleIPUConfigError(f"{ipus_name}={ipus!r} is no number of IPUs")
    if ipus == 1:
        return [layers]
    if counts == [-1]:
        counts = [-1] * ipus
    if len(counts) != ipus:
        raise IncompatibleIPUConfigError(
            f"{name} has a non-default value set, but its length does not match {ipus_name}: "
            f"{name}={counts}, {ipus_name}={ipus}"
        )
    fixed, free = sum(n for n in counts if n != -1), counts.count(-1)
    if not free and fixed != layers:
        raise IncompatibleIPUConfigError(
            f"{name} does not define the correct number of layers for the current model: "
            f"{name}={counts} has {fixed}, the model {layers}"
        )
    if fixed > layers:
        raise IncompatibleIPUConfigError(
            f"{name}={counts} has {fixed} layers in its fixed entries, the model {layers}"
        )
    if free:
        each, rest = divmod(layers - fixed, free)
        last = max(ipu for ipu, n in enumerate(counts) if n == -1)
        counts = [
            n if n != -1 else each + (rest if ipu == last else 0) for ipu, n in enumerate(counts)
        ]
    return list(counts)


def get_layer_ipu(config: IPUConfig, target_number_of_layers: int | Sized | None = None) -> Any:
    """The IPU of each layer: with counts [1, 2] it is [0, 1, 1].

    Args:
        config: its mode says which fields count.
        target_number_of_layers: a number, or the layers themselves. None: the entries of
            `layers_per_ipu` count as they are.

    Raises:
        IncompatibleIPUConfigError: the entries do not add up to this number.
    """
    if target_number_of_layers is None:
        counts = own_config(config)._plain()._layers_per_ipu
        if counts == "auto" or -1 in counts:
            raise IncompatibleIPUConfigError(
                f"{counts!r} says nothing without a number of layers; pass it, or use plan_layers"
            )
    elif isinstance(target_number_of_layers, int):
        counts = layer_counts(config, target_number_of_layers)
    else:
        counts = layer_counts(config, len(target_number_of_layers))
    return [ipu for ipu, count in enumerate(counts) for _ in range(count)]


def split_encoder_decoder_ipu_config(
    ipu_config: IPUConfig, num_encoder_layers: int, num_decoder_layers: int
) -> tuple[IPUConfig, IPUConfig]:
    """One configuration for the encoder's IPUs, and one for the decoder's.

    The cut is where the encoder's layers end, after 1, 2, 4, ... IPUs: the latest of these.

    Args:
        ipu_config: of encoder and decoder together; it stays as it is.
        num_encoder_layers: layers of the encoder.
        num_decoder_layers: layers of the decoder.

    Raises:
        IncompatibleIPUConfigError: there are fewer than two IPUs, or no such cut exists.
        ValueError: parts of the embedding on the decoder's IPUs, or of the head on the encoder's.
    """
    config = own_config(ipu_config)._plain()
    ipus = config._ipus_per_replica
    if ipus < 2:
        name = config._get_managed_attr_mode_name("ipus_per_replica")
        raise IncompatibleIPUConfigError(
            f"Need {name} to be at least 2 to split ipu_config into encoder and decoder "
            f"configs, got {ipus}"
        )
    counts = layer_counts(config, num_encoder_layers + num_decoder_layers)
    cuts = [
        ipu
        for ipu, total in enumerate(accumulate(counts[:-1]), start=1)
        if total == num_encoder_layers and ipu.bit_count() == 1
    ]
    if not cuts:
        name = config._get_managed_attr_mode_name("layers_per_ipu")
        raise IncompatibleIPUConfigError(
            f"Unable to find a valid split of ipu_config.{name}: no 1, 2, 4, ... IPUs of "
            f"{counts} have the {num_encoder_layers} layers of the encoder, with "
            f"{num_decoder_layers} of the decoder after them"
        )
    cut = cuts[-1]
    encoder, decoder = copy.deepcopy(config), copy.deepcopy(config)
    for part, own, ipus_of_part in (
        (encoder, slice(0, cut), cut),
        (decoder, slice(cut, ipus), ipus - cut),
    ):
        part._layers_per_ipu = counts[own]
        part._ipus_per_replica = ipus_of_part
        shares = config._matmul_proportion
        if isinstance(shares, list) and len(shares) > 1:
            part._matmul_proportion = shares[own]
    _split_parts(config, "embedding", slice(0, cut), encoder, decoder, "encoder")
    _split_parts(config, "projection", slice(cut, ipus), decoder, encoder, "decoder")
    return encoder, decoder


def _split_parts(
    config: IPUConfig,
    kind: str,
    own: slice,
    owner: IPUConfig,
    other: IPUConfig,
    where: str,
) -> None:
    """Give the parts of a layer to the half that has to have all of them."""
    name = f"_serialized_{kind}_splits_per_ipu"
    splits = getattr(config, name)
    if splits is None:
        return
    if sum(splits[own]) != sum(splits):
        field = config._get_managed_attr_mode_name(name[1:])
        raise ValueError(
            f"{field}={splits} must have all splits placed on the {where}'s IPUs, which are "
            f"{list(range(len(splits)))[own]}"
        )
    setattr(owner, name, splits[own])
    setattr(other, name, None)
    setattr(other, f"_{kind}_serialization_factor", 1)
