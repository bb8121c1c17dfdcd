"""The demo without its servers: its device, its conversations, its models and its report."""

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")

import httpx
from bench_results import cycle
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from harness import smollm2
from harness.console import HarnessError, Row
from harness.demo import models as of_models
from harness.demo import report
from harness.demo.conversations import QUESTIONS, Answer, Conversation, at_once, passages
from harness.demo.models import GENERATED, QUICK, REAL, models
from harness.demo.servers import BLOCK_TOKENS, IDLE_PAGES, KVPATCH, MODELS, PLAIN, TIERED, Device
from harness.demo.verdict import Held

# Layers and KV heads.
REAL_SHAPE, GENERATED_SHAPE = (30, 3), (4, of_models.KV_HEADS)


def device(folder, shape, longest, together):
    names = ("num_hidden_layers", "num_key_value_heads")
    config = dict(zip(names, shape, strict=True)) | {"head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return Device.of(folder, longest, together)


@pytest.fixture
def words():
    """A tokenizer with one token a word."""
    made = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@pytest.mark.parametrize("conversations", [REAL.conversations, QUICK])
@pytest.mark.parametrize(("shape", "load"), [(REAL_SHAPE, REAL), (GENERATED_SHAPE, GENERATED)])
def test_one_peak_fits_beside_an_idle_engine_and_not_in_a_half(
    tmp_path, shape, load, conversations
):
    one = device(tmp_path, shape, load.opening + 180, conversations)
    blocks = one.together * -(-one.longest // BLOCK_TOKENS) + 1
    peak = -(-blocks // (one.page_bytes // one.block_bytes)) + 1  # what unmapped addresses show
    assert one.pages // 2 < peak <= one.pages - IDLE_PAGES < 2 * peak
    assert one.half * 2 == one.size == one.pages * one.page_bytes
    assert one.idle < one.half
    blocks_of_tier = float(one.tier_gib) * (1 << 30) / one.block_bytes
    assert blocks <= blocks_of_tier < 2 * blocks + 200


def test_every_way_has_the_same_commands_but_for_the_memory(tmp_path):
    one = device(tmp_path, REAL_SHAPE, 1280, 6)
    plain, tiered, ours = (way.kind(one, "first").arguments for way in (PLAIN, TIERED, KVPATCH))
    config = json.loads(tiered.pop("kv-transfer-config"))["kv_connector_extra_config"]
    assert config["cpu_bytes_to_use"] == float(one.tier_gib) * (1 << 30)
    assert tiered == plain
    assert int(plain.pop("num-gpu-blocks-override")) == one.half // one.block_bytes
    assert int(ours.pop("num-gpu-blocks-override")) == one.size // one.block_bytes
    assert ours.pop("kv-offloading-size") == one.tier_gib
    assert plain == ours
    assert plain["max-model-len"] == "2048"


def test_a_passage_is_the_beginning_of_a_page_and_no_two_are_the_same(words):
    found = passages(words, 500, 16)
    assert [len(passage.split()) for passage in found] == [500] * 16
    assert len({passage[:20] for passage in found}) == 16
    assert found == passages(words, 500, 16)


def answered(request):
    """What a server answers: as many tokens as it was asked for, and what it ended with."""
    asked = json.loads(request.content)
    said = asked["messages"][-1]["content"]
    choice = {
        "token_ids": [5] * (1 if "cut" in said else asked["max_tokens"]),
        "logprobs": {"content": [{"logprob": -0.5}]},
        "message": {"content": "Yes."},
        "finish_reason": "abort" if "cut" in said else "length",
    }
    return httpx.Response(200, json={"prompt_token_ids": [1, 2], "choices": [choice]})


@pytest.fixture
def client():
    with httpx.Client(base_url="http://demo", transport=httpx.MockTransport(answered)) as client:
        yield client


def test_a_conversation_has_a_page_first_and_then_a_question(client):
    one = Conversation(3, "A page.")
    assert one.ask(client, REAL) == Answer(3, 1, [1, 2], [5] * 24, [-0.5], "Yes.")
    said = [message["content"] for message in one.history]
    assert "A page." in said[0] and said[0].endswith(QUESTIONS[0])
    assert one.ask(client, REAL).turn == 2
    assert [message["content"] for message in one.history[1:]] == ["Yes.", QUESTIONS[1], "Yes."]


def test_an_answer_that_ends_too_early_is_an_error(client):
    with pytest.raises(HarnessError, match="after 1 of 24 tokens"):
        Conversation(3, "cut").ask(client, REAL)


def test_a_failure_does_not_wait_for_the_other_calls():
    begun, released, ended = (threading.Event() for _ in range(3))

    def call(name):
        if name == "fails":
            begun.wait(30)
            raise HarnessError("no")
        begun.set()
        released.wait(30)
        ended.set()

    with pytest.raises(HarnessError):
        at_once(call, ["waits", "fails"])
    assert not ended.is_set()
    released.set()


def test_results_come_in_the_order_of_the_calls():
    assert at_once(pow, [2, 3, 4], [3, 2, 1]) == [8, 9, 4]


def test_where_the_real_model_cannot_be_had_it_says_so_in_a_sentence(monkeypatch):
    def none(say):
        raise HarnessError("the model could not be made: \nlong story\npip could not install it")

    monkeypatch.setattr(smollm2, "kept", none)
    monkeypatch.setattr(of_models, "kept_model", lambda seed, say, heads: Path(f"{seed}-{heads}"))
    lines = []
    found = models(generated=False, say=lines.append)
    (line,) = lines
    assert line == (
        "SmolLM2-135M-Instruct cannot be had here (pip could not install it), so the models are "
        "two with random weights, whose answers are noise"
    )
    assert not found.real and found.load is GENERATED
    assert found.folders == {"first": Path("7-8"), "second": Path("8-8")}
    assert models(generated=True, say=lines.append) == found
    assert lines == [line], "nobody asked for the real one"


def test_the_real_model_is_taken_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "BASE", tmp_path)
    kept = smollm2.folder()
    assert tmp_path in kept.parents
    kept.mkdir(parents=True)
    (kept / "model.safetensors").touch()
    found = models(generated=False, say=lambda text: pytest.fail(f"it was got again: {text}"))
    assert found.real and found.load is REAL
    assert found.folders == dict.fromkeys(MODELS, kept)


def written(folder, said):
    """The page of a report."""
    static = cycle(300 << 20, 300 << 20, 0.0)
    static["timeline"]["mapped"] = {"first": [0, 0, 0], "second": [0, 0, 0]}
    counted = {"first_returns": {"computed": 5, "from_cache": 2, "from_tier": 2}}
    held = {
        PLAIN: Held(counted=counted, cycle=static),
        TIERED: Held(counted=counted),
        KVPATCH: Held(counted=counted, cycle=cycle(420 << 20, 120 << 20, 1.0)),
    }
    rows = [Row("of something", "1 MiB", "a note")] * 5
    one = device(folder, REAL_SHAPE, 1280, 6)
    tables = {"failures": [], "figures": rows, "environment": rows, "said": said}
    return report.write(folder, one, held, **tables).read_text()


def test_the_report_has_two_models_on_one_device_and_what_was_said(tmp_path):
    answers = [Answer(1, turn, text="So <b>.", ended=True) for turn in (1, 2)]
    page = written(tmp_path, report.said(answers, [Conversation(1, "Title\n***\nText")]))
    picture = page[page.index("<svg") : page.index("</svg>")]
    assert all(title in picture for title in report.TITLES.values())
    assert "half of the device" in picture
    assert "<th>kvpatch</th>\n<td>5</td><td>2</td><td>2</td></tr>" in page
    assert "So &lt;b&gt;." in page and "Title" in page and "***" not in page


def test_noise_is_not_shown_as_text(tmp_path):
    assert "What was said" not in written(tmp_path, [])


def test_an_answer_that_was_cut_shows_it():
    one = Conversation(1, "Title\nText")
    cut, ended = (Answer(1, 1, text="So ", ended=ended) for ended in (False, True))
    assert [line.value for line in report.said([cut, ended], [one])] == ["So ...", "So"]
    assert report.said([Answer(2, 1)], [one]) == []
