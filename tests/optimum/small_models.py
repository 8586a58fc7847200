"""Make small models of transformers, without dropout, and a call's inputs for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, TOKENS = 30, 5


@dataclass(frozen=True)
class Small:
    """A model, and what it is called with.

    Args:
        make: gives it with so many layers, a multiple of 2.
        layers: paths of its lists, for `parallelize`; None: they are found.
        tied: its head is its table's.
    """

    make: Callable[[int], nn.Module]
    layers: tuple[str, ...] | None = None
    tied: bool = True
    inputs: Callable[[int], dict[str, torch.Tensor]] = None  # type: ignore[assignment]

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        """Inputs and labels."""
        return (self.inputs or tokens)(rows)


def tokens(rows: int) -> dict[str, torch.Tensor]:
    shape = (rows, TOKENS)
    return {
        "input_ids": torch.randint(3, VOCABULARY, shape),
        "labels": torch.randint(3, VOCABULARY, shape),
    }


def classes(rows: int) -> dict[str, torch.Tensor]:
    return {**tokens(rows), "labels": torch.randint(0, 2, (rows,))}


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 4, 4), "labels": torch.randint(0, 2, (rows,))}


def vectors(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 4), "labels": torch.randn(rows, 4)}


class Block(nn.Module):
    """A layer of the model that is made at home."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class TwoLists(nn.Module):
    """A model with two lists, the second of which runs first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.late = nn.ModuleList(Block() for _ in range(count // 2))
        self.early = nn.ModuleList(Block() for _ in range(count // 2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embedding(x)
        for layer in (*self.early, *self.late):
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.mse_loss(logits, labels), logits


def _bert(count: int, **more: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=count,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


def _roberta(count: int) -> nn.Module:
    config = _bert(count).to_dict()
    config.update(max_position_embeddings=10)
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**config))


def _distilbert(count: int) -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=8,
        n_layers=count,
        n_heads=2,
        hidden_dim=8,
        max_position_embeddings=8,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return transformers.DistilBertForMaskedLM(config)


def _gpt2(count: int) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=8,
        n_layer=count,
        n_head=2,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def _t5(count: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=count // 2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart(count: int) -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        encoder_layers=count // 2,
        decoder_layers=count // 2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=8,
        dropout=0.0,
    )
    return transformers.BartForConditionalGeneration(config)


def _vit(count: int) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=count,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=4,
        patch_size=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def _llama(count: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=count,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    return transformers.LlamaForCausalLM(config)


SMALL = {
    "bert": Small(lambda count: transformers.BertForMaskedLM(_bert(count))),
    "bert_classes": Small(
        lambda count: transformers.BertForSequenceClassification(_bert(count)),
        tied=False,
        inputs=classes,
    ),
    "roberta": Small(_roberta),
    "distilbert": Small(_distilbert),
    "gpt2": Small(_gpt2),
    "t5": Small(_t5),
    "bart": Small(_bart),
    "vit": Small(_vit, tied=False, inputs=images),
    "llama": Small(_llama, tied=False),
    "two_lists": Small(TwoLists, ("early", "late"), tied=False, inputs=vectors),
}


def small(name: str, layers: int) -> nn.Module:
    """A model with weights that are the same each time."""
    torch.manual_seed(1)
    model = SMALL[name].make(layers).train()
    for parameter in model.parameters():  # none is zero, as biases are at first
        nn.init.normal_(parameter, std=0.1)
    return model
