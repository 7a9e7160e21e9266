"""The command line as a user types it, on the packaged model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import river_core
from river_core import Trace
from river_core.cli import _summary, main
from river_core.strategies.river import RiverStrategy


def command(*arguments):
    """Run `python -m river_core` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "river_core", *arguments], capture_output=True, text=True, timeout=300)


def test_generate_prints_the_answer_and_writes_a_trace(tmp_path):
    path = tmp_path / "out.json.gz"
    done = command("generate", "What is the capital of France?", "--max-new-tokens", "16", "--trace", str(path))
    assert done.returncode == 0, done.stderr
    trace = Trace.load(path)
    assert done.stdout.strip() == trace.lanes["river"].text.strip() != ""
    assert "tokens/s" in done.stderr


@pytest.fixture
def loaded(default_model, monkeypatch):
    """The commands below share one loaded model; loading is what the test above covers."""
    monkeypatch.setattr("river_core.model.load", lambda *args, **kwargs: default_model)


def test_compare_prints_lanes_with_speed_up_and_first_difference(loaded, capsys):
    assert main(["compare", "Say hello.", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    for expected in ("Backbone", "Full 4-bit", "River", "1.00x", "30.0 of 30", "first differing token"):
        assert expected in out


def test_the_first_difference_is_counted_from_one_as_on_the_page(tiny, capsys):
    trace = Trace.from_events(river_core.compare(tiny, "Why?", ("backbone", "int4"), max_new_tokens=6))
    for token in trace.lanes["int4"].tokens:
        token["id"] = trace.lanes["backbone"].tokens[token["i"]]["id"] + (token["i"] >= 2)
    _summary(trace, sys.stdout)
    assert capsys.readouterr().out.splitlines()[2].endswith("#3")


def test_compare_json_is_json_with_the_run_card(loaded, capsys):
    assert main(["compare", "Say hello.", "--max-new-tokens", "8", "--methods", "backbone,river:0.95", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [lane["id"] for lane in facts["lanes"]] == ["backbone", "river"]
    assert facts["lanes"][0]["speed_up"] == 1 and facts["dtype"] and facts["threads"]


def test_generate_json_prints_events(loaded, capsys):
    assert main(["generate", "Say hello.", "--max-new-tokens", "4", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["type"] == "run" and events[-1]["type"] == "done"


def test_doctor_says_what_was_chosen_and_why(loaded, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for expected in ("SmolLM2-135M-Instruct", "device", "dtype", "why", "cache", "threads", "native code", "pinned"):
        assert expected in out


def test_bench_measures_transformers_and_the_lanes_in_one_process(loaded, monkeypatch, capsys):
    from river_core.measure import peers

    monkeypatch.setattr(peers, "CACHES", peers.CACHES[:1])  # not the trial that compiles, which takes a minute
    monkeypatch.setattr(peers, "DTYPES", {"fp32": torch.float32})
    assert main(["bench", "--tokens", "6", "--repeats", "1", "--methods", "backbone,river:0.95", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["lanes"]) == {"transformers", "backbone", "river:0.95"}
    assert all(lane["tokens_per_second"]["median"] > 0 for lane in result["lanes"].values())
    assert {"backbone / transformers", "river:0.95 / backbone"} <= set(result["ratios"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "Hi", "--tau", "warm"], "must be a number"),
        (["compare", "Hi", "--methods", ""], "at least one lane"),
        (["generate", "Hi", "--method", "teleport"], "no method"),
        (["generate", "Hi", "--max-new-tokens", "many"], "whole number"),
    ],
)
def test_bad_input_gets_a_sentence_and_status_1(loaded, capsys, arguments, says):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err


@pytest.fixture
def tiny_loaded(tiny, monkeypatch):
    monkeypatch.setattr("river_core.cli._load", lambda args, shape=None: tiny)
    return tiny


@pytest.mark.parametrize("length", ["²", "-5", "1e3", "٣", "9" * 5000])
def test_a_length_that_is_no_whole_number_gets_a_sentence(tiny_loaded, capsys, length):
    assert main(["memory", f"--contexts={length}"]) == 1
    assert "--contexts takes whole numbers" in capsys.readouterr().err


@pytest.fixture
def interrupt_at(monkeypatch):
    """Ctrl-C in the middle of the step that makes a lane's token `index`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it

    def arrange(index, times=1):
        real = RiverStrategy.step

        def step(self, token_id, position, at, cache):
            if at == index:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return real(self, token_id, position, at, cache)

        monkeypatch.setattr(RiverStrategy, "step", step)

    yield arrange
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", [["generate", "Hello"], ["compare", "Hello", "--timing", "sequential", "--methods", "backbone,river"]])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_the_trace_so_far(tiny_loaded, interrupt_at, tmp_path, capsys, command, times):
    interrupt_at(4, times)
    path = tmp_path / "t.json.gz"
    assert main([*command, "--max-new-tokens", "12", "--trace", str(path)]) == 130
    said = capsys.readouterr()
    assert "stopped" in said.err and "Traceback" not in said.err
    trace = Trace.load(path)
    lane = next(iter(trace.lanes.values()))
    assert len(lane.tokens) == (5 if times == 1 else 4)
    assert (trace.done["reason"], lane.end["reason"]) == ("stop", "stop") if times == 1 else trace.done is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_sweep_prints_the_repeats_that_were_finished(tiny_loaded, monkeypatch, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    real, calls = RiverStrategy.step, []

    def step(self, *args):
        calls.append(1)
        if len(calls) == 18:  # two lanes of four steps, on the same text, then in the first repeat: in the second one
            signal.raise_signal(signal.SIGINT)
        return real(self, *args)

    monkeypatch.setattr(RiverStrategy, "step", step)
    try:
        assert main(["sweep", "Hello", "--taus", "0.5", "--methods", "river", "--max-new-tokens", "5", "--repeats", "9", "--json"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    result = json.loads(capsys.readouterr().out)
    assert (result["repeats"], result["reason"], len(result["points"])) == (1, "stop", 2)


def in_a_process(code, **environment):
    """Run the command line around the tiny model in a process with another environment."""
    code = (
        "import sys; from tests.tiny import tiny_model; import river_core.cli as cli; cli._load = lambda args, shape=None: tiny_model()\n"
        + code
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
    )


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_terminals_that_are_not_utf8_get_the_text_with_replacements(environment):
    done = in_a_process(
        "sys.exit(cli.main(['compare', 'Hello \\u20ac', '--max-new-tokens', '6', '--methods', 'backbone,river']))", **environment
    )
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert b"Traceback" not in err and b"one run, engine time" in out and b" ? " in out and out.isascii()


def test_a_pipe_that_is_closed_ends_the_command_quietly():
    done = in_a_process("sys.exit(cli.main(['generate', 'Hello', '--max-new-tokens', '200', '--json']))")
    done.stdout.readline()
    done.stdout.close()
    err = done.stderr.read()
    done.wait(timeout=300)
    assert done.returncode == 0 and b"Error" not in err and b"Traceback" not in err


@pytest.mark.parametrize(
    "option",
    [
        ["--device", "abacus"],
        ["--dtype", "float12"],
        ["--kv-dtype", "float8"],
        ["--products", "theirs"],
        ["--bits", "5"],
        ["--threads", "0"],
    ],
)
def test_bad_model_options_get_a_sentence(capsys, option):
    assert main(["doctor", *option]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_instructions_that_there_are_not_get_a_sentence(capsys, monkeypatch):
    monkeypatch.setenv("RIVER_ISA", "sse9")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: RIVER_ISA must be auto, avx512, avx2 or generic, not 'sse9'.\n"
