"""TINY: a random Llama, a byte-level tokenizer trained on three sentences, and invented rows."""

from __future__ import annotations

import functools
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from preftune.config import training_arguments
from preftune.data import PreferenceDataset
from preftune.data.pairing import pair_mismatched
from preftune.losses import make_loss
from preftune.models import Lora, Policy
from preftune.models.adapters import add_adapter
from preftune.ops import HeadOptions
from preftune.reference import default_reference
from preftune.train import Objective, PreferenceTrainer
from preftune.types import Completion, Origin, TokenizedExample

VOCABULARY = 280
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text = ["the cat sat on the mat", "what is it you like about films", "the sky is blue and the sea is green"]
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer.to_str()


def tokenizer(template: str | None = CHATML, **kwargs) -> PreTrainedTokenizerFast:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | kwargs
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_tokenizer_json()), **special)
    made.chat_template = template
    return made


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | config))).to(dtype)


def rows(n: int = 8, layout: str = "paired", seed: int = 0, longest: int = 12) -> PreferenceDataset:
    """Random rows of unequal lengths."""
    rng = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5, VOCABULARY) for _ in range(length))

    def completion() -> Completion:
        length = rng.randint(1, longest)
        return Completion(ids(length), (True,) * length)

    made = []
    for i in range(n):
        prompt, origin = ids(rng.randint(1, 9)), Origin("rows", i + 1)
        if layout == "paired":
            made.append(TokenizedExample(prompt, (completion(), completion()), origin))
        else:
            made.append(TokenizedExample(prompt, (completion(),), origin, label=i % 2 == 0))
    return PreferenceDataset(made if layout == "paired" else pair_mismatched(made, seed))


def objective(
    loss: str = "dpo",
    lora: Lora | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    head: HeadOptions | None = None,
    **parameters,
) -> Objective:
    model = llama(seed, dtype)
    if lora is not None:
        torch.manual_seed(seed + 1)
        model = add_adapter(model, lora)
        if dtype == torch.float64:
            model = model.to(dtype)
    policy = Policy(model, dtype=dtype, head=head)
    return Objective(policy, default_reference(policy), make_loss(loss, **parameters))


def loss_layout(name: str) -> str:
    return "unpaired" if name == "kto" else "paired"


def arguments(folder, **fields):
    defaults = {
        "use_cpu": True,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "per_device_train_batch_size": 2,
    }
    return training_arguments(str(folder), **(defaults | fields))


def trainer(folder, goal: Objective, data: PreferenceDataset, evaluation=None, callbacks=(), **fields):
    return PreferenceTrainer(goal, arguments(folder, **fields), data, evaluation, callbacks=callbacks)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
