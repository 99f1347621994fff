"""The architecture, read from the source: imports point down, Hydra stays at the door, nothing is unsafe."""

import ast
from functools import cache
from graphlib import TopologicalSorter

import pytest

from support.paths import ROOT
from support.scripts import load_script
from support.source_code import Module, imported, imports, modules

# Each imports what stands before it, and never what stands behind: `registry` finds that by its name.
LAYERS = ("core", "tools", "integrations", "cli")


def layer(name: str) -> int:
    """Of a module, by its dotted name in the package."""
    unit = name.partition(".")[0].replace("__main__", "cli")
    return LAYERS.index(unit) if unit in LAYERS else 0


SLOW = {
    "datasets",
    "tensorboard",
    "matplotlib",
    "ctranslate2",
    "transformers",
    "onnx",
    "sacremoses",
    "sentencex",
    "mtdata",
    "trackio",
    "triton",
    "wandb",
}
TRITON = "kernels.gpu."  # the modules that need Triton: they import it as they begin, and are imported in functions
# slow packages imported inside a function, each in its one module or package; the hub's errors are read in one of two
OWNERS = {
    "ctranslate2": "integrations.engine.ctranslate2",
    "datasets": "data.source",
    "huggingface_hub": "data.hub integrations.hub",
    "matplotlib": "tools.plots",
    "mtdata": "integrations.mtdata",
    "onnxruntime": "integrations.export.onnx",
    "pyarrow": "data",
    "sacremoses": "tools.paper_bleu",
    "sentencex": "tools.sentences",
    "torch.utils.tensorboard": "tracking",
    "trackio": "integrations.trackers.service",
    "wandb": "integrations.trackers.service",
    "transformers": "integrations.export.huggingface",
    "torch.nn.attention.varlen": "model.attention",
    "transformer.kernels.gpu.attention": "kernels.packed_attention",
    "transformer.kernels.gpu.loss": "kernels.triton_loss",
    "transformer.kernels.gpu.norm": "kernels.add_norm",
    "transformer.kernels.gpu.sentences": "kernels.packed_attention",
}


@cache
def calls() -> tuple[tuple[Module, ast.Call, str], ...]:
    return tuple(
        (module, node, ast.unparse(node.func))
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
    )


def place(module: Module, node: ast.expr) -> str:
    return f"{module.path.relative_to(ROOT)}:{node.lineno}"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


# ---- layers ---------------------------------------------------------------------------------------------------------


def test_modules_import_no_layer_above_them() -> None:
    for found in imports():
        if found.ours and found.module.name:
            assert layer(found.ours) <= layer(found.module.name), f"{found.module.name} imports {found.ours}"


def test_modules_import_without_cycles() -> None:
    """Nor do they know one another's types in a circle."""
    graph: dict[str, set[str]] = {}
    for found in imports(typed=True):
        graph.setdefault(found.module.name, set()).update({found.ours} - {""})
    assert list(TopologicalSorter(graph).static_order())


def test_tools_import_one_another_without_cycles() -> None:
    """As packages, which is more than as modules: of two tools at most one needs the other."""
    graph: dict[str, set[str]] = {}
    for found in imports():
        names = [name.split(".")[1] for name in (found.module.name, found.ours) if name.startswith("tools.")]
        if len(names) == 2 and names[0] != names[1]:
            graph.setdefault(names[0], set()).add(names[1])
    assert list(TopologicalSorter(graph).static_order())


def test_packages_import_nothing() -> None:
    """The package itself apart: its public names are imported when they are used, and type checkers see them all."""
    found = [i for i in imports() if i.module.path.name == "__init__.py"]
    assert {i.module.name for i in found} == {""}, "only transformer/__init__.py imports"

    (package,) = {i.module for i in found}
    (for_checkers,) = (node for node in package.tree.body if isinstance(node, ast.If))
    assert ast.unparse(for_checkers.test) == "TYPE_CHECKING"
    checked = names_of(*for_checkers.body)
    when_used = names_of(*for_checkers.orelse)
    at_once = names_of(*(node for node in package.tree.body if node is not for_checkers))
    assert at_once == {"typing.TYPE_CHECKING", "transformer.errors.TransformerError"}
    assert checked == when_used != set()


def names_of(*nodes: ast.stmt) -> set[str]:
    """What is imported there, as it is written."""
    return {target for target, _ in imported(ast.Module(body=list(nodes), type_ignores=[]), inside=False)}


def test_modules_import_no_public_name_from_the_package() -> None:
    """They are for users: a module imports from the one that defines the name, so that the floors are seen."""
    named = {target for module in modules() for target, _ in imported(module.tree, inside=False)}
    from_package = {target for target in named if target.count(".") == 1 and target.startswith("transformer.")}
    assert from_package - {f"transformer.{module.name}" for module in modules()} == {"transformer.__version__"}


def test_modules_leave_hydra_to_the_command_line_and_compose() -> None:
    found = {i.module.name for i in imports() if i.target.partition(".")[0] in ("hydra", "omegaconf")}
    assert found == {"cli.application", "cli.submission", "config.compose", "config.expansion"}


def test_config_is_plain_python() -> None:
    plain = {"collections", "dataclasses", "enum", "reprlib", "math", "numbers", "re", "transformer", "types", "typing"}
    jobs = [module.name for module in modules() if module.name.endswith(".job")]
    allowed = dict.fromkeys(
        ("config.settings", "config.jobs", "config.primitives", "errors", "vocabulary", *jobs), plain
    )
    allowed["terminal"] = plain | {"copy", "logging", "unicodedata"}
    allowed["registry"] = plain | {"functools", "importlib", "json", "pathlib", "shlex"}
    allowed["plugins"] = plain | {"contextlib", "hashlib", "pathlib"}
    allowed["config.foreign"] = plain | {"functools", "pathlib"}
    allowed["config.keys"] = plain | {"difflib", "keyword", "os", "pathlib", "shlex"}
    for name, packages in allowed.items():
        targets = {found.target.partition(".")[0] for found in imports() if found.module.name == name}
        assert targets <= packages, name
        ours = {found.ours for found in imports() if found.module.name == name and found.ours}
        assert ours <= allowed.keys(), f"{name} imports more than plain Python"


def test_modules_import_only_commands_public_names_and_slow_packages_in_functions() -> None:
    for found in imports():
        if found.inside and found.module.unit not in ("cli", ""):
            owners = next((owners.split() for name, owners in OWNERS.items() if found.target.startswith(name)), [])
            is_owner = not {found.module.name, found.module.unit}.isdisjoint(owners)
            assert is_owner, f"{found.module.name} imports {found.target} inside a function"
        if found.inside and found.module.unit == "cli":
            assert found.module.name in ("cli.main", "cli.commands"), found.module.name
            assert found.ours, f"{found.module.name} imports {found.target} inside a function"


def test_modules_import_slow_packages_inside_functions() -> None:
    slow = [i for i in imports() if i.target.partition(".")[0] in SLOW or i.target.startswith(tuple(OWNERS))]
    of_triton = ("triton", f"transformer.{TRITON}")
    slow = [i for i in slow if not (i.module.name.startswith(TRITON) and i.target.startswith(of_triton))]
    assert [f"{i.module.name}: {i.target}" for i in slow if not i.inside] == []


def test_help_waits_for_no_command_and_not_for_hydra() -> None:
    """What is imported before a command is chosen: the command line's own modules, and plain Python below them."""
    entry = ("cli.main", "cli.overrides", "cli.commands")
    eager = {i.ours for i in imports() if i.module.name in entry and not i.inside and i.ours}
    assert eager == {
        *("cli.commands", "cli.overrides", "config.jobs", "config.keys", "config.primitives", "config.settings"),
        *("errors", "plugins", "registry", "terminal"),
    }


def test_modules_leave_standard_output_to_the_command_line() -> None:
    for module in modules():
        if module.unit != "cli":
            assert "sys.stdout" not in module.text, module.name


# ---- gates ----------------------------------------------------------------------------------------------------------

FORBIDDEN_IMPORTS = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml")
FORBIDDEN_CALLS = (
    "eval",
    "exec",
    "compile",
    "__import__",
    "importlib.import_module",
    "os.system",
    "os.popen",
    "print",
    "torch.load",
    "torch.save",
    "yaml.load",
    "hydra.utils.instantiate",
    "hydra.utils.call",
    "hydra.utils.get_method",
    "hydra.utils.get_class",
    "instantiate",
)


MEASURE_YAML = {("config.expansion", f"yaml.{name}") for name in ("SafeLoader", "YAMLError", "compose")}  # makes nodes


def test_modules_import_nothing_that_executes_data() -> None:
    bad = [
        i
        for i in imports()
        if (i.target.partition(".")[0] in FORBIDDEN_IMPORTS or i.target.startswith("hydra.utils"))
        and (i.module.name, i.target) not in MEASURE_YAML
    ]
    assert [f"{i.module.name}: {i.target}" for i in bad] == []


def test_modules_call_nothing_unsafe_or_loud() -> None:
    """One pickle is read, a published one, by the loader that makes tensors alone."""
    found = [(module, call, name) for module, call, name in calls() if name in FORBIDDEN_CALLS]
    (pickle,) = [
        call for module, call, name in found if (module.name, name) == ("integrations.published.marian", "torch.load")
    ]
    assert ast.unparse(keyword(pickle, "weights_only") or pickle) == "True"
    assert [f"{place(module, call)} {name}" for module, call, name in found if call is not pickle] == []
    for module, call, _ in calls():
        assert keyword(call, "shell") is None, place(module, call)
        assert keyword(call, "allow_pickle") is None, place(module, call)
        assert call is pickle or keyword(call, "weights_only") is None, place(module, call)


STARTS = ("subprocess.", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "pty.", "multiprocessing.")


def test_modules_start_no_process_but_git_corpora_trackers_jobs_and_the_judges_of_a_command_line() -> None:
    """So nothing that a run directory, a checkpoint or a data set holds is ever run as a command."""
    starts = [(module.name, name) for module, _, name in calls() if name.startswith(STARTS)]
    starters = {
        **{"cli.command_job": ["Popen"], "integrations.mtdata": ["Popen"]},
        **{"integrations.trackers.sink": ["Popen"], "machine": ["run"]},
        **{"tools.program": ["Popen", "run"], "tools.program_process": ["Popen"]},
    }
    assert sorted(starts) == [(name, f"subprocess.{call}") for name, calls in starters.items() for call in calls]
    importers = {found.module.name for found in imports() if found.target.startswith(("subprocess", "pty"))}
    assert importers == starters.keys()
    for starter, program in {"integrations.mtdata": "__name__", "cli.command_job": "'transformer'"}.items():
        (command,) = [
            call.args[0] for module, call, name in calls() if module.name == starter and name.startswith(STARTS)
        ]
        assert ast.unparse(command).startswith(f"[sys.executable, '-P', '-m', {program}, ")


def test_judges_are_started_by_the_job_of_evaluate_alone() -> None:
    """Its commands are typed, or in a file that is named: `judge_all` gets `job.scorer`, which nothing else sets."""
    started = [(module.name, ast.unparse(call.args[0])) for module, call, name in calls() if name.endswith("judge_all")]
    assert started == [("evaluation.judgements", "job.scorer")]
    inside = {
        name for module, _, name in calls() if module.name != "integrations.judges" and "judge" in name.split(".")
    }
    assert inside == set(), "`judge` is called by `judge_all` alone"
    set_in = {module.name for module, call, _ in calls() if keyword(call, "scorer") is not None}
    assert set_in <= {"cli.commands", "tools.paper_bleu"}, "a scorer of paper_bleu is a function"


def test_modules_call_zip_strict() -> None:
    for module, call, name in calls():
        if name == "zip":
            strict = keyword(call, "strict")
            assert isinstance(strict, ast.Constant), place(module, call)
            assert strict.value is True, place(module, call)


def test_modules_end_lines_at_the_newline_only() -> None:
    assert [place(module, call) for module, call, name in calls() if name.endswith(".splitlines")] == []


NOT_FILES = ("os.open", "Store.open", "cls.open")


def test_modules_open_text_files_with_an_encoding() -> None:
    opened = 0
    for module, call, name in calls():
        method = name.rpartition(".")[2]
        if method in ("read_text", "write_text"):
            opened += 1
            assert keyword(call, "encoding"), place(module, call)
        if method in ("open", "fdopen", "FileHandler") and name not in NOT_FILES:
            opened += 1
            is_method = name not in ("open", "io.open", "gzip.open", "os.fdopen", "logging.FileHandler")
            modes = call.args[0 if is_method else 1 : 1 if is_method else 2]
            mode = keyword(call, "mode") or (modes[0] if modes else ast.Constant("rb" if name == "gzip.open" else "r"))
            is_binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
            assert is_binary or keyword(call, "encoding"), place(module, call)
    assert opened >= 8, "the gate no longer sees the calls"


def test_modules_leave_nothing_to_do() -> None:
    for module in modules():
        for word in "TODO", "FIXME", "XXX", "NotImplementedError", "breakpoint(", "pdb":
            assert word not in module.text, f"{module.name}: {word}"


def test_modules_say_what_they_are() -> None:
    """Empty packages apart: in at most a dozen lines."""
    openings = {module.name: ast.get_docstring(module.tree) for module in modules() if module.text}
    assert [name for name, opening in openings.items() if not opening] == []
    assert [name for name, opening in openings.items() if opening and opening.count("\n") >= 12] == []


def test_modules_have_classes_and_public_functions_that_say_what_they_are() -> None:
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = [(module, node) for module in modules() for node in module.tree.body if isinstance(node, kinds)]
    public = [(module, node) for module, node in nodes if not (node.name.startswith("_") or is_overload(node))]
    assert [f"{module.name}.{node.name}" for module, node in public if not ast.get_docstring(node)] == []


def is_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether it only tells type checkers of one way to call the function that follows."""
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def test_modules_have_no_function_that_takes_whatever_comes() -> None:
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef):
                assert node.args.kwarg is None, f"{module.name}.{node.name} takes **{node.args.kwarg}"


def test_sizes_are_those_of_every_python() -> None:
    """From 3.12 on, an f-string is several tokens to Python, also one inside another."""
    assert load_script("sizes").tokens_by_line("x = f\"a{b}c{f'{d}' if e else g!r:>{h}}\"\ny = 1\n") == {1: 3, 2: 3}


@pytest.mark.ci
def test_contributing_says_how_much_code_there_is() -> None:
    sizes = load_script("sizes")
    said = sizes.sizes_in((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    remedy = "bring the table up to date: python scripts/sizes.py --write"
    assert said == pytest.approx(sizes.sizes_of_tree(), rel=0.05), remedy
