"""YAML and overrides to a typed, checked job, in this process: for the command line, tables, sweeps and notebooks.

    schema  <  quiet_hydra  <  recipe/NAME.yaml  <  experiment/NAME.yaml  <  overrides      merged by Hydra, later wins
      -> merged once more into a fresh schema -> the job

The schema has every key, with the paper's base model and recipe. Because of the second merge, `++key=value` cannot add
a key, and a `_target_` is an unknown key like any other. Hydra calls what it finds under its own node `hydra`, so no
file may set that: `quiet_hydra`, by which Hydra leaves no file behind, also locks the node for everything that is
merged after it. Only the user's own overrides, which come last, may change it.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    ConfigKeyError,
    GrammarParseError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ReadonlyConfigError,
)
from omegaconf.resolvers.oc import env

from transformer.arguments import list_of_texts, path_of
from transformer.config.expansion import bounded_files
from transformer.config.jobs import Job, TrainJob
from transformer.config.keys import (
    GROUPS,
    NAMED_SET,
    NAMED_TEXT,
    PLUGIN_KEY,
    as_typed,
    check_override,
    choice_meant,
    choices_of,
    did_you_mean,
    generic_key,
    groups_of,
    key_meant,
    keys_of,
    leaves,
    names_in,
    quote,
    shipped,
)
from transformer.config.settings import ExtraConfig, Metric, PairConfig
from transformer.errors import InputError, TransformerError

J = TypeVar("J", bound=Job)

log = logging.getLogger(__name__)

QUIET_HYDRA = {  # no folder, no file, no change of directory
    "run": {"dir": "."},
    "output_subdir": None,
    "job": {"chdir": False},
}


def compose_job(command: str, kind: type[J], overrides: Iterable[str], *, config_dir: str | Path | None = None) -> J:
    """The job, a `kind`, of `transformer COMMAND OVERRIDES`, as the command line composes and checks it.

    Hydra's global state is put back, so a running command may compose other jobs. Raises InputError.
    """
    # Check what can be checked without Hydra.
    if isinstance(overrides, str):
        raise InputError(f"compose takes a list of overrides: for a single one, write [{overrides!r}]")
    overrides = list_of_texts("overrides", overrides, item="key=value")
    config_dir = None if config_dir is None else path_of("config_dir", config_dir)
    for override in overrides:
        if override.startswith("-"):
            raise InputError(f"{override}: a flag is for the command line only; settings are written key=value")

    keys = keys_of(kind)
    groups = groups_of(kind)
    checked = [check_override(override, keys, groups=groups, is_multirun=False) for override in overrides]
    return compose_checked(command, kind, checked, config_dir=config_dir)


def compose_checked(command: str, kind: type[J], checked: Sequence[str], *, config_dir: str | Path | None) -> J:
    """The job of overrides that are as `check_override` gives them. Raises InputError."""
    if config_dir is not None:
        check_config_dir(command, config_dir)
        folder = quote(f"file://{Path(config_dir).absolute()}")
        checked = [f"hydra.searchpath=[{folder}]", *checked]

    with stored_configs(command, kind, checked, hydra_settings={}), _hydra_globals_set_aside():
        try:
            with hydra.initialize_config_dir(str(shipped("configs")), job_name=command, version_base="1.3"):
                config = hydra.compose(primary_config(command), list(checked), return_hydra_config=True)
        except Exception as error:
            raise composing_error(error, kind, overrides=checked) from error

        HydraConfig.instance().set_config(config)  # which keeps a copy of its node
        with read_write(config), open_dict(config):
            del config["hydra"]
        return typed_job(kind, config)


@contextmanager
def _hydra_globals_set_aside() -> Iterator[None]:
    """Set Hydra's global state aside, which a running command may own, and put it back at the end."""
    hydra_of_command = GlobalHydra.instance().hydra
    config_of_command = HydraConfig.instance().cfg
    name_of_command = JobRuntime.instance().get("name")

    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = hydra_of_command
        HydraConfig.instance().cfg = config_of_command
        JobRuntime.instance().set("name", name_of_command)


def _to_dict(config: Any) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, enum_to_str=True))


# ---- what Hydra composes from ---------------------------------------------------------------------------------------


def primary_config(command: str) -> str:
    """The name under which `stored_configs` puts the configuration that Hydra begins with."""
    return f"{command}_job"


@contextmanager
def stored_configs(
    command: str, kind: type[Job], overrides: Sequence[str], *, hydra_settings: Mapping[str, Any]
) -> Iterator[None]:
    """Put a command's configurations where Hydra finds them, for as long as the context lasts.

    `hydra_settings` are keys of the node `hydra`, beside those that keep Hydra quiet.
    """
    _register_resolvers()
    quiet = OmegaConf.create({**QUIET_HYDRA, **hydra_settings})
    OmegaConf.set_readonly(quiet, True)  # what is merged later cannot change the node; Hydra unlocks it for overrides

    # A running command may have stored its own under the same names: they are put back.
    store = ConfigStore.instance()
    names = [f"{name}.yaml" for name in _stored_names(command)]
    earlier = {name: store.repo[name] for name in names if name in store.repo}
    try:
        primary, schema, quiet_hydra = _stored_names(command)
        store.store(primary, {"defaults": _defaults(command, kind)})
        store.store(schema, _schema(kind, overrides))
        store.store(quiet_hydra, quiet, package="hydra")
        with bounded_files():
            yield
    finally:
        for name in names:
            store.repo.pop(name, None)
        store.repo.update(earlier)


def _register_resolvers() -> None:
    """What a YAML file may call: `${shipped:}`, `${optuna_direction:METRIC}`."""
    if OmegaConf.has_resolver("shipped"):
        return
    OmegaConf.register_new_resolver("shipped", lambda: str(shipped("data")))
    OmegaConf.register_new_resolver("optuna_direction", _optuna_direction)


def _optuna_direction(metric: Metric) -> str:
    """Which way is better, as Optuna's sweeper calls it."""
    return "maximize" if metric.higher_is_better else "minimize"


def _stored_names(command: str) -> tuple[str, str, str]:
    return primary_config(command), f"{command}_schema", "quiet_hydra"


def _defaults(command: str, kind: type[Job]) -> list[object]:
    """The defaults list of a command: what is merged, in this order."""
    _, schema, quiet_hydra = _stored_names(command)
    files = [{"recipe": "paper"}, {"experiment": "demo"}] if issubclass(kind, TrainJob) else []
    no_logging = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    return [schema, quiet_hydra, *files, "_self_", *no_logging]


def _schema(job: type[Job], overrides: Sequence[str]) -> Job:
    """The job with its defaults, and an entry for each set that the overrides name: its keys are new ones."""
    schema = job()
    for override in overrides:
        text = re.match(rf"{NAMED_TEXT}=", override)
        if text is not None:
            getattr(schema, text["texts"])[text["name"]] = ""
        setting = re.match(rf"{PLUGIN_KEY}=", override)
        if setting is not None:
            cast(TrainJob, schema).plugins.setdefault(setting["name"], {})[setting["key"]] = ""
        match = re.match(rf"{NAMED_SET}[^=]+=", override)
        if match is None:
            continue
        *section, group = match["group"].split(".")  # `data.test`, `data.extra`, or `test` alone under `evaluate`
        holder = cast(TrainJob, schema).data if section else schema
        getattr(holder, group)[match["name"]] = ExtraConfig() if group == "extra" else PairConfig()
    return schema


def check_config_dir(command: str, config_dir: str | Path) -> None:
    """Refuse a folder of experiments that is not there, or whose files Hydra would take for its own configuration.

    Raises InputError.
    """
    folder = Path(config_dir)
    if not os.path.isdir(folder):  # which no name is too long for
        raise InputError(f"{folder}: no such folder of experiments")
    if (folder / "hydra").exists():
        raise InputError(
            f"{folder / 'hydra'}: a folder of experiments cannot configure Hydra; remove it, or trust it with "
            "hydra.searchpath=[file://DIR] in place of --config-dir DIR"
        )
    own_names = [f"{name}.yaml" for name in _stored_names(command)]
    own_names += [f"{group}/{name}.yaml" for group in ("experiment", "recipe") for name in names_in(group, None)]
    for name in own_names:
        path = folder / name
        if path.exists() and not _is_shipped(path, name):
            raise InputError(f"{path}: the package has a configuration of this name and reads its own: rename the file")


def _is_shipped(path: Path, name: str) -> bool:
    """Whether a file is what the package has under this name, such as in a copy of its folder."""
    try:
        return (shipped("configs") / name).read_bytes() == path.read_bytes()
    except OSError:  # the package makes it at run time, or the user's is no file that can be read
        return False


# ---- from what Hydra composed to a typed job ------------------------------------------------------------------------


def typed_job(kind: type[J], composed: DictConfig) -> J:
    """What Hydra composed (without its own node) as a command's job, checked. Raises InputError."""
    try:
        _refuse_mixed_demo()
        _log_overridden_recipe(composed)
        with _environment_refused():
            plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True, throw_on_missing=True)
        job = cast(J, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), _escaped(plain))))
        job.check_plugins()
    except OmegaConfBaseException as error:
        raise InputError(_explained(error, kind, where="")) from error
    except ValueError as error:  # of the job's own checks
        raise InputError(str(error)) from error
    job.check_overrides(_task_overrides())
    return job


def _escaped(value: Any) -> Any:
    """What has been resolved, for another merge: a `${` that is still in it is text, and must not be resolved again."""
    match value:
        case dict():
            return {key: _escaped(item) for key, item in value.items()}
        case list():
            return [_escaped(item) for item in value]
        case str():
            return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value


@contextmanager
def _environment_refused() -> Iterator[None]:
    """Let no `${oc.env:NAME}` be resolved: a job is stored in run.json and every checkpoint, which people pass on.

    Nor `${hydra:NAME}`, which knows the working directory.
    """

    def refuse_hydra(name: str) -> str:
        raise ValueError(f"${{hydra:{name}}}: a run stores its settings, so Hydra's are not read: write the value out")

    def refuse(name: str, *_: object) -> str:
        raise ValueError(
            f"${{oc.env:{name}}}: settings are stored with the run, so the environment is not read: "
            "let the shell fill it in"
        )

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    OmegaConf.register_new_resolver("hydra", refuse_hydra, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)
        setup_globals()  # Hydra's resolvers


def read_yaml(path: Path, key: str, *, remedy: str) -> object:
    """What is in a YAML file of the user's own, which `key` names, without resolving anything. Raises InputError."""
    try:
        with bounded_files():
            return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{key}={path}: {error.strerror}: {remedy}") from error
    except Exception as error:  # of the YAML library, which is not ours to import
        raise InputError(f"{path}: not YAML: {'; '.join(_lines(error))}") from error


def read_commands(path: Path) -> dict[str, str]:
    """The commands of judges in a YAML file of the user's own, by their names. Raises InputError."""
    commands = read_yaml(path, "scorers", remedy="name a YAML file with lines `NAME: COMMAND`")
    texts = commands.items() if isinstance(commands, dict) else ()
    names = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
    if not texts or not all(re.fullmatch(names, str(name)) and isinstance(text, str) for name, text in texts):
        raise InputError(
            f"{path}: not a list of judges; write each as `NAME: COMMAND`; a name has letters, digits, '_' and '-' only"
        )
    return {str(name): text for name, text in texts}


def _task_overrides() -> list[str]:
    """The overrides of the command line, unresolved: what a `${` in one of them stands for is the job's affair."""
    return cast(list[str], OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))


def _refuse_mixed_demo() -> None:
    """The demo's sizes fit the demo's corpus only: another corpus under them would train a toy."""
    experiment = str(HydraConfig.get().runtime.choices.get("experiment"))
    if re.fullmatch(r"[./]*demo(\.yaml)?", experiment) is None:  # Hydra takes ./demo.yaml, too
        return
    for override in _task_overrides():
        if override.startswith(("data.train.", "data.dev.", "data.devs.", "data.extra.")):
            raise InputError(
                "data.train, data.dev, data.devs and data.extra are fixed under experiment=demo: "
                "choose experiment=little (below 50,000 pairs), small, base or big"
            )


def _log_overridden_recipe(composed: DictConfig) -> None:
    """Name the keys of the recipe asked for that the experiment overrides, with the values in force."""
    choices = HydraConfig.get().runtime.choices
    recipe = choices.get("recipe", "paper")
    if recipe == "paper":
        return  # every experiment differs from the paper somewhere: that is what it is for

    given = {override.lstrip("+").partition("=")[0] for override in _task_overrides()}
    if "recipe" not in given:
        return  # the experiment names its recipe, and differs from it on purpose
    in_force = leaves(_to_dict(composed))
    overridden = [
        f"{key}={as_typed(in_force[key])}"
        for key, value in _recipe_values(recipe).items()
        if key not in given and in_force.get(key, value) != value
    ]
    if overridden:
        experiment = choices["experiment"]
        log.info("experiment=%s overrides recipe=%s: %s", experiment, recipe, ", ".join(overridden))


def _recipe_values(recipe: str) -> dict[str, Any]:
    """The keys that the file of a recipe sets, dotted; none for a file in a package of Python's.

    As Hydra does, it takes the first folder that has the file.
    """
    sources = HydraConfig.get().runtime.config_sources
    name = f"{recipe.removesuffix('.yaml')}.yaml"
    files = [Path(source.path) / "recipe" / name for source in sources if source.schema == "file"]
    file = next((file for file in files if file.exists()), None)
    return {} if file is None else leaves(_to_dict(OmegaConf.load(file)))


# ---- errors ---------------------------------------------------------------------------------------------------------


def composing_error(error: Exception, kind: type[Job], *, overrides: Sequence[str]) -> TransformerError:
    """The error to raise where Hydra cannot compose: it is in the overrides, or in the files that they name."""
    composed = f" (composing {' '.join(overrides)})" if overrides else ""
    match error:
        case TransformerError():
            return error
        case UnicodeDecodeError():
            what = f"not UTF-8 at its byte {error.start + 1}: save it as UTF-8"
            return InputError(f"a YAML file of {' '.join(overrides)} is {what}")
        case OverrideParseException() if error.__cause__ is None:
            remedy = "it has a sign, a quote or a bracket too many, or too few"
            return InputError(f"{error.override}: not key=value as Hydra reads it: {remedy}")
        case MissingConfigException():
            group, _, name = str(error.missing_cfg_file).partition("/")
            names = names_in(group, None)
            known = error.options or names
            meant = did_you_mean(name, [*known, *names])
            return InputError(f"there is no {error.missing_cfg_file}, only {', '.join(known)}{meant}{composed}")

    cause = error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException):
        return InputError(f"{'; '.join(_lines(error))}{composed}")
    where = "".join(_lines(error)[:1]).removesuffix(":")  # ends in the override, or names the file
    override = next((override for override in overrides if where.endswith(override)), "")
    return InputError(_explained(cause, kind, where=override or where or f"composing {' '.join(overrides)}"))


def _explained(error: OmegaConfBaseException, kind: type[Job], *, where: str) -> str:
    """What OmegaConf says of a key, in one line, and what was meant by it. `where` is what is wrong, or its place."""
    keys = keys_of(kind)
    full_key = error.full_key or ""
    key = generic_key(full_key)
    match error:
        case MissingMandatoryValue():
            return f"{full_key}=???: a value is still to be given, as {full_key}=VALUE"
        case InterpolationKeyError() | GrammarParseError():
            remedy = r"; `${` begins the name of a key, and `\${` is these two characters"
        case ReadonlyConfigError():  # the lock of `quiet_hydra`
            remedy = "; a file cannot configure Hydra: remove what it sets under `hydra`"
        case ConfigKeyError() if key in GROUPS:
            remedy = "; the first line of its file must be `# @package _global_`"
        case ConfigKeyError() if key in keys:
            remedy = "; in a file keys are nested, as `train: {seed: 1}`"
        case ConfigKeyError():
            remedy = key_meant(key, keys)
        case _:
            remedy = choice_meant(str(error.value), choices_of(keys[key].kind)) if key in keys else ""
    what = "".join(_lines(error)[:1])  # the others are OmegaConf's own affair
    place = [where] if where.startswith(f"{full_key}=") else [where, full_key]
    return ": ".join(filter(None, [*place, f"{what}{remedy}"]))


def _lines(error: BaseException) -> list[str]:
    """The lines of an error's message that are not blank."""
    return [line.strip() for line in str(error).split("\n") if line.strip()]
