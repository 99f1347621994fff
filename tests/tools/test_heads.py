"""What heads do, by hand-made weights; and the alignment error rate, by an independent count."""

import csv
import json
import re
from io import StringIO
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpora import run, run_command, tiny_job, write_corpus
from transformer.config.settings import DataConfig
from transformer.errors import InputError
from transformer.tools.attention.command import attention
from transformer.tools.attention.heads import HeadMeter
from transformer.tools.attention.job import AttentionJob
from transformer.tools.inspection import AttentionMaps
from transformer.tools.paper.alignment_error import AlignmentMeter, Gold, align_words, read_alignments, word_of_each


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two encoder layers and one decoder layer, with two heads."""
    layers = {"n_layers": 2, "n_decoder_layers": 1}
    return run(tiny_job(tmp_path_factory.mktemp("run") / "a", corpus, layers, max_steps=4, validate_every=4))


# ---- measures -------------------------------------------------------------------------------------------------------


def one_hot(places: list[int], keys: int) -> torch.Tensor:
    """A head that looks at one place only from each position."""
    return torch.nn.functional.one_hot(torch.tensor(places), keys).float()


def test_head_meter_tells_what_simple_heads_do() -> None:
    """Heads that look back, at themselves, ahead, at the end mark, everywhere, in the means over their positions."""
    encoder = torch.stack([one_hot([0, 0, 1, 2], 4), one_hot([1, 2, 3, 3], 4), torch.full((4, 4), 0.25)])
    decoder = torch.stack([one_hot([0, 0], 2), one_hot([0, 1], 2), one_hot([0, 0], 2)])
    cross = torch.stack([one_hot([0, 3], 4), one_hot([3, 3], 4), one_hot([1, 2], 4)])
    meter = HeadMeter()
    meter.add(AttentionMaps(*(weights.unsqueeze(0) for weights in (encoder, decoder, cross))))

    found = {(head.role, head.head): head for head in meter.heads()}
    assert len(found) == 9
    expected = {
        ("encoder_self", 1): (0.0, 0.75, 0.75, 0.25, 0.0, 0.0),
        ("encoder_self", 2): (0.0, 0.75, 0.0, 0.25, 0.75, 0.5),
        ("encoder_self", 3): (log2(4), 1.25, 3 / 16, 4 / 16, 3 / 16, 0.25),
        ("decoder_self", 1): (0.0, 0.5, 0.5, 0.5, 0.0, 1.0),  # the mark is BOS
        ("decoder_self", 2): (0.0, 0.0, 0.0, 1.0, 0.0, 0.5),
        ("cross", 1): (0.0, 0.0, 0.0, 1.0, 0.0, 0.5),  # the first of two is where the first of four is
        ("cross", 2): (0.0, 1.5, 0.0, 0.5, 0.0, 1.0),
        ("cross", 3): (0.0, 1.0, 0.5, 0.0, 0.5, 0.0),
    }
    for key, measures in expected.items():
        head = found[key]
        shown = (head.entropy, head.distance, head.previous, head.same, head.next, head.mark)
        assert shown == pytest.approx(measures), key


def test_head_meter_rounds_the_own_position_of_a_query_to_the_nearest_key() -> None:
    """Four queries of six keys stand at 0, 1.67, 3.33 and 5."""
    plain = torch.ones(1, 1, 1, 1)
    meter = HeadMeter()
    meter.add(AttentionMaps(plain, plain, one_hot([0, 2, 3, 5], 6).view(1, 1, 4, 6)))
    assert (meter.heads()[-1].role, meter.heads()[-1].same) == ("cross", 1.0)


def test_head_meter_weighs_sentences_by_their_positions() -> None:
    def maps(length: int, place: int) -> AttentionMaps:
        weights = one_hot([place] * length, length).view(1, 1, length, length)
        return AttentionMaps(weights, weights, weights)

    meter = HeadMeter()
    meter.add(maps(2, 1))
    meter.add(maps(6, 0))
    assert meter.heads()[0].mark == pytest.approx(2 / 8)


# ---- alignments -----------------------------------------------------------------------------------------------------


def test_word_of_each_begins_a_word_at_the_mark_of_a_space() -> None:
    assert word_of_each(["▁the", "▁gar", "den", "▁", "x", "."]) == [0, 1, 1, 2, 2, 2]
    assert word_of_each(["の", "は", "▁a"]) == [0, 0, 1]


def test_align_words_adds_source_pieces_and_averages_target_pieces() -> None:
    weights = torch.tensor([[0.4, 0.3, 0.3], [0.1, 0.45, 0.45], [0.9, 0.1, 0.0]])
    assert align_words(weights, source=[0, 1, 1], target=[0, 0, 1]) == {(1, 0), (0, 1)}


def test_alignment_meter_gives_the_error_rate_of_och_and_ney() -> None:
    """Three target words: one link is sure, one only possible, one wrong; another sure link is missed."""
    cross = torch.zeros(1, 1, 4, 4)
    for query, key in enumerate([0, 1, 0, 3]):  # while the three words and EOS are predicted
        cross[0, 0, query, key] = 1.0
    gold = Gold(sure=frozenset({(0, 0), (2, 2)}), possible=frozenset({(0, 0), (2, 2), (1, 1)}))
    meter = AlignmentMeter(1, 1)
    meter.add(AttentionMaps(cross, cross, cross), gold, source=[0, 1, 2], target=[0, 1, 2])
    [layer] = meter.layers()
    assert layer.aer_predicted == pytest.approx(1 - (1 + 2) / (3 + 2))
    # Once they are read, the words look at 1, 0 and, without EOS, at nothing, which counts as the first.
    assert layer.aer_read == pytest.approx(1 - (0 + 0) / (3 + 2))
    assert layer.best_head == 1
    assert layer.best_head_aer == pytest.approx(0.4)


def test_read_alignments_takes_sure_and_possible_links(tmp_path: Path) -> None:
    path = tmp_path / "a.align"
    path.write_text("0-0 1p2\n\n3-1\n", encoding="utf-8")
    found = read_alignments(path, 2)
    assert found == [Gold(frozenset({(0, 0)}), frozenset({(0, 0), (1, 2)})), Gold(frozenset(), frozenset())]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-0\n1:2\n", "a.align:2: '1:2' is not a link; write 0-1, or 0p1 for one that is only possible"),
        ("0-0\n", "a.align: it has 1 lines for 2 sentences, and each sentence needs one"),
        ("0-9999999\n\n", "is not a link"),
    ],
)
def test_read_alignments_names_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.align"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_alignments(path, 2)
    assert said in str(caught.value)


# ---- the command ----------------------------------------------------------------------------------------------------


def job_of(run_dir: Path, output: Path, **settings: Any) -> AttentionJob:
    return AttentionJob(run_dir=str(run_dir), output=str(output), threads=1, **settings)


@pytest.mark.needs("matplotlib")
def test_attention_describes_heads_in_every_format(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alignments = tmp_path / "test.align"
    alignments.write_text("".join("0-0 1-1 2-2 3-3\n" for _ in range(12)), encoding="utf-8")
    output = tmp_path / "out"
    run_command("attention", job_of(trained, output, set="test", forced=True, sentences=5, alignments=str(alignments)))

    printed = capsys.readouterr().out
    report = json.loads((output / "heads.json").read_text(encoding="utf-8"))
    rows = list(csv.DictReader(StringIO((output / "heads.csv").read_text(encoding="utf-8"))))
    assert printed == (output / "heads.md").read_text(encoding="utf-8")
    assert (report["sentences"], report["is_forced"], len(report["alignments"])) == (5, True, 1)
    assert [(row["role"], int(row["layer"]), int(row["head"])) for row in rows] == [
        (role, layer, head)
        for role, layer in (("encoder_self", 1), ("encoder_self", 2), ("decoder_self", 1), ("cross", 1))
        for head in (1, 2)
    ]
    for row, head in zip(rows, report["heads"], strict=True):
        assert float(row["entropy"]) == head["entropy"]
        assert (
            f"| {row['role']} | {row['layer']} | {row['head']} | {head['entropy']:.2f} | {head['distance']:.2f} |"
            in printed
        )
    assert {path.name for path in output.iterdir()} == {f"heads.{end}" for end in ("json", "md", "csv", "png", "svg")}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"set": "nowhere", "sentences": 2},
            "keeps no set of this name, only dev, other, test: name one of these, or use text=... or file=",
        ),
        ({"text": "  "}, "the sentence has no visible text: choose another"),
        ({"text": "\u200b"}, "the sentence has no visible text: choose another"),
        ({"text": "one", "target": " "}, "the translation has no visible text: choose another"),
        ({"line": 99}, "line=99: set dev of"),
        ({"text": "one " * 2000}, "and model.max_positions has room for 1023: shorten it"),
        ({"text": "one", "layers": [1, 7]}, "layers=7: the model has 2"),
        ({"text": "one", "heads": [3]}, "heads=3: the model has 2"),
        (
            {"text": "one", "target": "eins", "word": "two"},
            "word=two: not a word of the sentence or of its translation",
        ),
        ({"file": "/nowhere.txt"}, "/nowhere.txt: cannot be read"),
    ],
)
def test_attention_says_in_one_line_what_is_wrong(
    trained: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        attention(job_of(trained, tmp_path, **settings))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attention_refuses_more_weights_than_a_page_holds(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads of two encoder layers and one decoder layer; with EOS or BOS, a side has one position more."""
    monkeypatch.setattr("transformer.tools.attention.command.MOST_WEIGHTS", 100)
    with pytest.raises(InputError) as caught:
        attention(job_of(trained, tmp_path, text="one two three", target="eins zwei drei"))
    said = r"(\d+) source and (\d+) target pieces: (\d+) weights, and a page holds 100: choose a shorter sentence"
    found = re.fullmatch(said, str(caught.value))
    assert found is not None
    source, target = int(found[1]) + 1, int(found[2]) + 1
    assert int(found[3]) == 2 * (2 * source**2 + target**2 + target * source)


@pytest.mark.needs("matplotlib")
def test_attention_writes_the_layers_that_encoder_and_decoder_have(trained: Path, tmp_path: Path) -> None:
    attention(job_of(trained, tmp_path, text="one two", target="eins zwei", layers=[2]))
    written = json.loads((tmp_path / "weights.json").read_text(encoding="utf-8"))
    assert [len(written[role]) for role in ("encoder_self", "decoder_self", "cross")] == [2, 1, 1]
    figures = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert figures == {"encoder_self-2-words", "encoder_self-2-map"}


def test_attention_refuses_links_beyond_the_sentence(trained: Path, tmp_path: Path) -> None:
    alignments = tmp_path / "a.align"
    alignments.write_text("0-0\n77-0\n", encoding="utf-8")
    job = job_of(trained, tmp_path, set="dev", forced=True, sentences=2, alignments=str(alignments))
    with pytest.raises(
        InputError, match=r"a\.align:2: the link 77-0 is beyond the sentence, which has \d source and \d target words"
    ):
        attention(job)
