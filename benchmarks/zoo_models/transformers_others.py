"""Models of transformers for sound, several kinds of input, tables and time series, with their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .entry import CLASSES, LENGTH, Call, classes, floats, keywords, ones, tokens

Options = Mapping[str, Any]
TEXT = keywords(input_ids=tokens(), attention_mask=ones(LENGTH))
IDS = keywords(input_ids=tokens())
PAIR = keywords(input_ids=tokens(), decoder_input_ids=tokens(7))
LABELED = keywords(input_ids=tokens(), labels=tokens())
LABELED_PAIR = keywords(input_ids=tokens(), labels=tokens(7))
IMAGE = keywords(pixel_values=floats(3, 32, 32))
LARGE = keywords(pixel_values=floats(3, 64, 64))
SOUND = keywords(input_values=floats(800))
BOTH = keywords(input_ids=tokens(), attention_mask=ones(LENGTH), pixel_values=floats(3, 32, 32))
SPECTROGRAM = keywords(input_features=floats(8, 32), decoder_input_ids=tokens(7))

CONV_STEM = {
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_length": 2,
}
SOUNDS: dict[str, Options] = {
    "HubertForCTC": CONV_STEM,
    "SEWModel": {**CONV_STEM, "squeeze_factor": 2, "layerdrop": 0.0, "mask_time_prob": 0.0},
    "Wav2Vec2ForCTC": CONV_STEM,
    "Wav2Vec2Model": {**CONV_STEM, "layerdrop": 0.0, "mask_time_prob": 0.0},
    "WavLMModel": {**CONV_STEM, "layerdrop": 0.0, "mask_time_prob": 0.0},
}

WHISPER = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
# name: (options, call); the name may carry a suffix behind a dot where a class comes twice.
SPECIAL: dict[str, tuple[Options, Callable[[int], Call]]] = {
    "GPT2LMHeadModel.labels": ({}, LABELED),
    "LlamaForCausalLM.labels": ({"num_key_value_heads": 1}, LABELED),
    "T5ForConditionalGeneration.labels": ({"decoder_start_token_id": 0}, LABELED_PAIR),
    "NystromformerForSequenceClassification": (
        {"num_landmarks": 4, "segment_means_seq_len": 8},
        keywords(input_ids=tokens(8), attention_mask=ones(8)),
    ),
    "BertForSequenceClassification.labels": ({}, keywords(input_ids=tokens(), labels=classes(CLASSES))),
    "LlamaForCausalLM.eager": ({"attn_implementation": "eager"}, IDS),
    "WhisperForConditionalGeneration": (WHISPER, SPECTROGRAM),
    "Speech2TextForConditionalGeneration": (
        {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 16},
        keywords(input_features=floats(32, 8), decoder_input_ids=tokens(7)),
    ),
    "ASTForAudioClassification": (
        {"num_mel_bins": 16, "max_length": 24, "time_stride": 4, "frequency_stride": 4},
        keywords(input_values=floats(24, 16)),
    ),
    "CLIPModel": ({}, BOTH),
    "SiglipModel": ({}, BOTH),
    "BlipForImageTextRetrieval": ({}, BOTH),
    "FlavaModel": ({}, BOTH),
    "GitForCausalLM": ({}, BOTH),
    "ViltForQuestionAnswering": ({}, BOTH),
    "LxmertModel": (
        {"num_qa_labels": 5, "visual_feat_dim": 8, "l_layers": 1, "x_layers": 1, "r_layers": 1},
        keywords(input_ids=tokens(), visual_feats=floats(4, 8), visual_pos=floats(4, 4)),
    ),
    "VisualBertModel": (
        {"visual_embedding_dim": 8},
        keywords(
            input_ids=tokens(), visual_embeds=floats(4, 8), visual_attention_mask=ones(4), visual_token_type_ids=ones(4)
        ),
    ),
    "DecisionTransformerModel": (
        {"state_dim": 4, "act_dim": 3, "max_ep_len": 20},
        keywords(
            states=floats(5, 4),
            actions=floats(5, 3),
            rewards=floats(5, 1),
            returns_to_go=floats(5, 1),
            timesteps=classes(20, 5),
            attention_mask=ones(5),
        ),
    ),
    "TimeSeriesTransformerModel": (
        {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1},
        keywords(
            past_values=floats(10),
            past_time_features=floats(10, 1),
            past_observed_mask=ones(10),
            future_values=floats(4),
            future_time_features=floats(4, 1),
        ),
    ),
    "PatchTSTForPrediction": (
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4},
        keywords(past_values=floats(16, 2)),
    ),
    "PatchTSMixerForPrediction": (
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4},
        keywords(past_values=floats(16, 2)),
    ),
    "PerceiverForSequenceClassification": (
        {
            "num_latents": 4,
            "d_latents": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
        },
        keywords(inputs=tokens(), attention_mask=ones(LENGTH)),
    ),
    "TrOCRForCausalLM": ({}, IDS),
    "EncodecModel": (
        {
            "num_filters": 4,
            "hidden_size": 8,
            "codebook_size": 16,
            "codebook_dim": 8,
            "upsampling_ratios": [2, 2],
            "num_lstm_layers": 1,
            "compress": 1,
        },
        keywords(input_values=floats(1, 64)),
    ),
    "Wav2Vec2ConformerModel": ({**CONV_STEM, "layerdrop": 0.0, "mask_time_prob": 0.0}, SOUND),
    "UnivNetModel": ({}, keywords(input_features=floats(8, 100), noise_sequence=floats(8, 64))),
}
