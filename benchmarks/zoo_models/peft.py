"""Fine-tuning with peft: models of transformers and torchvision under every kind of adapter; only adapters train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from . import torchvision, transformers
from .entry import Entry, images
from .transformers_others import IDS, IMAGE, PAIR, TEXT

LLAMA, BERT, T5, GPT2, VIT = (
    "LlamaForCausalLM", "BertForSequenceClassification", "T5ForConditionalGeneration", "GPT2LMHeadModel",
    "ViTForImageClassification",
)  # fmt: skip
CALLS = {
    LLAMA: IDS, BERT: TEXT, T5: PAIR, GPT2: IDS,
    VIT: IMAGE,
}  # fmt: skip
TARGETS = {
    LLAMA: ["q_proj", "v_proj"], BERT: ["query", "value"], T5: ["q", "v"], GPT2: ["c_attn"], VIT: ["q_proj", "v_proj"],
}  # fmt: skip

# name: (class of the base model, class of the adapter's configuration, its options)
ADAPTERS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama_lora": (LLAMA, "LoraConfig", {"r": 2}),
    "llama_lora_all": (LLAMA, "LoraConfig", {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1}),
    "llama_lora_embedding": (LLAMA, "LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "llama_dora": (LLAMA, "LoraConfig", {"r": 2, "use_dora": True}),
    "llama_rslora": (LLAMA, "LoraConfig", {"r": 2, "use_rslora": True}),
    "llama_adalora": (LLAMA, "AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}),
    "llama_ia3": (
        LLAMA,
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "llama_loha": (LLAMA, "LoHaConfig", {"r": 2}),
    "llama_lokr": (LLAMA, "LoKrConfig", {"r": 2}),
    "llama_oft": (LLAMA, "OFTConfig", {"oft_block_size": 4}),
    "llama_boft": (LLAMA, "BOFTConfig", {"boft_block_size": 4}),
    "llama_fourierft": (LLAMA, "FourierFTConfig", {"n_frequency": 8}),
    "llama_hra": (LLAMA, "HRAConfig", {"r": 2}),
    "llama_vera": (LLAMA, "VeraConfig", {"r": 2}),
    "llama_miss": (LLAMA, "MissConfig", {"r": 2}),
    "llama_ln_tuning": (LLAMA, "LNTuningConfig", {"target_modules": None}),
    "llama_trainable_tokens": (
        LLAMA,
        "TrainableTokensConfig",
        {"token_indices": [1, 3], "target_modules": ["embed_tokens"]},
    ),
    "llama_prefix": (
        LLAMA,
        "PrefixTuningConfig",
        {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8, "target_modules": None},
    ),
    "llama_p_tuning": (
        LLAMA,
        "PromptEncoderConfig",
        {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "target_modules": None},
    ),
    "bert_dora": (BERT, "LoraConfig", {"r": 2, "use_dora": True}),
    "llama_prompt": (LLAMA, "PromptTuningConfig", {"num_virtual_tokens": 3, "target_modules": None}),
    "bert_lora": (BERT, "LoraConfig", {"r": 2}),
    "gpt2_lora": (GPT2, "LoraConfig", {"r": 2, "fan_in_fan_out": True}),
    "t5_lora": (T5, "LoraConfig", {"r": 2}),
    "vit_lora": (VIT, "LoraConfig", {"r": 2}),
}
TASKS = {LLAMA: "CAUSAL_LM", BERT: "SEQ_CLS", T5: "SEQ_2_SEQ_LM", GPT2: "CAUSAL_LM"}


def load() -> None:
    transformers.load()
    import peft  # noqa: F401


def adapted(base: str, kind: str, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import peft

        targets = {"target_modules": TARGETS[base]} if "target_modules" not in options else {}
        given = {name: value for name, value in options.items() if value is not None}
        config = getattr(peft, kind)(task_type=TASKS.get(base), **targets, **given)
        model: nn.Module = peft.get_peft_model(transformers.build(base, {})(), config)
        return model

    return build


def convolutional() -> nn.Module:
    import peft

    base = torchvision.classifier("resnet18", {})()
    config = peft.LoraConfig(r=2, target_modules=["conv1", "conv2"], modules_to_save=["fc"])
    model: nn.Module = peft.get_peft_model(base, config)
    return model


ENTRIES = (
    *(Entry("peft", name, adapted(*row), CALLS[row[0]]) for name, row in ADAPTERS.items()),
    Entry("peft", "resnet18_lora", convolutional, images(3, 64, 64)),
)
