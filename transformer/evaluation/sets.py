"""`transformer evaluate`: translate the test sets, keep the translations, and score them.

A run keeps the text of its own sets, so that it can be scored wherever it is copied to: `hypotheses/NAME.src` and
`NAME.ref`, and beside them the translations, `NAME.hyp`. A score is printed with all that it depends on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from transformer.checkpoint import write_file
from transformer.config.jobs import EvaluateJob
from transformer.config.primitives import to_json
from transformer.config.settings import DataConfig, TrainConfig
from transformer.data.corpus import Pair, read_pairs
from transformer.data.source import locate, store_beside
from transformer.decoding.translator import Translator, build_translator, find_checkpoint
from transformer.errors import InputError, StorageError
from transformer.evaluation.score import Scores, score
from transformer.machine import resolve_threads

Sets = Mapping[str, Sequence[Pair]]


def run(job: EvaluateJob) -> dict[str, Any]:
    """Evaluate the run's test sets, or those of the job; the results.

    Raises InputError where there is no model or no test set, or a set cannot be scored.
    """
    run_dir = Path(job.run_dir)
    checkpoint = find_checkpoint(run_dir, job.checkpoint)
    data, recipe = checkpoint.settings("data", DataConfig), checkpoint.settings("train", TrainConfig)
    languages = (data.src_lang, data.tgt_lang)
    root = store_beside(job.run_dir) if job.store_dir is None else Path(job.store_dir)
    given = {
        name: locate(pair, f"test.{name}", languages=languages, store_dir=root).load(f"test.{name}")
        for name, pair in job.test.items()
    }
    kept = read_sets(run_dir)
    for name in given:
        if kept.get(name, given[name]) != given[name]:
            raise InputError(f"test.{name}: {run_dir}/hypotheses has another text of that name: choose another name")
    sets = given or kept
    if not sets:
        raise InputError(f"{run_dir}: the run has no test set; name one with test.NAME.src=FILE test.NAME.tgt=FILE")
    torch.set_num_threads(resolve_threads(job.threads))
    translator = build_translator(run_dir, checkpoint, search=job.search, device=job.device, precision=job.precision)
    return {
        "test_sets": evaluate_sets(run_dir, translator, sets, tgt_lang=data.tgt_lang, scorer=score),
        "checkpoint": checkpoint.path.name,
        "averaged": checkpoint.state.get("averaged", []),
        "steps": checkpoint.step,
        "search": to_json(translator.search),
        "seed": recipe.seed,
        "data_digest": checkpoint.state.get("data_digest", "unknown"),
    }


def evaluate_sets(
    run_dir: Path, translator: Translator, sets: Sets, *, tgt_lang: str, scorer: Callable[..., Scores]
) -> dict[str, dict[str, float | str]]:
    """Translate each set, write the translations to NAME.hyp, and score them.

    `scorer` is `score`, which refuses text that cannot be compared fairly, or `measure`, for the end of a training:
    that must not lose its results over a doubt.
    """
    scores = {}
    for name, pairs in sets.items():
        hypotheses = translator.translate([source for source, _ in pairs])
        _write_lines(_place(run_dir, name, "hyp"), hypotheses)
        scores[name] = scorer(hypotheses, [reference for _, reference in pairs], tgt_lang=tgt_lang).to_json()
    return scores


def format_results(run_dir: Path, results: Mapping[str, Any]) -> str:
    """One line of text for each test set: its scores with their signatures, the search, and the checkpoints."""
    search, averaged = results["search"], results["averaged"]
    decoding = f"beam {search['beam_size']}, alpha {search['length_penalty']}, source + {search['max_extra']} at most"
    origin = f"mean of steps {', '.join(map(str, averaged))}" if averaged else f"step {results['steps']}"
    origin += f", seed {results['seed']}, data {results['data_digest'][:12]}"
    lines = [
        f"{name}: BLEU {found['bleu']:.2f} ({found['bleu_signature']}), chrF {found['chrf']:.2f} "
        f"({found['chrf_signature']}); {decoding}; {run_dir}, {origin}"
        for name, found in results["test_sets"].items()
    ]
    lines = lines or [f"{run_dir}: {origin}; no test set to score (data.test.NAME.src, data.test.NAME.tgt)"]
    return "".join(f"{line}\n" for line in lines)


def write_sets(run_dir: Path, sets: Sets) -> None:
    """Keep the text of the run's sets as `hypotheses/NAME.src` and `NAME.ref`, of no others. Raises StorageError."""
    for path in (run_dir / "hypotheses").glob("*.src"):
        if path.stem not in sets:
            for kind in ("src", "ref", "hyp"):
                path.with_suffix(f".{kind}").unlink(missing_ok=True)
    for name, pairs in sets.items():
        _write_lines(_place(run_dir, name, "src"), [source for source, _ in pairs])
        _write_lines(_place(run_dir, name, "ref"), [reference for _, reference in pairs])


def digest_sets(sets: Sets) -> str:
    """The SHA-256 of the sets' names and text, in whichever order they come."""
    return sha256(json.dumps({name: list(pairs) for name, pairs in sets.items()}, sort_keys=True).encode()).hexdigest()


def read_sets(run_dir: Path) -> dict[str, list[Pair]]:
    """The test sets that the run keeps, by name."""
    sources = sorted((run_dir / "hypotheses").glob("*.src"))
    return {path.stem: list(read_pairs(path, path.with_suffix(".ref"))) for path in sources if path.stem != "dev"}


def _place(run_dir: Path, name: str, kind: str) -> Path:
    return run_dir / "hypotheses" / f"{name}.{kind}"


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    """Put a file in place at once. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    write_file(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))
