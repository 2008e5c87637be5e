"""The plan command: what it makes of flags, its verdict, status and JSON; a real compiler on a small network."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from cfprm_jax import flags, plan
from cfprm_jax.config import PackingConfig
from cfprm_jax.data import row_shapes
from cfprm_jax.data.partition import separate_forest
from cfprm_jax.errors import UserError
from cfprm_jax.planning import ahead, remedies, request, start
from cfprm_jax.planning.accelerators import GIB
from cfprm_jax.planning.options import PlanConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAPER = ROOT / "configs/paper"


def parse(*arguments: str) -> PlanConfig:
    return flags.parse(PlanConfig, ["plan", *arguments])


def has(*names: str) -> bool:
    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return any(found(name) for name in names)


needs_gpu_compiler = pytest.mark.skipif(
    not has("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), reason="needs jax[cuda12]: pip install '.[aot]'"
)


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.flags")), ids=lambda p: p.stem)
def test_reads_the_papers_flag_files(path: pathlib.Path) -> None:
    planned = request.planned_step(
        parse(f"--flagfile={path}", *(["--model=Qwen2.5-7B"] if path.stem == "base" else []))
    )
    assert (planned.backbone.hidden_size, planned.backbone.num_hidden_layers) == (3584, 28)
    assert (planned.rows, planned.length, planned.trajectories) == (9, 2560, 32)  # what 11 rows of 2,048 hold
    assert (planned.config.model.dtype, planned.config.optimizer.optimizer) == ("bfloat16", "adamw_compact")


def shape(*arguments: str) -> tuple[int, int]:
    planned = request.planned_step(parse("--model=Qwen2.5-7B", "--batch_size=32", *arguments))
    return planned.rows, planned.length


def test_the_longest_rows_that_a_run_may_use_are_planned() -> None:
    assert shape("--packing=none") == (32, 2048)
    assert shape("--packing=sequence") == (9, 2560)  # a quarter longer than the longest solution
    assert shape("--packing=tree") == (4, 6144)  # three times as long
    assert shape("--packing=tree", "--row_length=2048") == (11, 2048)
    assert shape("--packing=tree", "--rows=5") == (5, 6144)
    # They are among those that train fits to data, and nothing is longer.
    for packing in ("none", "sequence", "tree"):
        config = PackingConfig(packing=packing)
        fitted = row_shapes.fit_shapes([separate_forest([np.zeros(2000, np.int32)])], config, 2048, 32)
        assert shape(f"--packing={packing}")[1] == fitted.longest


def test_the_description_of_the_rows() -> None:
    def described(*arguments: str) -> str:
        config = parse("--model=Qwen2.5-7B", "--batch_size=32", *arguments)
        return request.describe_rows(config, request.planned_step(config))

    text = described()
    assert text.startswith(
        "for --batch_size=32 solutions that fill 682 tokens each, of the longest that --packing=tree"
    )
    assert "--rows and --row_length plan others, up to 32 x 6144" in text
    assert described("--rows=5").startswith("--rows, of the longest")
    assert described("--packing=none", "--rows=4").startswith("--rows, of the longest that --packing=none makes")
    assert "of --row_length;" in described("--row_length=2048")
    assert described("--packing=none").startswith("one for each of --batch_size=32 solutions") and ";" not in described(
        "--packing=none"
    )


def test_rows() -> None:
    base = ["--model=Qwen2.5-7B", "--batch_size=32"]
    assert request.planned_step(parse(*base, "--rows=5", "--row_length=4096")).rows == 5
    assert request.planned_step(parse(*base, "--num_devices=16")).rows == 16
    assert request.planned_step(parse(*base, "--num_devices=8", "--mesh=data=1,fsdp=4,tensor=2")).rows == 4
    assert request.planned_step(parse(*base, "--rows=5", "--accumulation=2")).rows == 6


def test_the_shape_of_the_model(tmp_path: pathlib.Path) -> None:
    raw = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    raw |= {"num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert request.find_backbone(str(tmp_path), "").num_hidden_layers == 3
    assert request.find_backbone("anything", str(tmp_path / "config.json")).num_hidden_layers == 3
    assert request.find_backbone("models/Qwen2.5-14B", "").num_hidden_layers == 48
    with pytest.raises(UserError, match=r"--model=other is no directory .* --model_config=FILE"):
        request.find_backbone("other", "")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        request.find_backbone("x", str(tmp_path / "config.json"))


def test_a_mesh_that_does_not_fit_the_devices_is_refused() -> None:
    with pytest.raises(UserError, match=r"--mesh=.*3 devices, and there are 8"):
        request.planned_step(parse("--model=Qwen2.5-7B", "--num_devices=8", "--mesh=data=3"))
    with pytest.raises(UserError, match="max_position_embeddings=4096"):
        request.planned_step(parse("--model=Qwen2.5-Math-7B", "--max_length=8192"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora_rank=8", "--optimizer=adamw_compact"], "adamw_compact saves nothing beside --lora_rank"),
        (["--lora_rank=8", "--init=random"], "--lora_rank needs a backbone with weights of its own"),
        (["--lora_rank=8", "--lora_targets=lm_head"], "lm_head is not among"),
        (["--frozen_layers=4", "--init=random"], "--frozen_layers=4 needs a backbone with weights of its own"),
        (["--cache_frozen=auto"], "--cache_frozen needs --frozen_layers"),
    ],
)
def test_options_that_train_refuses_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        request.planned_step(parse("--model=Qwen2.5-7B", *arguments))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """A compiler whose steps take 60 GiB, or the value of the test."""

    def install(total: float, refused: str = "", at_start: float = 1.0) -> None:
        def compile_step(planned, accelerator):
            memory = ahead.Memory(GIB, GIB, GIB, 8, GIB, round(total * GIB) - 4 * GIB - 8, round(total * GIB))
            return ahead.Compiled(
                "cudnn", "NVIDIA H100 80GB HBM3", {"data": 1}, 7, memory, refused, (1.0, 2.0), 3, 3, {}, {}, 1e15, 16384
            )

        monkeypatch.setattr(ahead, "compile_step", compile_step)
        begun = start.Start(round(at_start * GIB), "loading backbone.embedding")
        monkeypatch.setattr(start, "compile_start", lambda planned, accelerator: begun)

    return install


def test_fits(stand_in, capsys, tmp_path: pathlib.Path) -> None:
    stand_in(60.0)
    output = tmp_path / "plan.json"
    assert plan.main(parse(f"--flagfile={PAPER / 'math_orm.flags'}", f"--output={output}")) == 0
    text = capsys.readouterr().out
    assert "fits        60.00 GiB of 75.10 GiB usable" in text
    figures = json.loads(output.read_text())
    assert figures["fits"] and figures["memory"]["total"] == 60 * GIB and figures["would_fit"] == []
    assert figures["config"]["loss"] == "bce" and (figures["rows"], figures["row_length"]) == (9, 2560)
    assert "activations 1.00 GiB, temporaries 56.00 GiB" in text
    assert figures["start"] == {"total": GIB, "what": "loading backbone.embedding"}


def test_the_model_line_names_what_is_trained(stand_in, capsys) -> None:
    stand_in(20.0)
    assert plan.main(parse("--model=Qwen2.5-7B", "--lora_rank=16", "--frozen_layers=14", "--cache_frozen=auto")) == 0
    text = capsys.readouterr().out
    assert "linear head, the first 14 layers frozen and cached, adapters of rank 16\n" in text


def test_does_not_fit(stand_in, capsys) -> None:
    stand_in(76.0)
    assert plan.main(parse("--model=Qwen2.5-7B", "--suggest=0")) == 1
    assert "too large   76.00 GiB of 75.10 GiB" in capsys.readouterr().out
    assert plan.main(parse("--model=Qwen2.5-7B", "--hbm_reserve=1")) == 0
    stand_in(20.0, "Ran out of memory in memory space hbm")
    assert plan.main(parse("--model=Qwen2.5-7B", "--suggest=0")) == 1
    assert "refused     Ran out of memory" in capsys.readouterr().out


def test_the_start_counts_where_it_is_more(stand_in, monkeypatch, capsys) -> None:
    stand_in(60.0, at_start=76.0)
    monkeypatch.setattr(remedies, "least_bytes", lambda planned, accelerator: 0)
    assert plan.main(parse("--model=Qwen2.5-7B", "--suggest=1")) == 1
    text = capsys.readouterr().out
    assert "would fit   nothing that was tried" in text
    assert "too large   76.00 GiB of 75.10 GiB usable on each device, at the start (loading backbone.embedding)" in text


@needs_gpu_compiler
def test_the_command(tmp_path: pathlib.Path) -> None:
    """In an environment without platform variables, on a network that does not fit an accelerator of little memory."""
    raw = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "cfprm_jax.plan", f"--model={tmp_path}", "--row_length=256", "--rows=2"]
    command += [f"--output={tmp_path / 'plan.json'}", "--hbm_reserve=79.08", "--suggest=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["memory"]["parameters"] == 4 * figures["parameters"]
    assert figures["aliased"] == figures["donated"]
    assert figures["attention"] == "cudnn" and sum(figures["attention_kernels"].values()) == 6
    memory = figures["memory"]
    assert sum(memory.values()) == 2 * memory["total"]
    assert memory["activations"] == 2 * 2 * 256 * 256 * 2  # two layers' inputs in bfloat16, 2 rows of 256 by 256
    assert figures["start"]["what"].startswith("loading ")
    assert memory["parameters"] + memory["optimizer"] <= figures["start"]["total"] < memory["total"]
    assert done.stdout.count("would fit") == 1


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[aot\]'"):
        plan.main(parse("--model=Qwen2.5-7B"))
