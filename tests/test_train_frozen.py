"""Training above frozen layers: what changes, what is saved, resuming, meshes, adapters, exporting."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from tiny_runs import TinyRuns, rows, same_result

import cfprm_jax
from cfprm_jax import export, flags, train
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.models import parameters
from cfprm_jax.models.config import PRMConfig

LAYERS, FROZEN = 3, 2
OPTIONS = {
    "init": "pretrained",
    "frozen_layers": FROZEN,
    "packing": "tree",
    "row_shapes": 1,
    "eval_fraction": 0,
    "c_max": 1,
    "max_steps": 4,
    "checkpoint_every": 2,
}
LORA = {"lora_rank": 2, "lora_alpha": 8, "lora_targets": "q_proj,down"}
QUESTION, STEPS = "What is 2?", ["1+1", "2"]


def write_weights(directory: pathlib.Path) -> None:
    """Random float32 weights that bfloat16 does not hold."""
    config = PRMConfig(loading.read_config(directory)[0])
    generator = np.random.default_rng(0)
    tensors = {}
    for path, spec in parameters.walk(parameters.param_specs(config)):
        if path.startswith("head."):
            continue
        for name in spec.hf_names():
            noise = generator.standard_normal(spec.shape[1:] if spec.stacked else spec.shape, np.float32)
            tensors[name] = 1 + 0.2 * noise if spec.kind == "norm" else 0.3 * noise
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyRuns:
    made = TinyRuns(tmp_path_factory.mktemp("frozen"))
    path = made.directory / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": LAYERS}))
    write_weights(made.directory / "model")
    return made


def run_here(arguments) -> int:
    return train.main(flags.parse(train.TrainConfig, ["train", *arguments, "--compile_cache_dir="]))


@pytest.fixture(scope="module")
def run(tiny) -> pathlib.Path:
    """In bfloat16, with the optimizer that needs it; its weights stand in the run as float32."""
    given = tiny.arguments("run", **{**OPTIONS, "dtype": "bfloat16", "optimizer": "adamw_compact"})
    assert run_here(given) == 0
    return tiny.directory / "run"


def changed(tiny, run) -> dict[str, bool]:
    """Tensor of a Hugging Face file -> whether the run's is another, bit by bit."""
    loaded = loaded_prm.load_for_inference(run, "float32")
    base, _ = loading.load_params(tiny.directory / "model", loaded.config, head_key=jax.random.key(0))
    found = {}
    for (path, before), (_, spec) in zip(
        parameters.walk(base), parameters.walk(parameters.param_specs(loaded.config)), strict=True
    ):
        after = parameters.lookup(loaded.params, path)
        for layer, name in enumerate(spec.hf_names()):
            pair = (np.asarray(x)[layer] if spec.stacked else np.asarray(x) for x in (before, after))
            found[name] = not np.array_equal(*pair)
    return found


def test_frozen_weights_are_the_backbones_to_the_bit(tiny, run):
    """Although the run computed with them in bfloat16. Everything else has moved."""
    for name, moved in changed(tiny, run).items():
        frozen = "embed_tokens" in name or any(f"layers.{layer}." in name for layer in range(FROZEN))
        if "k_proj.bias" not in name:  # which softmax does not see but for the rotation
            assert moved != frozen, name


def test_a_checkpoint_holds_what_is_trained(run):
    loaded = json.loads((run / "model" / "prm.json").read_text())["frozen"]
    assert loaded["layers"] == FROZEN and pathlib.Path(loaded["backbone"]).is_absolute()
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        stored = handler.metadata(run / "checkpoints" / "4" / "state").tree
    shapes = {name: leaf.shape for name, leaf in ocp.tree.to_flat_dict(stored, sep="/").items()}
    assert not any("embedding" in name or "trunk" in name for name in shapes)
    assert {shape[0] for name, shape in shapes.items() if "/layers/" in name} == {LAYERS - FROZEN}


def test_it_resumes_to_the_same_end(tiny, run):
    copy = shutil.copytree(run, tiny.directory / "copy")
    shutil.rmtree(copy / "checkpoints" / "4")
    options = {**OPTIONS, "dtype": "bfloat16", "optimizer": "adamw_compact", "resume": "always"}
    assert run_here(tiny.arguments("copy", **options)) == 0
    same_result(run, copy)
    with pytest.raises(UserError, match="frozen_layers was 2 and is 1"):
        run_here(tiny.arguments("copy", **{**options, "frozen_layers": 1}))


@pytest.mark.parametrize("format", ["token_classification", "process_reward_model", "reward_model"])
def test_every_export_has_all_weights(format, tiny, run, tmp_path):
    given = [f"--checkpoint={run}", f"--output_dir={tmp_path / 'out'}", "--dtype=float32", f"--format={format}"]
    assert flags.run(export.ExportConfig, export.main, ["export", *given]) == 0
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    stored = safetensors.numpy.load_file(tiny.directory / "model" / "model.safetensors")
    assert stored.keys() <= written.keys()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        np.testing.assert_array_equal(written[name], stored[name])
    expected = cfprm_jax.load(run, "float32").score(QUESTION, STEPS)
    np.testing.assert_allclose(cfprm_jax.load(tmp_path / "out", "float32").score(QUESTION, STEPS), expected, atol=1e-6)
    assert "| frozen | the embedding and the first 2 layers |" in (tmp_path / "out" / "README.md").read_text()


def test_eight_devices_come_to_the_same_losses(tiny):
    """Of a run with adapters above the frozen layers, so that both kinds of frozen weights are split."""
    options = {**OPTIONS, **LORA}
    run_here(tiny.arguments("adapted", **options))
    run_here(tiny.arguments("sharded", **options, mesh="data=4,fsdp=2"))
    one, other = ([row["loss"] for row in rows(tiny.directory / name)] for name in ("adapted", "sharded"))
    np.testing.assert_allclose(one, other, rtol=1e-4)
    kernels = {f"model.layers.2.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj")}
    moved = {name for name, value in changed(tiny, tiny.directory / "adapted").items() if value}
    assert moved == kernels | {"score.weight", "score.bias"}


def test_peft_loads_adapters_of_the_upper_layers(tiny, tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("peft")
    run = tiny.directory / "adapted"
    given = [f"--checkpoint={run}", f"--output_dir={tmp_path / 'out'}", "--format=peft_adapter", "--dtype=float32"]
    assert flags.run(export.ExportConfig, export.main, ["export", *given]) == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["layers_to_transform"] == [2]
    model = library.AutoPeftModelForTokenClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert {name.split(".layers.")[1][0] for name, _ in model.named_parameters() if "lora_A" in name} == {"2"}
    loaded = loaded_prm.load_for_inference(run, "float32")
    tokens = np.random.default_rng(1).integers(0, 256, (1, 40))
    z = cfprm_jax.models.prm.apply(loaded.config, loaded.params, tokens, np.arange(40)[None], np.full((1, 40), 40))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.softmax(-1)[..., 1]
    np.testing.assert_allclose(theirs, jax.nn.sigmoid(z), atol=1e-5)


def test_weights_that_moved_or_changed_are_refused(tiny, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "model" / "prm.json"
    described = json.loads(path.read_text())
    moved = shutil.copytree(tiny.directory / "model", tmp_path / "moved")
    described["frozen"]["backbone"] = str(moved)
    path.write_text(json.dumps(described))
    assert cfprm_jax.load(copy).score(QUESTION, STEPS) == cfprm_jax.load(run).score(QUESTION, STEPS)
    tensors = safetensors.numpy.load_file(moved / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(2)
    safetensors.numpy.save_file(tensors, moved / "model.safetensors")
    with pytest.raises(UserError, match="holds other weights than those that the frozen layers were trained on"):
        cfprm_jax.load(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frozen_layers": 4}, "--frozen_layers=4: the backbone has 3 layers"),
        ({"init": "random"}, "--frozen_layers=2 needs a backbone with weights of its own"),
    ],
)
def test_refusals(changes, message, tiny):
    with pytest.raises(UserError, match=message):
        run_here(tiny.arguments("refused", **{**OPTIONS, **changes}))
