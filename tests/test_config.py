"""The config: what is read, what wins, and the exact sentence for every mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic.config import Checkpoint, Config, config_from, load_config, parse_size
from elastic.errors import ConfigError

ROOT = Path(__file__).parent.parent
LEAST = "job: my_job:job\n"
OPEN = {"params", "storage_options"}


def write(folder: Path, text: str | bytes = LEAST) -> str:
    path = folder / "my-job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refusal(call: Any, *args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_only_the_job_is_required(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), env={})
    assert config.name == "my-job"
    assert config.job == "my_job:job"
    assert config.folder == str(tmp_path)
    assert config.train.microbatches == 8
    assert config.cluster.endpoints == ()
    assert config.checkpoint.url_in("/runs/a") == "/runs/a/checkpoints"


def test_the_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_config("my-job.yaml", env={}).folder == str(tmp_path)
    assert config_from({"name": "a", "job": "a:b"}).folder == str(tmp_path)


def test_the_readme_lists_every_key_with_its_default() -> None:
    text = next(block for block in (ROOT / "README.md").read_text().split("```yaml")[1:] if "detection:" in block)
    documented = yaml.safe_load(text.split("```")[0])
    documented["name"] = "name"
    config = config_from({"name": "name", "job": documented["job"]})
    actual = config.to_dict()
    del actual["folder"]
    assert documented == actual


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_are_named_after_their_file(path: Path) -> None:
    config = load_config(path, env={})
    assert config.name == path.stem
    assert config.train.microbatches >= config.cluster.nodes or config.cluster.device_memory


def test_the_example_config_shows_every_key() -> None:
    def keys(mapping: dict[str, Any]) -> dict[str, Any]:
        return {k: keys(v) if isinstance(v, dict) and k not in OPEN else None for k, v in mapping.items()}

    shown = yaml.safe_load((ROOT / "configs" / "gpt-bytes.yaml").read_text())
    actual = load_config(ROOT / "configs" / "gpt-bytes.yaml", env={}).to_dict()
    del actual["folder"]
    assert keys(shown) == keys(actual)


def test_a_config_is_frozen() -> None:
    config = config_from({"name": "a", "job": "a:b"})
    with pytest.raises(ValidationError):
        config.train.steps = 3


def test_it_travels_as_json() -> None:
    config = config_from(
        {
            "name": "a",
            "job": "a:b",
            "params": {"text": ["x", None], "deep": {"rate": 1e-3}},
            "train": {"clip_norm": None},
            "cluster": {"device_memory": "24MiB", "etcd": "h1:2379,h2:2379", "ray": "auto"},
            "detection": {"progress": 4},
        },
        folder="/somewhere",
    )
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.folder == "/somewhere"
    assert again.cluster.endpoints == ("h1:2379", "h2:2379")
    assert refusal(Config.from_dict, {"job": "a:b"}).message == "config: folder is missing"


def test_changing_the_source_changes_no_config() -> None:
    params = {"widths": [1, 2]}
    config = config_from({"name": "a", "job": "a:b", "params": params})
    params["widths"].append(3)
    assert config.params == {"widths": [1, 2]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-2.5E+4", -25000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("10", 10),
        ("0x10", 16),
        ("010", "010"),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("10.0.0.1:6379", "10.0.0.1:6379"),
        ("1e5x", "1e5x"),
        ("1.2.3", "1.2.3"),
        ("true", True),
        ("null", None),
        ("[1, a]", [1, "a"]),
    ],
)
def test_yaml_without_its_traps(text: str, value: object) -> None:
    config = config_from({"name": "a", "job": "a:b"}, overrides=[f"params.x={text}"])
    assert config.params["x"] == value
    assert type(config.params["x"]) is type(value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("{run_dir}/c", "{run_dir}/c"),
        ("s3://bucket/c", "s3://bucket/c"),
        ("/abs/c", "/abs/c"),
        ("c/../d", "/folder/d"),
        ("~/c", os.path.expanduser("~/c")),
    ],
)
def test_a_relative_checkpoint_path_starts_at_the_folder(url: str, expected: str) -> None:
    config = config_from({"name": "a", "job": "a:b", "checkpoint": {"url": url}}, folder="/folder")
    assert config.checkpoint.url == expected


def test_only_the_run_dir_is_filled_in() -> None:
    assert Checkpoint(url="{run_dir}/{run_dir}").url_in("/a{b}") == "/a{b}//a{b}"


# --- Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24MiB", 24 * 2**20),
        ("1 KiB", 1024),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("3MB", 3 * 10**6),
        ("4KB", 4000),
        ("512B", 512),
        ("4096", 4096),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    for given_size in (text, size):
        config = config_from({"name": "a", "job": "a:b", "cluster": {"device_memory": given_size}})
        assert config.cluster.device_memory == size


@pytest.mark.parametrize("text", ["", "MiB", "24Mib", "24 mb", "-1KB", "1e3", "1,5GB", "0x10", "24MiBs", "٣KB x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 24MiB"):
        parse_size(text)


@given(st.integers(0, 2**60), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_a_size_is_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * 1024 ** (["KiB", "MiB", "GiB"].index(unit) + 1)


# --- Overrides --------------------------------------------------------------------------------------------------------


def test_the_later_wins(tmp_path: Path) -> None:
    path = write(tmp_path, LEAST + "train: {steps: 1, seed: 1, threads: 1}\n")
    env = {"ELASTIC_TRAIN__STEPS": "2", "ELASTIC_TRAIN__SEED": "2"}
    config = load_config(path, ["train.seed=3", "train.seed=4"], env)
    assert (config.train.threads, config.train.steps, config.train.seed) == (1, 2, 4)


def test_the_environment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TRAIN__STEPS", "7")
    assert load_config(write(tmp_path)).train.steps == 7
    assert config_from({"name": "a", "job": "a:b"}).train.steps == 200


def test_overrides_reach_any_depth_and_any_type(tmp_path: Path) -> None:
    env = {"ELASTIC_CHECKPOINT__STORAGE_OPTIONS__CLIENT__PORT": "1", "ELASTIC_PARAMS__LAYERS": "[1, 2]"}
    overrides = ["params.a.b=x=y", "train={steps: 3}", "train.seed=1", "train.clip_norm=", "name=other"]
    config = load_config(write(tmp_path, LEAST + "params:\n"), overrides, env)
    assert config.params == {"layers": [1, 2], "a": {"b": "x=y"}}
    assert config.checkpoint.storage_options == {"client": {"port": 1}}
    assert (config.train.steps, config.train.seed, config.train.clip_norm) == (3, 1, None)
    assert config.name == "other"


def test_other_variables_are_left_alone(tmp_path: Path) -> None:
    env = {"ELASTIC_FOO": "1", "ELASTICSEARCH__X": "1", "elastic_train__steps": "1", "X_ELASTIC_TRAIN__STEPS": "1"}
    assert load_config(write(tmp_path), env=env).train.steps == 200


# --- Mistakes in the file ---------------------------------------------------------------------------------------------

FILES: list[tuple[str | bytes, str]] = [
    ("", "{file} is empty"),
    ("# nothing\n", "{file} is empty"),
    ("- a\n", "{file} is not a mapping of keys to values but a list"),
    ("job\n", "{file} is not a mapping of keys to values but 'job'"),
    ("job: [a\nb: c\n", "{file} is not valid YAML at line 2, column 2: expected ',' or ']', but got ':'"),
    ("job: a:b\njob: c:d\n", "{file} is not valid YAML at line 2, column 1: 'job' is given twice"),
    ("a: 1\nb: \x07\n", "{file} is not valid YAML at line 2, column 4: character U+0007 is not allowed"),
    ("a: 1\n---\nb: 1\n", "{file} is not valid YAML at line 2, column 1: but found another document"),
    ("a: !!int x\n", "{file} is not valid YAML: invalid literal for int() with base 10: 'x'"),
    (b"job: \xff\n", "{file} is not UTF-8 text: byte 5 is wrong"),
    ("a: &a [*a]\n", "{file} contains itself, or is nested too deeply"),
    ("a: " + "[" * 10_000, "{file} contains itself, or is nested too deeply"),
    ("1: a\n", "{file}: it has the key 1, and keys must be text"),
    ("params: {no: a}\n", "{file}: params has the key false, and keys must be text"),
    ("params: {x: !!set {a}}\n", "{file}: params.x holds a set, which a config cannot carry"),
    ("name: a\n", "{file}: job is missing"),
    ("jbo: a:b\n", "{file}: unknown key jbo; did you mean job?"),
    (LEAST + "train: {step: 1}\n", "{file}: unknown key train.step; did you mean train.steps?"),
    (LEAST + "steps: 1\n", "{file}: unknown key steps; did you mean train.steps?"),
    (LEAST + "train: {nodes: 1}\n", "{file}: unknown key train.nodes; did you mean cluster.nodes?"),
    (LEAST + "colour: red\n", "{file}: unknown key colour"),
    (LEAST + "folder: /x\n", "{file}: unknown key folder"),
    (LEAST + "train: {steps: x, sed: 1}\n", "{file}: unknown key train.sed; did you mean train.seed?"),
    (LEAST + "train:\n", "{file}: train must be a mapping of keys to values, not null"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=lambda value: repr(value)[:30])
def test_a_mistake_in_the_file(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    assert refusal(load_config, path, env={}).message == message.format(file=path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = refusal(load_config, tmp_path / "none.yaml", env={})
    assert missing.message == f"{tmp_path}/none.yaml: no such file"
    assert missing.hint == "`elastic init NAME` writes a config to start from"
    assert refusal(load_config, tmp_path, env={}).message == f"{tmp_path} is a folder, not a config file"
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert refusal(load_config, loop, env={}).message == f"{loop} cannot be read: Too many levels of symbolic links"


def test_a_file_whose_name_is_no_name(tmp_path: Path) -> None:
    path = tmp_path / "my job.yaml"
    path.write_text(LEAST)
    error = refusal(load_config, path, env={})
    assert error.message == (
        f"{path}: name must be at most 100 letters, digits, '.', '_' and '-', the first neither '.' nor '-',"
        " not 'my job'"
    )
    assert error.hint == "without a name in the file, the job is called after the file"


# --- Mistakes in a value ----------------------------------------------------------------------------------------------

RULES = {
    "mapping": "must be a mapping of keys to values, not",
    "name": "must be at most 100 letters, digits, '.', '_' and '-', the first neither '.' nor '-', not",
    "job": "must be module:function or path/to/file.py:function, not",
    "size": "must be a size such as 24MiB, 1GB or a number of bytes, not",
    "etcd": "must be 'embedded' or host:port[,host:port…], not",
    "ray": "must be 'local', 'auto' or the host:port of a cluster, not",
    "url": "must be a path or a URL, with no other placeholder than {run_dir}, not",
    "progress": "must be 'auto' or a number of seconds above 0, not",
}
VALUES: list[tuple[str, object, str]] = [
    ("name", 7, "name must be text, not 7"),
    ("name", "", f"name {RULES['name']} ''"),
    ("name", "..", f"name {RULES['name']} '..'"),
    ("name", "a/b", f"name {RULES['name']} 'a/b'"),
    ("name", "a\n", f"name {RULES['name']} 'a\\n'"),
    ("name", "x" * 101, f"name {RULES['name']} '{'x' * 56}…"),
    ("job", None, "job must be text, not null"),
    ("job", "my_job", f"job {RULES['job']} 'my_job'"),
    ("job", "my_job:", f"job {RULES['job']} 'my_job:'"),
    ("job", "my_job:a b", f"job {RULES['job']} 'my_job:a b'"),
    ("params", [1], f"params {RULES['mapping']} a list"),
    ("train", 5, f"train {RULES['mapping']} 5"),
    ("train.steps", 0, "train.steps must be at least 1, not 0"),
    ("train.steps", True, "train.steps must be a whole number, not true"),
    ("train.steps", "20", "train.steps must be a whole number, not '20'"),
    ("train.steps", 20.0, "train.steps must be a whole number, not 20.0"),
    ("train.steps", None, "train.steps must be a whole number, not null"),
    ("train.steps", {"a": 1}, "train.steps must be a whole number, not a mapping"),
    ("train.global_batch", 0, "train.global_batch must be at least 1, not 0"),
    ("train.global_batch", 30, "train.global_batch 30 is not a multiple of train.microbatch 4"),
    ("train.microbatch", 0, "train.microbatch must be at least 1, not 0"),
    ("train.microbatch", 64, "train.global_batch 32 is not a multiple of train.microbatch 64"),
    ("train.seed", -1, "train.seed must be at least 0, not -1"),
    ("train.seed", 2**63, "train.seed must be below 9223372036854775808, not 9223372036854775808"),
    ("train.reduction", "exat", "train.reduction must be 'exact' or 'fast', not 'exat'"),
    ("train.precision", "fp16", "train.precision must be 'fp32' or 'bf16', not 'fp16'"),
    ("train.precision", 16, "train.precision must be 'fp32' or 'bf16', not 16"),
    ("train.non_finite", "skp", "train.non_finite must be 'stop' or 'skip', not 'skp'"),
    ("train.clip_norm", 0, "train.clip_norm must be above 0, not 0"),
    ("train.clip_norm", float("inf"), "train.clip_norm must be a finite number, not inf"),
    ("train.clip_norm", float("nan"), "train.clip_norm must be a finite number, not nan"),
    ("train.clip_norm", True, "train.clip_norm must be a number, not true"),
    ("train.clip_norm", "1", "train.clip_norm must be a number, not '1'"),
    ("train.threads", 0, "train.threads must be at least 1, not 0"),
    ("cluster.nodes", 0, "cluster.nodes must be at least 1, not 0"),
    ("cluster.min_nodes", 0, "cluster.min_nodes must be at least 1, not 0"),
    ("cluster.min_nodes", 5, "cluster.min_nodes 5 is more than cluster.nodes 4"),
    ("cluster.fault_tolerance", -1, "cluster.fault_tolerance must be at least 0, not -1"),
    ("cluster.devices_per_node", 0, "cluster.devices_per_node must be at least 1, not 0"),
    (
        "cluster.devices_per_node",
        2,
        "cluster.devices_per_node is 2, and more than one device per node is not supported yet",
    ),
    ("cluster.device_memory", "24Mib", f"cluster.device_memory {RULES['size']} '24Mib'"),
    ("cluster.device_memory", 0, f"cluster.device_memory {RULES['size']} 0"),
    ("cluster.device_memory", "0KB", f"cluster.device_memory {RULES['size']} '0KB'"),
    ("cluster.device_memory", True, f"cluster.device_memory {RULES['size']} true"),
    ("cluster.device_memory", 1.5, f"cluster.device_memory {RULES['size']} 1.5"),
    ("cluster.etcd", "here", f"cluster.etcd {RULES['etcd']} 'here'"),
    ("cluster.etcd", "http://h:1", f"cluster.etcd {RULES['etcd']} 'http://h:1'"),
    ("cluster.etcd", "h:1,", f"cluster.etcd {RULES['etcd']} 'h:1,'"),
    ("cluster.etcd", "h:0", f"cluster.etcd {RULES['etcd']} 'h:0'"),
    ("cluster.etcd", "h:65536", f"cluster.etcd {RULES['etcd']} 'h:65536'"),
    ("cluster.ray", "locl", f"cluster.ray {RULES['ray']} 'locl'"),
    ("cluster.ray", "h:1", "cluster.etcd 'embedded' is for local runs only, and cluster.ray is 'h:1'"),
    ("cluster.ray", "auto", "cluster.etcd 'embedded' is for local runs only, and cluster.ray is 'auto'"),
    ("checkpoint.url", "", f"checkpoint.url {RULES['url']} ''"),
    ("checkpoint.url", "{run}/a", f"checkpoint.url {RULES['url']} '{{run}}/a'"),
    ("checkpoint.every", 0, "checkpoint.every must be at least 1, not 0"),
    ("checkpoint.keep", 0, "checkpoint.keep must be at least 1, not 0"),
    ("checkpoint.storage_options", 3, f"checkpoint.storage_options {RULES['mapping']} 3"),
    ("detection.lease_s", 0, "detection.lease_s must be at least 1, not 0"),
    ("detection.lease_s", 2.5, "detection.lease_s must be a whole number, not 2.5"),
    ("detection.progress", 0, f"detection.progress {RULES['progress']} 0"),
    ("detection.progress", "never", f"detection.progress {RULES['progress']} 'never'"),
    ("detection.progress", True, f"detection.progress {RULES['progress']} true"),
    ("detection.rollback_after_s", -1, "detection.rollback_after_s must be at least 0, not -1"),
    ("detection.orphan_s", 0, "detection.orphan_s must be above 0, not 0"),
]


@pytest.mark.parametrize(("key", "value", "message"), VALUES, ids=lambda value: str(value)[:30])
def test_a_wrong_value(key: str, value: object, message: str) -> None:
    mapping: dict[str, Any] = {"name": "a", "job": "a:b"}
    section, _, rest = key.rpartition(".")
    if section:
        mapping[section] = {rest: value}
    else:
        mapping[key] = value
    assert refusal(config_from, mapping, source="here").message == f"here: {message}"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("train.reduction", "exat", "did you mean exact?"),
        ("train.precision", "float", ConfigError.advice),
        ("cluster.etcd", "here", "example: etcd: 10.0.0.1:2379,10.0.0.2:2379"),
        ("cluster.ray", "10.0.0.1:6379", "give the host:port of an etcd that all nodes can reach"),
        ("cluster.devices_per_node", "8", "set it to 1 and use one node per device"),
        ("colour", "red", "known keys: name, job, params, train, cluster, checkpoint, detection"),
        (
            "detection",
            "{x: 1}",
            "known keys: detection.lease_s, detection.progress, detection.rollback_after_s, detection.orphan_s,"
            " detection.quarantine",
        ),
    ],
)
def test_hints(key: str, value: str, hint: str) -> None:
    assert refusal(config_from, {"name": "a", "job": "a:b"}, overrides=[f"{key}={value}"]).hint == hint


# --- Mistakes in an override ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "{file}: train.steps must be at least 1, not 0 (--set train.steps=0)"),
        ("train.step=1", "{file}: unknown key train.step; did you mean train.steps? (--set train.step=1)"),
        ("train={step: 1}", "{file}: unknown key train.step; did you mean train.steps? (--set train={{step: 1}})"),
        (
            "train.microbatch=5",
            "{file}: train.global_batch 32 is not a multiple of train.microbatch 5 (--set train.microbatch=5)",
        ),
        ("train.steps", "--set 'train.steps' is not of the form section.key=value"),
        ("=1", "--set '=1' is not of the form section.key=value"),
        ("train..steps=1", "--set 'train..steps=1' is not of the form section.key=value"),
        ("job.x=1", "{file}: job is 'my_job:job', so there is no job.x to set (--set job.x=1)"),
        (
            "params.a=[1",
            "--set params.a=[1 is not valid YAML at line 1, column 3: expected ',' or ']', but got '<stream end>'",
        ),
        ("params.a={1: 2}", "--set params.a={{1: 2}}: params.a has the key 1, and keys must be text"),
    ],
)
def test_a_mistake_in_an_override(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path)
    assert refusal(load_config, path, [override], {}).message == message.format(file=path)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ELASTIC_TRAIN__STEPS", "0", "{file}: train.steps must be at least 1, not 0 (ELASTIC_TRAIN__STEPS)"),
        (
            "ELASTIC_TRAIN__STEP",
            "1",
            "{file}: unknown key train.step; did you mean train.steps? (ELASTIC_TRAIN__STEP)",
        ),
        (
            "ELASTIC_TRIAN__STEPS",
            "1",
            "environment variable ELASTIC_TRIAN__STEPS names no section of the config;"
            " did you mean ELASTIC_TRAIN__STEPS?",
        ),
        ("ELASTIC_FOO__BAR", "1", "environment variable ELASTIC_FOO__BAR names no section of the config"),
        ("ELASTIC_TRAIN__", "1", "environment variable ELASTIC_TRAIN__ is not of the form ELASTIC_SECTION__KEY"),
        (
            "ELASTIC_PARAMS__X",
            "}",
            "ELASTIC_PARAMS__X is not valid YAML at line 1, column 1: expected the node content, but found '}}'",
        ),
    ],
)
def test_a_mistake_in_the_environment(tmp_path: Path, variable: str, value: str, message: str) -> None:
    path = write(tmp_path)
    assert refusal(load_config, path, [], {variable: value}).message == message.format(file=path)


def test_an_override_that_wins_is_the_one_to_blame(tmp_path: Path) -> None:
    env = {"ELASTIC_TRAIN__STEPS": "0"}
    assert load_config(write(tmp_path), ["train.steps=5"], env).train.steps == 5


# --- Whatever is in the file, only a ConfigError comes out ------------------------------------------------------------


@given(st.one_of(st.binary(max_size=40), st.text("{}[]:,&*!|>-#'\"\n\t 0a.e", max_size=30).map(str.encode)))
def test_no_other_error_leaks_from_a_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    try:
        load_config(path, env={})
        message = str(path)
    except ConfigError as error:
        message = error.message
    assert str(path) in message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from([
        "name", "job", "params", "train", "train.steps", "cluster.etcd", "cluster.device_memory", "checkpoint.url",
        "checkpoint.storage_options", "detection.progress",
    ]),
)  # fmt: skip
def test_no_other_error_leaks_from_a_value(value: object, key: str) -> None:
    mapping: dict[str, Any] = {"name": "a", "job": "a:b"}
    section, _, rest = key.rpartition(".")
    mapping.update({section: {rest: value}} if section else {key: value})
    try:
        config_from(mapping)
        message = "config: "
    except ConfigError as error:
        message = error.message
    assert message.startswith("config: ")
