"""The keys of `transformer push`."""

import re
from dataclasses import dataclass

from transformer.config.jobs import Job, check_here
from transformer.config.settings import Format, option, require

LICENCES = "cc-by-4.0, cc-by-sa-4.0, cc-by-nc-4.0, apache-2.0, mit, other"  # those that models usually have


@dataclass
class PushJob(Job):
    """`transformer push`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    repo: str = option("", "the repository on the Hugging Face hub: OWNER/NAME; created if it does not exist")
    license: str = option("", f"the licence of the model, by the hub's name: {LICENCES}, ... (yours to choose)")
    private: bool = option(True, "only you and your organisation see it; false: everybody")
    texts: bool = option(
        True,
        "send the text of the dev and test sets and its translations, too; without them, evaluate and export ask for "
        "text, and compare cannot be used",
    )
    dry_run: bool = option(False, "send nothing: show the files and the card")
    output: str | None = option(None, "a directory to make of the files that are sent, or would be (null: none)")
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        check_here(self.run_dir, "is on the hub already: `transformer import` makes a run of it that can be pushed")
        is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.repo) is not None
        require(is_name or not self.repo, f"repo={self.repo}: name a repository of the hub as OWNER/NAME")
        is_licence = re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license) is not None
        require(is_licence or not self.license, f"license={self.license}: name it as the hub does, such as {LICENCES}")
        require(self.output != "", "output must name a directory")
