"""A small model with random weights and the sample model's tokenizer, for tests in which the text does not matter.

A token takes a fiftieth of the sample model's time. A request can still run for minutes. The model's greedy text
depends on the prompt. If it samples, all tokens are about equally likely, so only the seed decides. The model ends an
answer only if the end token has a bias. In JSON, it writes white space without an end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from container.sources.sample_model import make_once, prepare
from engines.cache_dir import cache_dir

_FORMAT = 2  # the version of the files: after a change, older caches are not used
_SEED = 3
MAX_MODEL_LEN = 65536
ENDLESS: dict[str, Any] = {"max_new_tokens": 65000, "ignore_eos_token": True}
"""A request that takes minutes, or one minute on a fast machine, so that even a slow client finds it running. The test
ends it.
"""
ENDLESS_COMPLETION: dict[str, Any] = {"prompt": "Once", "max_tokens": 65000, "ignore_eos": True}
ENDLESS_STREAM = {"model": "model", "n": 3, "stream": True, **ENDLESS_COMPLETION}


_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{{ part['text'] if part['type'] == 'text' else 'MARK' }}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_template(mark: str) -> str:
    """Return the sample model's chat template for a model with images or sounds. `mark` stands for one of them."""
    return _CHAT_TEMPLATE.replace("MARK", mark)


def prepare_small_model() -> Path:
    """Return the model's directory, which is made first if needed."""
    return make_once(cache_dir() / f"small-llama-v{_FORMAT}", _write)


def stop_within(text: str) -> str:
    """Return a part of the model's text that can be a stop string. The text has few words, but many scripts."""
    middle = len(text) // 2
    return text[middle : middle + 2]


def _write(directory: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(prepare())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,  # if both shared one table, the model would repeat its last token
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(_SEED)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
