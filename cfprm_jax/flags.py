"""Command-line flags: parses absl flags into frozen configuration dataclasses.

A command's configuration is a frozen dataclass whose fields are options (:mod:`cfprm_jax.options`) or other such
dataclasses. Every option becomes one flag of the same name. A field `given` without metadata receives the names of the
flags that were set, including those of --flagfile. The dataclasses validate choices and bounds on construction
(:class:`cfprm_jax.options.Options`), before any file is read. Each command has its own flag set, so importing two
commands never defines a flag twice.

A class attribute MAIN_FLAGS of a configuration lists the flags that --help describes first; --helpfull describes all.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
import shlex
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from absl import flags

from cfprm_jax.errors import UserError
from cfprm_jax.options import Options
from cfprm_jax.runtime import config_files, process
from cfprm_jax.runtime.regular_files import check_input

Config = TypeVar("Config")


def _options(config_type: type) -> Iterator[tuple[type, dataclasses.Field]]:
    """Every option of config_type and its nested dataclasses, with the dataclass that defines it, depth first."""
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if field.metadata and not issubclass(config_type, Options):
            raise TypeError(f"{config_type.__name__} has options, but is not a subclass of Options")
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _options(typing.cast(type, hints[field.name]))
        elif field.metadata:
            yield config_type, field


def flag_set(config_type: type) -> flags.FlagValues:
    """The flags of a command, with --help and --helpfull; --flagfile is expanded before they are parsed."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show the main flags.", flag_values=values, short_name="h")
    flags.DEFINE_bool("helpfull", False, "Show all flags.", flag_values=values)
    for owner, field in _options(config_type):
        meta, name = field.metadata, field.name
        default: Any = field.default
        module = _title(owner)
        if meta["kind"] == "list":
            default = list(default)
        # absl checks the type only. The dataclass checks choices and bounds, for Python callers too.
        define: Any = {
            "string": flags.DEFINE_string,
            "bool": flags.DEFINE_bool,
            "list": flags.DEFINE_list,
            "int": flags.DEFINE_integer,
            "float": flags.DEFINE_float,
        }[meta["kind"]]
        define(name, default, meta["help"], flag_values=values, module_name=module)
    return values


def _build(config_type: type[Config], values: flags.FlagValues) -> Config:
    given = frozenset(name for name in values if values[name].present)
    return config_files.from_dict(config_type, {**{name: values[name].value for name in values}, "given": given})


def expand_flagfiles(
    argv: Sequence[str], directory: pathlib.Path, including: tuple[pathlib.Path, ...] = ()
) -> list[str]:
    """Replaces every --flagfile=FILE in argv by the flags of the file, one per line without comments.

    A relative FILE is resolved against directory; inside a flag file, against the directory of that file, so that flag
    files with a common base work from any working directory. (absl always resolves against the working directory.)
    Values that do not fit on a line are quoted by flag_file; no other quotes or escapes are interpreted.

    Raises:
      UserError: a file is missing or includes itself, or a line is not a flag.
    """
    out: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument in ("--flagfile", "-flagfile"):
            names = next(rest, "")
        elif argument.startswith(("--flagfile=", "-flagfile=")):
            names = argument.split("=", 1)[1]
        else:
            out.append(argument)
            continue
        for path in _flag_files(names, directory):
            if path in including:
                raise UserError(f"--flagfile: {path} includes itself")
            check_input(path, f"--flagfile={path}")
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--flagfile: cannot read {str(path)!r}: {error}") from error
            inner = [line.strip() for line in lines]
            for number, line in enumerate(inner, 1):
                if line and not line.startswith(("#", "-")):
                    raise UserError(f"{path}:{number}: expected a flag (--name=value) or a # comment, found {line!r}")
            kept = [_unquoted(line) for line in inner if line.startswith("-")]
            out += expand_flagfiles(kept, path.parent, (*including, path))
    return out


def _flag_files(names: str, directory: pathlib.Path) -> list[pathlib.Path]:
    """The comma-separated files of a --flagfile, or a single file whose name contains commas."""
    if (directory / names).is_file():
        return [(directory / names).resolve()]
    try:
        return [(directory / pathlib.Path(name).expanduser()).resolve() for name in names.split(",")]
    except RuntimeError as error:  # ~ without a home, or of an unknown user
        raise UserError(f"--flagfile={names}: {error}") from error


def parse(config_type: type[Config], argv: Sequence[str]) -> Config:
    """Parses argv, whose first element is the program name, into a configuration.

    Raises:
      UserError: an unknown flag, a value outside its choices or bounds, or an argument that is not a flag.
      SystemExit: --help or --helpfull is set; the help has been printed.
    """
    values = flag_set(config_type)
    try:
        rest = values([argv[0], *expand_flagfiles(argv[1:], pathlib.Path.cwd())])
    except flags.Error as error:
        text = str(error).replace("\n", " ")  # with the value in it, whatever its length
        raise UserError(text if len(text) <= 600 else f"{text[:300]} ... {text[-200:]}") from error
    if values["help"].value or values["helpfull"].value:
        columns = min(shutil.get_terminal_size((100, 24)).columns, 100)
        print(usage(config_type, full=bool(values["helpfull"].value), columns=columns))
        raise SystemExit(0)
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not a flag: flags begin with two dashes (see --help)")
    return _build(config_type, values)


def usage(config_type: type, full: bool = False, columns: int = 100) -> str:
    """The text of --help: the docstring of the command, its main flags, and the names of the others by subject.

    Args:
      full: describe all flags by subject, as --helpfull does. Commands without MAIN_FLAGS always do.
      columns: width of the text.
    """
    groups: dict[type, list[dataclasses.Field]] = {}
    for owner, field in _options(config_type):
        groups.setdefault(owner, []).append(field)
    fields = {field.name: field for group in groups.values() for field in group}
    main = getattr(config_type, "MAIN_FLAGS", ())
    lines = []
    for paragraph in inspect.cleandoc(config_type.__doc__ or "").split("\n\n"):
        lines += [*([paragraph] if paragraph.startswith("python") else textwrap.wrap(paragraph, columns)), ""]
    lines += ["  --flagfile=FILE", "      Read flags from a file, one per line. Later flags override earlier ones."]
    if full or not main:
        for owner, group in groups.items():
            lines += ["", _title(owner) if owner is not config_type else "Command"]
            lines += [line for field in group for line in _described(field, columns)]
        return "\n".join(lines)
    lines += ["", "Main flags"]
    lines += [line for name in main for line in _described(fields[name], columns)]
    lines += ["", "Other flags, described by --helpfull"]
    for owner, group in groups.items():
        names = " ".join(f"--{field.name}" for field in group if field.name not in main)
        if names:
            title = _title(owner) if owner is not config_type else "Command"
            lines += [f"  {title}", *textwrap.wrap(names, columns, **_INDENT, break_on_hyphens=False)]
    return "\n".join(lines)


_INDENT: Any = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}


def _described(field: dataclasses.Field, columns: int) -> list[str]:
    """A flag with its choices and default, and below it its help text."""
    meta, default = field.metadata, field.default
    default = ",".join(typing.cast(Any, default)) if meta["kind"] == "list" else default
    choices = f" <{'|'.join(meta['choices'])}>" if meta["choices"] else ""
    shown = json.dumps(default) if default == "" or isinstance(default, bool) else default
    return [
        f"  --{field.name}{choices} (default: {shown})",
        *textwrap.wrap(meta["help"], columns, **_INDENT, break_long_words=False, break_on_hyphens=False),
    ]


def _title(config_type: type) -> str:
    """The subject of a dataclass of options: the first line of its docstring, without its full stop."""
    return inspect.cleandoc(config_type.__doc__ or config_type.__name__).splitlines()[0].removesuffix(".")


def _unquoted(line: str) -> str:
    """The flag of a line, unquoted only if :func:`cfprm_jax.runtime.config_files.quoted` gives the same line back."""
    name, _, value = line.partition("=")
    try:
        flag = f"{name}={json.loads(value)}" if value.startswith('"') else line
    except ValueError:
        return line
    return flag if config_files.quoted(flag) == line else line


def run(config_type: type[Config], command: Callable[[Config], int | None], argv: Sequence[str] | None = None) -> int:
    """Parses argv and runs the command. A UserError or an OSError of the system is printed as one line; status 2.

    Called as ``sys.exit(flags.run(ScoreConfig, main))`` under ``if __name__ == "__main__"``.
    """
    argv = list(sys.argv if argv is None else argv)
    try:
        config = parse(config_type, argv)
        with process.command():
            return command(config) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno is None:  # raised by a library, not by the system: a bug, which needs its traceback
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {shlex.join(argv)}", file=sys.stderr)
        return 130
