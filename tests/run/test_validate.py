"""Options that are refused by themselves, before any file is looked at."""

from __future__ import annotations

import pytest

from cfprm_jax import flags, train
from cfprm_jax.errors import UserError
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.validate import refuse_unused, validate_options

COMPACT = "--optimizer=adamw_compact"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([COMPACT, "--dtype=float32"], "computes with bfloat16 weights, but --dtype is float32"),
        ([COMPACT, "--lora_rank=2"], "saves nothing beside --lora_rank"),
        (["--lora_rank=2", "--init=random"], "--lora_rank needs a backbone with weights of its own"),
        (["--lora_rank=2", "--lora_targets=query,lm_head"], "--lora_targets: lm_head is not among"),
        (["--lora_rank=2", "--lora_alpha=0"], "--lora_alpha=0.0 is outside"),
        (["--bon_candidates=nowhere.jsonl", "--bon_n=x"], "--bon_n: 'x' is not a whole number from 1"),
        (["--train_data="], "--train_data is empty"),
        (["--train_data=synthetic,a.jsonl"], "--train_data=synthetic,a.jsonl: synthetic"),
        (["--model=synthetic"], "--model is missing: .*--model=synthetic --init=random"),
        (["--keep_best=auroc", "--eval_fraction=0"], "--keep_best=auroc requires --eval_data"),
        (["--ranking_negatives=question"], "=question is for .* --label_weight=node, not .* --label_weight=trajectory"),
        (["--ranking_negatives=question", "--loss=bce", "--label_weight=node"], "not --loss=bce --label_weight=node"),
        (["--record_chunk=0", "--packing=sequence"], "--record_chunk=0 is for --packing=tree; --packing=sequence"),
        (["--record_chunk=4", "--packing=none"], "--record_chunk=4 is for --packing=tree; --packing=none"),
        (["--margin=2", "--loss=bce"], "--margin=2 is for --loss=q_ranking, not bce"),
        (["--margin=0", "--loss=mse", "--granularities=whole"], "--margin=0 is for --loss=q_ranking, not mse"),
        (["--lora_alpha=16"], "--lora_alpha=16 is for runs with --lora_rank above 0"),
        (["--lora_targets=query,value"], "--lora_targets=query,value is for runs with --lora_rank above 0"),
        (["--decay=constant", "--final_rate_fraction=0.1"], "--final_rate_fraction=0.1 is for --decay=cosine and lin"),
        (["--window_tail=drop"], "--window_tail=drop is for granularities of 2 steps or more, not --granularities=1"),
        (["--window_stride=1", "--granularities=whole,1"], "--window_stride=1 is for .* not --granularities=whole,1"),
        (["--schedule=shuffled"], "--schedule=shuffled is for several granularities, and --granularities=1 is one"),
        (["--eval_every=10", "--eval_fraction=0"], "--eval_every=10 is for runs with --eval_data, or an --eval_frac"),
        (["--eval_max_trajectories=8", "--eval_fraction=0"], "--eval_max_trajectories=8 is for runs with --eval_data"),
        (["--bon_n=4"], "--bon_n=4 is for runs with --bon_candidates"),
        (["--distributed=off"], "--coordinator=127.0.0.1:1 is for distributed runs, not --distributed=off"),
    ],
)
def test_before_anything_is_read(tmp_path, options: list[str], message: str) -> None:
    """Neither model nor corpus is there, several processes would wait for each other: the options come first."""
    missing = ["--model=/nowhere", "--train_data=nowhere.jsonl", f"--output_dir={tmp_path / 'run'}"]
    missing += ["--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=1"]
    with pytest.raises(UserError, match=message):
        train.main(flags.parse(TrainConfig, ["train", *missing, *options]))
    assert not (tmp_path / "run").exists()


def test_what_is_right_passes() -> None:
    validate_options(TrainConfig())
    validate_options(flags.parse(TrainConfig, ["train", "--keep_best=auroc", "--eval_fraction=0"]))  # own held-out file
    validate_options(flags.parse(TrainConfig, ["train", COMPACT]))
    for given in (
        "--record_chunk=0",
        "--packing=none",
        "--label_weight=node --ranking_negatives=question",
        "--margin=2 --lora_rank=2 --lora_alpha=4 --decay=linear --final_rate_fraction=0.1",
        "--c_max=2 --window_tail=drop --window_stride=1 --schedule=fine_to_coarse",
        "--eval_fraction=0 --eval_every=3 --eval_max_trajectories=4 --bon_candidates=synthetic --bon_n=4",
        "--distributed=off",
        # At their defaults.
        "--loss=bce --margin=4 --lora_alpha=32 --decay=constant --final_rate_fraction=0 --bon_n=auto",
    ):
        refuse_unused(flags.parse(TrainConfig, ["train", *given.split()]))
    validate_options(flags.parse(TrainConfig, ["train", "--model=m", "--train_data=a", "--lora_rank=2"]))
