"""Do an exported PRM in transformers and `score` give the same step scores?

    python bench/export_parity.py --export=DIRECTORY --scored=FILE [--questions=N] [--candidates=N]

DIRECTORY is what `python -m cfprm_jax.export --format=token_classification` wrote, FILE what `score` wrote for
candidates with steps. Prints one JSON line with the largest difference. Nothing of cfprm_jax is used: texts become
tokens here by the tokenizer's chat template and the marker that the directory names. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=pathlib.Path, required=True)
    parser.add_argument("--scored", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=2)
    options = parser.parse_args()

    encoding = json.loads((options.export / "prm.json").read_text())["encoding"]
    tokenizer = AutoTokenizer.from_pretrained(options.export)
    model, loading = AutoModelForTokenClassification.from_pretrained(
        options.export, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    model.eval()
    (marker,) = tokenizer(encoding["marker"], add_special_tokens=False)["input_ids"]

    worst, steps, started = 0.0, 0, time.monotonic()
    with options.scored.open() as file:
        questions = [json.loads(line) for _, line in zip(range(options.questions), file, strict=False)]
    for question in questions:
        messages = [
            {"role": "system", "content": encoding["system_prompt"]},
            {"role": "user", "content": question["question"]},
        ]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for candidate in question["candidates"][: options.candidates]:
            if candidate["step_scores"] is None:
                continue
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            for step in candidate["steps"]:
                ids += [*tokenizer(step, add_special_tokens=False)["input_ids"], marker]
            with torch.no_grad():
                probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
            scores = probabilities[torch.tensor(ids) == marker].tolist()
            differences = [abs(a - b) for a, b in zip(scores, candidate["step_scores"], strict=True)]
            worst, steps = max([worst, *differences]), steps + len(differences)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"steps": steps, "largest_difference": worst, "torch": torch.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
