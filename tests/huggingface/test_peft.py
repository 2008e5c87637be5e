"""adapter_config.json, field by field: what PEFT goes by, whatever its defaults become."""

from __future__ import annotations

from cfprm_jax.huggingface.peft import adapter_config
from cfprm_jax.models.lora import Lora


def test_adapter_config():
    assert adapter_config(Lora(8, 16.0, ("query", "up")), "Qwen/Qwen2.5-Math-7B") == {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS",
        "base_model_name_or_path": "Qwen/Qwen2.5-Math-7B",
        "r": 8,
        "lora_alpha": 16.0,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "up_proj"],
        "modules_to_save": ["score"],  # without it PEFT leaves a fresh reward head in place
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }
