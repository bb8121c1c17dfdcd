"""How ``kvpatch doctor -- COMMAND`` reads a command, without vLLM."""

import pytest

from kvpatch.doctor import command, would_start


@pytest.mark.parametrize(
    ("words", "settings", "rest"),
    [
        (["vllm", "serve", "m"], {}, ["vllm", "serve", "m"]),
        (["env", "A=b=c", "vllm"], {"A": "b=c"}, ["vllm"]),
        (["env", "-u", "A", "vllm"], {}, ["env", "-u", "A", "vllm"]),
        (["A=", "B=1", "vllm", "C=2"], {"A": "", "B": "1"}, ["vllm", "C=2"]),
    ],
)
def test_variables_before_a_command(words, settings, rest):
    assert command.split(words) == (settings, rest)


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m"],
        ["/opt/bin/vllm", "serve", "m"],
        ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"],
        ["python3.11", "-m", "vllm.entrypoints.openai.api_server", "m"],
    ],
)
def test_commands_of_vllm(words):
    assert would_start.words_of(words) == ["serve", "m"]


@pytest.mark.parametrize(
    "words", [[], ["vllm"], ["vllm", "bench"], ["python", "-m", "http.server"]]
)
def test_other_commands(words):
    with pytest.raises(ValueError, match="it is not vllm serve"):
        would_start.words_of(words)


def test_an_unknown_option_leaves_with_its_value_only():
    words = ["serve", "m", "--sise", "16", "--size", "16", "--all", "--x=1", "y"]
    left, wrong = would_start.without(words, "unrecognized arguments: --sise 16", ["--size"])
    assert left == ["serve", "m", "--size", "16", "--all", "--x=1", "y"]
    assert wrong == [("vLLM has no option --sise", "did you mean --size?", "")]


def test_an_option_with_underscores_and_a_value_in_one_word():
    words = ["serve", "--max_len=x", "m"]
    message = "argument --max-len: invalid int value: 'x'"
    assert would_start.without(words, message, []) == (["serve", "m"], [(message, "", "")])


def test_words_that_no_option_takes():
    left, wrong = would_start.without(["serve", "m", "n"], "unrecognized arguments: n", [])
    assert left is None
    assert wrong == [("vLLM does not read n", "", "")]


def test_values_that_cannot_be_read_are_left_out():
    given = {"KVPATCH_IDLE": "soon", "KVPATCH_HOST_DEVICE": "1GiB", "KVCACHED_IPC_TIMEOUT": "x"}
    assert command.readable_only(given) == {"KVPATCH_HOST_DEVICE": "1GiB", "KVPATCH": "1"}


def test_what_refers_to_logs_that_nobody_sees_has_the_import_that_failed():
    what = (
        "Model architectures ['A'] failed to be inspected. Please check the logs for more details."
    )
    logged = "ERROR [registry.py:9] ModuleNotFoundError: No module named 'torchvision'\nERROR more"
    assert command.explained(what, logged) == (
        f"{what} (ModuleNotFoundError: No module named 'torchvision')"
    )
    assert command.explained(what, "") == what
    assert command.explained("it has no tokenizer", logged) == "it has no tokenizer"
