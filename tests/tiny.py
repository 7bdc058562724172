"""A tiny random Wan pipeline in the stock layout, so that tests need no weights and take no time."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

WORDS = """a an red blue green circle square triangle moves left right up spins still and the""".split()  # noqa: SIM905


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def transformer(seed: int = 0, layers: int = 2) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=32, num_layers=layers, rope_max_seq_len=32,
    )  # fmt: skip
    # The stock initialisation ends in zeros here and there; every path should count.
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def pipeline(scheduler: object | None = None) -> WanPipeline:
    torch.manual_seed(0)
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=3 + len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, attn_scales=[],
        temperal_downsample=[False, False, True], latents_mean=[0.1] * 4, latents_std=[0.9] * 4,
        scale_factor_temporal=2, scale_factor_spatial=8,
    )  # fmt: skip
    return WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=encoder,
        vae=vae,
        transformer=transformer(),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def save_pipeline(folder: Path, scheduler: object | None = None) -> Path:
    """The pipeline as a folder, with the native size of its clips beside it."""
    pipeline(scheduler).save_pretrained(folder)
    (folder / "codmd.json").write_text('{"size": [5, 32, 32], "steps": 3, "guidance": 3.5, "fps": 8}')
    return folder
