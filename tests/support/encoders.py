"""Tiny encoders, with random weights and tokenizers like those of their types, made without a download."""

from pathlib import Path

from flytune.selftest.tiny_model import SENTENCES
from tests.support.queries import WORDS

POOLING = {
    "bert": "cls",
    "camembert": "mean",
    "deberta-v2": "mean",
    "distilbert": "mean",
    "electra": "cls",
    "modernbert": "mean",
    "mpnet": "mean",
    "roberta": "mean",
    "xlm-roberta": "cls",
}
"""Types, each with a way of pooling that published models of it have."""
LACKING = {
    "deberta-v2": {"model.attn_implementation": "eager"},
    "mpnet": {"model.attn_implementation": "eager", "training.activation_checkpointing": False},
}
"""Values of recipes for what transformers lacks of a type."""
_OWN = {
    "deberta-v2": {
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }
}
"""Fields of published models of a type, without which it would be another one."""
_ROBERTA = ("camembert", "mpnet", "roberta", "xlm-roberta")
_TEXTS = [*SENTENCES, *WORDS, " ".join(map(str, range(1000))), "Which is the? It is no , and has it."]


def write_encoder(folder: Path, model_type: str) -> Path:
    """Write the folder of an encoder with 0.3M weights and no dropout, as a model of masked words, whose
    files have more tensors than a model of vectors; return it."""
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM

    tokenizer = _roberta_tokenizer() if model_type in _ROBERTA else _bert_tokenizer()
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{of}_token_id")
        for name, of in {"pad": "pad", "bos": "cls", "cls": "cls", "eos": "sep", "sep": "sep"}.items()
    }
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=130,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # The names of distilbert.
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        # Published models have it; transformers 5 does not read it, and vLLM 0.32 does.
        position_embedding_type="absolute",
        **special,
        **_OWN.get(model_type, {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _bert_tokenizer():
    """Return a WordPiece tokenizer that writes [CLS] before and [SEP] after a text, and names no EOS."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=800, special_tokens=named, show_progress=False)
    pieces.train_from_iterator(_TEXTS, trainer)
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _roberta_tokenizer():
    """Return a byte-level tokenizer that writes <s> before and </s> after a text, where padding is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    merges = Tokenizer(models.BPE(unk_token="<unk>"))
    merges.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merges.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    merges.train_from_iterator(_TEXTS, trainer)
    merges.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=merges,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
    )
