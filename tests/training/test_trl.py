"""The first training step beside TRL's PRM trainer, on its own token ids: the same loss, for every family."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from encoding_fixtures import write_tokenizer  # noqa: F401
from model_fixtures import make_reference  # noqa: F401

from cfprm_jax.config import PACKINGS, DeviceConfig, LossConfig, OptimizerConfig
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import pack
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.sharding import rules
from cfprm_jax.training import initial_state, program

ROWS = [
    {"prompt": "What is 1+1?", "completions": ["Sum: ", "1+1 = 2", "So 2."], "labels": [True, True, True]},
    {
        "prompt": "What is 1+1?",
        "completions": ["Sum: ", "1+1 = 3", "Then the sum is 3."],
        "labels": [True, False, False],
    },
    {"prompt": "What is 1+1?", "completions": ["Sum: ", "1+1 = 2", "So 3."], "labels": [True, True, False]},
    {"prompt": "And 7 - 2 * 3?", "completions": ["7 - 2 is 5."], "labels": [False]},
    {"prompt": "And 7 - 2 * 3?", "completions": ["2 * 3 = 6,", "7 - 6 = 1."], "labels": [True, True]},
]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Qwen2"])
def test_the_loss_of_the_first_step_is_that_of_trl(family, make_reference, write_tokenizer, tmp_path):  # noqa: F811
    torch = pytest.importorskip("torch")
    trl = pytest.importorskip("trl.experimental.prm", reason="needs TRL 1.13 or older, which has a PRM trainer")
    datasets = pytest.importorskip("datasets")
    tokenizer = write_tokenizer(tmp_path, "<s>", pad_token="<|end|>")
    model = make_reference(f"{family}ForTokenClassification", vocab_size=300, num_labels=2)
    model.save_pretrained(tmp_path)
    options = trl.PRMConfig(
        output_dir=str(tmp_path / "out"), step_separator="\n\n", report_to="none", use_cpu=True, disable_tqdm=True
    )
    data = datasets.Dataset.from_list(ROWS)
    trainer = trl.PRMTrainer(model=model, args=options, processing_class=tokenizer, train_dataset=data)
    theirs = [trainer.train_dataset[i] for i in range(len(ROWS))]
    with torch.no_grad():
        expected = float(trainer.compute_loss(model.eval(), trainer.data_collator(theirs)))

    encoded = []
    for row in theirs:
        labels = np.array(row["labels"])
        places = np.flatnonzero(labels >= 0).astype(np.int32)
        encoded.append(Encoded(np.array(row["input_ids"], np.int32), places, labels[places].astype(np.float32), 0))
    assert [len(one.step_positions) for one in encoded] == [3, 3, 3, 1, 2]
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    network = PRMConfig(loading.read_config(tmp_path)[0])
    built = program.build(network, LossConfig(loss="bce"), OptimizerConfig(), 1, mesh)
    state, _ = initial_state.create(built, tmp_path, "pretrained", 0)
    shapes = RowShapes.covering((128,), len(ROWS))

    def batch(packing):
        return rules.put_batch(pack(encoded, packing, shapes, len(ROWS), 3), built.batch_shardings)

    for packing in PACKINGS:
        _, total, count = built.eval_step(state.params, batch(packing))
        assert float(total) / float(count) == pytest.approx(expected, rel=1e-6)
    _, metrics = built.train_step(state, batch("tree"))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)
