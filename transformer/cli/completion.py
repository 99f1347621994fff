"""Tab completion in bash and zsh: commands, flags, keys, their choices, experiments and recipes.

It is answered without Hydra and without torch, in the time of `--help`. File names are left to the shell, which offers
them where nothing is found here.
"""

from enum import Enum
from itertools import pairwise
from typing import Any, get_args

from transformer.cli.commands import COMMANDS
from transformer.cli.overrides import FLAGS
from transformer.config.jobs import JOBS, TrainJob
from transformer.config.keys import GROUPS, generic_key, keys_of, names_in
from transformer.errors import InputError

# bash hands over the line up to the cursor, and replaces what follows the last `=` or `:` of the word.
BASH = r"""_transformer() {
  local IFS=$'\n' line=${COMP_LINE:0:COMP_POINT}
  local word=${line##* }
  COMPREPLY=($("${1/#\~/$HOME}" --complete "$line" 2>/dev/null))
  [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")
}
complete -o nospace -o default -F _transformer transformer
"""


# zsh hands over the line in the same way, and takes whole words: those that end in a space are complete.
ZSH = r"""_transformer() {
  local -a words_found complete_words
  words_found=("${(@f)$("${words[1]/#\~/$HOME}" --complete "$LBUFFER" 2>/dev/null)}")
  complete_words=("${(@M)words_found:#* }")
  compadd -Q -S ' ' -- "${(@)complete_words% }"
  compadd -Q -S '' -- "${(@)words_found:#(* |)}"
  (( compstate[nmatches] )) || { compset -P '*='; _files }
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _transformer transformer
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH}


def script(shell: str) -> str:
    """What a shell evaluates to have completion. Raises InputError for any shell but these two."""
    if shell not in SCRIPTS:
        raise InputError(f"--completion {shell}: choose one of {', '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def complete(line: str) -> list[str]:
    """What the last word of a command line may become; a space ends those that are complete.

    `line` begins with the program, and ends where the cursor stands.
    """
    words = line.split()
    word = words.pop() if words and not line.endswith(" ") else ""

    match words:
        case []:
            found = []
        case [_]:
            found = [f"{name} " for name in (*COMMANDS, "--help", "--version")]
        case [_, command, *before] if command in COMMANDS:
            found = _arguments(command, before, word)
        case _:
            found = []
    return [candidate for candidate in found if candidate.startswith(word)]


def _arguments(command: str, before: list[str], word: str) -> list[str]:
    """The flags, keys or values that a word of a command may be; `before` are the words between the two."""
    if word.startswith("-"):
        return [f"{flag} " for flag in FLAGS]

    key, equals, value = word.partition("=")
    if not equals:
        return _keys(command, key)
    listed, comma, _ = value.rpartition(",")  # of several values, the last is in progress
    return [f"{key}={listed}{comma}{choice} " for choice in _choices(command, key, before)]


def _keys(command: str, begun: str) -> list[str]:
    """The keys, up to their next dot: there are more than anybody wants to see at once."""
    prefix = begun[: begun.rfind(".") + 1]
    generic = generic_key(prefix)
    found = [f"{group}=" for group in GROUPS if _has_groups(command)]

    for key in keys_of(JOBS[command]):
        if key.startswith(generic):
            part, dot, _ = key.removeprefix(generic).partition(".")
            found.append(f"{prefix}{part}{dot or '='}")
    return [name for name in dict.fromkeys(found) if not name.endswith(".NAME.")]  # that name is the user's


def _choices(command: str, key: str, before: list[str]) -> list[str]:
    """The values that a key can have, where they can be listed."""
    if key in GROUPS and _has_groups(command):
        return names_in(key, _config_dir(before))
    known = keys_of(JOBS[command]).get(generic_key(key))
    return [] if known is None else _values(known.kind)


def _values(kind: Any) -> list[str]:
    """The words for the values of a type: of a choice, of yes or no, and of either where it may also be null."""
    if kind is bool:
        return ["true", "false"]
    if kind is type(None):
        return ["null"]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind.__members__)
    values = [value for one in get_args(kind) for value in _values(one)]
    return [] if values == ["null"] else values


def _has_groups(command: str) -> bool:
    return issubclass(JOBS[command], TrainJob)


def _config_dir(words: list[str]) -> str | None:
    """The folder of the user's own experiments and recipes, where the line names it."""
    for flag, value in pairwise(words):
        if flag in ("-cd", "--config-dir"):
            return value
    return next((word.partition("=")[2] for word in words if word.startswith("--config-dir=")), None)
