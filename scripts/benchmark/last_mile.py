"""One model in every engine that runs it: identical translations, BLEU, size, words a second on one core.

    python scripts/benchmark/last_mile.py RUN --bergamot FOLDER [--marian PYTHON] [--checkpoint auto] [--lines 1000]

The sentences are those of the run's first test set, and the search is greedy everywhere, because Bergamot's is. FOLDER
is the package of `npm pack @browsermt/bergamot-translator@0.4.9`, run by node; PYTHON has pymarian. All have one core;
words are those of the source, and loading the model does not count.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import transformer

DRIVER = Path(__file__).with_name("bergamot.mjs")
MARIAN = "import sys, _pymarian; _pymarian.main(sys.argv[1:])"


@dataclass(frozen=True)
class Translated:
    """What an engine made of the sentences."""

    engine: str
    translations: list[str]
    seconds: float
    megabytes: float  # of what has to be copied: weights and pieces


def of_torch(run_dir: Path, sources: list[str], checkpoint: str = "auto") -> Translated:
    """This package, in float32."""
    translator = transformer.load(run_dir, checkpoint=checkpoint, precision="fp32", device="cpu", beam_size=1)
    start = time.perf_counter()
    translations = translator.translate(sources)
    seconds = time.perf_counter() - start
    weights = sum(parameter.numel() * 4 for parameter in translator.model.parameters())
    pieces = sum(len(content) for content in translator.tokenizers.models.values())
    return Translated(f"torch {torch.__version__}, float32", translations, seconds, (weights + pieces) / 1e6)


def of_ctranslate2(run_dir: Path, sources: list[str], kind: str, folder: Path, checkpoint: str = "auto") -> Translated:
    """CTranslate2, by itself, on the exported files."""
    import ctranslate2
    import sentencepiece

    _export(run_dir, checkpoint, "ctranslate2", kind, folder)
    names = ["tokenizer.model", "tokenizer.target.model" if (folder / "tokenizer.target.model").exists() else ""]
    models = [sentencepiece.SentencePieceProcessor(model_file=str(folder / (name or names[0]))) for name in names]
    engine = ctranslate2.Translator(str(folder), compute_type=kind, intra_threads=1, inter_threads=1)
    start = time.perf_counter()
    pieces = [[models[0].id_to_piece(index) for index in ids] for ids in models[0].encode(sources)]
    found = engine.translate_batch(pieces, beam_size=1, max_batch_size=16, max_decoding_length=256)
    translations = [models[1].decode_pieces(one.hypotheses[0]) for one in found]
    seconds = time.perf_counter() - start
    return Translated(f"CTranslate2 {ctranslate2.__version__}, {kind}", translations, seconds, _size(folder))


def of_marian(run_dir: Path, sources: list[str], python: str, folder: Path, checkpoint: str = "auto") -> Translated:
    """marian-decoder of pymarian, less the time that one line takes, which is that of loading."""
    _export(run_dir, checkpoint, "marian", "float32", folder)

    def run(lines: list[str]) -> tuple[list[str], float]:
        file = folder.with_name("in.txt")
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        words = ["decode", "-c", str(folder / "decoder.yml"), "-i", str(file), "--beam-size", "1", "--cpu-threads", "1"]
        start = time.perf_counter()
        ended = subprocess.run([python, "-c", MARIAN, *words, "--quiet"], check=True, capture_output=True, text=True)
        return ended.stdout.split("\n")[:-1], time.perf_counter() - start

    _, loading = run(sources[:1])
    translations, seconds = run(sources)
    return Translated("Marian 1.12.42, float32", translations, seconds - loading, _size(folder))


def of_bergamot(
    run_dir: Path, sources: list[str], engine: Path, kind: str, folder: Path, checkpoint: str = "auto"
) -> Translated:
    """Bergamot's WASM engine in node: float32 is rounded to int8 while it is loaded."""
    _export(run_dir, checkpoint, "bergamot", kind, folder)
    (model,) = folder.glob("model.*.bin")
    vocabularies = sorted(folder.glob("*.spm"))  # srcvocab, trgvocab
    precision = "int8shiftAlphaAll" if kind == "int8" else "int8shiftAll"
    with TemporaryDirectory() as temporary:
        package = Path(temporary, "engine")
        shutil.copytree(engine, package)
        (package / "worker" / "package.json").write_text('{"type": "commonjs"}')  # node takes the worker for a module
        words = ["node", str(DRIVER), str(package), precision, str(model), ",".join(map(str, vocabularies))]
        text = "".join(f"{line}\n" for line in sources)
        ended = subprocess.run(words, input=text, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"node ended with {ended.returncode}: {ended.stderr[-2000:]}")
    seconds = next(float(line.split()[1]) for line in ended.stderr.split("\n") if line.startswith("seconds "))
    return Translated(f"Bergamot 0.4.9 (WASM), {kind}", ended.stdout.split("\n")[:-1], seconds, _size(folder))


def _size(folder: Path) -> float:
    files = [*folder.glob("*.bin"), *folder.glob("*.npz"), *folder.glob("*.spm"), *folder.glob("*.model")]
    return sum(path.stat().st_size for path in files) / 1e6


def _export(run_dir: Path, checkpoint: str, target: str, kind: str, folder: Path) -> None:
    words = [f"run_dir={run_dir}", f"checkpoint={checkpoint}", f"to={target}", f"output={folder}", "threads=1"]
    command = [sys.executable, "-m", "transformer", "export", *words, f"quantization={kind}", "sentences=100"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """sacreBLEU's."""
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(translations), [list(references)]).score)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--bergamot", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--marian", metavar="PYTHON")
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--source", type=Path, help="the sentences, with --reference; else the run's first test set")
    parser.add_argument("--reference", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # what is started from here inherits it

    files = [given.source, given.reference]
    if given.source is None:
        first = min(path for path in (given.run / "hypotheses").glob("*.src") if path.stem != "dev")
        files = [first, first.with_suffix(".ref")]
    sources, references = (path.read_text("utf-8").split("\n")[:-1][: given.lines] for path in files)
    words = sum(len(line.split()) for line in sources)

    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        found = [of_torch(given.run, sources, given.checkpoint)]
        for kind in ("float32", "int8"):
            found.append(of_ctranslate2(given.run, sources, kind, work / f"c-{kind}", given.checkpoint))
        if given.marian:
            found.append(of_marian(given.run, sources, given.marian, work / "marian", given.checkpoint))
        for kind in ("float32", "int8"):
            found.append(of_bergamot(given.run, sources, given.bergamot, kind, work / f"b-{kind}", given.checkpoint))

    print("| engine | identical | BLEU | MB | words a second |\n| --- | ---: | ---: | ---: | ---: |")
    for one in found:
        same = sum(a == b for a, b in zip(one.translations, found[0].translations, strict=True))
        print(
            f"| {one.engine} | {same} of {len(sources)} | {bleu(one.translations, references):.2f} | "
            f"{one.megabytes:.1f} | {words / one.seconds:,.0f} |"
        )


if __name__ == "__main__":
    main()
