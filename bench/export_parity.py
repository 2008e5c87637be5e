"""Do an exported PRM in torch and `score` give the same step scores?

    python bench/export_parity.py --export=DIRECTORY --scored=FILE [--questions=N] [--candidates=N]

DIRECTORY is what `python -m cfprm_jax.export` wrote in any format, FILE what `score` wrote for candidates with steps.
Nothing of cfprm_jax is used: transformers runs the network, followed for process_reward_model and reward_model by a
Linear, ReLU, Linear that is written out here; texts become tokens by the tokenizer's chat template and the marker that
the directory names. Needs torch.

torch computes with the directory's weights in float32, which is what bfloat16 is to be measured by, and in bfloat16
with each of its two attention functions (--torch names some of the three). Prints one JSON line: the largest
difference, and the root of the mean square, of `score` from each and of each in bfloat16 from float32.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import torch
from common import positive, run_main
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, Qwen2Model

WAYS = {
    "float32": (torch.float32, "sdpa"),
    "bfloat16": (torch.bfloat16, "sdpa"),
    "bfloat16_eager": (torch.bfloat16, "eager"),
}


def open_export(directory: pathlib.Path, dtype: torch.dtype, attention: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Token ids [1, length] to scores [length]; no tensor of the directory without a place, nor the reverse."""
    raw = json.loads((directory / "config.json").read_text())
    if raw["architectures"] == ["Qwen2ForTokenClassification"]:
        classifier, loading = AutoModelForTokenClassification.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
        assert not any(loading.values()), loading
        classifier.eval()
        return lambda ids: classifier(ids).logits[0].float().softmax(-1)[:, 1]
    width, labels = raw["hidden_size"], raw["num_labels"]
    assert (raw["architectures"], labels) in ((["Qwen2ForProcessRewardModel"], 2), (["Qwen2ForRewardModel"], 1))
    backbone = AutoConfig.from_pretrained(directory, attn_implementation=attention)
    score = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, labels))
    model = torch.nn.ModuleDict({"model": Qwen2Model(backbone), "score": score}).to(dtype)
    model.load_state_dict({k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()})
    model.eval()

    def scores(ids: torch.Tensor) -> torch.Tensor:
        logits = model["score"](model["model"](ids).last_hidden_state)[0].float()
        return logits.softmax(-1)[:, 1] if labels == 2 else logits[:, 0].sigmoid()

    return scores


def encoded(options: argparse.Namespace) -> list[tuple[list[int], list[bool], list[float]]]:
    """The token ids, marker positions and scores of every candidate."""
    encoding = json.loads((options.export / "prm.json").read_text())["encoding"]
    tokenizer = AutoTokenizer.from_pretrained(options.export)
    (marker,) = tokenizer(encoding["marker"], add_special_tokens=False)["input_ids"]
    out = []
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
            out.append((ids, [token == marker for token in ids], candidate["step_scores"]))
    return out


def differences(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    return {"largest": (a - b).abs().max().item(), "rms": (a - b).square().mean().sqrt().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=pathlib.Path, required=True)
    parser.add_argument("--scored", type=pathlib.Path, required=True)
    parser.add_argument("--torch", nargs="+", choices=tuple(WAYS), default=["float32"])
    parser.add_argument("--questions", type=positive, default=4)
    parser.add_argument("--candidates", type=positive, default=2)
    options = parser.parse_args()

    candidates = encoded(options)
    ours = torch.tensor([score for *_, scores in candidates for score in scores], dtype=torch.float64)
    theirs, started = {}, time.monotonic()
    for way in options.torch:
        dtype, attention = WAYS[way]
        model = open_export(options.export, dtype, attention)
        with torch.no_grad():
            scores = [model(torch.tensor([ids]))[torch.tensor(markers)] for ids, markers, _ in candidates]
        theirs[way] = torch.cat(scores).double()
        del model
    result: dict[str, object] = {"steps": len(ours), "torch": torch.__version__}
    result["score from torch"] = {way: differences(ours, scores) for way, scores in theirs.items()}
    if "float32" in theirs:
        result["torch from torch float32"] = {
            way: differences(scores, theirs["float32"]) for way, scores in theirs.items() if way != "float32"
        }
    if {"bfloat16", "bfloat16_eager"} <= theirs.keys():
        result["torch bfloat16, sdpa from eager"] = differences(theirs["bfloat16"], theirs["bfloat16_eager"])
    print(json.dumps({**result, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    run_main(main)
