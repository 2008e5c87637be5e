"""The README.md of an exported PRM: how to use it, how it was trained, and the metrics of its run directory."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.loader import MIXED
from cfprm_jax.models.families import family_of
from cfprm_jax.run.training_record import Training, best_of_n_table, corpus_lines

_PIPELINES = {
    "token_classification": ("transformers", "token-classification"),
    "peft_adapter": ("peft", "token-classification"),
    "process_reward_model": ("vllm", "token-classification"),
    "reward_model": ("vllm", "text-classification"),
}
_KINDS = {
    "peft_adapter": "a PEFT adapter for transformers' `{classes}ForTokenClassification`: the softmax over the two "
    "labels of a marker, of which the second is the score of the step before it",
    "token_classification": "transformers' `{classes}ForTokenClassification`: the softmax over the two labels of a "
    "marker, of which the second is the score of the step before it",
    "process_reward_model": "`{classes}ForProcessRewardModel` (two labels, as Qwen2.5-Math-PRM), which vLLM serves: "
    "the softmax over the two labels of a marker, of which the second is the score of the step before it",
    "reward_model": "`{classes}ForRewardModel` (one label, as Qwen2.5-Math-RM), which vLLM serves: one number a "
    "token, whose sigmoid at a marker is the score of the step before it",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedPRM:
    """An export, as its card describes it.

    Attributes:
      name: of the exported directory.
      format: of hf_export.FORMATS.
      dtype: of the exported weights.
      encoding, marker_id: of the PRM.
      model_type: of the backbone.
      redundancy: whether the export has a redundancy output.
    """

    name: str
    format: str
    dtype: str
    encoding: EncodingConfig
    marker_id: int
    model_type: str
    redundancy: bool = False


def render(export: ExportedPRM, training: Training, base_model: str = "") -> str:
    """The text of README.md, with YAML front matter for the hub; the publisher adds the licence.

    Args:
      base_model: of hub_name; "" leaves it out.
    """
    library, pipeline = _PIPELINES[export.format]
    tags = ("process-reward-model", "reward-model", "mathematics", export.model_type, "cfprm_jax")
    front = [
        "---",
        *([f"base_model: {base_model}"] if base_model else []),
        f"library_name: {library}",
        f"pipeline_tag: {pipeline}",
        "# license: the publisher of this model chooses it; the licences of the backbone and the data apply",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
    ]
    return "\n".join([*front, "", *_use(export, training.options.get("dtype", "")), *_training(training, base_model)])


def _use(export: ExportedPRM, trained_in: str) -> Iterator[str]:
    """How to use it; trained_in is the dtype of the training run, "" if unknown."""
    name, format, dtype, encoding = export.name, export.format, export.dtype, export.encoding
    kind = _KINDS[format].format(classes=family_of(export.model_type).classes)
    yield f"# {name}\n"
    yield (
        "A process reward model for mathematical reasoning: it gives every step of a solution a score in [0, 1]. This "
        f"is {kind}. The weights are {dtype}.\n"
    )
    if export.redundancy:
        yield (
            "A third label, `redundant`, is a separate output: the sigmoid of its logit is the probability that a step "
            "is right but of no use. It has no part in the softmax of the score, which is over the first two labels.\n"
        )
    yield "## Use\n"
    yield (
        f"A text is the chat template with the question, then every step, tokenised on its own, followed by the marker "
        f"`{encoding.marker}` (id {export.marker_id}). Training cut solutions at {encoding.max_length:,} tokens.\n"
    )
    yield "```python"
    yield from _encode(name, encoding)
    yield "```\n"
    if format in ("token_classification", "peft_adapter"):
        yield "The score of each step:\n"
        yield "```python"
        yield "import torch"
        if format == "peft_adapter":  # whose class has two labels by default, as the head here
            yield "from peft import AutoPeftModelForTokenClassification\n"
            three = ", num_labels=3" if export.redundancy else ""
            load = f'AutoPeftModelForTokenClassification.from_pretrained("{name}", dtype=torch.{dtype}{three})'
            yield f"model = {load}.eval()"
        else:
            yield "from transformers import AutoModelForTokenClassification\n"
            yield f'model = AutoModelForTokenClassification.from_pretrained("{name}", dtype=torch.{dtype}).eval()'
        yield "tokens = torch.tensor([ids])"
        yield "with torch.no_grad():"
        if export.redundancy:
            yield "    logits = model(tokens).logits.float()[tokens == marker]"
            yield "scores = logits[:, :2].softmax(-1)[:, 1].tolist()"
            yield "redundancy = logits[:, 2].sigmoid().tolist()"
        else:
            yield "    scores = model(tokens).logits.float().softmax(-1)[..., 1][tokens == marker].tolist()"
        yield "```\n"
    if format != "peft_adapter":
        yield from _serve(export)
        yield "With cfprm_jax, `" + f'cfprm_jax.load("{name}").score(question, steps)' + "` gives the same scores.\n"
        if trained_in and trained_in != dtype:
            yield (
                f"These are computed in {dtype}, and those of the training run in {trained_in} by default, so they "
                f"differ by rounding. To compare them, score the run in {dtype}: `python -m cfprm_jax.score "
                f"--checkpoint=RUN --dtype={dtype} ...`.\n"
            )


def _encode(name: str, encoding: EncodingConfig) -> Iterator[str]:
    yield "from transformers import AutoTokenizer\n"
    yield 'question = "What is 2 + 3 * 4?"'
    yield 'steps = ["First, 3 * 4 = 12.", "Then 2 + 12 = 14. The answer is \\\\boxed{14}."]\n'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield f"marker = tokenizer.convert_tokens_to_ids({_quoted(encoding.marker)})"
    system = f'{{"role": "system", "content": {_quoted(encoding.system_prompt)}}}, ' if encoding.system_prompt else ""
    yield f'messages = [{system}{{"role": "user", "content": question}}]'
    yield "prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)"
    yield 'ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]'
    yield "for step in steps:"
    yield '    ids += [*tokenizer(step, add_special_tokens=False)["input_ids"], marker]'


def _quoted(text: str) -> str:
    """A Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _serve(export: ExportedPRM) -> Iterator[str]:
    name, format = export.name, export.format
    # vLLM's automatic choice would compute float32 weights in half precision.
    precision = " --dtype float32" if export.dtype == "float32" else ""
    pooler = json.dumps({"pooling_type": "STEP", "step_tag_id": export.marker_id})
    logits = False
    if format == "process_reward_model":
        note = "With vLLM (0.11.2 or newer), whose step pooling returns the two probabilities of each marker:"
        scores = ["scores = [correct for incorrect, correct in answer]"]
    elif format == "reward_model":
        pooler, logits = json.dumps({"pooling_type": "ALL"}), True
        note = "With vLLM (0.11.2 or newer), which returns one number a token:"
        scores = ["scores = [1 / (1 + math.exp(-z)) for token, (z,) in zip(ids, answer) if token == marker]"]
    else:
        what, scores = "probabilities", ["scores = [correct for incorrect, correct in answer]"]
        if export.redundancy:
            what, logits = "logits", True
            scores = ["scores = [1 / (1 + math.exp(incorrect - correct)) for incorrect, correct, _ in answer]"]
            scores.append("redundancy = [1 / (1 + math.exp(-redundant)) for _, _, redundant in answer]")
        note = (
            f"With vLLM, whose step pooling returns the {what} of each marker; for this class from 0.30.0 on. Older "
            "releases ignore the setting and return those of every token, of which the code selects the markers:"
        )
        select = "    answer = [labels for token, labels in zip(ids, answer) if token == marker]"
        scores = ["if len(answer) == len(ids):", select, *scores]
    yield f"{note}\n"
    yield "```bash"
    yield f"vllm serve {name} --runner pooling{precision} --pooler-config '{pooler}'"
    yield "```\n"
    yield "```python"
    yield from ["import math\n"] if logits else []
    yield "import requests\n"
    raw = ', "use_activation": False' if logits else ""
    yield f'request = {{"model": "{name}", "task": "token_classify", "input": ids{raw}}}'
    yield 'reply = requests.post("http://localhost:8000/pooling", json=request)'
    yield 'answer = reply.json()["data"][0]["data"]'
    yield from scores
    yield "```\n"


def _training(training: Training, base_model: str) -> Iterator[str]:
    options, data = training.options, training.data
    yield "## Training\n"
    of = f" of {training.num_steps:,}" if training.num_steps else ""
    lines = [("checkpoint", f"after step {training.step:,}{of}")]
    if base_model or options:
        start = ", from random weights" if training.random_start else ""
        lines.append(("backbone", (base_model or pathlib.Path(options["model"]).name) + start))
    if options:
        lines += _options(options)
    if training.trained:
        counts = ", ".join(
            f"{number:,} " + ("of all C, mixed in each batch" if size == MIXED else f"at C = {size}")
            for size, number in training.trained.items()
        )
        lines.append(("trajectories trained on", counts))
    yield "| | |"
    yield "|---|---|"
    for what, value in lines:
        yield f"| {what} | {value} |"
    yield ""
    if data:
        yield "Training data (C is the number of steps in a window):\n"
        yield from corpus_lines(data)
        yield ""
    if training.held_out:
        yield "## Held-out questions\n"
        yield "| metric | value |"
        yield "|---|---|"
        for name, number in training.held_out.items():
            yield f"| {name.removeprefix('eval_').replace('_', ' ')} | {_shown(number)} |"
        yield ""
    if options and not training.held_out and not training.best_of_n:
        yield "## Evaluation\n"
        yield (
            "This checkpoint was not evaluated: its training run has no metrics of held-out questions up to it, and no "
            "Best-of-N results.\n"
        )
    if training.best_of_n:
        yield "## Best-of-N\n"
        yield best_of_n_table(training.best_of_n)


def _shown(number: float | None) -> str:
    if number is None:  # a metric without a value, such as the AUROC of one class
        return "none"
    return f"{number:,.0f}" if number > 1 and number == int(number) else f"{number:.4f}"


def _options(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The flags of train that the card lists, as (name, value)."""
    sizes = options["granularities"] or [str(size) for size in range(options["c_max"], 0, -1)]
    epochs = options["epochs_per_granularity"]
    passes = "one pass" if epochs == 1 else f"{epochs} passes"
    if len(sizes) == 1:
        yield "windows", f"C = {sizes[0]}, {passes} over the data"
    else:
        yield "windows", f"C = {', '.join(map(str, sizes))} ({options['schedule']}), {passes} over the data at each"
    margin = f", margin {options['margin']}" if options["loss"] == "q_ranking" else ""
    # A run of an earlier version has no such options.
    weight = options.get("label_weight", "trajectory")
    loss = f"{options['loss']}{margin}" + ("" if weight == "trajectory" else f", by {weight}")
    if options["loss"] == "q_ranking" and weight == "node" and options.get("ranking_negatives") == "question":
        loss += ", against all negative steps of the question"
    if options["loss"] != "q_ranking" and options.get("negative_weight", 1) != 1:
        loss += f", steps labelled 0.5 or less weighted {options['negative_weight']:g}"
    yield "loss", loss
    if options.get("redundancy_weight"):
        yield "redundancy output", f"cross-entropy of rating 0 against 1, weight {options['redundancy_weight']:g}"
    yield "data", ", ".join(f"`{pathlib.Path(path).name}`" for path in options["train_data"])
    yield "neutral ratings", options["neutral"]
    yield "head", options["head"]
    yield (
        "optimizer",
        f"AdamW, learning rate {options['learning_rate']:g}, warm-up {options['warmup_fraction']:g} of the steps, "
        f"{options['decay']} decay, weight decay {options['weight_decay']:g}, gradient norm at most "
        f"{options['max_grad_norm']:g}",
    )
    size = f"{options['batch_size']} trajectories"
    if options.get("batch_tokens"):
        size = f"at most {options['batch_tokens']:,} computed tokens, trajectories"
    yield "batch", f"{size} of at most {options['max_length']:,} tokens"
    if options.get("frozen_layers"):
        yield "frozen", f"the embedding and the first {options['frozen_layers']} layers"
    if options.get("lora_rank"):
        targets = ", ".join(options["lora_targets"])
        yield "adapters", f"rank {options['lora_rank']}, alpha {options['lora_alpha']:g}, on {targets}"
        yield "precision", f"float32 adapters on a frozen {options['dtype']} backbone, computed in {options['dtype']}"
    else:
        yield "precision", f"float32 weights, computed in {options['dtype']}"
    yield "seed", str(options["seed"])
