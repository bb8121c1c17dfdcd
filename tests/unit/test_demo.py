"""The demo without its servers: its device, its conversations, its models and its report."""

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")

from bench_results import cycle
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from harness import smollm2
from harness.console import HarnessError, Row
from harness.demo import models as of_models
from harness.demo import report
from harness.demo.conversations import QUESTIONS, Answer, Conversation, at_once, passages
from harness.demo.models import models
from harness.demo.options import GENERATED, REAL
from harness.demo.servers import BLOCK_TOKENS, IDLE_PAGES, KVPATCH, MODELS, PLAIN, TIERED, Device

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


@pytest.mark.parametrize(
    ("shape", "load"),
    [
        (REAL_SHAPE, REAL.full),
        (REAL_SHAPE, REAL.quick),
        (GENERATED_SHAPE, GENERATED.full),
        (GENERATED_SHAPE, GENERATED.quick),
    ],
)
def test_one_peak_fits_beside_an_idle_engine_and_not_in_a_half(tmp_path, shape, load):
    one = device(tmp_path, shape, load.opening + 180, load.conversations)
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


def test_a_conversation_has_a_page_first_and_then_a_question():
    one = Conversation(3, "A page.")
    assert one.turn == 0
    (said,) = one.say()
    assert "A page." in said["content"] and said["content"].endswith(QUESTIONS[0])
    assert one.turn == 1
    one.hear(Answer(3, 1, text="Yes."))
    assert [message["content"] for message in one.say()[1:]] == ["Yes.", QUESTIONS[1]]
    assert one.turn == 2


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
    assert not found.real and found.loads is GENERATED
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
    assert found.real and found.loads is REAL
    assert found.folders == dict.fromkeys(MODELS, kept)


def content(tmp_path, real):
    answers = [Answer(1, turn, [1] * 9, [2], [-0.1], "So <b>.", True, 0.5) for turn in (1, 2)]
    static = cycle(300 << 20, 300 << 20, 0.0)
    static["timeline"]["mapped"] = {"first": [0, 0, 0], "second": [0, 0, 0]}
    counted = {"computed": 5, "from_cache": 2, "from_tier": 2}
    said = report.said(answers, [Conversation(1, "Title\n***\nText")]) if real else []
    return report.Content(
        failures=[],
        rows=[Row("of something", "1 MiB", "a note")] * 5,
        environment=[Row("Command", "scripts/demo")],
        device=device(tmp_path, REAL_SHAPE, 1280, 6),
        cycles={PLAIN.title: static, KVPATCH.title: cycle(420 << 20, 120 << 20, 1.0)},
        returned={"plain": counted, "ours": counted},
        said=said,
        status_lines=["KV on elastic memory: yes"],
    )


def test_the_report_begins_with_two_models_on_one_device(tmp_path):
    page = report.write(content(tmp_path, real=True), tmp_path).read_text()
    assert page.count("<svg") == 2
    first = page[page.index("<svg") : page.index("</svg>")]
    assert PLAIN.title in first and KVPATCH.title in first and "half of the device" in first
    assert "tokens of returning prompts" in page[page.index("</svg>") :]
    assert "So &lt;b&gt;." in page and "Title" in page and "***" not in page


def test_noise_is_not_shown_as_text(tmp_path):
    page = report.write(content(tmp_path, real=False), tmp_path).read_text()
    assert page.count("<svg") == 2
    assert "What was said" not in page


def test_an_answer_that_was_cut_shows_it():
    one = Conversation(1, "Title\nText")
    cut, ended = (Answer(1, 1, text="So ", ended=ended) for ended in (False, True))
    assert [line.answer for line in report.said([cut, ended], [one])] == ["So ...", "So"]
    assert report.said([Answer(2, 1)], [one]) == []
