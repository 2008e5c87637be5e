"""python bench/torch_loop.py DIRECTORY --batch_size=B --steps=S: training a PRM in a plain torch and transformers loop.

A peer for bench/training.py, on CPU or GPU; runs in an environment of its own with torch and transformers. DIRECTORY
holds train.jsonl and model/, as bench/training.py describes. The loop does what a careful user would: the trajectories
of an optimizer step in order of length, padded to the longest of each micro-batch, attention by torch's
scaled_dot_product_attention, float32 weights, with --dtype=bfloat16 under autocast, clipping, fused AdamW, and no
activations recomputed.

Prints a last line of JSON. With --first_rows=N it trains nothing and prints token ids, labels and loss of N rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import positive, run_main
from transformers import AutoModelForTokenClassification, AutoTokenizer

SEPARATOR = "\n\n"
UNLABELLED = -100


def encode(tokenizer: Any, row: dict[str, Any], most: int) -> tuple[list[int], list[int]]:
    """Token ids, and labels: of each step at the separator behind it, UNLABELLED elsewhere."""
    separator = tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"]
    ids = list(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"])
    labels = [UNLABELLED] * len(ids)
    for text, label in zip(row["completions"], row["labels"], strict=True):
        step = tokenizer(text, add_special_tokens=False)["input_ids"] + separator
        ids += step
        labels += [UNLABELLED] * (len(step) - 1) + [int(bool(label))]
    return ids[:most], labels[:most]


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)

    def fill(values: list[int], value: int) -> list[int]:
        return values + [value] * (longest - len(values))

    return {
        "input_ids": torch.tensor([fill(ids, pad) for ids, _ in rows], device=device),
        "attention_mask": torch.tensor([fill([1] * len(ids), 0) for ids, _ in rows], device=device),
        "labels": torch.tensor([fill(labels, UNLABELLED) for _, labels in rows], device=device),
    }


def total_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy summed over the steps."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=UNLABELLED, reduction="sum"
    )


def labelled(rows: Sequence[tuple[list[int], list[int]]]) -> int:
    return sum(label != UNLABELLED for _, labels in rows for label in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--batch_size", type=positive, default=32, help="trajectories an optimizer step")
    parser.add_argument("--micro_batch", type=positive, default=8, help="trajectories of a forward pass")
    parser.add_argument("--steps", type=positive, default=4, help="steps that are timed, besides a first one")
    parser.add_argument("--max_length", type=positive, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--first_rows", type=int, default=0, help="print the loss of this many rows instead")
    args = parser.parse_args()

    device = torch.device(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.directory / "model")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    with (args.directory / "train.jsonl").open() as lines:
        rows = [encode(tokenizer, json.loads(line), args.max_length) for line in lines]
    if args.batch_size > len(rows):
        parser.error(f"--batch_size={args.batch_size}: {args.directory / 'train.jsonl'} has {len(rows)} rows")
    model = AutoModelForTokenClassification.from_pretrained(
        args.directory / "model", num_labels=2, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    if args.first_rows:
        rows, model = rows[: args.first_rows], model.eval()
        with torch.no_grad():
            loss = total_loss(model, padded(rows, pad, device)).item() / labelled(rows)
        ids, labels = zip(*rows, strict=True)
        print(json.dumps({"input_ids": ids, "labels": labels, "loss": loss}))
        return

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6, weight_decay=0.0, fused=True)
    random.Random(0).shuffle(rows)
    wide = torch.autocast(device.type, torch.bfloat16) if args.dtype == "bfloat16" else contextlib.nullcontext()
    started, tokens, losses = 0.0, 0, []
    for number in range(args.steps + 1):
        if number == 1:  # the first one warms up
            if device.type == "cuda":
                torch.cuda.synchronize()
            started, tokens = time.perf_counter(), 0
        first = number * args.batch_size % (len(rows) - args.batch_size + 1)
        batch = sorted(rows[first : first + args.batch_size], key=lambda row: -len(row[0]))
        count = labelled(batch)
        total = torch.zeros((), device=device)
        for at in range(0, len(batch), args.micro_batch):
            with wide:
                loss = total_loss(model, padded(batch[at : at + args.micro_batch], pad, device)) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
        tokens += sum(len(ids) for ids, _ in batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(
        json.dumps(
            {
                "trajectories_per_s": args.steps * args.batch_size / seconds,
                "tokens_per_s": tokens / seconds,
                "seconds_per_step": seconds / args.steps,
                "losses": losses,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    run_main(main)
