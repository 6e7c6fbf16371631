"""What a continuation scores. Each metric is lm-eval's `process_results`: (document, results) -> {length: score}.

A document reports the score under its own length only, so lm-eval averages each length over the documents that ran at
it, with the standard error, and a length that did not run is not reported.
"""

import re
from typing import Any

Scores = dict[str, float]


def all_found(doc: dict[str, Any], results: list[str]) -> Scores:
    """The share of `outputs` that occur in the continuation, in either case: RULER's string_match_all."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {str(doc["length"]): string_match_all(postprocess_pred(results), [doc["outputs"]])}


def any_found(doc: dict[str, Any], results: list[str]) -> Scores:
    """Whether one of `outputs` occurs in the continuation, in either case: "contains" of the cloze recall tasks."""
    from lm_eval.tasks.fda.task import contains_score

    return {str(doc["length"]): float(contains_score(results[0], doc["outputs"]))}


def first_integer(doc: dict[str, Any], results: list[str]) -> Scores:
    """Whether the first integer of the continuation is the one asked for."""
    found = re.search(r"\d+", results[0])
    return {str(doc["length"]): float(found is not None and found.group() == doc["outputs"][0])}


def exact_match(doc: dict[str, Any], results: list[str]) -> Scores:
    """Whether the continuation is the answer, white space around it aside."""
    return {str(doc["length"]): float(results[0].strip() == doc["outputs"][0])}


def greedy_match(doc: dict[str, Any], results: list[tuple[float, bool]]) -> Scores:
    """Whether greedy decoding would write the answer, told from one forward pass."""
    (_, is_greedy), *_ = results
    return {str(doc["length"]): float(is_greedy)}


def nll_per_token(doc: dict[str, Any], results: list[tuple[float, bool]]) -> Scores:
    """Mean negative log-likelihood of the answer's tokens, in nats."""
    (log_likelihood, _), *_ = results
    return {str(doc["length"]): -log_likelihood / doc["answer_tokens"]}
