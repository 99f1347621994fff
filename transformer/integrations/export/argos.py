"""Exports to Argos Translate: the package that it, its desktop programs and LibreTranslate install.

    RUN-argos/translate-en_de.argosmodel    a ZIP archive with one folder:
        metadata.json         the languages
        sentencepiece.model   of both
        model/                as for CTranslate2
        README.md             shown to those who install it

Argos searches with a beam and a length penalty of its own, so the check searches with these, too. It splits a text into
sentences by a model of MiniSBD, which it fetches for the source language when it first needs it.
"""

import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from transformer import __version__
from transformer.config.languages import language_of, name_of
from transformer.config.settings import SearchOverride
from transformer.integrations.engine.ctranslate2 import CTranslate2Peer, Vocabularies
from transformer.integrations.engine.ctranslate2 import write as write_model
from transformer.integrations.export.formats import ExportFormat, Original
from transformer.run_dir import TOKENIZER

OLDEST = "1.11"  # of Argos Translate: earlier versions want a model of Stanza in the package
BEAM_SIZE = 4
LENGTH_PENALTY = 0.2  # the exponent of a length
REGIONAL = {"zh": ("zt", {"hant", "tw", "hk", "mo"}), "pt": ("pb", {"br"})}  # which Argos has codes of its own for
NAMES = {"zt": "Chinese (traditional)", "pb": "Portuguese (Brazil)"}
MODEL = "model"
PIECES = "sentencepiece.model"

README = """# {source} to {target} for Argos Translate

Exported from {origin}; weights in {quantization}. `parity.json` says how exactly it computes what that model computes.

```python
from argostranslate import package, translate  # pip install 'argostranslate>={oldest}'

package.install_from_path({path!r})
print(translate.translate("A sentence. And another one.", {source_code!r}, {target_code!r}))
```

- Uninstall other packages from {source_code} to {target_code} first: Argos takes one of them.
- The program of Argos for the desktop installs the same file, and LibreTranslate offers what is installed.
- Argos splits a text into sentences with a model of MiniSBD for the source language, which it downloads once. Where
  there is no network, put the model's file (`{source_code}.onnx`) into a folder `minisbd` of the installed package.
- Argos searches with a beam of {beam_size}, divides a log-probability by length**{penalty:g}, and writes no `_`.
"""

PACKAGED = """# {source} to {target}

Made by transformer-mt {version} from {origin}; weights in {quantization}.
"""


def write(original: Original, folder: Path) -> None:
    """Write the package. Raises InputError for a language without a code that Argos could have."""
    translator = original.translator
    source, target = codes_of(original)
    with TemporaryDirectory(dir=folder) as temporary:
        package = Path(temporary)
        (package / MODEL).mkdir()
        vocabularies = Vocabularies.of(translator.tokenizers)
        write_model(translator.model, vocabularies, package / MODEL, quantization=original.quantization)
        (package / PIECES).write_bytes(translator.tokenizers.models[TOKENIZER])
        (package / "metadata.json").write_text(json.dumps(_metadata(source, target), indent=2), encoding="utf-8")
        packaged = PACKAGED.format(
            source=_name(source),
            target=_name(target),
            version=__version__,
            origin=original.origin,
            quantization=original.quantization.value,
        )
        (package / "README.md").write_text(packaged, encoding="utf-8")

        # Floats do not get smaller by compression, and Argos unpacks the package when it installs it.
        name = package_name(source, target)
        with zipfile.ZipFile(folder / f"{name}.argosmodel", "w") as archive:
            for path in sorted(package.rglob("*")):
                archive.write(path, f"{name}/{path.relative_to(package)}")


def load(original: Original, folder: Path, threads: int) -> CTranslate2Peer:
    """The model of the package, unpacked, with the length penalty of Argos."""
    name = package_name(*codes_of(original))
    with TemporaryDirectory() as temporary, zipfile.ZipFile(folder / f"{name}.argosmodel") as archive:
        archive.extractall(temporary)
        package = Path(temporary) / name
        vocabularies = Vocabularies.of(original.translator.tokenizers)
        return CTranslate2Peer(package / MODEL, vocabularies, package / PIECES, alpha=LENGTH_PENALTY, threads=threads)


def codes_of(original: Original) -> tuple[str, str]:
    """What Argos calls the source and the target language. Raises InputError for what is no code of a language."""
    languages = {"data.src_lang": original.src_lang, "data.tgt_lang": original.tgt_lang}
    source, target = (_code(language, key) for key, language in languages.items())
    return source, target


def _code(language: str, key: str) -> str:
    code = language_of(language, key)
    regional, regions = REGIONAL.get(code, (code, set()))
    return regional if regions & set(language.lower().replace("_", "-").split("-")) else code


def _name(code: str) -> str:
    return NAMES.get(code) or name_of(code)


def package_name(source: str, target: str) -> str:
    """The name that Argos itself gives to the files of such packages."""
    return f"translate-{source}_{target}"


def _metadata(source: str, target: str) -> dict[str, object]:
    """What Argos reads of a package before it is used."""
    return {
        "package_version": "1.0",
        "argos_version": OLDEST,
        "from_code": source,
        "from_name": _name(source),
        "to_code": target,
        "to_name": _name(target),
        "links": [],
    }


def readme(original: Original) -> str:
    """The README of the export: how to install the package."""
    source, target = codes_of(original)
    return README.format(
        source=_name(source),
        target=_name(target),
        source_code=source,
        target_code=target,
        origin=original.origin,
        quantization=original.quantization.value,
        oldest=OLDEST,
        path=f"{original.output}/{package_name(source, target)}.argosmodel",
        beam_size=BEAM_SIZE,
        penalty=LENGTH_PENALTY,
    )


FORMAT = ExportFormat(
    packages=("ctranslate2",),
    search=SearchOverride(beam_size=BEAM_SIZE),
    write=write,
    load=load,
    readme=readme,
)
