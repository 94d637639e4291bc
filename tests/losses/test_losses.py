"""Each loss against the paper's formula worked by hand, and what holds for every entry of the registry."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import tiny
from preftune.errors import ConfigError
from preftune.losses import get_spec, loss_names, make_loss
from preftune.types import SequenceLogps


def group(policy, ref, lengths=None, dtype=torch.float64):
    policy = torch.tensor(policy, dtype=dtype, requires_grad=True)
    ref = torch.tensor(ref, dtype=dtype)
    return SequenceLogps(policy, ref, torch.tensor(lengths or [1] * len(policy)))


def test_dpo_by_hand():
    """Two pairs, beta 0.1 (arXiv 2305.18290, eq. 7): loss = ln(1 + e^(-beta D)).

    Pair 1: r_w = -10 + 12 = 2, r_l = -20 + 16 = -4, D = 6; loss = ln(1 + e^-0.6) = 0.437488.
    Pair 2: r_w = -5 + 4 = -1, r_l = -7 + 8 = 1, D = -2; loss = ln(1 + e^0.2) = 0.798139.
    Gradient of each: -/+ beta sigmoid(-beta D): 0.1 * 0.354344 and 0.1 * 0.549834.
    """
    chosen, rejected = group([-10.0, -5.0], [-12.0, -4.0]), group([-20.0, -7.0], [-16.0, -8.0])
    loss = make_loss("dpo", beta=0.1)(chosen, rejected)
    assert loss.tolist() == pytest.approx([0.437487950, 0.798138870], abs=1e-8)
    loss.sum().backward()
    assert chosen.policy.grad.tolist() == pytest.approx([-0.035434369, -0.054983400], abs=1e-8)
    assert rejected.policy.grad.tolist() == pytest.approx([0.035434369, 0.054983400], abs=1e-8)


def test_conservative_dpo_by_hand():
    """beta 0.5, D = 2, e = 0.1: 0.9 ln(1 + e^-1) + 0.1 ln(1 + e) = 0.413262 (B41)."""
    loss = make_loss("dpo", beta=0.5, label_smoothing=0.1)(group([-1.0], [-2.0]), group([-2.0], [-1.0]))
    assert loss.item() == pytest.approx(0.413262, abs=1e-6)


def test_dpo_at_the_start_is_ln_2():
    same = group([-3.0, -100.0], [-3.0, -100.0])
    assert make_loss("dpo")(same, same).tolist() == [math.log(2)] * 2


def test_kto_by_hand():
    """beta 0.1, z = 1, lambda_D = 1, lambda_U = 1.5 (arXiv 2402.01306, eq. 8).

    Desirable, r = 3: 1 - sigmoid(0.1 * 2) = 0.450166; gradient -beta s (1 - s) = -0.1 * 0.247517.
    Undesirable, r = -4: 1.5 (1 - sigmoid(0.1 * 5)) = 1.5 * 0.377541; gradient +1.5 * 0.1 * 0.235004.
    """
    completions = group([-7.0, -14.0], [-10.0, -10.0])
    loss = make_loss("kto", beta=0.1, undesirable_weight=1.5)(
        completions, torch.tensor([True, False]), torch.tensor(1.0, dtype=torch.float64)
    )
    assert loss.tolist() == pytest.approx([0.450166003, 0.566311003], abs=1e-8)
    loss.sum().backward()
    assert completions.policy.grad.tolist() == pytest.approx([-0.024751657, 0.035250557], abs=1e-8)


def arguments(name, ratios, dtype):
    ratios = torch.tensor(ratios, dtype=dtype)
    zero = torch.zeros_like(ratios)
    ones = torch.ones(len(ratios), dtype=torch.long)
    first = SequenceLogps(ratios.clone().requires_grad_(), zero, ones)
    if get_spec(name).layout == "paired":
        return [first, SequenceLogps((-ratios).requires_grad_(), zero, ones)], first
    extra = [torch.zeros((), dtype=dtype)] if get_spec(name).needs_kl_baseline else []
    return [first, torch.arange(len(ratios)) % 2 == 0, *extra], first


EXTREMES = [1e-8, -1e-8, 1.0, -1.0, 50.0, -50.0, 1e4, -1e4]


@pytest.mark.parametrize("name", loss_names())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_finite_everywhere(name, dtype):
    given, first = arguments(name, EXTREMES, dtype)
    values = make_loss(name)(*given)
    values.float().sum().backward()
    assert values.shape == (len(EXTREMES),)
    assert values.isfinite().all()
    assert first.policy.grad.isfinite().all()


@pytest.mark.parametrize("name", loss_names())
def test_gradcheck(name):
    given, first = arguments(name, [0.3, -2.0, 7.0, 0.0], torch.float64)

    def function(policy):
        return make_loss(name, beta=0.7)(SequenceLogps(policy, first.ref, first.lengths), *given[1:])

    assert torch.autograd.gradcheck(function, (first.policy,))


@pytest.mark.parametrize("name", loss_names())
def test_compiled_equals_eager(name):
    given, _ = arguments(name, [0.3, -2.0, 7.0, 0.0], torch.float64)
    loss = make_loss(name)
    # Unwrapped: the shape checks that tests put around it are no part of the loss.
    compiled = torch.compile(inspect.unwrap(loss.spec.function), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given, **loss.parameters), loss(*given))


@pytest.mark.parametrize("name", loss_names())
def test_raising_the_good_and_lowering_the_bad_lowers_the_loss(name):
    given, first = arguments(name, [0.3, -2.0, 7.0, 0.0], torch.float64)
    make_loss(name)(*given).sum().backward()
    signs = first.policy.grad.sign().tolist()
    assert signs == ([-1.0] * 4 if get_spec(name).layout == "paired" else [-1.0, 1.0, -1.0, 1.0])


@pytest.mark.parametrize("name", loss_names())
def test_docstring_names_its_paper(name):
    assert "arXiv" in get_spec(name).function.__doc__
    assert get_spec(name).summary.endswith(".")


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("dpo", {"beta": 0.0}, "loss.beta: must be > 0, got 0.0"),
        ("dpo", {"beta": -0.1}, "loss.beta: must be > 0, got -0.1"),
        ("kto", {"beta": float("nan")}, "expected a finite number"),
        ("dpo", {"beta": "0.1"}, "expected a finite number"),
        ("dpo", {"beta": True}, "expected a finite number"),
        ("dpo", {"label_smoothing": 0.5}, "must be < 0.5"),
        ("dpo", {"label_smoothing": -0.1}, "must be >= 0"),
        ("kto", {"desirable_weight": -1}, "must be >= 0"),
        ("kto", {"label_smoothing": 0.1}, "kto does not use it; the losses that do: dpo"),
        ("dpo", {"betta": 0.1}, "did you mean 'beta'?"),
        ("dop", {}, "did you mean 'dpo'?"),
    ],
)
def test_parameters_are_checked(name, parameters, words):
    with pytest.raises(ConfigError) as error:
        make_loss(name, **parameters)
    assert words in str(error.value)


def test_the_loss_follows_beta_through_the_real_objective():
    """B47: loss = softplus(-beta * margin), with beta applied once."""
    from preftune.data import collate

    batch = collate(tiny.rows(4).examples)
    for beta in (0.1, 0.2):
        goal = tiny.objective("dpo", beta=beta)
        with torch.no_grad():
            for p in goal.policy.model.parameters():
                p.mul_(1.3)
        ratios = goal.policy.sequence_logps(batch) - goal.reference.sequence_logps(batch)
        margins = ratios[0::2] - ratios[1::2]
        expected = torch.nn.functional.softplus(-beta * margins)
        torch.testing.assert_close(goal(batch).values, expected.detach())
