"""`transformer attention`: who attends to whom in a trained model (the paper's Figures 3 to 5).

    one sentence     sentence -> output: a page to explore, figures, and the weights as a file
    many of them     describe_heads -> `heads`: what each head does, and how well layers align words

The weights themselves come from `tools/inspection`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transformer.config.settings import TORCH
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.loading import load_translator
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.machine import resolve_threads
from transformer.run_dir import RunDir
from transformer.tools.attention.heads import HeadMeter, HeadReport, format_heads_markdown
from transformer.tools.attention.job import AttentionJob
from transformer.tools.attention.output import (
    check_figures,
    write_figures,
    write_page,
    write_report,
    write_weights,
)
from transformer.tools.attention.sentence import (
    Inspected,
    check_pieces,
    inspect,
    named_sentence,
    origin_of,
    read_pieces,
    sentences_of,
)
from transformer.tools.inspection import attention_maps
from transformer.tools.outputs import make_output
from transformer.tools.paper.alignment_error import AlignmentMeter, Gold, read_alignments, word_of_each

MOST_WEIGHTS = 1 << 24  # of one sentence pair: a page of at most 16 MB or so


def attention(job: AttentionJob) -> str:
    """Write the files, and return the text that the command prints.

    For one sentence: the page, the weights and the figures, and the text lists them. For many: what each head does, and
    the text is the table of it.

    Raises InputError where there is no such run, sentence, layer or head; CheckpointError where the run is damaged;
    StorageError where `output` cannot be written.
    """
    run = RunDir(Path(job.run_dir))
    torch.set_num_threads(resolve_threads(job.threads))
    translator = load_translator(
        run.path,
        checkpoint=job.checkpoint,
        search=replace(job.search, engine=TORCH),  # whose attention is shown
        device=job.device,
        precision=job.precision,
    )
    output = Path(job.output)
    make_output(output)  # before much time is spent

    if job.sentences is not None:
        report = describe_heads(job, run, translator)
        write_report(output, report)
        return format_heads_markdown(report)

    inspected = inspect(translator, named_sentence(job, run), most_weights=MOST_WEIGHTS)
    check_figures(job, inspected)
    return _write_sentence(output, run, inspected, job=job)


def _write_sentence(output: Path, run: RunDir, inspected: Inspected, *, job: AttentionJob) -> str:
    """Write the files of one sentence, and return a text that lists them. Raises StorageError."""
    page = write_page(output, run, inspected)
    weights = write_weights(output, inspected, job.format)
    figures = write_figures(output / "figures", inspected, job)

    origin = "given" if inspected.is_forced else "the model's own"
    lines = [
        f"source: {inspected.text}",
        f"translation ({origin}): {inspected.translation}",
        f"written: {page}",
        f"written: {weights}",
    ]
    if figures:
        lines.append(f"written: {figures[0].parent}, {len(figures)} figures")
    return "".join(f"{line}\n" for line in lines)


# ---- what heads do --------------------------------------------------------------------------------------------------


def describe_heads(job: AttentionJob, run: RunDir, translator: Translator) -> HeadReport:
    """Measure what each head does in the first `job.sentences` sentences, and how well layers align words.

    Raises InputError where there are no such sentences, one is empty or too long, or alignments do not fit.
    """
    # The sentences, and their true alignments if there are any.
    sentences = sentences_of(job, run, first=0, count=job.sentences or 1)
    if not sentences:
        raise InputError(f"{origin_of(job, run)} has no sentence")
    for number, (source, target) in enumerate(sentences, 1):
        check_pieces(translator, source, f"sentence {number}", side=0)
        if target is not None:
            check_pieces(translator, target, f"the reference of sentence {number}", side=1)
    gold = None if job.alignments is None else read_alignments(Path(job.alignments), len(sentences))

    # Measure the heads in each of them.
    config = translator.model.config
    heads = HeadMeter()
    alignments = AlignmentMeter(config.decoder_layers, config.n_heads)
    for index, (source_ids, target_ids) in enumerate(read_pieces(translator, sentences)):
        maps = attention_maps(
            translator.model,
            source_ids,
            target_ids,
            device=translator.device,
            precision=translator.precision,
        )
        heads.add(maps)
        if gold is not None:
            source_words = _word_of_each(translator.tokenizers.source, source_ids)
            target_words = _word_of_each(translator.tokenizers.target, target_ids)
            _check_links(gold[index], source_words, target_words, place=f"{job.alignments}:{index + 1}")
            alignments.add(maps, gold[index], source=source_words, target=target_words)

    return HeadReport(
        run_dir=str(run.path),
        sentences=len(sentences),
        is_forced=sentences[0][1] is not None,
        heads=heads.heads(),
        alignments=None if gold is None else alignments.layers(),
    )


def _word_of_each(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The word that each piece belongs to, counted from 0."""
    return word_of_each([tokenizer.piece(id) for id in ids])


def _check_links(gold: Gold, source: Sequence[int], target: Sequence[int], *, place: str) -> None:
    """Raise InputError for a link to a word that the sentence does not have.

    `source` and `target` have the word of each piece, so that their last one tells how many words there are.
    """
    n_source = source[-1] + 1
    n_target = target[-1] + 1
    for source_word, target_word in gold.possible:
        if source_word >= n_source or target_word >= n_target:
            raise InputError(
                f"{place}: the link {source_word}-{target_word} is beyond the sentence, which has {n_source} source "
                f"and {n_target} target words: are these the alignments of this set, counted from 0?"
            )
