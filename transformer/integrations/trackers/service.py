"""A tracker in a process of its own: reads messages from standard input, a JSON object a line, until there are no more.

`sink` runs this file outside the package, of which it imports nothing. The first message is what `_start` takes; each
other one has values and tables of a step. Where the tracker fails, the process says why in one line of its standard
output, and ends with status 1.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

LAST = 60.0  # seconds that are left for what has come, once the training is gone


def main(name: str, parent: int) -> None:
    """Pass everything on to the tracker `name`, for the process `parent`."""
    os.nice(10)  # the training is first to have the cores
    messages, report = _take_streams()
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    try:
        _pass_on(name, os.fdopen(messages, "rb"))
    except BaseException as error:  # packages may end the process, too
        os.write(report, _describe(error).encode())
        os._exit(1)  # whatever the tracker would still do at the exit


def _take_streams() -> tuple[int, int]:
    """The standard streams, kept from the tracker and from what it starts: they meet an empty file in their place."""
    messages, report = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(empty, stream)
    return messages, report


def _end_after(parent: int) -> None:
    """End this process if it hangs after its parent has died, by whatever signal."""
    while os.getppid() == parent:
        time.sleep(5)
    time.sleep(LAST)
    os._exit(1)


def _pass_on(name: str, messages: Iterable[bytes]) -> None:
    """Start, and log what comes."""
    lines = (json.loads(line) for line in messages if line.endswith(b"\n"))  # the training may die in a line
    tracker = _start(name, next(lines))
    for message in lines:
        tables = {
            key: tracker.Table(columns=table["columns"], data=table["rows"]) for key, table in message["tables"].items()
        }
        tracker.log(message["values"] | tables, step=message["step"])
    tracker.finish()


def _start(name: str, run: dict[str, Any]) -> Any:
    """The package, with the run begun or resumed. trackio knows a run by its name, W&B by its id."""
    match name:
        case "trackio":
            import trackio

            trackio.init(project=run["project"], name=run["name"], config=run["settings"], resume="allow")
            return trackio
        case _:
            os.environ.setdefault("WANDB_CONSOLE", "off")  # nothing is said here
            import wandb

            wandb.init(
                project=os.environ.get("WANDB_PROJECT", run["project"]),
                name=run["name"],
                config=run["settings"],
                resume="allow",
                id=run["id"],
                dir=os.environ.get("WANDB_DIR", run["folder"]),
            )
            return wandb


def _describe(error: BaseException) -> str:
    """The first line of an error, without what is secret."""
    text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search("KEY|TOKEN|SECRET|PASSWORD", name, re.IGNORECASE):
            text = text.replace(value, f"${name}")
    return re.sub(r"((?:token|key|password)=)[^&\s'\"]+", r"\1...", text, flags=re.IGNORECASE)[:300]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
