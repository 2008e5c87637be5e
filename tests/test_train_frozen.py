"""Training above frozen layers: what changes, what is saved, resuming, meshes, adapters, exporting."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from tiny_runs import TinyRuns, finish, rows, same_result, write_weights

import cfprm_jax
from cfprm_jax import export, flags, score, train
from cfprm_jax.checkpoints import frozen
from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.inference.trunk import TrunkComputation
from cfprm_jax.models import parameters
from cfprm_jax.run import best_of_n
from cfprm_jax.runtime import determinism, digests
from cfprm_jax.sharding import rules

pytestmark = pytest.mark.quick_compile

LAYERS, FROZEN = 3, 2
OPTIONS = {
    "init": "pretrained",
    "frozen_layers": FROZEN,
    "packing": "tree",
    "row_shapes": 1,
    "schedule": "shuffled",
    "batch_size": 24,
    "max_steps": 4,
    "checkpoint_every": 2,
}
LORA = {"lora_rank": 2, "lora_alpha": 8, "lora_targets": "q_proj,down"}
QUESTION, STEPS = "What is 2?", ["1+1", "2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, compiled_programs) -> TinyRuns:
    made = TinyRuns(tmp_path_factory.mktemp("frozen"), compiled_programs)
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


@pytest.fixture(scope="module")
def cached(tiny) -> pathlib.Path:
    """The run with adapters, its frozen layers computed once."""
    given = tiny.arguments("cached", **OPTIONS, **LORA, cache_frozen=tiny.directory / "trunk")
    assert run_here(given) == 0
    return tiny.directory / "cached"


@pytest.fixture(scope="module")
def adapted(tiny) -> pathlib.Path:
    """The same, computed at every step."""
    assert run_here(tiny.arguments("adapted", **OPTIONS, **LORA)) == 0
    return tiny.directory / "adapted"


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


def test_with_adapters_it_resumes_to_the_same_end(tiny, adapted):
    """Their targets may be named otherwise."""
    copy = shutil.copytree(adapted, tiny.directory / "adapted_copy")
    shutil.rmtree(copy / "checkpoints" / "4")
    given = {**OPTIONS, **LORA, "resume": "always", "lora_targets": "down_proj,query"}
    assert run_here(tiny.arguments("adapted_copy", **given)) == 0
    same_result(adapted, copy)


def test_it_resumes_to_the_same_end(tiny, run):
    copy = shutil.copytree(run, tiny.directory / "copy")
    shutil.rmtree(copy / "checkpoints" / "4")
    options = {**OPTIONS, "dtype": "bfloat16", "optimizer": "adamw_compact", "resume": "always"}
    assert run_here(tiny.arguments("copy", **options)) == 0
    same_result(run, copy)
    with pytest.raises(UserError, match="frozen_layers was 2 and is 1"):
        run_here(tiny.arguments("copy", **{**options, "frozen_layers": 1}))


@pytest.mark.parametrize("gone", ["weights", "directory"])
def test_where_nothing_is_frozen_a_resume_needs_no_weights(gone, tiny, run, capsys):
    """With the command of the start, of which the encoding is not a part: it was a PRM's, whose head went, too."""
    origin = tiny.directory / f"origin_{gone}"
    given = [f"--checkpoint={run}", f"--output_dir={origin}", "--dtype=float32"]
    assert flags.run(export.ExportConfig, export.main, ["export", *given]) == 0
    options = {**OPTIONS, "frozen_layers": 0, "model": origin, "max_steps": 2, "checkpoint_every": 1}
    given = [flag for flag in tiny.arguments(f"plain_{gone}", **options) if "system_prompt" not in flag]
    assert run_here(given) == 0
    whole = tiny.directory / f"plain_{gone}"
    copy = shutil.copytree(whole, tiny.directory / f"plain_{gone}_again")
    shutil.rmtree(copy / "checkpoints" / "2")
    if gone == "directory":
        shutil.rmtree(origin)
    else:
        (origin / "model.safetensors").unlink()
    capsys.readouterr()
    again = [f"--output_dir={copy}", "--resume=auto"]
    assert run_here([*given, *again]) == 0
    assert f"are gone and not needed; {copy / 'model'} has the rest" in capsys.readouterr().out
    same_result(whole, copy)
    with pytest.raises(UserError, match=f"model was {origin} and is {origin}_other"):
        run_here([*given, *again, f"--model={origin}_other"])


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


def test_eight_devices_come_to_the_same_losses(tiny, adapted):
    """Of a run with adapters above the frozen layers, so that both kinds of frozen weights are split."""
    run_here(tiny.arguments("sharded", **OPTIONS, **LORA, mesh="data=4,fsdp=2"))
    one, other = ([row["loss"] for row in rows(run) if "loss" in row] for run in (adapted, tiny.directory / "sharded"))
    np.testing.assert_allclose(one, other, rtol=1e-4)
    kernels = {f"model.layers.2.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj")}
    moved = {name for name, value in changed(tiny, adapted).items() if value}
    assert moved == kernels | {"score.weight", "score.bias"}


def test_peft_loads_adapters_of_the_upper_layers(adapted, tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("peft")
    given = [f"--checkpoint={adapted}", f"--output_dir={tmp_path / 'out'}", "--format=peft_adapter", "--dtype=float32"]
    assert flags.run(export.ExportConfig, export.main, ["export", *given]) == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["layers_to_transform"] == [2]
    model = library.AutoPeftModelForTokenClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert {name.split(".layers.")[1][0] for name, _ in model.named_parameters() if "lora_A" in name} == {"2"}
    loaded = loaded_prm.load_for_inference(adapted, "float32")
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


def test_a_cache_changes_rounding_at_most(tiny, adapted, cached):
    """Batches of two granularities, their order, losses and the evaluation are those without the cache."""
    expected, found = rows(adapted), rows(cached)
    assert [row.keys() for row in expected] == [row.keys() for row in found]
    for before, after in zip(expected, found, strict=True):
        for name, value in before.items():
            assert after[name] == (pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value), (
                name
            )
    base, other = (loaded_prm.load_for_inference(run, "float32").params for run in (adapted, cached))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), base, other)


@pytest.mark.parametrize(
    ("option", "owner", "name", "message"),
    [
        ("", frozen, "load", "the frozen weights did not fit"),
        ("cache_frozen", frozen, "load", "pass through them for --cache_frozen, did not fit"),
        ("bon_candidates", best_of_n, "score", "the scoring of --bon_candidates did not fit"),
    ],
)
def test_out_of_memory_outside_a_step_is_one_line(option, owner, name, message, tiny, monkeypatch, capsys):
    """With XLA's own error, for an array that no machine holds."""

    def too_large(*_arguments, **_options):
        return jax.jit(lambda: jnp.ones((1 << 45,), jnp.float32))().block_until_ready()

    pool = tiny.directory / "candidates.jsonl"
    candidates = [{"steps": ["1+1", "2"], "correct": True}, {"steps": ["3"], "correct": False}]
    pool.write_text(json.dumps({"id": "0", "question": "What is 2?", "answer": "2", "candidates": candidates}) + "\n")
    places = {"cache_frozen": tiny.directory / "not_filled", "bon_candidates": pool}
    options = {**OPTIONS, **({option: places[option]} if option else {}), "max_steps": 1}
    monkeypatch.setattr(owner, name, too_large)
    given = tiny.arguments(f"too_large_{option}", **options)
    assert flags.run(train.TrainConfig, train.main, ["train", *given, "--compile_cache_dir="]) == 2
    printed = capsys.readouterr()
    assert "out of device memory: " in printed.err and message in printed.err
    assert "Traceback" not in printed.out + printed.err


def test_what_is_there_is_not_computed_again(tiny, cached, monkeypatch, capsys):
    """Another run takes all from the cache; one whose filling was killed computes the rest, to the same bits: in rows
    of a filling from the start, which decide on these."""
    computed = []
    forward = TrunkComputation.__call__

    def recorded(self, batch):
        computed.append(b"".join(array.tobytes() for array in batch.rows))
        return forward(self, batch)

    monkeypatch.setattr(TrunkComputation, "__call__", recorded)
    cache = tiny.directory / "trunk"
    index, data = ((cache / name).read_bytes() for name in ("index.json", "hidden.bin"))
    options = {**OPTIONS, **LORA, "cache_frozen": cache, "seed": 1, "max_steps": 1, "eval_fraction": 0.2}
    run_here(tiny.arguments("second", **options))
    printed = capsys.readouterr().out
    assert "computing 2 layers" not in printed and printed.count(f"are in {cache}") == 3
    units = json.loads(index)["content"]
    kept = dict(sorted(units.items(), key=lambda unit: unit[1][0])[: len(units) // 2])
    killed = shutil.copytree(cache, tiny.directory / "killed")
    (killed / "index.json").write_text(json.dumps(digests.sealed(kept)))
    assert not computed
    run_here(tiny.arguments("third", **{**options, "cache_frozen": killed}))
    assert "computing 2 layers" in capsys.readouterr().out
    rest = set(computed)
    computed.clear()
    run_here(tiny.arguments("fourth", **{**options, "cache_frozen": tiny.directory / "fourth_trunk"}))
    assert rest < set(computed)
    again = json.loads((killed / "index.json").read_text())["content"]
    assert again.keys() == units.keys() and (killed / "hidden.bin").stat().st_size == len(data)
    both = (np.memmap(path / "hidden.bin", "<f4", "r").reshape(-1, 16) for path in (cache, killed))
    first, second = both
    for key, (begin, tokens, _) in units.items():
        moved = again[key][0]
        np.testing.assert_array_equal(first[begin : begin + tokens], second[moved : moved + tokens])


def test_the_filling_is_compiled_with_the_options_of_determinism(tiny, monkeypatch, capsys):
    """Shown by an option that XLA does not know, since on CPUs there are none."""
    monkeypatch.setattr(determinism, "compiler_options", lambda asked, platform: {"no_such_option": asked})
    given = tiny.arguments("options", **OPTIONS, deterministic=True, cache_frozen=tiny.directory / "options_trunk")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        run_here(given)
    printed = capsys.readouterr().out
    assert "computing 2 layers" in printed and "steps  " not in printed


def test_heads_of_one_trunk_share_the_cache_of_a_pool(tiny, adapted, cached, tmp_path, capsys):
    """Scores from the cache are those without it, and the second head computes no frozen layer."""
    pool = tmp_path / "pool.jsonl"
    candidates = [{"steps": ["1+1", "2"]}, {"steps": ["1+1", "3", "4"]}, {"steps": []}, {"steps": ["1+1", "2"]}]
    row = {"answer": "2", "candidates": candidates}
    lines = [{"id": str(q), "question": f"What is {q}?", **row} for q in range(3)]
    pool.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def scored(run, name, *arguments):
        out = tmp_path / f"{name}.jsonl"
        given = [f"--checkpoint={run}", f"--input={pool}", f"--output={out}", "--compile_cache_dir=", *arguments]
        assert flags.run(score.ScoreConfig, score.main, ["score", *given]) == 0, capsys.readouterr().err
        found = [json.loads(line)["candidates"] for line in out.read_text().splitlines()]
        return [candidate["step_logits"] for row in found for candidate in row]

    def close(a, b, tolerance=1e-5):
        for one, other in zip(a, b, strict=True):
            assert other == (None if one is None else pytest.approx(one, abs=tolerance))

    cache = tmp_path / "trunk"
    first = scored(adapted, "first", f"--cache_frozen={cache}")
    close(scored(adapted, "plain"), first)
    index = (cache / "index.json").read_bytes()
    second = scored(cached, "second", f"--cache_frozen={cache}")
    close(scored(adapted, "again", f"--cache_frozen={cache}"), first)
    close(first, second, 1e-2)  # trained alike
    assert first[0] is not None and first[2] is None
    assert (cache / "index.json").read_bytes() == index


def test_best_of_n_of_a_run_takes_its_cache(tiny, cached):
    """The logits are those of the checkpoint without it, and the candidates' states are added to it."""
    candidates = [{"steps": ["1+1", "2"]}, {"steps": ["1+1", "3", "4"]}, {"steps": []}]
    pool = tiny.directory / "pool.jsonl"
    lines = [{"id": str(q), "question": f"And {q}?", "answer": "2", "candidates": candidates} for q in range(3)]
    pool.write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = list(read_candidates([pool]))
    cache = shutil.copytree(tiny.directory / "trunk", tiny.directory / "pool_trunk")
    before = json.loads((cache / "index.json").read_text())["content"]
    found = {}
    for option in ("off", cache):
        given = ["train", *tiny.arguments("cached", **OPTIONS, **LORA, cache_frozen=option)]
        config = flags.parse(train.TrainConfig, given)
        mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
        scored = best_of_n.score(config, questions, cached, 4, mesh)
        found[str(option)] = [candidate.step_logits for question in scored for candidate in question.candidates]
    plain, other = found.values()
    for one, second in zip(plain, other, strict=True):
        assert (one is None) == (second is None)
        if one is not None:
            np.testing.assert_allclose(one, second, atol=1e-5)
    assert plain[0] is not None and plain[2] is None
    after = json.loads((cache / "index.json").read_text())["content"]
    assert before.items() < after.items() and len(after) == len(before) + 3


def test_two_processes_fill_one_cache(tiny, cached):
    """The first computes what is missing, the second finds it; steps and states are those of one process."""
    cache = tiny.directory / "two_trunk"
    given = tiny.arguments("two", **OPTIONS, **LORA, cache_frozen=cache)
    first, second = (finish(process) for process in tiny.start_two(given))
    assert "computing 2 layers" in first and "computing" not in second
    for before, after in zip(rows(cached), rows(tiny.directory / "two"), strict=True):
        for name in before.keys() & {"loss", "eval_loss", "trajectories"}:
            assert after[name] == pytest.approx(before[name], rel=1e-4), name
    units, again = (
        json.loads((path / "index.json").read_text())["content"] for path in (tiny.directory / "trunk", cache)
    )
    assert again.keys() == units.keys()


def test_caches_are_refused(tiny, cached, run, tmp_path):
    """Of another depth, tokenizer or architecture, or where nothing is frozen."""
    cache = tiny.directory / "trunk"
    options = {**OPTIONS, **LORA, "cache_frozen": cache}
    with pytest.raises(
        UserError, match=f"{cache} holds hidden states of something else: .*frozen layers was 2 and is 1"
    ):
        run_here(tiny.arguments("refused", **{**options, "frozen_layers": 1}))
    other = shutil.copytree(tiny.directory / "model", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"tokenizer was .* and is "):
        run_here(tiny.arguments("refused", **{**options, "model": other}))
    turned = shutil.copytree(tiny.directory / "model", tmp_path / "turned")
    described = json.loads((turned / "config.json").read_text())
    described.pop("rope_parameters", None)
    (turned / "config.json").write_text(json.dumps({**described, "rope_theta": 5000.0}))
    with pytest.raises(UserError, match=r"rope theta was .* and is 5000\.0"):
        run_here(tiny.arguments("refused", **{**options, "model": turned}))
    with pytest.raises(UserError, match="--cache_frozen needs --frozen_layers"):
        run_here(tiny.arguments("refused", **{**options, "frozen_layers": 0, "cache_frozen": "auto"}))
