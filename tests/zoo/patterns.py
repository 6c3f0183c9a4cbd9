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


def table(text: str) -> tuple[Pattern, ...]:
    """A pattern a line; `-` is an empty cell, and so are those that a line has not."""
    rows = (line.split(" | ") for line in text.strip().splitlines())
    return tuple(Pattern(*(cell.strip().removeprefix("-") for cell in row)) for row in rows)


USES = table(r"""
convolution | conv_options | 0.weight | conv2d | timm/resnet18 | ^conv1\.weight
linear layer | mlp | 0.weight | linear | timm/vit_tiny_patch16_224 | fc1\.weight
batch norm | norms | batch.weight | batch_norm | timm/resnet18 | bn1
layer norm | norms | layer.weight | layer_norm | timm/vit_tiny_patch16_224 | norm1
bias of a linear layer | mlp | 0.bias | linear | timm/vit_tiny_patch16_224 | fc1\.bias
bias of a convolution | conv_options | 0.bias | conv2d | torchvision/alexnet | features\.0\.bias
depthwise convolution | depthwise | 0.weight | depthwise_conv2d | torchvision/mobilenet_v2 | conv\.0\.0\.weight
recurrent module | gru_both_ways | inner.weight_hh_l1 | linear | timm/sequencer2d_s | weight_hh_l0
recurrent cell | cells | lstm.weight_ih | linear
embedding | tables | words.weight | embedding | transformers/BertForMaskedLM | word_embeddings
standardized weight | standardized | 0.weight | conv2d | timm/resnetv2_50x1_bit | conv1\.weight
the same by hand | standardized_by_hand | bit.weight | conv2d
gain | language | llama | scale_and_shift | transformers/LlamaForCausalLM | input_layernorm
layer scale | encoder_by_hand | gamma1 | scale_and_shift | timm/cait_xxs24_224 | gamma_1
product on the right | spellings | w2 | linear
product on the left | language | dt.weight | linear | transformers/MambaForCausalLM | dt_proj
network of constants | table_made_by_a_network | network.0.weight | linear | timm/swinv2_tiny_window8_256 | cpb_mlp
layer of a parameter | projection_of_a_table | positions.weight | embedding | transformers/PerceiverForSequenceClassification | latents
queries by relative positions | relative_queries | rows | linear | timm/mvitv2_tiny | rel_pos_h
interpolated positions | other_sizes | positions | scale_and_shift | timm/naflexvit_base_patch16_gap | embeds\.pos_embed
projection of constants | disentangled | kernel | linear | transformers/FunnelForSequenceClassification | r_kernel
experts | - | - | experts | transformers/MixtralForCausalLM | experts
grouped convolution | conv_options | 4.weight | conv2d | timm/regnetx_002 | conv2\.conv\.weight
addmm | spellings | w5 | linear | transformers/GPT2LMHeadModel | c_attn
weight norm | weight_norm | linear.parametrizations.weight.original1 | linear | transformers/HubertForCTC | pos_conv.*original1
group norm | norms | group.weight | group_norm | diffusers/UNet2DModel | norm1
embedding of positions | gpt | wpe.weight | embedding | transformers/BertForSequenceClassification | position_embeddings
embedding bag | embedding_bag | bag.weight | embedding_bag
exp of a rate | language | rate | scale_and_shift | transformers/MambaForCausalLM | A_log
clamped exp of a scale | gates | temperature | scale_and_shift | transformers/CLIPModel | logit_scale
gate that sums to one | generic | gate | generic
slices of a packed weight | cross_attention | decoder.layers.0.multihead_attn.in_proj_weight[0:8] | linear | torchvision/swin_v2_t | qkv
biases put together | biases_in_pieces | q_bias | linear | timm/beit_base_patch16_224 | q_bias
biases put together and taken apart | vision | query.bias | linear
einsum | batched | w1 | linear | transformers/XLNetForSequenceClassification | rel_attn
gain of a weight | standardized | 0.gain | conv2d | timm/test_nfnet | gain
bilinear layer | rare | products.weight | bilinear
table of relative positions | relative_positions | table | scale_and_shift | timm/swin_tiny_patch4_window7_224 | relative_position_bias_table
the same in fused attention | relative_positions_in_fused_attention | table | scale_and_shift | timm/beit_base_patch16_224 | relative_position_bias_table
spectral norm | discriminator | conv.parametrizations.weight.original | conv2d
shift of channels | elementwise | channel_shift | scale_and_shift | transformers/XLNetForSequenceClassification | r_w_bias
positions | encoder_by_hand | position | scale_and_shift | timm/vit_tiny_patch16_224 | pos_embed
transposed convolution | decoder | 3.weight | conv_transpose2d | transformers/DPTForDepthEstimation | resize\.weight
token | tokens | token | scale_and_shift | timm/deit3_small_patch16_224 | cls_token
sink of attention | tokens | sinks | scale_and_shift | transformers/GptOssForCausalLM | sinks
addcmul | vision | weight | scale_and_shift | timm/convnextv2_atto | grn
gain from one | language | gemma | scale_and_shift | transformers/Gemma3ForCausalLM | layernorm
attention of torch | encoder_batch_first | encoder.layers.0.self_attn.in_proj_weight | linear | torchvision/vit_b_32 | in_proj_weight
RMS norm | norms | rms.weight | rms_norm | diffusers/FluxTransformer2DModel | norm_q
rows gathered by data | rare | table | embedding | transformers/GptOssForCausalLM | gate_up_proj_bias
instance norm | norms | instance.weight | instance_norm
PReLU | rare | slopes.weight | prelu
norm of a table | projection_of_a_table | norm.weight | layer_norm | transformers/DebertaV2ForSequenceClassification | encoder\.LayerNorm
""")  # noqa: E501
SHARED = table(r"""
output tied to the embedding | gpt_tied | wte.weight | embedding | transformers/BertForMaskedLM | word_embeddings
encoder, decoder and a part of the output | language | table.weight | embedding | transformers/BartForConditionalGeneration | shared
table of every layer | relative_positions_in_fused_attention | table | scale_and_shift | transformers/T5ForConditionalGeneration | relative_attention_bias
layer used again | shared_module | inner.weight | linear | transformers/AlbertForSequenceClassification | ffn\.weight
projection of data and of a table | projection_of_a_table | key.weight | linear | transformers/DebertaV2ForSequenceClassification | key_proj
decoder that is the encoder's transpose | tied_autoencoder | weight | linear
heads of a pyramid | pyramid | tower.weight | conv2d | torchvision/retinanet_resnet50_fpn | classification_head\.conv
norm of the levels of a pyramid | pyramid | norm.weight | group_norm | torchvision/fcos_resnet50_fpn | head\.conv
depthwise convolution of parallel branches | vision | conv.weight | depthwise_conv2d | timm/coat_tiny | cpe1|crpe1
cell of a loop | cells | gru.weight_hh | linear
norm of two places | vision | norm.weight | layer_norm | transformers/BlipForImageTextRetrieval | post_layernorm
halves that add up to one | language | mix | scale_and_shift | transformers/RwkvForCausalLM | time_mix
gates that add up to one | vision | gate | scale_and_shift | timm/convit_tiny | gating_param
update of a loop | pyramid | score.bias | conv2d | torchvision/raft_small | update_block
""")  # noqa: E501
