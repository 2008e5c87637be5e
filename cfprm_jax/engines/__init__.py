"""Policies, wherever they run: this process's devices, a server of OpenAI's completions, or batch files."""
