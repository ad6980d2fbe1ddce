"""Prints a script that lets a shell complete commands, flags, fields, configs and files when you press Tab.

    fiddlex completion bash >> ~/.bashrc
    fiddlex completion zsh > ~/.zfunc/_fiddlex        # a folder of fpath, before compinit runs
    fiddlex completion fish > ~/.config/fish/completions/fiddlex.fish

The script asks fiddlex itself, so it need not be made again for a new version.
"""

from fiddlex.errors import ConfigError

ARGUMENT_CHOICES = ("bash", "zsh", "fish")
ARGUMENT = f"the shell: {', '.join(ARGUMENT_CHOICES)}"


def main(argv: list[str]) -> None:
    """Prints the script for the shell in `argv[1]`."""
    import argcomplete

    shell = argv[1]
    if shell not in ARGUMENT_CHOICES:
        raise ConfigError(f"there is no completion for {shell!r}; use {', '.join(ARGUMENT_CHOICES)}.")
    print(argcomplete.shellcode(["fiddlex"], shell=shell))
