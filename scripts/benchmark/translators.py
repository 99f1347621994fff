"""The contenders of translate.py: one process each, which builds its model and then translates when the parent asks.

Nothing of the package is imported, but in `ours` and `engine`. The first request is a Spec, answered by what was built;
each other one is the name of some sentences, "many" or "alone", answered by the translations and the seconds they took.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from answering import Request, answer
from weights import as_ctranslate2, read_weights

PAD, BOS, EOS = 0, 2, 3
NO_LIMIT = 1 << 30
EngineType = Literal["float32", "int8"]
CTRANSLATE2_TYPES: dict[str, EngineType] = {"fp32": "float32", "bf16": "int8"}  # it has no bf16 on a CPU

Pieces = list[int]  # of a sentence, without EOS
Translate = Callable[[], list[Pieces]]


@dataclass(frozen=True)
class Spec:
    """What a worker is to build."""

    peer: str
    precision: str  # fp32, bf16: of CTranslate2, which has no bf16, int8
    shape: dict[str, int]  # a Shape of peers.py
    vocab_size: int
    longest: int  # positions of the model
    beam_size: int
    batch: int  # sentences of a batch, for all but `ours`
    threads: int
    run_dir: str  # the model as a run of ours
    weights: str  # .npz: the same under the names of a checkpoint, and `positions` (longest, d_model)
    sentences: str  # .json: `many` and `alone`, lists of pieces, each with the tokens of every translation of it


@dataclass(frozen=True)
class Contender:
    """What a worker has built. `ready` gets sources and the tokens of every translation, untimed; then comes the clock.

    All that `ready` returns translates the sources, and gives the best hypothesis of each, in their order.
    """

    arithmetic: str
    settings: dict[str, Any]
    versions: dict[str, str]
    ready: Callable[[list[Pieces], int], Translate]


def ours(spec: Spec) -> Contender:
    """The package as `transformer translate` uses it, with the batches it makes itself."""
    return _ours(spec, batch=None)


def ours_in_batches(spec: Spec) -> Contender:
    """The same in the batches of the others."""
    return _ours(spec, batch=spec.batch)


def engine(spec: Spec) -> Contender:
    """The package with search.engine=ctranslate2, in the type of CTranslate2."""
    return _ours(spec, batch=None, engine_type=CTRANSLATE2_TYPES[spec.precision])


def _ours(spec: Spec, *, batch: int | None, engine_type: EngineType | None = None) -> Contender:
    """The translator of a run; `batch` sentences at a time, or all that there are; with an engine of some type."""
    import torch

    import transformer

    torch.set_num_threads(spec.threads)
    translator = transformer.load(
        spec.run_dir,
        device="cpu",
        precision="bf16" if spec.precision == "bf16" and engine_type is None else "fp32",
        beam_size=spec.beam_size,
        engine=None if engine_type is None else "ctranslate2",
        engine_type=engine_type,
        batch_tokens=None if batch is None else NO_LIMIT,
    )
    model = translator.model

    def ready(sources: list[Pieces], length: int) -> Translate:
        def turn() -> list[Pieces]:
            # No translation ends by itself, so all are as long as the model's positions allow.
            model.config = replace(model.config, max_positions=length)
            return in_batches(sources, batch or len(sources), translate)

        return turn

    def translate(sources: list[Pieces]) -> list[Pieces]:
        # Sources may be longer than the positions that are left to translations, so nothing may look at their lengths.
        return [best.tokens for [best] in translator.batches.hypotheses(sources, n_best=1)]

    return Contender(engine_type or spec.precision, {"threads": spec.threads}, {"torch": torch.__version__}, ready)


def ct2(spec: Spec) -> Contender:
    """CTranslate2 as it has the most throughput: as many workers as threads, of one thread each."""
    return _ct2(spec, workers=spec.threads, threads=1)


def ct2_threads(spec: Spec) -> Contender:
    """CTranslate2 with one worker of all threads."""
    return _ct2(spec, workers=1, threads=spec.threads)


def _ct2(spec: Spec, *, workers: int, threads: int) -> Contender:
    import ctranslate2

    arithmetic = CTRANSLATE2_TYPES[spec.precision]
    with TemporaryDirectory() as folder:
        save_ctranslate2(spec, folder)
        translator = ctranslate2.Translator(
            folder, device="cpu", compute_type=arithmetic, inter_threads=workers, intra_threads=threads
        )

    def ready(sources: list[Pieces], length: int) -> Translate:
        texts = [[*map(str, source), str(EOS)] for source in sources]

        def turn() -> list[Pieces]:
            found = translator.translate_batch(
                texts,
                beam_size=spec.beam_size,
                max_batch_size=spec.batch,  # of sorted sentences
                max_decoding_length=length,
            )
            return [list(map(int, result.hypotheses[0])) for result in found]

        return turn

    settings = {"workers": workers, "threads of a worker": threads}
    return Contender(translator.compute_type, settings, {"ctranslate2": ctranslate2.__version__}, ready)


def save_ctranslate2(spec: Spec, folder: str) -> None:
    """Write the model in CTranslate2's format; a piece is called by its number."""
    weights, positions = read_weights(spec.weights)
    model = as_ctranslate2(weights, positions, n_heads=spec.shape["n_heads"])
    names = list(map(str, range(spec.vocab_size)))
    model.register_source_vocabulary(names)
    model.register_target_vocabulary(names)
    model.config.bos_token = str(BOS)
    model.config.eos_token = str(EOS)
    model.config.decoder_start_token = str(BOS)
    model.config.unk_token = "1"
    model.validate()
    model.optimize()
    model.save(folder)


def hf(spec: Spec) -> Contender:
    """Hugging Face's MarianMTModel and its generate()."""
    import torch
    import transformers
    from peers import Shape, marian_model

    torch.set_num_threads(spec.threads)
    shape = Shape(**spec.shape)
    model = marian_model(shape, spec.vocab_size, longest=spec.longest, weights=spec.weights)
    model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[spec.precision]).eval()

    def ready(sources: list[Pieces], length: int) -> Translate:
        def translate(part: list[Pieces]) -> list[Pieces]:
            width = 1 + max(map(len, part))
            rows = torch.tensor([[*source, EOS] + [PAD] * (width - 1 - len(source)) for source in part])
            found = model.generate(
                input_ids=rows,
                attention_mask=rows.ne(PAD).long(),
                num_beams=spec.beam_size,
                do_sample=False,
                max_new_tokens=length,
            )
            best: list[Pieces] = found[:, 1:].tolist()  # without BOS
            return best

        return lambda: in_batches(sources, spec.batch, translate)

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Contender(spec.precision, {"threads": spec.threads}, versions, ready)


def in_batches(sources: list[Pieces], size: int, translate: Callable[[list[Pieces]], list[Pieces]]) -> list[Pieces]:
    """Sentences of like length together, the longest first, and their translations in the order of the sources."""
    order = sorted(range(len(sources)), key=lambda n: -len(sources[n]))
    found: dict[int, Pieces] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        found |= zip(places, translate([sources[n] for n in places]), strict=True)
    return [found[n] for n in range(len(sources))]


CONTENDERS: dict[str, Callable[[Spec], Contender]] = {
    "ours": ours,
    "ours_in_batches": ours_in_batches,
    "engine": engine,
    "ct2": ct2,
    "ct2_threads": ct2_threads,
    "hf": hf,
}


def serve(first: dict[str, Any], requests: Iterator[Request]) -> Iterator[dict[str, Any]]:
    """The answers: first what was built, then each turn as its request comes in."""
    spec = Spec(**first)
    contender = CONTENDERS[spec.peer](spec)
    yield {"arithmetic": contender.arithmetic, "settings": contender.settings, "versions": contender.versions}

    sentences = json.loads(Path(spec.sentences).read_text(encoding="utf-8"))
    turns = {name: contender.ready(part["sources"], part["length"]) for name, part in sentences.items()}
    for name in requests:
        began, cpu_began = time.perf_counter(), time.process_time()
        found = turns[name]()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        yield {"seconds": seconds, "cpu_seconds": cpu_seconds, "translations": found}


if __name__ == "__main__":
    answer(serve)
