"""List the public programs whose names are looked up, and members that only PopTorch's classes
have."""

from tests.programs.program import Repository
from tests.programs.tutorials import EXAMPLES

ROOTS = frozenset({"poptorch", "popart", "popdist"})
METHODS = frozenset(
    [
        "accumulationAndReplicationReductionType",
        "anchorTensor",
        "appendToLocationExcludes",
        "attachToDevice",
        "autoRoundNumIPUs",
        "availableMemoryProportions",
        "broadcastBuffers",
        "combinedBatchSize",
        "compilationTime",
        "compileAndExport",
        "configureProcessId",
        "connectionType",
        "copyNamedBuffersToDevice",
        "copyWeightsToDevice",
        "copyWeightsToHost",
        "copyWeightsToHostIfNeeded",
        "cycleBackOff",
        "cycleCount",
        "defaultOutputMode",
        "detachFromDevice",
        "deviceIterations",
        "disableModuleNamescope",
        "enableConvDithering",
        "enableExecutableCaching",
        "enableFloatingPointExceptions",
        "enableProfiling",
        "enableStableNorm",
        "enableStochasticRounding",
        "enableSyntheticData",
        "getAnchoredTensor",
        "getComputeLatency",
        "getHostIpuLatency",
        "getIpuHostLatency",
        "getLatency",
        "getPerfCounters",
        "getTensorNames",
        "gradientAccumulation",
        "halfFloatCasting",
        "inputReplicaGrouping",
        "ipu_state_is_dirty",
        "isAttachedToDevice",
        "isCompiled",
        "loadExecutable",
        "loadFromFile",
        "logCycleCount",
        "logDir",
        "markAsConstant",
        "markAsVariable",
        "maxRepeatLogs",
        "minElementsForOffChip",
        "minElementsForReplicatedTensorSharding",
        "modelName",
        "numIOTiles",
        "numProcesses",
        "outputMode",
        "partialsTypes",
        "perConvReservedTiles",
        "per_replica_params",
        "planType",
        "processId",
        "randomSeed",
        "relaxOptimizerAttributesChecks",
        "replicaGrouping",
        "replicationFactor",
        "rng_state",
        "runningStatisticsAlwaysFloat",
        "sendTensorsOffChipAfterFwd",
        "setAccumulatorLocation",
        "setActivationLocation",
        "setAutomaticLossScaling",
        "setAvailableMemoryProportion",
        "setConvolutionDithering",
        "setEngineOptions",
        "setEnvVarNames",
        "setExecutionStrategy",
        "setMeanAccumulationAndReplicationReductionStrategy",
        "setOptimizer",
        "setOptimizerLocation",
        "setPartialsType",
        "setPatterns",
        "setTensorsLiveness",
        "setWeightLocation",
        "showCompilationProgressBar",
        "sourceLocationExcludes",
        "syncPattern",
        "traceModel",
        "updatableNamedBuffers",
        "useIOTilesToLoad",
        "useIOTilesToStore",
        "useIpuId",
        "useIpuModel",
        "useOfflineIpuTarget",
        "useOnChipStorage",
        "useReplicatedTensorSharding",
        "useSeparateBackwardPhase",
        "_combined_batch_size",
        "_executable",
        "_executable_inputs",
        "_optimizer",
        "_options",
        "_popart",
        "_Popart",
        "_user_model",
    ]
)
_NEXT = "HEAD"  # whatever is fetched: these are read, not run


def _repository(name: str) -> Repository:
    return Repository(name.rpartition("/")[2], f"https://github.com/{name}.git", _NEXT)


OPTIMUM = _repository("huggingface/optimum-graphcore")


_PYTORCH = [
    "gnn/cluster_gcn/pytorch_geometric",
    "gnn/fraud_detection/pytorch_geometric",
    "gnn/message_passing/pytorch_geometric",
    "gnn/nbfnet/pytorch_geometric",
    "gnn/schnet/pytorch_geometric",
    "gnn/tgn/pytorch",
    "multimodal/CLIP/pytorch",
    "multimodal/frozen_in_time/pytorch",
    "multimodal/mini_dalle/pytorch",
    "nlp/bert/pytorch",
    "nlp/gpt2/pytorch",
    "preview/multimodal/perceiver_io/pytorch",
    "preview/vision/yolo_v4/pytorch",
    "speech/conformer/pytorch",
    "speech/fastpitch/pytorch",
    "tutorials/tech_notes_code/available_memory",
    "vision/cnns/pytorch-lightning",
    "vision/cnns/pytorch",
    "vision/dino/pytorch",
    "vision/mae/pytorch",
    "vision/swin/pytorch",
    "vision/vit/pytorch",
    "vision/yolo_v4/pytorch",
]
_FEATURES = [f"tutorials/feature_examples/pytorch/{n}" for n in ("custom_op", "octconv", "popdist")]
_SIMPLE = [
    "tutorials/simple_applications/pytorch/bert",
    "tutorials/simple_applications/pytorch/mnist",
    "tutorials/simple_applications/pytorch_lightning/shakespeare-rnn",
    "tutorials/tutorials/popvision/reading_pvti_files",
    "tutorials/tutorials/popvision/system_analyser_instrumentation",
]
_LESSONS = [
    *(
        f"tutorials/tutorials/pytorch/{name}"
        for name in [
            "basics",
            "efficient_data_loading",
            "finetuning_bert",
            "mixed_precision",
            "observing_tensors",
            "pipelining",
        ]
    ),
    *(
        f"tutorials/tutorials/pytorch_geometric/{name}"
        for name in [
            "1_at_a_glance",
            "2_a_worked_example",
            "3_small_graph_batching_with_padding",
            "4_small_graph_batching_with_packing",
            "5_large_graph_sampling",
            "6_heterogeneous_graphs",
        ]
    ),
]
_OTHERS = [
    "Lightning-AI/lightning-Graphcore",
    "graphcore-research/bess-kge",
    "datamol-io/graphium",
    "graphcore-research/hydronet-gnn",
    "jiwoong-choi/poptorchlab",
    "mat-ej/poptorch-lstm-energy",
    "graphcore-research/flash-attention-ipu",
    "graphcore/pytorch-lightning-examples",
    "graphcore-research/pytorch-tensor-tracker",
    "graphcore-research/out-of-the-box-fp8-training",
    "graphcore-research/poptorch-experimental-addons",
    "wunaixin/tut_for_sen",
]
PROGRAMS: dict[Repository, list[str]] = {
    EXAMPLES: [*_PYTORCH, *_FEATURES, *_SIMPLE, *_LESSONS],
    **{_repository(name): [""] for name in _OTHERS},
    OPTIMUM: ["examples/*/run_*.py", "notebooks/**/*.ipynb"],
}
SHARED = {OPTIMUM: "optimum"}  # what each of a repository's programs uses, beside its own files
