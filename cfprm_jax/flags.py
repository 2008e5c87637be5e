"""absl flags to frozen configuration dataclasses: the only place below the commands that knows flags.

A command's configuration is a frozen dataclass whose fields are options (:func:`cfprm_jax.config.option`) or other such
dataclasses. A field `given` that is no option gets the names of the flags that were set, by --flagfile too. Every
option becomes one flag of the same name. The dataclasses check choices and bounds when they are made
(:class:`cfprm_jax.config.Options`), so that a bad value is refused before anything is read. Each command has a flag set
of its own, so importing two commands never defines a flag twice.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from absl import flags

from cfprm_jax.config import Options
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import config_files, process
from cfprm_jax.runtime.regular_files import check_input

Config = TypeVar("Config")


def _options(config_type: type) -> Iterator[tuple[type, dataclasses.Field]]:
    """Every option under config_type with the dataclass it belongs to, depth first."""
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if field.metadata and not issubclass(config_type, Options):
            raise TypeError(f"{config_type.__name__} has options, so it must be a cfprm_jax.config.Options")
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _options(typing.cast(type, hints[field.name]))
        elif field.metadata:
            yield config_type, field


def flag_set(config_type: type) -> flags.FlagValues:
    """The flags of a command, with --help; --flagfile is expanded before they are parsed."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", flag_values=values, short_name="h")
    flags.DEFINE_bool("helpfull", False, "Show this help.", flag_values=values)
    for owner, field in _options(config_type):
        meta, name = field.metadata, field.name
        default: Any = field.default
        module = (owner.__doc__ or owner.__name__).strip().splitlines()[0]
        if meta["kind"] == "list":
            default = list(default)
        # Only the type is absl's to check: choices and bounds are checked by the dataclass, for every caller alike.
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
    hints = typing.get_type_hints(config_type)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, config_type)):
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(typing.cast(type, hints[field.name]), values)
            continue
        if not field.metadata:
            if field.name == "given":
                arguments["given"] = frozenset(name for name in values if values[name].present)
            continue
        value: Any = values[field.name].value
        value = tuple(value) if field.metadata["kind"] == "list" else value
        arguments[field.name] = value
    return config_type(**arguments)


def expand_flagfiles(
    argv: Sequence[str], directory: pathlib.Path, including: tuple[pathlib.Path, ...] = ()
) -> list[str]:
    """argv with every --flagfile=FILE replaced by the flags in it, one a line; blank lines and # comments are skipped.

    A relative FILE is looked for in directory; inside a flag file, that is the folder of the file itself, so a set of
    files built on a common base works from anywhere. (absl resolves it against the working directory alone.) Values
    that one line cannot hold as they are stand as flag_file writes them; no other quote or escape means anything here.

    Raises:
      UserError: a file is missing, includes itself, or holds a line that is no flag.
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
    """The files that a --flagfile names, separated by commas; one, if a file has the whole as its name."""
    if (directory / names).is_file():
        return [(directory / names).resolve()]
    try:
        return [(directory / pathlib.Path(name).expanduser()).resolve() for name in names.split(",")]
    except RuntimeError as error:  # ~ without a home, or of an unknown user
        raise UserError(f"--flagfile={names}: {error}") from error


def parse(config_type: type[Config], argv: Sequence[str]) -> Config:
    """The configuration that argv (program name first) gives.

    Raises:
      UserError: an unknown flag, a value outside its choices or bounds, an argument that is no flag.
      SystemExit: --help was asked for and has been printed.
    """
    values = flag_set(config_type)
    try:
        rest = values([argv[0], *expand_flagfiles(argv[1:], pathlib.Path.cwd())])
    except flags.Error as error:
        text = str(error).replace("\n", " ")  # with the value in it, whatever its length
        raise UserError(text if len(text) <= 600 else f"{text[:300]} ... {text[-200:]}") from error
    if values["help"].value or values["helpfull"].value:
        print(usage(config_type, values))
        raise SystemExit(0)
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not a flag: flags begin with two dashes (try --help)")
    return _build(config_type, values)


def usage(config_type: type, values: flags.FlagValues) -> str:
    """What --help prints: the command's own docstring, then its flags by concern with their defaults."""
    lines = [
        (config_type.__doc__ or "").strip(),
        "",
        "  --flagfile=FILE: read flags from FILE; later flags override earlier ones.",
    ]
    owner = None
    for group, field in _options(config_type):
        if group is not owner:
            owner = group
            lines += ["", (group.__doc__ or "").strip().splitlines()[0]]
        meta = field.metadata
        default: Any = field.default
        default = ",".join(default) if meta["kind"] == "list" else default
        choices = f" <{'|'.join(meta['choices'])}>" if meta["choices"] else ""
        lines.append(f"  --{field.name}{choices}: {meta['help']} (default: {default!r})")
    return "\n".join(lines)


def _unquoted(line: str) -> str:
    """The flag of a line; quotes mean something only in what :func:`cfprm_jax.runtime.config_files.quoted` writes."""
    name, _, value = line.partition("=")
    try:
        flag = f"{name}={json.loads(value)}" if value.startswith('"') else line
    except ValueError:
        return line
    return flag if config_files.quoted(flag) == line else line


def run(config_type: type[Config], command: Callable[[Config], int | None], argv: Sequence[str] | None = None) -> int:
    """Parse argv and run the command; a UserError, or a file or disk that the system refuses, is one line and status 2.

    Meant as ``sys.exit(flags.run(ScoreConfig, main))`` under ``if __name__ == "__main__"``.
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
        if error.errno is None:  # not the system's word, but some library's: a fault that a traceback must tell
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {shlex.join(argv)}", file=sys.stderr)
        return 130
