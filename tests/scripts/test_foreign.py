"""The hint on an unknown key: what users of other toolkits type first, and what is misspelt."""

import pytest

from support.paths import ROOT
from support.scripts import load_script
from transformer.cli.commands import COMMANDS
from transformer.cli.overrides import parse_arguments
from transformer.config.foreign import TOOLKITS, foreign, normal
from transformer.config.keys import groups_of, key_meant, keys_of
from transformer.errors import InputError

# What was typed by whom came from fairseq, Marian, Sockeye, OpenNMT, JoeyNMT, Hugging Face, nanochat and Lightning: the
# 74 names by which the hints were measured first, and more of our own. Each is answered with what is before it.
MEASURED = {
    "train.learning_rate": "lr train.lr learning_rate optim.lr optimizer.lr",
    "train.tokens_per_step": "batch_size train.batch_size train.grad_accum train.gradient_accumulation_steps "
    "update_freq train.accum_count",
    "train.max_tokens": "per_device_train_batch_size train.micro_batch_size max_tokens dataset.max_tokens",
    "train.max_steps": "epochs train.epochs num_train_epochs steps train.steps train_steps max_update",
    "train.warmup_steps": "warmup train.warmup warmup_updates",
    "train.decay": "lr_scheduler train.scheduler",
    "train.precision": "fp16 train.fp16 bf16 train.dtype",
    "model.dropout": "dropout train.dropout",
    "model.n_layers": "layers model.layers model.num_layers enc_depth",
    "model.n_decoder_layers": "model.decoder_layers",
    "model.d_model": "model.hidden_size model.embed_dim model.dim",
    "model.d_ff": "model.ffn_dim",
    "model.n_heads": "model.heads model.num_heads",
    "tokenizer.vocab_size": "vocab_size model.vocab_size",
    "train.seed": "seed",
    "search.beam_size": "beam beam_size search.beam",
    "search.length_penalty": "lenpen search.alpha",
    "train.validate_every": "train.eval_every eval_steps",
    "train.save_every": "save_steps train.save_interval",
    "train.patience": "early_stopping",
    "train.clip_norm": "train.grad_clip max_grad_norm",
    "run_dir": "output_dir save_dir name",
    "data.train.src": "data.src src",
    "data.dev.src": "data.valid.src",
    "init_from": "finetune_from_model train_from",
    "train.label_smoothing": "label_smoothing model.label_smoothing",
    "torchrun": "train.gpus devices",
    "model.norm": "model.norm_first",
    "train.subword_sampling": "bpe_dropout",
    "the same command goes on": "resume",
}
MORE = {
    "train.learning_rate": "optim.learning_rate train.leraning_rate --lr train.learningrate --initial-learning-rate",
    "train.learning_rate_scale": "learning_rate_factor",
    "train.patience": "--max-num-checkpoint-not-improved",
    "model.d_ff": "--transformer-feed-forward-num-hidden",
    "train.adam_beta1": "--optimizer-betas",
    "train.max_steps": "train.max_stesp train.max_step train.num_steps epoch trainer.max_epochs",
    "train.tokens_per_step": "train.tokens_per_stp data.batch_size train.batch_tokens --update-freq batch",
    "train.max_tokens": "--max-tokens max_token",
    "train.warmup_steps": "warmup_step train.warmup_ratio",
    "train.decay": "train.lr_decay train.min_lr learning_rate_min",
    "train.subword_sampling": "train.bpe-dropout",
    "train.clip_norm": "train.clip clip_nrom",
    "train.weight_decay": "train.weight",
    "train.ema_decay": "train.ema",
    "train.label_smoothing": "train.label_smooth train.loss --criterion",
    "torchrun": "trainer.devices train.world_size --distributed-world-size",
    "metrics.jsonl": "train.wandb report_to",
    "train.prefetch": "data.workers --num-workers",
    "model.n_layers": "model.depth model.num_encoder_layers model.encoder.num_layers model.n_layer",
    "model.n_decoder_layers": "model.decoder.num_layers --dec-depth",
    "model.d_model": "modle.d_model model.dmodel model.n_embd --dim-emb",
    "model.norm": "model.pre_norm",
    "data.filter.max_length": "data.max_length data.max_len",
    "search.max_extra": "search.max_length max_new_tokens",
    "data.dev.tgt": "data.valid.tgt",
    "data.train.src": "data.train.source",
    "data.test.NAME.src": "test.NAME.src data.test.NAME.scr data.test.NAME.source",
    "data.extra.NAME.weight": "data.extra.NAME.wieght",
    "data.tgt_lang": "data.tgt_lng target_lang",
    "tokenizer.vocab_size": "model.vocab data.vocab_size --dim-vocabs",
    "tokenizer.algorithm": "tokenizer.type",
    "tokenizer.target.vocab_size": "share_vocab tgt_vocab_size --nwordstgt",
    "tokenizer.model": "tgt_vocab",
    "search.beam_size": "search.beamsize --beam num_beams",
    "experiment=base": "--arch",
    "train.device": "gpu",
    "train.kernels": "train.attention_kernel train.fused_loss",
}
NOT_HERE = (  # nothing here is nearly the same, though some keys look alike
    "train.momentum train.min_steps train.wd train.adam model.rope model.head_dim model.hidden "
    "model.width data.path data.min_length data.lang_pair tokenizer.lowercase tokenizer.size search.min_length output "
    "verbose train.decay_steps train.stop_metric train.max length data.src_tgt_lang model.n_encoders --output --config"
)


def hint(typed: str, command: str = "train") -> str:
    job = COMMANDS[command].job
    return key_meant(typed, [*keys_of(job), *groups_of(job)])


@pytest.mark.parametrize("meant", [*MEASURED, *MORE])
def test_key_meant_answers_foreign_and_misspelt_names(meant: str) -> None:
    typed = f"{MEASURED.get(meant, '')} {MORE.get(meant, '')}".split()
    assert [name for name in typed if meant not in hint(name)] == []
    others = {found for name in typed if (found := hint(name)).startswith("; did you mean")}
    assert others <= {f"; did you mean {meant!r}?"}


def test_key_meant_says_nothing_rather_than_what_misleads() -> None:
    assert {name: hint(name) for name in NOT_HERE.split() if hint(name)} == {}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("beam", "did you mean 'search.beam_size'?"),
        ("batch_size", "search.batch_tokens"),
        ("search.nbest", "did you mean 'n_best'?"),
        ("gpu", "here it is device=cpu or cuda"),
        ("--fp16", "here it is precision=bf16"),
        ("max_length", "search.max_extra"),
        ("top_k", "did you mean 'sample.top_k'?"),
        ("model", "here a trained model is run_dir=DIR"),
        ("src", "here the text is input=FILE, or standard input: echo Hello | transformer translate"),
        ("text", "here the text is input=FILE"),
        ("--source", "here the text is input=FILE"),
        ("lr", ""),
        ("epochs", ""),
    ],
)
def test_key_meant_knows_the_keys_of_the_command(typed: str, meant: str) -> None:
    found = hint(typed, "translate")
    assert meant in found
    assert bool(meant) == bool(found)


def test_key_meant_says_what_epochs_are_here() -> None:
    assert "train.max_steps to as many times the steps of one, which a training's first lines name" in hint("epochs")


def test_flags_of_other_toolkits_are_answered_with_keys() -> None:
    with pytest.raises(InputError, match=r"^unknown flag --max-update; did you mean 'train.max_steps'\?; settings are"):
        parse_arguments("train", ["--max-update", "100"])
    with pytest.raises(InputError, match=r"^unknown flag --quite; did you mean '--quiet'\?; settings are written"):
        parse_arguments("train", ["--quite"])


def test_foreign_names_stand_for_keys_that_there_are() -> None:
    known = {key for command in COMMANDS.values() for key in (*keys_of(command.job), *groups_of(command.job))}
    assert [key for row in foreign() for key in row.keys.split() if key not in known] == []
    assert [row.keys for row in foreign() if not any(row.names())] == []


def test_foreign_names_mean_one_thing_in_a_command() -> None:
    """But for those of which the first row counts: they mean one thing in training, and another in a search."""
    rows: dict[str, list[str]] = {}
    for row in foreign():
        for name in set(row.names()):
            rows.setdefault(name, []).append(row.keys)
    several = {name: keys for name, keys in rows.items() if len(keys) > 1}
    later = ("search.batch_tokens", "search.max_extra", "train.device device", "run_dir", "input")
    assert [name for name, keys in several.items() if len(keys) > 2 or keys[1] not in later] == []


def test_names_that_are_ours_need_no_sentence() -> None:
    """`max_steps` of Hugging Face is answered as a key without its group."""
    ours = {normal(key.rpartition(".")[2]): key for key in keys_of(COMMANDS["train"].job)}
    same = [name for row in foreign() for name in row.names() if name in ours]
    assert [name for name in same if "did you mean" not in hint(name)] == []


def test_documentation_has_the_foreign_names() -> None:
    script = load_script("foreign_names")
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert script.table_in(page) == script.table(), "bring the page up to date: python scripts/foreign_names.py --write"
    assert all(f"| {toolkit} |" in page for toolkit in TOOLKITS.values())
