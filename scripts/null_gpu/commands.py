"""Each command on each card of the null GPU, as a table: python scripts/null_gpu/commands.py [CAPABILITY...]

What a training chose is said in the words of its proof. Where an exit status is not 0, the last line of stderr is
printed below the table.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN = Path(__file__).with_name("run.sh")
CARDS = {"H100 (sm_90)": "90", "RTX 3090 (sm_86)": "86", "T4 (sm_75)": "75", "V100 (sm_70)": "70"}
SHORT = "train.max_steps=20 train.validate_every=10 train.save_every=10 train.log_every=10 train.average=2"
TORCHRUN = "torchrun --standalone --nproc-per-node=2 -m transformer train run_dir=ranks train.compile=false"

COMMANDS = {
    "train, eager": f"transformer train run_dir=run train.compile=false {SHORT}",
    "train, compiled": f"transformer train run_dir=compiled train.compile=true {SHORT}",
    "train, nothing set": f"transformer train run_dir=plain {SHORT}",
    "train, device=cuda": f"transformer train run_dir=cuda train.device=cuda {SHORT}",
    "train, resumed": f"transformer train run_dir=run train.compile=false {SHORT} train.max_steps=30",
    "torchrun, 2 ranks": f"{TORCHRUN} {SHORT}",
    "translate": "transformer translate run_dir=run",
    "evaluate": "transformer evaluate run_dir=run",
    "score": "transformer score run_dir=run",
    "attention": "transformer attention run_dir=run",
    "average": "transformer average run_dir=run",
    "report": "transformer report run output=report.html",
    "replay": "transformer replay run_dir=run",
    "export to CTranslate2": "transformer export run_dir=run to=ctranslate2 output=exported",
    "table of two rows": f"transformer table table=rows.yaml output=table train.compile=false {SHORT}",
    "doctor": "transformer doctor format=json",
}


def main() -> None:
    asked = sys.argv[1:] or [*CARDS.values()]
    if unknown := set(asked) - set(CARDS.values()):
        sys.exit(f"error: {', '.join(sorted(unknown))}: choose from {', '.join(CARDS.values())}")
    cards = {card: capability for card, capability in CARDS.items() if capability in asked}
    with tempfile.TemporaryDirectory() as folder:
        columns = {card: outcomes_on(capability, Path(folder, capability)) for card, capability in cards.items()}

    print("| command |", " | ".join(cards), "|")
    print("| --- |" + " --- |" * len(cards))
    for name in COMMANDS:
        print(f"| {name} |", " | ".join(outcomes[name][0] for outcomes in columns.values()), "|")
    print()
    for card, outcomes in columns.items():
        for name, (_, said) in outcomes.items():
            if said:
                print(f"- {name}, {card}: {said}")


def outcomes_on(capability: str, folder: Path) -> dict[str, tuple[str, str]]:
    """For each command what became of it, and what it said where it failed."""
    folder.mkdir()
    (folder / "rows.yaml").write_text("base: {}\nn1: {model: {n_layers: 1}}\n", encoding="utf-8")
    outcomes = {}
    for name, command in COMMANDS.items():
        print(capability, name, file=sys.stderr, flush=True)
        done = subprocess.run(
            [str(RUN), *command.split()],
            cwd=folder,
            env=os.environ | {"NULL_GPU_CAPABILITY": capability, "NULL_GPU_DEVICES": "2", "OMP_NUM_THREADS": "1"},
            input="A dog.\tEin Hund.\n",
            capture_output=True,
            text=True,
            check=False,
        )
        outcomes[name] = (_outcome(done, command, folder), _said(done))
    return outcomes


def _outcome(done: subprocess.CompletedProcess[str], command: str, folder: Path) -> str:
    """`ok`, of a training with how it computed; or the exit status."""
    if done.returncode != 0:
        return f"exit status {done.returncode}"
    run_dirs = [word.partition("=")[2] for word in command.split() if word.startswith("run_dir=")]
    if " train " not in command:
        return "ok"
    resolved: dict[str, Any] = json.loads((folder / run_dirs[0] / "run.json").read_text(encoding="utf-8"))["resolved"]
    kernel = f" ({resolved['attention_kernel']})" if resolved["attention_kernel"] else ""
    compiled = ", compiled" if resolved["compile"] else ""
    return f"ok: {resolved['device']}, {resolved['precision']}, {resolved['layout']}{kernel}{compiled}"


def _said(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return ""
    try:  # doctor
        checks = json.loads(done.stdout)["checks"]
    except ValueError:
        return done.stderr.strip().rpartition("\n")[2]
    return "; ".join(f"{check['name']}: {check['found']}" for check in checks if check["level"] != "ok")


if __name__ == "__main__":
    main()
