"""Write what programs download: data sets and weights in the files that they expect, all random.

Each is called in the folder that a program runs in.
"""

import random
import struct
from pathlib import Path

import torch

_IDX_BYTES = 8  # the type of values that are bytes
_WIKIPEDIA_USERS, _WIKIPEDIA_PAGES, _EVENTS, _FEATURES = 60, 20, 400, 172
_MOLECULES, _ATOMS = 188, 7  # and kinds of atoms
_ENTITIES, _RELATIONS, _TRIPLES = 30, 5, 120


def text_model() -> None:
    """A DistilBERT of one layer with its words, as a folder of the hub."""
    from transformers import DistilBertConfig, DistilBertModel  # of the program's own version

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += ["it", "is", "a", "unit", "test", "for", "frozen"]
    folder = Path("distilbert-base-uncased")
    config = DistilBertConfig(vocab_size=len(words), dim=64, n_layers=1, n_heads=4, hidden_dim=128)
    DistilBertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))


def image_codes() -> None:
    """A VQGAN of sixteen by sixteen codes with its configuration, and the words of captions."""
    from omegaconf import OmegaConf  # of the program's packages, as the next
    from taming.models.vqgan import VQModel

    encoder = {
        "double_z": False,
        "z_channels": 32,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 32,
        "ch_mult": [1, 1, 1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [16],
        "dropout": 0.0,
    }
    parameters = {
        "embed_dim": 8,
        "n_embed": 64,
        "ddconfig": encoder,
        "lossconfig": {"target": "torch.nn.Identity"},
    }
    target = {"target": "taming.models.vqgan.VQModel", "params": parameters}
    OmegaConf.save(OmegaConf.create({"model": target}), "vqgan.yaml")
    torch.save({"state_dict": VQModel(**parameters).state_dict()}, "vqgan.ckpt")
    pairs = "#version: 0.2", "t h", "th e</w>", "a n", "an d</w>"  # the published archive has none
    Path("models", "bpe", "bpe_simple_vocab_16e6.txt").write_text("\n".join(pairs))


def clothes() -> None:
    """FashionMNIST's pictures and classes, in the form of the files of MNIST."""
    folder = Path("FashionMNIST", "FashionMNIST", "raw")
    folder.mkdir(parents=True)
    for part, count in (("train", 320), ("t10k", 64)):
        pictures = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        classes = torch.randint(10, (count,), dtype=torch.uint8)
        for kind, values in (("images-idx3", pictures), ("labels-idx1", classes)):
            head = struct.pack(f">HBB{values.dim()}I", 0, _IDX_BYTES, values.dim(), *values.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + values.numpy().tobytes())


def play() -> None:
    """A text of letters, spaces and line ends."""
    own = random.Random(0)
    letters = own.choices("abcdefghijklmnopqrstuvwxyz  \n", k=4000)
    Path("shakespeare.txt").write_text("".join(letters))


def page_edits() -> None:
    """Edits of Wikipedia's pages as the JODIE data sets list them: user, page, time, features."""
    own = random.Random(0)
    lines = ["user_id,item_id,timestamp,state_label,comma_separated_list_of_features"]
    for time in range(_EVENTS):
        event = [own.randrange(_WIKIPEDIA_USERS), own.randrange(_WIKIPEDIA_PAGES), time, 0]
        lines.append(",".join(map(str, event + [round(own.random(), 3) for _ in range(_FEATURES)])))
    file = Path("data", "JODIE", "wikipedia", "raw", "wikipedia.csv")
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(lines))


def knowledge_graph() -> None:
    """Relations between entities as the inductive parts of FB15k-237 list them."""
    own = random.Random(0)
    folder = Path("data", "FB15k-237", "v1", "raw")
    folder.mkdir(parents=True)
    names = [f"/r/{n}" for n in range(_RELATIONS)]
    (folder / "relations.dict").write_text("".join(f"{n}\t{r}\n" for n, r in enumerate(names)))
    for file in ("train_ind.txt", "test_ind.txt", "train.txt", "valid.txt"):
        chosen = [
            f"/m/{own.randrange(_ENTITIES)}\t{own.choice(names)}\t/m/{own.randrange(_ENTITIES)}"
            for _ in range(_TRIPLES)
        ]
        (folder / file).write_text("\n".join(chosen))


def molecules(name: str) -> None:
    """Rings of atoms in two classes, as the data sets of TU Dortmund list them."""
    own = random.Random(0)
    bonds, graphs, classes, atoms = [], [], [], []
    for number in range(1, _MOLECULES + 1):
        first, count = len(atoms) + 1, own.randrange(5, 12)
        ring = range(first, first + count)
        for atom, following in zip(ring, (*ring[1:], first), strict=True):
            bonds += [f"{atom}, {following}", f"{following}, {atom}"]
        graphs += [str(number)] * count
        classes.append(str(own.randrange(2)))
        atoms += [str(own.randrange(_ATOMS)) for _ in ring]
    folder = Path("data", "TUDataset", name, "raw")
    folder.mkdir(parents=True)
    parts = {"A": bonds, "graph_indicator": graphs, "graph_labels": classes, "node_labels": atoms}
    for part, lines in parts.items():
        (folder / f"{name}_{part}.txt").write_text("".join(f"{line}\n" for line in lines))
