"""List the commands, start one, or print what a shell completes them with.

    python -m lightning_cp                          # the commands, a line each
    python -m lightning_cp train strategy=ring      # the same as python -m lightning_cp.train strategy=ring
    eval "$(lightning-cp completion bash)"          # or zsh, fish; then: lightning-cp train strategy=<TAB>

``lightning-cp`` is the same program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a language model whose sequences several processes share",
    "doctor": "compare one training step with one process; train nothing",
    "compare": "compare training runs: do they agree, or which is better?",
    "plan": "find the mesh that trains a model fastest; start nothing",
    "bench": "measure this machine: kernels, links, whole modes",
    "checkpoint": "verify a checkpoint, or write it in the other form",
}
"""Commands of ``python -m lightning_cp.<command>``, and what each does."""
WITHOUT_HYDRA = ("checkpoint",)
COMPLETION = "completion"
_QUERY = "query"

# A candidate may end in a space. In bash "=" would begin a new word. zsh calls the same function, and needs
# the dollar sign of an offset.
_BASH = """\
_lightning_cp() {
  local IFS=$'\\n'
  COMPREPLY=($(lightning-cp completion query "${COMP_LINE:0:$COMP_POINT}" 2> /dev/null))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -o nospace -o default -F _lightning_cp lightning-cp
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
SCRIPTS = {
    "bash": _BASH,
    "zsh": f"{_ZSH}{_BASH}",
    "fish": "complete -c lightning-cp -a '(lightning-cp completion query (commandline -cp) 2> /dev/null)'\n",
}
"""Shell -> the text that it evaluates."""


def listing() -> str:
    """Return the table of commands."""
    lines = [f"  {name:<11} {purpose}" for name, purpose in COMMANDS.items()]
    shells = "|".join(SCRIPTS)
    return "\n".join(
        [
            "Usage: python -m lightning_cp <command> [arguments]; <command> --help explains its arguments.",
            "",
            *lines,
            f"  {COMPLETION:<11} print the completion of lightning-cp for a shell: {COMPLETION} {shells}",
        ]
    )


def candidates(line: str) -> list[str]:
    """Return what may stand in place of the last word of a command line, which begins with the program."""
    _, *words = [*line.split(), *[""] * line.endswith(" ")]
    command, rest = words[0] if words else "", words[1:]
    if not rest:
        return [f"{name} " for name in (*COMMANDS, COMPLETION) if name.startswith(command)]
    if command == COMPLETION:
        return [shell for shell in SCRIPTS if shell.startswith(rest[-1])]
    if command not in COMMANDS or command in WITHOUT_HYDRA:
        return []
    asked = f"{command} {' '.join(rest)}"  # Hydra leaves out the program
    found = subprocess.run(  # noqa: S603 - a command of ours
        [sys.executable, "-m", f"lightning_cp.{command}", "-sc", f"{_QUERY}=bash"],
        env={**os.environ, "COMP_LINE": asked, "COMP_POINT": str(len(asked))},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.split()


def main(arguments: Sequence[str] | None = None) -> int:
    """List, complete or start a command; return the exit status of what does not start one."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    match words:
        case [] | ["-h" | "--help"] | ["completion", "-h" | "--help"]:
            print(listing())
        case [command, *rest] if command in COMMANDS:
            sys.stdout.flush()
            started = [sys.executable, "-m", f"lightning_cp.{command}", *rest]
            os.execv(sys.executable, started)  # noqa: S606 - a command of ours
        case [name, shell] if name == COMPLETION and shell in SCRIPTS:
            print(SCRIPTS[shell], end="")
        case [name, query, line] if (name, query) == (COMPLETION, _QUERY):
            print("\n".join(candidates(line)))
        case _:
            print(f"no such command: {' '.join(words)!r}.\n\n{listing()}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
