"""Models of Hugging Face's Marian as `transformers` itself saves them, with random weights, and tokenizers that
SentencePiece has trained. Nothing here is of the package."""

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import torch

_WORDS = (
    "the a dog cat house tree green small sees under over runs sleeps near two old and with water bird",
    "der ein hund katze haus baum grün klein sieht unter über läuft schläft nahe zwei alt und mit wasser vogel",
)
ENGLISH, GERMAN = (text.split() for text in _WORDS)
SCRIPTS = [
    "The old dog sees two birds.",
    "Größe, Straße; naïve café — “quoted”",
    "Ελληνικά γράμματα και αριθμοί 12,5",
    "Старая собака видит птицу",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "日本語の文、そして中国语。",
    "한국어 문장",
    "ქართული ენა",
    "  two   spaces\tand a tab\u00a0here ",
    "🙂 ½ ﬁ ① ＡＢＣ",
    ">>de<< the old dog",
    ">>xx<< the old dog",
    ">> no code",
    "<unk> </s> in the text".replace("<unk>", "unk").replace("</s>", "s"),
    "",
]


def sentences(words: Sequence[str], count: int = 300, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(2, 9))) for _ in range(count)]


def train_spm(words: Sequence[str], size: int, kind: str) -> bytes:
    """As OPUS-MT trains them: SentencePiece's own special ids, and its own normalization."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(words)),
        model_writer=file,
        vocab_size=size,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return file.getvalue()


@dataclass(frozen=True)
class Variant:
    """What a model is like."""

    spm: str = "unigram"
    separate: bool = False  # vocabularies
    own_start: bool = False  # of the decoder, which is not padding then
    config: tuple[tuple[str, Any], ...] = ()


VARIANTS = {
    "OPUS-MT": Variant(),
    "BPE, ReLU, deep encoder": Variant("bpe", config=(("activation_function", "relu"), ("encoder_layers", 3))),
    "two vocabularies": Variant(separate=True),
    "two vocabularies, BPE, untied": Variant("bpe", separate=True, config=(("tie_word_embeddings", False),)),
    "GELU, matrices of their own": Variant(
        config=(("activation_function", "gelu"), ("share_encoder_decoder_embeddings", False))
    ),
    "another start": Variant(own_start=True),
}


def vocabulary(models: Sequence[bytes], *, own_start: bool, codes: bool) -> dict[str, int]:
    """Ids as Marian has them: the end first, padding last, and not every piece of the models between."""
    pieces = set[str]()
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces |= {processor.id_to_piece(index) for index in range(3, len(processor))}
    draw = random.Random(1)
    kept = [piece for piece in sorted(pieces) if draw.random() < 0.9]
    draw.shuffle(kept)
    extra = [">>de<<", "語", "日本"] if codes else []
    start = ["<begin>"] if own_start else []
    return {piece: index for index, piece in enumerate(["</s>", "<unk>", *kept, *extra, *start, "<pad>"])}


def save(folder: Path, variant: Variant, *, seed: int = 0) -> Any:
    """Save a model with its tokenizer, and return it as `transformers` has it, in evaluation."""
    from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    spms = [train_spm(ENGLISH, 90, variant.spm), train_spm(GERMAN, 80, variant.spm)]
    sides = [[spms[0]], [spms[1]]] if variant.separate else [spms]
    vocabularies = [
        vocabulary(models, own_start=variant.own_start, codes=not variant.separate or side == 0)
        for side, models in enumerate(sides)
    ]
    for name, content in (("source.spm", spms[0]), ("target.spm", spms[1])):
        (folder / name).write_bytes(content)
    names = ("vocab.json", "target_vocab.json")
    for name, ids in zip(names, vocabularies, strict=False):
        (folder / name).write_text(json.dumps(ids), encoding="utf-8")
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "vocab.json"),
        target_vocab_file=str(folder / "target_vocab.json") if variant.separate else None,
        separate_vocabs=variant.separate,
        source_lang="en",
        target_lang="de",
    )
    tokenizer.save_pretrained(folder)

    of_target = vocabularies[-1]
    sizes: dict[str, Any] = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "d_model": 16,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "activation_function": "swish",
        "max_position_embeddings": 64,
        "share_encoder_decoder_embeddings": not variant.separate,
    }
    torch.manual_seed(seed)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(vocabularies[0]),
            decoder_vocab_size=len(of_target),
            pad_token_id=of_target["<pad>"],
            eos_token_id=of_target["</s>"],
            decoder_start_token_id=of_target["<begin>" if variant.own_start else "<pad>"],
            forced_eos_token_id=None,
            scale_embedding=True,
            dropout=0.0,
            **sizes | dict(variant.config),
        )
    ).eval()
    banned = [of_target["<pad>"], *([of_target["<begin>"]] if variant.own_start else [])]
    model.generation_config = GenerationConfig(
        num_beams=4,
        max_length=40,
        bad_words_ids=[[index] for index in banned],
        pad_token_id=of_target["<pad>"],
        eos_token_id=of_target["</s>"],
        decoder_start_token_id=model.config.decoder_start_token_id,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.final_logits_bias.add_(0.5 * torch.randn_like(model.final_logits_bias))
        model.final_logits_bias[0, of_target["</s>"]] += 3.0  # translations shall end
        if not variant.own_start:  # Marian's padding
            for matrix in (model.get_encoder().embed_tokens, model.get_decoder().embed_tokens, model.lm_head):
                matrix.weight[of_target["<pad>"]] = 0.0
            model.final_logits_bias[0, of_target["<pad>"]] = 0.0
    model.save_pretrained(folder)
    return MarianMTModel.from_pretrained(folder).eval()
