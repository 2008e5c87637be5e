"""Hugging Face directories: loading weights onto devices, exporting them, reward heads, adapters, model cards."""
