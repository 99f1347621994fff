"""The command line: `transformer COMMAND key=value ...`, one Hydra application for each command.

The only file that knows Hydra. It composes YAML and overrides, turns them into the typed job of `config.py`, runs the
command, and maps every error to one line and an exit status: Hydra alone would exit 1 for all of them. Keys are checked
here, before Hydra sees them: `++key=value` would pass its schema unseen.
"""

import difflib
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from transformer import __version__
from transformer.config.jobs import AverageJob, EvaluateJob, SummaryJob, TrainJob, TranslateJob
from transformer.config.settings import ExtraConfig, PairConfig
from transformer.errors import InputError, Stopped, StorageError, TransformerError
from transformer.seeding import seed_for

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Command:
    """A command's job and the line that `--help` says of it."""

    job: type
    help: str


COMMANDS = {
    "prepare": Command(TrainJob, "read, filter and tokenise a corpus, ready for training"),
    "train": Command(TrainJob, "train a model, or go on with one; then average checkpoints and score the test sets"),
    "translate": Command(TranslateJob, "translate standard input to standard output, line for line"),
    "evaluate": Command(EvaluateJob, "translate the test sets and score them with sacreBLEU"),
    "average": Command(AverageJob, "average a run's newest checkpoints"),
    "summary": Command(SummaryJob, "parameters, FLOPs and memory of a model"),
}


FLAGS = {
    *("-h", "--help", "--hydra-help", "-c", "--cfg", "--resolve", "-p", "--package", "-m", "--multirun"),
    *("-i", "--info", "-sc", "--shell-completion", "-cd", "--config-dir"),
    *("-cn", "--config-name", "-cp", "--config-path"),
}  # Hydra's, less --experimental-rerun, which unpickles a file

NAMED = r"(test|extra)\.([A-Za-z0-9_-]+)\."  # sets that have names of their own: their keys are new to Hydra


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("transformer").setLevel(logging.INFO)  # not the root: the hub's client tells of every request
    sys.exit(_dispatch((sys.argv[1:2] or ["--help"])[0], sys.argv[2:]))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _dispatch(name: str, arguments: list[str]) -> int:
    try:
        if name in ("-h", "--help", "help", "--version"):
            sys.stdout.write(f"transformer {__version__}\n" if name == "--version" else _overview())
            sys.stdout.flush()
            return 0 if sys.argv[1:] else InputError.exit_status
        if name not in COMMANDS:
            raise InputError(f"unknown command {name!r}{_suggest(name, COMMANDS)}; `transformer --help` lists them")
        _hydra(name, _overrides(name, arguments))
    except TransformerError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        status = Stopped.exit_status if name in ("prepare", "train") else 128 + signal.SIGINT
        return _fail("stopped; the same command starts again", status)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would flush at its end
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", StorageError.exit_status)
    return 0


def _overview() -> str:
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "usage: transformer COMMAND [key=value ...]\n\n{}\n\n{}\n".format(
        "\n".join(lines), "`transformer COMMAND --help` lists a command's options."
    )


def _fail(message: str, status: int) -> int:
    line = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in message)
    sys.stderr.write(f"transformer: error: {line}\n")
    return status


def _hydra(name: str, overrides: list[str]) -> None:
    """Compose and run under Hydra, which reads its overrides from `sys.argv`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through: it is the dispatcher that reports them
    if not OmegaConf.has_resolver("shipped"):
        OmegaConf.register_new_resolver("shipped", lambda: str(shipped("data")))
    sys.argv = [f"transformer {name}", *overrides]
    raised: list[BaseException] = []  # by the command: Hydra would print a line of its own on the way out
    composed = False

    def task(config: DictConfig) -> None:
        nonlocal composed
        try:
            job = _typed(name, config)
            composed = True
            _run(name, job)
            sys.stdout.flush()
        except (TransformerError, OSError) as error:
            raised.append(error)
            sys.exit(1)

    try:
        with tempfile.TemporaryDirectory() as scratch:  # where a sweep leaves its notes
            store = ConfigStore.instance()
            store.store(name=f"{name}_schema", node=_schema(COMMANDS[name].job, overrides))
            store.store(name="house", package="hydra", node=_house(name, scratch))
            hydra.main(version_base="1.3", config_path=str(shipped("configs")), config_name=name)(task)()
    except SystemExit:
        if raised:
            raise raised[0] from None
        raise
    except Exception as error:
        if composed or isinstance(error, BrokenPipeError):
            raise
        # whatever composing trips over is in the overrides, or in the files that they name
        raise InputError(f"{_one_line(error)} (composing {' '.join(overrides)})") from None


def _schema(job: type, overrides: list[str]) -> Any:
    """The job with its defaults, and a place for each set that the overrides name: they are new keys."""
    schema = job()
    for override in overrides:
        if match := re.match(rf"(data\.)?{NAMED}[^=]+=", override):
            place, kind = (schema.data if match[1] else schema), ExtraConfig if match[2] == "extra" else PairConfig
            getattr(place, match[2])[match[3]] = kind()
    return schema


def shipped(folder: str) -> Path:
    """A folder that comes with the package: inside it in a wheel, beside it in a checkout."""
    return next(path for path in (PACKAGE / "shipped" / folder, PACKAGE.parent / folder) if path.is_dir())


def _house(name: str, scratch: str) -> dict[str, Any]:
    """Hydra leaves nothing behind: no folder, no file, no change of directory."""
    return {
        "run": {"dir": "."},
        "sweep": {"dir": scratch, "subdir": "."},
        "output_subdir": None,
        "job": {"chdir": False},
        "help": {"app_name": f"transformer {name}", "template": _help(name)},
    }


def _help(name: str) -> str:
    job = COMMANDS[name].job
    options = [f"  {key}={option.default}\n      {option.help}" for key, option in _options(job).items()]
    groups = "groups (group=option):\n$APP_CONFIG_GROUPS\n" if issubclass(job, TrainJob) else ""
    return (
        f"usage: transformer {name} [key=value ...]\n\n{COMMANDS[name].help}\n\n{groups}"
        "options, with their defaults (an experiment may set others; --cfg job shows what is in force):\n"
        "{}\n\n--multirun runs every combination of key=a,b; --config-dir DIR adds a folder of experiments.\n"
    ).format("\n".join(options))


# ---- the options of a job -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One key: its type, its default as it is typed on the command line, and its meaning."""

    kind: Any
    default: str
    help: str


def _options(job: type, prefix: str = "") -> dict[str, Option]:
    """Every key of a job, dotted; a set of pairs that has a name of its own as `KEY.NAME.src`."""
    found: dict[str, Option] = {}
    kinds = get_type_hints(job)
    for field in fields(job):
        kind, key, meaning = kinds[field.name], prefix + field.name, field.metadata.get("help", "")
        if is_dataclass(kind):
            found |= _options(kind, f"{key}.")  # type: ignore[arg-type]
        elif get_origin(kind) is dict:
            of_one = _options(get_args(kind)[1], f"{key}.NAME.").items()
            found |= {name: replace(option, help=meaning + option.help) for name, option in of_one}
        else:
            found[key] = Option(kind, _as_typed(field.default), _meaning(kind, meaning))
    return found


def _as_typed(value: object) -> str:
    if value is None:
        return "null"
    return value.name if isinstance(value, Enum) else str(value).lower() if isinstance(value, bool) else str(value)


def _meaning(kind: Any, meaning: str) -> str:
    is_choice = isinstance(kind, type) and issubclass(kind, Enum)
    return f"{meaning} [{', '.join(kind.__members__)}]" if is_choice else meaning


def _overrides(name: str, arguments: list[str]) -> list[str]:
    """The arguments, each key checked, and text values quoted: Hydra's grammar refuses most punctuation in them.

    Settings come first, flags after them: Hydra takes its overrides in one piece only.
    """
    options = _options(COMMANDS[name].job)
    sweep = any(argument in ("-m", "--multirun") for argument in arguments)
    found = [_override(argument, options, sweep=sweep) for argument in arguments]
    return sorted(found, key=lambda argument: argument.startswith("-") or "=" not in argument)


def _override(argument: str, options: dict[str, Option], *, sweep: bool) -> str:
    key, equals, value = argument.partition("=")
    if argument.startswith("-"):
        if key not in FLAGS:
            raise InputError(f"unknown flag {key}{_suggest(key, FLAGS)}; settings are written key=value")
        return argument
    if argument.startswith("~"):
        raise InputError(f"{argument}: a key cannot be removed; give it the value you want instead")
    bare = key.lstrip("+")
    if not equals or bare.startswith("hydra"):
        return argument
    if bare == "experiment":
        if value in ("", "null"):
            raise InputError(f"{argument}: name an experiment; base is the paper's, and sets nothing else")
        return f"{bare}={value}"
    known = re.sub(rf"^(data\.)?{NAMED}", r"\1\2.NAME.", bare)
    if known not in options:
        if any(option.startswith(f"{known}.") for option in options):
            raise InputError(f"{argument}: {bare} is a group of keys; set them one by one, as {bare}.KEY=VALUE")
        raise InputError(f"unknown key {bare!r} in {argument!r}{_suggest(bare, options)}; --help lists every key")
    named = re.match(rf"(data\.)?{NAMED}", bare)
    if named and not re.fullmatch(r"[A-Za-z_].*|0|[1-9][0-9]*", named[3]):  # Hydra's grammar has no other keys
        raise InputError(f"{argument}: the name {named[3]!r} must begin with a letter")
    several = sweep and re.search("[,(]", value)  # a,b or choice(a,b): for Hydra to take apart
    text = options[known].kind in (str, str | None) and not several and value != "null"
    return f"{bare}={_quote(value) if text else value}"


def _quote(value: str) -> str:
    if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value):
        return value
    value = os.path.expanduser(value)  # a shell does not expand ~ behind an equals sign
    value = re.sub(r'(\\*)"', lambda match: match.group(1) * 2 + '\\"', value)
    return '"' + re.sub(r"(\\+)$", lambda match: match.group(1) * 2, value) + '"'


def _suggest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# ---- from what Hydra composed to a typed job ------------------------------------------------------------------------


def _typed(name: str, composed: DictConfig) -> Any:
    """The job, merged into a fresh schema and checked. Raises InputError."""
    try:
        _refuse_mixed_demo()
        plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
        job = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(COMMANDS[name].job), plain))
    except (OmegaConfBaseException, ValueError) as error:
        raise InputError(_one_line(error)) from None
    if name in ("prepare", "train") and HydraConfig.get().mode is RunMode.MULTIRUN:
        cast(TrainJob, job).run_dir += "/" + _overrides_as_name()
    return job


def _refuse_mixed_demo() -> None:
    """The demo's sizes fit the demo's corpus only: another corpus under them would train a toy."""
    choices, overrides = HydraConfig.get().runtime.choices, HydraConfig.get().overrides.task
    if choices.get("experiment") == "demo" and any(
        override.startswith(("data.train.", "data.dev.", "data.extra.")) for override in overrides
    ):
        raise InputError(
            "data.train, data.dev and data.extra are fixed under experiment=demo: choose experiment=small, base or big"
        )


def _overrides_as_name() -> str:
    """Each run of a sweep has a directory of its own, named after its overrides."""
    overrides = sorted(o for o in HydraConfig.get().overrides.task if not o.startswith("run_dir="))
    name = re.sub(r"[^A-Za-z0-9._,+-]", "-", ",".join(overrides).replace('"', ""))
    return name if len(name) <= 150 else f"{name[:150]}-{seed_for(*name.encode()):08x}"


def _one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's messages without their advice and their internals."""
    lines = [line.strip() for line in _messages(error)]
    noise = ("object_type=", "reference_type=", "full_key:", "See https", "To append to your", "Set the environment")
    kept = [line for line in dict.fromkeys(lines) if line and not line.startswith(noise)]
    line = "; ".join(kept).partition("; Config search path")[0].replace("Error merging override ", "")
    return line.replace("Key 'experiment' not in", "its first line must be `# @package _global_`: 'experiment' not in")


def _messages(error: BaseException) -> Iterator[str]:
    yield from str(error).split("\n")
    if error.__cause__ is not None:
        yield from _messages(error.__cause__)


def _run(name: str, job: Any) -> None:
    """Run the command; its module is imported only now, so that `--help` is instant."""
    match name:
        case "prepare":
            from transformer.data.prepare import prepare

            prepare(job)
        case "train":
            from transformer.evaluation.sets import format_results
            from transformer.training.loop import train

            results = train(job)
            if int(os.environ.get("RANK", "0")) == 0:
                sys.stdout.write(format_results(Path(job.run_dir), results))
        case "translate":
            from transformer.decoding.stream import run as translate

            translate(job, sys.stdin.buffer, sys.stdout.buffer)
        case "evaluate":
            from transformer.evaluation.sets import evaluate, format_results

            sys.stdout.write(format_results(Path(job.run_dir), evaluate(job)))
        case "average":
            from transformer.average import average

            average(job)
        case "summary":
            from transformer.tools.summary import summary

            sys.stdout.write(summary(job))
