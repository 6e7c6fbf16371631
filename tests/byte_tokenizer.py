"""A tokenizer without a download: one token a byte, and three special ones."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 259
SPECIAL = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}


def byte_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte; with `bos`, every text begins with <s>, as in Llama."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
