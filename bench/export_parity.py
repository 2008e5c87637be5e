"""Do an exported PRM in torch and `score` give the same step scores?

    python bench/export_parity.py --export=DIRECTORY --scored=FILE [--dtype=float32] [--questions=N] [--candidates=N]

DIRECTORY is what `python -m cfprm_jax.export` wrote in any format, FILE what `score` wrote for candidates with steps.
Prints one JSON line with the largest difference. Nothing of cfprm_jax is used: transformers runs the network, followed
for process_reward_model and reward_model by a Linear, ReLU, Linear that is written out here; texts become tokens by the
tokenizer's chat template and the marker that the directory names. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, Qwen2Model


def open_export(directory: pathlib.Path, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Token ids [1, length] to scores [length]; no tensor of the directory without a place, nor the reverse."""
    raw = json.loads((directory / "config.json").read_text())
    if raw["architectures"] == ["Qwen2ForTokenClassification"]:
        classifier, loading = AutoModelForTokenClassification.from_pretrained(
            directory, dtype=dtype, output_loading_info=True
        )
        assert not any(loading.values()), loading
        classifier.eval()
        return lambda ids: classifier(ids).logits[0].float().softmax(-1)[:, 1]
    width, labels = raw["hidden_size"], raw["num_labels"]
    assert (raw["architectures"], labels) in ((["Qwen2ForProcessRewardModel"], 2), (["Qwen2ForRewardModel"], 1))
    score = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, labels))
    model = torch.nn.ModuleDict({"model": Qwen2Model(AutoConfig.from_pretrained(directory)), "score": score}).to(dtype)
    model.load_state_dict({k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()})
    model.eval()

    def scores(ids: torch.Tensor) -> torch.Tensor:
        logits = model["score"](model["model"](ids).last_hidden_state)[0].float()
        return logits.softmax(-1)[:, 1] if labels == 2 else logits[:, 0].sigmoid()

    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=pathlib.Path, required=True)
    parser.add_argument("--scored", type=pathlib.Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=2)
    options = parser.parse_args()

    encoding = json.loads((options.export / "prm.json").read_text())["encoding"]
    tokenizer = AutoTokenizer.from_pretrained(options.export)
    model = open_export(options.export, getattr(torch, options.dtype))
    (marker,) = tokenizer(encoding["marker"], add_special_tokens=False)["input_ids"]

    worst, steps, started = 0.0, 0, time.monotonic()
    with options.scored.open() as file:
        questions = [json.loads(line) for _, line in zip(range(options.questions), file, strict=False)]
    for question in questions:
        messages = [
            *([{"role": "system", "content": encoding["system_prompt"]}] if encoding["system_prompt"] else []),
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
                probabilities = model(torch.tensor([ids]))
            scores = probabilities[torch.tensor(ids) == marker].tolist()
            differences = [abs(a - b) for a, b in zip(scores, candidate["step_scores"], strict=True)]
            worst, steps = max([worst, *differences]), steps + len(differences)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"steps": steps, "largest_difference": worst, "torch": torch.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
