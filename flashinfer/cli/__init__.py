"""The `flashinfer` command: what runs, what is compiled, how fast it is, and whether the installation is sound.

Every command takes --json: then stdout holds one JSON document and nothing else; logs and progress go to stderr.
"""

from importlib import import_module

import click

from flashinfer.cli.output import near
from flashinfer.version import __version__

# command -> (module:attribute, what `flashinfer --help` says); a module is imported when its command is asked for
_COMMANDS = {
    "demo": ("demo", "Serve a real model with this package (source checkout)."),
    "show-config": ("show_config", "Print versions, devices, environment variables and the cache folder."),
    "explain": ("explain", "Say which variant runs a problem, with which config, and why the others do not."),
    "precompile": ("precompile", "Compile kernels for named architectures; needs no GPU."),
    "cache": ("cache", "List, verify or clear compiled kernels."),
    "bench": ("bench", "Measure a room's kernels against this device's ceilings (source checkout)."),
    "doctor": ("doctor", "Check the installation; exit status 1 if something is broken."),
    "collect-env": ("upstream:collect_env", "Print a report of the environment, for issues."),
    "replay": ("replay", "Run calls again that FLASHINFER_LOGLEVEL=10 wrote down, and compare."),
    "list-modules": ("upstream:list_modules", "List the ops, their variants and where these are."),
    "module-status": ("upstream:module_status", "Say how many kernels of each op are compiled."),
    "clear-cache": ("upstream:clear_cache", "Remove all compiled kernels."),
    "export-compile-commands": ("upstream:export_compile_commands", "Upstream's; there is no C++ to compile."),
    "download-kernels": ("upstream", "Upstream's; nothing to download."),
    "download-cubin": ("upstream", "Upstream's; nothing to download."),
    "install-cubin-wheel": ("upstream", "Upstream's; nothing to install."),
    "install-jit-cache-wheel": ("upstream", "Upstream's; nothing to install."),
    "list-cubins": ("upstream", "Upstream's; there are no cubins to list."),
    "clear-cubin": ("upstream", "Upstream's; there are no cubins to remove."),
}


class _Commands(click.Group):
    def list_commands(self, ctx):
        return list(_COMMANDS)

    def get_command(self, ctx, name):
        if name not in _COMMANDS:
            return None
        place, _, attribute = _COMMANDS[name][0].partition(":")
        module = import_module(f"flashinfer.cli.{place}")
        if place == "upstream" and not attribute:
            return module.nothing_to_do(name)
        return getattr(module, attribute or "command")

    def resolve_command(self, ctx, args):
        """As click does; what is nearly a command is named."""
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            ctx.fail(f"no such command {args[0]!r}; allowed: {near(args[0], list(_COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(
    cls=_Commands, help=__doc__, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="flashinfer")
@click.option("--download-cubin", is_flag=True, help="Upstream's; nothing to download.")
@click.pass_context
def main(context, download_cubin):
    if download_cubin and context.invoked_subcommand is None:
        context.invoke(_Commands.get_command(context.command, context, "download-cubin"), options=(), as_json=False)
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())
