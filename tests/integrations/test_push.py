"""A run is pushed to the hub, fetched from there, and used by every command that reads one."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import yaml
from safetensors.torch import load_file

import transformer
from support.command_line import composed
from support.corpora import Shell, in_a_child, read, run, run_command, tiny_job, write_corpus
from support.hub import TOKEN, ModelHub, client_of, model_hub
from transformer.config.jobs import EvaluateJob, ScoreJob, TrainJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.config.settings import DataConfig, LineFormat, PairConfig, TokenizerConfig
from transformer.data.piece_list import join_piece_list
from transformer.errors import CheckpointError, InputError, StorageError, TransformerError
from transformer.integrations.published.run import run_path
from transformer.integrations.push.command import Pushed, format_pushed, push
from transformer.integrations.push.job import PushJob
from transformer.integrations.push.portable import portable_job
from transformer.integrations.push.tokenizer_file import without_origin
from transformer.tools.compare.job import CompareJob
from transformer.tools.report.job import ReportJob
from transformer.tools.summary.job import SummaryJob

REPO = "ours/en-de"
SOURCE = f"hf:{REPO}"
TEXT = "one two three\nnine zero four four\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, in a folder whose name tells of its owner."""
    folder = tmp_path_factory.mktemp("anna-secret")
    return run(tiny_job(folder / "runs" / "mine", write_corpus(folder / "corpus")))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub without repositories, and this process's client of it, which may write."""
    with model_hub() as server:
        client_of(server, monkeypatch, tmp_path / "home", token=TOKEN)
        yield server


def pushed(trained: Path, **keys: Any) -> Pushed:
    return push(PushJob(**{"run_dir": str(trained), "repo": REPO, "license": "cc-by-4.0", **keys}))


def head_of(card: str) -> Any:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def copy_of(tmp_path: Path) -> Path:
    """The one copy that was fetched."""
    (copy,) = (path.parent for path in (tmp_path / "home").rglob("run.json"))
    return copy


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_push_sends_what_a_run_needs_and_nothing_of_this_machine(trained: Path, hub: ModelHub) -> None:
    """In one commit, to a repository that nobody else sees."""
    found = pushed(trained)
    assert composed(format_pushed(found).splitlines()[-1]).run_dir == SOURCE
    repository = hub.repositories[REPO]
    assert repository.private
    assert (found.revision, found.address) == (repository.head, f"{hub.url}/{REPO}")
    assert len(repository.commits) == 2  # the hub's own, and this one
    texts = [f"hypotheses/{name}" for name in ("dev.ref", "dev.src")]
    texts += [f"hypotheses/{name}.{kind}" for name in ("test", "other") for kind in ("hyp", "ref", "src")]
    averaged = [f"averaged/{name}" for name in ("MANIFEST.json", "config.json", "model.safetensors", "state.json")]
    documents = ["MANIFEST.json", "README.md", "data.json", "metrics.jsonl", "results.json", "run.json"]
    documents.append("tokenizer.model")
    assert sorted(repository.files) == sorted([".gitattributes", *documents, *averaged, *texts])
    assert found.files == {name: len(data) for name, data in sorted(repository.files.items()) if name[0] != "."}

    weights = (trained / "averaged" / "model.safetensors").read_bytes()
    assert repository.files["averaged/model.safetensors"] == weights
    assert [oid for oid, data in hub.large.items() if data == weights]  # apart, as large files go
    for name in ("tokenizer.model", "results.json", "hypotheses/test.hyp"):
        assert repository.files[name] == (trained / name).read_bytes()
    for name, data in repository.files.items():
        for secret in ("anna-secret", "pytest-", str(Path.home()), TOKEN):
            assert secret.encode() not in data, f"{name} has {secret}"
    record = json.loads(repository.files["run.json"])
    assert record["config"]["run_dir"] == "mine"
    assert record["config"]["data"]["train"]["src"] == "train.en"
    assert record["config"]["model"] == read(trained / "run.json")["config"]["model"]


def test_push_makes_a_card_of_the_run(trained: Path, hub: ModelHub) -> None:
    card = hub_card = pushed(trained, license="apache-2.0").card
    assert hub.repositories[REPO].files["README.md"].decode() == hub_card
    head = head_of(card)
    results = read(trained / "results.json")
    assert (head["language"], head["license"], head["pipeline_tag"]) == (["en", "de"], "apache-2.0", "translation")
    assert head["library_name"] == "transformer-mt"
    (model,) = head["model-index"]
    assert model["name"] == "en-de"
    found = {of_set["dataset"]["name"]: of_set["metrics"] for of_set in model["results"]}
    assert found.keys() == {"test", "other"}
    for name, metrics in found.items():
        scores = results["test_sets"][name]
        bleu, chrf, plus_plus, ter = metrics
        assert (bleu["type"], bleu["value"]) == ("bleu", round(scores["bleu"], 2))
        assert bleu["args"] == {"signature": scores["bleu_signature"]}
        assert (chrf["type"], chrf["value"]) == ("chrf", round(scores["chrf"], 2))
        assert (plus_plus["type"], plus_plus["name"]) == ("chrf", "chrF++")
        assert (ter["type"], ter["name"], ter["value"]) == ("ter", "TER", round(scores["ter"], 2))
        assert re.search(rf"^\| {name} \| \d+ \| {scores['bleu']:.2f} \| {scores['chrf']:.2f} \|", card, re.M), card
    for text in (
        *(scores["bleu_signature"], f"{results['parameters']:,} parameters", "train.en, train.de", "| 200 |"),
        *("12 steps", "mean of steps 4, 8, 12", "transformer train experiment=base run_dir=mine", "apache-2.0"),
        *(f"run_dir={SOURCE}", f'transformer.load("{SOURCE}")'),
    ):
        assert text in card, text
    usage = card.partition("```sh\n")[2].partition("```")[0].splitlines()
    to_translate, to_train = (composed(line.rpartition("| ")[2]) for line in usage)
    assert (to_translate.run_dir, to_train.init_from, to_train.data.tgt_lang) == (SOURCE, SOURCE, "de")


def test_push_shows_in_a_dry_run_what_it_would_send(
    trained: Path, hub: ModelHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network, and without a token; the folder stays where it is asked for."""
    folder = tmp_path / "folder"
    job = PushJob(run_dir=str(trained), repo=REPO, license="mit", dry_run=True, output=str(folder))
    run_command("push", job)
    printed = capsys.readouterr().out
    assert hub.asked == []
    assert "dry run, nothing is sent: ours/en-de would have 19 files" in printed
    for path in folder.rglob("*.*"):
        assert re.search(rf"^{re.escape(str(path.relative_to(folder)))} +{path.stat().st_size:,}$", printed, re.M)
    assert printed.endswith((folder / "README.md").read_text(encoding="utf-8"))
    with pytest.raises(InputError, match="folder: exists already and is not empty"):
        push(job)


def test_push_sends_the_last_checkpoint_of_a_run_without_an_average(
    trained: Path, hub: ModelHub, tmp_path: Path
) -> None:
    """Whose scores are those of other weights, and left out; so are translations."""
    unfinished = shutil.copytree(trained, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "averaged")
    shutil.rmtree(unfinished / "checkpoints" / "step-00000012")
    found = pushed(unfinished)
    assert {"results.json", "hypotheses/test.hyp"} & found.files.keys() == set()
    assert "These weights were not scored" in found.card
    assert "step 8 of 12: the training had not ended" in found.card
    assert "model-index" not in found.card
    ours = load_file(unfinished / "checkpoints" / "step-00000008" / "model.safetensors")
    theirs = load_file(run_path(SOURCE, "run_dir") / "averaged" / "model.safetensors")
    assert all((ours[name] == theirs[name]).all() for name in ours)
    evaluated = in_a_child("evaluate", EvaluateJob(run_dir=SOURCE, threads=1), tmp_path)
    assert (evaluated.status, "step 8" in evaluated.printed) == (0, True), evaluated.said


def test_push_again_is_a_commit_that_takes_the_place_of_the_first(trained: Path, hub: ModelHub) -> None:
    """What it has no more is deleted, what somebody else put there is not."""
    first = pushed(trained, private=False)
    repository = hub.repositories[REPO]
    repository.commit({**repository.files, "examples/more.txt": b"theirs"})
    assert not repository.private
    second = pushed(trained, private=False, texts=False)
    assert [name for name in repository.files if name.startswith("hypotheses/")] == []
    assert repository.files["examples/more.txt"] == b"theirs"
    assert first.revision in repository.commits
    assert first.revision != second.revision == repository.head

    with pytest.raises(InputError, match="repo=ours/en-de: already exists and is public: set private=false"):
        pushed(trained)
    assert repository.head == second.revision


PLACES: dict[str, Any] = {
    "/srv/anna/train.en": "train.en",
    "corpora/anna/t/*.en.gz": "*.en.gz",
    "~/anna/text": "text",
    "train.en": "train.en",
    "": "",
}
SETS: dict[str, Any] = {
    "wmt/wmt14": "wmt/wmt14",
    "sacrebleu:wmt14/full": "sacrebleu:wmt14/full",
    "mtdata:Statmt-europarl-10-deu-eng": "mtdata:Statmt-europarl-10-deu-eng",
    "/srv/anna/table.tsv": "table.tsv",
}


def test_push_sends_names_of_files_without_their_folders() -> None:
    for given, sent in PLACES.items():
        job = TrainJob(
            data=DataConfig(
                train=PairConfig(given, [given, "/b/c.de"]), root="/srv/anna", store_dir="/srv/anna/.store"
            ),
            tokenizer=TokenizerConfig(model="/srv/anna/spm.model"),
            run_dir="/srv/anna/runs/mine",
            init_from="/srv/anna/runs/first",
        )
        found = portable_job(job)
        assert found.data.train == PairConfig(sent, [sent, "c.de"])
        assert "anna" not in json.dumps(to_json(found))
        assert (found.run_dir, found.init_from, found.tokenizer.model) == ("mine", "first", "spm.model")
    for given, sent in SETS.items():
        pair = PairConfig("de", "en", dataset=given)
        assert portable_job(TrainJob(data=DataConfig(dev=pair))).data.dev == replace(pair, dataset=sent)
    assert portable_job(TrainJob(init_from="hf:theirs/opus@main")).init_from == "hf:theirs/opus@main"


def without_license(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    job.license = ""


def without_repo(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    job.repo = ""


def without_token(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")


def with_a_wrong_token(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_wrongWrongWrong")


def with_a_broken_token(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_broken\x01Token")


def of_another_owner(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    job.repo = "theirs/en-de"


def with_an_unknown_license(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    job.license = "cc-by-5.0"


def to_an_ill_hub(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    hub.ill = 500


def to_no_hub(job: PushJob, hub: ModelHub, patch: pytest.MonkeyPatch) -> None:
    hub.shutdown()
    hub.server_close()


Change = Callable[[PushJob, ModelHub, pytest.MonkeyPatch], None]
REFUSED: dict[Change, str] = {
    without_license: "license is not set, and nobody can guess it: .*cc-by-4.0.*",
    without_repo: "repo is not set: name a repository of the hub as OWNER/NAME",
    without_token: "repo=ours/en-de: no hub token found: `hf auth login`, or set HF_TOKEN",
    with_a_wrong_token: "repo=ours/en-de: the hub rejects the token .*: `hf auth login`, or set HF_TOKEN",
    with_a_broken_token: "the hub token has characters that no token can have",
    of_another_owner: "repo=theirs/en-de: the hub does not allow it .*: check the name and the token's permissions",
    with_an_unknown_license: 'repo=ours/en-de: the hub refuses it .*"license" must be one of .*',
    to_an_ill_hub: "repo=ours/en-de: the hub answers 500 .*: try again later",
    to_no_hub: "repo=ours/en-de: the hub cannot be reached .*: run this where it can be, or look .* dry_run=true",
}


@pytest.mark.parametrize("change", REFUSED)
def test_push_is_refused_in_one_line(
    change: Change,
    trained: Path,
    hub: ModelHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token is in no message."""
    job = PushJob(run_dir=str(trained), repo=REPO, license="cc-by-4.0")
    change(job, hub, monkeypatch)
    with pytest.raises(InputError, match=REFUSED[change]) as refused:
        push(job)
    assert "\n" not in str(refused.value)
    assert not re.search(r"hf_\w|Token|Wrong", str(refused.value))


def test_push_refuses_a_document_that_names_a_folder_of_its_owner(
    trained: Path, hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is from: what is known to have paths was taken out."""
    monkeypatch.setenv("HOME", "/home/anna")
    mine = shutil.copytree(trained, tmp_path / "mine")
    record = read(mine / "run.json")
    (mine / "run.json").write_text(json.dumps({**record, "machine": "one of /home/anna/inventory"}), encoding="utf-8")
    with pytest.raises(InputError, match=r"README.md: names a folder under /home/anna"):
        pushed(mine)
    assert hub.asked == []


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokenizer was trained by SentencePiece's own trainer, from a file that it names."""
    folder = tmp_path_factory.mktemp("foreign")
    data = write_corpus(folder / "anna-secret")
    text = folder / "anna-secret" / "train.en"
    sentencepiece.SentencePieceTrainer.train(
        input=[str(text), str(folder / "anna-secret" / "train.de")],
        model_prefix=str(folder / "anna-secret" / "spm"),
        vocab_size=40,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    job = tiny_job(folder / "run", data)
    config = replace(job.tokenizer, model=str(folder / "anna-secret" / "spm.model"))
    return run(replace(job, tokenizer=config, run_dir=str(folder / "run")))


def test_push_sends_a_foreign_tokenizer_without_the_paths_of_its_training(
    foreign: Path, hub: ModelHub, tmp_path: Path
) -> None:
    """It cuts and joins as before, and what loads is verified."""
    before = (foreign / "tokenizer.model").read_bytes()
    pushed(foreign)
    files = hub.repositories[REPO].files
    sent = files["tokenizer.model"]
    assert b"anna-secret" in before
    assert not any(b"anna-secret" in content for content in files.values())
    theirs, ours = (sentencepiece.SentencePieceProcessor(model_proto=model) for model in (before, sent))
    texts = (foreign / "hypotheses" / "test.src").read_text(encoding="utf-8").splitlines()
    assert len(texts) > 10
    assert ours.encode(texts) == theirs.encode(texts)
    assert ours.decode(ours.encode(texts)) == theirs.decode(theirs.encode(texts))
    ids = range(theirs.vocab_size())
    assert [(ours.id_to_piece(i), ours.get_score(i)) for i in ids] == [
        (theirs.id_to_piece(i), theirs.get_score(i)) for i in ids
    ]
    assert transformer.load(SOURCE).translate(texts) == transformer.load(foreign).translate(texts)


def test_without_origin_takes_out_what_the_protobuf_of_sentencepiece_calls_so(foreign: Path) -> None:
    """As Google's own parser reads the file; in front of it may be a list of pieces, which stays."""
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = (foreign / "tokenizer.model").read_bytes()
    before = model_pb2.ModelProto.FromString(model)
    assert len(before.trainer_spec.input) == 2
    before.trainer_spec.seed_sentencepieces_file = "/home/anna/seed.txt"
    before.normalizer_spec.normalization_rule_tsv = "/home/anna/rules.tsv"
    before.denormalizer_spec.normalization_rule_tsv = "/home/anna/rules.tsv"
    sentences = b"\x22\x0bof somebody"  # field 4, which this version of it does not know
    sent = without_origin(before.SerializeToString() + sentences)
    assert b"of somebody" not in sent
    after = model_pb2.ModelProto.FromString(sent)
    for spec, names in {
        "trainer_spec": ("input", "model_prefix", "seed_sentencepieces_file"),
        "normalizer_spec": ("normalization_rule_tsv",),
        "denormalizer_spec": ("normalization_rule_tsv",),
    }.items():
        for name in names:
            assert not getattr(getattr(after, spec), name)
            getattr(before, spec).ClearField(name)
    assert after == before

    pieces = [f"piece {number}" for number in range(9)]
    listed = without_origin(join_piece_list(model, pieces))
    assert listed == join_piece_list(without_origin(model), pieces)
    assert without_origin(listed) == listed
    for damaged in (model[:-1], model[: len(model) // 2], b"\x0b" + model, model + b"\x12", KEY.encode()):
        with pytest.raises(ValueError, match=r"field|number"):
            without_origin(damaged)


# ---- a forged record ------------------------------------------------------------------------------------------------

FORGED = (
    "me\n\n# Free money\n\n<script>alert(1)</script> <img src=x onerror=alert(1)> [a](http://evil.example) "
    "![b](http://evil.example/b.png) http://evil.example www.evil.example a@evil.example ``` ` **bold** | c &lt;\n```\n"
    "\n- item\n\n---\n\n> quoted\n\n| x | y |\n|---|---|\n\u202e\x1b[31m\n"
)


def forge(document: Any, names: tuple[str, ...]) -> int:
    """Put the text into the fields of these names, wherever they are, and say into how many."""
    if isinstance(document, list):
        return sum(forge(one, names) for one in document)
    if not isinstance(document, dict):
        return 0
    count = 0
    for name, value in document.items():
        if name in names and (value is None or isinstance(value, str)):
            document[name] = FORGED
            count += 1
        else:
            count += forge(value, names)
    return count


def test_push_keeps_what_a_forged_record_says_text_in_the_card(trained: Path, tmp_path: Path) -> None:
    """A parser of Markdown finds the elements that it finds in an honest card, and no other."""
    markdown_it = pytest.importorskip("markdown_it")
    honest = pushed(trained, dry_run=True).card
    mine = shutil.copytree(trained, tmp_path / "mine")
    names: tuple[str, ...] = (
        "machine",
        "started",
        "python",
        "torch",
        "bleu_signature",
        "chrf_signature",
        "chrf_plus_plus_signature",
    )
    names += ("path", "sha256")
    for document, at_least in {"run.json": 4, "results.json": 6, "data.json": 6}.items():
        content = read(mine / document)
        assert forge(content, names) >= at_least
        if document == "results.json":
            content["engine"] = FORGED
        (mine / document).write_text(json.dumps(content), encoding="utf-8")
    record = read(mine / "run.json")
    record["versions"]["transformer-mt"] = FORGED
    record["config"]["data"]["train"]["src"] = FORGED
    (mine / "run.json").write_text(json.dumps(record), encoding="utf-8")
    card = pushed(mine, dry_run=True).card
    assert card.count("Free money") > 12

    def elements(card: str) -> list[str]:
        _, head, body = card.split("---\n", 2)
        assert yaml.safe_load(head)["library_name"] == "transformer-mt"
        parser = markdown_it.MarkdownIt("commonmark", {"html": True, "linkify": False}).enable("table")
        found = []
        for token in parser.parse(body):
            found += [token.type] if token.type != "inline" else [one.type for one in token.children]
        return [kind for kind in found if kind not in ("text", "text_special", "softbreak")]

    assert elements(card) == elements(honest)
    body = card.split("---\n", 2)[2]
    assert not re.search(r"[\u202e\x1b]", body)
    outside = re.sub(r"(`+)[^`](.*?[^`])??\1(?!`)", "", body, flags=re.DOTALL)
    assert "Free money" in outside
    assert not re.search(r"(?<![\\])http://|www\.", outside)


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n"
SENT = ["metrics.jsonl", "hypotheses/dev.src", "hypotheses/dev.ref", "hypotheses/test.src", "hypotheses/test.hyp"]
SENT += ["data.json", "results.json", "run.json", "tokenizer.model", "hypotheses"]


@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_push_follows_no_link_and_waits_for_no_pipe(kind: str, name: str, trained: Path, tmp_path: Path) -> None:
    """A run that came as an archive may have links to whatever its new owner has."""
    secret = tmp_path / "id_rsa"
    secret.write_text(KEY, encoding="utf-8")
    mine = shutil.copytree(trained, tmp_path / "mine")
    path = mine / name
    if path.is_dir():
        path.rename(tmp_path / "elsewhere")
        secret = tmp_path / "elsewhere"
    else:
        path.unlink()
    if kind == "link":
        path.symlink_to(secret)
    else:
        os.mkfifo(path)
    with pytest.raises(TransformerError, match=re.escape(str(path))) as refused:
        pushed(mine, dry_run=True, output=str(tmp_path / "sent"))
    assert "\n" not in str(refused.value)
    assert not any(KEY in file.read_text(errors="replace") for file in (tmp_path / "sent").rglob("*") if file.is_file())


def test_push_sends_of_metrics_what_it_understands(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = shutil.copytree(trained, tmp_path / "mine")
    whole = (mine / "metrics.jsonl").read_text(encoding="utf-8")
    forged = '{"step": 3, "time": "noon", "train/loss": 1.5, "note": 1, "train/text": "secret", "my password": 2}\n'
    (mine / "metrics.jsonl").write_text(KEY + whole + forged + "[1]", encoding="utf-8")
    pushed(mine, dry_run=True, output=str(tmp_path / "sent"))
    sent = (tmp_path / "sent" / "metrics.jsonl").read_text(encoding="utf-8")
    assert sent == whole + '{"step": 3, "train/loss": 1.5}\n'
    assert "metrics.jsonl: 2 lines are not measurements and are not sent" in caplog.text


def test_push_refuses_what_is_not_called_like_a_set(trained: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(trained, tmp_path / "mine")
    for suffix in ("src", "ref"):
        (mine / "hypotheses" / f"id rsa.{suffix}").write_text(KEY, encoding="utf-8")
    with pytest.raises(InputError, match=r"mine/hypotheses/id rsa\.src: not the name of a set: take it out of the run"):
        pushed(mine, dry_run=True)


# ---- what is fetched ------------------------------------------------------------------------------------------------


def test_run_dir_on_the_hub_is_used_like_the_run_itself(
    trained: Path, hub: ModelHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By each command that reads runs; it is fetched once."""
    revision = pushed(trained).revision
    job = TranslateJob(run_dir=str(trained), threads=1, format=LineFormat.jsonl, ensemble=[str(trained)])
    printed = []
    for run_dir in (str(trained), f"{SOURCE}@main"):
        ended = in_a_child("translate", replace(job, run_dir=run_dir, ensemble=[run_dir]), tmp_path, TEXT)
        assert ended.status == 0, ended.said
        printed.append(ended.printed)
    assert printed[0] == printed[1] != ""
    assert copy_of(tmp_path).name == revision
    assert "fetching hf:ours/en-de at revision" in ended.said

    # From here on it is here.
    hub.asked.clear()
    assert transformer.load(SOURCE).translate(TEXT.splitlines()) == transformer.load(trained).translate(
        TEXT.splitlines()
    )
    run_command("evaluate", EvaluateJob(run_dir=f"{SOURCE}@{revision}", threads=1))
    bleu = read(trained / "results.json")["test_sets"]["test"]["bleu"]
    assert f"BLEU {bleu:.2f}" in capsys.readouterr().out
    run_command("compare", CompareJob(runs=[str(trained), SOURCE]))
    assert f"hf:ours/en-de@{revision}" in capsys.readouterr().out
    page = tmp_path / "report.html"
    run_command("report", ReportJob(runs=[SOURCE], output=str(page), samples=1, checkpoints=0, attention=0, threads=1))
    assert f"hf:ours/en-de@{revision}" in page.read_text(encoding="utf-8")
    assert str(tmp_path / "home") not in page.read_text(encoding="utf-8")
    run_command("summary", SummaryJob(run=SOURCE))
    scored = in_a_child("score", ScoreJob(run_dir=SOURCE, threads=1), tmp_path, "one two\teins zwei\n")
    assert scored.status == 0, scored.said
    assert {path.partition("/resolve/")[1] for path in hub.asked} == {""}, "asked which revision it is, and for no file"


def test_run_dir_on_the_hub_is_read_where_its_copies_cannot_be_written(
    trained: Path, hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(trained)
    path = run_path(SOURCE, "run_dir")

    def refuse(path: Path, data: bytes) -> None:
        raise StorageError(f"{path}: cannot be written")

    monkeypatch.setattr("transformer.integrations.published.run.write_file", refuse)
    assert run_path(SOURCE, "run_dir") == path


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_run_dir_on_the_hub_waits_for_nothing_in_the_place_of_a_commit(
    make: Callable[[Path], None], trained: Path, hub: ModelHub
) -> None:
    pushed(trained)
    commit = run_path(SOURCE, "run_dir").with_name("main.commit")
    commit.unlink()
    make(commit)
    hub.ill = 503
    with pytest.raises(InputError, match=f"run_dir={SOURCE}: the hub answers 503 .*: try again later"):
        run_path(SOURCE, "run_dir")


def test_run_dir_on_the_hub_is_what_it_was_where_the_hub_does_not_answer(
    trained: Path, hub: ModelHub, caplog: pytest.LogCaptureFixture
) -> None:
    first = pushed(trained).revision
    path = run_path(SOURCE, "run_dir")
    second = pushed(trained, license="mit", texts=False).revision
    hub.ill = 503
    assert run_path(SOURCE, "run_dir") == path
    assert "the hub answers 503" in caplog.text
    assert f"using the copy fetched last time, revision {first}" in caplog.text
    hub.asked.clear()
    assert run_path(f"{SOURCE}@{first}", "run_dir") == path
    assert hub.asked == []
    with pytest.raises(InputError, match=f"run_dir={SOURCE}@{second}: the hub answers 503 .*: try again later"):
        run_path(f"{SOURCE}@{second}", "run_dir")
    hub.ill = 0
    assert run_path(SOURCE, "run_dir").name == second


def test_run_dir_on_the_hub_is_verified_whenever_it_is_named(trained: Path, hub: ModelHub, tmp_path: Path) -> None:
    """A copy that is damaged is fetched again; what is damaged on the hub leaves no copy."""
    revision = pushed(trained).revision
    repository = hub.repositories[REPO]
    path = run_path(SOURCE, "run_dir")
    for name in ("averaged/model.safetensors", "data.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-8] + b"\0" * 8)
        assert run_path(SOURCE, "run_dir") == path
        assert (path / name).read_bytes() == whole

    def there(**changed: bytes) -> str:
        names = {key.replace("__", "/").replace("_", "."): data for key, data in changed.items()}
        repository.commit({**repository.commits[str(revision)], **names})
        return repository.head

    manifest = json.loads(repository.files["MANIFEST.json"])
    outside = {**manifest["files"], "../escaped.json": manifest["files"]["run.json"]}
    for changed, what in (
        ({"data_json": b"{}"}, "data.json: damaged: 2 bytes"),
        ({"hypotheses__test_src": b"x" * len(repository.files["hypotheses/test.src"])}, "hypotheses/test.src: damaged"),
        (
            {"MANIFEST_json": json.dumps({"files": outside}).encode()},
            "MANIFEST.json: '../escaped.json' is not one of the files of a run",
        ),
        ({"MANIFEST_json": b"[]"}, "MANIFEST.json: "),
    ):
        bad = there(**changed)
        with pytest.raises(CheckpointError, match=f"{SOURCE} at revision {bad}: {re.escape(what)}.*: push it again"):
            run_path(SOURCE, "run_dir")
        assert not path.with_name(bad).exists()
    assert list(tmp_path.rglob("escaped.json")) == []


def test_run_dir_on_the_hub_that_is_no_run_is_refused(trained: Path, hub: ModelHub, tmp_path: Path) -> None:
    pushed(trained)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    hub.put("theirs/bert", tmp_path / "model")
    (tmp_path / "model" / "run.json").write_text("{}", encoding="utf-8")
    hub.put("theirs/half", tmp_path / "model")
    for source, what in {
        "hf:theirs/half": "the run has no averaged model: `transformer push` sends",
        "hf:no/such": "not found on the hub .*: check the name, or log in",
        f"{SOURCE}@{'0' * 40}": "not found on the hub .*: check the name, or log in",
        "hf:en-de": "name a model of the hub as hf:OWNER/NAME",
    }.items():
        with pytest.raises(InputError, match=f"run_dir={re.escape(source)}: {what}"):
            transformer.load(source)
    with pytest.raises(
        InputError, match=r"^hf:theirs/bert: config\.json: model_type='bert': not marian: only published"
    ):
        transformer.load("hf:theirs/bert")


FORGED_COMMITS = {
    "an absolute path": "{victim}",
    "a relative path": "../../../../../thesis",
    "an empty name": "",
    "nothing": None,
    "a NUL": "a\0b",
    "a number": 7,
    "capitals": "A" * 40,
    "a line more": "0" * 40 + "\n",
}


@pytest.mark.parametrize("case", FORGED_COMMITS)
def test_run_dir_on_the_hub_has_a_commit_and_no_path(case: str, trained: Path, hub: ModelHub, tmp_path: Path) -> None:
    """What a hub says is the commit of a model would be the name of the directory that its copy replaces."""
    pushed(trained)
    victim = tmp_path / "thesis"
    victim.mkdir()
    (victim / "chapter1.tex").write_text("years of work", encoding="utf-8")
    sha = FORGED_COMMITS[case]
    hub.forged = {"sha": sha.format(victim=victim) if isinstance(sha, str) else sha}
    with pytest.raises(InputError, match=f"run_dir={SOURCE}: the answer is not one of a hub .*as a commit it names"):
        run_path(SOURCE, "run_dir")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [victim / "chapter1.tex"]


def test_run_dir_on_the_hub_removes_no_folder_that_is_not_a_copy(trained: Path, hub: ModelHub, tmp_path: Path) -> None:
    revision = pushed(trained).revision
    path = run_path(SOURCE, "run_dir")
    shutil.rmtree(path)
    path.mkdir()
    (path / "chapter1.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(StorageError, match=f"{revision}: cannot be written: .* not made by this program: move it away"):
        run_path(SOURCE, "run_dir")
    assert (path / "chapter1.tex").read_text(encoding="utf-8") == "years of work"


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ([1, 2], "TypeError"),
        ({"id": 1, "siblings": 3}, "TypeError"),
        ({"siblings": [{"rfilename": ["a"]}]}, r"ValueError: as a file it names \['a'\]"),
        ({"siblings": [{"name": "a"}]}, "KeyError: 'rfilename'"),
    ],
)
def test_run_dir_on_the_hub_says_that_an_answer_is_none(
    answer: dict[str, Any] | list[Any], what: str, trained: Path, hub: ModelHub
) -> None:
    pushed(trained)
    hub.forged = answer
    with pytest.raises(InputError, match=rf"run_dir={SOURCE}: the answer is not one of a hub \({what}.*HF_ENDPOINT"):
        run_path(SOURCE, "run_dir")


@pytest.mark.parametrize("etag", ["/../../../../../thesis/chapter2", "../../../../../../thesis/chapter2", "x/../y"])
def test_run_dir_on_the_hub_writes_nothing_where_an_etag_leads(
    etag: str, trained: Path, hub: ModelHub, tmp_path: Path
) -> None:
    pushed(trained)
    (tmp_path / "thesis").mkdir()
    hub.etag = etag
    with pytest.raises(TransformerError, match=f"{SOURCE}: .* cannot be fetched"):
        run_path(SOURCE, "run_dir")
    assert list((tmp_path / "thesis").iterdir()) == []
    assert not list(tmp_path.rglob("chapter2*"))


def test_run_dir_on_the_hub_is_seen_by_who_may(trained: Path, hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed(trained)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(TransformerError, match=f"run_dir={SOURCE}: not found on the hub .*: check the name, or log in"):
        run_path(SOURCE, "run_dir")


@pytest.mark.ci
def test_push_and_translate_over_http_in_processes_of_their_own(trained: Path, tmp_path: Path) -> None:
    """As they are typed, with environment variables; a training begins from it."""
    with model_hub() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        with Shell(tmp_path, "transformer.training.loop", **environment) as shell:
            status, log = shell.run("push", f"run_dir={trained}", f"repo={REPO}", "license=mit")
            assert (status, "Traceback" in log, TOKEN in log) == (0, False, False), log
            source = trained.parent.parent / "corpus" / "test.en"
            for name, run_dir in (("ours.de", str(trained)), ("theirs.de", SOURCE)):
                keys = (f"run_dir={run_dir}", f"input={source}", f"output={tmp_path / name}", "threads=1")
                status, log = shell.run("translate", *keys)
                assert status == 0, log
            assert (tmp_path / "ours.de").read_bytes() == (tmp_path / "theirs.de").read_bytes() != b""
            status, log = shell.run("import", f"from={SOURCE}", f"run_dir={tmp_path / 'imported'}")
            assert status == 0, log
            status, log = shell.run("push", f"run_dir={trained}", "repo=theirs/en-de", "license=mit")
            assert (status, log.count("\n")) == (2, 2), log
    record = read(tmp_path / "imported" / "run.json")["imported"]
    assert (record["source"], record["licence"]) == (SOURCE, "mit")
    assert not (tmp_path / "imported" / "MANIFEST.json").exists()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
