"""The byte GPT: its parts, its text and its refusals. The text is a small file, so that nothing here takes long."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import JobError
from elastic.job import Job, load_job
from elastic.recipes.byte_gpt import EVAL_SAMPLES, job, read_text

SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.0}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """100 windows of nine bytes, and a few bytes that fill no window."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i % 251 for i in range(905)))
    return str(path)


def built(made: Job, seed: int = 0) -> list[nn.Module]:
    modules = []
    for i, layer in enumerate(made.layers):
        torch.manual_seed(seed + i)
        modules.append(layer.build())
    return modules


def forward(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for module in modules:
        x = module(x)
        assert x.is_contiguous()
    return x


def test_layers_and_shapes(text: str) -> None:
    made = job({**SMALL, "text": text})
    assert [layer.name for layer in made.layers] == ["embed", "block.0", "block.1", "head"]
    inputs, targets = (torch.stack(part) for part in zip(*(made.dataset[i] for i in range(3)), strict=True))
    assert inputs.shape == targets.shape == (3, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    scores = forward(built(made), inputs)
    assert scores.shape == (3, 8, 256)
    loss, weight = made.loss(scores, targets)
    assert loss.shape == ()
    assert weight == 24
    assert loss.item() / weight == pytest.approx(math.log(256), rel=0.02)


def test_a_window_is_its_bytes_and_the_next_ones(text: str) -> None:
    made = job({**SMALL, "text": text})
    inputs, targets = made.dataset[1]
    assert inputs.tolist() == list(range(9, 17))
    assert targets.tolist() == list(range(10, 18))


def test_samples_do_not_share_memory(text: str) -> None:
    made = job({**SMALL, "text": text})
    made.dataset[0][0].fill_(7)
    assert made.dataset[0][0].tolist() == list(range(8))


def test_the_last_windows_are_held_out(text: str) -> None:
    made = job({**SMALL, "text": text})
    assert made.evaluation is not None
    held_out = made.evaluation.dataset
    assert made.evaluation.samples == EVAL_SAMPLES == len(held_out)
    assert len(made.dataset) == 100 - EVAL_SAMPLES
    last = 99 * 9
    assert held_out[EVAL_SAMPLES - 1][0].tolist() == [i % 251 for i in range(last, last + 8)]
    first = (100 - EVAL_SAMPLES) * 9
    assert held_out[0][0].tolist() == [i % 251 for i in range(first, first + 8)]


def test_two_percent_of_a_long_text_are_held_out() -> None:
    made = job({**SMALL})
    assert made.evaluation is not None
    held_out, windows = len(made.evaluation.dataset), len(made.dataset) + len(made.evaluation.dataset)
    assert held_out == int(windows * 0.02)


def test_stdlib_is_the_top_level_sources_sorted_by_name() -> None:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    assert bytes(read_text(("stdlib",)).tolist()) == b"".join(path.read_bytes() for path in paths)


def test_text_may_be_a_list_with_wildcards(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    listed = (str(tmp_path / "*.txt"), (tmp_path / "c.md").as_uri())
    assert bytes(read_text(listed).tolist()) == b"a.txtb.txtc.md"


def test_the_seed_decides_the_weights(text: str) -> None:
    made = job({**SMALL, "text": text})
    first, again, other = built(made, 0), built(made, 0), built(made, 1)
    pairs = [
        (a, b, c)
        for x, y, z in zip(first, again, other, strict=True)
        for a, b, c in zip(x.parameters(), y.parameters(), z.parameters(), strict=True)
    ]
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert all(not torch.equal(a, c) for a, _, c in pairs if a.dim() >= 2)


def test_initial_weights_are_those_of_gpt_2(text: str) -> None:
    embed, block, *_ = built(job({**SMALL, "width": 128, "layers": 8, "text": text}))
    named = {**dict(embed.named_parameters()), **dict(block.named_parameters())}
    assert named["token.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert named["expand.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for residual in ("project.weight", "contract.weight"):
        assert named[residual].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert all(not p.any() for name, p in named.items() if name.endswith("bias"))


def test_no_buffers(text: str) -> None:
    assert not [name for module in built(job({**SMALL, "text": text})) for name, _ in module.named_buffers()]


def test_the_future_has_no_influence(text: str) -> None:
    modules = built(job({**SMALL, "text": text}))
    inputs = torch.arange(8).unsqueeze(0)
    changed = inputs.clone()
    changed[0, 5:] = 99
    before, after = forward(modules, inputs), forward(modules, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_dropout_is_on_in_training_only(text: str) -> None:
    modules = built(job({**SMALL, "dropout": 0.5, "text": text}))
    inputs = torch.arange(8).unsqueeze(0)
    assert not torch.equal(forward(modules, inputs), forward(modules, inputs))
    for module in modules:
        module.eval()
    assert torch.equal(forward(modules, inputs), forward(modules, inputs))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_declared(text: str, tied: bool) -> None:
    made = job({**SMALL, "tied": tied, "text": text})
    head = made.layers[-1]
    assert head.tied == ({"linear.weight": "embed.token.weight"} if tied else {})
    modules = dict(zip((layer.name for layer in made.layers), built(made), strict=True))
    owner = modules["embed"].get_parameter("token.weight")
    assert modules["head"].get_parameter("linear.weight").shape == owner.shape


def test_weighted_counts_what_is_not_whitespace(text: str) -> None:
    target = torch.tensor([list(b"a b\n\tc\r\x0b")])
    scores = torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0))
    loss, weight = job({**SMALL, "weighted": True, "text": text}).loss(scores, target)
    assert weight == 3
    visible = [0, 2, 5]
    plain, count = job({**SMALL, "text": text}).loss(scores[:, visible], target[:, visible])
    assert count == 3
    assert torch.allclose(loss, plain)


def test_weighted_survives_nothing_but_whitespace(text: str) -> None:
    loss, weight = job({**SMALL, "weighted": True, "text": text}).loss(torch.randn(1, 2, 256), torch.full((1, 2), 32))
    assert (loss.item(), int(weight)) == (0.0, 0)


def test_the_optimizer_decays_matrices_only(text: str) -> None:
    made = job({**SMALL, "text": text})
    for module in built(made):
        named = {parameter: name for name, parameter in module.named_parameters()}
        groups = made.optimizer(module.named_parameters()).param_groups
        assert {named[p] for group in groups for p in group["params"]} == set(named.values())
        for group in groups:
            assert {p.dim() >= 2 for p in group["params"]} == {group["weight_decay"] > 0}


def test_the_rate_warms_up_and_falls(text: str) -> None:
    made = job({**SMALL, "lr": 0.01, "warmup": 4, "text": text})
    assert made.lr is not None
    rates = [made.lr(step) for step in range(16)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[15] == pytest.approx(0.005)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_few_steps_learn_a_simple_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdefgh" * 200)
    made = job({**SMALL, "text": str(path), "lr": 0.01, "warmup": 5})
    modules = built(made)
    optimizers = [made.optimizer(module.named_parameters()) for module in modules]
    inputs, targets = (torch.stack(part) for part in zip(*(made.dataset[i] for i in range(8)), strict=True))
    means = []
    for step in range(30):
        loss, weight = made.loss(forward(modules, inputs), targets)
        (loss / weight).backward()
        means.append(loss.item() / weight)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = made.lr(step) if made.lr else 0
            optimizer.step()
            optimizer.zero_grad()
    assert means[-1] < means[0] / 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layer": 4}, "byte_gpt has no parameter 'layer'; did you mean 'layers'?"),
        ({"colour": "red"}, "byte_gpt has no parameter 'colour'"),
        ({"layers": 0}, "byte_gpt: layers must be at least 1, not 0"),
        ({"layers": True}, "byte_gpt: layers must be of type int, not True"),
        ({"layers": "4"}, "byte_gpt: layers must be of type int, not '4'"),
        ({"tied": 1}, "byte_gpt: tied must be of type bool, not 1"),
        ({"width": 15, "heads": 2}, "byte_gpt: width 15 is not a multiple of heads 2"),
        ({"dropout": 1}, "byte_gpt: dropout must be at least 0 and below 1, not 1"),
        ({"dropout": math.nan}, "byte_gpt: dropout must be at least 0 and below 1, not nan"),
        ({"lr": 0}, "byte_gpt: lr must be above 0, not 0"),
        ({"text": []}, "byte_gpt: text must be a path, a URL or a list of them, not []"),
        ({"text": 7}, "byte_gpt: text must be a path, a URL or a list of them, not 7"),
    ],
)
def test_a_wrong_parameter_is_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        job(params)
    assert caught.value.message == message


def test_a_text_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"byte_gpt: text '.*/none\.txt' cannot be read: ") as caught:
        job({"text": str(tmp_path / "none.txt")})
    assert "absolute path" in caught.value.hint


@pytest.mark.parametrize("size", [1, 9, EVAL_SAMPLES * 9 + 8])
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * size)
    with pytest.raises(JobError, match=f"is too short: {size} bytes make {size // 9} windows of 9 bytes"):
        job({**SMALL, "text": str(path)})


def test_wildcards_that_match_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no bytes: files are empty, or none matches"):
        job({**SMALL, "text": f"{tmp_path}/*.none"})


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(JobError, match=r"text 'nosuch://x/y' cannot be read: .*nosuch"):
        job({**SMALL, "text": "nosuch://x/y"})


def test_it_loads_by_its_reference(text: str) -> None:
    made = load_job("elastic.recipes.byte_gpt:job", {**SMALL, "text": text}, seed=0)
    assert len(made.layers) == 4
