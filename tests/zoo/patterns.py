"""The ways in which parameters of real models are used, each with a model of this zoo and one of a library that has it.

Found by counting the uses in 319 models of timm, torchvision, transformers, diffusers and peft, most frequent first.
"""

from __future__ import annotations

from typing import NamedTuple


class Pattern(NamedTuple):
    """case, parameter: of this zoo, with the layer that it is registered as. real: a model of `benchmarks.zoo`, and a
    pattern of names that are structured there; empty where no model of the libraries has it."""

    use: str
    case: str
    parameter: str
    layer: str
    real: str = ""
    names: str = ""


USES = (
    Pattern("convolution", "conv_options", "0.weight", "conv2d", "timm/resnet18", r"^conv1\.weight"),
    Pattern("linear layer", "mlp", "0.weight", "linear", "timm/vit_tiny_patch16_224", r"fc1\.weight"),
    Pattern("batch norm", "norms", "batch.weight", "batch_norm", "timm/resnet18", r"bn1"),
    Pattern("layer norm", "norms", "layer.weight", "layer_norm", "timm/vit_tiny_patch16_224", r"norm1"),
    Pattern("bias of a linear layer", "mlp", "0.bias", "linear", "timm/vit_tiny_patch16_224", r"fc1\.bias"),
    Pattern("bias of a convolution", "conv_options", "0.bias", "conv2d", "torchvision/alexnet", r"features\.0\.bias"),
    Pattern("depthwise convolution", "depthwise", "0.weight", "depthwise_conv2d",
            "torchvision/mobilenet_v2", r"conv\.0\.0\.weight"),
    Pattern("recurrent module", "gru_both_ways", "inner.weight_hh_l1", "linear", "timm/sequencer2d_s", r"weight_hh_l0"),
    Pattern("recurrent cell", "cells", "lstm.weight_ih", "linear"),
    Pattern("embedding", "tables", "words.weight", "embedding", "transformers/BertForMaskedLM", r"word_embeddings"),
    Pattern("standardized weight", "standardized", "0.weight", "conv2d", "timm/resnetv2_50x1_bit", r"conv1\.weight"),
    Pattern("the same by hand", "standardized_by_hand", "bit.weight", "conv2d"),
    Pattern("gain", "language", "llama", "scale_and_shift", "transformers/LlamaForCausalLM", r"input_layernorm"),
    Pattern("layer scale", "encoder_by_hand", "gamma1", "scale_and_shift", "timm/cait_xxs24_224", r"gamma_1"),
    Pattern("product on the right", "spellings", "w2", "linear"),
    Pattern("product on the left", "language", "dt.weight", "linear", "transformers/MambaForCausalLM", r"dt_proj"),
    Pattern("network of constants", "table_made_by_a_network", "network.0.weight", "linear",
            "timm/swinv2_tiny_window8_256", r"cpb_mlp"),
    Pattern("layer of a parameter", "projection_of_a_table", "positions.weight", "embedding",
            "transformers/PerceiverForSequenceClassification", r"latents"),
    Pattern("queries by relative positions", "relative_queries", "rows", "linear",
            "timm/mvitv2_tiny", r"rel_pos_h"),
    Pattern("interpolated positions", "other_sizes", "positions", "scale_and_shift",
            "timm/naflexvit_base_patch16_gap", r"embeds\.pos_embed"),
    Pattern("projection of constants", "disentangled", "kernel", "linear",
            "transformers/FunnelForSequenceClassification", r"r_kernel"),
    Pattern("experts", "", "", "experts", "transformers/MixtralForCausalLM", r"experts"),
    Pattern("grouped convolution", "conv_options", "4.weight", "conv2d", "timm/regnetx_002", r"conv2\.conv\.weight"),
    Pattern("addmm", "spellings", "w5", "linear", "transformers/GPT2LMHeadModel", r"c_attn"),
    Pattern("weight norm", "weight_norm", "linear.parametrizations.weight.original1", "linear",
            "transformers/HubertForCTC", r"pos_conv.*original1"),
    Pattern("group norm", "norms", "group.weight", "group_norm", "diffusers/UNet2DModel", r"norm1"),
    Pattern("embedding of positions", "gpt", "wpe.weight", "embedding",
            "transformers/BertForSequenceClassification", r"position_embeddings"),
    Pattern("embedding bag", "embedding_bag", "bag.weight", "embedding_bag"),
    Pattern("exp of a rate", "language", "rate", "scale_and_shift", "transformers/MambaForCausalLM", r"A_log"),
    Pattern("clamped exp of a scale", "gates", "temperature", "scale_and_shift",
            "transformers/CLIPModel", r"logit_scale"),
    Pattern("gate that sums to one", "generic", "gate", "generic"),
    Pattern("slices of a packed weight", "cross_attention", "decoder.layers.0.multihead_attn.in_proj_weight[0:8]",
            "linear", "torchvision/swin_v2_t", r"qkv"),
    Pattern("biases put together", "biases_in_pieces", "q_bias", "linear", "timm/beit_base_patch16_224", r"q_bias"),
    Pattern("biases put together and taken apart", "vision", "query.bias", "linear"),
    Pattern("einsum", "batched", "w1", "linear", "transformers/XLNetForSequenceClassification", r"rel_attn"),
    Pattern("gain of a weight", "standardized", "0.gain", "conv2d", "timm/test_nfnet", r"gain"),
    Pattern("bilinear layer", "rare", "products.weight", "bilinear"),
    Pattern("table of relative positions", "relative_positions", "table", "scale_and_shift",
            "timm/swin_tiny_patch4_window7_224", r"relative_position_bias_table"),
    Pattern("the same in fused attention", "relative_positions_in_fused_attention", "table", "scale_and_shift",
            "timm/beit_base_patch16_224", r"relative_position_bias_table"),
    Pattern("spectral norm", "discriminator", "conv.parametrizations.weight.original", "conv2d"),
    Pattern("shift of channels", "elementwise", "channel_shift", "scale_and_shift",
            "transformers/XLNetForSequenceClassification", r"r_w_bias"),
    Pattern("positions", "encoder_by_hand", "position", "scale_and_shift", "timm/vit_tiny_patch16_224", r"pos_embed"),
    Pattern("transposed convolution", "decoder", "3.weight", "conv_transpose2d",
            "transformers/DPTForDepthEstimation", r"resize\.weight"),
    Pattern("token", "tokens", "token", "scale_and_shift", "timm/deit3_small_patch16_224", r"cls_token"),
    Pattern("sink of attention", "tokens", "sinks", "scale_and_shift", "transformers/GptOssForCausalLM", r"sinks"),
    Pattern("addcmul", "vision", "weight", "scale_and_shift", "timm/convnextv2_atto", r"grn"),
    Pattern("gain from one", "language", "gemma", "scale_and_shift", "transformers/Gemma3ForCausalLM", r"layernorm"),
    Pattern("attention of torch", "encoder_batch_first", "encoder.layers.0.self_attn.in_proj_weight", "linear",
            "torchvision/vit_b_32", r"in_proj_weight"),
    Pattern("RMS norm", "norms", "rms.weight", "rms_norm", "diffusers/FluxTransformer2DModel", r"norm_q"),
    Pattern("rows gathered by data", "rare", "table", "embedding",
            "transformers/GptOssForCausalLM", r"gate_up_proj_bias"),
    Pattern("instance norm", "norms", "instance.weight", "instance_norm"),
    Pattern("PReLU", "rare", "slopes.weight", "prelu"),
    Pattern("norm of a table", "projection_of_a_table", "norm.weight", "layer_norm",
            "transformers/DebertaV2ForSequenceClassification", r"encoder\.LayerNorm"),
)  # fmt: skip

SHARED = (
    Pattern("output tied to the embedding", "gpt_tied", "wte.weight", "embedding",
            "transformers/BertForMaskedLM", r"word_embeddings"),
    Pattern("encoder, decoder and a part of the output", "language", "table.weight", "embedding",
            "transformers/BartForConditionalGeneration", r"shared"),
    Pattern("table of every layer", "relative_positions_in_fused_attention", "table", "scale_and_shift",
            "transformers/T5ForConditionalGeneration", r"relative_attention_bias"),
    Pattern("layer used again", "shared_module", "inner.weight", "linear",
            "transformers/AlbertForSequenceClassification", r"ffn\.weight"),
    Pattern("projection of data and of a table", "projection_of_a_table", "key.weight", "linear",
            "transformers/DebertaV2ForSequenceClassification", r"key_proj"),
    Pattern("decoder that is the encoder's transpose", "tied_autoencoder", "weight", "linear"),
    Pattern("heads of a pyramid", "pyramid", "tower.weight", "conv2d",
            "torchvision/retinanet_resnet50_fpn", r"classification_head\.conv"),
    Pattern("norm of the levels of a pyramid", "pyramid", "norm.weight", "group_norm",
            "torchvision/fcos_resnet50_fpn", r"head\.conv"),
    Pattern("depthwise convolution of parallel branches", "vision", "conv.weight", "depthwise_conv2d",
            "timm/coat_tiny", r"cpe1|crpe1"),
    Pattern("cell of a loop", "cells", "gru.weight_hh", "linear"),
    Pattern("norm of two places", "vision", "norm.weight", "layer_norm",
            "transformers/BlipForImageTextRetrieval", r"post_layernorm"),
    Pattern("halves that add up to one", "language", "mix", "scale_and_shift",
            "transformers/RwkvForCausalLM", r"time_mix"),
    Pattern("gates that add up to one", "vision", "gate", "scale_and_shift", "timm/convit_tiny", r"gating_param"),
    Pattern("update of a loop", "pyramid", "score.bias", "conv2d", "torchvision/raft_small", r"update_block"),
)  # fmt: skip
