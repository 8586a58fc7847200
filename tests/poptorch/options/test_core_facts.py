"""Check that settings of the machine reach the core's options."""

import poptorch
from poptorch.translate import core_options


def test_settings_of_the_machine_reach_the_core():
    options = poptorch.Options()
    plain = core_options(options, training=True)
    assert plain.memory_proportions(2) == ()
    assert plain.sync_pattern == "full"
    options.setAvailableMemoryProportion({"IPU1": 0.25})
    options.syncPattern(poptorch.SyncPattern.ReplicaAndLadder)
    options.TensorLocations.setWeightLocation(
        poptorch.TensorLocationSettings().useIOTilesToLoad().useIOTilesToStore(False)
    )
    core = core_options(options, training=True)
    assert core.memory_proportions(2) == (0.6, 0.25)
    assert core.sync_pattern == "replica_and_ladder"
    weights = core.locations.weights
    assert (weights.io_tiles_to_load, weights.io_tiles_to_store) == (True, False)
    assert not core.locations.activations.io_tiles_to_load
