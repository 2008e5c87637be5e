"""python bench/trl_first_step.py DIRECTORY --first_rows=N: TRL's PRM trainer's token ids and loss of N rows.

Runs in the environment of the peer, not of this repository. DIRECTORY holds train.jsonl and model/, as
bench/training.py describes. Prints one JSON line: token ids and labels of each of the first N rows, and the loss of
one batch of them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile

import torch
from common import run_main
from datasets import Dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer
from trl.experimental.prm import PRMConfig, PRMTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--first_rows", type=int, default=32)
    args = parser.parse_args()
    folder = args.directory
    with (folder / "train.jsonl").open() as lines:
        rows = [json.loads(line) for _, line in zip(range(args.first_rows), lines, strict=False)]
    for row in rows:
        row["labels"] = [bool(label) for label in row["labels"]]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForTokenClassification.from_pretrained(folder / "model", num_labels=2, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as scratch:
        config = PRMConfig(
            output_dir=scratch,
            max_length=2048,
            step_separator="\n\n",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = Dataset.from_list([{key: row[key] for key in ("prompt", "completions", "labels")} for row in rows])
        trainer = PRMTrainer(model=model, args=config, processing_class=tokenizer, train_dataset=data)
        encoded = [trainer.train_dataset[i] for i in range(len(rows))]
        with torch.no_grad():
            loss = trainer.compute_loss(model, trainer.data_collator(encoded))
    print(
        json.dumps(
            {
                "input_ids": [list(row["input_ids"]) for row in encoded],
                "labels": [list(row["labels"]) for row in encoded],
                "loss": float(loss),
            }
        )
    )


if __name__ == "__main__":
    run_main(main)
