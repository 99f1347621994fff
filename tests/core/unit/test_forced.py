"""Translations that are given: their probabilities and alignments, prefixes, and several models as one.

The truths are a forward pass written here in float64, and brute force over a tiny vocabulary.
"""

import io
import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer
from support.searches import Prefixes, Table, all_same, beam_search, exhaustive, step
from support.translations import CONFIG, SEARCH, network, objects_of, output_of, sentences, translator_with, write_run
from transformer.config.jobs import ScoreJob, TranslateJob
from transformer.config.settings import (
    Device,
    LineFormat,
    ModelConfig,
    Norm,
    Precision,
    SampleConfig,
    Start,
    TokenizerConfig,
)
from transformer.data.tokenizer import train_tokenizer
from transformer.decoding.ensemble import EnsembleState, decode_step
from transformer.decoding.forced import align, piece_log_probs
from transformer.decoding.sampling import Sampling
from transformer.decoding.score_stream import run as score
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.decoding.translate_stream import run as translate
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.layout import Padded
from transformer.model.inference import for_inference
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.vocabulary import BOS, EOS, PAD

TARGETS = ["a cat runs", "the old tree", "", "house house house ."]


@pytest.fixture(scope="module")
def run_dir(spm: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a", spm, seed=1)


def log_probs_by_hand(model: Transformer, source: list[int], target: list[int]) -> list[float]:
    """One pair alone, without padding: log_softmax of the model's logits."""
    table = torch.log_softmax(logits_by_hand(model, source, target), -1)
    return [table[t, token].item() for t, token in enumerate([*target, EOS])]


def logits_by_hand(model: Transformer, source: list[int], target: list[int]) -> Tensor:
    """`(T, V)`, in float64."""
    model.eval()
    read = [BOS, *target]
    with torch.no_grad():
        logits: Tensor = model(
            torch.tensor([[*source, EOS]]),
            torch.tensor([read]),
            source_layout=Padded.of([len(source) + 1], len(source) + 1),
            target_layout=Padded.of([len(read)], len(read)),
        )[0]
    assert logits.dtype is torch.float64
    return logits


# --- scores


def test_score_is_the_log_softmax_of_the_logits(translator: Translator) -> None:
    sources, targets = sentences(40), [*sentences(39)[::-1], "a"]
    encode = translator.tokenizers.source.encode
    for batch_tokens in (1, 400, 10**6):
        found = translator.with_search(replace(SEARCH, batch_tokens=batch_tokens)).score(sources, targets)
        for source, target, one in zip(sources, targets, found, strict=True):
            [ids] = encode([target])
            expected = log_probs_by_hand(translator.model, encode([source])[0], ids)
            assert one.piece_log_probs == pytest.approx(expected, abs=1e-9)
            assert one.log_prob == pytest.approx(math.fsum(expected), abs=1e-9)
            assert one.score == pytest.approx(math.fsum(expected) / ((5 + len(expected)) / 6) ** 0.6, abs=1e-9)
            assert one.pieces == [*(translator.tokenizers.source.piece(index) for index in ids), "</s>"]


def test_piece_log_probs_of_what_the_search_found_add_up_to_what_it_said(translator: Translator) -> None:
    sources = translator.tokenizers.source.encode(sentences(30))
    found = translator.hypotheses(sources, n_best=2)
    pairs = [(ids, one.tokens) for ids, of_one in zip(sources, found, strict=True) for one in of_one]
    again = piece_log_probs([translator.model.eval()], pairs, torch.device("cpu"))
    for one, values in zip([one for of_one in found for one in of_one], again, strict=True):
        assert math.fsum(values[: one.length]) == pytest.approx(one.log_prob, abs=1e-9)


def test_start_of_zeros_is_what_every_search_and_score_reads(translator: Translator) -> None:
    """Greedy, with a beam, sampled, of an ensemble, given: by the formulas, where BOS is zero, and no class, as PAD."""
    tokenizer = translator.tokenizers.source
    config = replace(CONFIG, start=Start.zeros)
    model = network(tokenizer.vocab_size, 3, torch.float64, config=config)
    zeros = translator_with(model, tokenizer)
    plain = network(tokenizer.vocab_size, 3, torch.float64)  # the same weights, but with a class for each
    with torch.no_grad():
        for name, parameter in parameters_by_name(model).items():
            plain.get_parameter(name).copy_(parameter)

    def expected(source: list[int], target: list[int]) -> list[float]:
        logits = logits_by_hand(plain, source, target)
        logits[:, [PAD, BOS]] = -math.inf
        return [row[token].item() for row, token in zip(logits.log_softmax(1), [*target, EOS], strict=True)]

    sources = tokenizer.encode(sentences(12))
    of_two = replace(zeros, decoder=zeros.decoder.joined(zeros.decoder))
    greedy = zeros.with_search(replace(SEARCH, beam_size=1))
    sampled = zeros.decoder.sample(sources, Sampling(1.0, None, None, 1), n_samples=3, lines=range(1, 13))
    for found in (zeros.hypotheses(sources, n_best=2), greedy.hypotheses(sources, n_best=1), sampled):
        for source, of_one in zip(sources, found, strict=True):
            for one in of_one:
                by_hand = expected(source, one.tokens)
                assert one.log_prob == pytest.approx(math.fsum(by_hand[: one.length]), abs=1e-9)
    for given in (zeros, of_two):
        for source, scored in zip(sources, given.score(sentences(12), sentences(12)), strict=True):
            assert scored.piece_log_probs == pytest.approx(expected(source, source), abs=1e-9)


def test_score_of_a_blank_side_is_none(translator: Translator) -> None:
    found = translator.score(["a dog", "", " \t", "a cat"], ["", "ein Hund", "", "a"])
    assert [one.log_prob is None for one in found] == [True, True, True, False]
    assert found[0].pieces == []
    assert found[0].piece_log_probs == []


def test_score_refuses_what_is_too_long_or_unequal(translator: Translator) -> None:
    long = "dog " * 100
    with pytest.raises(
        InputError, match=r"^b\.de:12: the target has \d+ pieces, but model\.max_positions has room for 59"
    ):
        translator.score(["a", "a", "a"], ["b", "b", long], first_line=10, origins=("a.en", "b.de"))
    with pytest.raises(InputError, match=r"^sources:1: the source has \d+ pieces"):
        translator.score([long], ["a"])
    with pytest.raises(InputError, match=r"^2 sources, but 1 targets"):
        translator.score(["a", "b"], ["a"])
    with pytest.raises(InputError, match=r"^sources must be a list of texts: for a single one, give \[text\]"):
        translator.score("a", ["a"])


def scores_of(run_dir: Path, given: bytes, **changes: Any) -> str:
    job = ScoreJob(run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp64, threads=1, **changes)
    stdout = io.BytesIO()
    score(job, io.BytesIO(given), stdout)
    return stdout.getvalue().decode("utf-8")


def test_score_command_reads_rows_or_files(
    run_dir: Path, tmp_path: Path, translator: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    sources, targets = sentences(4), TARGETS
    loaded = transformer.load(run_dir, device="cpu", precision="fp64")
    expected = loaded.score(sources, targets)
    rows = "".join(f"{a}\t{b}\n" for a, b in zip(sources, targets, strict=True)).encode()

    with caplog.at_level(logging.INFO):
        text = scores_of(run_dir, rows)
    assert text == "".join("\n" if one.log_prob is None else f"{one.log_prob:.6f}\n" for one in expected)
    total = math.fsum(one.log_prob for one in expected if one.log_prob is not None)
    length = sum(len(one.pieces) for one in expected)
    assert caplog.messages[-1] == (
        f"3 pairs of {length} target pieces (EOS counted): log-probability {total:.4f}, "
        f"perplexity {math.exp(-total / length):.4f}; 1 with a blank side have no score"
    )

    paths = {"src": tmp_path / "a.en", "tgt": tmp_path / "a.de"}
    for path, lines in zip(paths.values(), (sources, targets), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = {key: str(path) for key, path in paths.items()}
    assert scores_of(run_dir, b"", **files) == text
    found = objects_of(scores_of(run_dir, b"", **files, format=LineFormat.jsonl, pieces=True))
    assert [one["pieces"] for one in found] == [one.pieces for one in expected]
    assert found[1]["piece_log_probs"] == pytest.approx(expected[1].piece_log_probs, abs=1e-6)

    paths["tgt"].write_text("one\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.en has 4 lines, .*a\.de has 1: each line must translate"):
        scores_of(run_dir, b"", **files)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"a\tb\na b\n", "^standard input:2: 1 columns, not 2: separate source and target by one tab"),
        (b"a\tb\tc\n", "^standard input:1: 3 columns, not 2"),
        (b"a\t\xffb\n", "^standard input:1: not UTF-8 at byte 3"),
        (b"a\tb\n\n", "^standard input:2: 1 columns"),
        (b"a\tb\na\t" + b"dog " * 100 + b"\n", "^standard input:2: the target has"),
        (b"a\t" + b"x" * 300_000 + b"\n", "^standard input:1: longer than 262144 bytes"),
    ],
)
def test_score_command_names_the_line(run_dir: Path, given: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scores_of(run_dir, given)


# --- alignments


@pytest.mark.parametrize(("norm", "encoder_layers"), [(Norm.post, 2), (Norm.pre, 2), (Norm.post, 3), (Norm.post, 1)])
def test_align_is_the_largest_mean_weight_of_the_last_layer(norm: Norm, encoder_layers: int) -> None:
    """The layer's own inputs are caught on their way, and equation 1 is written out: the second of two layers."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"n_layers": encoder_layers, "n_decoder_layers": 2, "d_model": 16, "d_ff": 32, "n_heads": 2}
    config = ModelConfig(**sizes, max_positions=40, norm=norm)
    model = Transformer(config, 30).double().eval()
    pairs = [([5, 6, 7, 8, 9], [10, 11, 12]), ([7], [4, 4, 4, 4]), ([20, 21], [9])]
    with torch.no_grad():
        found = align([model], pairs, torch.device("cpu"))

    caught: list[tuple[Any, Any]] = []
    layer: Any = model.decoder[1].cross_attention
    hook = layer.register_forward_pre_hook(lambda _, given: caught.append(given))
    for (source, target), aligned in zip(pairs, found, strict=True):
        log_probs_by_hand(model, source, target)
        x, kv = caught.pop()
        q = layer.W_q(x).view(1, -1, 2, 8).transpose(1, 2)
        k = kv.keys.transpose(1, 2)
        energy = q @ k.transpose(2, 3) / math.sqrt(8)
        mean = energy.softmax(-1).mean(1)[0, : len(target), : len(source)]
        assert aligned == mean.argmax(-1).tolist()
    hook.remove()
    assert [len(of_one) for of_one in found] == [3, 4, 1]
    assert set(found[1]) == {0}, "EOS takes no part"


def test_translate_n_best_aligns_with_the_pieces(translator: Translator) -> None:
    texts = ["two old dog", "", "a cat"]
    found = translator.translate_n_best(texts, 2, align=True)
    assert found[1][0].alignment is None
    for text, translations in zip(texts, found, strict=True):
        for one in translations:
            if one.alignment is None:
                continue
            [ids] = translator.tokenizers.source.encode([text])
            assert one.alignment.source_pieces == [translator.tokenizers.source.piece(index) for index in ids]
            assert "".join(one.alignment.pieces).replace("▁", " ").strip() == one.text
            assert len(one.alignment.source_of) == len(one.alignment.pieces)
            assert set(one.alignment.source_of) <= set(range(len(ids)))
    plain = translator.translate_n_best(texts, 2)
    assert [[(one.text, one.log_prob) for one in of_one] for of_one in found] == [
        [(one.text, one.log_prob) for one in of_one] for of_one in plain
    ]


def test_translate_n_best_aligns_a_translation_as_long_as_the_model_can_write(translator: Translator) -> None:
    """It fills every position, so there is none in which to read its last piece."""
    model = translator.model
    norm = model.decoder[-1].feed_forward_norm
    with torch.no_grad():
        norm.weight.zero_()  # type: ignore[union-attr, operator]
        norm.bias.fill_(1.0)  # type: ignore[union-attr, operator]
        model.output[:] = torch.arange(model.vocab_size).eq(7).unsqueeze(1).double()  # piece 7, always
    wordy = translator_with(model, translator.tokenizers.source, search=replace(SEARCH, max_extra=1_000, beam_size=1))
    [[one]] = wordy.translate_n_best(["a dog"], 1, align=True)
    assert one.alignment is not None
    assert len(one.alignment.source_of) == 60


# --- prefixes


def search_with(
    table: Table, prefixes: list[list[int]], max_lengths: list[int], *, beam_size: int, n_best: int
) -> list[list[Hypothesis]]:
    state = Prefixes(table, [(sentence, ()) for sentence in range(len(max_lengths)) for _ in range(beam_size)])
    return beam_search(
        step,
        state,
        beam_size=beam_size,
        n_best=n_best,
        max_lengths=torch.tensor(max_lengths),
        penalty=length_penalty(0.6),
        bos=BOS,
        eos=EOS,
        prefixes=torch.tensor(prefixes),
    )


@pytest.mark.parametrize("seed", range(4))
def test_beam_search_with_prefixes_finds_the_best_that_begin_so(seed: int) -> None:
    """Nothing is pruned: of all translations, those that begin with the prefix, with their whole log-probability."""
    table = Table(seed, vocab_size=6)
    prefixes = [[4, 5], [5, PAD], [PAD, PAD], [4, 4]]
    max_lengths = [5, 4, 5, 3]
    found = search_with(table, prefixes, max_lengths, beam_size=300, n_best=3)
    for n, (prefix, longest) in enumerate(zip(prefixes, max_lengths, strict=True)):
        begun = [token for token in prefix if token != PAD]
        every = exhaustive(table, n, max_length=longest, alpha=0.6)
        finished = [one for one in found[n] if one.finished]
        assert all_same(finished, [one for one in every if one.tokens[: len(begun)] == begun][: len(finished)])
        assert len(finished) == (1 if n == 3 else 3)  # of |Y| = 3, two of them given, only one ends
        assert all(one.tokens[: len(begun)] == begun for one in found[n])


@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_beam_search_with_prefixes_leaves_other_sentences_alone(beam_size: int) -> None:
    """Sentences of all sorts that leave at different times; a blank prefix is none."""
    table = Table(7, vocab_size=12, eos_bias=1.0)
    max_lengths = [9, 3, 12, 5, 7, 11, 4, 8, 6, 10]
    none = [[PAD] * 3] * 10
    some = [[4, 5, 6] if n % 3 == 0 and length > 4 else [PAD] * 3 for n, length in enumerate(max_lengths)]
    free = search_with(table, none, max_lengths, beam_size=beam_size, n_best=1)
    found = search_with(table, some, max_lengths, beam_size=beam_size, n_best=1)
    for n, prefix in enumerate(some):
        if prefix[0] == PAD:
            assert found[n] == free[n]
        else:
            assert found[n][0].tokens[:3] == [4, 5, 6]


def test_translate_n_best_begins_with_the_prefix_as_it_is_given(translator: Translator) -> None:
    """Also where the tokenizer has no piece for a character, which it writes as U+2047."""
    texts = ["two old dog", "a cat", "", "the tree sleeps", "a bird"]
    prefixes = ["the old", "", "the", "  a \t small ", "Ünder Ω"]
    found = translator.translate_n_best(texts, 2, prefixes=prefixes)
    begun = [[one.text for one in of_one] for of_one in found]
    assert all(text.startswith("the old") for text in begun[0])
    assert begun[1] == [one.text for one in translator.translate_n_best(["a cat"], 2)[0]]
    assert begun[2] == [""]
    assert all(text.startswith("a small") for text in begun[3])
    assert all(text.startswith("Ünder Ω") for text in begun[4])
    assert all(one.text.startswith("the old") for one in translator.sample(texts, 3, prefixes=prefixes)[0])

    with pytest.raises(InputError, match=r"^2 prefixes for 1 texts: give one for each"):
        translator.translate_n_best(["a"], 1, prefixes=["a", "b"])
    with pytest.raises(
        InputError, match=r"^line 8: its prefix has \d+ pieces, but a translation of this source has room"
    ):
        translator.translate_n_best(["a", "a"], 1, prefixes=["", "dog " * 30], first_line=7)
    with pytest.raises(InputError, match=r"^prefixes must be a list of texts: for a single one, give \[text\]"):
        translator.translate_n_best(["a"], 1, prefixes="a")


def test_translate_reads_prefixes_line_by_line(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "begin.txt"
    path.write_text("the old\n\na\n", encoding="utf-8")
    found = output_of(run_dir, b"two dog\na cat\na bird\n", prefix=str(path)).split("\n")
    assert [found[0][:7], found[2][:1]] == ["the old", "a"]
    with pytest.raises(InputError, match=r"begin\.txt has 3 lines, but there are more to translate"):
        output_of(run_dir, b"a\nb\nc\nd\n", prefix=str(path))
    with pytest.raises(InputError, match=r"begin\.txt:3: there are only 2 lines to translate"):
        output_of(run_dir, b"a\nb\n", prefix=str(path))
    path.write_bytes(b"the old\n\xff\n")
    with pytest.raises(InputError, match=r"begin\.txt:2: not UTF-8"):
        output_of(run_dir, b"a\nb\n", prefix=str(path))


# --- ensembles


@dataclass
class TableModel:
    """What an ensemble asks of a model, with probabilities from a table."""

    table: Table

    def decode_step(self, tokens: Tensor, state: Prefixes) -> tuple[Tensor, Prefixes]:
        logits, after = step(tokens, Prefixes(self.table, state.rows))
        return logits + 3.0, after  # logits are no log-probabilities yet


class Mean(Table):
    """The mean of the probabilities of two tables."""

    def __init__(self, one: Table, two: Table) -> None:
        super().__init__(0, one.vocab_size)
        self.tables = one, two

    def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
        one, two = (table(sentence, prefix) for table in self.tables)
        return [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(one, two, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_ensemble_finds_the_best_under_the_mean_of_probabilities(seed: int) -> None:
    tables = Table(seed, vocab_size=6), Table(seed + 100, vocab_size=6)
    rows: list[tuple[int, tuple[int, ...]]] = [(sentence, ()) for sentence in range(3) for _ in range(300)]
    models: Any = [TableModel(table) for table in tables]
    states: list[Any] = [Prefixes(table, rows) for table in tables]
    state: Any = EnsembleState(states)
    found = beam_search(
        lambda tokens, state: decode_step(models, tokens, state),
        state,
        beam_size=300,
        n_best=5,
        max_lengths=torch.tensor([5, 3, 4]),
        penalty=length_penalty(0.6),
        bos=BOS,
        eos=EOS,
    )
    for sentence, longest in enumerate([5, 3, 4]):
        expected = exhaustive(Mean(*tables), sentence, max_length=longest, alpha=0.6)[:5]
        assert all_same(found[sentence], expected)
        alone = exhaustive(tables[0], sentence, max_length=longest, alpha=0.6)[:5]
        assert [one.tokens for one in alone] != [one.tokens for one in expected]


def test_ensemble_of_a_model_with_itself_is_that_model(translator: Translator) -> None:
    twice = replace(translator, decoder=translator.decoder.joined(translator.decoder))
    texts = sentences(20)
    assert twice.translate(texts) == translator.translate(texts)
    for one, other in zip(twice.score(texts, texts), translator.score(texts, texts), strict=True):
        assert one.piece_log_probs == pytest.approx(other.piece_log_probs, abs=1e-12)


def test_ensemble_score_is_the_mean_of_the_probabilities(translator: Translator) -> None:
    other = network(translator.tokenizers.source.vocab_size, 9, torch.float64)
    both = replace(
        translator, decoder=translator.decoder.joined(translator_with(other, translator.tokenizers.source).decoder)
    )
    texts = sentences(10)
    for text, one in zip(texts, both.score(texts, texts), strict=True):
        [ids] = translator.tokenizers.source.encode([text])
        by_model = [log_probs_by_hand(model, ids, ids) for model in (translator.model, other)]
        expected = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(*by_model, strict=True)]
        assert one.piece_log_probs == pytest.approx(expected, abs=1e-9)


def test_ensemble_of_runs_needs_one_tokenizer(run_dir: Path, spm: bytes, tmp_path: Path) -> None:
    b = write_run(tmp_path / "b", spm, seed=2)
    c = write_run(tmp_path / "c", train_tokenizer(sentences(300), TokenizerConfig(vocab_size=58)), seed=3)
    text = ["two old dog near the tree"]
    alone = [transformer.load(path, precision="fp64").score(text, text)[0] for path in (run_dir, b)]
    together = transformer.load(run_dir, precision="fp64", ensemble=[b])
    expected = [
        math.log((math.exp(x) + math.exp(y)) / 2)
        for x, y in zip(alone[0].piece_log_probs, alone[1].piece_log_probs, strict=True)
    ]
    assert together.score(text, text)[0].piece_log_probs == pytest.approx(expected, abs=1e-9)
    given = b"two old dog near the tree\n"
    assert output_of(run_dir, given, ensemble=[str(b)]) == together.translate(text)[0] + "\n"

    with pytest.raises(InputError, match=r"^ensemble=.*/c: its tokenizer is not that of .*/a: the pieces"):
        transformer.load(run_dir, ensemble=[b, c])
    with pytest.raises(InputError, match=r"^ensemble takes a list of runs: .* write ensemble=\['runs/b'\]"):
        transformer.load(run_dir, ensemble="runs/b")


def test_load_makes_each_model_of_an_ensemble_ready_once(
    run_dir: Path, spm: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready models are copies, on a CPU of every weight."""
    made = []

    def counted(model: Transformer) -> Transformer:
        made.append(model)
        return for_inference(model)

    monkeypatch.setattr("transformer.decoding.batched.for_inference", counted)
    translator = transformer.load(run_dir, ensemble=[write_run(tmp_path / "b", spm, seed=2)], device="cpu")
    assert made == list(translator.decoder.models)
    assert translator.translate(["a dog"])
    assert len(made) == 2


# --- the command, with what there is together


def test_translate_samples_with_a_prefix_and_an_ensemble(run_dir: Path, spm: bytes, tmp_path: Path) -> None:
    b = write_run(tmp_path / "b", spm, seed=2)
    path = tmp_path / "begin.txt"
    path.write_text("the\n\n", encoding="utf-8")
    job = TranslateJob(
        run_dir=str(run_dir),
        device=Device.cpu,
        precision=Precision.fp64,
        threads=1,
        ensemble=[str(b)],
        prefix=str(path),
        sample=SampleConfig(top_k=5, seed=3),
        n_best=3,
        align=True,
        format=LineFormat.jsonl,
    )
    written = []
    for _ in range(2):
        stdout = io.BytesIO()
        translate(job, io.BytesIO(b"a dog\na cat\n"), stdout)
        written.append(stdout.getvalue())
    assert written[0] == written[1]
    found = [json.loads(line) for line in written[0].split(b"\n")[:-1]]
    assert [len(one["translations"]) for one in found] == [3, 3]
    assert all(one["text"].startswith("the") for one in found[0]["translations"])
    assert all(len(one["source_of"]) == len(one["pieces"]) for line in found for one in line["translations"])
