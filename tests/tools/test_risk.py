"""Minimum Bayes risk against sacreBLEU's scores of each pair, one by one."""

import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from support.corpora import run, tiny_job, write_corpus
from support.translations import write_run
from transformer.cli import commands
from transformer.config.jobs import TranslateJob
from transformer.config.settings import LineFormat, Rerank, SampleConfig, SearchOverride
from transformer.decoding.output import BLANK, Translation
from transformer.errors import InputError
from transformer.tools import risk
from transformer.tools.risk import least_risk, sentence_bleu, sentence_chrf

TEXTS = [
    "A black dog runs over the green grass.",
    "A black dog is running over the grass.",
    "The dog, which is black, runs.",
    "the the the the the the the",
    "the the",
    "the",
    "x",
    "",
    "日本語の文",
    "日本の文章。",
]


def bleu_of(texts: Sequence[str]) -> risk.Floats:
    tokenizer = sacrebleu.BLEU().tokenizer
    return sentence_bleu([tokenizer(text.rstrip()) for text in texts])


def chrf_of_pair(hypothesis: str, reference: str) -> float:
    return float(sacrebleu.sentence_chrf(hypothesis, [reference]).score)


def bleu_of_pair(hypothesis: str, reference: str) -> float:
    return float(sacrebleu.sentence_bleu(hypothesis, [reference]).score)


BOTH = pytest.mark.parametrize(
    ("all_pairs", "one_pair"), [(sentence_chrf, chrf_of_pair), (bleu_of, bleu_of_pair)], ids=["chrf", "bleu"]
)


@BOTH
def test_scores_of_all_pairs_are_those_of_sacrebleu(
    all_pairs: Callable[[Sequence[str]], risk.Floats], one_pair: Callable[[str, str], float]
) -> None:
    draw = random.Random(3)
    drawn = [" ".join(draw.choices(["a", "bb", "ab", "c,", "abc."], k=draw.randrange(1, 9))) for _ in range(20)]
    texts = TEXTS + drawn
    expected = [[one_pair(hypothesis, reference) for reference in texts] for hypothesis in texts]
    np.testing.assert_allclose(all_pairs(texts), expected, rtol=1e-12, atol=1e-12)


def translation(text: str, probability: float) -> Translation:
    return Translation(text, float(np.log(probability)), 0.0, finished=True, alignment=None)


@pytest.mark.parametrize("rerank", Rerank, ids=lambda rerank: rerank.name)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_least_risk_ranks_as_brute_force(
    rerank: Rerank, is_sampled: bool, run_dir: Path, one_pair: dict[Rerank, Callable[[str, str], float]]
) -> None:
    """The same text twice counts twice, whatever its pieces were; it is printed once, as it was found first."""
    found = [translation(text, 0.3 / (1 + n)) for n, text in enumerate([*TEXTS[:4], TEXTS[1], TEXTS[2]])]
    job = TranslateJob(str(run_dir), rerank=rerank, sample=SampleConfig(temperature=1.0 if is_sampled else None))
    ranked = least_risk(job)(found)

    weights = [1.0 if is_sampled else float(np.exp(one.log_prob or 0.0)) for one in found]
    expected = {
        text: sum(weight * one_pair[rerank](text, other.text) for other, weight in zip(found, weights, strict=True))
        / sum(weights)
        for text in TEXTS[:4]
    }
    assert [one.text for one in ranked] == sorted(expected, key=lambda text: -expected[text])
    assert [one.expected_score for one in ranked] == pytest.approx(sorted(expected.values(), reverse=True), rel=1e-12)
    assert {one.log_prob for one in ranked} == {one.log_prob for one in found[:4]}
    assert least_risk(job)([BLANK]) == [BLANK]


def test_least_risk_ranks_what_the_model_thinks_impossible(run_dir: Path) -> None:
    """No probability tells such candidates apart, so each counts the same; one alone agrees with itself."""
    choose = least_risk(TranslateJob(str(run_dir), rerank=Rerank.chrf))
    found = [replace(translation(text, 0.5), log_prob=float("-inf")) for text in TEXTS[:3]]
    expected = np.mean([[chrf_of_pair(text, other) for other in TEXTS[:3]] for text in TEXTS[:3]], axis=1)
    assert sorted(one.expected_score or 0.0 for one in choose(found)) == pytest.approx(sorted(expected), rel=1e-12)
    assert [one.expected_score for one in choose(found[:1])] == pytest.approx([100.0])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("risk")
    return run(tiny_job(folder / "a", write_corpus(folder / "corpus"), max_steps=4, validate_every=4))


@pytest.fixture
def one_pair() -> dict[Rerank, Callable[[str, str], float]]:
    return {Rerank.chrf: chrf_of_pair, Rerank.bleu: bleu_of_pair}


LINES = "one two three four\n\nfive six seven\n"


def translated(job: TranslateJob, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The translations of each of LINES, by the command, from JSON."""
    stdin, stdout = io.TextIOWrapper(io.BytesIO(LINES.encode())), io.TextIOWrapper(io.BytesIO())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "stdout", stdout)
        commands.run_command("translate", job)
    lines = stdout.buffer.getvalue().decode().splitlines()
    return [json.loads(line)["translations"] for line in lines]


@pytest.mark.parametrize("sample", [SampleConfig(), SampleConfig(temperature=2.0)], ids=["search", "samples"])
def test_translate_puts_first_what_has_most_in_common(
    sample: SampleConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6 candidates, the best two; and the same as text. The candidates are those that the command gives without."""
    search = SearchOverride(beam_size=None if sample.is_wanted else 6)
    plain = TranslateJob(str(run_dir), threads=1, search=search, sample=sample, format=LineFormat.jsonl, n_best=6)
    candidates = translated(plain, monkeypatch)
    job = replace(plain, rerank=Rerank.chrf, candidates=6, n_best=2)
    found = translated(job, monkeypatch)

    choose = least_risk(job)
    assert [len(of_line) for of_line in found] == [2, 1, 2]
    for of_line, all_of_line in zip(found, candidates, strict=True):
        expected = choose([Translation(**translation, alignment=None) for translation in all_of_line])[:2]
        assert [one["text"] for one in of_line] == [one.text for one in expected]
        assert [one.get("expected_score") for one in of_line] == [
            one.expected_score if one.expected_score is None else pytest.approx(one.expected_score, abs=1e-3)
            for one in expected
        ]


def test_least_risk_cuts_words_as_the_direction_of_a_tag_does(spm: bytes, tmp_path: Path) -> None:
    """Chinese by its characters, though the run's other direction is into German."""
    run_dir = write_run(tmp_path / "a", spm, seed=1, tag="<2zh>", languages=("en", "zh"))
    found = [Translation(text, -1.0, -1.0, True, None) for text in ("我喜欢红色的苹果", "我喜欢红色的大苹果", "你好")]
    by_tag, by_run = (
        least_risk(TranslateJob(str(run_dir), rerank=Rerank.bleu, tag=tag))(found)[0].expected_score
        for tag in ("<2zh>", None)
    )
    assert by_run == pytest.approx(100 / 3), "a word each: it has only itself in common"
    assert by_tag is not None
    assert by_tag > 40


def test_translate_refuses_to_compare_a_translation_with_itself(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TranslateJob(str(run_dir), threads=1, rerank=Rerank.chrf, search=SearchOverride(beam_size=1))
    with pytest.raises(InputError, match=r"^rerank compares several .* search\.beam_size=1 finds one: raise it$"):
        translated(job, monkeypatch)


def test_translate_compares_the_whole_beam_or_32_samples(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def scores(texts: Sequence[str]) -> risk.Floats:
        counts.append(len(texts))
        return np.eye(len(texts))

    monkeypatch.setattr(risk, "sentence_chrf", scores)
    job = TranslateJob(str(run_dir), threads=1, format=LineFormat.jsonl, rerank=Rerank.chrf)
    translated(job, monkeypatch)
    assert max(counts) == 4  # search.beam_size of the run
    translated(replace(job, sample=SampleConfig(temperature=50.0)), monkeypatch)
    assert max(counts) == 32
