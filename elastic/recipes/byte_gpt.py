"""A GPT over bytes: no tokenizer, no download, any file is a training text.

    job: elastic.recipes.byte_gpt:job
    params: {layers: 6, width: 144, heads: 6, context: 128, dropout: 0.1, text: stdlib}

Read it from the bottom up: `job` puts the five parts of a `Job` together, and everything above it is plain PyTorch
that knows nothing of nodes, ranks or stages.
"""

from __future__ import annotations

import difflib
import math
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.errors import JobError
from elastic.job import Evaluation, Job, Layer, NamedParameters

BYTES = 256
EVAL_EVERY = 50  # steps
EVAL_SAMPLES = 32
HELD_OUT = 0.02  # of the windows, never fewer than EVAL_SAMPLES


@dataclass(frozen=True)
class Params:
    """What ``params:`` of the config may say.

    Args:
        layers: number of transformer blocks.
        width: size of a token's vector, a multiple of ``heads``.
        heads: attention heads per block.
        context: bytes a prediction may look back on.
        dropout: after the embedding, in the attention and after each residual branch.
        tied: the output matrix is the token embedding.
        text: ``stdlib`` (the top-level modules of Python's own library), a path or URL that fsspec can open, wildcards
            included, or a list of those. All machines must read the same bytes: with ``stdlib``, they need one
            version of Python; a path should be absolute.
        weighted: only bytes that are not whitespace count in the loss. Microbatches then weigh differently, as they
            do in every job that masks a part of its tokens.
        lr: the peak learning rate.
        warmup: steps of linear warm-up to ``lr``; after it the rate falls with the square root of the step.
    """

    layers: int = 6
    width: int = 144
    heads: int = 6
    context: int = 128
    dropout: float = 0.1
    tied: bool = False
    text: str | list[str] = "stdlib"
    weighted: bool = False
    lr: float = 4e-3
    warmup: int = 40

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Params:
        """Checks ``params`` as they come from YAML.

        Raises:
            JobError: a name is unknown, or a value has the wrong type or is out of range.
        """
        known: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        for name, value in params.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise JobError(
                    f"byte_gpt has no parameter {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                    f"it has {', '.join(known)}",
                )
            if name == "text":
                listed = value if isinstance(value, list) else [value]
                if not listed or not all(isinstance(one, str) and one for one in listed):
                    raise JobError(f"byte_gpt: text must be a path, a URL or a list of them, not {value!r}")
                continue
            kind = type(known[name])
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise JobError(f"byte_gpt: {name} must be of type {kind.__name__}, not {value!r}")
            if kind is int and value < 1:
                raise JobError(f"byte_gpt: {name} must be at least 1, not {value}")
        made = cls(**params)
        if made.width % made.heads:
            raise JobError(f"byte_gpt: width {made.width} is not a multiple of heads {made.heads}")
        if not 0 <= made.dropout < 1:
            raise JobError(f"byte_gpt: dropout must be at least 0 and below 1, not {made.dropout}")
        if not 0 < made.lr < math.inf:
            raise JobError(f"byte_gpt: lr must be above 0, not {made.lr}")
        return made


class Embed(nn.Module):
    """Bytes to vectors: what the byte is, plus where it stands."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, params.width)
        self.position = nn.Embedding(params.context, params.width)
        self.dropout = nn.Dropout(params.dropout)
        init_weights(self)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.token(text) + self.position.weight[: text.shape[1]])
        return out


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP, each added to the stream it read from."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.heads = params.heads
        self.attention_dropout = params.dropout
        self.norm_attention = nn.LayerNorm(params.width)
        self.qkv = nn.Linear(params.width, 3 * params.width)
        self.project = nn.Linear(params.width, params.width)
        self.norm_mlp = nn.LayerNorm(params.width)
        self.expand = nn.Linear(params.width, 4 * params.width)
        self.contract = nn.Linear(4 * params.width, params.width)
        self.dropout = nn.Dropout(params.dropout)
        init_weights(self)
        # 2 * layers branches add up in the stream; scaled so, its variance does not grow with the depth.
        for residual in (self.project, self.contract):
            nn.init.normal_(residual.weight, std=0.02 / math.sqrt(2 * params.layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.project(self.attend(self.norm_attention(x))))
        out: Tensor = x + self.dropout(self.contract(F.gelu(self.expand(self.norm_mlp(x)))))
        return out

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return heads.transpose(1, 2).reshape(batch, length, width)


class Head(nn.Module):
    """Vectors to one score per possible next byte."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(params.width)
        self.linear = nn.Linear(params.width, BYTES, bias=False)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


def init_weights(module: nn.Module) -> None:
    """GPT-2's: matrices from a normal distribution, biases zero; LayerNorm keeps its ones and zeros."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            nn.init.normal_(child.weight, std=0.02)
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)


class Windows:
    """Windows ``first`` to ``last`` of a text cut into pieces of ``context + 1`` bytes, side by side.

    Sample *i* is ``(input, target)``: the piece without its last byte, and without its first.
    """

    def __init__(self, text: Tensor, context: int, first: int, last: int) -> None:
        self.pieces = text[first * (context + 1) : last * (context + 1)].view(last - first, context + 1)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.pieces[index].long()
        return piece[:-1].clone(), piece[1:].clone()


@lru_cache(maxsize=1)
def read_text(sources: tuple[str, ...]) -> Tensor:
    """All bytes of the sources, one after another, as one uint8 tensor; read once per process."""
    parts = []
    for source in sources:
        if source == "stdlib":
            paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
            parts += [path.read_bytes() for path in paths]
            continue
        try:
            # Sorted, so that wildcards give every machine the same order.
            for file in sorted(fsspec.open_files(source, "rb"), key=lambda file: str(file.path)):
                with file as stream:
                    parts.append(stream.read())
        except (OSError, ValueError, ImportError) as error:
            raise JobError(
                f"byte_gpt: text {source!r} cannot be read: {error}",
                "give an absolute path or a URL that every node can open; workers do not run in your folder",
            ) from error
    text = bytearray(b"".join(parts))
    if not text:
        raise JobError(f"byte_gpt: text {', '.join(sources)!r} has no bytes: files are empty, or none matches")
    return torch.frombuffer(text, dtype=torch.uint8)


def split_text(params: Params) -> tuple[Windows, Windows]:
    """The windows to train on, and the last ones of the text, held out."""
    sources = [params.text] if isinstance(params.text, str) else params.text
    text = read_text(tuple(sources))
    windows = len(text) // (params.context + 1)
    held_out = max(EVAL_SAMPLES, int(windows * HELD_OUT))
    if windows <= held_out:
        raise JobError(
            f"byte_gpt: text {params.text!r} is too short: {len(text)} bytes make {windows} windows of"
            f" {params.context + 1} bytes, and {held_out} of them are held out",
            "give a longer text, or a smaller context",
        )
    cut = windows - held_out
    return Windows(text, params.context, 0, cut), Windows(text, params.context, cut, windows)


def byte_loss(scores: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Every byte counts once."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def visible_byte_loss(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Whitespace (space, and tab to carriage return) counts nothing, neither in the sum nor in the weight."""
    visible = ((target != 32) & ((target < 9) | (target > 13))).flatten()
    losses = F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
    return (losses * visible).sum(), visible.sum()


def adamw(named: NamedParameters) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves biases and norms alone. Its rate is set each step by `schedule`."""
    parameters = [parameter for _, parameter in named]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1.0, betas=(0.9, 0.95))


def schedule(params: Params) -> Callable[[int], float]:
    """Linear warm-up, then inverse square root: needs no total, so a run can be extended without changing its past."""

    def lr(step: int) -> float:
        return params.lr * min((step + 1) / params.warmup, math.sqrt(params.warmup / (step + 1)))

    return lr


def job(params: Mapping[str, Any]) -> Job:
    """The byte GPT; see `Params` for what can be set."""
    p = Params.parse(params)
    train, held_out = split_text(p)
    return Job(
        layers=[
            Layer("embed", lambda: Embed(p)),
            *(Layer(f"block.{i}", lambda: Block(p)) for i in range(p.layers)),
            Layer("head", lambda: Head(p), tied={"linear.weight": "embed.token.weight"} if p.tied else {}),
        ],
        loss=visible_byte_loss if p.weighted else byte_loss,
        dataset=train,
        optimizer=adamw,
        lr=schedule(p),
        evaluation=Evaluation(held_out, every=EVAL_EVERY, samples=EVAL_SAMPLES),
    )
