"""The commands that score, on PRMs of other programs with the bodies that those have."""

from __future__ import annotations

import json

import numpy as np
import pytest
from encoding_fixtures import QUESTION, RLHFLOW_CARD, SHEPHERD_CARD, SOLUTIONS, TEMPLATE

import cfprm_jax
from cfprm_jax import flags, process_bench, score

PUBLISHED = {
    "math_shepherd": ("MistralForCausalLM", SHEPHERD_CARD, {"bos": "<s>", "words": ("ки", " -"), "adds_bos": True}),
    "rlhflow": ("LlamaForCausalLM", RLHFLOW_CARD, {"chat_template": TEMPLATE}),
}


@pytest.mark.parametrize("encoding", PUBLISHED)
def test_score_and_process_bench(encoding, make_reference, write_tokenizer, tmp_path, capsys):
    model = tmp_path / "model"
    classes, card, tokenizer = PUBLISHED[encoding]
    make_reference(classes, vocab_size=300, tie_word_embeddings=False).save_pretrained(model)
    write_tokenizer(model, **tokenizer)
    (model / "README.md").write_text(card, encoding="utf-8")
    prm = cfprm_jax.load(model, "float32")
    expected = [prm.score(QUESTION, steps) for steps in SOLUTIONS]

    pool, scored = tmp_path / "pool.jsonl", tmp_path / "scored.jsonl"
    row = {"id": "0", "question": QUESTION, "answer": "2", "candidates": [{"steps": steps} for steps in SOLUTIONS]}
    pool.write_text(json.dumps(row) + "\n")
    common = [f"--model={model}", "--dtype=float32", "--compile_cache_dir="]
    given = [*common, f"--input={pool}", f"--output={scored}"]
    assert flags.run(score.ScoreConfig, score.main, ["score", *given]) == 0, capsys.readouterr().err
    for candidate, scores in zip(json.loads(scored.read_text())["candidates"], expected, strict=True):
        np.testing.assert_allclose(candidate["step_scores"], scores, atol=2e-6)
    assert json.loads((tmp_path / "scored.jsonl.config.json").read_text())["encoding"] == encoding

    rows, out = tmp_path / "rows.json", tmp_path / "out"
    labelled = [
        {"id": f"gsm8k-{i}", "problem": QUESTION, "steps": steps, "label": len(steps) - 1}
        for i, steps in enumerate(SOLUTIONS)
    ]
    rows.write_text(json.dumps(labelled))
    given = [*common, f"--input={rows}", f"--output_dir={out}"]
    run = flags.run(process_bench.ProcessBenchConfig, process_bench.main, ["process_bench", *given])
    assert run == 0, capsys.readouterr().err
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    for prediction, scores in zip(predictions, expected, strict=True):
        np.testing.assert_allclose(prediction["step_scores"], scores, atol=2e-6)
        below = [place for place, value in enumerate(scores) if value < 0.5]
        assert prediction["prediction"] == (below[0] if below else -1)
