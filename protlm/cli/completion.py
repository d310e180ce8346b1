"""Completion of commands and flags by the shell: a script, which needs no start of Python."""

from collections.abc import Sequence

from protlm.cli.commands import COMMANDS, GROUPS
from protlm.cli.flags import flags_of
from protlm.system.errors import refuse_unknown

# The words that may follow what is typed, of which the shell shows those that fit.
_SCRIPT = """_protlm() {
  local words=""
  case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in
CASES
  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _protlm protlm"""


def script(typed: Sequence[str]) -> str:
    """Returns the script of a shell that was typed, by default of bash; zsh runs that of bash."""
    shell = typed[0] if typed else "bash"
    refuse_unknown("--completion", shell, ["bash", "zsh"])
    words = {" ": {name.split()[0] for name in COMMANDS} | {"--help", "--version"}}
    words |= {
        f"{name} ": {one.split()[1] for one in COMMANDS if one.startswith(f"{name} ")}
        for name in GROUPS
    }
    words |= {
        f'{name} "*"': {one for flag in flags_of(command.options) for one in flag.typed_as}
        for name, command in COMMANDS.items()
    }
    cases = [f'  "{typed}") words="{" ".join(sorted(more))}";;' for typed, more in words.items()]
    text = _SCRIPT.replace("CASES", "\n".join(cases))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text
