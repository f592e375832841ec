"""Layer boundaries: the same memory layout wherever the cuts are."""

from __future__ import annotations

import pytest
import torch

from elastic.engine.stage import ALIGNMENT, boundary, canonical

BASE = torch.arange(4 * 6 * 8, dtype=torch.float32)


def unaligned(*shape):
    """Values in rows, one element past an aligned address."""
    numel = int(torch.Size(shape).numel())
    return torch.arange(numel + 1, dtype=torch.float32)[1:].view(shape)


LAYOUTS = {
    "transposed": BASE.view(4, 48).t(),
    "every other": BASE.view(8, 24)[::2],
    "columns": BASE.view(4, 6, 8)[:, :, 2:5],
    "channels last": BASE.view(1, 4, 6, 8).to(memory_format=torch.channels_last),
    "expanded": BASE[:5].expand(3, 5),
    "unaligned": unaligned(4, 5),
    "row of a batch": BASE.view(8, 24)[3:4, :5],
    "stride of a dimension of one": BASE.view(8, 24)[:, 0:1],
    "scalar": unaligned(1)[0],
}


def is_canonical(x):
    return x.stride() == torch.empty(x.shape).stride() and x.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_forward_and_backward_are_canonical(name):
    x = LAYOUTS[name]
    assert not is_canonical(x)
    assert is_canonical(canonical(x))
    assert torch.equal(canonical(x), x)
    assert is_canonical(boundary(x))

    seen = []
    leaf = torch.zeros(x.shape, requires_grad=True)
    inner = leaf * 1.0
    inner.register_hook(seen.append)
    boundary(inner).backward(x)  # a gradient of that layout
    assert torch.equal(leaf.grad, x)
    assert [is_canonical(gradient) for gradient in seen] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_canonical_is_not_copied(dtype):
    for shape in ((), (0,), (3,), (2, 0, 3), (4, 1, 5)):
        x = torch.zeros(shape, dtype=dtype)
        assert canonical(x).data_ptr() == x.data_ptr()


def test_integers_pass():
    tokens = torch.arange(24)[1:13].view(3, 4)
    out = boundary(tokens)
    assert torch.equal(out, tokens)
    assert is_canonical(out)
