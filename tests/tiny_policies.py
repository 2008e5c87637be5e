"""A small random language model as transformers writes it, with the synthetic world's tokenizer."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from cfprm_jax import synthetic
from cfprm_jax.data.encoding import load_tokenizer, save_tokenizer

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=1, candidates_per_problem=1)


def write_language_model(
    directory: pathlib.Path, tied: bool, eos: Any = None, scale: float = 0.25, seed: int = 3
) -> tuple[pathlib.Path, Any]:
    """The directory of a Qwen2ForCausalLM, and the torch model. Needs torch."""
    import torch
    import transformers

    world = synthetic.materialise(directory / "world", 0, WORLD)
    raw = json.loads((world.model / "config.json").read_text())
    raw |= {"tie_word_embeddings": tied, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    raw |= {"eos_token_id": eos}
    generator = torch.Generator().manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**raw)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + scale * noise if name.endswith("norm.weight") else scale * noise)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(str(directory / "policy"))
    save_tokenizer(load_tokenizer(world.model), directory / "policy")
    return directory / "policy", model
