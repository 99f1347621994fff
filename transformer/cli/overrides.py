"""The arguments of a command: flags and overrides, checked; and the help that lists them.

    transformer train model.d_model=256 --cfg job
                      override          flag and its value

Flags are Hydra's own (`--cfg`, `--multirun`), and two of ours that say how much of the log is shown. Overrides are
`key=value`, with the keys of `config/jobs`. All are checked here, before Hydra is imported, so that help and errors
come at once.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

from transformer.cli.commands import COMMANDS
from transformer.config.keys import (
    Key,
    check_override,
    did_you_mean,
    groups_of,
    key_meant,
    keys_of,
    list_override,
    names_in,
)
from transformer.errors import InputError
from transformer.registry import install_command

PROGRAM_FLAGS = ("--help", "--version", "--completion")  # in the place of a command
QUIET = ("-q", "--quiet")
VERBOSE = ("-v", "--verbose")

# The flags of a command, each with the values that it takes: None for no value, an empty tuple for any, or the choices.
# All but the first are Hydra's. Left out of those are --experimental-rerun, which unpickles a file, --shell-completion,
# which does not know our commands, and --config-name and --config-path, since every job begins with its schema.
SHOWN = ("job", "hydra", "all")
INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*QUIET, *VERBOSE), None),
    **dict.fromkeys(("-h", "--help"), ("all",)),
    **dict.fromkeys(("--hydra-help", "--resolve"), None),
    **dict.fromkeys(("-m", "--multirun"), None),
    **dict.fromkeys(("-c", "--cfg"), SHOWN),
    **dict.fromkeys(("-i", "--info"), INFORMATION),
    **dict.fromkeys(("-p", "--package", "-cd", "--config-dir"), ()),
}
NEEDS_NO_VALUE = ("-h", "--help", "-i", "--info")  # flags with choices that may also stand alone

HELP_ALL = (("-h", "all"), ("--help", "all"))

LAUNCHER = "hydra/launcher"

WIDTH = 100  # characters of a line of help, but for examples and defaults
RUNS = "runs"  # a command with this key takes run directories as plain arguments, too


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command: overrides as Hydra is to read them, and its flags, each followed by its value."""

    overrides: list[str]
    flags: list[str]
    config_dir: str | None
    wants_help: bool
    wants_every_key: bool  # in its help
    is_quiet: bool
    is_verbose: bool
    is_multirun: bool
    launcher: str | None  # what makes jobs of a sweep's runs; None: this process runs them


def parse_arguments(command: str, arguments: Sequence[str]) -> Arguments:
    """Separate flags, overrides and paths, in whatever order they stand, and check them. Raises InputError."""
    keys = keys_of(COMMANDS[command].job)
    overrides: list[str] = []
    paths: list[str] = []
    flags: list[str] = []
    config_dir = None

    # Separate them.
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("-"):
            flag, value = _flag(argument, rest, [*keys, *groups_of(COMMANDS[command].job)])
            flags.append(flag)
            if value is not None:
                flags.append(value)
            if flag in ("-cd", "--config-dir"):
                config_dir = value
        elif RUNS in keys and ("=" not in argument or os.path.isdir(argument)):
            paths.append(argument)
        else:
            overrides.append(argument)

    # How much of the log is shown is not for Hydra.
    is_quiet = not set(QUIET).isdisjoint(flags)
    is_verbose = not set(VERBOSE).isdisjoint(flags)
    if is_quiet and is_verbose:
        raise InputError("--quiet and --verbose: choose one of them")
    flags = [flag for flag in flags if flag not in (*QUIET, *VERBOSE)]

    # Check the overrides. Paths become one more of them.
    is_multirun = not {"-m", "--multirun"}.isdisjoint(flags)
    groups = groups_of(COMMANDS[command].job)
    checked = [check_override(override, keys, groups=groups, is_multirun=is_multirun) for override in overrides]
    if paths:
        if any(override.startswith(f"{RUNS}=") for override in checked):
            raise InputError(f"{paths[0]}: runs= names the runs already: give all runs as paths, or all by runs=")
        checked.append(list_override(RUNS, paths))

    launcher = _launcher(command, checked, is_multirun=is_multirun)

    return Arguments(
        overrides=checked,
        flags=flags,
        config_dir=config_dir,
        wants_help=not {"-h", "--help"}.isdisjoint(flags),
        wants_every_key=any(pair in HELP_ALL for pair in pairwise(flags)),
        is_quiet=is_quiet,
        is_verbose=is_verbose,
        is_multirun=is_multirun,
        launcher=launcher,
    )


def _launcher(command: str, overrides: Sequence[str], *, is_multirun: bool) -> str | None:
    """The launcher of submitit that makes jobs of the runs; None without one. Raises InputError where it cannot."""
    override = next((override for override in overrides if override.startswith(f"{LAUNCHER}=submitit")), None)
    if override is None:
        return None
    if command != "train" or not is_multirun:
        raise InputError(f"{override}: only the runs of `transformer train --multirun` become jobs")
    if "WORLD_SIZE" in os.environ:
        raise InputError(f"{override}: a job starts its own ranks (hydra.launcher.tasks_per_node): leave torchrun out")
    if find_spec("submitit") is None or find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise InputError(f"{override} needs submitit: {install_command('slurm')}")
    return override.partition("=")[2]


def _flag(argument: str, rest: list[str], keys: Sequence[str]) -> tuple[str, str | None]:
    """A flag and its value, if it takes one. The value may be the next argument, which is then removed from `rest`.

    `keys` are those of the command, which other toolkits take as flags.
    """
    flag, equals, value = argument.partition("=")
    if flag not in FLAGS:
        meant = key_meant(flag, keys) or did_you_mean(flag, FLAGS)
        raise InputError(f"unknown flag {flag}{meant}; settings are written key=value")

    # A flag without a value.
    choices = FLAGS[flag]
    if choices is None:
        if equals:
            raise InputError(f"{argument}: {flag} takes no value")
        return flag, None

    # A flag with a value: behind an equals sign, or the next argument.
    if not equals:
        if flag in NEEDS_NO_VALUE and (not rest or rest[0] not in choices):
            return flag, None
        if not rest:
            raise InputError(f"{flag} needs a value")
        value = rest.pop(0)
    if choices and value not in choices:
        raise InputError(f"{flag} {value}: choose one of {', '.join(choices)}")
    return flag, value


# ---- help -----------------------------------------------------------------------------------------------------------

# Every set of sentence pairs has the keys of data.train, which --help therefore explains once.
LIKE_TRAIN = ("data.dev.", "data.devs.NAME.", "data.test.NAME.", "data.extra.NAME.")
OF_OTHER_SETS = (
    "the same keys for the development set, or for each of several, for each test set, and for more training pairs, "
    "under names of your own"
)
# The keys of a training that most need, in the order in which its short help shows them.
MOST_NEEDED = (
    *("run_dir", "init_from", "data.src_lang", "data.tgt_lang", "data.train.src", "data.train.tgt"),
    *("data.train.dataset", "tokenizer.vocab_size", "model.dropout", "train.max_steps", "train.max_tokens"),
    *("train.validate_every", "train.device", "train.precision", "train.seed"),
)
HEADINGS = {"test": "test (instead of the run's test sets, under names of your own)"}  # of groups of keys


def overview() -> str:
    """The help of the program: its commands."""
    commands = "\n".join(f"  {name:<10} {command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: transformer COMMAND [key=value ...]\n\n{commands}\n\n"
        "`transformer COMMAND --help` lists a command's options that most need, `--help all` every one;\n"
        "`transformer --version` names the versions.\n"
        '`eval "$(transformer --completion bash)"`, or zsh, lets the tab key complete them.\n\n'
        "Results go to standard output, and all else to standard error. There --quiet (-q) shows only\n"
        "warnings and errors, --verbose (-v) each line of the log, with its time, and no progress bar.\n"
        "TRANSFORMER_DEBUG=1 in the environment shows the traceback of an error.\n"
    )


def command_help(command: str, config_dir: str | None, *, wants_every_key: bool) -> str:
    """The help of a command: examples, its recipes and experiments, and its keys with their defaults and meanings.

    Of a training these are the few that most need, unless every one is wanted.
    """
    job = COMMANDS[command].job
    keys = keys_of(job)
    paths = " [RUN_DIR ...]" if RUNS in keys else ""
    examples = "".join(f"  {example}\n" for example in COMMANDS[command].examples)

    # Experiments and recipes, where the command has them.
    groups = others = config_dirs = rest = ""
    if groups_of(job):
        names = {group: names_in(group, config_dir) for group in groups_of(job)}
        others = " (a recipe or experiment may set others, as --cfg job shows)"
        config_dirs = "; --config-dir DIR adds experiments and recipes"
        if not wants_every_key:
            names = {group: [name for name in of_group if "/" not in name] for group, of_group in names.items()}
            rest = f"`transformer {command} --help all` lists all {len(keys)} keys.\n"
            keys = _most_needed(keys)
        lines = [f"{group}: {', '.join(of_group)}" for group, of_group in names.items()]
        groups = (
            "groups (group=option), in the order in which they are applied; without any, recipe=paper and "
            "experiment=demo:\n"
            f"{''.join(_wrapped(line, indent='') for line in lines)}\n"
        )

    return (
        f"usage: transformer {command}{paths} [key=value ...]\n\n{COMMANDS[command].help}\n\n"
        f"examples:\n{examples}\n{groups}"
        f"options, with their defaults{others}:\n"
        f"{_options(keys)}\n{rest}"
        f"--multirun runs every combination of key=a,b{config_dirs}.\n"
        "--cfg job --resolve only shows the settings.\n"
        "--quiet shows only warnings and errors, --verbose each line of the log and no progress bar.\n"
    )


def _most_needed(keys: Mapping[str, Key]) -> dict[str, Key]:
    """The command's own keys, and those of a training that most need."""
    own = [name for name in keys if "." not in name]
    return {name: keys[name] for name in dict.fromkeys((*own, *MOST_NEEDED))}


def _wrapped(text: str, *, indent: str) -> str:
    """Lines of at most WIDTH characters, those behind the first a little further in. Names stay whole."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(f"{line}\n" for line in lines)


def _options(keys: Mapping[str, Key]) -> str:
    """Keys with their defaults and meanings, group by group; those that all data sets have, once."""
    last_of_train = [name for name in keys if name.startswith("data.train.")][-1:]
    groups: dict[str, list[str]] = {"": []}  # the lines of each group; first the keys without a group
    for name, key in keys.items():
        last_part = name.rpartition(".")[2]
        if name.startswith(LIKE_TRAIN) and f"data.train.{last_part}" in keys:
            continue

        group = name.partition(".")[0] if "." in name else ""
        lines = groups.setdefault(group, [])
        lines.append(f"  {name}={key.default}\n{_wrapped(key.help, indent='      ')}")
        if name in last_of_train:
            other_sets = " ".join(f"{prefix}KEY" for prefix in LIKE_TRAIN)
            lines.append(f"  {other_sets}\n{_wrapped(OF_OTHER_SETS, indent='      ')}")

    paragraphs = [f"{HEADINGS.get(group, group)}\n{''.join(lines)}" for group, lines in groups.items() if lines]
    return "\n".join(paragraphs).lstrip("\n")
