"""Translation speed beside what one would else use: target tokens a second, and one sentence alone.

    python scripts/benchmark/translate.py --peers-python peers/bin/python --output out.json

Contenders: `ours` is the package's translator as `transformer translate` uses it, which makes its own batches;
`ours_in_batches` is the same in the batches of the others; `engine` is `ours` with search.engine=ctranslate2; `ct2` is
CTranslate2 with as many workers as threads, of one thread each, `ct2_threads` with one worker of all threads; `hf` is
generate() of Hugging Face's MarianMTModel. Peers live in an environment of their own, and are left out without
--peers-python (and `engine` without our `pip install -e '.[export]'`):

    python -m venv peers && peers/bin/pip install torch==2.13.0 && peers/bin/pip install transformers ctranslate2

(our torch, installed first and alone, so that no other package brings another build).

Equal work: one random model, whose very weights and positions are converted for each; real sentences; beam search with
as many hypotheses; and every translation of the same length, for the model makes PAD, BOS and EOS the least likely of
all pieces: so nobody has to hide them, and nothing ends before its longest length. The page says how many translations
agree with ours, piece by piece: in fp32 nearly all must. In place of bf16, which it has not, CTranslate2 has int8. On a
processor without VNNI that is far from the model, which `engine` refuses: there it is left out.

How it measures: each contender is a process of its own with the same number of threads. They take turns, and wait in
between; ratios are formed within a round. A first turn of each, on the same sentences, is not counted.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from contest import (
    Program,
    Worker,
    among,
    corpus_file,
    fail,
    joined,
    joined_words,
    machine,
    positive,
    ratios,
    row,
    rule,
    spread,
    started,
)
from initial import save_weights
from peers import Shape
from translators import CONTENDERS, Pieces, Spec

from transformer.checkpoint import commit
from transformer.compute import multiplies_int8
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import DataConfig, ModelConfig, PairConfig, SearchConfig, TokenizerConfig
from transformer.data.prepare import prepare
from transformer.data.tokenizer import Tokenizer
from transformer.errors import TransformerError
from transformer.files import write_new
from transformer.machine import resolve_threads
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.records import CheckpointState
from transformer.run_dir import MODEL, RunDir
from transformer.vocabulary import BOS, EOS, PAD

SIZES = {
    "tiny": Shape(n_layers=1, d_model=32, d_ff=64, n_heads=2),  # to try this script
    "small": Shape(n_layers=3, d_model=256, d_ff=1024, n_heads=4),
    "base": Shape(n_layers=6, d_model=512, d_ff=2048, n_heads=8),
}
OURS = ("ours", "ours_in_batches", "engine")
WORDS_ALONE = 25  # of the sentence that is translated alone
MUST_AGREE = 0.95  # of the translations in fp32
LEAST_LIKELY = -60.0  # about the logit of PAD, BOS and EOS, where others are about normal


@dataclass(frozen=True)
class Result:
    """What a contender did in one setting."""

    size: str
    precision: str  # of the setting
    peer: str
    arithmetic: str  # what it computed in
    settings: dict[str, Any]
    versions: dict[str, str]
    target_tokens: int  # of the best hypotheses of a turn
    seconds: list[float]  # of each round, for all sentences
    cpu_seconds: list[float]  # of each round, for all sentences, by all threads
    seconds_alone: list[float]  # of each round, for one sentence: the median of some
    agreement: float  # the share of the translations that are those of `ours`, or of whoever is first

    @property
    def speeds(self) -> list[float]:
        """Target tokens a second in each round."""
        return [self.target_tokens / seconds for seconds in self.seconds]


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    threads = resolve_threads(args.threads)
    try:
        with TemporaryDirectory() as folder:
            src = joined(corpus_file(args.src, "train.en"), args.join, Path(folder))
            tgt = joined(corpus_file(args.tgt, "train.de"), args.join, Path(folder))
            texts = read_texts(src, args.sentences)
            tokenizer_model = train_tokenizer(src, tgt, vocab_size=args.vocab, folder=Path(folder))
            sentences = pick_sentences(args, texts, tokenizer_model)
            results = measure(args, sentences, tokenizer_model, threads=threads, folder=Path(folder))
    except TransformerError as error:
        fail(error)

    facts = {
        "command": shlex.join(["python", "scripts/benchmark/translate.py", *arguments]),
        **machine(),
        "threads": threads,
        "corpus": "/".join(corpus_file(args.src, "train.en").parts[-2:]),
        "joined": args.join,
        "vocab_size": Tokenizer.from_bytes(tokenizer_model).vocab_size,
        "beam_size": args.beam,
        "batch": args.batch,
        "sentences": len(sentences["many"]["sources"]),
        "source_pieces": sum(map(len, sentences["many"]["sources"])),
        "length": args.length,
        "alone": {"words": len(texts.alone.split()), "length": sentences["alone"]["length"]},
    }
    if args.output is not None:
        found = [asdict(result) | {"target_tokens_per_second": result.speeds} for result in results]
        args.output.write_text(json.dumps(facts | {"results": found}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts, results)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--src", type=Path, help="source sentences (default: $TRANSFORMER_DATA/multi30k/train.en)")
    parser.add_argument("--tgt", type=Path, help="for the tokenizer (default: $TRANSFORMER_DATA/multi30k/train.de)")
    parser.add_argument("--sizes", type=among(*SIZES), default="small,base", help="of tiny, small, base; %(default)s")
    parser.add_argument("--precisions", type=among("fp32", "bf16"), default="fp32,bf16", help="default: %(default)s")
    parser.add_argument("--peers", type=among(*CONTENDERS), default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--peers-python", help="the Python of an environment with torch, transformers and ctranslate2")
    parser.add_argument("--vocab", type=positive, default=10_000, help="pieces (default: %(default)s)")
    parser.add_argument("--layers", type=positive, help="of encoder and of decoder (default: the size's)")
    parser.add_argument("--join", type=positive, default=1, help="neighbouring sentences of the corpus that become one")
    parser.add_argument("--sentences", type=positive, default=256, help="of a turn (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=64, help="sentences of a batch (default: %(default)s)")
    parser.add_argument("--length", type=positive, default=16, help="tokens of a translation (default: %(default)s)")
    parser.add_argument("--beam", type=positive, default=4, help="hypotheses (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="of the sentence alone, in a round")
    parser.add_argument("--threads", type=positive, help="of each contender (default: one for each core)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    args = parser.parse_args(arguments)
    if args.peers_python is None:
        args.peers = [peer for peer in args.peers if peer in OURS]
    if find_spec("ctranslate2") is None:
        args.peers = [peer for peer in args.peers if peer != "engine"]
    if not args.peers:
        parser.error("these contenders need --peers-python")
    return args


# ---- the same model and sentences for everybody ---------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Sentences of a corpus: the first ones, and one of 25 words, or as near to that as there is."""

    many: list[str]
    alone: str


def read_texts(path: Path, sentences: int) -> Texts:
    """So many sentences of a file, and one of its others."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    alone = min(lines, key=lambda line: abs(len(line.split()) - WORDS_ALONE))
    return Texts(lines[:sentences], alone)


def train_tokenizer(src: Path, tgt: Path, *, vocab_size: int, folder: Path) -> bytes:
    """The tokenizer that `transformer prepare` makes of the corpus."""
    pair = PairConfig(str(src), str(tgt))
    job = TrainJob(
        run_dir=str(folder / "prepared"),
        data=DataConfig(train=pair, dev=pair),  # nothing is validated
        tokenizer=TokenizerConfig(vocab_size=vocab_size),
    )
    return prepare(job).tokenizers.source.model


def pick_sentences(args: argparse.Namespace, texts: Texts, tokenizer_model: bytes) -> dict[str, dict[str, Any]]:
    """What is translated: many sentences, and one alone, whose translation is as long as itself."""
    [alone, *many] = Tokenizer.from_bytes(tokenizer_model).encode([texts.alone, *texts.many])
    return {
        "many": {"sources": many, "length": args.length},
        "alone": {"sources": [alone], "length": len(alone)},
    }


def random_model(shape: Shape, vocab_size: int, *, longest: int) -> Transformer:
    """A model whose every translation goes on for ever.

    The last norm gives x of about normal components, and its bias adds k and -k to them by turns: a row of the output
    matrix that is c and -c by turns has about the logit c k d_model, whatever was read. By turns, because in int8 a
    processor without VNNI adds products in pairs of at most 2^15: a row that is c everywhere overflows them.
    """
    torch.manual_seed(1)
    config = ModelConfig(**asdict(shape), max_positions=longest)
    model = Transformer(config, vocab_size)
    parameters = parameters_by_name(model)
    constant = 0.3  # EOS is read, too: its embedding must not be far larger than the others
    signs = 1.0 - 2.0 * (torch.arange(shape.d_model) % 2)
    parameters["embedding"][[PAD, BOS, EOS]] = constant * signs
    bias = parameters[f"decoder.{shape.n_layers - 1}.feed_forward_norm.bias"]
    bias.copy_(LEAST_LIKELY / (constant * shape.d_model) * signs)
    return model


def write_run(model: Transformer, tokenizer_model: bytes, *, run_dir: Path, beam_size: int) -> None:
    """The model as a run of ours: what `transformer translate` needs of one."""
    search = SearchConfig(beam_size=beam_size)
    commit(
        run_dir,
        step=1,
        tensors={MODEL: parameters_by_name(model)},
        state=to_json(CheckpointState(model.vocab_size, data_digest="")),
        config={"data": to_json(DataConfig()), "model": to_json(model.config), "search": to_json(search)},
    )
    write_new(RunDir(run_dir).tokenizer, tokenizer_model)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace,
    sentences: dict[str, dict[str, Any]],
    tokenizer_model: bytes,
    *,
    threads: int,
    folder: Path,
) -> list[Result]:
    """Every contender in every setting, one setting after the other."""
    vocab_size = Tokenizer.from_bytes(tokenizer_model).vocab_size
    longest = max(256, args.length + 1, *(len(source) + 2 for part in sentences.values() for source in part["sources"]))
    (folder / "sentences.json").write_text(json.dumps(sentences), encoding="utf-8")

    results: list[Result] = []
    for size in args.sizes:
        shape = replace(SIZES[size], n_layers=args.layers or SIZES[size].n_layers)
        model = random_model(shape, vocab_size, longest=longest)
        write_run(model, tokenizer_model, run_dir=folder / size, beam_size=args.beam)
        save_weights(model, folder / f"{size}.npz")
        for precision in args.precisions:
            print(f"{size} {precision} ...", file=sys.stderr)
            spec = Spec(
                peer="",
                precision=precision,
                shape=asdict(shape),
                vocab_size=vocab_size,
                longest=longest,
                beam_size=args.beam,
                batch=args.batch,
                threads=threads,
                run_dir=str(folder / size),
                weights=str(folder / f"{size}.npz"),
                sentences=str(folder / "sentences.json"),
            )
            results += race(args, spec, size=size)
    return results


def race(args: argparse.Namespace, spec: Spec, *, size: str) -> list[Result]:
    """Build one after the other, then take turns."""
    peers = [peer for peer in args.peers if peer != "engine" or spec.precision == "fp32" or multiplies_int8()]
    programs = [
        Program(peer, sys.executable if peer in OURS else args.peers_python, "translators.py") for peer in peers
    ]
    with started(programs) as workers:
        built = [worker.ask(asdict(spec) | {"peer": worker.peer}) for worker in workers]
        warm = [(worker.ask("many"), worker.ask("alone")) for worker in workers]
        turns = [[take(worker, args.repeats) for worker in workers] for _ in range(args.rounds)]

    results = []
    for worker, facts, (many, alone), rounds in zip(workers, built, warm, zip(*turns, strict=True), strict=True):
        translations = many["translations"] + alone["translations"]
        first = warm[0][0]["translations"] + warm[0][1]["translations"]
        check_lengths(worker.peer, many["translations"], args.length)
        result = Result(
            size=size,
            precision=spec.precision,
            peer=worker.peer,
            **facts,
            target_tokens=sum(map(len, many["translations"])),
            seconds=[seconds for seconds, _, _ in rounds],
            cpu_seconds=[cpu_seconds for _, cpu_seconds, _ in rounds],
            seconds_alone=[alone for _, _, alone in rounds],
            agreement=float(np.mean([own == other for own, other in zip(translations, first, strict=True)])),
        )
        results.append(result)
    return results


def take(worker: Worker, repeats: int) -> tuple[float, float, float]:
    """A turn: the seconds and CPU seconds for all sentences, and the seconds for one alone, the median of some."""
    many = worker.ask("many")
    alone = [worker.ask("alone")["seconds"] for _ in range(repeats)]
    return many["seconds"], many["cpu_seconds"], float(np.median(alone))


def check_lengths(peer: str, translations: list[Pieces], length: int) -> None:
    """Refuse a comparison of different amounts of work: it is a defect of this script."""
    lengths = set(map(len, translations))
    if lengths != {length}:
        raise AssertionError(f"{peer}: translations of {sorted(lengths)} pieces, not {length}")


# ---- the page -------------------------------------------------------------------------------------------------------


def page(facts: dict[str, Any], results: list[Result]) -> Iterator[str]:
    """The report, in Markdown."""
    first = results[0].peer
    versions = sorted({f"{name} {text}" for result in results for name, text in result.versions.items()})
    yield f"`{facts['command']}`"
    yield ""
    yield (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, Python {facts['python']}, "
        f"{', '.join(versions)}; {facts['corpus']}, {joined_words(facts)}{facts['vocab_size']:,} pieces, "
        f"{facts['sentences']:,} sentences "
        f"of {facts['source_pieces'] / facts['sentences']:.1f} pieces, beam {facts['beam_size']}, every translation "
        f"{facts['length']} tokens long, batches of {facts['batch']} sentences of like length (`ours` makes its own)."
    )
    yield ""
    yield (
        "Speed is target tokens of the best hypothesis a second; the ratio is formed within each round, then its "
        "median and range; by CPU time, it tells more on a machine that others use, too. Alone: a sentence of "
        f"{facts['alone']['words']} words by itself, its translation {facts['alone']['length']} tokens long, and how "
        f"many times the contender's time `{first}` takes; "
        "a contender of several workers has it in one of them, on no more threads than that one has. Agreement: "
        "translations that are those of the first contender, piece by piece."
    )
    yield ""
    columns = ["size", "computes in", "contender", f"{first} / this", "range", "by CPU time", "tokens/s", "range"]
    columns += [f"alone: time of {first} / this", "range", "alone, ms", "range", "agreement"]
    yield row(columns)
    yield rule(3, 10)
    for result in results:
        setting = (result.size, result.precision)
        ours = [r for r in results if r.peer == first and r is not result and (r.size, r.precision) == setting]
        speeds = [ratio for own in ours for ratio in ratios(own.speeds, result.speeds)]
        times = [ratio for own in ours for ratio in ratios(own.seconds_alone, result.seconds_alone)]
        cells = [result.size, result.arithmetic, result.peer]
        by_cpu = [ratio for own in ours for ratio in ratios(result.cpu_seconds, own.cpu_seconds)]
        cells += [*spread(speeds, ".2f"), spread(by_cpu, ".2f")[0]]
        cells += [*spread(result.speeds, ",.0f"), *spread(times, ".2f")]
        cells += [*spread([1e3 * seconds for seconds in result.seconds_alone], ",.1f"), f"{result.agreement:.1%}"]
        yield row(cells)
    yield ""

    for result in results:
        if result.precision == "fp32" and result.agreement < MUST_AGREE:
            yield (
                f"**`{result.peer}`, {result.size}: only {result.agreement:.1%} of the translations in fp32 agree, so "
                "this is not the same work, and its figures say nothing.**"
            )
    for peer in dict.fromkeys(result.peer for result in results):
        settings = next(result.settings for result in results if result.peer == peer)
        yield f"- `{peer}`: {', '.join(f'{name} {value}' for name, value in settings.items())}."


if __name__ == "__main__":
    main(sys.argv[1:])
