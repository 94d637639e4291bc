"""Token ids and masks, truncation, packing into batches, sampling, pairing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import tiny
from preftune.data import PreferenceDataset, StepSampler, collate, tokenize_examples
from preftune.data.formats import examples_from_rows
from preftune.data.holdout import hold_out
from preftune.data.pairing import pair_mismatched
from preftune.data.template import resolve_chat_template
from preftune.data.truncate import truncate
from preftune.errors import DataError, ModelError
from preftune.types import Completion, Origin, TokenizedExample


def turn(role, content):
    return {"role": role, "content": content}


def load(*rows):
    return examples_from_rows([(row, Origin("p.jsonl", i)) for i, row in enumerate(rows, 1)], "p.jsonl")


def tokenize(tokenizer, *rows, **options):
    return tokenize_examples(load(*rows), tokenizer, **({"max_length": 200} | options))


def chat(question, *answers):
    sides = dict(zip(("chosen", "rejected"), ([turn("assistant", a)] for a in answers), strict=True))
    return {"prompt": [turn("user", question)], **sides}


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_plain_text_gets_one_bos_and_one_end(tokenizer):
    """B22, B25: BOS once, at position 0; the end once."""
    adding = tiny.tokenizer()
    adding._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    for made, bos in ((adding, [1]), (tokenizer, [])):
        dataset, _ = tokenize(made, {"prompt": "the cat", "chosen": " sat", "rejected": " is"})
        example = dataset[0]
        assert list(example.prompt_ids[: len(bos)]) == bos
        for completion in example.completions:
            sequence = example.prompt_ids + completion.ids
            assert sequence.count(1) == len(bos)
            assert sequence.count(2) == 1
            assert sequence[-1] == 2


def test_ends_and_beginnings_written_into_plain_text_do_not_double():
    """B22, B25: one end is the end; two, or a second beginning, are refused."""
    made = tiny.tokenizer()
    dataset, _ = tokenize(made, {"prompt": "a", "chosen": "b</s>", "rejected": "c"})
    assert dataset[0].completions[0].ids.count(2) == 1
    with pytest.raises(DataError, match="the answer ends in two '</s>'"):
        tokenize(made, {"prompt": "a", "chosen": "b</s></s>", "rejected": "c"})
    adding = tiny.tokenizer()
    adding._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    dataset, _ = tokenize(adding, {"prompt": "<s>a", "chosen": "b", "rejected": "c"})
    assert dataset[0].prompt_ids.count(1) == 1
    with pytest.raises(DataError, match="the prompt holds '<s>' in its text"):
        tokenize(adding, {"prompt": "a <s>", "chosen": "b", "rejected": "c"})


def test_half_a_character_is_refused_by_row(tokenizer):
    with pytest.raises(DataError, match=r"p\.jsonl:1: the text holds half a character"):
        tokenize(tokenizer, {"prompt": "a", "chosen": "b\ud800", "rejected": "c"})


def test_a_template_that_fails_is_a_reason_not_a_traceback():
    with pytest.raises(DataError, match="the chat template refuses this row: division by zero"):
        tokenize(tiny.tokenizer("{{ 1 / 0 }}"), chat("q", "x", "y"))


def test_a_template_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve_chat_template(str(path))


def test_no_bos_defined():
    """B24."""
    dataset, _ = tokenize(tiny.tokenizer(bos_token=None), {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert None not in dataset[0].prompt_ids


def test_chat_sequence_is_the_templates_own_text(tokenizer):
    dataset, _ = tokenize(tokenizer, chat("what is it", "yes", "no"))
    example = dataset[0]
    for completion, answer in zip(example.completions, ("yes", "no"), strict=True):
        whole = tokenizer.apply_chat_template([turn("user", "what is it"), turn("assistant", answer)], tokenize=False)
        assert text_of(tokenizer, example.prompt_ids + completion.ids) == whole.rstrip("\n")
        assert text_of(tokenizer, completion.ids) == answer + "<|im_end|>"
        assert all(completion.mask)


def test_only_assistant_turns_are_scored(tokenizer):
    """B18: user text inside an answer of several turns is context."""
    row = chat("q", "x", "y")
    row["chosen"] = [turn("assistant", "x"), turn("user", "q2"), turn("assistant", "z")]
    dataset, _ = tokenize(tokenizer, row)
    chosen = dataset[0].completions[0]
    scored = text_of(tokenizer, [i for i, m in zip(chosen.ids, chosen.mask, strict=True) if m])
    assert scored == "x<|im_end|>z<|im_end|>"
    context = text_of(tokenizer, [i for i, m in zip(chosen.ids, chosen.mask, strict=True) if not m])
    assert context == "\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"


def test_prompt_ids_do_not_depend_on_the_answer(tokenizer):
    """B19: a prompt that ends in a space would merge with the answer."""
    dataset, _ = tokenize(tokenizer, {"prompt": "what is it ", "chosen": "yes", "rejected": "no"})
    example = dataset[0]
    assert text_of(tokenizer, example.prompt_ids) == "what is it "
    assert text_of(tokenizer, example.completions[0].ids[:-1]) == "yes"


def test_default_system_turn_is_in_the_prompt_only():
    """B29."""
    template = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe nice<|im_end|>\n' }}{% endif %}"
    made = tiny.tokenizer(template + tiny.CHATML)
    dataset, _ = tokenize(made, chat("q", "yes", "no"))
    assert text_of(made, dataset[0].prompt_ids).count("be nice") == 1
    assert "be nice" not in text_of(made, dataset[0].completions[0].ids)


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
NO_OPENING = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + tiny.CHATML


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (THINKING, chat("q", "r</think>x", "y"), "does not start with its text of the prompt; they differ after"),
        (NO_OPENING, chat("q", "x", "y"), "no generation prompt"),
        (NO_END, chat("q", "x", "y"), "would never learn to stop"),
        (NO_SYSTEM, chat("q", "x", "y") | {"prompt": [turn("system", "s"), turn("user", "q")]}, "no system turn"),
        (tiny.CHATML, chat("q", "x<|im_end|>", "y"), "two '<|im_end|>'"),
    ],
)
def test_templates_that_cannot_express_a_row_are_refused_with_the_reason(template, row, words):
    """B21, B25, B29a, B29b."""
    with pytest.raises(DataError) as error:
        tokenize(tiny.tokenizer(template), row)
    assert "p.jsonl:1: " in str(error.value)
    assert words in str(error.value)
    assert "0 usable of 1 rows" in str(error.value)


def test_a_template_that_opens_thinking_works_when_the_answer_goes_on_from_it():
    made = tiny.tokenizer(THINKING)
    dataset, _ = tokenize(made, chat("q", "<think>r</think>x", "<think>y</think>z"))
    assert text_of(made, dataset[0].completions[0].ids) == "r</think>x<|im_end|>"


def test_chat_without_a_template_names_the_cure():
    with pytest.raises(ModelError, match=r"set model\.chat_template to a name \(chatml, plain\)"):
        tokenize(tiny.tokenizer(None), chat("q", "x", "y"))


def test_chat_templates_by_name_file_and_text(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(tiny.CHATML)
    assert resolve_chat_template(str(path)) == tiny.CHATML == resolve_chat_template("chatml")
    assert resolve_chat_template("{{ x }}") == "{{ x }}"
    with pytest.raises(ModelError, match="did you mean 'chatml'"):
        resolve_chat_template("chatmll")


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_named_templates_work(name):
    made = tiny.tokenizer(resolve_chat_template(name))
    dataset, _ = tokenize(made, chat("q", "x", "y"))
    assert text_of(made, dataset[0].completions[0].ids) == "x" + ("<|im_end|>" if name == "chatml" else "</s>")


def test_bad_rows_stop_the_run_or_are_dropped_and_counted(tokenizer):
    """B08: reasons with places; nothing is loaded on."""
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": None}]
    with pytest.raises(DataError) as error:
        tokenize(tokenizer, *rows)
    assert "1 usable of 2 rows" in str(error.value)
    assert "p.jsonl:2: 'rejected' is null" in str(error.value)
    assert "data.bad_rows: drop" in str(error.value)
    dataset, report = tokenize(tokenizer, *rows, bad_rows="drop")
    assert len(dataset) == 1
    assert "  1 x 'rejected' is null" in report.lines()
    with pytest.raises(DataError, match="0 usable of 1 rows"):
        tokenize(tokenizer, rows[1], bad_rows="drop")


def test_plain_text_for_a_chat_model_is_noted(tokenizer):
    """B29c."""
    _, report = tokenize(tokenizer, {"prompt": "q", "chosen": "a", "rejected": "b"})
    assert any("plain text" in note for note in report.notes)


def completion(n):
    return Completion(tuple(range(10, 10 + n)), (True,) * n)


@pytest.mark.parametrize("policy", ["keep_start", "keep_end"])
def test_truncation_is_minimal_and_both_sides_share_the_prompt(policy):
    """B34, B35: prompt 8, answers 4 and 2, limit 10: 2 prompt tokens go, not 3."""
    prompt, cut = truncate(tuple(range(8)), (completion(4), completion(2)), 10, policy)
    assert prompt == (tuple(range(6)) if policy == "keep_start" else tuple(range(2, 8)))
    assert [len(c.ids) for c in cut] == [4, 2]


def test_a_long_answer_loses_its_end_and_a_short_one_keeps_its_own():
    """B30, B34: every side keeps an answer token; cut text gets no end of turn."""
    prompt, cut = truncate((1, 2), (completion(12), completion(3)), 8, "keep_end")
    assert (len(prompt), [len(c.ids) for c in cut]) == (1, [7, 3])
    assert cut[0].ids == completion(12).ids[:7]


def test_rows_without_an_answer_left_are_counted_as_too_long(tokenizer):
    row = {"prompt": "q", "chosen": "a b c d e f", "rejected": "b"}
    with pytest.raises(DataError, match="0 usable of 1 rows"):
        tokenize(tokenizer, row, max_length=1, truncation="keep_end")
    with pytest.raises(DataError, match="longer than max_length"):
        tokenize(tokenizer, row, max_length=4)


def test_pairs_that_are_equal_once_cut_are_left_out(tokenizer):
    """B02, after truncation."""
    rows = [
        {"prompt": "q", "chosen": "the cat sat", "rejected": "the cat is"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ]
    _, report = tokenize(tokenizer, *rows, max_length=2, truncation="keep_end")
    assert [row.reason for row in report.too_long] == ["identical within max_length"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_layout(side):
    """Each target sits one after the position that predicts it, whatever the padding; B27: no id is special."""
    dataset = tiny.rows(5)
    batch = collate(dataset.examples, pad_id=2, side=side, width=40)
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.positions + 1], batch.targets)
    assert batch.lengths.tolist() == [c.scored for e in dataset.examples for c in e.completions]
    expected = [t for e in dataset.examples for c in e.completions for t in c.ids]
    assert batch.targets.tolist() == expected
    last_prompt = batch.positions[torch.cumsum(batch.lengths, 0) - batch.lengths]
    prompts = [e.prompt_ids[-1] for e in dataset.examples for _ in e.completions]
    assert flat[last_prompt].tolist() == prompts
    tokens = sum(len(e.prompt_ids) + len(c.ids) for e in dataset.examples for c in e.completions)
    assert batch.counts() == {"examples": 5, "completion_tokens": len(expected), "tokens": tokens}


def test_fillers_do_not_count():
    dataset = tiny.rows(3, "unpaired")
    batch = collate([dataset[0], dataset[~1]])
    scored = dataset[0].completions[0].scored
    tokens = scored + len(dataset[0].prompt_ids)
    assert batch.counts() == {"examples": 1, "completion_tokens": scored, "tokens": tokens}
    assert batch.mismatched.real.tolist() == [True, False]


@given(rows=st.integers(1, 60), batch=st.integers(1, 9), world=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_every_row_once_per_epoch_on_any_number_of_ranks(rows, batch, world, seed):
    ranks = [StepSampler(rows, batch, rank, world, seed) for rank in range(world)]
    micro = [list(sampler) for sampler in ranks]
    assert {len(m) for m in micro} == {len(ranks[0])}, "ranks meet at every micro-batch"
    keys = [key for m in micro for b in m for key in b]
    assert sorted(key for key in keys if key >= 0) == list(range(rows))
    assert all(b and len(b) <= batch for m in micro for b in m)
    whole = list(StepSampler(rows, batch * world, 0, 1, seed))
    for step, expected in enumerate(whole):
        assert sorted(k for m in micro for k in m[step] if k >= 0) == sorted(expected)


def test_order_depends_on_seed_and_epoch_only():
    first, second = StepSampler(50, 5, seed=3), StepSampler(50, 5, seed=3)
    torch.manual_seed(99)
    assert list(first) == list(second)
    second.set_epoch(1)
    assert list(first) != list(second)
    assert list(StepSampler(5, 2, seed=None)) == [[0, 1], [2, 3], [4]]


def unpaired(prompts_and_texts):
    return [
        TokenizedExample((p,), (Completion((t,), (True,)),), Origin("u", i), label=True)
        for i, (p, t) in enumerate(prompts_and_texts)
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=2, max_size=40), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_mismatched_pairs_never_share_prompt_or_text(rows, seed):
    """B79."""
    examples = unpaired(rows)
    possible = [any(p != q and t != u for q, u in rows) for p, t in rows]
    if not any(possible):
        with pytest.raises(DataError, match="no two rows differ"):
            pair_mismatched(examples, seed)
        return
    paired = pair_mismatched(examples, seed)
    assert paired == pair_mismatched(examples, seed)
    texts = {(p, t) for p, t in rows}
    for example, can in zip(paired, possible, strict=True):
        assert (example.mismatched is not None) == can
        if example.mismatched is not None:
            assert example.mismatched.ids != example.completions[0].ids
            assert any(p != example.prompt_ids[0] and (t,) == example.mismatched.ids for p, t in texts)


def test_a_part_with_one_prompt_borrows_from_the_rows_that_lend():
    part, others = unpaired([(1, 10), (1, 11)]), unpaired([(2, 10), (3, 12)])
    with pytest.raises(DataError, match="no two rows differ"):
        pair_mismatched(part, 0)
    assert [e.mismatched.ids for e in pair_mismatched(part, 0, others)] in ([(12,), (10,)], [(12,), (12,)])


def test_each_completion_is_lent_once_where_prompts_are_many():
    paired = pair_mismatched(unpaired([(i // 2, i) for i in range(40)]), 0)
    assert sorted(e.mismatched.ids[0] for e in paired) == list(range(40))


def test_holding_out_keeps_prompts_apart():
    rows = [{"prompt": f"p{i % 10}", "chosen": f"a{i}", "rejected": "b"} for i in range(40)]
    train, held = hold_out(load(*rows), 0.2, seed=1)
    assert len(held.examples) == 8
    assert {e.prompt for e in train.examples}.isdisjoint(e.prompt for e in held.examples)
    assert len(train.examples) + len(held.examples) == 40
    assert [e.chosen for e in hold_out(load(*rows), 0.2, seed=1)[1].examples] == [e.chosen for e in held.examples]
    with pytest.raises(DataError, match="same prompt"):
        hold_out(load(rows[0], rows[10]), 0.5, 0)


def test_fingerprint_sees_every_part():
    base = tiny.rows(4, "unpaired")
    seen = {base.fingerprint, PreferenceDataset(base.examples[::-1]).fingerprint}
    from dataclasses import replace

    for change in ({"label": False}, {"prompt_ids": (9,)}, {"mismatched": None}, {"completions": (completion(3),)}):
        seen.add(PreferenceDataset([replace(base.examples[0], **change), *base.examples[1:]]).fingerprint)
    assert len(seen) == 6
    assert PreferenceDataset(base.examples).fingerprint == base.fingerprint
