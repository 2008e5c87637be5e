"""label with the sampler of this process and a small random language model: counts by name, and prefill once."""

from __future__ import annotations

import json
import re

import jax
import pytest

pytest.importorskip("torch")
from tiny_policies import write_language_model

from cfprm_jax import flags, label
from cfprm_jax.config import SYSTEM_PROMPT
from cfprm_jax.engines.engine import PrefixEncoder, open_tokenizer
from cfprm_jax.labelling.options import LabelConfig

STEPS = ["three+two=five", "five-four=one", "so=one", "answer=one"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("lm"), tied=True)[0]


def run(policy, source, output, *arguments):
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        base = [f"--model={policy}", f"--input={source}", f"--output={output}", "--compile_cache_dir=", "--mesh=data=1"]
        more = [
            "--grader=exact",
            "--max_new_tokens=12",
            "--max_truncated=1",
            "--batch_rows=8",
            "--nostop_at_zero",
            "--keep_texts",
        ]
        return flags.run(LabelConfig, label.main, ["label", *base, *more, *arguments])


def test_counts_depend_on_seed_and_prefix_alone_and_prefixes_are_computed_once(policy, tmp_path, capsys) -> None:
    source = tmp_path / "in.jsonl"
    rows = [
        {"id": number, "question": f"start=three+two-four{'+one' * number}", "answer": "one", "candidates": candidates}
        for number, candidates in enumerate(
            ([{"steps": STEPS}, {"steps": [*STEPS[:2], "answer=two"]}], [{"steps": STEPS}])
        )
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, arguments in (("eight", ("--rollouts=8",)), ("four", ("--rollouts=4", "--questions_at_once=1"))):
        assert run(policy, source, tmp_path / f"{name}.jsonl", *arguments) == 0
    assert re.search(
        r"prefill +\d+ tokens of prompts, \d+\.\d% of one prefill a rollout, and \d+ tokens of padding",
        capsys.readouterr().out,
    )
    eight, four = (
        {row["name"]: row for row in map(json.loads, (tmp_path / f"{name}.rollouts.jsonl").read_text().splitlines())}
        for name in ("eight", "four")
    )
    # Three prefixes of each question; the second candidate's two are the first one's.
    assert len(eight) == 6 and set(eight) == set(four)
    assert all(eight[name]["texts"][:4] == row["texts"] for name, row in four.items())
    assert len({text for row in eight.values() for text in row["texts"]}) > 24
    summary = json.loads((tmp_path / "eight.label.json").read_text())
    this = summary["this_run"]
    assert this["rollouts"] == summary["rollouts"] == 48
    # The longest prompt of each question, which holds the others, without its last token; one block, padded.
    encoder = PrefixEncoder(open_tokenizer(policy)[0], 1000, SYSTEM_PROMPT)
    prompts = [
        [encoder.encode(row["question"], "\n\n".join([*STEPS[:size], ""])) for size in (1, 2, 3)] for row in rows
    ]
    computed = sum(len(longest) - 1 for *_, longest in prompts)
    assert (this["prompt_tokens_computed"], this["padding_tokens_computed"]) == (computed, 2 * 128 - computed)
    each = 8 * sum(len(prompt) for of_question in prompts for prompt in of_question)
    assert (this["prompt_tokens_one_prefill_a_rollout"], this["share_computed"]) == (each, computed / each)
    # A log of which the last rows are missing is completed to the same bytes.
    log, output = tmp_path / "eight.rollouts.jsonl", tmp_path / "eight.jsonl"
    expected = output.read_bytes()
    output.unlink()
    (tmp_path / "eight.rollouts.jsonl.partial").write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    log.unlink()
    assert run(policy, source, output, "--rollouts=8", "--resume=auto") == 0
    assert output.read_bytes() == expected
    assert json.loads((tmp_path / "eight.label.json").read_text())["this_run"]["rollouts"] == 32
