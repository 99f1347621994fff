"""Exports to a web page: a folder of files, in which Bergamot's engine translates in the browser.

    index.html  page.css  page.js     the page; what it says of the run is put in as text
    offline.js                        keeps the files, so that the page opens without a network
    engine/                           that of the package @browsermt/bergamot-translator, as `engine=FOLDER` has it
    model/                            what `to=bergamot` writes

Any file server will do: `python -m http.server`. No other address is asked for: the page's policy forbids it.
"""

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from transformer.config.languages import name_of
from transformer.config.settings import Quantization
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.metrics import named
from transformer.files import open_regular, parse_json
from transformer.integrations.export import bergamot
from transformer.integrations.export.formats import Original
from transformer.integrations.export.marian import MarianPeer
from transformer.tools.page import as_script_data

ASSETS = Path(__file__).parent / "page"
PAGE = "index.html"
ENGINE = "engine"
MODEL = "model"
PACKAGE = "@browsermt/bergamot-translator"
TRIED = "0.4.9"  # the version of the engine that has been tried
ENGINE_FILES = (
    *("translator.js", "worker/translator-worker.js"),
    *("worker/bergamot-translator-worker.js", "worker/bergamot-translator-worker.wasm"),
)
LARGEST = 64 << 20  # bytes of a file of the engine, whose largest has 5 million
RIGHT_TO_LEFT = {"ar", "arc", "ckb", "dv", "fa", "he", "ps", "sd", "syr", "ug", "ur", "yi"}
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src data:"
)

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="page.css">
<link rel="icon" href="data:,">
</head>
<body>
<h1>{title}</h1>
<main class="sides">
<div>
<label for="source">{source}</label>
<textarea id="source" lang="{source_code}" dir="{source_direction}" autofocus spellcheck="true"
 placeholder="Type or paste text: it is translated as you type"></textarea>
</div>
<div>
<h2 id="target-name">{target}</h2>
<div id="target" role="region" aria-labelledby="target-name" aria-live="polite" tabindex="0"
 lang="{target_code}" dir="{target_direction}"></div>
</div>
</main>
<div class="tools">
<button type="button" id="copy" disabled>Copy the translation</button>
<button type="button" id="clear">Clear</button>
<p id="status" role="status">If this message stays, the page was opened as a file, or scripts are off: serve the
folder, with <code>python -m http.server</code> for example, and open the address that it names.</p>
</div>
<details>
<summary>About this translator</summary>
<table>
{facts}
</table>
<table>
{scores}
</table>
</details>
<script type="application/json" id="site">{data}</script>
<script src="page.js" defer></script>
</body>
</html>
"""

README = """# A page that translates, {source} to {target}

Made from {origin}. Serve this folder with any file server, and open the address: `python -m http.server -d {output}`.

- What you type stays in the browser: the page fetches nothing but its own files, {megabytes:.1f} MB, and its policy
  forbids any other address. Once opened, it also opens without a network, over https or on this machine.
- The engine is {package} {version}, under the MPL 2.0; see https://github.com/browsermt/bergamot-translator.
- `README.md` and `parity.json` are for you: they name files of this machine, and quote sentences of the development
  set. The page does not need them.
"""


@dataclass(frozen=True)
class Engine:
    """The files of the engine, by their names, and its version."""

    version: str
    files: Mapping[str, bytes]


def read_engine(folder: Path | None) -> Engine:
    """The engine in the folder of its package. Raises InputError for what is no such folder."""
    remedy = f"npm pack {PACKAGE}@{TRIED} && tar xzf browsermt-bergamot-translator-{TRIED}.tgz, and engine=package"
    if folder is None:
        raise InputError(f"to=browser needs the engine: set engine to the folder of the package {PACKAGE}: {remedy}")
    try:
        with open_regular(folder / "package.json") as file:
            package = parse_json(file)
        files = {}
        for name in ENGINE_FILES:
            with open_regular(folder / name, limit=LARGEST) as file:
                files[name] = file.read()
    except OSError as error:
        raise InputError(
            f"engine={folder}: {error.filename or folder} cannot be read ({error.strerror or error}): {remedy}"
        ) from error
    except ValueError as error:
        raise InputError(f"{folder / 'package.json'}: not JSON: {error}") from error
    if not isinstance(package, dict) or package.get("name") != PACKAGE or not isinstance(package.get("version"), str):
        raise InputError(f"{folder / 'package.json'}: not the one of {PACKAGE}: {remedy}")
    return Engine(package["version"], files)


def check(original: Original) -> None:
    """Raise InputError for an engine that is none, and for a model that it does not run."""
    bergamot.check(original)
    read_engine(original.engine)


def write(original: Original, folder: Path) -> None:
    """Write the site. Raises InputError for an engine that is none."""
    engine = read_engine(original.engine)
    (folder / MODEL).mkdir()
    bergamot.write_model(original, folder / MODEL)
    for name, content in engine.files.items():
        path = folder / ENGINE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    (folder / PAGE).write_text(format_page(original, engine, folder), encoding="utf-8")
    for name in ("page.css", "page.js"):
        (folder / name).write_bytes((ASSETS / name).read_bytes())
    (folder / "offline.js").write_text(_offline(folder), encoding="utf-8")


def format_page(original: Original, engine: Engine, folder: Path) -> str:
    """index.html, in which all that the run says is text."""
    source_code, target_code = bergamot.codes_of(original)
    source, target = name_of(source_code), name_of(target_code)
    names = [bergamot.model_name(original), *bergamot.spm_names(original)]
    files = [{"path": f"{MODEL}/{name}", "bytes": (folder / MODEL / name).stat().st_size} for name in names]
    precision = bergamot.precision_of(original.quantization)
    data = {"from": source_code, "to": target_code, "precision": precision, "files": files}
    return TEMPLATE.format(
        policy=POLICY,
        title=html.escape(f"{source} to {target}"),
        source=html.escape(source),
        target=html.escape(target),
        source_code=html.escape(source_code),
        target_code=html.escape(target_code),
        source_direction=direction_of(source_code),
        target_direction=direction_of(target_code),
        facts=_table(_facts(original, engine)),
        scores=_table(_scores(original)),
        data=as_script_data(data),
    )


def direction_of(code: str) -> str:
    """In which direction a language is written."""
    return "rtl" if code in RIGHT_TO_LEFT else "ltr"


def _table(rows: list[tuple[str, str]]) -> str:
    """Rows of text, each a name and what it is."""
    return "\n".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )


def _facts(original: Original, engine: Engine) -> list[tuple[str, str]]:
    """Of the model and of the page; no path of this machine."""
    assert original.run is not None
    record = original.run.read_record()
    began = record.init_from
    imported = record.imported or (None if began is None else began.imported)
    config = original.translator.model.config
    parameters = sum(parameter.numel() for parameter in original.translator.model.parameters())
    rounded = "float32, rounded to int8 as it is loaded" if original.quantization is Quantization.float32 else "int8"
    rows: list[tuple[str, str]] = [
        ("Run", f"{original.run.path.absolute().name}, {original.checkpoint}, begun {record.started}"),
        (
            "Model",
            f"{config.n_layers} + {config.decoder_layers} layers of width {config.d_model}, {parameters:,} parameters",
        ),
        ("Here", f"{rounded}; greedy search"),
        ("Engine", f"{PACKAGE} {engine.version}, MPL 2.0"),
        ("Made with", f"transformer-mt {record.versions.get('transformer-mt', '')}"),
    ]
    if imported is not None:
        rows.append(("Licence of the model it began from", imported.licence or "none named"))
    return rows


def _scores(original: Original) -> list[tuple[str, str]]:
    """Those of results.json, which are of the averaged model."""
    assert original.run is not None
    try:
        results = original.run.read_results()
    except CheckpointError:
        return [("Scores", "none: the run has not been finished")]
    search = results.search
    rows: list[tuple[str, str]] = [
        (
            "Scores",
            f"of the run itself, averaged, with a beam of {search.beam_size} in full precision: not of this page",
        )
    ]
    for name, scores in results.scores.items():
        rows += [
            (f"{score.name}, {name}", f"{score.value:.{score.digits}f} ({score.signature})")
            for score in named(scores).values()
        ]
    return rows


def _offline(folder: Path) -> str:
    """offline.js, with the names of the files and a version that changes with any of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths]
    version = sha256(b"".join(sha256(path.read_bytes()).digest() for path in paths)).hexdigest()[:16]
    script = (ASSETS / "offline.js").read_text(encoding="utf-8").replace("VERSION", version)
    return script.replace("const FILES = [];", f"const FILES = {json.dumps(['./', *names])};")


def load(original: Original, folder: Path, threads: int) -> MarianPeer:
    """The model of the site."""
    return bergamot.load(original, folder / MODEL, threads)


def readme(original: Original) -> str:
    """The README of the export: how to serve it."""
    source, target = bergamot.codes_of(original)
    engine = read_engine(original.engine)
    weights = sum(parameter.numel() for parameter in original.translator.model.parameters())
    model = weights * (1 if original.quantization is Quantization.int8 else 4)
    return README.format(
        source=name_of(source),
        target=name_of(target),
        origin=original.origin,
        output=original.output,
        megabytes=(sum(map(len, engine.files.values())) + model) / 1e6,
        package=PACKAGE,
        version=engine.version,
    )


FORMAT = replace(bergamot.FORMAT, write=write, load=load, readme=readme, check=check)
