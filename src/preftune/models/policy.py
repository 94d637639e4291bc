"""The policy: a model, its compute dtype, and the way from a batch to log-probabilities."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from preftune.errors import ModelError
from preftune.models.adapters import evaluating
from preftune.models.dropout import disable_dropout, has_adapter_dropout
from preftune.models.head import causal_lm, install, use_own_head, uses_own_head
from preftune.ops import HeadOptions, TokenExtras, sum_by_segment
from preftune.types import Batch, PerCompletion, TokenLogps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# How far fused and own log-probabilities of one token may be apart (nats), by the precision of the products.
SELF_CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


class Policy:
    """A causal language model that answers with log-probabilities. The reference is one of these, too.

    Args:
        model: a transformers causal LM, or a peft model around one. Its forward learns to return log-probabilities;
            all else about it stays as it was.
        tokenizer: kept for those who have the policy and need it.
        dtype: the compute dtype; matrix products run in it under autocast where parameters are stored wider. None
            takes the dtype the weights are stored in.
        dropout: leave the model's own dropout on while training. Off by default: then policy and reference agree to
            the last bit before the first update. An adapter's dropout is its own matter and stays.
        head: how the head is computed (backend, strategy, sizes); None for the defaults, or what was said before.
        name: what summaries call the model; by default the name or path it was loaded from.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        dropout: bool = False,
        name: str | None = None,
        head: HeadOptions | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        inner = causal_lm(model)
        self.name = name or str(inner.config._name_or_path or type(inner).__name__)
        self.dtype = dtype or inner.dtype
        self.dropout = dropout
        if self.dtype == torch.float16 and any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                "model.dtype: float16 is not trained in: its gradients underflow without loss scaling; "
                "use bfloat16 or float32"
            )
        if not dropout:
            disable_dropout(model)
        install(model, head)
        accepted = inspect.signature(causal_lm(model).base_model.forward).parameters
        self._takes_positions = "position_ids" in accepted

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def token_logps(self, batch: Batch, model: nn.Module | None = None) -> TokenLogps:
        """Log-probability of each scored token, `[T]` nats.

        Args:
            batch: on the model's device.
            model: what to call instead of `self.model`: the same model inside a wrapper (DDP, FSDP, compiled).
        """
        return cast("Tensor", self._score(batch, model)["token_logps"])

    def token_extras(self, batch: Batch, model: nn.Module | None = None) -> tuple[TokenLogps, TokenExtras]:
        """`token_logps`, and what else is known of each token's distribution, from one forward."""
        out = self._score(batch, model, logp_extras=True)
        return out["token_logps"], TokenExtras(out["entropy"], out["log_sum_squares"], out["mean_logit"], out["is_top"])

    def _score(self, batch: Batch, model: nn.Module | None, **asked: bool) -> Any:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if self._takes_positions:
            inputs["position_ids"] = batch.position_ids
        with self.autocast():
            called = self.model if model is None else model  # the truth of a compiled module is its length
            return called(**inputs, logp_positions=batch.positions, logp_targets=batch.targets, **asked)

    def sequence_logps(self, batch: Batch, model: nn.Module | None = None) -> PerCompletion:
        """Log-probability of each completion given its prompt, `[N]` nats: the sum over its scored tokens."""
        return sum_by_segment(self.token_logps(batch, model), batch.lengths)

    def autocast(self) -> torch.autocast:
        """The context that makes products run in the compute dtype."""
        reduced = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, dtype=self.dtype if reduced else None, enabled=reduced)

    def self_check(self, batch: Batch) -> float:
        """Compare the fused log-probabilities with the model's own logits; returns the largest difference in nats.

        Where they disagree (a head with a transformation that is not known here) the model's own head is used from
        then on, chunk by chunk, and a warning says so. Raises `ModelError` where that disagrees too, where the model
        still drops units at random while training although it should not, and where no gradient reaches the trained
        weights. Uses the first 32 scored tokens only, and leaves gradients and the random state as they were.
        """
        batch = _first_tokens(batch, 32)
        with evaluating(self.model):
            fused = self.token_logps(batch)
            own = self._own_logps(batch)
            worst = float((fused - own).abs().max())
            if not worst <= SELF_CHECK_TOLERANCE[self.dtype] and not uses_own_head(self.model):
                logger.warning(
                    "%s: log-probabilities from the head's weight are off by up to %.4f nats a token, so the model's "
                    "own head is applied instead, chunk by chunk",
                    self.name,
                    worst,
                )
                use_own_head(self.model)
                fused = self.token_logps(batch)
                worst = float((fused - own).abs().max())
        if not own.isfinite().all():
            raise ModelError(
                f"{self.name}: the model's own log-probabilities are not finite ({float(own[~own.isfinite()][0])}); "
                "its weights are damaged, or the products overflow in this dtype: set model.dtype: float32"
            )
        if not worst <= SELF_CHECK_TOLERANCE[self.dtype]:
            at = int((fused - own).abs().argmax())
            raise ModelError(
                f"{type(causal_lm(self.model)).__name__}: log-probabilities computed chunk by chunk differ "
                f"from the model's own logits (token {at}: {float(fused[at]):.4f} against {float(own[at]):.4f} nats). "
                "Its forward does something to the logits that is not known here; please report the architecture"
            )
        if not self.dropout and not has_adapter_dropout(self.model):
            with torch.no_grad():
                mode, _ = self.model.training, self.model.train()
                again = self.token_logps(batch)
                self.model.train(mode)
            if not torch.equal(again, fused):
                raise ModelError(
                    f"{type(causal_lm(self.model)).__name__} gives other log-probabilities in training mode: some "
                    "dropout could not be switched off; set model.dropout: true to accept it"
                )
        self._require_gradient(batch)
        return worst

    def _require_gradient(self, batch: Batch) -> None:
        trained = [p for _, p in trainable_parameters(self.model)]
        if not trained:
            return
        mode, _ = self.model.training, self.model.train()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.enable_grad():
            total = self.token_logps(batch).sum()
            grads = torch.autograd.grad(total, trained, allow_unused=True) if total.requires_grad else ()
        self.model.train(mode)
        if not any(bool(gradient.any()) for gradient in grads if gradient is not None):
            raise ModelError(
                f"{self.name}: no gradient reaches the {len(trained)} trained weights, so nothing would be learnt; "
                "some layer on the way gives none (4-bit products of bitsandbytes do so on a CPU: use a CUDA device, "
                "or leave out model.load_in_4bit)"
            )

    def _own_logps(self, batch: Batch) -> TokenLogps:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if self._takes_positions:
            inputs["position_ids"] = batch.position_ids
        # Of one row, cut after its last scored token: only the logits from the first scored one on are asked for.
        width, first = batch.input_ids.shape[1], int(batch.positions[0])
        if "logits_to_keep" in inspect.signature(type(causal_lm(self.model)).forward).parameters:
            inputs["logits_to_keep"] = width - first
        with self.autocast():
            logits = self.model(**inputs, use_cache=False).logits[0]
        logits = logits[batch.positions - (width - len(logits))]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cast("Tensor", logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0])


def _first_tokens(batch: Batch, tokens: int) -> Batch:
    """The first scored tokens of the first sequence, for a check that should not cost a whole batch."""
    tokens = min(tokens, int(batch.lengths[0]))
    width = int(batch.positions[tokens - 1]) + 1
    return Batch(
        input_ids=batch.input_ids[:1, :width],
        attention_mask=batch.attention_mask[:1, :width],
        position_ids=batch.position_ids[:1, :width],
        positions=batch.positions[:tokens],
        targets=batch.targets[:tokens],
        lengths=batch.lengths[:1].clamp(max=tokens),
        real=batch.real[:1],
    )


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and tensors of what an optimizer would change."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
