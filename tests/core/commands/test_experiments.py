"""The experiments that come with the package: the paper's recipe value by value, the WMT runs on a twin of the hub's
data set, and the corpora that each of them names."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet

from support.command_line import enter, flat
from support.corpora import ENGLISH, GERMAN, finish, read, start, texts
from support.paths import CORPORA, ROOT, needs_corpora
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import PairConfig, TargetTokenizerConfig
from transformer.cost import count_parameters
from transformer.data.prepare import prepare
from transformer.training.optimizer import rate_of

pytestmark = pytest.mark.usefixtures("in_empty_folder")

FOLDER = ROOT / "configs" / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
WMT = ("wmt14_en_de_base", "wmt14_en_de_big", "wmt14_en_fr_base", "wmt14_en_fr_big")
every_experiment = pytest.mark.parametrize("name", NAMES)


def composed(name: str, *overrides: str, command: str = "train") -> Any:
    """The job of an experiment."""
    result = enter(command, f"experiment={name}", *overrides)
    assert result.status == 0, result.err
    return result.jobs[0]


# ---- the paper's recipe ---------------------------------------------------------------------------------------------

RECIPE = {  # base and big of English-German, base and big of English-French; where they agree, one value
    "model.n_layers": 6,
    "model.n_decoder_layers": None,  # as many
    "model.d_model": (512, 1024, 512, 1024),
    "model.d_ff": (2048, 4096, 2048, 4096),
    "model.n_heads": (8, 16, 8, 16),
    "model.d_k": None,  # d_model / n_heads = 64
    "model.d_v": None,
    "model.score": "scaled",
    "model.activation": "relu",
    "model.biases": False,
    "model.dropout": (0.1, 0.3, 0.1, 0.1),
    "model.attention_dropout": 0.0,
    "model.relu_dropout": 0.0,
    "model.norm": "post",
    "model.positions": "sinusoidal",
    "model.start": "learned",
    "model.tie_embeddings": True,
    "tokenizer.algorithm": "bpe",
    "tokenizer.vocab_size": (37_000, 37_000, 32_000, 32_000),
    "tokenizer.model": None,
    "train.max_steps": (100_000, 300_000, 100_000, 300_000),
    "train.tokens_per_step": 25_000,
    "train.learning_rate": None,  # equation 3
    "train.learning_rate_scale": 1.0,
    "train.warmup_steps": 4_000,
    "train.decay": "inverse_sqrt",
    "train.optimizer": "adam",
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.98,
    "train.adam_eps": 1e-9,
    "train.weight_decay": 0.0,
    "train.label_smoothing": 0.1,
    "train.clip_norm": None,
    "train.subword_sampling": None,
    **{f"train.augment.{name}": 0.0 for name in ("unmarked", "typos", "title", "upper", "noise")},
    "train.ema_decay": None,
    "train.save_every": (1_500, 600, 1_500, 600),  # ten minutes: a step took 0.4 s and 1.0 s
    "train.average": (5, 20, 5, 20),
    "train.patience": None,
    "search.beam_size": 4,
    "search.length_penalty": 0.6,
    "search.max_extra": 50,
}
NOT_THE_PAPERS = {  # where the paper says nothing, or has nothing of the kind
    "model.max_positions",
    *(f"tokenizer.{key}" for key in ("normalization", "byte_fallback", "character_coverage", "sample_lines")),
    *(f"tokenizer.target.{field.name}" for field in fields(TargetTokenizerConfig)),
    *(
        f"train.{key}"
        for key in (
            "seed",
            "max_tokens",
            "fit_memory",
            "precision",
            "device",
            "layout",
            "compile",
            "cuda_graphs",
            "threads",
        )
    ),
    *(
        f"train.{key}"
        for key in (
            "deterministic",
            "prefetch",
            "proof",
            "profile",
            "log_every",
            "validate_every",
            "keep_last",
            "keep_best",
        )
    ),
    *("train.metric", "train.samples", "train.trackers", "search.batch_tokens", "search.engine", "search.engine_type"),
    *("train.kernels", "search.cuda_graphs"),
}


@pytest.mark.parametrize(("column", "name"), list(enumerate(WMT)), ids=WMT)
def test_experiments_of_wmt_have_the_papers_recipe(column: int, name: str) -> None:
    job = to_json(composed(name))
    found = flat({section: job[section] for section in ("model", "tokenizer", "train", "search")})
    expected = {key: value[column] if isinstance(value, tuple) else value for key, value in RECIPE.items()}
    assert {key: value for key, value in found.items() if key not in NOT_THE_PAPERS} == expected
    assert (job["init_from"], job["data"]["extra"]) == (None, {})


@pytest.mark.parametrize(
    ("name", "count", "peak"),
    [("wmt14_en_de_base", 63_045_632, 6.99e-4), ("wmt14_en_de_big", 214_171_648, 4.94e-4)],
)
def test_experiments_of_wmt_have_the_papers_sizes_and_peak_rates(name: str, count: int, peak: float) -> None:
    job: TrainJob = composed(name)
    assert count_parameters(job.model, job.tokenizer.vocab_size).total == count
    assert (job.model.key_width, job.model.value_width) == (64, 64)
    rates = [rate_of(job.train, job.model.d_model, step=step) for step in range(10_000)]
    assert max(rates) == rates[3_999] == pytest.approx(peak, rel=1e-3)


# ---- WMT 2014 as the hub has it -------------------------------------------------------------------------------------

FRENCH = ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf")
NUMBERS = {"train": range(10_000, 10_300), "validation": range(500, 516), "test": range(700, 712)}


def spell(numbers: Iterable[int], words: tuple[str, ...]) -> list[str]:
    return [" ".join(words[int(digit)] for digit in str(number)) for number in numbers]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as wmt/wmt14: numbers in two languages, a column `translation`, other numbers in each split."""
    folder = tmp_path_factory.mktemp("twin")
    configs, features = "configs:\n", "dataset_info:\n"
    for other, words in ("de", GERMAN), ("fr", FRENCH):
        subset = f"{other}-en"
        (folder / subset).mkdir()
        configs += f"- config_name: {subset}\n  data_files:\n"
        features += f"- config_name: {subset}\n  features:\n  - name: translation\n    dtype:\n      translation:\n"
        features += f"        languages: [{other}, en]\n"
        for split, numbers in NUMBERS.items():
            sides = zip(spell(numbers, words), spell(numbers, ENGLISH), strict=True)
            rows = [{other: theirs, "en": english} for theirs, english in sides]
            parquet.write_table(
                pyarrow.table({"translation": rows}), folder / subset / f"{split}-00000-of-00001.parquet"
            )
            configs += f"  - split: {split}\n    path: {subset}/{split}-*\n"
    (folder / "README.md").write_text(f"---\n{features}{configs}---\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_experiment_of_english_german_is_prepared_and_trained(twin: Path, tmp_path: Path) -> None:
    arguments = ["experiment=wmt14_en_de_base", f"data.root={twin}", "run_dir=runs/wmt", "train.threads=1"]
    _, err = finish(start("prepare", *arguments, cwd=tmp_path), 0)
    assert "data ready: 300 of 300 pairs" in err
    assert err.count("copying") == 3
    small = [f"model.{key}" for key in ("n_layers=1", "d_model=16", "d_ff=32", "n_heads=2")]
    small += [f"train.{key}" for key in ("max_steps=3", "tokens_per_step=1000", "save_every=1", "precision=fp32")]
    _, err = finish(start("train", *arguments, *small, "search.max_extra=5", cwd=tmp_path), 0)
    assert "copying" not in err, "train reads what prepare has left"
    run = tmp_path / "runs" / "wmt"
    results = read(run / "results.json")
    assert (results["steps"], results["averaged"], list(results["test_sets"])) == (3, [1, 2, 3], ["newstest2014"])
    assert (run / "hypotheses" / "newstest2014.hyp").read_bytes().count(b"\n") == 12


@pytest.mark.parametrize(("name", "words"), [("wmt14_en_de_base", GERMAN), ("wmt14_en_fr_big", FRENCH)])
def test_experiments_of_wmt_put_each_split_where_it_belongs(
    twin: Path, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    """Newstest2013 is the hub's validation split, newstest2014 its test split; English is the source."""
    prepared = prepare(composed(name, f"data.root={twin}", f"run_dir={tmp_path}/runs/a", "train.threads=1"))
    expected = {
        split: list(zip(spell(numbers, ENGLISH), spell(numbers, words), strict=True))
        for split, numbers in NUMBERS.items()
    }
    assert texts(prepared) == expected["train"]
    assert prepared.dev == {"dev": expected["validation"]}
    assert prepared.test == {"newstest2014": expected["test"]}


@pytest.mark.parametrize("name", WMT)
def test_experiments_of_wmt_without_a_twin_name_the_hubs_data_set(name: str) -> None:
    data, subset = composed(name).data, "de-en" if "en_de" in name else "fr-en"
    found = [data.train, data.dev, *data.test.values()]
    assert found == [PairConfig("", "", "wmt/wmt14", subset, split) for split in ("train", "validation", "test")]


# ---- corpora on this machine ----------------------------------------------------------------------------------------

PAIRS = {  # of the training sets, each dev set and the test sets
    "kftt_ja_en": (440_286, 1_166, {"tune": 1_235}),
    "kftt_ja_en_small": (440_286, 1_166, {"tune": 1_235}),
    "multi30k_en_de": (29_000, 1_014, {"test_2016_flickr": 1_000}),
    "multi30k_en_fr": (29_000, 1_014, {"test_2016_flickr": 1_000}),
    "multi30k_six": (174_000, 1_014, dict.fromkeys(["en_de", "en_fr", "de_en", "de_fr", "fr_en", "fr_de"], 1_000)),
    "tatoeba_en_de": (159_233, 3_000, {}),
}


@needs_corpora
@pytest.mark.parametrize("name", PAIRS)
def test_experiment_of_a_local_corpus_names_files_that_are_there(name: str) -> None:
    data = composed(name, f"data.root={CORPORA}").data
    for key, pair in data.sets().items():
        for path, language in zip((Path(pair.src), Path(pair.tgt)), data.languages_of(key), strict=True):
            assert path.is_file()
            assert path.name.removesuffix(".gz").endswith(f".{language}")


@needs_corpora
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "multi30k_en_fr" else pytest.mark.slow) for name in PAIRS]
)
def test_experiment_of_a_local_corpus_is_prepared(name: str, tmp_path: Path) -> None:
    prepared = prepare(composed(name, f"data.root={CORPORA}", f"run_dir={tmp_path}/runs/a"))
    tests = {name: len(pairs) for name, pairs in prepared.test.items()}
    [of_dev] = {len(pairs) for pairs in prepared.dev.values()}
    assert (prepared.report.pairs_read, of_dev, tests) == PAIRS[name]
    assert len(prepared.store) > 0.99 * PAIRS[name][0]


def test_six_directions_have_the_tag_of_their_target_each() -> None:
    """In training, validation and tests alike, each under the name of its languages."""
    data = composed("multi30k_six", "data.root=CORPORA").data
    names = {"train": "en_de", **{key: key.rpartition(".")[2] for key in data.sets() if key != "train"}}
    for key, pair in data.sets().items():
        source, target = data.languages_of(key)
        assert names[key] == f"{source}_{target}"
        assert pair.tag == f"<2{target}>"
        assert (Path(pair.src).suffix, Path(pair.tgt).suffix) == (f".{source}", f".{target}")
    trained_on = {name for key, name in names.items() if key == "train" or key.startswith("extra.")}
    assert len(trained_on) == 6
    assert trained_on == set(data.devs) == set(data.test)


# ---- every experiment -----------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.plugins
@every_experiment
def test_summary_sums_up_every_experiment(name: str) -> None:
    from transformer.tools.summary.command import format_summary, summarise

    assert format_summary(summarise(composed(name, command="summary"))).startswith("parameters ")


def written(file: Path) -> tuple[list[Path], dict[str, Any]]:
    """The files that an experiment's file, or a recipe's, begins from (a recipe first), and the keys that it sets."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(file))
    parents = tree.pop("defaults", ["_self_"])
    assert parents[-1] == "_self_", "the file's own keys come last"
    recipe_first = sorted(parents[:-1], key=lambda parent: isinstance(parent, str))
    return [parent_file(parent) for parent in recipe_first], flat(tree)


def parent_file(parent: str | dict[str, str]) -> Path:
    if isinstance(parent, str):
        return FOLDER / f"{parent}.yaml"
    (recipe,) = parent.values()
    assert parent == {"override /recipe": recipe}
    return FOLDER.parent / "recipe" / f"{recipe}.yaml"


def below(parents: list[Path]) -> dict[str, Any]:
    """The keys that these files set, a later one's over an earlier one's."""
    keys: dict[str, Any] = {}
    for parent in parents:
        grandparents, own = written(parent)
        keys |= below(grandparents) | own
    return keys


@every_experiment
def test_experiment_names_only_what_differs(name: str) -> None:
    """From what it begins from, and that is the paper's base."""
    parents, keys = written(FOLDER / f"{name}.yaml")
    before = flat(to_json(TrainJob())) | below(parents)
    assert keys.pop("run_dir") == f"runs/{name}"
    assert [key for key, value in keys.items() if key in before and before[key] == value] == []


@every_experiment
def test_experiment_begins_with_its_command(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").split("\n")
    assert lines[0] == "# @package _global_"
    command = lines[1].removeprefix("# transformer train").split()
    assert command[:1] == ([] if name == "demo" else [f"experiment={name}"])  # which is the one without a name
    assert lines[2].startswith("# ")
