"""Writes the tiny checkpoints of the real suite, offline and the same on every run: `python make_models.py FOLDER`.

Runs in the engine's own environment, with the shims on PYTHONPATH. Each model has 2 layers, 512 tokens and random
weights. `llama` and `llama-other` differ in their seed alone, so one can replace the other in a weight update.
"""
# torch, transformers and tokenizers live in the engine's environment, not in ours.
# mypy: ignore-errors

import json
import sys
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
SPECIAL = ["<pad>", "<bos>", "<eos>", "<turn>", "<end>"]
LETTERS = "etaoinshrdlucmfw"
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level tokenizer without training: all bytes, then pairs of frequent letters."""
    alphabet = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(islice(product(LETTERS, LETTERS), VOCABULARY - len(alphabet)))
    tokens = alphabet + [first + second for first, second in pairs]
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, model_max_length=4096, **names)


def llama(seed: int) -> PreTrainedModel:
    """A dense model with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def moe(seed: int) -> PreTrainedModel:
    """A mixture of eight experts, two per token, in both layers."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, decoder_sparse_step=1, mlp_only_layers=[]))


def save(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights, tokenizer and a config with the expert count under its public name."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "num_experts_per_tok" in config:
        config["num_experts"] = EXPERTS["num_experts"]
        path.write_text(json.dumps(config, indent=2))


def main(folder: Path) -> None:
    """Writes every checkpoint below `folder`."""
    for name, model in {"llama": llama(1), "llama-other": llama(2), "moe": moe(3)}.items():
        save(model, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
