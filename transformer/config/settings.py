"""Every setting, typed; the defaults are the paper's base model and recipe (sections 3, 5 and 6.1).

Each class below is a group of keys (`model.*`, `data.*`, ...); `jobs` puts groups together into the keys of a command.
A YAML file under `configs/` holds only what differs from here.

Checks that need no file run in `__post_init__`; a wrong value raises ValueError naming the key. Choices are enums with
lower-case member names. Nothing here imports torch.
"""

import math
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from transformer.registry import check_known
from transformer.vocabulary import VocabSize, VocabSizes

# Far beyond what anybody has a use for: a checkpoint that asks for more would only take memory and time.
MOST_POSITIONS = 1 << 16
MOST_BEAM = 1 << 10
SAMPLES_TO_RERANK = 32
MOST_PENALTY = 10.0  # ((5 + |Y|) / 6)^10 of the longest translation is still a number

# A tag is a word between marks, in ASCII. A bare `de` would be cut out of every word that begins with it, and another
# character might not come through the tokenizer's normalization as it is.
TAG = re.compile(r"(?=[!-~]*[A-Za-z0-9])[!-/:-@[-`{-~][!-~]*[!-/:-@[-`{-~]")
RESERVED_PIECES = ("<pad>", "<unk>", "<s>", "</s>")

TORCH = "torch"  # the search of the core; other engines are plug-ins

# What names files: str | list[str]. OmegaConf knows no such union, so `check_pair` sees to it.
Names = Any


# ---- choices --------------------------------------------------------------------------------------------------------


class Norm(Enum):
    """Where the LayerNorm stands: after the residual sum (the paper) or before the sub-layer."""

    post = "post"
    pre = "pre"


class Start(Enum):
    """What the decoder reads before the first target piece: the learned embedding of BOS, or zeros, as in Marian."""

    learned = "learned"
    zeros = "zeros"


class Positions(Enum):
    """Sinusoids (section 3.5), those with Marian's frequencies, or learned positions (Table 3, row E)."""

    sinusoidal = "sinusoidal"
    marian = "marian"
    learned = "learned"


class Score(Enum):
    """How attention scores a query and a key: `q.k / sqrt(d_k)` (eq. 1), `q.k`, or additive (3.2.1)."""

    scaled = "scaled"
    unscaled = "unscaled"
    additive = "additive"


class Activation(Enum):
    """What is between the two maps of a feed-forward network: `max(0, x)` (section 3.3), `x Phi(x)`, or `x sigmoid(x)`.

    Phi is the normal distribution, by the error function and not approximated (Hendrycks and Gimpel, 2016). The last is
    also called SiLU (Ramachandran et al., 2017, with beta 1).
    """

    relu = "relu"
    gelu = "gelu"
    swish = "swish"


class Decay(Enum):
    """What the learning rate does after the warm-up."""

    inverse_sqrt = "inverse_sqrt"
    linear = "linear"
    cosine = "cosine"
    constant = "constant"

    @property
    def ends_at_the_last_step(self) -> bool:
        """Whether the rate of every step depends on which is the last, so that a run cannot go on to another."""
        return self in (Decay.linear, Decay.cosine)


class OptimizerKind(Enum):
    """Adam for everything (section 5.3), or Muon for the matrices of the layers and Adam for everything else."""

    adam = "adam"
    muon = "muon"


class Precision(Enum):
    """The arithmetic of the forward pass; `auto` is bf16 where the hardware multiplies it, fp32 elsewhere.

    fp16 is for GPUs without bf16; `auto` never chooses it. Its range is small, so the loss is scaled.
    """

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp64 = "fp64"


class LayoutKind(Enum):
    """Sentences one a row, or end to end; `auto` is packed, except on a GPU that has no kernel for it."""

    auto = "auto"
    padded = "padded"
    packed = "packed"


class Kernels(Enum):
    """What computes attention and loss on a GPU: torch's kernels, or this package's own in Triton.

    `fused` attends to sentences whole, and has one kernel for residual connection, dropout and norm, too.
    """

    torch = "torch"
    triton = "triton"
    fused = "fused"


class AttentionKernel(Enum):
    """The kernel that attends to packed sentences on a GPU: torch's for sentences of any length, or one of ours."""

    varlen = "varlen"
    triton = "triton"
    sentences = "sentences"


class Device(Enum):
    """Where to compute; `auto` is the GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Algorithm(Enum):
    """How SentencePiece builds its pieces; `char` takes single characters."""

    bpe = "bpe"
    unigram = "unigram"
    char = "char"


class Normalization(Enum):
    """What SentencePiece does to a text before it cuts it into pieces; decoding does not bring back what it replaces.

    `identity` replaces nothing. `nfkc` is Unicode's form of that name: full-width letters and punctuation, ligatures,
    fractions and the like become plain ones. `nmt_nfkc` also drops control characters. Under all of them, whitespace of
    any kind and length is one space.
    """

    identity = "identity"
    nmt_nfkc = "nmt_nfkc"
    nfkc = "nfkc"


class Metric(Enum):
    """What decides which checkpoint is best: BLEU or chrF of the dev set's greedy translations, or the loss on it."""

    bleu = "bleu"
    chrf = "chrf"
    loss = "loss"

    @property
    def title(self) -> str:
        """Its name, as it is shown."""
        return {Metric.bleu: "BLEU", Metric.chrf: "chrF", Metric.loss: "loss"}[self]

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        return self is not Metric.loss


class EngineType(Enum):
    """The type of the weights in CTranslate2; `auto` is int8 where the processor multiplies it, float32 elsewhere."""

    auto = "auto"
    float32 = "float32"
    int8 = "int8"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Quantization(Enum):
    """The type of the weights of a model in another library; all but `float32` lose something."""

    float32 = "float32"
    int8 = "int8"
    float16 = "float16"
    bfloat16 = "bfloat16"


# How BLEU cuts text into words, by sacreBLEU's names; a class statement could not spell them.
BleuTokenizer = Enum("BleuTokenizer", ["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "flores200", "spm"])


class Format(Enum):
    """How a command prints its result."""

    text = "text"
    json = "json"


class Rerank(Enum):
    """By which score `translate` compares the translations of a line with one another."""

    chrf = "chrf"
    bleu = "bleu"


class LineFormat(Enum):
    """How a command writes what it has for each line of its input."""

    text = "text"
    tsv = "tsv"
    jsonl = "jsonl"


class OnResume(Enum):
    """What happens when a run resumes with another value of a key than it was started with."""

    refuse = "refuse"  # the key changes the mathematics: one run, one recipe
    allow = "allow"  # it changes nothing that the run has computed so far
    note = "note"  # it changes at most dropout masks and rounding: allowed, and said in the log


# ---- checks, and how a key is declared ------------------------------------------------------------------------------


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def at_least(config: object, section: str, minimum: float, *names: str) -> None:
    """Refuse numbers below `minimum`, NaN, and what no 64-bit integer could hold; None (left to a rule) passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            require(value >= minimum, f"{section}{name}={value} must be at least {minimum}")
            require(value < 2**63, f"{section}{name}={value} is too large")


def at_most(config: object, section: str, maximum: float, *names: str) -> None:
    """Refuse numbers above `maximum`; None (left to a rule) passes."""
    for name in names:
        value = getattr(config, name)
        is_allowed = value is None or value <= maximum
        require(is_allowed, f"{section}{name}={value} must be at most {maximum}")


def check_names(key: str, sets: dict[str, Any]) -> None:
    """Refuse names of sets that cannot be names of files; `dev` is the development set's."""
    for name in sets:
        is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name) is not None
        message = f"{key}.{name}: a name has letters, digits, '_' and '-' only, and is not dev"
        require(is_plain and name != "dev", message)


def check_tag(key: str, tag: str | None) -> None:
    """Refuse a tag that could not be a piece of its own; None (no tag) passes."""
    if tag is None:
        return
    require(
        TAG.fullmatch(tag) is not None, f"{key}={tag} must be one ASCII word between punctuation marks, such as <bt>"
    )
    require(tag not in RESERVED_PIECES, f"{key}={tag} is a piece with a meaning of its own: choose another tag")


def check_pair(key: str, pair: "PairConfig") -> None:
    """Refuse a set whose tag could not be a piece of its own, or whose files are named by neither text nor list.

    A number that YAML has made of a column or of a name becomes a text again.
    """
    if pair.augment is not None:
        check_known("augment", f"{key}.augment", pair.augment)
    check_tag(f"{key}.tag", pair.tag)
    for name in ("src", "tgt", "dataset"):
        value = getattr(pair, name)
        if name == "dataset" and value is None:
            continue
        items = value if isinstance(value, list) else [value]
        require(
            not any(isinstance(item, bool) for item in items),
            f"{key}.{name}={value!r:.80}: quote it, YAML takes a bare no for false",
        )
        are_texts = all(isinstance(item, str | int | float) for item in items)
        require(are_texts, f"{key}.{name}={value!r:.80} is neither a name nor a list of names")
        texts = [str(item) for item in items]
        setattr(pair, name, texts if isinstance(value, list) else texts[0])


def _below_one(config: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value < 1.0, f"{section}{name}={value} must be in [0, 1)")


def option(default: Any, meaning: str, *, on_resume: OnResume = OnResume.refuse) -> Any:
    """A key with its default, what `--help` says of it, and whether a run that resumes may have another value."""
    metadata = {"help": meaning, "on_resume": on_resume}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def paper_peak(d_model: int, warmup_steps: int) -> float:
    """The rate where eq. 3's two branches meet: `d_model^-0.5 * warmup_steps^-0.5`."""
    return 1.0 / math.sqrt(d_model * warmup_steps)


# ---- what a run is made of ------------------------------------------------------------------------------------------


@dataclass
class ModelConfig:
    """The network (section 3)."""

    n_layers: int = option(6, "layers of the encoder, and of the decoder unless n_decoder_layers is set")
    n_decoder_layers: int | None = option(None, "layers of the decoder (null: n_layers)")
    d_model: int = option(512, "width of every layer's input and output")
    d_ff: int = option(2048, "inner width of the feed-forward network")
    n_heads: int = option(8, "attention heads")
    d_k: int | None = option(None, "width of a head's queries and keys (null: d_model / n_heads)")
    d_v: int | None = option(None, "width of a head's values (null: d_model / n_heads)")
    score: Score = option(Score.scaled, "attention score of a query and a key: q.k / sqrt(d_k), q.k, or v.tanh(q + k)")
    activation: Activation = option(
        Activation.relu, "activation inside the feed-forward network (gelu: exact, by erf; swish: x * sigmoid(x))"
    )
    biases: bool = option(
        False, "a bias in each projection of attention and in the output projection, as Marian has (not in the paper)"
    )
    dropout: float = option(0.1, "dropout rate on each sub-layer's output and on the sum of embedding and position")
    attention_dropout: float = option(0.0, "dropout rate on the attention weights (not in the paper)")
    relu_dropout: float = option(0.0, "dropout rate inside the feed-forward network (not in the paper)")
    norm: Norm = option(
        Norm.post, "where LayerNorm stands: after the residual sum (post), or before the sub-layer (pre)"
    )
    positions: Positions = option(
        Positions.sinusoidal,
        "the paper's sinusoids; those of Marian, whose frequencies are a little lower (to=marian needs them); or "
        "learned positions",
    )
    max_positions: int = option(1024, "the longest sentence of the model, in pieces, EOS counted")
    start: Start = option(
        Start.learned,
        "what the decoder reads first: the learned embedding of <s>, or zeros, as in Marian (to=marian needs them; "
        "<s> and <pad> then have no probability)",
    )
    tie_embeddings: bool = option(
        True,
        "share one matrix between both embeddings and the output projection (paper, section 3.4); with a vocabulary "
        "for each language, between the target's embedding and the output",
    )

    def __post_init__(self) -> None:
        at_least(self, "model.", 1, "n_layers", "n_decoder_layers", "d_model", "d_ff", "n_heads", "d_k", "d_v")
        at_least(self, "model.", 1, "max_positions")
        at_most(self, "model.", MOST_POSITIONS, "max_positions")
        _below_one(self, "model.", "dropout", "attention_dropout", "relu_dropout")
        require(self.d_model % 2 == 0, f"model.d_model={self.d_model} must be even: sines and cosines come in pairs")
        is_multiple = self.d_model % self.n_heads == 0
        require(
            is_multiple or (self.d_k is not None and self.d_v is not None),
            f"model.d_model={self.d_model} is not a multiple of model.n_heads={self.n_heads}: set model.d_k, d_v",
        )

    @property
    def decoder_layers(self) -> int:
        """`n_decoder_layers`, with its default filled in."""
        return self.n_decoder_layers if self.n_decoder_layers is not None else self.n_layers

    @property
    def key_width(self) -> int:
        """`d_k`, with its default filled in."""
        return self.d_k if self.d_k is not None else self.d_model // self.n_heads

    @property
    def value_width(self) -> int:
        """`d_v`, with its default filled in."""
        return self.d_v if self.d_v is not None else self.d_model // self.n_heads


@dataclass
class PairConfig:
    """Sentence pairs: two parallel text files, or a data set with a column for each language.

    Files may come in shards: a list of them, a pattern such as `t/*.en`, or a folder (see `data.shards`). A run that
    resumes may name other files: their content is compared by digest, so a corpus may move. The tag of a development or
    test set may change as its text may (see `training.record`).
    """

    src: Names = option(
        "",
        "text in the source language, a sentence a line: a file, a pattern such as 't/*.en.gz', a folder, or a list "
        "[A,B]; with dataset, the column of the sources (empty: named as src_lang; column 1 of a .tsv or .csv "
        "that does not name its columns so)",
        on_resume=OnResume.allow,
    )
    tgt: Names = option(
        "",
        "text in the target language, line for line, in as many files; with dataset, the column of the targets (empty: "
        "named as tgt_lang; column 2 of a .tsv or .csv that does not name its columns so)",
        on_resume=OnResume.allow,
    )
    dataset: Names | None = option(
        None,
        "instead of two texts: .tsv, .csv, .jsonl, .json, .parquet or .tmx, as a file, a pattern, a folder or a list; "
        "a data set of the Hugging Face hub; a test set by name, as sacrebleu:wmt14, flores:devtest, "
        "ntrex:test, wmt24pp:test or bouquet:test; or a corpus that mtdata knows, as mtdata:Statmt-europarl-10-deu-eng",
        on_resume=OnResume.allow,
    )
    subset: str | None = option(
        None, "subset (configuration) of a hub data set, such as de-en", on_resume=OnResume.allow
    )
    split: str | None = option(None, "split of a hub data set, such as train", on_resume=OnResume.allow)
    tag: str | None = option(None, "a word in front of each source, such as <bt> or <2de> (null: none)")
    augment: str | None = option(
        None,
        "for development and test sets only: change every pair, to see what that costs: upper, title, unmarked (no "
        "final punctuation), typos, noise, or mixed, which picks one of the first four (null: no change)",
        on_resume=OnResume.allow,
    )
    src_lang: str | None = option(
        None, "language of the sources, if it is not the run's (null: the run's)", on_resume=OnResume.allow
    )
    tgt_lang: str | None = option(
        None,
        "language of the targets, if it is not the run's; it decides how a set is scored (null: the run's)",
        on_resume=OnResume.allow,
    )

    @property
    def title(self) -> str:
        """What the set is called where people read it: its data set, or its sources, as far as the first name."""
        names: str | list[str] = self.dataset or self.src
        if isinstance(names, str):
            return names
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass
class ExtraConfig(PairConfig):
    """More training pairs, and how often an epoch has them."""

    weight: float = option(1.0, "copies of each pair in an epoch; with 1.5, half of the pairs come twice")


@dataclass
class FilterConfig:
    """Which training pairs are dropped: as whole pairs, and counted. A pair with an empty side always is."""

    max_length: int = option(256, "drop pairs with a side of more pieces than this")
    max_ratio: float = option(
        9.0, "drop pairs with one side longer than the other, in pieces, by more than this factor"
    )
    drop_identical: bool = option(False, "drop pairs whose two sides are the same text")
    drop_duplicates: bool = option(False, "drop pairs that occurred before, in whichever training set")
    doctor: list[str] | None = option(
        None,
        "drop the pairs in which these detectors of `transformer doctor`, or of a plug-in, find a fault: "
        "[copies,encoding,markup,languages,lengths,alignment]",
    )

    def __post_init__(self) -> None:
        at_least(self, "data.filter.", 1, "max_length", "max_ratio")


def is_training_set(name: str) -> bool:
    """Whether the set of this name is trained on; the others are for evaluation."""
    return name == "train" or name.startswith("extra.")


@dataclass
class DataConfig:
    """The corpus."""

    src_lang: str = option("en", "source language, an ISO 639 code")
    tgt_lang: str = option("de", "target language, an ISO 639 code: it decides how scores split text into words")
    bleu_tokenize: BleuTokenizer | None = option(
        None, "how BLEU splits text into words, by sacreBLEU's names (null: by the language; 13a for most)"
    )
    scores: list[str] = option(
        [],
        "more scores for the test sets: paper_bleu, or scores of other installed packages",
        on_resume=OnResume.allow,
    )
    root: str = option(
        "data", "folder of corpora, or hub data set, that the experiments read from", on_resume=OnResume.allow
    )
    train: PairConfig = field(default_factory=PairConfig)
    dev: PairConfig = field(default_factory=PairConfig)
    devs: dict[str, PairConfig] = field(
        default_factory=dict, metadata={"help": "one of several development sets, in place of data.dev: "}
    )
    test: dict[str, PairConfig] = field(default_factory=dict, metadata={"help": "a test set: "})
    extra: dict[str, ExtraConfig] = field(default_factory=dict, metadata={"help": "more training pairs: "})
    temperature: float | None = option(
        None,
        "balance the training sets, in addition to their own weights: a set's share of an epoch is in proportion to "
        "its size to the power 1 / temperature (null or 1: as they are; 5: small sets come much more often)",
    )
    filter: FilterConfig = field(default_factory=FilterConfig)
    check: bool = option(
        True,
        "warn of a header, exchanged sides and test sets that are trained on, as far as the first 10,000 pairs show "
        "them (doctor looks at all)",
        on_resume=OnResume.allow,
    )
    store_dir: str | None = option(
        None,
        "where prepared corpora, and copies of data sets, are kept (null: beside the run)",
        on_resume=OnResume.allow,
    )

    def __post_init__(self) -> None:
        check_names("data.devs", self.devs)
        check_names("data.test", self.test)
        check_names("data.extra", self.extra)
        require(
            not self.devs or self.dev == PairConfig(),
            "data.dev and data.devs are both set: name every development set under data.devs, and leave data.dev out",
        )
        for name, pair in self.sets().items():
            check_pair(f"data.{name}", pair)
            require(
                pair.augment is None or not is_training_set(name),
                f"data.{name}.augment={pair.augment} is for development and test sets: set train.augment.* instead",
            )
        for name, extra in self.extra.items():
            require(0.0 < extra.weight <= 1000.0, f"data.extra.{name}.weight={extra.weight} must be in (0, 1000]")
        at_least(self, "data.", 1, "temperature")
        at_most(self, "data.", 100, "temperature")
        for key, language in {**self.src_langs(), **self.tgt_langs()}.items():
            is_bool = language in ("True", "False")  # Norwegian is `no`
            require(not is_bool, f"data.{key}={language}: quote it, YAML takes a bare no for false")

    def sets(self) -> dict[str, PairConfig]:
        """Every set of pairs by its key below `data`, the small ones first."""
        sets = self.dev_sets()
        sets |= {f"test.{name}": pair for name, pair in self.test.items()}
        return sets | self.training_sets()

    def training_sets(self) -> dict[str, PairConfig]:
        """The training sets by their keys below `data`."""
        return {"train": self.train, **{f"extra.{name}": pair for name, pair in self.extra.items()}}

    def dev_sets(self) -> dict[str, PairConfig]:
        """The development sets by their keys below `data`: the one of `dev`, or those of `devs`."""
        return {f"devs.{name}": pair for name, pair in self.devs.items()} or {"dev": self.dev}

    def src_langs(self) -> dict[str, str]:
        """Every source language that is set, by its key below `data`."""
        return self._languages("src_lang")

    def tgt_langs(self) -> dict[str, str]:
        """Every target language that is set, by its key below `data`."""
        return self._languages("tgt_lang")

    def _languages(self, name: str) -> dict[str, str]:
        of_sets = {f"{key}.{name}": getattr(pair, name) for key, pair in self.sets().items()}
        return {name: getattr(self, name), **{key: language for key, language in of_sets.items() if language}}

    def directions(self) -> list[tuple[str, str]]:
        """Source and target language of the training sets, each pair once."""
        return list(dict.fromkeys(map(self.languages_of, self.training_sets())))

    def languages_of(self, name: str) -> tuple[str, str]:
        """Source and target language of a set, by its key below `data`."""
        pair = self.sets().get(name, PairConfig())
        return pair.src_lang or self.src_lang, pair.tgt_lang or self.tgt_lang

    def languages_under(self, tag: str | None) -> tuple[str, str]:
        """Source and target language of the training set with this tag; without one, those of the run."""
        names = (name for name, pair in self.training_sets().items() if tag is not None and pair.tag == tag)
        return self.languages_of(next(names, ""))

    def tgt_lang_of(self, name: str) -> str:
        """The target language of a set that the run keeps: a development set by its key, or a test set by its name."""
        return self.direction_of(name)[1]

    def direction_of(self, name: str) -> tuple[str, str, str | None]:
        """Both languages and the tag of a set that the run keeps; of one that is not configured, those of the run."""
        key = name if name in self.dev_sets() else f"test.{name}"
        return *self.languages_of(key), self.sets().get(key, PairConfig()).tag

    def learnt_tags(self) -> list[str]:
        """The tags of the training sets."""
        tags = (pair.tag for pair in self.training_sets().values())
        return list(dict.fromkeys(tag for tag in tags if tag is not None))

    def required_tags(self) -> list[str]:
        """The tags of the training sets; none where one of them has no tag, as beside text that was translated back."""
        is_without = any(pair.tag is None for pair in self.training_sets().values())
        return [] if is_without else self.learnt_tags()


@dataclass
class TargetTokenizerConfig:
    """The target's own model, if any of this is set; what is null is as in `tokenizer`, but for the file."""

    algorithm: Algorithm | None = option(
        None, "how SentencePiece finds the pieces of the target's own vocabulary (null: tokenizer.algorithm)"
    )
    vocab_size: int | None = option(
        None,
        "give the target a vocabulary of its own, of this many pieces; any key of tokenizer.target gives it one "
        "(null: tokenizer.vocab_size; all of them null: one vocabulary for both languages)",
    )
    normalization: Normalization | None = option(
        None, "tokenizer.normalization of the target's own vocabulary (null: the same)"
    )
    byte_fallback: bool | None = option(None, "tokenizer.byte_fallback of the target's own vocabulary (null: the same)")
    character_coverage: float | None = option(
        None, "tokenizer.character_coverage of the target's own vocabulary (null: the same)"
    )
    sample_lines: int | None = option(None, "tokenizer.sample_lines of the target's own vocabulary (null: the same)")
    model: str | None = option(
        None,
        "use this SentencePiece model file for the target instead of training one",
        on_resume=OnResume.allow,
    )

    def __post_init__(self) -> None:
        _check_tokenizer(self, "tokenizer.target.")


@dataclass
class TokenizerConfig:
    """SentencePiece, one model for both languages (section 5.1), unless the target has its own."""

    algorithm: Algorithm = option(Algorithm.bpe, "how SentencePiece finds the pieces (char: single characters)")
    vocab_size: int = option(
        37_000,
        "number of pieces, which both languages share unless tokenizer.target is set; a small corpus may give fewer",
    )
    normalization: Normalization = option(
        Normalization.identity,
        "identity leaves characters as they are; nfkc replaces full-width forms, ligatures and the like; nmt_nfkc also "
        "drops control characters",
    )
    byte_fallback: bool = option(False, "spell unknown characters as bytes instead of <unk>")
    character_coverage: float = option(1.0, "share of the characters in the text that get a piece of their own")
    sample_lines: int = option(1_000_000, "train the tokenizer on at most this many lines")
    model: str | None = option(
        None, "use this SentencePiece model file instead of training one", on_resume=OnResume.allow
    )
    target: TargetTokenizerConfig = field(default_factory=TargetTokenizerConfig)

    def __post_init__(self) -> None:
        _check_tokenizer(self, "tokenizer.")

    def models(self) -> dict[str, "TokenizerConfig"]:
        """The settings of the one model, or of the source's and of the target's, by the group of keys of each."""
        one = replace(self, target=TargetTokenizerConfig())
        values = {field.name: getattr(self.target, field.name) for field in fields(self.target)}
        own = {name: value for name, value in values.items() if value is not None}
        if not own:
            return {"tokenizer": one}
        return {"tokenizer": one, "tokenizer.target": replace(one, **{"model": None, **own})}

    @property
    def vocab_sizes(self) -> VocabSize:
        """The number of pieces asked for, or both of them; what is trained may have fewer, and a file has its own."""
        sizes = [model.vocab_size for model in self.models().values()]
        return sizes[0] if len(sizes) == 1 else VocabSizes(*sizes)


def _check_tokenizer(config: TokenizerConfig | TargetTokenizerConfig, prefix: str) -> None:
    at_least(config, prefix, 8, "vocab_size")
    at_least(config, prefix, 1, "sample_lines")
    coverage = config.character_coverage
    is_allowed = coverage is None or 0.98 <= coverage <= 1.0
    require(is_allowed, f"{prefix}character_coverage={coverage} must be in [0.98, 1]")


@dataclass
class AugmentConfig:
    """Which share of the pairs each epoch changes, and how; one change after the other (not in the paper)."""

    unmarked: float = option(0.0, "share of the pairs that lose the final punctuation of both sides, in every epoch")
    typos: float = option(0.0, "share of the pairs whose sources have misspelt words, in every epoch")
    title: float = option(0.0, "share of the pairs whose words all begin with a capital on both sides, in every epoch")
    upper: float = option(0.0, "share of the pairs in capitals on both sides, in every epoch")
    noise: float = option(
        0.0, "share of the pairs that become random characters, the same on both sides, in every epoch"
    )

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            require(0.0 <= rate <= 1.0, f"train.augment.{name}={rate} must be in [0, 1]")

    @property
    def rates(self) -> dict[str, float]:
        """Those above 0."""
        return {name: rate for name, rate in vars(self).items() if rate}


@dataclass
class TrainConfig:
    """The recipe (section 5) and the run."""

    seed: int = option(1, "seed of everything random")
    # `training.record` refuses another one under linear and cosine decay, whose every rate depends on it.
    max_steps: int = option(100_000, "number of optimizer updates", on_resume=OnResume.allow)
    tokens_per_step: int = option(
        25_000,
        "at most this many source tokens, and target tokens, in an update over all devices; padding does not count",
    )
    max_tokens: int | None = option(
        None,
        "at most this many source tokens, and target tokens, in a micro-batch; padding counts; packed, rounded up to a "
        "multiple of 128 (null: 5,120 on a CPU, 8,192 on a GPU of up to 36 GiB, 32,768 on a larger one)",
        on_resume=OnResume.note,
    )
    fit_memory: bool = option(
        False, "find the largest max_tokens that fits into memory, before the first step", on_resume=OnResume.allow
    )
    learning_rate: float | None = option(
        None, "peak of the learning rate (null: learning_rate_scale times the peak of the paper's equation 3)"
    )
    learning_rate_scale: float = option(1.0, "if learning_rate is null, the peak is this many times that of equation 3")
    warmup_steps: int = option(4_000, "updates until the learning rate is at its peak")
    decay: Decay = option(
        Decay.inverse_sqrt, "what the learning rate does after its peak; linear and cosine reach 0 at max_steps"
    )
    optimizer: OptimizerKind = option(
        OptimizerKind.adam, "Adam for everything, or Muon for the matrices of the layers and Adam for the rest"
    )
    adam_beta1: float = option(0.9, "Adam's decay of the gradient's mean")
    adam_beta2: float = option(0.98, "Adam's decay of the gradient's square")
    adam_eps: float = option(1e-9, "Adam's epsilon")
    weight_decay: float = option(
        0.0, "decoupled weight decay: an update shrinks each matrix, embeddings too, by its learning rate x this"
    )
    label_smoothing: float = option(0.1, "probability taken from the right piece and spread over the others")
    clip_norm: float | None = option(None, "largest gradient norm (null: no clipping, as the paper)")
    subword_sampling: float | None = option(
        None,
        "cut text into different pieces in every epoch: with BPE, the probability of skipping a merge each time that "
        "it is possible (BPE-dropout; 0.15 is about SentencePiece's 0.1); with unigram, the exponent alpha (null: no)",
    )
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    ema_decay: float | None = option(
        None, "translate with an exponential moving average of the weights, of this decay (null: none)"
    )
    precision: Precision = option(
        Precision.auto, "arithmetic of the forward pass (auto: bf16 where the hardware multiplies it, else fp32)"
    )
    device: Device = option(Device.auto, "where to compute", on_resume=OnResume.note)
    layout: LayoutKind = option(
        LayoutKind.auto,
        "padded: one sentence a row; packed: sentences end to end (auto: packed, unless a GPU has no kernel for it)",
    )
    compile: bool | None = option(
        None,
        "torch.compile the training step (null: on a GPU, where batches are packed, for 15,000 steps or more; 5,000 "
        "without CUDA graphs)",
        on_resume=OnResume.note,
    )
    cuda_graphs: bool | None = option(
        None,
        "let GPUs replay a recorded step, so that they do not wait for their host; batches must be packed, in bf16 or "
        "fp32 (null: on one GPU; true: on several, too, which add up their gradients in one message)",
        on_resume=OnResume.note,
    )
    kernels: Kernels = option(
        Kernels.torch,
        "kernels for packed attention and the loss on a GPU: torch's, or this package's own (triton); fused: newer "
        "ones, for residual connections and norms, too",
        on_resume=OnResume.note,
    )
    proof: bool | None = option(
        None,
        "before the first step, compare how this device computes with the plain way, and avoid what it computes wrong "
        "(null: on a GPU)",
        on_resume=OnResume.allow,
    )
    profile: int | None = option(
        None, "a step whose trace is written into the run directory (null: none)", on_resume=OnResume.allow
    )
    threads: int | None = option(
        None, "CPU threads (null: this rank's share of the cores, OMP_NUM_THREADS at most)", on_resume=OnResume.note
    )
    deterministic: bool = option(False, "make runs on a GPU bit-identical, but slower")
    prefetch: int = option(4, "steps that the loader prepares ahead", on_resume=OnResume.allow)
    log_every: int = option(100, "steps between log lines", on_resume=OnResume.allow)
    save_every: int = option(1_500, "steps between checkpoints", on_resume=OnResume.allow)
    validate_every: int = option(1_500, "steps between validations", on_resume=OnResume.allow)
    keep_last: int = option(5, "newest checkpoints to keep (at least train.average)", on_resume=OnResume.allow)
    keep_best: int = option(1, "best checkpoints to keep", on_resume=OnResume.allow)
    metric: Metric = option(
        Metric.bleu, "what decides which checkpoint is best, and when patience ends", on_resume=OnResume.allow
    )
    patience: int | None = option(None, "stop after this many validations without a new best", on_resume=OnResume.allow)
    average: int = option(
        5, "last checkpoints to average into the final model (paper, section 6.1)", on_resume=OnResume.allow
    )
    samples: int = option(
        3, "dev translations that trackers show of each validation; the log has the first", on_resume=OnResume.allow
    )
    trackers: list[str] | None = option(
        None,
        "show the training by these, too: [trackio], [wandb] or both; one that fails never ends or slows it; "
        "[bounds] says in the log where a curve is not as it should be, for experiments that have bounds",
        on_resume=OnResume.allow,
    )

    @staticmethod
    def upgrade(stored: dict[str, Any]) -> dict[str, Any]:
        """The settings that a run or checkpoint of an earlier version holds, under today's keys: see `from_json`."""
        gone = {
            "attention_kernel": ("varlen", "triton", "flex", "auto"),
            "fused_loss": (False, True),
            "attention_images": (False, True),
        }
        for key, values in gone.items():
            value = stored.get(key, values[0])
            require(value in values, f"train.{key}={value!r:.80} is not one of {values}")

        upgraded = {key: value for key, value in stored.items() if key not in gone}
        if stored.get("attention_kernel") == "triton" or stored.get("fused_loss") is True:
            upgraded.setdefault("kernels", "triton")
        return upgraded

    def __post_init__(self) -> None:
        at_least(self, "train.", 0, "seed", "prefetch", "keep_best", "samples", "weight_decay")
        at_least(self, "train.", 1, "max_steps", "warmup_steps", "threads", "log_every", "save_every", "validate_every")
        at_least(self, "train.", 1, "patience", "average", "tokens_per_step", "max_tokens", "profile")
        at_least(self, "train.", 2, "keep_last")
        _below_one(self, "train.", "adam_beta1", "adam_beta2", "label_smoothing")

        decay = self.ema_decay
        require(decay is None or 0.0 < decay < 1.0, f"train.ema_decay={decay} must be in (0, 1)")
        sampling = self.subword_sampling
        require(sampling is None or 0.0 < sampling <= 1000.0, f"train.subword_sampling={sampling} must be in (0, 1000]")
        for name in ("learning_rate", "learning_rate_scale", "adam_eps", "clip_norm"):
            value = getattr(self, name)
            require(
                value is None or (math.isfinite(value) and value > 0),
                f"train.{name}={value} must be above 0, and finite",
            )

        # Keys that do not go together.
        require(
            not (self.fit_memory and self.max_tokens is not None),
            f"train.fit_memory finds what train.max_tokens={self.max_tokens} sets: leave one of them out",
        )
        require(
            self.keep_last >= self.average,
            f"train.keep_last={self.keep_last} must be at least train.average={self.average}: raise it",
        )

    def peak(self, d_model: int) -> float:
        """The learning rate at the end of the warm-up, for a model of this width."""
        return self.learning_rate or self.learning_rate_scale * paper_peak(d_model, self.warmup_steps)


@dataclass
class SearchConfig:
    """Beam search (section 6.1)."""

    beam_size: int = option(4, "hypotheses kept for each sentence; 1 is greedy search", on_resume=OnResume.allow)
    length_penalty: float = option(
        0.6,
        "alpha of the length penalty ((5 + |Y|) / 6)^alpha; larger prefers longer translations",
        on_resume=OnResume.allow,
    )
    max_extra: int = option(
        50, "a translation has at most this many pieces more than its source", on_resume=OnResume.allow
    )
    batch_tokens: int | None = option(
        None,
        "size of a batch: source pieces, padding counted, x beam_size (null: by device and engine)",
        on_resume=OnResume.allow,
    )
    engine: str = option(
        TORCH,
        "what searches: torch, or ctranslate2, faster on a CPU (needs the extra export; see docs/translating.md)",
        on_resume=OnResume.allow,
    )
    engine_type: EngineType = option(
        EngineType.auto,
        "type of CTranslate2's weights (auto: int8 where the processor multiplies it, else float32)",
        on_resume=OnResume.allow,
    )
    cuda_graphs: bool | None = option(
        None,
        "when a run is loaded to translate, let a GPU replay recorded steps of a beam search (null: no)",
        on_resume=OnResume.allow,
    )

    def __post_init__(self) -> None:
        at_least(self, "search.", 1, "beam_size", "max_extra", "batch_tokens")
        at_least(self, "search.", 0, "length_penalty")
        at_most(self, "search.", MOST_BEAM, "beam_size")
        at_most(self, "search.", MOST_PENALTY, "length_penalty")
        require(
            self.engine != TORCH or self.engine_type is EngineType.auto,
            f"search.engine_type={self.engine_type.name} is for search.engine=ctranslate2: set that, or leave it out",
        )


# ---- settings of single commands ------------------------------------------------------------------------------------


@dataclass
class SearchOverride:
    """Search settings of one command; null means: the setting that the run was trained with."""

    beam_size: int | None = option(None, "hypotheses kept for each sentence; 1 is greedy search (null: the run's)")
    length_penalty: float | None = option(None, "alpha of the length penalty (null: the run's)")
    max_extra: int | None = option(
        None, "a translation has at most this many pieces more than its source (null: the run's)"
    )
    batch_tokens: int | None = option(
        None, "size of a batch: source pieces, padding counted, x beam_size (null: the run's)"
    )
    engine: str | None = option(
        None, "what searches: torch, or ctranslate2, faster on a CPU (needs the extra export; null: the run's)"
    )
    engine_type: EngineType | None = option(
        None, "type of CTranslate2's weights: auto, float32, int8, float16, bfloat16 (null: the run's)"
    )
    cuda_graphs: bool | None = option(
        None, "let a GPU replay the recorded steps of a beam search (null: the run's setting)"
    )

    def over(self, base: SearchConfig) -> SearchConfig:
        """`base`, with the values that are set here. Raises ValueError for a value that SearchConfig refuses."""
        if self.engine == TORCH:
            base = replace(base, engine_type=EngineType.auto)  # of the engine that is not used
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(base, **{name: value for name, value in values.items() if value is not None})

    def __post_init__(self) -> None:
        if self.engine is not None:
            check_known("search", "search.engine", self.engine)
        of_engine = self.engine != TORCH and self.engine_type is not None  # which may be the run's
        self.over(SearchConfig(engine="ctranslate2" if of_engine else TORCH))


@dataclass
class SampleConfig:
    """Sampling instead of a search; null means: no limit, or a temperature of 1."""

    temperature: float | None = option(
        None, "sample instead of searching, with logits divided by this (1: the model's own probabilities)"
    )
    top_k: int | None = option(None, "sample instead of searching, among this many most probable pieces")
    top_p: float | None = option(
        None, "sample instead of searching, among the fewest pieces whose probabilities add up to this"
    )
    seed: int = option(1, "the same seed draws the same samples for a line, up to rounding (least in fp32)")

    def __post_init__(self) -> None:
        at_least(self, "sample.", 1, "top_k")
        at_least(self, "sample.", 0, "seed")
        temperature = self.temperature
        is_allowed = temperature is None or 0.0 < temperature < math.inf
        require(is_allowed, f"sample.temperature={temperature} must be above 0, and finite")
        require(self.top_p is None or 0.0 < self.top_p <= 1.0, f"sample.top_p={self.top_p} must be in (0, 1]")
        require(self.is_wanted or self.seed == 1, "sample.seed needs sample.temperature, sample.top_k or sample.top_p")

    @property
    def is_wanted(self) -> bool:
        """Whether to sample."""
        return not (self.temperature is None and self.top_k is None and self.top_p is None)


@dataclass
class SweepConfig:
    """Search settings that `evaluate` compares on the development set; null means: the one of `search`."""

    beam_size: list[int] | None = option(None, "compare these beam sizes on the dev set, such as 1,4,8")
    length_penalty: list[float] | None = option(None, "compare these alphas on the dev set, such as 0,0.6,1,1.4")

    def __post_init__(self) -> None:
        for name, minimum, maximum in (("beam_size", 1, MOST_BEAM), ("length_penalty", 0, MOST_PENALTY)):
            values = getattr(self, name)
            require(values is None or len(values) > 0, f"sweep.{name} names no value")
            are_allowed = all(minimum <= value <= maximum for value in values or [])
            require(are_allowed, f"sweep.{name}={values}: each must be a number from {minimum} to {maximum}")

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to compare."""
        return self.beam_size is not None or self.length_penalty is not None
