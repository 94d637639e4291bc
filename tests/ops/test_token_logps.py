"""The fused log-probability against the naive one: values and all gradients."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from preftune.ops import Head, HeadOptions, TokenLogProbs, naive_token_logps, sum_by_segment, token_kl, token_logps
from preftune.ops.pointwise import BLOCK

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
    fused = values_and_gradients(lambda h, w, t: token_logps(h, w, t, HeadOptions(chunk=chunk, strategy=asked)), *parts)
    naive = values_and_gradients(naive_token_logps, *parts)
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("tokens", "vocabulary", "chunk", "form"), CASES)
@pytest.mark.parametrize("strategy", ["frozen", "keep", "recompute"])
def test_fused_equals_naive_in_float32(tokens, vocabulary, chunk, form, strategy):
    parts = make(tokens, vocabulary, *form, torch.float32, strategy == "frozen")
    options = HeadOptions(chunk=chunk, strategy="auto" if strategy == "frozen" else strategy)
    fused = values_and_gradients(lambda h, w, t: token_logps(h, w, t, options), *parts)
    naive = values_and_gradients(naive_token_logps, *parts)
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["frozen", "keep", "recompute"])
@pytest.mark.parametrize("form", [(1.0, None, False), (1.7, 3.0, True)])
def test_narrow_products_have_gradients_near_the_exact_ones(dtype, strategy, form):
    """Within a few roundings of the narrow dtype of what float64 gives for the same narrow inputs."""
    hidden, head, targets, incoming = make(61, 96, *form, torch.float64, strategy == "frozen")
    narrow = [None if t is None else t.detach().to(dtype) for t in (hidden, head.weight, head.bias)]
    results = []
    for kind, function in ((dtype, token_logps), (torch.float64, naive_token_logps)):
        h, w, b = (None if t is None else t.to(kind).requires_grad_() for t in narrow)
        if strategy == "frozen":
            w, b = w.detach(), None if b is None else b.detach()
        options = [] if kind == torch.float64 else [HeadOptions(chunk=16, strategy=strategy.replace("frozen", "auto"))]
        call = lambda h, w, t, f=function, o=options: f(h, w, t, *o)  # noqa: E731
        results.append(values_and_gradients(call, h, Head(w, b, *form[:2]), targets, incoming))
    step = torch.finfo(dtype).eps
    assert results[0][0].dtype == torch.float32
    for got, expected in zip(*results, strict=True):
        assert float((got.double() - expected).norm() / expected.norm()) < 2 * step


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
def test_gradcheck(strategy):
    hidden, head, targets, _ = make(5, 9, 1.3, 2.0, True, torch.float64, False)
    options = HeadOptions(chunk=2, strategy=strategy)

    def function(h, w, b):
        return token_logps(h, Head(w, b, head.scale, head.softcap, temperature=0.7), targets, options)

    # A second backward computes the products again, in another order.
    assert torch.autograd.gradcheck(function, (hidden, head.weight, head.bias), nondet_tol=1e-12)


def test_a_head_that_is_a_module_gets_its_gradients():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 11)).double()
    hidden = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    targets, incoming = torch.randint(0, 11, (13,)), torch.randn(13, dtype=torch.float64)
    leaves = [hidden, *module.parameters()]
    results = []
    for function, options in ((token_logps, [HeadOptions(chunk=4)]), (naive_token_logps, [])):
        values = function(hidden, Head(module=module, softcap=2.0), targets, *options)
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
    naive_token_logps(hidden, head, targets).sum().backward()
    exact, head.weight.grad = head.weight.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        token_logps(hidden, head, targets, HeadOptions(chunk=4, strategy="recompute")).sum().backward()
    gradient = head.weight.grad
    assert gradient.dtype == torch.float32
    assert float((gradient - exact).norm() / exact.norm()) < 0.01


def test_nothing_as_large_as_the_logits_is_kept():
    """Only what the backward needs is saved: [T, H] and the weight, never [T, V]."""
    hidden, head, targets, _ = make(64, 512, 1.0, None, False, torch.float32, False)
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        token_logps(hidden, head, targets, HeadOptions(chunk=16, strategy="recompute"))
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
            token_logps(hidden, head, targets, HeadOptions(chunk=chunk, strategy=strategy)).sum().backward()
        assert seen.elements == (chunk * vocabulary if frozen else most)
    with Largest() as seen:
        naive_token_logps(hidden, head, targets).sum().backward()
    assert seen.elements == tokens * vocabulary, "the probe sees full logits where they are"


class Live(TorchDispatchMode):
    """Notes the most bytes that tensors made inside have held at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key):
        self.now -= self.alive.pop(key, 0)


@pytest.mark.parametrize("tokens", [64, 256, 1024])
@pytest.mark.parametrize(("strategy", "frozen"), [("auto", False), ("recompute", False), ("auto", True)])
def test_the_budget_holds(tokens, strategy, frozen):
    """Beyond inputs and gradients, what is alive at once fits the budget, whatever the number of tokens."""
    budget, vocabulary, width = 2**20, 2048, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=not frozen)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Live() as live:
        token_logps(hidden, Head(weight), targets, HeadOptions(strategy=strategy, budget=budget)).sum().backward()
    gradients = 4 * (2 * hidden.numel() + (0 if frozen else weight.numel())) + 8 * 4 * tokens
    block = 3 * 4 * BLOCK["cpu"]
    quarter = budget if strategy == "auto" and not frozen else budget // 2
    assert live.most <= quarter + gradients + min(block, 3 * 4 * tokens * vocabulary)
    with Live() as live:
        naive_token_logps(hidden, Head(weight), targets).sum().backward()
    if tokens == 1024:
        assert live.most > 4 * budget, "the probe sees full logits where they are"


@pytest.mark.parametrize("tokens", [160, 320])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_vocabulary_of_131072_takes_less_than_70_mib_in_chunks_of_128(tokens, frozen):
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(131072, 4, requires_grad=not frozen)
    targets = torch.randint(0, 131072, (tokens,))
    with Live() as live:
        values = token_logps(hidden, Head(weight), targets, HeadOptions(strategy="recompute", chunk=128))
        values.sum().backward()
    gradients = 4 * (2 * hidden.numel() + (0 if frozen else weight.numel()))
    assert 32 < (live.most - gradients) / 2**20 < 70


def test_auto_keeps_what_the_budget_holds():
    hidden, head, targets, _ = make(64, 512, 1.0, None, False, torch.float32, False)
    row = 512 * 4
    for budget, kept in ((64 * row, 64), (64 * row - 1, 47), (16 * row, 0)):
        plan = HeadOptions(chunk=16, budget=budget).plan(hidden, head, False)
        assert plan.keep == kept
        with Largest() as seen:
            token_logps(hidden, head, targets, HeadOptions(chunk=16, budget=budget)).sum().backward()
        assert seen.elements == max(kept, 16) * 512


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
def test_each_graph_has_its_own_logits(strategy):
    """Two forwards alive at once, backward in any order, and a second backward of the same graph."""
    parts = make(13, 32, 1.7, 3.0, True, torch.float64, False)
    hidden, head, targets, incoming = parts
    leaves = [hidden, head.weight, head.bias]
    expected = values_and_gradients(naive_token_logps, *parts)[1:]
    other = values_and_gradients(naive_token_logps, hidden, head, targets.flip(0), incoming)[1:]
    first = token_logps(hidden, head, targets, HeadOptions(chunk=4, strategy=strategy))
    second = token_logps(hidden, head, targets.flip(0), HeadOptions(chunk=4, strategy=strategy))
    once = torch.autograd.grad(first, leaves, incoming, retain_graph=True)
    twice = torch.autograd.grad(first, leaves, incoming)
    last = torch.autograd.grad(second, leaves, incoming)
    for got, want in ((once, expected), (twice, expected), (last, other)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


MIXED = HeadOptions(chunk=4, budget=9 * 32 * 8)  # 13 tokens: 5 kept, 8 computed again


@pytest.mark.parametrize("options", [HeadOptions(chunk=4), HeadOptions(chunk=4, strategy="recompute"), MIXED])
@pytest.mark.parametrize("dead", [[], [0], [4, 5], [2, 9, 12], list(range(13))])
def test_tokens_without_a_gradient_take_no_part_and_change_nothing(options, dead):
    hidden, head, targets, incoming = make(13, 32, 1.7, 3.0, True, torch.float64, False)
    incoming[dead] = torch.tensor([0.0, -0.0, 1e-310, 0.0] * 4, dtype=torch.float64)[: len(dead)]
    fused = values_and_gradients(lambda h, w, t: token_logps(h, w, t, options), hidden, head, targets, incoming)
    naive = values_and_gradients(naive_token_logps, hidden, head, targets, incoming)
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


class Products(TorchDispatchMode):
    """Counts multiply-adds of matrix products, and notes denormal operands."""

    def __init__(self):
        super().__init__()
        self.operations, self.denormal = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            self.operations += a.shape[0] * a.shape[1] * b.shape[1]
            for operand in (a, b):
                tiny = torch.finfo(operand.dtype).tiny
                self.denormal += int(((operand != 0) & (operand.abs() < tiny)).sum())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "strategy", "passes"), [(True, "auto", 2), (False, "keep", 3), (False, "recompute", 4)]
)
def test_operations_are_those_of_the_strategy(frozen, strategy, passes):
    """Multiply-adds: 2 THV with a frozen head, 3 where products are kept, 4 where they are computed again."""
    hidden, head, targets, incoming = make(64, 512, 1.0, None, False, torch.float32, frozen)
    whole = 64 * 512 * 6
    options = HeadOptions(chunk=16, strategy=strategy)
    with Products() as seen:
        (token_logps(hidden, head, targets, options) * incoming).sum().backward()
    assert seen.operations == passes * whole
    incoming[:32] = 0
    with Products() as seen:
        (token_logps(hidden, head, targets, options) * incoming).sum().backward()
    assert seen.operations == passes * whole - (0 if frozen else (passes - 1) * whole // 2)
    with Products() as seen, torch.no_grad():
        token_logps(hidden, head, targets, options)
    assert seen.operations == whole, "without a gradient nothing of it is computed"


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_denormals_never_reach_a_product(frozen, size, dtype):
    """They make products on a CPU more than ten times slower."""
    hidden, head, targets, _ = make(13, 512, 1.0, 60.0, False, torch.float32, frozen)
    hidden, head = hidden.detach() * 15, Head(head.weight.detach().to(dtype), softcap=60.0)
    head.weight.requires_grad_(not frozen)
    hidden = hidden.to(dtype).requires_grad_()
    with Products() as seen:
        (token_logps(hidden, head, targets) * size).sum().backward()
    assert seen.denormal == 0
    assert hidden.grad.isfinite().all()
    exact = head.logits(hidden.detach()).log_softmax(-1).exp()
    assert ((exact > 0) & (exact < torch.finfo(dtype).tiny)).any(), "there were some"


def test_an_excluded_entry_is_no_nan():
    """A bias of -inf excludes an entry of the vocabulary, as masks do."""
    hidden, head, targets, incoming = make(13, 32, 1.0, None, True, torch.float64, False)
    with torch.no_grad():
        head.bias[3] = -math.inf
    targets[targets == 3] = 4
    fused = values_and_gradients(lambda h, w, t: token_logps(h, w, t, MIXED), hidden, head, targets, incoming)
    naive = values_and_gradients(naive_token_logps, hidden, head, targets, incoming)
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    _, extras = token_logps(hidden, head, targets, extras=True)
    assert extras.entropy.isfinite().all()


def test_a_bad_value_is_not_hidden():
    hidden, head, targets, _ = make(5, 32, 1.0, None, False, torch.float32, False)
    with torch.no_grad():
        hidden[2, 0] = math.nan
    values = token_logps(hidden, head, targets)
    assert values.isnan().tolist() == [False, False, True, False, False]
    values.sum().backward()
    assert hidden.grad.isnan().any()


@pytest.mark.parametrize("backend", ["chunked", "naive"])
def test_extras_by_hand(backend):
    """p = (1/2, 1/4, 1/4): entropy 1.5 ln 2, sum of squares 3/8; mean logit of log p is -5/3 ln 2."""
    head = Head(torch.eye(3, dtype=torch.float64))
    hidden = torch.tensor([[0.5, 0.25, 0.25]] * 2, dtype=torch.float64).log().requires_grad_()
    options = HeadOptions(backend=backend, chunk=1)
    logps, extras = token_logps(hidden, head, torch.tensor([0, 2]), options, extras=True)
    assert logps.tolist() == pytest.approx([math.log(0.5), math.log(0.25)])
    assert extras.entropy.tolist() == pytest.approx([1.5 * math.log(2)] * 2)
    assert extras.log_sum_squares.tolist() == pytest.approx([math.log(3 / 8)] * 2)
    assert extras.mean_logit.tolist() == pytest.approx([-5 / 3 * math.log(2)] * 2)
    assert extras.is_top.tolist() == [True, False]
    assert not extras.entropy.requires_grad
    logps.sum().backward()
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_extras_do_not_change_the_values(module, frozen):
    hidden, head, targets, incoming = make(13, 32, 0.25, 2.0, False, torch.float64, frozen)
    if module:
        head = Head(module=lambda h: h @ weight.T, scale=0.25, softcap=2.0, temperature=0.5)
        weight = torch.randn(32, 6, dtype=torch.float64, requires_grad=not frozen)
    results = []
    for options in (HeadOptions(chunk=4), HeadOptions(backend="naive")):
        logps, extras = token_logps(hidden, head, targets, options, extras=True)
        assert torch.equal(logps, token_logps(hidden, head, targets, options))
        (gradient,) = torch.autograd.grad(logps, hidden, incoming)
        results.append([logps, gradient, *vars(extras).values()])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-10, atol=1e-10)


def test_temperature_divides_the_logits_last():
    hidden, head, targets, _ = make(13, 32, 1.7, 3.0, True, torch.float64, True)
    tempered = Head(head.weight, head.bias, 1.7, 3.0, temperature=0.5)
    expected = (head.logits(hidden) / 0.5).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(token_logps(hidden, tempered, targets), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [{"scale": 0}, {"softcap": 0.0}, {"temperature": 0}, {"temperature": -1}, {"module": len}, {"weight": None}],
)
def test_a_head_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"expected scale != 0|a head is either"):
        Head(**({"weight": torch.eye(3)} if wrong else {}) | wrong)


@pytest.mark.parametrize("wrong", [{"backend": "cuda"}, {"strategy": "frozen"}, {"chunk": 0}, {"budget": 0}])
def test_options_that_cannot_be_are_refused(wrong):
    options = HeadOptions()
    for name, value in wrong.items():
        object.__setattr__(options, name, value)  # past the types, which are checked while tests run
    with pytest.raises(ValueError, match="expected"):
        options.__post_init__()


@pytest.mark.parametrize(
    ("frozen", "strategy", "bias"), [(True, "auto", False), (False, "keep", True), (False, "recompute", True)]
)
def test_compiled_equals_eager_and_compiles_once_for_all_lengths(frozen, strategy, bias, monkeypatch):
    """The shapes that are compiled do not depend on the number of tokens."""
    monkeypatch.setitem(BLOCK, "cpu", 4 * 40)
    torch.compiler.reset()
    for tokens in (9, 8, 3, 21, 1, 0, 14):
        parts = make(tokens, 40, 1.7, 3.0, bias, torch.float64, frozen)
        made = []
        for backend in ("compiled", "chunked"):
            options = HeadOptions(backend=backend, chunk=8, strategy=strategy)
            made.append(values_and_gradients(lambda h, w, t, o=options: token_logps(h, w, t, o), *parts))
        for got, expected in zip(*made, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        if tokens == 9:
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= compiled + 1
    assert compiled > 0


def test_weight_gradient_error_does_not_grow_with_chunks():
    """bfloat16: one rounding of the finished sum, however many chunks the logits were made in."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 64).bfloat16(), (torch.randn(256, 64) / 8).bfloat16()
    targets, incoming = torch.randint(0, 256, (512,)), torch.randn(512)
    exact = weight.double().requires_grad_()
    naive_token_logps(hidden.double(), Head(exact), targets).backward(incoming.double())
    errors = []
    for chunk in (512, 64, 8, 2):
        trained = weight.clone().requires_grad_()
        options = HeadOptions(chunk=chunk, strategy="recompute")
        token_logps(hidden, Head(trained), targets, options).backward(incoming)
        errors.append(float((trained.grad.double() - exact.grad).norm() / exact.grad.norm()))
    assert max(errors) < 1.2 * errors[0]
    assert errors[0] < 0.004


@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,)])
def test_the_layer(shape):
    torch.manual_seed(0)
    linear = nn.Linear(6, 11).double()
    hidden = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, shape)
    layer = TokenLogProbs(linear, scale=0.5, softcap=4.0, temperature=0.7)
    assert [name for name, _ in layer.named_parameters()] == ["head.weight", "head.bias"]
    expected = (4.0 * torch.tanh(0.5 * linear(hidden) / 4.0) / 0.7).log_softmax(-1)
    expected = expected.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(layer(hidden, targets), expected, rtol=1e-10, atol=1e-10)
    wants = torch.autograd.grad(expected.sum(), linear.weight)
    torch.testing.assert_close(torch.autograd.grad(layer(hidden, targets).sum(), linear.weight), wants)
    logps, extras = TokenLogProbs(nn.Sequential(linear), temperature=0.7)(hidden, targets, extras=True)
    assert logps.shape == extras.is_top.shape == shape


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
