"""The config of a job: read from YAML, overridden by the environment and the command line, checked as a whole.

    config = load_config("configs/gpt-bytes.yaml", ["train.steps=20"])
    config.train.steps, config.cluster.device_memory, config.folder

Later wins: the file, then ``ELASTIC_SECTION__KEY`` from the environment, then ``--set section.key=value``. Values of
the last two are YAML as well. A `Config` is frozen and travels as JSON through ``to_dict`` and ``from_dict``.

Every mistake is one `ConfigError` of one sentence with the file, the key and the value.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from elastic.errors import ConfigError

ENV_PREFIX = "ELASTIC_"
RUN_DIR = "{run_dir}"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) *({'|'.join(_UNITS)})")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def parse_size(text: str) -> int:
    """Bytes of a size such as ``24MiB``, ``1.5 GB`` or ``4096``.

    Raises:
        ValueError: it is not of that form.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 24MiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


# Two kinds of error of our own: a rule completes "KEY must be …, not VALUE"; a sentence stands for itself.


def _rule(rule: str, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "hint": hint})


def _sentence(sentence: str, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("sentence", "{sentence}", {"sentence": sentence, "hint": hint})


def _size(value: object) -> object:
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError:
        size = None
    if type(size) is not int or size < 1:
        raise _rule("a size such as 24MiB, 1GB or a number of bytes")
    return size


def _name(value: str) -> str:
    # The first character rules out "..", hidden folders, and names that look like an option.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", value):
        raise _rule(
            "at most 100 letters, digits, '.', '_' and '-', the first neither '.' nor '-'",
            "without a name in the file, the job is called after the file",
        )
    return value


def _job(value: str) -> str:
    if not re.fullmatch(r"[^:]+:[^\W\d]\w*", value):
        raise _rule("module:function or path/to/file.py:function")
    return value


def _is_address(value: str) -> bool:
    match = _HOST_PORT.fullmatch(value)
    return match is not None and 1 <= int(match[2]) <= 65535


def _etcd(value: str) -> str:
    if value != "embedded" and not all(map(_is_address, value.split(","))):
        raise _rule("'embedded' or host:port[,host:port…]", "example: etcd: 10.0.0.1:2379,10.0.0.2:2379")
    return value


def _ray(value: str) -> str:
    if value not in ("local", "auto") and not _is_address(value.removeprefix("ray://")):
        raise _rule("'local', 'auto' or the host:port of a cluster", "example: ray: 10.0.0.1:6379")
    return value


def _url(value: str) -> str:
    if not value or set(re.findall(r"\{[^}]*\}", value)) - {RUN_DIR}:
        raise _rule(f"a path or a URL, with no other placeholder than {RUN_DIR}")
    return value


def _progress(value: object) -> object:
    if value == "auto" or (type(value) in (int, float) and 0 < value < math.inf):  # type: ignore[operator]
        return value
    raise _rule("'auto' or a number of seconds above 0")


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size)]


class _Section(BaseModel):
    # Strict: `steps: true` and `steps: "20"` are mistakes, not numbers.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Train(_Section):
    """What is computed; together with ``job`` and ``params`` it decides the bits."""

    steps: Count = 200
    global_batch: Count = 32
    microbatch: Count = 4
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    reduction: Literal["exact", "fast"] = "exact"
    precision: Literal["fp32", "bf16"] = "fp32"
    clip_norm: Positive | None = 1.0
    threads: Count = 1
    non_finite: Literal["stop", "skip"] = "stop"

    @property
    def microbatches(self) -> int:
        """Microbatches of one step, over all pipelines."""
        return self.global_batch // self.microbatch

    @model_validator(mode="after")
    def _divides(self) -> Train:
        if self.global_batch % self.microbatch:
            raise _sentence(
                f"train.global_batch {self.global_batch} is not a multiple of train.microbatch {self.microbatch}"
            )
        return self


class Cluster(_Section):
    """Where it is computed; ``nodes`` counts those of a local run only."""

    nodes: Count = 4
    min_nodes: Count = 1
    fault_tolerance: Annotated[int, Field(ge=0)] = 1
    devices_per_node: Count = 1
    device_memory: Size | None = None
    ray: Annotated[str, AfterValidator(_ray)] = "local"
    etcd: Annotated[str, AfterValidator(_etcd)] = "embedded"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The ``host:port`` of every etcd member; empty when etcd is embedded."""
        return () if self.etcd == "embedded" else tuple(self.etcd.split(","))

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        if self.devices_per_node != 1:
            raise _sentence(
                f"cluster.devices_per_node is {self.devices_per_node}, and more than one device per node is not"
                " supported yet",
                "set it to 1 and use one node per device",
            )
        if self.min_nodes > self.nodes:
            raise _sentence(f"cluster.min_nodes {self.min_nodes} is more than cluster.nodes {self.nodes}")
        if self.etcd == "embedded" and self.ray != "local":
            raise _sentence(
                f"cluster.etcd 'embedded' is for local runs only, and cluster.ray is {self.ray!r}",
                "give the host:port of an etcd that all nodes can reach",
            )
        return self


class Checkpoint(_Section):
    """Where snapshots go, every how many steps, and how many are kept."""

    url: Annotated[str, AfterValidator(_url)] = f"{RUN_DIR}/checkpoints"
    every: Count = 50
    keep: Count = 3
    storage_options: Mapping[str, Any] = {}

    def url_in(self, run_dir: str) -> str:
        """The URL of a run that lives in ``run_dir``."""
        return self.url.replace(RUN_DIR, run_dir)


class Detection(_Section):
    """How long silence, standstill and a missing copy are borne."""

    lease_s: Count = 2  # etcd counts leases in whole seconds
    progress: Annotated[float | Literal["auto"], BeforeValidator(_progress)] = "auto"
    rollback_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 15.0
    orphan_s: Positive = 300.0
    quarantine: bool = True


class Config(_Section):
    """One job. ``folder`` is no key of the file: it is where the file lies, and where relative paths in it start."""

    name: Annotated[str, AfterValidator(_name)]
    job: Annotated[str, AfterValidator(_job)]
    params: Mapping[str, Any] = {}
    train: Train = Train()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    detection: Detection = Detection()
    folder: str

    def to_dict(self) -> dict[str, Any]:
        """Everything, defaults and folder included, as JSON can carry it."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Config:
        """The config that ``to_dict`` came from.

        Raises:
            ConfigError: it is none, perhaps of another version.
        """
        if not isinstance(mapping.get("folder"), str):
            raise ConfigError("config: folder is missing")
        keys = {key: value for key, value in mapping.items() if key != "folder"}
        return config_from(keys, folder=mapping["folder"])


_KEYS = [key for key in Config.model_fields if key != "folder"]
_SECTIONS = {
    "train": list(Train.model_fields),
    "cluster": list(Cluster.model_fields),
    "checkpoint": list(Checkpoint.model_fields),
    "detection": list(Detection.model_fields),
}


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ
) -> Config:
    """Reads the file at ``path``.

    Args:
        overrides: what the command line gives as ``--set``, each ``section.key=value``.
        env: variables ``ELASTIC_SECTION__KEY`` override the file; a key is lower-cased.

    Raises:
        ConfigError: the file cannot be read, or it or an override is wrong.
    """
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", "`elastic init NAME` writes a config to start from") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a config file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start} is wrong") from None
    mapping = _parse_yaml(text, str(path))
    if mapping is None:
        raise ConfigError(f"{path} is empty", "the least a config needs is `job: module:function`")
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path} is not a mapping of keys to values but {_show(mapping)}")
    return config_from(
        mapping, folder=file.absolute().parent, name=file.stem, overrides=overrides, env=env, source=str(path)
    )


def config_from(
    mapping: Mapping[str, Any],
    *,
    folder: str | os.PathLike[str] = ".",
    name: str | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    source: str = "config",
) -> Config:
    """A config from what a YAML file would hold.

    Args:
        folder: where relative paths start.
        name: the job's name when ``mapping`` has none.
        env: as in `load_config`; by default the environment has no say.
        source: how errors call ``mapping``.

    Raises:
        ConfigError: ``mapping`` or an override is wrong.
    """
    folder = os.path.abspath(folder)
    try:
        tree = _plain(mapping, "", source)
    except RecursionError:
        raise ConfigError(f"{source} contains itself, or is nested too deeply") from None
    origins: dict[str, str] = {}  # key path → what set it, other than the mapping itself
    for variable, keys in _env_keys(env or {}):
        _set(tree, keys, env[variable] if env else "", variable, source, origins)
    for override in overrides:
        path, equals, value = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"--set {override!r} is not of the form section.key=value", "example: train.steps=20")
        _set(tree, keys, value, f"--set {override}", source, origins)
    if "folder" in tree:
        raise _unknown_key(["folder"], source, origins)
    if name is not None:
        tree.setdefault("name", name)
    try:
        config = Config.model_validate({**tree, "folder": folder})
    except ValidationError as error:
        # Unknown keys first: a misspelt key is why another one is missing.
        errors = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise _explain(errors[0], source, origins) from None
    checkpoint = config.checkpoint.model_copy(update={"url": _anchor(config.checkpoint.url, folder)})
    return config.model_copy(update={"checkpoint": checkpoint})


def _anchor(url: str, folder: str) -> str:
    """A relative path starts at the config's folder, since the processes of a run share no working folder."""
    url = os.path.expanduser(url)
    if "://" in url or "::" in url or url.startswith(RUN_DIR) or os.path.isabs(url):
        return url
    return os.path.normpath(os.path.join(folder, url))


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML with its traps closed: a key given twice is an error, 1e-3 a number, 2026-01-31 and 12:30 are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it so
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":timestamp", ":float", ":int"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def _parse_yaml(text: str, source: str, hint: str = "") -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source} is not valid YAML{where}: {error.problem or error.context}", hint) from None
    except yaml.reader.ReaderError as error:
        line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
        raise ConfigError(
            f"{source} is not valid YAML at line {line}, column {column}: character U+{ord(text[error.position]):04X}"
            " is not allowed",
            hint,
        ) from None
    except RecursionError:
        raise ConfigError(f"{source} contains itself, or is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # a tag that does not fit, such as `!!int x`
        raise ConfigError(f"{source} is not valid YAML: {error}", hint) from None


def _plain(value: Any, path: str, source: str) -> Any:
    """A deep copy made of what JSON knows; tuples become lists."""
    if isinstance(value, Mapping):
        out = {}
        for key, item in value.items():
            if not isinstance(key, str):
                where = f"{path} has the key" if path else "it has the key"
                raise ConfigError(f"{source}: {where} {_show(key)}, and keys must be text", "put it in quotes")
            out[key] = _plain(item, _join(path, key), source)
        return out
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", source) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{source}: {path} holds a {type(value).__name__}, which a config cannot carry")


# --- Overrides --------------------------------------------------------------------------------------------------------


def _env_keys(env: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """The variables that address a key, with its path; ``ELASTIC_X`` without a double underscore is not ours."""
    found = []
    for variable in sorted(env):
        section, two, rest = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        if not variable.startswith(ENV_PREFIX) or not two:
            continue
        sections = ["params", *_SECTIONS]
        if section not in sections:
            near = difflib.get_close_matches(section, sections, n=1)
            better = f"; did you mean {ENV_PREFIX}{near[0].upper()}__{rest.upper()}?" if near else ""
            raise ConfigError(
                f"environment variable {variable} names no section of the config{better}",
                f"sections are {', '.join(sections)}",
            )
        keys = [section, *rest.split("__")]
        if not all(keys):
            raise ConfigError(f"environment variable {variable} is not of the form {ENV_PREFIX}SECTION__KEY")
        found.append((variable, keys))
    return found


def _set(tree: dict[str, Any], keys: list[str], text: str, origin: str, source: str, origins: dict[str, str]) -> None:
    quotes = f"text with YAML's own signs in it needs quotes, which the shell must let through: '\"{text}\"'"
    value = _plain(_parse_yaml(text, origin, quotes), ".".join(keys), origin)
    at: Any = tree
    for depth, key in enumerate(keys[:-1]):
        if at.get(key) is None:
            at[key] = {}
        at = at[key]
        if not isinstance(at, dict):
            above = ".".join(keys[: depth + 1])
            raise ConfigError(f"{source}: {above} is {_show(at)}, so there is no {'.'.join(keys)} to set ({origin})")
    at[keys[-1]] = value
    origins[".".join(keys)] = origin


# --- Errors -----------------------------------------------------------------------------------------------------------

_ALIKE = 0.65  # of difflib's ratio: "jbo" is meant to be "job", "colour" is not meant to be "cluster"
_RULES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    "model_type": "a mapping of keys to values",
    "mapping_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
}


def _explain(error: ErrorDetails, source: str, origins: Mapping[str, str]) -> ConfigError:
    """Pydantic's first complaint as one sentence of ours."""
    keys = [str(key) for key in error["loc"]]
    path, kind, context = ".".join(keys), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(keys, source, origins)
    if kind == "missing":
        return ConfigError(f"{source}: {path} is missing", "example: job: my_job:job" if path == "job" else "")
    hint = context.get("hint", "")
    if kind == "sentence":
        by = [origins[key] for key in _blamed(path, context["sentence"]) if key in origins]
        return ConfigError(f"{source}: {context['sentence']}" + (f" ({', '.join(by)})" if by else ""), hint)
    rule = (
        context["rule"]
        if kind == "rule"
        else _RULES.get(kind, "").format(**{key: _whole(bound) for key, bound in context.items()})
    )
    value = error["input"]
    if kind == "literal_error":
        near = difflib.get_close_matches(str(value), re.findall(r"'(\w+)'", rule), n=1)
        hint = f"did you mean {near[0]}?" if near else ""
    said = f"must be {rule}, not {_show(value)}" if rule else f"is {_show(value)}: {error['msg']}"
    return ConfigError(f"{source}: {path} {said}{_set_by(path, origins)}", hint)


def _blamed(section: str, sentence: str) -> list[str]:
    """The keys of the section that a sentence speaks of."""
    return [f"{section}.{key}" for key in _SECTIONS[section] if f"{section}.{key}" in sentence]


def _unknown_key(keys: list[str], source: str, origins: Mapping[str, str]) -> ConfigError:
    path, parent, key = ".".join(keys), ".".join(keys[:-1]), keys[-1]
    siblings = _SECTIONS.get(parent, _KEYS)
    elsewhere = [f"{section}.{key}" for section, known in _SECTIONS.items() if key in known]
    near = elsewhere[:1] or [_join(parent, one) for one in difflib.get_close_matches(key, siblings, 1, _ALIKE)]
    better = f"; did you mean {near[0]}?" if near else ""
    known = "" if near else f"known keys: {', '.join(_join(parent, one) for one in siblings)}"
    return ConfigError(f"{source}: unknown key {path}{better}{_set_by(path, origins)}", known)


def _set_by(path: str, origins: Mapping[str, str]) -> str:
    """Who set a key, if not the file; a whole section may have been set at once."""
    for key in (path, path.rpartition(".")[0]):
        if key in origins:
            return f" ({origins[key]})"
    return ""


def _whole(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(value: object) -> str:
    """A value as the user wrote it, cut short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
