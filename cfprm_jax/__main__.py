"""cfprm COMMAND [flags], and python -m cfprm_jax COMMAND [flags]: the commands under one name."""

from __future__ import annotations

import runpy
import sys

COMMANDS = {
    "prepare": "read labelled corpora, merge steps into windows, write stepwise rows and a report",
    "train": "train a process reward model",
    "plan": "compile a training step for an accelerator that need not be here: memory, FLOPs, whether it fits",
    "sample": "sample candidate solutions from a language model",
    "label": "label steps from rollouts of a policy, a search tree, or a judge",
    "score": "score every step of candidates or trajectories",
    "serve": "serve step scores over HTTP",
    "search": "search for solutions with a policy and a PRM",
    "bon": "Best-of-N accuracies of scored candidates",
    "process_bench": "accuracy and F1 on ProcessBench",
    "prm_bench": "PRMScore on PRMBench, macro-F1 and AUC on ReasonEval",
    "export": "write a Hugging Face directory",
    "experiment": "a grid of training runs with tables, intervals and figures",
}


def main() -> None:
    """Runs the command that the first argument names, with the rest as its flags."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print("usage: cfprm COMMAND [flags]\n")
        for command, purpose in COMMANDS.items():
            print(f"  {command:<14} {purpose}")
        print("\ncfprm COMMAND --help lists the flags of a command. Each is also a module: python -m cfprm_jax.COMMAND")
        return
    if name not in COMMANDS:
        sys.exit(f"error: {name!r} is not a command of cfprm; the commands are {', '.join(COMMANDS)}")
    sys.argv = [f"cfprm {name}", *sys.argv[2:]]
    runpy.run_module(f"cfprm_jax.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
