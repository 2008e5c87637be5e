"""label with the sampler of this process and a small random language model: counts by name, and prefill once."""

from __future__ import annotations

import json

import jax
import pytest

pytest.importorskip("torch")
from tiny_policies import write_language_model

from cfprm_jax import flags, label
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
    assert "of one prefill a rollout" in capsys.readouterr().out
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
    # A block a question, whose longest prefix holds the others.
    assert this["prompt_tokens_computed"] == 2 * 128 < this["prompt_tokens_one_prefill_a_rollout"]
    # A log of which the last rows are missing is completed to the same bytes.
    log, output = tmp_path / "eight.rollouts.jsonl", tmp_path / "eight.jsonl"
    expected = output.read_bytes()
    output.unlink()
    (tmp_path / "eight.rollouts.jsonl.partial").write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    log.unlink()
    assert run(policy, source, output, "--rollouts=8", "--resume=auto") == 0
    assert output.read_bytes() == expected
    assert json.loads((tmp_path / "eight.label.json").read_text())["this_run"]["rollouts"] == 32
