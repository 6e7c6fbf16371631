"""Real-text recall in cloze form: FDA, SWDE, SQuAD, NQ, TriviaQA and DROP as in Based and JRT.

arXiv:2402.18668, arXiv:2407.05483.

Zero-shot, greedy until the end of the line; scored by whether an answer occurs in the continuation. A document longer
than the length is cut to a window around the first occurrence of its answer.
"""

import json
import re
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any

from ..length_task import LengthTask
from ..samples import Sample, TooShortError


class ClozeRecallTask(LengthTask):
    """Records have `text` and `value`, or `context`, `question` and `answers`, as the data sets on the hub do.

    They come from the JSON-lines file that the metadata name for the task (`data_files`), or from the hub.
    """

    def build(self, length: int) -> list[Sample]:
        if not hasattr(self, "records"):
            self.records = [_as_cloze(self.config.task, record) for record in self._load()]
        return [self._cut(length, **record) for record in self.records]

    def _load(self) -> list[dict[str, Any]]:
        task, path, most = self.config.task, self.settings.data_files.get(self.config.task), self.settings.num_samples
        if path is not None:
            try:
                with open(path, encoding="utf-8") as lines:
                    records = [json.loads(line) for line in lines if line.strip()][:most]
            except (OSError, ValueError) as error:
                raise ValueError(f"{task}: data_files: {path!r} cannot be read as JSON lines: {error}") from error
            if not records:
                raise ValueError(f"{task}: data_files: {path!r} holds no record")
            return records
        from datasets import load_dataset

        name = self.config.dataset_path
        try:
            data = load_dataset(name, split="validation")
        except Exception as error:  # Whatever the hub, its cache and the network raise.
            raise ValueError(
                f"{task}: the data set {name} is neither cached nor reachable ({type(error).__name__}); give a local "
                f'JSON-lines file as metadata "data_files": {{"{task}": "<path>"}}'
            ) from error
        return list(data.select(range(min(most, len(data)))))

    def _cut(self, length: int, context: str, question: str, answers: list[str]) -> Sample:
        words = re.findall(r"\s*\S+", context)
        tokens_before = list(accumulate(self.count(words), initial=0))
        found = re.search("|".join(map(re.escape, answers)), context, re.IGNORECASE)
        centre = len(re.findall(r"\S+", context[: found.start()])) if found else 0
        budget = length
        while budget > 0:
            start = bisect_left(tokens_before, tokens_before[min(centre, len(words))] - budget // 2)
            end = bisect_right(tokens_before, tokens_before[start] + budget) - 1
            window = "".join(words[start:end]).lstrip()
            text = f"{window}{question}" if window else question.lstrip(". \n")
            sample = Sample(input=text, outputs=answers, answer=f" {answers[0]}")
            (needed,) = self.tokens_needed([sample])
            excess = needed - length
            if excess <= 0:
                return sample
            budget = min(budget, tokens_before[-1]) - excess
        raise TooShortError(self.config.task, length, needed)

    def tokens_to_generate(self, samples) -> int:
        return self.most_to_generate


def _as_cloze(task: str, record: dict[str, Any]) -> dict[str, Any]:
    """The context, what follows it up to the answer, and the answers."""
    if {"context", "question", "answers"} <= record.keys():
        # TriviaQA's marks of paragraphs and documents are no text; some contexts end with the question already.
        question = record["question"].strip()
        context = re.sub(r"\[(?:PAR|DOC|TLE)\]", "", record["context"]).strip()
        while question and context.lower().endswith(question.lower()):
            context = context[: -len(question)].rstrip()
        return {
            "context": context.rstrip("."),
            "question": f". {question}",
            "answers": [str(answer).strip() for answer in record["answers"]],
        }
    if {"text", "value"} <= record.keys():
        text = record["text"].strip()
        # The cloze is what follows the last full stop or line.
        end = max((found.end() for found in re.finditer(r"[.!?](?=\s)|\n", text)), default=0)
        context = text[:end].rstrip()
        return {"context": context, "question": text[len(context) :], "answers": [record["value"].strip()]}
    raise ValueError(
        f"{task}: a record has the columns {sorted(record)}; it takes text and value, or context, question and answers"
    )
