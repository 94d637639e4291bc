"""On a CUDA device: the same values and gradients, and no waiting for the device inside the operation."""

from __future__ import annotations

import pytest
import torch

from preftune.ops import Head, HeadOptions, naive_token_logps, sum_by_segment, token_logps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(dtype, frozen, tokens=300, vocabulary=5000, width=64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 4).to("cuda", dtype).requires_grad_(not frozen)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).cuda()
    return hidden, weight, targets, torch.randn(tokens, generator=generator).cuda()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["frozen", "keep", "recompute", "auto"])
@pytest.mark.parametrize("backend", ["chunked", "compiled"])
def test_values_and_gradients(dtype, strategy, backend):
    frozen = strategy == "frozen"
    hidden, weight, targets, incoming = inputs(dtype, frozen)
    options = HeadOptions(backend, "auto" if frozen else strategy, chunk=64, budget=2**21)
    values = token_logps(hidden, Head(weight, softcap=20.0), targets, options)
    values.backward(incoming.to(values.dtype))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = naive_token_logps(wide[0], Head(wide[1], softcap=20.0), targets)
    exact.backward(incoming.double())
    near = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for got, want in ((values, exact), (hidden.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        if got is not None:
            assert float((got.double() - want).norm() / want.norm()) < near


@pytest.mark.parametrize("strategy", ["frozen", "keep", "recompute"])
def test_nothing_waits_for_the_device(strategy):
    frozen = strategy == "frozen"
    hidden, weight, targets, _ = inputs(torch.bfloat16, frozen)
    options = HeadOptions(strategy="auto" if frozen else strategy, chunk=64)
    lengths = torch.tensor([100, 0, 200], device="cuda")
    sum_by_segment(token_logps(hidden, Head(weight), targets, options), lengths).sum().backward()  # libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        sum_by_segment(token_logps(hidden, Head(weight), targets, options), lengths).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
