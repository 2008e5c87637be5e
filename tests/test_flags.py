"""Flags to configuration dataclasses and back."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import re
import typing

import pytest

from cfprm_jax import config, flags, options
from cfprm_jax.__main__ import COMMANDS
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import config_files


@dataclasses.dataclass(frozen=True)
class Command(options.Options):
    """A command for these tests."""

    read: config.ReadConfig = dataclasses.field(default_factory=config.ReadConfig)
    granularity: config.GranularityConfig = dataclasses.field(default_factory=config.GranularityConfig)
    encoding: config.EncodingConfig = dataclasses.field(default_factory=config.EncodingConfig)
    optimizer: config.OptimizerConfig = dataclasses.field(default_factory=config.OptimizerConfig)
    input: tuple[str, ...] = options.option((), "Files.", kind="list")


def configuration(command: str) -> type:
    """The configuration that a command's main takes."""
    return typing.get_type_hints(importlib.import_module(f"cfprm_jax.{command}").main)["config"]


def parse(*arguments: str) -> Command:
    return flags.parse(Command, ["command", *arguments])


def test_defaults_are_those_of_the_dataclasses():
    assert parse() == Command()


def test_every_kind_of_value_arrives_with_its_type():
    got = parse(
        "--learning_rate=1e-3", "--accumulation=4", "--noalternatives", "--input=a.jsonl,b.jsonl", "--neutral", "drop"
    )
    assert got.optimizer.learning_rate == 1e-3
    assert got.optimizer.accumulation == 4
    assert got.read.alternatives is False
    assert got.input == ("a.jsonl", "b.jsonl")
    assert got.read.neutral == "drop"


def test_the_flags_of_a_configuration_give_it_back(tmp_path):
    original = parse("--c_max=3", "--noalternatives", "--input=a,b", "--step_separator=\\n", "--learning_rate=3e-6")
    assert flags.parse(Command, ["command", *config_files.as_flags(original)]) == original
    config_files.write_config(original, tmp_path)
    assert parse(f"--flagfile={tmp_path / 'run.flags'}") == original
    assert json.loads((tmp_path / "config.json").read_text())["c_max"] == 3


@pytest.mark.parametrize(
    "text",
    [
        "two\nlines",
        "a\\nb\n",
        "\U000e0001\n\U0001f600",
        " ",
        "end \t",
        "\u2028",
        '"',
        '"quoted"',
        '"a',
        "#",
        "--c_max=3",
        "=",
    ],
)
def test_a_flag_file_gives_back_every_text(tmp_path, text):
    original = parse(f"--system_prompt={text}", "--step_separator= ")
    original = dataclasses.replace(original, input=("a,b.jsonl", 'c"d', "e"))
    assert flags.parse(Command, ["command", *config_files.as_flags(original)]) == original
    config_files.write_config(original, tmp_path)
    assert parse(f"--flagfile={tmp_path / 'run.flags'}") == original


@pytest.mark.parametrize("text", ['"use \\boxed and \\times"', '"plain"', '"a', '"a\\u000ab" and'])
def test_quotes_written_by_hand_into_a_flag_file_stand_for_themselves(tmp_path, text):
    (tmp_path / "hand.flags").write_text(f"--system_prompt={text}\n")
    assert parse(f"--flagfile={tmp_path / 'hand.flags'}").encoding.system_prompt == text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--neutral=maybe", "neutral=maybe.*positive.*negative.*drop"),
        ("--c_max=0", "c_max=0"),
        ("--learning_rate=-1", "learning_rate=-1"),
        ("--learning_rate=fast", "learning_rate=fast"),
        ("--learning_rate=nan", "learning_rate=nan is not a finite number"),
        ("--learning_rate=inf", "learning_rate=inf is not a finite number"),
        ("--input=a,", "input=a, has an empty entry"),
        ("--granularities=4,x", "granularities.*'x'"),
        ("--granularities=2,2", "granularities.*twice"),
        ("--step_separator=\\q", r"step_separator.*\\q"),
        ("--no_such_flag=1", "no_such_flag"),
        ("stray", "'stray' is not a flag"),
        ("--flagfile=missing.flags", "missing.flags"),
    ],
)
def test_bad_values_are_refused_by_name(argument, message):
    with pytest.raises(UserError, match=message):
        parse(argument)


def test_flag_files_nest_relative_to_themselves_and_later_flags_win(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.flags").write_text("# the base\n\n--c_max=4\n--learning_rate=1e-5\n")
    (tmp_path / "deep" / "one.flags").write_text("--flagfile=../base.flags\n--c_max=2\n")
    monkeypatch.chdir("/")
    got = parse(f"--flagfile={tmp_path / 'deep' / 'one.flags'}", "--learning_rate=7e-6")
    assert (got.granularity.c_max, got.optimizer.learning_rate) == (2, 7e-6)


def test_a_flag_file_that_includes_itself_or_holds_prose_is_refused(tmp_path):
    loop = tmp_path / "loop.flags"
    loop.write_text("--flagfile=loop.flags\n")
    with pytest.raises(UserError, match="includes itself"):
        parse(f"--flagfile={loop}")
    loop.write_text("--c_max=2\nlearning rate 3\n")
    with pytest.raises(UserError, match=r"loop.flags:2: expected a flag"):
        parse(f"--flagfile={loop}")


def test_help_names_every_flag_with_its_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--neutral <positive|negative|drop>" in text
    assert "--learning_rate" in text
    assert "--flagfile" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_the_main_flags_and_names_the_others(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    command = configuration(name)
    every = {field.name for _, field in flags._options(command)}
    main = getattr(command, "MAIN_FLAGS", tuple(every))
    assert len(main) <= 10 and set(main) <= every
    for flag, expected in (("--help", {*main}), ("--helpfull", every)):
        with pytest.raises(SystemExit):
            flags.parse(command, ["command", flag])
        text = capsys.readouterr().out
        described = re.findall(r"^  --(\w+).*\n {6}\S", text, re.MULTILINE)
        assert len(described) == len(expected) + 1 and {*described} == expected | {"flagfile"}
        assert every <= {*re.findall(r"--(\w+)", text)}
        # A flag's name, choices and default stay on one line.
        assert all(len(line) <= 90 for line in text.splitlines() if not line.lstrip().startswith(("--", "python")))


def test_run_turns_bad_input_into_one_line_and_status_2(capsys):
    def fail(_: Command) -> None:
        raise UserError("x.jsonl:3: 3 steps and 2 labels")

    assert flags.run(Command, fail, ["command"]) == 2
    assert capsys.readouterr().err == "error: x.jsonl:3: 3 steps and 2 labels\n"
    assert flags.run(Command, lambda _: None, ["command"]) == 0


def test_what_the_system_refuses_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "file").touch()

    def write(_: Command) -> None:
        (tmp_path / "file" / "x").write_text("")

    def fill(_: Command) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert flags.run(Command, write, ["command"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/file/x: Not a directory\n"
    assert flags.run(Command, fill, ["command"]) == 2
    assert capsys.readouterr().err == "error: No space left on device\n"

    def fault(_: Command) -> None:
        raise OSError("a library's own")

    with pytest.raises(OSError, match="a library's own"):
        flags.run(Command, fault, ["command"])


def test_granularities_in_order():
    assert parse("--c_max=3").granularity.stages == (3, 2, 1)
    assert parse("--granularities=4,1").granularity.stages == (4, 1)
    assert parse("--granularities=whole").granularity.stages == ("whole",)


def test_escapes_of_the_separator_are_decoded():
    assert parse().encoding.separator == "\n\n"
    assert parse("--step_separator=\\t\\\\n").encoding.separator == "\t\\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_of_a_command_has_bounds_that_python_callers_get_too(name):
    for owner, field in flags._options(configuration(name)):
        meta = field.metadata
        if meta["kind"] not in ("int", "float"):
            continue
        lower, upper = meta["lower"], meta["upper"]
        assert lower is not None and upper is not None and lower < upper <= 2**32, field.name
        below, above = (lower - 1, upper + 1) if meta["kind"] == "int" else (lower - 1e-3, upper * 1.001)
        for outside in (below, above, float("nan"), True, "1"):
            if outside != meta["also"]:
                with pytest.raises(UserError, match=f"--{field.name}"):
                    owner(**{field.name: outside})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config.PackingConfig(packing="treee"), "--packing=treee is not among: tree, sequence, none"),
        (lambda: config.PackingConfig(batch_size=10**9), "--batch_size=1000000000 is outside its bounds: 1 to 65,536"),
        (lambda: config.PackingConfig(batch_size=1.0), "--batch_size=1.0 is not a whole number"),
        (lambda: config.PackingConfig(row_length=3), "--row_length=3 is outside its bounds: 8 to 4,194,304 or 0"),
        (lambda: config.OptimizerConfig(learning_rate=1e30), r"--learning_rate=1e\+30 is outside"),
        (lambda: config.OptimizerConfig(learning_rate=0.1, weight_decay=100.0), "times --weight_decay=100 is above 1"),
        (lambda: config.ReadConfig(alternatives=1), "--alternatives=1 is neither true nor false"),
        (lambda: config.EvalConfig(eval_data="a.jsonl"), "--eval_data=a.jsonl is not a list"),
        (lambda: config.ModelConfig(model=None), "--model: None is not a text"),
        (lambda: config.ModelConfig(model="a\0b"), "--model=.* holds a NUL"),
        (lambda: config.ModelConfig(model="\udcff"), "--model=.* is not Unicode"),
        (
            lambda: config.GranularityConfig(granularities=("9" * 5000,)),
            "--granularities: '9+.*' is not a whole number",
        ),
        (lambda: Command(read="a"), "read='a' is no ReadConfig"),
        (lambda: config.EstimateConfig(after_first_error="keep"), "=keep is for an --estimate from counts of rollouts"),
        (
            lambda: config.EstimateConfig(estimate="soft", relative_threshold=0.5),
            "--relative_threshold=0.5 is for --estimate=relative, not soft",
        ),
        (
            lambda: config.ReadConfig(data_format="stepwise", neutral="drop"),
            "--neutral=drop is for --data_format=prm800k and ratings, not stepwise",
        ),
        (
            lambda: config.ReadConfig(data_format="ratings", alternatives=False),
            "--alternatives=false is for --data_format=prm800k, not ratings",
        ),
        (
            lambda: config.ReadConfig(data_format="prm800k", estimates=config.EstimateConfig(estimate="hard")),
            "--estimate=hard is for --data_format=stepwise and math_aps, not prm800k",
        ),
    ],
)
def test_python_callers_get_the_errors_that_flags_give(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_options_without_effect_pass_at_their_defaults() -> None:
    given = config.EstimateConfig(estimate="soft", hard_threshold=1, unrolled="positive", relative_threshold=0.8)
    assert config.ReadConfig(data_format="stepwise", neutral="positive", alternatives=True, estimates=given)
    assert config.ReadConfig(neutral="drop", alternatives=False, estimates=given)  # files of several formats
    options.refuse_unused(given, ["hard_threshold", "unrolled"], "nothing")
    with pytest.raises(UserError, match=r"^--estimate=soft is for nothing$"):
        options.refuse_unused(given, ["hard_threshold", "estimate"], "nothing")
    with pytest.raises(UserError, match=r"^--lora_targets=a,b is for nothing$"):
        options.refuse_unused(config.LoraConfig(lora_targets=("a", "b")), ["lora_alpha", "lora_targets"], "nothing")


def test_a_list_that_python_gives_is_kept_as_a_tuple():
    assert config.EvalConfig(eval_data=["a", "b"]) == config.EvalConfig(eval_data=("a", "b"))


def test_options_without_their_checks_are_a_fault_of_the_program():
    @dataclasses.dataclass(frozen=True)
    class Unchecked:
        number: int = options.option(1, "A number.", lower=0, upper=9)

    with pytest.raises(TypeError, match="Unchecked has options"):
        flags.parse(Unchecked, ["command"])


@pytest.mark.parametrize("command", ["train", "score", "process_bench", "prm_bench"])
def test_a_cache_of_frozen_layers_is_off_or_somewhere(command: str) -> None:
    """Empty is off, not the working directory; a word meant for a switch is not the name of a directory."""

    def value(text: str) -> str:
        return config_files.as_dict(flags.parse(configuration(command), ["x", f"--cache_frozen={text}"]))[
            "cache_frozen"
        ]

    assert [value(text) for text in ("", "off", "auto", "here", "./on")] == ["off", "off", "auto", "here", "./on"]
    for word in ("true", "on", "False"):
        with pytest.raises(UserError, match=rf"--cache_frozen={word}: expected off, auto or a directory \(\./{word} "):
            value(word)


def test_tokenised_corpora_need_a_directory() -> None:
    with pytest.raises(UserError, match="--data_cache_dir is empty: expected a directory, or auto"):
        flags.parse(configuration("train"), ["train", "--data_cache_dir="])
