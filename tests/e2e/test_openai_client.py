"""The official OpenAI client against the real server and the real default model."""

import json

import openai
import pytest
import requests

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def chat(client, **arguments):
    arguments = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24} | arguments
    return client.chat.completions.create(**arguments)


def complete(client, **arguments):
    arguments = {"model": "smollm2", "prompt": "The sea is", "temperature": 0, "max_tokens": 16} | arguments
    return client.completions.create(**arguments)


def test_chat_answers_the_question(client):
    answer = chat(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_plain_and_keeps_the_protocol(client):
    plain = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == [plain.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_without_include_usage_no_chunk_has_totals(client):
    assert all(c.usage is None for c in chat(client, stream=True))


def test_completion_prompt_forms(server, client):
    text = complete(client).choices[0].text
    ids = requests.post(server.url + "/tokenize", json={"prompt": "The sea is"}).json()["tokens"]
    assert complete(client, prompt=ids).choices[0].text == text
    several = complete(client, prompt=["The sea is", "Once upon a time"])
    assert [c.index for c in several.choices] == [0, 1]
    assert several.choices[0].text == text
    assert complete(client, prompt=[ids, ids]).choices[1].text == text


def test_n_choices_have_their_own_streams_and_repeat(client):
    arguments = dict(prompt="Once", temperature=1, seed=42, n=4, max_tokens=20)
    first = [c.text for c in complete(client, **arguments).choices]
    again = [c.text for c in complete(client, **arguments).choices]
    assert first == again and len(set(first)) > 1
    assert complete(client, **arguments | {"n": 1}).choices[0].text == first[0]
    unseeded = {complete(client, prompt="Once", temperature=1, max_tokens=20).choices[0].text for _ in range(3)}
    assert len(unseeded) > 1


def test_n_greedy_choices_are_refused(client):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, n=2, temperature=0)
    assert refused.value.param in ("n", "temperature")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_never_leaks(client, stream):
    """STR-1: a stop string that spans tokens, and a near miss."""
    plain = complete(client, prompt="Count: one two three", max_tokens=24).choices[0]
    text = plain.text
    stop = text[len(text) // 3 : len(text) // 3 + 12]
    near = stop[:-1] + ("x" if stop[-1] != "x" else "y")

    def run(stop_string):
        answer = complete(client, prompt="Count: one two three", max_tokens=24, stop=[stop_string], stream=stream)
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason
        chunks = [c for c in answer if c.choices]
        return "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason

    assert run(stop) == (text[: text.index(stop)], "stop")
    assert run(near) == (text, plain.finish_reason)


def test_completion_logprobs(client):
    answer = complete(client, logprobs=5, max_tokens=6)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert value <= 0 and top[token] == value and value == max(top.values())
        assert len(top) in (5, 6)
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_chat_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob
    assert b"".join(bytes(e.bytes) for e in content).decode().startswith(answer.choices[0].message.content)


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 65])
def test_echo_logprobs_do_not_depend_on_the_cache(server, client, tokens):
    """LOG-4: complete and equal arrays whatever the prefix cache holds."""
    prompt = [1000 + (7 * i) % 5000 for i in range(tokens)]
    runs = [complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs for _ in range(3)]
    assert runs[0].token_logprobs[0] is None and len(runs[0].token_logprobs) == tokens + 1
    assert all(run == runs[0] for run in runs[1:])


def test_minus_infinity_is_not_json(client):
    """LOG-1: masked tokens, strict JSON."""
    raw = client.completions.with_raw_response.create(
        model="smollm2", prompt="correct horse", echo=True, logprobs=5, temperature=1, max_tokens=4, extra_body={"top_k": 1})
    json.loads(raw.http_response.text, parse_constant=lambda name: pytest.fail(f"{name} in the body"))


def test_logit_bias_forces_and_bans(client):
    """PAR-1."""
    def first_token(**arguments):
        return complete(client, max_tokens=1, extra_body={"return_token_ids": True}, **arguments).choices[0].token_ids[0]

    likely = first_token()
    assert first_token(logit_bias={str(likely): -100}) != likely
    other = likely + 1
    assert first_token(logit_bias={str(other): 100}) == other
    for bad in ({"99999999999": 1}, {"-1": 5}, {"abc": 1}, {"5": 101}, {str(10**6): 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, logit_bias=bad)
        assert refused.value.param == "logit_bias"


def test_errors_carry_type_param_and_status(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="no-such-model")
    assert unknown.value.param == "model" and "no-such-model" in str(unknown.value)
    for arguments, param in [({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
                             ({"n": 0}, "n"), ({"stop": ["a", "b", "c", "d", "e"]}, "stop")]:
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **arguments)
        assert refused.value.param == param, arguments


def test_prompt_longer_than_the_context(client):
    """PAR-7: the numbers are in the message, and the answer comes at once."""
    limit = client.models.list().data[0].max_model_len
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt=[500] * (limit + 1), max_tokens=1)
    assert str(limit) in str(refused.value) and str(limit + 1) in str(refused.value)


def test_explicit_nulls_equal_absent_fields(server):
    """PAR-5."""
    body = {"model": "smollm2", "messages": QUESTION, "seed": 7, "max_tokens": 12, "temperature": 0}
    names = "top_p n max_completion_tokens stop logit_bias presence_penalty frequency_penalty logprobs top_logprobs " \
            "stream stream_options tools tool_choice response_format user"
    url = server.url + "/v1/chat/completions"
    plain = requests.post(url, json=body).json()["choices"]
    nulls = requests.post(url, json=body | {name: None for name in names.split()}).json()["choices"]
    assert nulls == plain


@pytest.mark.parametrize("temperature,top_p", [(1e-4, 1), (1e-7, 1), (1e-38, 1), (1, 1e-6)])
def test_tiny_temperature_is_greedy(client, temperature, top_p):
    """PAR-9."""
    greedy = complete(client, max_tokens=20).choices[0].text
    assert complete(client, max_tokens=20, temperature=temperature, top_p=top_p).choices[0].text == greedy
