"""Neural encoders built in a moment: a trained tokenizer, a configuration, random weights."""

import random
from pathlib import Path

import tokenizers
import torch
import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LONGEST = 40
WORDS = "the,router,sends,a,token,to,some,experts,naïve,café,x,=,f,(,y,)"
VOCABULARY = 400
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def corpus() -> list[str]:
    """Texts of 1 to 200 words; the longest exceed LONGEST tokens."""
    draw = random.Random(1)
    return [
        " ".join(draw.choices(WORDS.split(","), k=draw.choice([1, 2, 5, 9, 30, 200])))
        for _ in range(70)
    ]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of the corpus that puts [CLS] and [SEP] around a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=LONGEST,
    )


def write_bert(folder: Path) -> Path:
    """A bidirectional model of 2 layers."""
    config = transformers.BertConfig(**SIZES, num_hidden_layers=2)
    return _write(folder, transformers.BertModel, config)


def write_llama(folder: Path) -> Path:
    """A causal model of 4 layers."""
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=4)
    return _write(folder, transformers.LlamaForCausalLM, config)


def _write(folder: Path, kind: type, config: transformers.PreTrainedConfig) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        for weight in model.parameters():
            weight.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
