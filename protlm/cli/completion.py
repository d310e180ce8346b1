"""Completion of commands and flags by the shell: a script, which needs no start of Python."""

from collections.abc import Sequence

from protlm.cli.commands import COMMANDS, GROUPS
from protlm.cli.flags import flags_of
from protlm.system.errors import refuse_unknown


def script(words: Sequence[str]) -> str:
    """Returns the script of a shell, the first of the words; zsh runs that of bash."""
    shell = next(iter(words), "bash")
    refuse_unknown("--completion", shell, ["bash", "zsh"])
    first = {name.split()[0]: None for name in COMMANDS}
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    lines += ["_protlm() {", '  local typed="${COMP_WORDS[*]:1:COMP_CWORD-1} " words=""']
    lines.append('  case "$typed" in')
    for name, command in COMMANDS.items():
        names = [x for one in flags_of(command.options) for x in one.names if x.startswith("--")]
        lines.append(f'  "{name} "*) words="{" ".join([*names, "--help"])}";;')
    for name in GROUPS:
        own = [one.split()[1] for one in COMMANDS if one.startswith(f"{name} ")]
        lines.append(f'  "{name} ") words="{" ".join(own)}";;')
    lines.append(f'  " ") words="{" ".join(first)} --help --version";;')
    lines += ["  esac", '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))', "}"]
    return "\n".join([*lines, "complete -o default -F _protlm protlm"])
