"""Training adapters: what changes, what is saved, resuming, scoring, exporting, and a backbone that has changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from tiny_runs import TinyRuns, before_step, finish, rows, same_result, wait_for_step

import cfprm_jax
from cfprm_jax import export, flags, train
from cfprm_jax.checkpoints import saving
from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.models import lora, parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.prm import apply
from cfprm_jax.sharding import rules

pytestmark = pytest.mark.quick_compile

LORA = {"init": "pretrained", "lora_rank": 2, "lora_alpha": 8, "lora_targets": "q_proj,value,down"}
QUESTION, STEPS = "What is 2?", ["1+1", "2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, compiled_programs) -> TinyRuns:
    """Of a model with random weights, stored in bfloat16 as a language model's."""
    made = TinyRuns(tmp_path_factory.mktemp("lora"), compiled_programs)
    config = PRMConfig(loading.read_config(made.directory / "model")[0])
    generator = np.random.default_rng(0)
    tensors = {}
    for path, spec in parameters.walk(parameters.param_specs(config)):
        if path.startswith("head."):
            continue
        for name in spec.hf_names():
            noise = generator.standard_normal(spec.shape[1:] if spec.stacked else spec.shape)
            value = 1 + 0.2 * noise if spec.kind == "norm" else 0.3 * noise
            tensors[name] = value.astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(tensors, made.directory / "model" / "model.safetensors")
    return made


def run_here(arguments) -> int:
    return train.main(flags.parse(train.TrainConfig, ["train", *arguments, "--compile_cache_dir="]))


@pytest.fixture(scope="module")
def run(tiny) -> pathlib.Path:
    assert run_here(tiny.arguments("adapted", **LORA)) == 0
    return tiny.directory / "adapted"


def exported(run, directory, *arguments) -> pathlib.Path:
    given = [f"--checkpoint={run}", f"--output_dir={directory}", "--dtype=float32", *arguments]
    assert flags.run(export.ExportConfig, export.main, ["export", *given]) == 0
    return directory


def test_only_adapters_and_head_change(tiny, run):
    """Merged, every parameter that has no adapter is the backbone's to the bit, and those that have one have moved."""
    loaded = loaded_prm.load_for_inference(run, "float32")
    base, _ = loading.load_params(tiny.directory / "model", loaded.config, head_key=jax.random.key(0))
    changed = {
        path
        for (path, before), (_, after) in zip(parameters.walk(base), parameters.walk(loaded.params), strict=True)
        if not np.array_equal(before, after)
    }
    adapted = {f"backbone.layers.{place}.kernel" for place in ("attention.query", "attention.value", "mlp.down")}
    assert changed == adapted | {"head.output.kernel", "head.output.bias"}
    assert rows(run)[-1]["step"] > 10


def test_a_checkpoint_holds_no_backbone(run):
    step = saving.newest(run)
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        stored = handler.metadata(run / "checkpoints" / str(step) / "state").tree
    names = list(ocp.tree.to_flat_dict(stored, sep="/"))
    assert any(name.endswith("lora_a") for name in names) and any("lora_b" in name for name in names)
    backbone = [name for name in names if "backbone" in name]
    assert backbone and all("lora_a" in name or "lora_b" in name for name in backbone)
    described = json.loads((run / "model" / "prm.json").read_text())["lora"]
    assert described["targets"] == ["query", "value", "down"]
    assert pathlib.Path(described["backbone"]).is_absolute()


def test_merged_equals_unmerged(tiny, run):
    loaded, adapted = loaded_prm.load_for_inference(run, "float32"), loaded_prm.load_adapters(run)
    base, _ = loading.load_params(tiny.directory / "model", loaded.config, head_key=jax.random.key(0))
    both = lora.combine({"backbone": base["backbone"]}, adapted.trainable, adapted.adapters.scale)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    inputs = (tokens, np.arange(40)[None].repeat(2, 0), np.full((2, 40), 40))
    forward = jax.jit(apply, static_argnums=0)
    unmerged = forward(adapted.config, both, *inputs)
    np.testing.assert_allclose(forward(loaded.config, loaded.params, *inputs), unmerged, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_killed_it_comes_to_the_same_end(tiny):
    """In bfloat16, the frozen backbone too."""
    options = {**LORA, "dtype": "bfloat16"}
    finish(tiny.start(tiny.arguments("straight", **options)))
    given = tiny.arguments("killed", **options)
    process = tiny.start(given, patch=before_step(9))
    wait_for_step(process, tiny.directory / "killed", 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resume      " in finish(tiny.start([*given, "--resume=auto"]))
    same_result(tiny.directory / "straight", tiny.directory / "killed")


def test_sharded_training_comes_to_the_same_loss(tiny, run):
    run_here(tiny.arguments("sharded", **LORA, mesh="data=2,fsdp=2,tensor=2"))
    one, other = ([row["loss"] for row in rows(r) if "loss" in row] for r in (run, tiny.directory / "sharded"))
    np.testing.assert_allclose(one[:4], other[:4], rtol=1e-4)
    np.testing.assert_allclose(one, other, rtol=0.05)


@pytest.mark.parametrize("format", ["token_classification", "process_reward_model", "reward_model"])
def test_it_scores_and_exports_like_any_run(format, run, tmp_path):
    scores = cfprm_jax.load(run).score(QUESTION, STEPS)
    assert len(scores) == 2
    out = exported(run, tmp_path / "out", f"--format={format}")
    np.testing.assert_allclose(cfprm_jax.load(out, "float32").score(QUESTION, STEPS), scores, atol=1e-5)
    assert "| adapters | rank 2, alpha 8, on q_proj, value, down |" in (out / "README.md").read_text()


def test_peft_loads_its_adapters(tiny, run, tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("peft")
    out = exported(run, tmp_path / "out", "--format=peft_adapter")
    model = library.AutoPeftModelForTokenClassification.from_pretrained(out, dtype=torch.float32).eval()
    loaded = loaded_prm.load_for_inference(run, "float32")
    tokens = np.random.default_rng(1).integers(0, 256, (1, 40))
    z = jax.jit(apply, static_argnums=0)(
        loaded.config, loaded.params, tokens, np.arange(40)[None], np.full((1, 40), 40)
    )
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.softmax(-1)[..., 1]
    np.testing.assert_allclose(theirs, jax.nn.sigmoid(z), atol=1e-5)
    card = (out / "README.md").read_text()
    assert "library_name: peft" in card and "AutoPeftModelForTokenClassification" in card
    with pytest.raises(UserError, match="adapters of PEFT alone"):
        cfprm_jax.load(out)


def test_a_run_without_adapters_has_none_to_export(tiny, tmp_path):
    run_here(tiny.arguments("whole", init="pretrained", max_steps=1))
    given = [f"--checkpoint={tiny.directory / 'whole'}", f"--output_dir={tmp_path / 'out'}", "--format=peft_adapter"]
    with pytest.raises(UserError, match="train --lora_rank"):
        export.main(flags.parse(export.ExportConfig, ["export", *given]))


def test_a_backbone_that_moved_or_changed_is_refused(tiny, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    described = json.loads((copy / "model" / "prm.json").read_text())
    moved = tmp_path / "moved"
    described["lora"]["backbone"] = str(moved)
    (copy / "model" / "prm.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"no such directory, which model/prm.json .* name its new place there"):
        cfprm_jax.load(copy)
    shutil.copytree(tiny.directory / "model", moved)
    assert cfprm_jax.load(copy).score(QUESTION, STEPS) == cfprm_jax.load(run).score(QUESTION, STEPS)
    tensors = safetensors.numpy.load_file(moved / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * ml_dtypes.bfloat16(2)
    safetensors.numpy.save_file(tensors, moved / "model.safetensors")
    with pytest.raises(UserError, match="holds other weights than those that the adapters were trained on"):
        cfprm_jax.load(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "random"}, "--lora_rank needs a backbone with weights of its own"),
        ({"lora_targets": "query,lm_head"}, "--lora_targets: lm_head is not among"),
        ({"dtype": "bfloat16", "optimizer": "adamw_compact"}, "saves nothing beside --lora_rank"),
    ],
)
def test_refusals(changes, message, tiny):
    with pytest.raises(UserError, match=message):
        run_here(tiny.arguments("refused", **{**LORA, **changes}))


def test_another_backbone_does_not_resume(tiny, run, tmp_path):
    other = shutil.copytree(tiny.directory / "model", tmp_path / "other")
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * ml_dtypes.bfloat16(2)
    safetensors.numpy.save_file(tensors, other / "model.safetensors")
    given = [*tiny.arguments("adapted", **LORA), "--resume=auto"]
    with pytest.raises(UserError, match=r"weights of the backbone was .* and is .*"):
        run_here([*given, f"--model={other}"])
    with pytest.raises(UserError, match="lora_rank was 2 and is 3"):
        run_here([*given, "--lora_rank=3"])


def test_real_weights(shared, tmp_path):
    """The 0.5B: merged equals unmerged, and only what has adapters moves."""
    import os

    directory = os.environ.get("CFPRM_JAX_QWEN_05B")
    if not directory:
        pytest.skip("needs CFPRM_JAX_QWEN_05B, a directory with Qwen2.5-Coder-0.5B")
    data = shared / "data" / "prm800k" / "phase1_test.jsonl"
    given = {
        "model": directory,
        "train_data": data,
        "lora_rank": 8,
        "max_length": 256,
        "batch_size": 4,
        "max_steps": 2,
        "eval_fraction": 0,
        "row_shapes": 1,
        "learning_rate": 1e-3,
        "dtype": "float32",
        "output_dir": tmp_path / "run",
        "data_cache_dir": tmp_path / "cache",
    }
    assert run_here([f"--{name}={value}" for name, value in given.items()]) == 0
    adapted = loaded_prm.load_adapters(tmp_path / "run")
    config = dataclasses.replace(adapted.config, attention="xla")
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    shardings = rules.param_shardings(mesh, parameters.param_specs(config))
    base, _ = loading.load_params(directory, config, shardings=shardings, dtype=jnp.float32, head_key=jax.random.key(0))
    frozen = {"backbone": base["backbone"]}
    record = json.loads(data.read_text().splitlines()[0])
    steps = [step["completions"][0]["text"] for step in record["label"]["steps"]]
    text = "\n\n".join([record["question"]["problem"], *steps])
    tokens = np.array(load_tokenizer(directory)(text)["input_ids"])[None]
    length = tokens.shape[1]
    assert length > 64
    inputs = (tokens, np.arange(length)[None], np.full((1, length), length))
    forward = jax.jit(apply, static_argnums=0)
    plain = forward(config, {**frozen, "head": adapted.trainable["head"]}, *inputs)
    unmerged = forward(config, lora.combine(frozen, adapted.trainable, adapted.adapters.scale), *inputs)
    untouched = {path: np.asarray(leaf) for path, leaf in parameters.walk(frozen) if not path.endswith("kernel")}
    merged = lora.merge(config, frozen, adapted.trainable, adapted.adapters, jnp.float32)
    difference = np.abs(jax.nn.sigmoid(forward(config, merged, *inputs)) - jax.nn.sigmoid(unmerged)).max()
    assert difference < 1e-5
    assert np.abs(plain - unmerged).max() > 1e-3
    for path, leaf in untouched.items():
        np.testing.assert_array_equal(parameters.lookup(merged, path), leaf, err_msg=path)
