"""preftune tunes language models on preferences, offline: exact, fast and light.

The parts, from data to a trained adapter:

    loaded = preftune.load_examples("prefs.jsonl")
    policy = preftune.load_policy("HuggingFaceTB/SmolLM2-135M-Instruct", adapter=preftune.Lora(r=16))
    rows, report = preftune.tokenize_examples(loaded, policy.tokenizer, max_length=2048)
    objective = preftune.Objective(policy, preftune.default_reference(policy), preftune.make_loss("dpo", beta=0.1))
    trainer = preftune.PreferenceTrainer(objective, preftune.training_arguments("runs/first"), rows)
    trainer.train()
"""

from importlib.metadata import version

__version__ = version("preftune")
