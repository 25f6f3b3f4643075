"""A byte-level tokenizer without merges: one token per byte of text, so a prompt's length is easy to choose."""

import json

from sglang_hetero.models.specs import ModelSpec

PAD = "<|pad|>"
EOS = "<|eos|>"
BYTES = 256  # ids 0..255 are the bytes, in the order of ByteLevel's sorted alphabet

# Every message is one line "role: content", so that a reply's prompt is readable in a log.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_files(spec: ModelSpec) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json.

    Ids: 256 bytes, then words <w256>, <w257>, ... that fill the vocabulary (text never contains them by
    accident, the model may well say them), then the padding and the end token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(f"<w{i}>", normalized=False) for i in range(BYTES, spec.pad_token)])
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(EOS, special=True)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "model_max_length": spec.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
    }
