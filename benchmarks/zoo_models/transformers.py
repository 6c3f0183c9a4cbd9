"""Models of transformers, of every kind that there is: tiny configurations of the real classes.

A configuration is the model's own with every size that it has made small, its parts' too; a table entry gives only what
must differ. Caches are off, as they are in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from . import torchvision
from .entry import CLASSES, VOCABULARY, Call, Entry, floats, keywords, predictions
from .transformers_images import IMAGES, LARGER
from .transformers_others import IDS, IMAGE, LARGE, PAIR, SOUND, SOUNDS, SPECIAL, TEXT
from .transformers_text import DECODERS, ENCODERS, PAIRS

TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "projection_dim", "expert_capacity"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    "vocab_size": VOCABULARY,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

Options = Mapping[str, Any]
LIKE = {
    "LlamaForCausalLM": "LLaMA", "GPT2LMHeadModel": "GPT-2", "BertForSequenceClassification": "BERT",
    "T5ForConditionalGeneration": "T5", "ViTForImageClassification": "ViT", "SwinForImageClassification": "Swin",
    "ConvNextForImageClassification": "ConvNeXt", "EfficientNetForImageClassification": "EfficientNet",
    "WhisperForConditionalGeneration": "Whisper", "MixtralForCausalLM": "Mixtral", "MambaForCausalLM": "Mamba",
    "ResNetForImageClassification": "ResNet",
}  # fmt: skip


def load() -> None:
    torchvision.load()  # transformers imports it where it is installed
    import transformers

    transformers.logging.set_verbosity_error()


def tiny(kind: Any, overrides: Options) -> Any:
    """A configuration of this class with every size that it has made small, in its parts, too."""
    known = kind()
    given = {name: value for name, value in TINY.items() if name in known.to_dict()}
    given["num_labels"] = CLASSES  # kept as a table of labels
    given |= {name: value() if callable(value) else value for name, value in overrides.items()}
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(known, name, None)
        if part is not None and not callable(overrides.get(name)):
            given[name] = tiny(type(part), overrides.get(name, {}))
    return kind(**given)


def build(name: str, overrides: Options) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name.partition(".")[0])
        options = dict(overrides)
        attention = options.pop("attn_implementation", None)
        config = tiny(kind.config_class, options)
        if attention:
            config._attn_implementation = attention
        model: nn.Module = kind(config)
        return model

    return make


def image_call(name: str) -> Callable[[int], Call]:
    if name.endswith("VideoClassification"):
        return keywords(pixel_values=floats(4 if name.startswith("Vivit") else 2, 3, 32, 32))
    return LARGE if name in LARGER else IMAGE


def rows() -> dict[str, tuple[Options, Callable[[int], Call]]]:
    """(options, call) by name."""
    tables = ((ENCODERS, TEXT), (DECODERS, IDS), (PAIRS, PAIR), (SOUNDS, SOUND))
    found = {name: (options, call) for table, call in tables for name, options in table.items()}
    return found | {name: (options, image_call(name)) for name, options in IMAGES.items()} | SPECIAL


ENTRIES = tuple(
    Entry(
        "transformers",
        name,
        build(name, options),
        call,
        None if name.endswith(".labels") else predictions,  # forward computes the loss
        LIKE.get(name, ""),
    )
    for name, (options, call) in rows().items()
)
