"""No value of a key, a token or a password is in what is sent and checked in."""

import json

import pytest

from kvpatch.masking import command, masked

STORE = {"bucket": "b", "access_key": "AKIA", "secret_key": "S", "region": "r"}
HIDDEN = STORE | {"access_key": "***", "secret_key": "***"}
TRANSFER = {"kv_connector_extra_config": {"secondary_tiers": [{"store_config": STORE}]}}


def test_at_any_depth():
    found = masked(TRANSFER)
    assert found["kv_connector_extra_config"]["secondary_tiers"] == [{"store_config": HIDDEN}]
    assert TRANSFER["kv_connector_extra_config"]["secondary_tiers"] == [{"store_config": STORE}]


def test_at_the_end_of_a_text():
    flag = f"OffloadingConnector {json.dumps(TRANSFER, sort_keys=True)}"
    found = masked({"flags": {"connector": flag}})["flags"]["connector"]
    assert found == flag.replace("AKIA", "***").replace('"S"', '"***"')


def test_a_number_of_tokens_is_no_secret():
    """Two thresholds must not look the same in a verdict."""
    for kept in (
        {"scheduler_config.long_prefill_token_threshold": 4, "eos_token_id": [1, 2]},
        {"VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "1024", "token": None, "use_token_ids": True},
    ):
        assert masked(kept) == kept
    found = masked({"hf_token": "t", "token": {"of": ["t", 1]}, "token_file": "f", "password": 1})
    assert found == {
        "hf_token": "***",
        "token": {"of": ["***", 1]},
        "token_file": "***",
        "password": "***",
    }


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("--api-key a b --tp 2 --hf-token=c --x", "--api-key *** *** --tp 2 --hf-token=*** --x"),
        ("--api_key=a --api-k b --hf_tok c", "--api_key=*** --api-k *** --hf_tok ***"),
        ("--ssl-keyfile f --ssl-keyfile-password p", "--ssl-keyfile f --ssl-keyfile-password ***"),
        ("env VLLM_API_KEY=k HF_TOKEN=t A=b vllm", "env VLLM_API_KEY=*** HF_TOKEN=*** A=b vllm"),
        ("AWS_SECRET_ACCESS_KEY=s vllm serve m", "AWS_SECRET_ACCESS_KEY=*** vllm serve m"),
        ("--kv-transfer-config.x.secret_key s", "--kv-transfer-config.x.secret_key ***"),
        ("--max-num-batched-tokens 8 --tokenizer t", "--max-num-batched-tokens 8 --tokenizer t"),
        ("serve secret-model --served-model-name token", None),
        ('--hf-overrides {"a":1}', None),
        ("{secret_key:s}", "***"),
        ("{hf_token:t}", "***"),
        ("--long-prefill-token-threshold 4 --x", None),
        ("--long-prefill-token-threshold=4 VLLM_GEMM_TOKEN_THRESHOLD=8", None),
        ('--speculative-config {"num_speculative_tokens":3,"eos_token_id":[1]}', None),
        ("--chat-template {{bos_token}}", None),
    ],
)
def test_a_command(typed, kept):
    assert command(typed.split()) == (kept or typed).split()


def test_a_token_within_json():
    assert command(['{"hf_token":"t"}']) == ['{"hf_token": "***"}']


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--kv-transfer-config="])
def test_within_json(option):
    text = json.dumps(TRANSFER)
    words = [option + text] if option.endswith("=") else [option, text]
    found = command(words)
    assert len(found) == len(words)
    assert json.loads(found[-1].partition("=")[2] or found[-1]) == masked(TRANSFER)
