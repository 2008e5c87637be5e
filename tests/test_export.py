"""The export command: from a run directory to scores that transformers gives, and its refusals."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfprm_jax
from cfprm_jax import export, flags
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig, OptimizerConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import map_specs, param_specs
from cfprm_jax.models.prm import apply

BACKBONE = BackboneConfig(300, 32, 48, 2, 4, 2, 8, 1e-6, 1e4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One byte a token, the marker, and a chat template."""
    import tokenizers

    from cfprm_jax.data.encoding import load_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    vocab = {token: i for i, token in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>", "<extra_0>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}assistant: "
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


def write_run(directory, tokenizer, head):
    """A run directory with one checkpoint, as train leaves it; returns configuration and parameters."""
    from cfprm_jax.checkpoints.model_files import write_model
    from cfprm_jax.checkpoints.saving import Checkpoints
    from cfprm_jax.training.optimizer import AdamW
    from cfprm_jax.training.step import TrainState

    config = PRMConfig(BACKBONE, head=head)
    generator = np.random.default_rng(0)
    params = map_specs(lambda _, spec: jnp.asarray(0.2 * generator.standard_normal(spec.shape), jnp.float32), config)
    write_model(
        directory,
        BACKBONE.to_hf(),
        tokenizer,
        model=ModelConfig(head=head),
        encoding=EncodingConfig(max_length=160),
        loss=LossConfig(),
        granularity=GranularityConfig(),
    )
    checkpoints = Checkpoints(directory, keep=1)
    optimizer = AdamW(OptimizerConfig(), lambda step: 0.0, param_specs(config))
    checkpoints.save(5, TrainState(*optimizer.init(params), jnp.int32(5)), {"position": 0}, {})
    checkpoints.wait()
    checkpoints.close()
    return config, params


def run(*arguments):
    return flags.run(export.ExportConfig, export.main, ["export", *arguments])


def test_a_run_directory_becomes_what_transformers_loads(tokenizer, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, params = write_run(tmp_path / "run", tokenizer, "linear")
    out = tmp_path / "out"
    assert run(f"--checkpoint={tmp_path / 'run'}", f"--output_dir={out}", "--dtype=float32") == 0
    printed = capsys.readouterr()
    first, *_, last = printed.out.splitlines()
    assert first == f"export: {tmp_path / 'run'} -> {out} as token_classification in float32"
    assert last.startswith(f"wrote {out}: ") and last.endswith("in 1 file of weights")
    assert " GB/s\n" in printed.out
    assert f"--output_dir={out}" in (out / "export.flags").read_text().splitlines()
    model = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    assert model.dtype == torch.float32
    tokens = np.random.default_rng(1).integers(0, 258, (1, 20))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.softmax(-1)[..., 1].numpy()
    positions, end = np.arange(20)[None], np.full((1, 20), 20)
    z = jax.jit(apply, static_argnums=0)(config, params, tokens, positions, end)
    np.testing.assert_allclose(jax.nn.sigmoid(z), theirs, atol=1e-5)
    # A second export does not write over the first.
    assert run(f"--checkpoint={tmp_path / 'run'}", f"--output_dir={out}") == 2
    assert f"error: --output_dir={out} " in capsys.readouterr().err


def test_a_private_repository_is_one_that_is_pushed() -> None:
    with pytest.raises(UserError, match="--private=false is for exports with --push_to_hub"):
        flags.parse(export.ExportConfig, ["export", "--private=false"])
    assert not flags.parse(export.ExportConfig, ["export", "--private=false", "--push_to_hub=a/b"]).private


@pytest.mark.parametrize("format", ["process_reward_model", "reward_model"])
def test_the_formats_that_vllm_serves(format, tokenizer, tmp_path):
    """The directory scores as the run does, and has the backbone's generation_config.json and a card."""
    write_run(tmp_path / "run", tokenizer, "mlp")
    kept = '{"eos_token_id": [256, 257], "temperature": 0.7}'
    (tmp_path / "run" / "model" / "generation_config.json").write_text(kept)
    out = tmp_path / "out"
    arguments = [f"--checkpoint={tmp_path / 'run'}", f"--output_dir={out}", f"--format={format}", "--dtype=float32"]
    assert run(*arguments, "--base_model=Qwen/Qwen2.5-Math-7B") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "export.flags",
        "generation_config.json",
        "model.safetensors",
        "prm.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "generation_config.json").read_text() == kept
    card = (out / "README.md").read_text()
    assert "base_model: Qwen/Qwen2.5-Math-7B\n" in card and "| checkpoint | after step 5 |\n" in card
    scores = [cfprm_jax.load(path, "float32").score("2 + 3?", ["5.", "So 5."]) for path in (tmp_path / "run", out)]
    np.testing.assert_allclose(*scores, rtol=1e-5)


def test_an_mlp_head_is_refused_before_anything_is_written(tokenizer, tmp_path, capsys):
    write_run(tmp_path / "run", tokenizer, "mlp")
    assert run(f"--checkpoint={tmp_path / 'run'}", f"--output_dir={tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --format=token_classification ") and "process_reward_model or reward_model" in error
    assert "'mlp'" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output_dir=x"], "error: --checkpoint is required"),
        (["--checkpoint=x"], "error: --output_dir is required"),
        (["--checkpoint=none", "--output_dir=x"], "none is neither a run directory"),
        (["--format=gguf"], "gguf"),
        (["--dtype=int8"], "int8"),
    ],
)
def test_bad_flags(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
