"""List the applications that Graphcore published, each training a step or more on random data.

They are run as a user does, by their command lines, with small sizes. The name of a check is the
claim.
"""

from collections.abc import Callable, Mapping
from functools import partial
from shlex import split

from tests.programs import downloads, steps
from tests.programs.guide import POPTORCH
from tests.programs.program import Check, Names, Program, Repository
from tests.programs.tutorials import EXAMPLES

_LAUNCHERS = ("horovod.torch", "wandb")  # nothing to do for one process, nothing to log
_OLD_TRANSFORMERS = (
    "transformers==4.26.1",
    "tokenizers==0.13.3",
    "huggingface-hub==0.23.5",
    "requests",
    "urllib3",
    "idna",
    "certifi",
    "charset-normalizer",
)
_TABLES = ("pandas", "python-dateutil", "pytz", "six")
_LIGHTNING = (
    "pytorch-lightning==1.9.0",
    "torchmetrics==0.11.0",
    "lightning-utilities==0.8.0",
    "setuptools==69.5.1",  # pkg_resources
    "numpy==1.26.4",  # numpy.Inf
    "torchvision==0.28.0",
    "pillow",
)
_GEOMETRIC = ("torch-geometric==2.3.1", "psutil", "pyparsing", *_TABLES)
_FIXED_SIZES = ("pyg-nightly==2.4.0.dev20230613", "tabulate", *_GEOMETRIC[1:])
_OF_FIXED_SIZES = {"poptorch_geometric": (POPTORCH, "poptorch_geometric/python")}
_PICTURES = ("torchvision==0.28.0", "pillow", "timm==0.5.4", "yacs", "simplejpeg", "randaugment")
_OLDER_PICTURES = tuple("timm==0.4.12" if p.startswith("timm") else p for p in _PICTURES)


def its_weights_are_trained(names: Names, printed: str) -> None:
    steps.check_that_it_trained()


def _application(
    path: str,
    folder: str,
    arguments: str,
    packages: tuple[str, ...] = (),
    inert: tuple[str, ...] = (),
    *,
    beside: Mapping[str, tuple[Repository, str]] | None = None,
    check: Check = its_weights_are_trained,
    enough: int = 1,
    edits: dict[str, dict[str, str]] | None = None,
    files: tuple[str, ...] = (),
    pictures: tuple[str, ...] = (),
    prepare: Callable[[], None] | None = None,
    sizes: dict[str, str] | None = None,
) -> Program:
    return Program(
        EXAMPLES,
        f"{folder}/{path}",
        check,
        split(arguments),
        folder=folder,
        packages=packages,
        beside=beside or {},
        inert=(*_LAUNCHERS, *inert),
        enough=enough,
        edits=edits or {},
        files=dict.fromkeys(files, ""),
        pictures=pictures,
        prepare=prepare,
        sizes=sizes or {},
    )


PROGRAMS = (
    _application(
        "run_pretraining.py",
        "nlp/bert/pytorch",
        "--config demo_tiny_128 --dataset generated --training-steps 2 --dataloader-workers 1 "
        "--vocab-size 1000 --gradient-accumulation 9",
        _OLD_TRANSFORMERS,
        ("examples_utils", "tfrecord.reader"),
        enough=2,
    ),
    _application(
        "train_gpt2.py",
        "nlp/gpt2/pytorch",
        "--model gpt2-test --max-len 32 --layers-per-ipu 0 4 --matmul-proportion 0.2 0.2 "
        "--ipus-per-replica 2 --replication-factor 1 --epochs 1 --gradient-accumulation 6 "
        "--device-iterations 1 --batch-size 1 --enable-sequence-serialized False "
        "--embedding-serialization-factor 8 --recompute-checkpoint-every-layer True "
        "--enable-half-partials True --dataset generated --num-workers 1",
        _OLD_TRANSFORMERS,
        ("examples_utils", "tfrecord.reader"),
        edits={"config/config_test.json": {": 768": ": 64", "20256": "512"}},
        enough=2,
    ),
    _application(
        "train/train.py",
        "vision/cnns/pytorch",
        "--data generated --model resnet18 --epoch 1 --precision 32.32 --validation-mode none "
        "--optimizer sgd_combined --lr 0.001 --gradient-accumulation 2 --micro-batch-size 2 "
        "--dataloader-worker 1 --seed 0 --iterations 2",
        _PICTURES,
        ("turbojpeg",),
    ),
    _application(
        "pretrain.py",
        "vision/vit/pytorch",
        "--config b16_in1k_pretrain --dataset generated --training-steps 2 --iterations 2 "
        "--gradient-accumulation 8 --micro-batch-size 2 --replication-factor 1 "
        "--dataloader-workers 1 --hidden-size 64 --num-attention-heads 4 --mlp-dim 128 "
        "--rebatched-worker-size 4 --representation-size 64",
        (*_OLD_TRANSFORMERS, *_PICTURES),
        enough=2,
    ),
    _application(
        "main_pretrain.py",
        "vision/mae/pytorch",
        "--config vit_base_pod16 --generated_data --batch_size 1 --replica 1 --num_workers 1 "
        "--gradient_accumulation_count 16 --rebatched_worker_size 8 --ipus 8 --remap_so x.so "
        "--loss_scale 1024",
        _PICTURES,
        edits={
            "core/models_mae.py": {"=768": "=96", "decoder_embed_dim=512": "decoder_embed_dim=64"}
        },
        files=("x.so",),
    ),
    _application(
        "train_ipu.py",
        "vision/dino/pytorch",
        "--config vit_base_pod16 --synthetic_data --batch_size 1 --ga 29 --arch vit_tiny "
        "--pipeline 1 1 1 0 --replica 1 --num_workers 1 --ema_so x.so --data_path . --out_dim 64 "
        "--min_lr 0.001",
        _PICTURES,
        edits={
            "core/dino.py": {"hidden_dim=2048": "hidden_dim=64"},
            "core/vision_transformer.py": {"embed_dim=192": "embed_dim=96", "depth=12": "depth=3"},
        },
        files=("x.so",),
    ),
    _application(
        "train_swin.py",
        "vision/swin/pytorch",
        "--cfg SWIN_TINY --data-path x --checkpoint-output-dir out --batch-size 2 --ga 7",
        _OLDER_PICTURES,
        files=("custom_ops.so",),
        edits={
            "configs/configs.yaml": {
                "NUM_WORKERS: 32": "NUM_WORKERS: 1",
                "NUM_LOCALREPLICA: 4": "NUM_LOCALREPLICA: 1",
            },
            "dataset/build_ipu.py": {"rebatched_worker_size=1024": "rebatched_worker_size=8"},
        },
        pictures=tuple(f"x/train/{n % 2}/{n}.png" for n in range(32)),
    ),
    _application(
        "train.py",
        "multimodal/CLIP/pytorch",
        "--host_generate_data True --batch_size 2 --gradient_accumulation 15 --epochs 1 "
        "--dataloader_workers 1 --vision_width 64 --transformer_width 64 --embed_dim 32",
        (*_PICTURES, "ftfy", "wcwidth", *_TABLES),
        enough=2,
    ),
    _application(
        "train.py",
        "speech/fastpitch/pytorch",
        "--checkpoint-dir out --epochs 1 -lr 0.1 -bs 1 --generated-data --optimizer lamb "
        "--gradient-accumulation 4 --num-dataloader-workers 1",
        ("unidecode",),
        ("dllogger", "inflect", "parselmouth", "librosa.filters", "librosa.util"),
        enough=2,  # the first step's rate is zero
        edits={
            "dataset.py": {  # lengths and sums of zero, which are divided by
                "torch.zeros(80, 870), 0, torch.zeros(189), torch.zeros(189), 0]": "torch.ones("
                "80, 870), 870, torch.ones(189), torch.ones(189), 870]"
            },
            "common/tb_dllogger.py": {
                "from torch.utils.tensorboard import": "from wandb import",
            },
        },
    ),
    _application(
        "main.py",
        "speech/conformer/pytorch",
        "train --train_dataset.use_generated_data=True",
        ("fire", "termcolor"),
        ("torchaudio.compliance.kaldi", "editdistance"),
        edits={
            "configs/train.yaml": {
                "output_size 256": "output_size 32",
                "linear_units: 2048": "linear_units: 64",
                "max_length 1220": "max_length 120",  # a quarter are frames: twice the target
                "max_length 48": "max_length 12",
                "vocab_size 4233": "vocab_size 97",
                "num_blocks: 12": "num_blocks: 4",
                "num_blocks: 6": "num_blocks: 1",
                "encoders__2.": "encoders__1.",
                "encoders__6.": "encoders__2.",
                "encoders__11.": "encoders__3.",
                "gradient_accumulation: 72": "gradient_accumulation: 8",
                "num_workers: 16": "num_workers: 1",
                "  batch_size: 4": "  batch_size: 1",
                "warmup_steps: 25000": "warmup_steps: 4",
            }
        },
    ),
    _application(
        "mnist_poptorch_code_only.py",
        "tutorials/simple_applications/pytorch/mnist",
        "--epochs 1",
        enough=10**6,
    ),
    _application(
        "mnist_pipeline.py",
        "tutorials/tutorials/pytorch/pipelining",
        "--epochs 1 --batch-size 4 --offload-optimiser",
        enough=10**6,
    ),
    _application(
        "octconv_example.py",
        "tutorials/feature_examples/pytorch/octconv",
        "--epochs 1 --conv-mode multi-octave --batches-per-step 4 --batch-size 4",
        ("octconv",),
        enough=10**6,
    ),
    _application(
        "popdist_training.py",
        "tutorials/feature_examples/pytorch/popdist",
        "--epochs 1 --batch-size 4 --num-replicas 2 --dataloader-workers 1",
        enough=10**6,
    ),
    _application(
        "walkthrough_code_only.py",
        "tutorials/tutorials/pytorch/basics",
        "",
        (),
        ("matplotlib.pyplot",),
        enough=4,
    ),
    _application(
        "train.py",
        "multimodal/mini_dalle/pytorch",
        "--config L16_CLIP_vocab --generated-data --byteio True --checkpoint-output-dir '' "
        "--vqgan_model_path vqgan.ckpt --vqgan_config_path vqgan.yaml --dataloader-workers 1 "
        "--hidden-size 64 --num-hidden-layers 2 --num-attention-heads 2 --dim-head 32 "
        "--layers-per-ipu 0 1 1 0 --gradient-accumulation 8 --epochs 1 --lr-scheduler constant",
        (
            *_LIGHTNING,
            "ftfy",
            "wcwidth",
            "einops==0.4.1",
            "omegaconf==2.1.2",
            "antlr4-python3-runtime==4.8",
            "axial-positional-embedding==0.2.1",
            "taming-transformers-rom1504==0.0.6",
        ),
        ("youtokentome",),
        prepare=downloads.image_codes,
    ),
    _application(
        "run.py",
        "multimodal/frozen_in_time/pytorch",
        "--config_name configs/unit_test.json --trainer.init_val False "
        "--arch.args.text_params.model ./distilbert-base-uncased "
        "--arch.args.video_params.pretrained False",
        (*_OLD_TRANSFORMERS, *_PICTURES, *_TABLES, "einops==0.4.1", "fire", "termcolor"),
        ("av", "cv2", "decord"),
        prepare=downloads.text_model,
        enough=2,
    ),
    _application(
        "train.py",
        "tutorials/simple_applications/pytorch_lightning/shakespeare-rnn",
        "--ipus 2 --epochs 1",
        (*_LIGHTNING, "text-unidecode"),
        prepare=downloads.play,
        sizes={"deviceIterations(500)": "deviceIterations(5)"},
        enough=2,
    ),
    _application(
        "simple_lightning_ipu.py",
        "vision/cnns/pytorch-lightning/tutorials",
        "",
        _LIGHTNING,
        prepare=downloads.clothes,
        enough=10,
    ),
    _application(
        "pipelined_ipu.py",
        "vision/cnns/pytorch-lightning/tutorials",
        "",
        _LIGHTNING,
        prepare=downloads.clothes,
        sizes={"deviceIterations(50)": "deviceIterations(1)", "batch_size=64": "batch_size=4"},
        enough=2,
    ),
    _application(
        "ipu_strategy_and_dataloading.py",
        "vision/cnns/pytorch-lightning/tutorials",
        "",
        _LIGHTNING,
        prepare=downloads.clothes,
        sizes={
            "deviceIterations(300)": "deviceIterations(2)",
            "batch_size=16": "batch_size=4",
            "num_workers=64": "num_workers=1",
        },
        enough=2,
    ),
    _application(
        "train.py",
        "gnn/tgn/pytorch",
        "--epochs 1 --batch-size 10 --nodes-size 100 --edges-size 400 --device-iterations 4",
        _GEOMETRIC,
        prepare=downloads.page_edits,
        enough=2,
    ),
    _application(
        "run_nbfnet.py",
        "gnn/nbfnet/pytorch_geometric",
        "--config configs/IndFB15k-237_v1.yaml",
        _GEOMETRIC,
        prepare=downloads.knowledge_graph,
        enough=2,
    ),
    _application(
        "molecular_property_prediction_with_gin_code_only.py",
        "gnn/message_passing/pytorch_geometric",
        "",
        _FIXED_SIZES,
        ("matplotlib.pyplot",),
        beside=_OF_FIXED_SIZES,
        prepare=partial(downloads.molecules, "NCI1"),
        sizes={"num_graphs = 64": "num_graphs = 8", "num_graphs = 300": "num_graphs = 20"},
        enough=2,
    ),
    _application(
        "4_small_graph_batching_with_packing_code_only.py",
        "tutorials/tutorials/pytorch_geometric/4_small_graph_batching_with_packing",
        "",
        _FIXED_SIZES,
        ("matplotlib.pyplot",),
        beside=_OF_FIXED_SIZES,
        prepare=partial(downloads.molecules, "MUTAG"),
        enough=2,
    ),
)
