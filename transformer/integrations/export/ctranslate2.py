"""Exports to CTranslate2: what `integrations/engine` writes, with the tokenizers and a README."""

from pathlib import Path

from transformer.integrations.engine.ctranslate2 import CTranslate2Peer, Vocabularies, n_positions
from transformer.integrations.engine.ctranslate2 import write as write_model
from transformer.integrations.export.formats import (
    ExportFormat,
    Original,
    readme_tokenizers,
    target_name,
    write_tokenizers,
)
from transformer.run_dir import TOKENIZER

README = """# A translation model for CTranslate2

Exported from {origin}; weights in {quantization}. `parity.json` says how exactly it computes what that model computes.

```python
import ctranslate2, sentencepiece  # pip install ctranslate2 sentencepiece

folder = {output!r}
{tokenizers}
translator = ctranslate2.Translator(folder)

source = pieces.encode(["A sentence.", "And another one."], out_type=str)
found = translator.translate_batch(
    source, beam_size={beam_size}, length_penalty={length_penalty:g}, min_decoding_length=0
)
print([{target}.decode(result.hypotheses[0]) for result in found])
```

- CTranslate2 adds EOS to the source. `min_decoding_length=0` lets EOS come first, as training does.
- CTranslate2 divides a log-probability by length**length_penalty, and the run by ((5 + length) / 6)**{alpha:g}. The
  exponent above does much the same at usual lengths; a development set may have a better one.
- CTranslate2 ends a search once as many translations are finished as the beam is wide. A larger `patience` goes on.
- The model has {positions} positions. Keep `max_input_length` and `max_decoding_length` below: a longer
  sentence would end in an error.
"""


def write(original: Original, folder: Path) -> None:
    """Write the model, its vocabularies and its tokenizers."""
    translator = original.translator
    write_model(translator.model, Vocabularies.of(translator.tokenizers), folder, quantization=original.quantization)
    write_tokenizers(original, folder)


def load(original: Original, folder: Path, threads: int) -> CTranslate2Peer:
    """The model in the folder, with the exponent of the export."""
    vocabularies = Vocabularies.of(original.translator.tokenizers)
    return CTranslate2Peer(folder, vocabularies, folder / TOKENIZER, alpha=original.exponent, threads=threads)


def readme(original: Original) -> str:
    """The README of the export: how to load the model."""
    search = original.translator.search
    return README.format(
        origin=original.origin,
        quantization=original.quantization.value,
        output=str(original.output),
        tokenizers=readme_tokenizers(original),
        target=target_name(original),
        beam_size=search.beam_size,
        length_penalty=original.exponent,
        alpha=search.length_penalty,
        positions=n_positions(original.translator.model.config),
    )


FORMAT = ExportFormat(
    packages=("ctranslate2",),
    search=None,
    write=write,
    load=load,
    readme=readme,
)
