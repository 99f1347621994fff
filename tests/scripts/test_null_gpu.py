"""Whole commands on torch's own CUDA build without a GPU: what the host does with one. Numbers are none here.

`scripts/null_gpu/README.md` says what is real on a null GPU, and how to make its environment; then `pytest -n 0 -m
null_gpu`. The default `pytest` leaves these tests out.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.corpora import metrics_of, read, results_of, steps_of
from support.null_gpu import PYTHON, Ended, caches_of, on_null_gpu, train_on_null_gpu
from support.paths import CORPORA, ROOT, needs_corpora
from support.translations import write_run

pytestmark = [
    pytest.mark.null_gpu,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(PYTHON is None, reason="TRANSFORMER_NULL_GPU_PYTHON is not set: see scripts/null_gpu/README.md"),
]

LAUNCHED = "train.cuda_graphs=false"  # every kernel by the host, in every step: so they are counted
SHORT = ("train.max_steps=20", "train.validate_every=10", "train.save_every=10", "train.log_every=10", LAUNCHED)
SHORTEST = ("train.max_steps=3", "train.average=1", "search.max_extra=2", LAUNCHED)
FILES = {"train.src": "train.en", "train.tgt": "train.de", "dev.src": "val.en", "dev.tgt": "val.de"}
READ = 10  # after this step the host reads the device: a log line, a validation, a checkpoint
ROOM = 1.03  # for another torch


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The demo on an H100, not compiled."""
    folder = tmp_path_factory.mktemp("eager")
    return folder, train_on_null_gpu(folder, *SHORT, "train.average=2", "train.compile=false")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The demo on an H100, compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    return folder, train_on_null_gpu(folder, *SHORT, "train.average=2", "train.compile=true")


def resolved_of(folder: Path) -> dict[str, Any]:
    resolved: dict[str, Any] = read(folder / "run" / "run.json")["resolved"]
    return resolved


# ---- a training to its end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_train_demo_comes_to_its_end(way: str, request: pytest.FixtureRequest) -> None:
    folder, done = request.getfixturevalue(way)
    fast = {"device": "cuda", "precision": "bf16", "layout": "packed", "attention_kernel": "varlen"}
    assert resolved_of(folder).items() >= {**fast, "compile": way == "compiled"}.items()
    assert results_of(folder / "run")["averaged"] == [10, 20]
    assert results_of(folder / "run")["test_sets"].keys() == {"test", "test_compositional"}
    assert len(done.report["updates"]) == 20
    assert [line["step"] for line in metrics_of(folder / "run") if "train/loss" in line] == [10, 20]


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_train_step_never_makes_the_host_wait(way: str, request: pytest.FixtureRequest) -> None:
    """Nor allocates, once the first steps have."""
    _, done = request.getfixturevalue(way)
    steps = [step for number, step in enumerate(done.steps(), 1) if number != READ]
    assert [step["sync"] for step in steps] == [0] * len(steps)
    assert [step.get("pageable copy", 0) for step in steps] == [0] * len(steps)
    assert [step["allocation"] for step in steps[10:]] == [0] * len(steps[10:])


def test_train_demo_compiled_is_one_graph(compiled: tuple[Path, Ended]) -> None:
    _, done = compiled
    dynamo = done.report["dynamo"]
    assert dynamo["frames"] == {"total": 1, "ok": 1}
    assert dynamo["stats"]["unique_graphs"] == 1
    assert dynamo["graph_break"] == {}
    assert dynamo.get("recompiles", {}) == {}


def test_train_compiled_does_not_compile_again(compiled: tuple[Path, Ended], tmp_path: Path) -> None:
    """Another run, as a job that is requeued: it finds code and kernels in the user's cache."""
    known = set(caches_of(compiled[0]).rglob("*.cubin"))
    assert known
    done = train_on_null_gpu(tmp_path, *SHORT, "train.average=2", "train.compile=true")
    assert done.report["dynamo"]["aot_autograd"].get("autograd_cache_hit") == 1
    assert "fxgraph_cache_miss" not in done.report["dynamo"]["inductor"]
    assert set(caches_of(tmp_path).rglob("*.cubin")) == known


def test_train_step_launches_no_more_than_before(eager: tuple[Path, Ended], compiled: tuple[Path, Ended]) -> None:
    """At most the figures of the first run, with room for another torch."""
    step = eager[1].steps()[14]
    assert step["kernel"] <= 468 * ROOM
    assert step["product"] == 100
    step = compiled[1].steps()[14]
    assert step["kernel"] <= 111 * ROOM
    assert step["triton"] <= 203 * ROOM
    assert step["product"] == 100


@pytest.mark.parametrize("compiles", [False, True])
def test_train_records_a_step_and_replays_it(compiles: bool, tmp_path: Path) -> None:
    """What would end a recording on a real GPU, a host that waits for the device, ends it here, too."""
    settings = [setting for setting in SHORT if setting != LAUNCHED]
    done = train_on_null_gpu(tmp_path, *settings, "train.average=2", f"train.compile={str(compiles).lower()}")
    assert resolved_of(tmp_path)["cuda_graphs"]
    assert results_of(tmp_path / "run")["steps"] == 20
    graphs = done.report["counts"]["graph"]
    assert 2 <= graphs["captured"] <= 4  # for the proof, and a step for each length of the offsets
    assert graphs["launched"] >= 18  # two of the proof; of the steps all but the first of each length
    nodes = sum(done.report["counts"]["node"].values())
    print(nodes, graphs, done.report["counts"]["node"])
    assert nodes <= graphs["captured"] * (445 if compiles else 610) * ROOM

    looked_at = on_null_gpu(tmp_path, "transformer", "replay", "run_dir=run", "step=20")
    assert looked_at.status == 0, looked_at.err
    assert "graph" not in looked_at.report["counts"]


@pytest.mark.parametrize("compiles", [False, True])
def test_train_with_fused_kernels_records_one_step_in_all(compiles: bool, tmp_path: Path) -> None:
    """Nothing that they launch depends on the sentences of a batch. The first step is launched, the second recorded."""
    settings = [setting for setting in SHORT if setting != LAUNCHED]
    way = ("train.kernels=fused", f"train.compile={str(compiles).lower()}", "train.proof=false")
    done = train_on_null_gpu(tmp_path, *settings, *way, "train.average=2")
    assert resolved_of(tmp_path).items() >= {"cuda_graphs": True, "attention_kernel": "sentences"}.items()
    assert done.report["counts"]["graph"] == {"captured": 1, "launched": 19}
    nodes = done.report["counts"]["node"]
    print(nodes)
    assert sum(nodes.values()) <= (290 if compiles else 355) * ROOM


def test_train_in_fp16_with_a_moving_average_goes_on_where_it_ended(tmp_path: Path) -> None:
    settings = ("train.precision=fp16", "train.ema_decay=0.9", "train.compile=false", *SHORTEST)
    train_on_null_gpu(tmp_path, *settings, "train.profile=2")
    assert (tmp_path / "run/trace-00000002.json.gz").exists()
    assert (tmp_path / "run/memory-00000002.pickle").exists()

    done = train_on_null_gpu(tmp_path, *settings, "train.max_steps=6")
    assert len(done.report["updates"]) == 3
    assert steps_of(tmp_path / "run")[-1] == 6
    assert (tmp_path / "run/checkpoints/step-00000006/ema.safetensors").exists()


def test_train_on_two_ranks_shares_gradients(tmp_path: Path) -> None:
    command = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "transformer", "train", "run_dir=run")
    done = on_null_gpu(tmp_path, *command, *SHORT, "train.compile=false", NULL_GPU_DEVICES="2")
    assert done.status == 0, done.err
    assert results_of(tmp_path / "run")["steps"] == 20
    other = read(tmp_path / "null_gpu_report.json.1")
    for report in (done.report, other):
        assert len(report["updates"]) == 20
        assert report["counts"]["collective"]["ncclAllReduce"] >= 20


def test_train_on_two_ranks_replays_two_graphs_and_sends_one_message(tmp_path: Path) -> None:
    """Also while one rank records, and the other does not. A resume on one rank, and on two again, goes on."""
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "transformer", "train", "run_dir=run")
    settings = [setting for setting in SHORT if setting != LAUNCHED]
    replayed = ("train.compile=false", "train.proof=false", "train.cuda_graphs=true")
    done = on_null_gpu(tmp_path, *torchrun, *settings, *replayed, NULL_GPU_DEVICES="2")
    assert done.status == 0, done.err
    assert resolved_of(tmp_path)["cuda_graphs"]
    for report in (done.report, read(tmp_path / "null_gpu_report.json.1")):
        counts = report["counts"]
        assert counts["collective"] == {"ncclAllReduce": 20}
        assert "collective" not in counts["node"]
        shapes = counts["graph"]["captured"] - 1  # of gradients, each of which was launched once; and the update
        assert 1 <= shapes <= 3
        assert counts["graph"]["launched"] >= 40 - 1 - 3

    # Where nothing is said, several ranks launch.
    for ranks, graphs in ((1, True), (2, False)):
        command = torchrun if ranks == 2 else ("transformer", "train", "run_dir=run")
        steps = f"train.max_steps={22 + 2 * ranks}"
        done = on_null_gpu(tmp_path, *command, *settings, *replayed[:2], steps, NULL_GPU_DEVICES="2")
        assert done.status == 0, done.err
        assert ("graph" in done.report["counts"]) is graphs


# ---- other models ---------------------------------------------------------------------------------------------------


@needs_corpora
def test_train_multi30k_with_muon_is_one_graph(tmp_path: Path) -> None:
    settings = ("experiment=multi30k_en_de", f"data.root={CORPORA}", "train.compile=true", "train.log_every=100")
    done = train_on_null_gpu(tmp_path, *settings, *SHORTEST, "train.max_steps=8")
    assert resolved_of(tmp_path)["compile"] is True
    assert done.report["dynamo"]["stats"]["unique_graphs"] == 1
    assert done.report["dynamo"]["graph_break"] == {}
    steps = done.steps()[2:]
    assert [step["sync"] for step in steps] == [0] * len(steps)


@needs_corpora
def test_train_base_compiled_is_one_graph_and_launches_no_more_than_before(tmp_path: Path) -> None:
    """Triton's kernels are those that `test_fake_gpu.py` finds in the graphs; the rest is the update and the loss."""
    data = [f"data.{name}={CORPORA}/multi30k/{path}" for name, path in FILES.items()]
    settings = ("experiment=base", *data, "tokenizer.vocab_size=10000", "train.compile=true")
    done = train_on_null_gpu(tmp_path, *settings, *SHORTEST, "train.max_steps=4")
    assert resolved_of(tmp_path)["compile"] is True
    assert done.report["dynamo"]["stats"]["unique_graphs"] == 1
    assert done.report["dynamo"]["graph_break"] == {}
    step = done.steps()[-1]
    print({kind: count for kind, count in step.items() if count})
    assert step["sync"] == 0
    assert step["triton"] <= (238 + 285) * ROOM


BASE = ("experiment=base", "tokenizer.vocab_size=10000")
BIG = (*BASE, "model.d_model=1024", "model.d_ff=4096", "model.n_heads=16", "model.dropout=0.3")
SIZES = {  # and, as the estimate has it, padded micro-batches that one without padding fills
    "base": (*BASE, "train.max_tokens=25000"),
    "big": (*BIG, "train.max_tokens=25000"),
    "small": ("experiment=small", "train.max_tokens=4096"),
    "multi30k": ("experiment=multi30k_en_de", "train.max_tokens=4096"),
}
WAYS = {
    "packed, eager": ("train.compile=false",),
    "packed, compiled": ("train.compile=true",),
    "padded, eager": ("train.layout=padded", "train.compile=false"),
    "padded, compiled": ("train.layout=padded", "train.compile=true"),
    "padded, eager, fp32": ("train.precision=fp32", "train.compile=false"),
}
SLOW = ("big", "padded, compiled")  # a compiler takes minutes
CELLS = [(size, way) for size in SIZES for way in WAYS if (size, way) != SLOW]


@needs_corpora
@pytest.mark.parametrize(("size", "way"), CELLS, ids=[f"{size}: {way}" for size, way in CELLS])
def test_estimate_memory_is_what_the_allocator_needs(size: str, way: str, tmp_path: Path) -> None:
    """The peak of trial and steps, and what `summary` says before anything is trained, within 10 %."""
    data = [f"data.{name}={CORPORA}/multi30k/{path}" for name, path in FILES.items()]
    settings = (*SIZES[size], f"data.root={CORPORA}", *data, *WAYS[way])
    done = train_on_null_gpu(tmp_path, *settings, *SHORTEST, "train.max_steps=2")
    shutil.rmtree(tmp_path / "run")  # gigabytes
    peak = max(update["peak"] for update in done.report["updates"])

    said = on_null_gpu(tmp_path, "transformer", "summary", *settings, "format=json")
    estimate = json.loads(said.out)["longest_memory"]["total"]
    print(f"| {size} | {way} | {peak / 2**30:.2f} | {estimate / 2**30:.2f} | {estimate / peak - 1:+.1%} |")
    assert estimate == pytest.approx(peak, rel=0.1)


def test_trial_sees_what_many_short_sentences_need(tmp_path: Path) -> None:
    """The kernel's backward pass rounds each of them up by 128 slots, in fp32: more than the longest ones take."""
    lines = ["a dog"] * 20_000 + ["one dog runs and " * 20] * 50
    for name, count in (("train", len(lines)), ("dev", 10)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines[:count]), encoding="utf-8")
    data = [f"data.{part}.{side}={part}.txt" for part in ("train", "dev") for side in ("src", "tgt")]
    settings = ("experiment=small", "tokenizer.vocab_size=40", "train.tokens_per_step=20000", "train.compile=false")
    done = train_on_null_gpu(tmp_path, *settings, *data, *SHORTEST)
    needed = read(tmp_path / "run/run.json")["memory"]["needed"]
    assert done.report["reserved"] <= needed * ROOM


# ---- other cards ----------------------------------------------------------------------------------------------------

CARDS = {
    "H100": ("90", {"precision": "bf16", "layout": "packed", "attention_kernel": "varlen", "max_tokens": 32_768}),
    "RTX 3090": ("86", {"precision": "bf16", "layout": "packed", "attention_kernel": "varlen", "max_tokens": 8_192}),
    "T4": ("75", {"precision": "fp32", "layout": "padded", "attention_kernel": None, "max_tokens": 8_192}),
}


@pytest.mark.parametrize(("capability", "expected"), CARDS.values(), ids=CARDS)
def test_train_takes_what_a_card_is_fast_at(tmp_path: Path, capability: str, expected: dict[str, Any]) -> None:
    """With nothing set: the demo is too short to be compiled anywhere."""
    done = train_on_null_gpu(tmp_path, *SHORTEST, NULL_GPU_CAPABILITY=capability)
    assert resolved_of(tmp_path).items() >= {"device": "cuda", "compile": False, **expected}.items()
    assert len(done.report["updates"]) == 3


def test_train_on_a_card_that_torch_has_no_code_for_says_so(tmp_path: Path) -> None:
    done = on_null_gpu(tmp_path, "transformer", "train", "train.device=cuda", NULL_GPU_CAPABILITY="70")
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert "V100" in done.err


@pytest.mark.parametrize("capability", ["90", "86", "75"])
def test_varlen_obstacle_is_what_torch_does_not_take(tmp_path: Path, capability: str) -> None:
    """Forward and backward, at each type and width of heads: torch's own checks, up to the launch."""
    program = tmp_path / "probe.py"
    program.write_text(PROBE, encoding="utf-8")
    done = on_null_gpu(tmp_path, "python", str(program), NULL_GPU_CAPABILITY=capability)
    assert done.status == 0, done.err
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert len(answers) == 36
    assert [answer for answer in answers if answer["ours"] != answer["torch"]] == []


PROBE = """
import json
import torch
from torch.nn.attention.varlen import varlen_attn
from transformer.compute import product_dtype
from transformer.config.settings import ModelConfig, Precision
from transformer.training.resolve import varlen_obstacle

offsets = torch.tensor([0, 10, 20] + [20] * 253, device="cuda", dtype=torch.int32)
for precision in (Precision.bf16, Precision.fp16, Precision.fp32):
    dtype = product_dtype(precision)
    for width in (8, 16, 24, 32, 64, 100, 104, 128, 192, 200, 256, 264):
        q, k, v = (torch.randn(256, 4, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        try:
            out = varlen_attn(q, k, v, offsets, offsets, 128, 128, scale=0.1, window_size=(-1, 0))
            out.backward(torch.randn_like(out))
            takes = True
        except RuntimeError:
            takes = False
        ours = varlen_obstacle(ModelConfig(d_k=width, d_v=width), q.device, precision) is None
        print(json.dumps({"dtype": str(dtype), "width": width, "ours": ours, "torch": takes}))
"""


@pytest.mark.parametrize("role", ["encoder", "causal", "cross"])
def test_attend_takes_flash_attention_for_sentences_of_any_length(tmp_path: Path, role: str) -> None:
    """Both ways, without a window: the kernels of torch's own call for at most 128 tokens. There is no cuDNN here."""
    program = tmp_path / "probe.py"
    program.write_text(KERNELS, encoding="utf-8")
    found = {}
    for length in ("torch", "100", "200"):
        done = on_null_gpu(tmp_path, "python", str(program), role, length)
        assert done.status == 0, done.err
        found[length] = json.loads(done.out)
    assert [name for name in found["torch"] if "flash_fwd" in name]
    assert [name for name in found["torch"] if "flash_bwd" in name]
    assert found["torch"] == found["100"] == found["200"]


KERNELS = """
import json
import sys
import numpy as np
import sitecustomize
import torch
from torch.nn.attention.varlen import varlen_attn
from transformer.config.settings import AttentionKernel
from transformer.data.packing import pack
from transformer.model.attention import AttentionSpec, attend

role, length = sys.argv[1:]
lengths = np.full((2, 2), 100 if length == "torch" else int(length))
source, target = (side.to(torch.device("cuda")) for side in pack(lengths, (512, 512), kernel=AttentionKernel.varlen))
queries, keys = {"encoder": (source, source), "causal": (target, target), "cross": (target, source)}[role]
causal = role == "causal"
q, k, v = (torch.zeros(512, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
if length == "torch":
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(q, k, v, queries.offsets, keys.offsets, 128, 128, scale=0.125, window_size=window)
else:
    spec = AttentionSpec(queries=queries, keys=keys, causal=causal, dropout=0.0, scale=0.125, score_vector=None)
    out = attend(q, k, v, spec)
out.backward(torch.zeros_like(out))
print(json.dumps(sorted(name for name in sitecustomize.counted()["kernel"] if "flash" in name)))
"""


# ---- what can be wrong with a GPU -----------------------------------------------------------------------------------

LARGE_STEPS = ("transformer", "train", "run_dir=run", "train.compile=false", "train.tokens_per_step=400000")


def test_train_under_an_old_driver_says_so(tmp_path: Path) -> None:
    done = on_null_gpu(tmp_path, "transformer", "train", "train.device=cuda", NULL_GPU_DRIVER="12080")
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert "driver" in done.err

    done = train_on_null_gpu(tmp_path, *SHORTEST, NULL_GPU_DRIVER="12080")
    assert resolved_of(tmp_path)["device"] == "cpu"
    assert "driver" in (tmp_path / "run/train.log").read_text(encoding="utf-8")


def test_train_on_a_gpu_without_enough_memory_names_the_key(tmp_path: Path) -> None:
    done = on_null_gpu(tmp_path, *LARGE_STEPS, "train.max_tokens=300000", NULL_GPU_GIB="4")
    assert done.status == 2, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("transformer: error: out of GPU memory in the trial before the first step: lower train.max")


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("gib", [1.5, 2, 4])
def test_train_fits_its_steps_into_the_memory_of_a_gpu(tmp_path: Path, gib: float, graphs: bool) -> None:
    """With the holes that the allocator leaves: half a GiB of the GPU is the context's.

    Recorded steps keep their memory, and give it back where a validation needs it. In 2 GiB there is none to keep.
    """
    settings = (*LARGE_STEPS, "train.fit_memory=true", *SHORTEST, "train.max_steps=6", "train.validate_every=2")
    fitted = on_null_gpu(tmp_path, *settings, f"train.cuda_graphs={str(graphs).lower()}", NULL_GPU_GIB=str(gib))
    assert fitted.status == 0, fitted.err
    assert resolved_of(tmp_path)["cuda_graphs"] == (graphs and gib > 2)
    if graphs and gib > 2:  # gradient and update, again after each validation
        assert fitted.report["counts"]["graph"]["captured"] >= 5
    needed, available = (read(tmp_path / "run/run.json")["memory"][key] / 2**30 for key in ("needed", "available"))
    assert available <= gib - 0.5
    assert 0.7 * available < needed <= 0.95 * available


def test_train_launches_every_kernel_where_no_step_can_be_recorded(tmp_path: Path) -> None:
    settings = [setting for setting in SHORTEST if setting != LAUNCHED]
    command = ("transformer", "train", "run_dir=run", "train.compile=false", *settings)
    refused = on_null_gpu(tmp_path, *command, NULL_GPU_REFUSES_GRAPHS="1")
    assert refused.status == 75
    assert refused.err.splitlines()[-1].startswith("transformer: error: a step could not be recorded (")
    assert refused.err.splitlines()[-1].endswith("): the same command goes on, with every kernel launched by the host")

    # It does, and so does a resume, which compares nothing again.
    for steps in (3, 4):
        launched = on_null_gpu(tmp_path, *command, f"train.max_steps={steps}", NULL_GPU_REFUSES_GRAPHS="1")
        assert launched.status == 0, launched.err
        assert "graph" not in launched.report["counts"]
    assert resolved_of(tmp_path)["cuda_graphs"] is False
    (failure,) = read(tmp_path / "run/run.json")["proof"]["failures"].items()
    assert failure[0] == "packed (varlen), not compiled, CUDA graphs, bf16"
    assert f"({failure[1]})" in refused.err
    assert (tmp_path / "run/train.log").read_text(encoding="utf-8").count("agrees with the plain computation") == 1


def test_train_that_can_record_no_more_commits_its_step_and_goes_on_launched(tmp_path: Path) -> None:
    """No proof has found out; and where one has found nothing, a later recording fails."""
    settings = [setting for setting in SHORTEST if setting != LAUNCHED]
    for proof, first_refused in (("false", "1"), ("true", "2")):
        folder = tmp_path / proof
        folder.mkdir()
        command = ("transformer", "train", "run_dir=run", "train.compile=false", f"train.proof={proof}", *settings)
        refused = on_null_gpu(folder, *command, "train.max_steps=6", NULL_GPU_REFUSES_GRAPHS=first_refused)
        assert refused.status == 75, refused.err
        (step,) = steps_of(folder / "run")
        assert 0 < step < 6
        assert f"step {step} is saved: the same command goes on, and its host" in refused.err.splitlines()[-1]
        assert "captured" in refused.report["counts"]["graph"]

        launched = on_null_gpu(folder, *command, "train.max_steps=6", NULL_GPU_REFUSES_GRAPHS=first_refused)
        assert launched.status == 0, launched.err
        assert len(launched.report["updates"]) == 6 - step
        assert "graph" not in launched.report["counts"]


def graphed(folder: Path, program: str) -> Any:
    """What a program prints that has a `graphed` computation, and batches by their number of sentences and of slots."""
    path = folder / "program.py"
    path.write_text(GRAPHED + program, encoding="utf-8")
    done = on_null_gpu(folder, "python", str(path))
    assert done.status == 0, done.err
    return json.loads(done.out)


GRAPHED = """
import json
import numpy as np
import torch
from transformer.compute import loss_scaler
from transformer.config.settings import AttentionKernel, ModelConfig, Precision, TrainConfig
from transformer.data.batch import collate
from transformer.data.store import Store
from transformer.model.transformer import Transformer
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.optimizer import build_optimizer
from transformer.training.step import Computation, Objective

device = torch.device("cuda")
model = Transformer(ModelConfig(n_layers=1, d_model=64, d_ff=64, n_heads=2), 500).to(device)
scaler = loss_scaler(device, Precision.bf16)
launched = Computation(
    Objective(model, 0.1).train(), build_optimizer(model, TrainConfig()), scaler, 1.0, device, Precision.bf16
)
graphed = GraphedComputation(launched, reduces=False)
short = Store.from_pieces(*([[5]] * 1600 for _ in range(2)))
recorded = graphed._recorder._recordings

def batch_of(count, slots):
    return collate(short, np.arange(count), (slots, slots), kernel=AttentionKernel.varlen).to(device)

def take(batch):
    graphed.take([(1, batch)], share=1.0, rate=1e-3)
"""


def test_graphed_computation_records_what_has_run_and_again_after_it_made_room(tmp_path: Path) -> None:
    """A shape is launched once before it is recorded, and what still lives of the old memory is in nobody's way.

    While a step is recorded, Python collects no garbage: what ends then might have to be unloaded.
    """
    assert graphed(tmp_path, RECORDS) == [0, 2, 0, 2, [True, False]]


RECORDS = """
import gc

collects = []
take_one = graphed._take_one
graphed._take_one = lambda *arguments: collects.append(gc.isenabled()) or take_one(*arguments)
batches = [batch_of(count, 1024) for count in (400, 10)]

def recordings():
    for batch in batches:
        take(batch)
    return len(recorded)

found = [recordings(), recordings()]
kept = [recording.results for recording in recorded.values()]
torch.cuda.mem_get_info = lambda device: (0, 1)
graphed.make_room()
found += [len(recorded), recordings(), collects[1:3]]
print(json.dumps(found))
"""


def test_graphed_computation_frees_what_it_recorded_where_a_new_shape_would_not_fit_beside_it(tmp_path: Path) -> None:
    """There is memory for one and a half steps: a new shape is launched alone, and in the end all are recorded."""
    assert graphed(tmp_path, HAS_LITTLE_ROOM) == [[1, 1, 1], [2, 3, 3], True]


HAS_LITTLE_ROOM = """
batches = [batch_of(count, 65536) for count in (1600, 600, 10)]
take(batches[0])
step = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
free, _ = torch.cuda.mem_get_info()
ballast = torch.empty(int(free - 1.5 * step), dtype=torch.uint8, device=device)

def recordings(batch):
    take(batch)
    take(batch)
    return len(recorded)

found = [[recordings(batch) for batch in batches] for _ in range(2)]
print(json.dumps([*found, graphed.is_recording]))
"""


def test_train_goes_on_without_the_compiler_where_no_kernel_can_be_loaded(tmp_path: Path) -> None:
    done = train_on_null_gpu(tmp_path, "train.compile=true", *SHORTEST, NULL_GPU_REFUSES_MODULES="1")
    assert resolved_of(tmp_path)["compile"] is False
    (failure,) = read(tmp_path / "run/run.json")["proof"]["failures"].items()
    assert failure[0] == "packed (varlen), compiled, bf16"
    assert failure[1] in done.err
    assert "triton" not in done.report["counts"]


def test_train_takes_no_gpu_that_computes_wrong(tmp_path: Path) -> None:
    done = on_null_gpu(tmp_path, "transformer", "train", "run_dir=run", *SHORTEST, NULL_GPU_DEVIATES="1")
    assert done.status == 2, done.err
    assert read(tmp_path / "run/run.json")["proof"]["failures"].keys() == {
        "packed (varlen), not compiled, bf16",
        "padded, not compiled, bf16",
        "padded, not compiled, fp32",
    }
    assert "no training step computes correctly on" in done.err.splitlines()[-1]


# ---- what one does with a run ---------------------------------------------------------------------------------------


def test_translate_answers_each_line(eager: tuple[Path, Ended]) -> None:
    done = on_null_gpu(eager[0], "transformer", "translate", "run_dir=run", text="A dog.\nTwo dogs run.\n")
    assert done.status == 0, done.err
    assert len(done.out.splitlines()) == 2


COUNT_LAUNCHES = """
import json, sys, torch
from sitecustomize import counted
from transformer.compute import avoid_cudnn_attention
from transformer.config.settings import ModelConfig, Precision, SearchConfig
from transformer.decoding import batched as module
from transformer.decoding.replay import Replay
from transformer.model.transformer import Transformer

device = torch.device("cuda")
avoid_cudnn_attention(device)
search = SearchConfig(max_extra=1, batch_tokens=131_072)
model = Transformer(ModelConfig(), 37_000).to(device)
launched = module.BatchedDecoder.of(model, search, device=device, precision=Precision.bf16)
replayed = launched.replayed()
seen = []
totals = lambda: {kind: sum(names.values()) for kind, names in counted().items()}

def seeing(function):
    return lambda *how: (seen.append(totals()), function(*how))[1]

def a_step(batches, first, last):
    seen.clear()
    batches.hypotheses([[7] * 38 for _ in range(64)], n_best=1)
    return {kind: (seen[last].get(kind, 0) - seen[first].get(kind, 0)) / (last - first) for kind in seen[last]}

module.decode_step = seeing(module.decode_step)
found = [a_step(launched, 8, 15)]
Replay._take = seeing(Replay._take)
replayed.hypotheses([[7] * 38 for _ in range(64)], n_best=1)
found += [a_step(replayed, 8, 15), a_step(replayed, 8, 16)]
print(json.dumps(found))
"""


def test_search_step_launches_few_kernels_and_is_replayed_as_one_graph(tmp_path: Path) -> None:
    """Of base in a beam of four. Eight steps make the host wait for nothing but the one question after them."""
    done = on_null_gpu(tmp_path, "python", "-c", COUNT_LAUNCHES)
    assert done.status == 0, done.err
    launched, replayed, and_asked = json.loads(done.out)
    assert sum(launched[kind] for kind in ("kernel", "product", "copy")) <= 188
    assert {kind: count for kind, count in replayed.items() if count} == {"graph": 1}
    assert {kind: count for kind, count in and_asked.items() if count} == {"graph": 1, "sync": 1 / 8, "copy": 1 / 8}


@pytest.mark.parametrize("refuses", ["0", "1"])
def test_translate_replays_the_steps_of_a_search_or_launches_them(refuses: str, spm: bytes, tmp_path: Path) -> None:
    write_run(tmp_path / "run", spm, seed=1)
    done = on_null_gpu(
        tmp_path,
        *("transformer", "translate", "run_dir=run", "search.cuda_graphs=true", "precision=bf16"),
        text="a dog .\ntwo dogs run .\n",
        NULL_GPU_REFUSES_GRAPHS=refuses,
    )
    assert done.status == 0, done.err
    assert len(done.out.splitlines()) == 2
    said = "search steps are no longer replayed on the GPU ("
    assert done.err.count(said) == int(refuses)
    assert "Traceback" not in done.err


ON_A_RUN = {
    "evaluate": ("run_dir=run",),
    "average": ("run_dir=run",),
    "attention": ("run_dir=run",),
    "report": ("run", "output=report.html"),
    "replay": ("run_dir=run",),
    "export": ("run_dir=run", "to=ctranslate2", "output=exported"),
    "score": ("run_dir=run",),
}


@pytest.mark.parametrize("command", ON_A_RUN)
def test_command_on_a_run_comes_to_its_end(command: str, eager: tuple[Path, Ended]) -> None:
    done = on_null_gpu(eager[0], "transformer", command, *ON_A_RUN[command], text="A dog.\tEin Hund.\n")
    assert done.status == 0, done.err
    assert done.out != ""


def test_verify_comes_to_its_end_and_finds_fault_with_numbers_only(eager: tuple[Path, Ended]) -> None:
    """Losses are what the host's memory happened to hold."""
    done = on_null_gpu(eager[0], "transformer", "verify", "run_dir=run")
    assert done.status in (0, 8), done.err
    assert "the gradient norm of step 10: 1.0, the same" in done.out


def test_table_trains_its_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").write_text("base: {}\nn1: {model: {n_layers: 1}}\n", encoding="utf-8")
    settings = ("table=rows.yaml", "output=table", "train.compile=false", *SHORTEST)
    done = on_null_gpu(tmp_path, "transformer", "table", *settings)
    assert done.status == 0, done.err
    assert {path.parents[1].name for path in tmp_path.rglob("results.json")} == {"base", "n1"}


def test_doctor_finds_fault_with_numbers_only(tmp_path: Path) -> None:
    done = on_null_gpu(tmp_path, "transformer", "doctor", "format=json")
    assert done.status == 8, done.err
    bad = {finding["name"] for finding in json.loads(done.out)["checks"] if finding["level"] != "ok"}
    assert bad == {"one batch"}


# ---- what is to be run on a GPU -------------------------------------------------------------------------------------


def test_gpu_sh_runs_its_programs(tmp_path: Path) -> None:
    """Those parts that compare no numbers and read no profile; their figures mean nothing."""
    parts = ("demo", "packed_eager", "decoding")
    command = (str(ROOT / "scripts/benchmark/gpu.sh"), "check", *parts, "--work", str(tmp_path / "work"))
    done = on_null_gpu(tmp_path, *command, OUT=str(tmp_path / "out"), GPU_FOLDER=str(tmp_path / "none"))
    assert done.status == 0, done.out
    assert [read(tmp_path / "out/summary.json")["stages"]["check"][part]["passed"] for part in parts] == [True] * 3


@pytest.mark.timeout(7_200)
def test_gpu_sh_minute_is_rehearsed(tmp_path: Path) -> None:
    """Both calls, each part at its real size; only the tests compare numbers, and so fail."""
    names = ("--work", str(tmp_path / "work"), "--patience", "10")  # no GPU is waiting
    environment = {"OUT": str(tmp_path / "out"), "GPU_FOLDER": str(tmp_path / "none")}
    command = str(ROOT / "scripts/benchmark/gpu.sh")
    first = on_null_gpu(tmp_path, command, "minute", *names, **environment)
    second = on_null_gpu(tmp_path, command, "minute", "--second", *names, **environment)
    print(first.out, second.out)

    ended = read(tmp_path / "out/summary.json")["stages"]["minute"]
    assert {name: part["said"] for name, part in ended.items() if not part["passed"]}.keys() == {"tests"}
    lines = (tmp_path / "out/minute.jsonl").read_text(encoding="utf-8").splitlines()
    verdicts = {found["name"]: found for found in map(json.loads, lines) if found["name"].startswith("decision/")}
    # A backward pass is the difference of two times, which here may be less than nothing.
    assert {name for name, found in verdicts.items() if found["verdict"] == "undecided"} <= {"decision/norm"}
    assert {found["capability"] for found in verdicts.values()} == {"9.0"}
