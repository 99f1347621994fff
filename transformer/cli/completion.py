"""Tab completion in bash and zsh: commands, flags, keys, their choices, experiments and recipes.

    script      what the user's shell evaluates once; at each tab it runs `transformer --complete LINE`
    complete    the line so far -> the words that its last word may become

It imports neither Hydra nor torch, and so answers as fast as `--help` does. File names are left to the shell, which
offers them where there is no candidate here.
"""

from itertools import pairwise
from typing import Any, get_args

from transformer.cli.commands import COMMANDS
from transformer.cli.overrides import FLAGS, NEEDS_NO_VALUE, PROGRAM_FLAGS
from transformer.config.keys import choices_of, generic_key, groups_of, keys_of, names_in
from transformer.errors import InputError

# bash passes the line up to the cursor, and replaces only what follows the last `=` or `:` of the word.
BASH = r"""_transformer() {
  local IFS=$'\n' line=${COMP_LINE:0:COMP_POINT}
  local word=${line##* }
  COMPREPLY=($("${1/#\~/$HOME}" --complete "$line" 2>/dev/null))
  [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")
}
complete -o nospace -o default -F _transformer transformer
"""


# zsh passes the words of the command up to the cursor, without what stands before it, such as `cat a |`. It takes
# whole words: the ones that end in a space are complete.
ZSH = r"""_transformer() {
  local -a words_found complete_words
  local line="${words[1,CURRENT-1]} $PREFIX"
  words_found=("${(@f)$("${words[1]/#\~/$HOME}" --complete "$line" 2>/dev/null)}")
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
    """What bash or zsh evaluates to have completion. Raises InputError for any other shell."""
    if shell not in SCRIPTS:
        raise InputError(f"--completion {shell}: choose one of {', '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def complete(line: str) -> list[str]:
    """What the last word of a command line may become; a complete word ends in a space.

    `line` begins with the program, and ends where the cursor stands.
    """
    words = line.split()
    word = words.pop() if words and not line.endswith(" ") else ""

    match words:
        case [_]:
            candidates = [f"{name} " for name in (*COMMANDS, *PROGRAM_FLAGS)]
        case [_, "help"]:
            candidates = [f"{name} " for name in COMMANDS]
        case [_, "--completion"]:
            candidates = [f"{shell} " for shell in SCRIPTS]
        case [_, command, *before] if command in COMMANDS:
            candidates = _arguments(command, before, word)
        case _:
            candidates = []
    return [candidate for candidate in candidates if candidate.startswith(word)]


def _arguments(command: str, before: list[str], word: str) -> list[str]:
    """The flags, keys or values that `word` may become; `before` are the arguments that stand before it."""
    key, equals, value = word.partition("=")

    # A flag, or its value.
    if key in FLAGS and equals:
        return [f"{key}={choice} " for choice in FLAGS[key] or ()]
    if word.startswith("-"):
        return [f"{flag} " for flag in FLAGS]
    flag_before = before[-1] if before else ""
    of_flag = [f"{choice} " for choice in FLAGS.get(flag_before) or ()]
    if FLAGS.get(flag_before) is not None and flag_before not in NEEDS_NO_VALUE:
        return of_flag  # none for a folder

    # A key, or its value.
    if not equals:
        return [*of_flag, *_keys(command, key)]

    listed, comma, _ = value.rpartition(",")  # of several values, the last one is being typed
    return [f"{key}={listed}{comma}{choice} " for choice in _choices(command, key, before)]


def _keys(command: str, begun: str) -> list[str]:
    """The keys, up to their next dot: there are more than anybody wants to see at once."""
    candidates = dict.fromkeys(f"{group}=" for group in groups_of(COMMANDS[command].job))  # in order, each once

    prefix = begun[: begun.rfind(".") + 1]
    generic = generic_key(prefix)
    for key in keys_of(COMMANDS[command].job):
        if key.startswith(generic):
            part, dot, _ = key.removeprefix(generic).partition(".")
            candidates[f"{prefix}{part}{dot or '='}"] = None
    return [name for name in candidates if not name.endswith((".NAME.", ".NAME="))]  # the user chooses that name


def _choices(command: str, key: str, before: list[str]) -> list[str]:
    """The values that a key can have, where they can be listed."""
    if key in groups_of(COMMANDS[command].job):
        return names_in(key, _config_dir(before))
    known_key = keys_of(COMMANDS[command].job).get(generic_key(key))
    return [] if known_key is None else _values(known_key.kind)


def _values(kind: Any) -> list[str]:
    """The values of a type as one types them: of an enum, of a bool, and of either with null. Else none."""
    if kind is bool:
        return ["true", "false"]
    if kind is type(None):
        return ["null"]
    if isinstance(kind, type) and choices_of(kind):
        return choices_of(kind)

    # A union: the values of its members. Null alone is no help where any number or text may stand.
    values = [value for member in get_args(kind) for value in _values(member)]
    return [] if values == ["null"] else values


def _config_dir(words: list[str]) -> str | None:
    """The folder of the user's own experiments and recipes, where the line names it."""
    for flag, value in pairwise(words):
        if flag in ("-cd", "--config-dir"):
            return value
    for word in words:
        if word.startswith("--config-dir="):
            return word.partition("=")[2]
    return None
