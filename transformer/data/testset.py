"""The test sets that sacreBLEU knows by name, such as `wmt14/full`: newstest2014 in all its 3,003 sentences.

sacreBLEU fetches a set the first time and keeps it as text files under `~/.sacrebleu`, or where the environment
variable SACREBLEU says.
"""

import shlex
from pathlib import Path

from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR, get_reference_files, get_source_file

from transformer.config.keys import did_you_mean
from transformer.config.languages import language_of
from transformer.errors import InputError, in_a_line

PREFIX = "sacrebleu:"


def is_test_set(dataset: str) -> bool:
    """Whether `dataset` is one of sacreBLEU's, such as `sacrebleu:wmt14/full`."""
    return dataset.startswith(PREFIX)


def find_test_set(dataset: str, key: str, *, languages: tuple[str, str]) -> tuple[Path, Path]:
    """The files of source and reference, fetched if need be. `key` is what the configuration names the set by.

    Raises InputError where sacreBLEU has no such set or pair of languages, the set has several references, or it can
    be neither found nor fetched.
    """
    # Look the set up, and the pair of languages in it.
    setting = f"{key}.dataset={dataset}"
    name = dataset.removeprefix(PREFIX)
    test_set = DATASETS.get(name)
    if test_set is None:
        raise InputError(
            f"{setting}: sacreBLEU has no such test set{did_you_mean(name, DATASETS)}; `sacrebleu --list` names them"
        )

    pair = f"{language_of(languages[0], 'data.src_lang')}-{language_of(languages[1], 'data.tgt_lang')}"
    if pair not in test_set.langpairs:
        known_pairs = ", ".join(test_set.langpairs)
        is_of_training = key.startswith("data.")  # `evaluate` has the key without it, and the languages of the run
        remedy = "set data.src_lang and data.tgt_lang" if is_of_training else "choose a set in the run's languages"
        raise InputError(f"{setting}: it has no {pair}, only {known_pairs}: {remedy}")

    # Fetch it, unless it is there.
    try:
        source = get_source_file(name, pair)
        references = get_reference_files(name, pair)
    except (Exception, SystemExit) as error:  # of the network, the archive or the file system
        raise InputError(
            f"{setting}: cannot be fetched into {Path(SACREBLEU_DIR, name)} ({in_a_line(error)}): run this where there "
            "is a network, then copy that folder (the environment variable SACREBLEU names another folder of test sets)"
        ) from error

    if len(references) > 1:
        given = shlex.quote(f"references=[{','.join(map(str, references))}]")
        raise InputError(
            f"{setting}: it has {len(references)} references, but a run's test set can have only one; translate "
            f"{source}, then: transformer evaluate hypotheses=FILE {given}"
        )
    return Path(source), Path(references[0])
