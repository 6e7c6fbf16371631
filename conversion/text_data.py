"""The text that models are analysed, calibrated, trained and measured on; offline and deterministic by default.

Without a text of the user's own, the text is the English reference documentation that Python carries with it
(`pydoc_data.topics`). Its tokens before 60,000 are for analysis and training; the windows that start at 60,000, 80,000
and 100,000 are held out. Training gets the longer docstrings of the standard library as well. All of it depends on the
version of Python, so what is made from it records the text's digest.

Of a user's text, or where a tokenizer makes the default too short for that, the last fifth is held out.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_hybrid.conversion.source_model import SourceError

HELDOUT_STARTS = (60_000, 80_000, 100_000)
HELDOUT_LENGTH = 1024

# The modules with the most prose in their docstrings.
DOCUMENTED_MODULES = (
    *("argparse", "ast", "asyncio.base_events", "asyncio.events", "asyncio.tasks", "bdb", "codecs", "collections"),
    *("concurrent.futures._base", "concurrent.futures.process", "configparser", "difflib", "doctest", "email.charset"),
    *("email._policybase", "email.header", "email.message", "email.policy", "fractions", "ftplib", "http.client"),
    *("http.cookiejar", "http.server", "imaplib", "importlib.metadata", "inspect", "ipaddress", "json", "logging"),
    *("logging.handlers", "lzma", "mimetypes", "optparse", "os", "pdb", "pkgutil", "re", "shutil", "smtplib", "socket"),
    *("socketserver", "ssl", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit"),
    *("traceback", "turtle", "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid"),
    *("wave", "xml.etree.ElementTree", "xml.sax.handler", "xmlrpc.server", "zipfile"),
)
SHORTEST_DOCSTRING = 200


def load_text(path: str | Path | None = None) -> str:
    """The text of a UTF-8 file, or the default one.

    Raises:
        SourceError: if the file is absent, empty or not UTF-8.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"cannot read the text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not a UTF-8 text file: {error}") from error
    if not text.strip():
        raise SourceError(f"the text {path} is empty")
    return text


def text_digest(text: str) -> str:
    """sha256 of the text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """[N] token ids without special tokens."""
    # `verbose=False`: the text is longer than the model's context, and is cut into windows later.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def token_windows(
    tokens: Tensor, length: int, starts: Sequence[int], *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Tensor:
    """[len(starts), length] windows of tokens [N].

    With a tokenizer that begins every text with a token of its own (BOS), each window begins with that token too:
    models that were trained so rely on it, as their attention sink.
    """
    prefix = [] if tokenizer is None else _prefix(tokenizer)
    body = length - len(prefix)
    if short := [start for start in starts if start + body > len(tokens)]:
        raise SourceError(f"the text has {len(tokens)} tokens; a window of {length} from {short[0]} does not fit")
    return torch.stack([torch.cat((tokens.new_tensor(prefix), tokens[start : start + body])) for start in starts])


def check_context(length: int, config: PreTrainedConfig, field: str = "length") -> None:
    """Raises `SourceError` if rows of `length` tokens are longer than what the model was made for."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and length > context:
        raise SourceError(
            f"{field} is {length}, longer than the model's context of {context} tokens: give at most that"
        )


def even_windows(
    tokens: Tensor, length: int, count: int, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Tensor:
    """[count, length] windows of tokens [N], evenly spread and not overlapping.

    Raises:
        SourceError: if the text is too short for them.
    """
    if length < 2 or count < 1:
        raise SourceError(f"{count} windows of {length} tokens: there must be at least one, of at least 2 tokens")
    if count * length > len(tokens):
        windows, longest = len(tokens) // length, len(tokens) // count
        ways = [f"at most {windows} windows"] * (windows >= 1) + [f"windows of at most {longest} tokens"] * (
            longest >= 2
        )
        shorter = "".join(f", or {way}" for way in ways)
        raise SourceError(
            f"the text is too short: {count} windows of {length} tokens need {count * length} tokens, it has"
            f" {len(tokens)} for this purpose; give a longer text{shorter}"
        )
    starts = [index * (len(tokens) - length) // max(count - 1, 1) for index in range(count)]
    return token_windows(tokens, length, starts, tokenizer=tokenizer)


def training_part(tokens: Tensor, path: str | Path | None = None) -> Tensor:
    """[M] the first M of tokens [N] of `load_text(path)`: those that no held-out window touches."""
    return tokens[: _heldout_start(tokens, path)]


def training_tokens(tokenizer: PreTrainedTokenizerBase, path: str | Path | None = None) -> Tensor:
    """[M] tokens to train on: the training part of the text; of the default one, with the docstrings behind it."""
    tokens = training_part(tokenize(tokenizer, load_text(path)), path)
    if path is not None:
        return tokens
    return torch.cat((tokens, tokenize(tokenizer, standard_library_docstrings())))


def heldout_windows(
    tokenizer: PreTrainedTokenizerBase, path: str | Path | None = None, *, length: int = HELDOUT_LENGTH, count: int = 3
) -> Tensor:
    """[count, length] windows of the text that neither analysis nor training sees.

    The default text's start at tokens 60,000, 80,000 and 100,000 where count is 3 and the length allows it, otherwise
    they are spread evenly over the held-out part.
    """
    tokens = tokenize(tokenizer, load_text(path))
    start = _heldout_start(tokens, path)
    if start == HELDOUT_STARTS[0] and count == len(HELDOUT_STARTS) and HELDOUT_STARTS[-1] + length <= len(tokens):
        return token_windows(tokens, length, HELDOUT_STARTS, tokenizer=tokenizer)
    return even_windows(tokens[start:], length, count, tokenizer=tokenizer)


def standard_library_docstrings() -> str:
    """The docstrings of at least 200 characters in the standard library's best documented modules."""
    return "\n\n".join(text for module in DOCUMENTED_MODULES for text in _docstrings(module))


def _docstrings(module: str) -> Iterator[str]:
    # Read and not imported: some of these modules do something when imported, and none needs to run.
    path = Path(sysconfig.get_path("stdlib"), *module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= SHORTEST_DOCSTRING:
                yield text


def _heldout_start(tokens: Tensor, path: str | Path | None) -> int:
    if path is None and len(tokens) >= HELDOUT_STARTS[-1] + HELDOUT_LENGTH:
        return HELDOUT_STARTS[0]
    return len(tokens) * 4 // 5


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = tokenizer("")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
