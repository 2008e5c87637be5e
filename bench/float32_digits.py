"""python bench/float32_digits.py DIRECTORY [--draws=N]: how far float32 hidden states are from float64.

DIRECTORY is a Hugging Face directory of real weights. Draws of 2 rows of 96 random tokens go through this
implementation and transformers, both in float32 on the CPU, and transformers in float64. The distance of a token is
that of its hidden states after the final norm, as a share of their length. Then layers of the first draw: the input of
each is float64's, rounded to float32 once for both, and the output is compared with what float64 gives for the rounded
input; and the growth of the residual stream. Needs torch.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from common import positive, run_main, select_devices

from cfprm_jax.huggingface import loading
from cfprm_jax.models.attention import attention
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.layers import DecoderLayer, RMSNorm
from cfprm_jax.models.rotary import rotary_angles

ROWS, LENGTH = 2, 96


def distances(found: object, expected: np.ndarray) -> np.ndarray:
    """Of every token."""
    wide = np.asarray(found, np.float64)
    return (np.linalg.norm(wide - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).ravel()


def open_torch(directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    return transformers.AutoModel.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--draws", type=positive, default=4)
    given = parser.parse_args()
    select_devices("cpu")
    config = PRMConfig(loading.read_config(given.directory)[0])
    net = config.backbone
    params = loading.load_params(given.directory, config, head_key=jax.random.key(0))[0]["backbone"]
    narrow, wide = (open_torch(given.directory, dtype) for dtype in (torch.float32, torch.float64))
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
    ends = jnp.full((ROWS, LENGTH), LENGTH, jnp.int32)
    forward = jax.jit(lambda params, tokens: Backbone(config, params)(tokens, positions, ends))
    print(f"{'draw':>5} {'ours':>9} {'2nd':>9} {'mean':>9} {'torch':>9} {'2nd':>9} {'mean':>9} {'apart':>9}")
    for draw in range(given.draws):
        tokens = np.random.default_rng(draw).integers(0, net.vocab_size, (ROWS, LENGTH))
        with torch.no_grad():
            exact = wide(torch.tensor(tokens)).last_hidden_state.numpy()
            theirs = narrow(torch.tensor(tokens)).last_hidden_state.numpy()
        ours = np.asarray(forward(params, tokens))
        columns = []
        for found in (ours, theirs):
            worst = np.sort(distances(found, exact))
            columns += [worst[-1], worst[-2], worst.mean()]
        columns.append(distances(ours, theirs.astype(np.float64)).max())
        print(f"{draw:>5} " + " ".join(f"{value:9.2e}" for value in columns), flush=True)
    layers(config, params, narrow, wide)


def layers(config: PRMConfig, params: dict, narrow: torch.nn.Module, wide: torch.nn.Module) -> None:
    """Each layer on its own, and the first norm of each."""
    net = config.backbone
    tokens = torch.tensor(np.random.default_rng(0).integers(0, net.vocab_size, (ROWS, LENGTH)))
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
    cosine, sine = rotary_angles(positions, net)
    ends = jnp.full((ROWS, LENGTH), LENGTH, jnp.int32)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    layer = jax.jit(
        lambda params, x: DecoderLayer(config, params)(
            x, cosine, sine, lambda q, k, v: attention(q, k, v, ends, config.attention)
        )
    )
    norm = jax.jit(lambda params, x: RMSNorm(params, net.rms_norm_eps)(x))
    print(f"{'layer':>5} {'ours':>9} {'torch':>9} {'norm':>9} {'torch':>9} {'longest':>9}")
    with torch.no_grad():
        states = wide(tokens, output_hidden_states=True).hidden_states
        for number, x in enumerate(states[:-1]):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
            rounded = x.float()
            found = {}
            for name, model, start in (("float64", wide, rounded.double()), ("torch", narrow, rounded)):
                angles = model.rotary_emb(start, torch.arange(LENGTH)[None])
                block = model.layers[number]
                made = block(start, position_embeddings=angles, attention_mask=mask.to(start.dtype))
                made = made[0] if isinstance(made, tuple) else made
                found[name] = made.numpy(), block.input_layernorm(start).numpy()
            ours = layer(own, jnp.asarray(rounded.numpy())), norm(own["attention_norm"], jnp.asarray(rounded.numpy()))
            columns = [
                distances(side, exact).max()
                for exact, *sides in zip(found["float64"], ours, found["torch"], strict=True)
                for side in sides
            ]
            print(f"{number:>5} " + " ".join(f"{value:9.2e}" for value in columns), f"{x.norm(dim=-1).max():9.1f}")


if __name__ == "__main__":
    run_main(main)
