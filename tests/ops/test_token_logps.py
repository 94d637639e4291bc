"""The fused log-probability against the naive one: values and all gradients."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from preftune.ops import Head, naive_token_logps, sum_by_segment, token_kl, token_logps

CASES = list(
    itertools.product(
        (0, 1, 7, 13),  # T: none, one, primes, more than a chunk
        (11, 32),  # V
        (1, 4, 64),  # chunk
        ((1.0, None, False), (0.25, None, True), (1.0, 2.0, True), (1.7, 3.0, False)),  # scale, soft cap, bias
    )
)


def make(tokens, vocabulary, scale, softcap, bias, dtype, frozen):
    generator = torch.Generator().manual_seed(tokens * 100 + vocabulary)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = random(tokens, 6).requires_grad_()
    weight = random(vocabulary, 6).requires_grad_(not frozen)
    b = random(vocabulary).requires_grad_(not frozen) if bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, Head(weight, b, scale, softcap), targets, random(tokens)


def values_and_gradients(function, hidden, head, targets, incoming):
    leaves = [t for t in (hidden, head.weight, head.bias) if t is not None and t.requires_grad]
    values = function(hidden, head, targets)
    gradients = torch.autograd.grad(values, leaves, incoming.to(values.dtype))
    return [values, *gradients]


@pytest.mark.parametrize(("tokens", "vocabulary", "chunk", "form"), CASES)
@pytest.mark.parametrize("strategy", ["frozen", "keep", "recompute"])
def test_fused_equals_naive_in_float64(tokens, vocabulary, chunk, form, strategy):
    parts = make(tokens, vocabulary, *form, torch.float64, strategy == "frozen")
    asked = "auto" if strategy == "frozen" else strategy
    fused = values_and_gradients(lambda h, w, t: token_logps(h, w, t, chunk, asked), *parts)
    naive = values_and_gradients(naive_token_logps, *parts)
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", [False, True])
def test_fused_equals_naive_in_float32(frozen):
    parts = make(13, 32, 1.7, 3.0, True, torch.float32, frozen)
    fused = values_and_gradients(lambda h, w, t: token_logps(h, w, t, 4), *parts)
    naive = values_and_gradients(naive_token_logps, *parts)
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_gradcheck():
    hidden, head, targets, _ = make(5, 9, 1.3, 2.0, True, torch.float64, False)

    def function(h, w, b):
        return token_logps(h, Head(w, b, head.scale, head.softcap), targets, 2)

    assert torch.autograd.gradcheck(function, (hidden, head.weight, head.bias))


def test_a_head_that_is_a_module_gets_its_gradients():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 11)).double()
    hidden = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    targets, incoming = torch.randint(0, 11, (13,)), torch.randn(13, dtype=torch.float64)
    leaves = [hidden, *module.parameters()]
    results = []
    for function, chunk in ((token_logps, {"chunk": 4}), (naive_token_logps, {})):
        values = function(hidden, Head(module=module, softcap=2.0), targets, **chunk)
        results.append([values, *torch.autograd.grad(values, leaves, incoming)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_bfloat16_softmax_and_sum_are_float32():
    """B54: near -1000 a bfloat16 step is 4, and a running bfloat16 sum stalls at -256."""
    hidden, head, targets, _ = make(13, 32, 1.0, None, False, torch.bfloat16, True)
    values = token_logps(hidden, head, targets)
    assert values.dtype == torch.float32
    exact = naive_token_logps(hidden.double(), Head(head.weight.double()), targets)
    assert (values - exact).abs().max().item() < 0.05
    many = torch.full((2000,), -0.5)
    assert float(sum_by_segment(many, torch.tensor([2000]))) == -1000.0


def test_trained_float32_weight_under_autocast_gets_a_float32_gradient():
    hidden, head, targets, _ = make(13, 32, 1.0, None, False, torch.float32, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        token_logps(hidden, head, targets, 4, "recompute").sum().backward()
    gradient = head.weight.grad
    assert gradient.dtype == torch.float32
    # A gradient rounded to bfloat16 has its lower 16 bits zero.
    assert (gradient.view(torch.int32) & 0xFFFF).any()


def test_nothing_as_large_as_the_logits_is_kept():
    """Only what the backward needs is saved: [T, H] and the weight, never [T, V]."""
    hidden, head, targets, _ = make(64, 512, 1.0, None, False, torch.float32, False)
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        token_logps(hidden, head, targets, 16, "recompute")
    assert max(sizes) == 512 * 6
    sizes.clear()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        naive_token_logps(hidden, head, targets)
    assert max(sizes) >= 64 * 512, "the probe sees full logits where they are"


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_of_all_logits_is_ever_made(frozen):
    """Beyond the budget, forward and backward: nothing larger than a chunk's logits or the weight."""
    tokens, vocabulary, chunk = 96, 512, 16
    hidden, head, targets, _ = make(tokens, vocabulary, 1.0, 2.0, True, torch.float32, frozen)
    for strategy, most in (("recompute", chunk * vocabulary), ("keep", tokens * vocabulary)):
        with Largest() as seen:
            token_logps(hidden, head, targets, chunk, strategy).sum().backward()
        assert seen.elements == (chunk * vocabulary if frozen else most)
    with Largest() as seen:
        naive_token_logps(hidden, head, targets).sum().backward()
    assert seen.elements == tokens * vocabulary, "the probe sees full logits where they are"


def test_auto_keeps_what_fits_and_recomputes_what_does_not(monkeypatch):
    hidden, head, targets, _ = make(64, 512, 1.0, None, False, torch.float32, False)
    for budget, most in ((64 * 512 * 4, 64 * 512), (64 * 512 * 4 - 1, 16 * 512)):
        # By the module table: the package attribute of that name is the function.
        monkeypatch.setattr(sys.modules["preftune.ops.token_logps"], "KEEP_BYTES", budget)
        with Largest() as seen:
            token_logps(hidden, head, targets, 16).sum().backward()
        assert seen.elements == most


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
def test_each_graph_has_its_own_logits(strategy):
    """Two forwards alive at once, backward in any order, and a second backward of the same graph."""
    parts = make(13, 32, 1.7, 3.0, True, torch.float64, False)
    hidden, head, targets, incoming = parts
    leaves = [hidden, head.weight, head.bias]
    expected = values_and_gradients(naive_token_logps, *parts)[1:]
    other = values_and_gradients(naive_token_logps, hidden, head, targets.flip(0), incoming)[1:]
    first = token_logps(hidden, head, targets, 4, strategy)
    second = token_logps(hidden, head, targets.flip(0), 4, strategy)
    once = torch.autograd.grad(first, leaves, incoming, retain_graph=True)
    twice = torch.autograd.grad(first, leaves, incoming)
    last = torch.autograd.grad(second, leaves, incoming)
    for got, want in ((once, expected), (twice, expected), (last, other)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_sum_by_segment():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64, requires_grad=True)
    sums = sum_by_segment(values, torch.tensor([1, 0, 3]))
    assert sums.tolist() == [1.0, 0.0, 14.0]
    sums.backward(torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64))
    assert values.grad.tolist() == [1.0, 2.0, 2.0, 2.0]


def test_token_kl_by_hand():
    """p = (0.5, 0.5), q = (0.25, 0.75): KL = 0.5 ln 2 + 0.5 ln (2/3) = 0.143841."""
    eye = torch.eye(2, dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.75], [0.25, 0.75]], dtype=torch.float64).log()
    kl = token_kl(p, Head(eye), q, Head(eye), chunk=1)
    assert kl.tolist() == pytest.approx([0.143841036, 0.0], abs=1e-8)
