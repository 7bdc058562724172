"""The miniature's tokenizer and text encoder: stock classes over the world's few words."""

from __future__ import annotations

from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from codmd.mini import captions, world

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
TEXT_WIDTH = 96


def vocabulary() -> list[str]:
    """Every word that a caption can hold, the special tokens first."""
    phrases = (
        *world.SHAPES, *world.COLOURS, *world.SIZES, *world.STYLES, *world.BACKGROUNDS, *world.RELATIONS,
        *captions.MOTION_PHRASES.values(), *captions.PAIR_PHRASES.values(), *captions.CAMERA_PHRASES.values(),
        *captions.SPEED_WORDS.values(), "a an and shape moves both move background style ,",
    )  # fmt: skip
    return [PAD, END, UNKNOWN, *sorted({word for phrase in phrases for word in phrase.split()})]


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Lower-case words and commas; a closing `</s>`, as T5 has; words from elsewhere become `<unk>`."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNKNOWN))
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    core.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=512
    )


def new_text_encoder() -> UMT5EncoderModel:
    """UMT5 with two layers of width 96."""
    config = UMT5Config(
        vocab_size=len(vocabulary()), d_model=TEXT_WIDTH, d_kv=24, d_ff=192, num_layers=2, num_heads=4,
        relative_attention_num_buckets=16, relative_attention_max_distance=32, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return UMT5EncoderModel(config)
