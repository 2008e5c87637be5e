"""python bench/trl_auroc.py DIRECTORY --steps=N: the AUROC that TRL's PRM trainer reaches, over its training time.

The peer of bench/time_to_auroc.py, which describes DIRECTORY. Runs in an environment of its own with TRL 1.13, whose
trainer does all of the training: its tokenization, collator, loss, AdamW and schedule. The clock runs from the first
step on, and stands still in evaluations.

Prints a last line of JSON: "curve", a list of [steps, seconds, AUROC of the distinct held-out steps], and "positives"
and "negatives", the numbers of those steps.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from typing import Any

import torch
from common import positive, run_main
from datasets import Dataset
from scipy.stats import rankdata
from transformers import AutoModelForTokenClassification, AutoTokenizer, TrainerCallback
from trl.experimental.prm import PRMConfig, PRMTrainer

SEPARATOR = "\n\n"
FIELDS = ("prompt", "completions", "labels")


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [{**{name: row[name] for name in FIELDS}, "labels": [bool(x) for x in row["labels"]]} for row in rows]


class HeldOut:
    """AUROC over distinct steps: same question, same steps before it, same text; the mean label, above 0.5 positive."""

    def __init__(self, trainer: PRMTrainer, rows: list[dict[str, Any]], batch: int) -> None:
        self.encoded = [trainer.eval_dataset[number] for number in range(len(rows))]
        self.order = sorted(range(len(rows)), key=lambda number: len(self.encoded[number]["input_ids"]))
        self.batch, self.collate = batch, trainer.data_collator
        labels: dict[tuple[str, ...], list[bool]] = {}
        self.keys = []
        for row in rows:
            keys = [(row["prompt"], *row["completions"][: end + 1]) for end in range(len(row["labels"]))]
            self.keys.append(keys)
            for key, label in zip(keys, row["labels"], strict=True):
                labels.setdefault(key, []).append(label)
        self.positive = {key: sum(found) / len(found) > 0.5 for key, found in labels.items()}

    def auroc(self, model: Any) -> float:
        scores: dict[tuple[str, ...], float] = {}
        with torch.no_grad():
            for start in range(0, len(self.order), self.batch):
                chosen = self.order[start : start + self.batch]
                batch = self.collate([self.encoded[number] for number in chosen])
                labels = batch.pop("labels")
                logits = model(**batch).logits.float()
                for number, row, own in zip(chosen, logits, labels, strict=True):
                    z = (row[:, 1] - row[:, 0])[own >= 0].tolist()
                    scores.update(zip(self.keys[number], z, strict=True))
        keys = list(self.positive)
        rank = rankdata([scores[key] for key in keys])
        truth = torch.tensor([self.positive[key] for key in keys]).numpy()
        positives, negatives = int(truth.sum()), int((~truth).sum())
        return float((rank[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


class Clock(TrainerCallback):
    """Evaluates every some steps, and leaves that out of the time."""

    def __init__(self, every: int) -> None:
        self.every, self.curve, self.held_out = every, [], None
        self.started = self.paused = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        now = time.perf_counter()
        model.eval()
        auroc = self.held_out.auroc(model)
        model.train()
        self.curve.append([state.global_step, now - self.started - self.paused, auroc])
        print(f"step {state.global_step}: {self.curve[-1][1]:.1f} s, AUROC {auroc:.4f}", flush=True)
        self.paused += time.perf_counter() - now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--steps", type=positive, required=True)
    parser.add_argument("--every", type=positive, default=50)
    parser.add_argument("--batch_size", type=positive, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--warmup", type=float, default=0.1)
    parser.add_argument("--adam_b2", type=float, default=0.999)
    parser.add_argument("--max_length", type=positive, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    train, held_out = read(args.directory / "train.jsonl"), read(args.directory / "held_out.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(args.directory / "model")
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForTokenClassification.from_pretrained(args.directory / "model", num_labels=2, dtype=torch.float32)
    clock = Clock(args.every)
    with tempfile.TemporaryDirectory() as scratch:
        config = PRMConfig(
            output_dir=scratch,
            max_length=args.max_length,
            step_separator=SEPARATOR,
            per_device_train_batch_size=args.batch_size,
            gradient_checkpointing=False,
            bf16=False,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            warmup_steps=round(args.warmup * args.steps),
            lr_scheduler_type="linear",
            adam_beta2=args.adam_b2,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            logging_steps=10**9,
            seed=args.seed,
        )
        trainer = PRMTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(train),
            eval_dataset=Dataset.from_list(held_out),
            callbacks=[clock],
        )
        clock.held_out = HeldOut(trainer, held_out, 4 * args.batch_size)
        trainer.train()
    truth = list(clock.held_out.positive.values())
    print(json.dumps({"curve": clock.curve, "positives": sum(truth), "negatives": len(truth) - sum(truth)}))


if __name__ == "__main__":
    run_main(main)
