"""happy_vllm's routes for texts and tokens, and its technical routes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engines.errors import InvalidChat, NotServed, RequestError
from engines.loaded_model import ModelTexts
from engines.request import Token
from engines.tokenization import split_text as text_of_tokens
from handlers.contract import ContractError, Reply
from handlers.custom.settings import HandlerConfig
from handlers.happy_vllm.routes import HAPPY_VLLM
from handlers.happy_vllm.tokens import ids_inside
from handlers.route_declarations import InfoRoute, ModelView, RenderedChat
from tests.contracts import exchange
from tests.contracts.exchange import ENCODABLE, MODEL, call, told
from tests.stand_ins.wrapped_tokenizer import WrappedTokenizer

SENTENCE = "Hey, how are you ?"
TEXT = "Hey, how are you ? I am clearly fine. And you ? Exceptionally good, thanks for asking."
CORPUS = [TEXT, f" {TEXT}", "Hey Hey, thisisareallybigwordisntit", "é 🤗 你好"] * 3


class HuggingFace(WrappedTokenizer):
    """A tokenizer like Hugging Face's, with only the attributes that the contract uses."""

    truncation_side = "right"
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in ids]


def _like_gpt() -> Tokenizer:
    """Return a tokenizer with byte-level BPE. A character of several bytes may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def _like_llama() -> Tokenizer:
    """Return a tokenizer like SentencePiece's.

    It puts `<s>` and a space before every text. A character that the vocabulary lacks becomes its bytes.
    """
    corpus = [text.replace(" ", "▁") for text in CORPUS]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?\w+|▁?[^\w▁]|▁"), "isolated")
    words.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    trained = json.loads(words.to_str())["model"]
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in trained["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


class Model:
    """A loaded model that can only tokenize."""

    max_model_len = 64
    max_top_tokens = 20
    eos_token_ids: frozenset[int] = frozenset()
    statistics: Any = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer: Any = HuggingFace(tokenizer)
        self.texts = ModelTexts(self.tokenizer)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        return text_of_tokens(self.tokenizer, token_ids, frozenset(), skip_special_tokens, prompt_ids)

    def status(self) -> Any:
        return SimpleNamespace(running_requests=2, waiting_requests=1, kv_cache_usage=0.25)


LIKE_GPT, LIKE_LLAMA = Model(_like_gpt()), Model(_like_llama())
VIEW = exchange.view(loaded=LIKE_GPT)
both = pytest.mark.parametrize("model", [LIKE_GPT, LIKE_LLAMA], ids=["like_gpt", "like_llama"])
TELLS = {route.path: route for route in HAPPY_VLLM.routes if isinstance(route, InfoRoute)}


def reply(
    path: str, document: Any = b"", view: ModelView = VIEW, rendered: RenderedChat | RequestError | None = None
) -> Reply:
    try:
        return told(TELLS[path], call(document), view, rendered)
    except ContractError as error:  # on every route, the server answers both errors like this
        return error.reply
    except RequestError as error:
        return HAPPY_VLLM.refuse(error)


def ask(path: str, document: Any, model: Model = LIKE_GPT) -> Any:
    answer = reply(path, document, replace(VIEW, loaded=model))
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def refused(path: str, document: Any, view: ModelView = VIEW) -> tuple[int, Any]:
    answer = reply(path, document, view)
    return answer.status, json.loads(answer.body)


# /v1/tokenizer and /v1/decode


def test_vanilla_tokens_are_the_tokenizers_own_with_special_ones() -> None:
    answer = ask("/v1/tokenizer", {"text": SENTENCE, "with_tokens_str": True}, LIKE_LLAMA)
    assert list(answer) == ["tokens_ids", "tokens_nb", "tokens_str"]
    assert answer["tokens_str"] == ["<s>", "▁Hey", ",", "▁how", "▁are", "▁you", "▁?"]
    assert answer["tokens_ids"] == LIKE_LLAMA.tokenizer.encode(SENTENCE)
    assert answer["tokens_nb"] == 7


def test_tokens_inside_a_text_have_no_special_ones_and_no_added_space() -> None:
    document = {"text": f"{SENTENCE} Fine thanks.", "with_tokens_str": True, "vanilla": False}
    texts = ask("/v1/tokenizer", document, LIKE_LLAMA)["tokens_str"]
    assert "".join(texts) == f"{SENTENCE} Fine thanks."
    assert [text for text in texts if text in (",", " how", " are", " you", " ?")] == [
        ",",
        " how",
        " are",
        " you",
        " ?",
    ]
    assert not texts[0].startswith(" ")


def test_token_texts_are_shown_only_where_asked_for() -> None:
    for vanilla in (True, False):
        assert list(ask("/v1/tokenizer", {"text": "a", "vanilla": vanilla})) == ["tokens_ids", "tokens_nb"]
        assert list(ask("/v1/decode", {"token_ids": [5], "vanilla": vanilla})) == ["decoded_string"]


def test_the_spelling_of_the_request_schema_is_understood_as_well() -> None:
    assert "tokens_str" in ask("/v1/tokenizer", {"text": "a", "with_token_str": True})


def test_the_answer_is_compact_and_not_escaped() -> None:
    ids = LIKE_GPT.tokenizer.encode("é")
    body = reply("/v1/decode", {"token_ids": ids}).body
    assert body == '{"decoded_string":"é"}'.encode()


@both
@pytest.mark.parametrize(
    "text",
    ["", " ", "  a", "\n\n a", "abc", SENTENCE, f" {TEXT}", "🤗é 你好 \U0001f468‍\U0001f469‍\U0001f467", "a\ufffdb"],
)
def test_token_texts_inside_a_text_are_the_text(model: Model, text: str) -> None:
    answer = ask("/v1/tokenizer", {"text": text, "with_tokens_str": True, "vanilla": False}, model)
    assert "".join(answer["tokens_str"]) == text
    assert len(answer["tokens_str"]) == len(answer["tokens_ids"]) == answer["tokens_nb"]
    decoded = ask("/v1/decode", {"token_ids": answer["tokens_ids"], "with_tokens_str": True, "vanilla": False}, model)
    assert decoded == {"decoded_string": text, "tokens_str": answer["tokens_str"]}


def test_vanilla_decoding_keeps_special_tokens() -> None:
    ids = LIKE_LLAMA.tokenizer.encode(SENTENCE)
    answer = ask("/v1/decode", {"token_ids": ids, "with_tokens_str": True}, LIKE_LLAMA)
    assert answer["decoded_string"].startswith("<s>")
    assert answer["decoded_string"].endswith(SENTENCE)
    assert answer["tokens_str"] == ["<s>", "▁Hey", ",", "▁how", "▁are", "▁you", "▁?"]


def test_decoding_inside_a_text_keeps_the_leading_space() -> None:
    ids = LIKE_LLAMA.tokenizer.encode(SENTENCE, add_special_tokens=False)
    answer = ask("/v1/decode", {"token_ids": ids, "vanilla": False}, LIKE_LLAMA)
    assert answer == {"decoded_string": f" {SENTENCE}"}


def test_a_character_that_never_gets_complete_is_a_replacement_character() -> None:
    ids = LIKE_GPT.tokenizer.encode("a🤗")[:-1]
    answer = ask("/v1/decode", {"token_ids": ids, "with_tokens_str": True, "vanilla": False})
    assert answer["decoded_string"].startswith("a\ufffd")
    assert "".join(answer["tokens_str"]) == answer["decoded_string"]


@both
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_any_text_is_found_again(model: Model, text: str) -> None:
    answer = ask("/v1/tokenizer", {"text": text, "with_tokens_str": True, "vanilla": False}, model)
    assert "".join(answer["tokens_str"]) == text
    chunks = ask("/v1/split_text", {"text": text, "num_tokens_in_chunk": 1, "separators": ["a", " ", "0"]}, model)
    assert "".join(chunks["split_text"]) == text


@both
@given(data=st.data())
def test_any_ids_have_a_text_for_each(model: Model, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(model.tokenizer) - 1), max_size=30))
    answer = ask("/v1/decode", {"token_ids": ids, "with_tokens_str": True, "vanilla": False}, model)
    assert len(answer["tokens_str"]) == len(ids)
    assert "".join(answer["tokens_str"]) == answer["decoded_string"]


# /v2/tokenizer and /v2/decode


def test_the_second_tokenizer_has_exactly_three_fields() -> None:
    ids = LIKE_LLAMA.tokenizer.encode(SENTENCE)
    document = {"model": "model", "prompt": SENTENCE}
    assert ask("/v2/tokenizer", document, LIKE_LLAMA) == {"count": 7, "max_model_len": 64, "tokens": ids}
    without = ask("/v2/tokenizer", document | {"add_special_tokens": False}, LIKE_LLAMA)
    assert without == {"count": 6, "max_model_len": 64, "tokens": ids[1:]}


def test_the_tokens_of_a_chat_are_those_of_its_prompt() -> None:
    chat = {"messages": [{"role": "user", "content": "Hey"}], "model": None, "add_generation_prompt": False}
    answer = reply("/v2/tokenizer", chat, rendered=RenderedChat([3, 4]))
    assert (answer.status, answer.body) == (200, b'{"count":2,"max_model_len":64,"tokens":[3,4]}')
    passed_on = TELLS["/v2/tokenizer"].chat
    assert passed_on is not None
    found = passed_on(call(chat, content_type="text/plain"), VIEW)
    assert found is not None
    assert found.content_type == "application/json"
    assert json.loads(found.body) == {"messages": chat["messages"], "add_generation_prompt": False}


def test_a_chat_that_cannot_become_a_prompt_is_refused_in_vllms_form() -> None:
    answer = reply("/v2/tokenizer", {"messages": []}, rendered=InvalidChat("no message"))
    error = {"message": "no message", "type": "BadRequestError", "param": None, "code": 400}
    assert (answer.status, json.loads(answer.body)) == (400, {"error": error})


def test_the_second_decoder_has_the_prompt_alone() -> None:
    ids = LIKE_GPT.tokenizer.encode(SENTENCE)
    assert ask("/v2/decode", {"model": "model", "tokens": ids}) == {"prompt": SENTENCE}
    # In happy_vllm's own example these are texts, which Pydantic converts to numbers.
    assert ask("/v2/decode", {"model": "model", "tokens": [*map(str, ids[:1]), *map(float, ids[1:])]}) == {
        "prompt": SENTENCE
    }


@pytest.mark.parametrize("tokens", [["1.5"], [10**6]])
def test_errors_of_the_second_decoder_are_vllms(tokens: list[Any]) -> None:
    code, body = refused("/v2/decode", {"tokens": tokens})
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (code, error["code"], error["param"], error["type"]) == (400, 400, "tokens", "BadRequestError")


# /v1/split_text and /v1/metadata_text


@pytest.mark.parametrize(
    ("document", "chunks"),
    [
        (
            {"text": TEXT, "num_tokens_in_chunk": 4},
            [SENTENCE, " I am clearly fine.", " And you ? Exceptionally good, thanks for asking."],
        ),
        # Separators are compared as tokens. A separator may have several.
        ({"text": "a ?b?c", "num_tokens_in_chunk": 1, "separators": ["?"]}, ["a ?b?", "c"]),
        ({"text": "a ?b?c", "num_tokens_in_chunk": 1, "separators": [" ?"]}, ["a ?", "b?c"]),
        (
            {"text": "one<br>two<br>three", "num_tokens_in_chunk": 1, "separators": ["<br>"]},
            ["one<br>", "two<br>", "three"],
        ),
        ({"text": TEXT}, [TEXT]),
        ({"text": TEXT, "num_tokens_in_chunk": 1, "separators": []}, [TEXT]),
        ({"text": ""}, []),
    ],
)
def test_chunks_end_at_separators_once_they_are_long_enough(document: dict[str, Any], chunks: list[str]) -> None:
    assert ask("/v1/split_text", document, LIKE_LLAMA) == {"split_text": chunks}


def test_an_empty_separator_is_behind_each_token() -> None:
    """happy_vllm looks for the tokens of a separator. An empty separator has none, so it is found everywhere."""
    text = "one two three four five"
    for minimum in (1, 2, 3):
        chunks = ask("/v1/split_text", {"text": text, "num_tokens_in_chunk": minimum, "separators": ["", "x"]})
        pieces = chunks["split_text"]
        assert "".join(pieces) == text
        counts = [len(ids_inside(LIKE_GPT, piece)) for piece in (text, *pieces)]
        assert counts[1:-1] == [minimum] * (len(pieces) - 1)
        assert len(pieces) == -(-counts[0] // minimum)


@pytest.mark.parametrize(
    ("more", "dropped"),
    [
        ({"max_length": 2, "truncation_side": "left"}, "Hey, how are"),
        ({"max_length": 2, "truncation_side": "right"}, "how are you ?"),
        ({"max_length": 2}, "Hey, how are"),  # The side on which prompts are truncated.
        ({}, ""),
        ({"max_length": 0}, SENTENCE),
    ],
)
def test_truncated_text_is_what_is_dropped(more: dict[str, Any], dropped: str) -> None:
    assert ask("/v1/metadata_text", {"text": SENTENCE, **more}, LIKE_LLAMA)["truncated_text"] == dropped


def test_the_count_is_that_of_the_text_inside_another() -> None:
    count = ask("/v1/metadata_text", {"text": SENTENCE}, LIKE_LLAMA)["tokens_nb"]
    assert count == ask("/v1/tokenizer", {"text": SENTENCE, "vanilla": False}, LIKE_LLAMA)["tokens_nb"]


@pytest.mark.parametrize("document", [{}, {"token_ids": "a"}, {"token_ids": [-1]}, {"token_ids": [10**9]}])
def test_wrong_token_ids_are_named(document: dict[str, Any]) -> None:
    status, body = refused("/v1/decode", document)
    assert status == 422
    assert body["detail"][0]["loc"] == ["body", "token_ids"]


@both
def test_a_long_text_takes_time_in_proportion(model: Model) -> None:
    begun = time.process_time()
    text = "Hey, how are you ? " * 10_000
    assert "".join(ask("/v1/split_text", {"text": text}, model)["split_text"]) == text
    assert "".join(ask("/v1/split_text", {"text": "🤗" * 40_000}, model)["split_text"]) == "🤗" * 40_000
    assert time.process_time() - begun < 60


def test_bytes_that_are_no_text_take_time_in_proportion() -> None:
    byte = LIKE_GPT.tokenizer.encode("🤗")[-1]
    begun = time.process_time()
    ask("/v1/decode", {"token_ids": [byte] * 20_000, "with_tokens_str": True, "vanilla": False})
    assert time.process_time() - begun < 60


LONG, MANY = "x" * ((1 << 20) + 1), [1] * ((1 << 19) + 1)


@pytest.mark.parametrize(
    ("path", "name", "value", "limit"),
    [
        *((f"/v1/{route}", "text", LONG, "1048576 bytes") for route in ("tokenizer", "split_text", "metadata_text")),
        ("/v1/tokenizer", "text", "é" * (1 << 19) + "e", "1048576 bytes"),
        ("/v1/decode", "token_ids", MANY, "524288 token ids"),
        ("/v2/tokenizer", "prompt", LONG, "1048576 bytes"),
        ("/v2/decode", "tokens", MANY, "524288 token ids"),
    ],
)
def test_what_would_exhaust_memory_is_refused_by_its_name_and_limit(
    path: str, name: str, value: Any, limit: str
) -> None:
    status, body = refused(path, {name: value})
    if path.startswith("/v2/"):
        assert (status, body["error"]["param"]) == (400, name)
        message = body["error"]["message"]
    else:
        assert (status, body["detail"][0]["loc"]) == (422, ["body", name])
        message = body["detail"][0]["msg"]
    assert f"`{name}` may have at most {limit}" in message


def test_a_text_that_no_word_goes_with_is_tokenized_in_few_passes() -> None:
    """Check a text whose first tokens depend on its end. A long run of one character may be such a text."""
    passes: list[str] = []

    class Contrary:
        def encode(self, text: str, *, special: bool) -> list[int]:
            passes.append(text)
            return [1] * len(text) if len(text) < 1000 else [2] * len(text)

    model = cast(Model, SimpleNamespace(texts=Contrary()))
    assert ids_inside(model, "x" * 5000) == [2] * 5000
    assert sum(len(text) > 1000 for text in passes) == 4


FIELDS = st.sampled_from(
    [
        *("text", "token_ids", "tokens", "prompt", "messages", "vanilla", "with_tokens_str", "separators"),
        *("num_tokens_in_chunk", "truncation_side", "max_length", "request_id", "model", "add_special_tokens"),
    ]
)


@given(path=st.sampled_from(sorted(TELLS)), document=ENCODABLE | st.dictionaries(FIELDS, ENCODABLE))
def test_any_json_has_an_answer_in_json(path: str, document: Any) -> None:
    answer = reply(path, document)
    assert answer.status in (200, 400, 404, 422)
    json.loads(answer.body)


# Technical routes


def test_info_names_the_application_and_the_model() -> None:
    info = json.loads(reply("/v1/info").body)
    assert list(info) == [
        *("application", "version", "vllm_version", "model_name", "truncation_side", "max_length", "extra_information")
    ]
    assert info["application"] == "happy_vllm"
    assert (info["vllm_version"], info["model_name"]) == ("1", "model")
    assert (info["truncation_side"], info["max_length"], info["extra_information"]) == ("left", 64, {})


def test_another_engines_version_is_not_given_as_vllms() -> None:
    info = json.loads(reply("/v1/info", view=replace(VIEW, engine="dynamic_batch", engine_version="5.1")).body)
    assert info["vllm_version"] == "dynamic_batch 5.1"


def test_live_metrics_are_the_schedulers() -> None:
    assert reply("/live_metrics").body == (
        b'{"requests_running":2,"requests_swapped":0,"requests_pending":1,"gpu_cache_usage":0.25,"cpu_cache_usage":0.0}'
    )


def test_an_abort_answers_null_and_reaches_the_engine() -> None:
    aborted: list[str] = []
    view = replace(VIEW, abort=aborted.append)
    assert reply("/v1/abort_request", {"request_id": "cmpl-1"}, view) == Reply(200, "application/json", b"null")
    assert aborted == ["cmpl-1"]


def test_a_model_with_a_handler_of_its_own_has_no_routes_on_tokens() -> None:
    config = replace(MODEL, handler=HandlerConfig(entry_point="model.py"))
    view = replace(VIEW, config=config, state="starting", loaded=None)
    for path, document in (("/v1/tokenizer", {"text": "a"}), ("/v1/info", b""), ("/live_metrics", b"")):
        with pytest.raises(NotServed):
            TELLS[path].answer(call(document), view)


@pytest.mark.parametrize("name", ["model", "tgi", "dummy", ""])
def test_the_aliases_of_the_model_name_it_here_as_on_openais_routes(name: str) -> None:
    tokens = ask("/v2/tokenizer", {"model": name, "prompt": SENTENCE})["tokens"]
    assert ask("/v2/decode", {"model": name, "tokens": tokens}) == {"prompt": SENTENCE}


@pytest.mark.parametrize("switch", ["yes", "On", "1", "true", "T", 1, 1.0])
def test_switches_may_be_what_pydantic_takes_for_true(switch: Any) -> None:
    document = {"text": SENTENCE}
    assert ask("/v1/tokenizer", document | {"with_tokens_str": switch}).keys() == {
        "tokens_ids",
        "tokens_nb",
        "tokens_str",
    }
    assert ask("/v1/tokenizer", document | {"vanilla": switch}) == ask("/v1/tokenizer", document)


def test_numbers_may_be_text() -> None:
    document = {"text": SENTENCE}
    for path, name in (("/v1/split_text", "num_tokens_in_chunk"), ("/v1/metadata_text", "max_length")):
        assert ask(path, document | {name: "4"}) == ask(path, document | {name: 4})
