"""Check that keys of random streams are all different and stay what they are."""

import torch

from ipu_dynamo.program.random_keys import random_keys


def keys(seed=0, step=0, iterations=1, accumulation=1, replicas=1):
    own = replicas if isinstance(replicas, range) else range(replicas)
    found = random_keys(
        seed=seed, step=step, iterations=iterations, accumulation=accumulation, replicas=own
    )
    return [tuple(key.tolist()) for key in found]


def test_a_key_is_two_int32_words():
    (key,) = random_keys(seed=1, step=2, iterations=1, accumulation=1, replicas=range(1))
    assert key.dtype == torch.int32
    assert key.shape == (2,)


def test_every_micro_batch_replica_step_and_seed_has_another_key():
    found = [
        key for seed in range(4) for step in range(0, 15, 3) for key in keys(seed, step, 3, 4, 2)
    ]
    assert len(found) == len(set(found)) == 4 * 5 * 24
    words = [word for key in found for word in key]
    assert len(set(words)) > 0.99 * len(words)


def test_keys_come_by_iteration_then_step_then_replica():
    table = keys(7, 1, 3, 4, 2)
    assert keys(7, 1, 1, 1, 1) == table[:1]
    assert keys(7, 1, 1, 4, 2) == table[:8]
    assert keys(7, 1, 3, 1, 1) == table[::8]


def test_how_steps_are_grouped_into_calls_changes_no_key():
    assert keys(7, 5, 4, 2, 3) == [key for step in range(5, 9) for key in keys(7, step, 1, 2, 3)]


def test_some_replicas_have_their_keys_among_all():
    table = keys(7, 1, 3, 4, 5)
    own = [key for place, key in enumerate(table) if place % 5 in range(2, 4)]
    assert keys(7, 1, 3, 4, range(2, 4)) == own


def test_keys_are_part_of_the_results_and_never_change():
    assert keys(42, 3) == [(-160169749, -1546545994)]


def test_seeds_are_taken_modulo_2_to_the_64():
    assert keys(-1) == keys(2**64 - 1)
    assert keys(2**64) == keys(0)
