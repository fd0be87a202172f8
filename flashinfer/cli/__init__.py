"""The `flashinfer` command: what runs, what is compiled, how fast it is, and whether the installation is sound.

Every command takes --json: then stdout holds one JSON document and nothing else; logs and progress go to stderr.
"""

from importlib import import_module

import click

from flashinfer.version import __version__

# command -> (module, what `flashinfer --help` says); a module is imported when its command is asked for
_COMMANDS = {
    "demo": ("demo", "Serve a real model with this package (source checkout)."),
    "show-config": ("show_config", "Print versions, devices, environment variables and the cache folder."),
    "explain": ("explain", "Say which variant runs a problem, with which config, and why the others do not."),
    "precompile": ("precompile", "Compile kernels for named architectures; needs no GPU."),
    "cache": ("cache", "List, verify or clear compiled kernels."),
    "bench": ("bench", "Measure a room's kernels against this device's ceilings (source checkout)."),
    "doctor": ("doctor", "Check the installation; exit status 1 if something is broken."),
}


class _Commands(click.Group):
    def list_commands(self, ctx):
        return list(_COMMANDS)

    def get_command(self, ctx, name):
        if name not in _COMMANDS:
            return None
        return import_module(f"flashinfer.cli.{_COMMANDS[name][0]}").command

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(cls=_Commands, help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashinfer")
def main():
    pass
