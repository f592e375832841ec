"""What the README tells a reader to do, done as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.config import Config, config_from
from tests.e2e.harness import Elastic

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def block(after: str, language: str) -> str:
    """The first code block of a language after some words."""
    found = re.search(rf"```{language}\n(.*?)```", TEXT[TEXT.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def commands(title: str) -> list[list[str]]:
    """The indented command lines of a section, without their comments."""
    section = TEXT[TEXT.index(f"## {title}") :]
    section = section[: section.index("\n## ", 3)]
    lines = [line.split("#")[0].split() for line in section.splitlines() if line.startswith("    elastic ")]
    return [words[1:] for words in lines]


@pytest.fixture
def elastic(tmp_path):
    (tmp_path / "my_job.py").write_text(block("`my_job.py`:", "python"))
    (tmp_path / "my_job.yaml").write_text(block("`my_job.yaml`, beside it:", "yaml"))
    return Elastic(tmp_path)


@pytest.mark.timeout(300)
def test_the_job_of_ones_own_runs_and_resumes_as_told(elastic):
    (run,) = commands("A job of your own")
    first = elastic(*run, "--json")
    assert first.code == 0, first
    assert (first.document["state"], first.document["step"]) == ("done", 100)
    for words in commands("Stop, resume, go back"):
        ended = elastic(*words)
        assert ended.code == 0, (words, ended)
    assert elastic.left() == []
    listed = elastic("checkpoints", "ls", "runs/my_job", "--json").document["checkpoints"]
    assert {one["generation"] for one in listed} == {1, 2}


def test_a_misspelt_key_is_told_in_the_sentence_that_stands_there(elastic):
    (sentence,) = re.findall(r"^    (my_job\.yaml: unknown key .*)$", TEXT, re.MULTILINE)
    config = elastic.folder / "my_job.yaml"
    config.write_text(config.read_text().replace("steps:", "step:"))
    ended = elastic("run", "my_job.yaml")
    assert ended.code == 2
    assert sentence in " ".join(ended.err.split())


def test_the_config_shown_has_every_key_with_its_default():
    import yaml

    shown = yaml.safe_load(block("Every other key, with its default:", "yaml"))
    del shown["name"], shown["job"]
    ours = config_from({"name": "a", "job": "a:b", **shown}, folder="/").to_dict()
    assert ours == config_from({"name": "a", "job": "a:b"}, folder="/").to_dict()
    sections = {key: set(value) for key, value in shown.items() if key != "params"}
    assert sections == {key: set(ours[key]) for key in sections}
    assert {*shown, "name", "job", "folder"} == set(Config.model_fields)


def test_every_file_that_it_names_is_there():
    for name in re.findall(r"`((?:elastic|configs|docs|tests)/[\w/.*-]+)`", TEXT) + re.findall(
        r"\]\(([\w/.]+)\)", TEXT
    ):
        assert (ROOT / name).exists(), name
