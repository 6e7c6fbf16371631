"""An lm-eval task whose samples have given lengths in tokens of the model under test.

Every document of every task has these fields:

    task, length        the task's name; tokens of prompt and room for the answer together are at most `length`
    index, depth        number of the sample within its length; where its answer stands, 0 to 1 or None
    input, gen_prefix   the prompt: `input`, and after a space `gen_prefix` if that is not empty
    outputs             list of strings that the score looks for
    answer              the continuation that scores 1; the target of log-likelihood tasks
    answer_tokens       its length in tokens
    max_gen_toks        most tokens to generate; 0 for log-likelihood tasks

The same index has the same depth at every length, and the same needle where a needle is put into filler. Documents go
index by index and, within one, length by length, so that `--limit` reaches all lengths.
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from .samples import Request, Sample, fit
from .settings import Settings

# What a model may write beside the bare answer: an article, quotation marks, a full stop.
ANSWER_SLACK = 16


class LengthTask(ConfigurableTask):
    """Reads the YAML of an ordinary lm-eval task, except that

    - `custom_dataset` is a builder as `samples.py` describes it, and `dataset_kwargs` its options,
    - the metric named `length` in `metric_list` stands for one metric for each length of the run,
    - `max_gen_toks` is an upper bound: 16 tokens more than the longest answer are generated, and never fewer than it
      takes, whatever the tokenizer.
    """

    def __init__(self, config: dict[str, Any]):
        config = {key: value for key, value in config.items() if key != "class"}
        self.settings = Settings.from_metadata(config.get("metadata") or {})
        self.count = self.settings.count
        (metric,) = config["metric_list"]
        self.most_to_generate = (config.get("generation_kwargs") or {}).get("max_gen_toks", 0)
        config["metric_list"] = [metric | {"metric": str(length)} for length in self.settings.lengths]
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs) -> None:
        samples = {length: self.build(length) for length in self.settings.lengths}
        rows = zip(*(self._documents(length, of_length) for length, of_length in samples.items()), strict=True)
        self.dataset = {self.config.test_split: Dataset.from_list([document for row in rows for document in row])}

    def build(self, length: int) -> list[Sample]:
        """The samples of one length."""
        settings = self.settings
        request = Request(
            task=self.config.task,
            length=length,
            longest=max(settings.lengths),
            num_samples=settings.num_samples,
            depths=settings.depths,
            seed=settings.seed,
            text=settings.text,
            count=self.count,
        )
        render = self.config.custom_dataset(request, **(self.config.dataset_kwargs or {}))
        return fit(self.config.task, length, settings.num_samples, render, self.tokens_needed)

    def tokens_needed(self, samples: Sequence[Sample]) -> list[int]:
        """Tokens of each prompt with room for the longest answer."""
        if self.OUTPUT_TYPE == "loglikelihood":
            return self.count([sample.prompt + sample.answer for sample in samples], special=True)
        room = self.tokens_to_generate(samples)
        return [tokens + room for tokens in self.count([sample.prompt for sample in samples], special=True)]

    def tokens_to_generate(self, samples: Sequence[Sample]) -> int:
        if self.OUTPUT_TYPE == "loglikelihood":
            return 0
        longest = max(self.count([sample.answer for sample in samples]))
        return min(longest + ANSWER_SLACK, max(longest, self.most_to_generate))

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs):
        request = super().construct_requests(doc, ctx, **kwargs)
        if self.OUTPUT_TYPE == "generate_until":
            prompt, options = request.arguments
            if options["max_gen_toks"] == self.most_to_generate:  # Not changed with --gen_kwargs.
                request.arguments = (prompt, options | {"max_gen_toks": doc["max_gen_toks"]})
        return request

    def _documents(self, length: int, samples: list[Sample]) -> list[dict[str, Any]]:
        max_gen_toks = self.tokens_to_generate(samples)
        return [
            {
                "task": self.config.task,
                "length": length,
                "index": index,
                "depth": sample.depth,
                "input": sample.input,
                "gen_prefix": sample.gen_prefix,
                "outputs": sample.outputs,
                "answer": sample.answer,
                "answer_tokens": answer_tokens,
                "max_gen_toks": max_gen_toks,
            }
            for index, (sample, answer_tokens) in enumerate(zip(samples, self._answer_tokens(samples), strict=True))
        ]

    def _answer_tokens(self, samples: list[Sample]) -> list[int]:
        if self.OUTPUT_TYPE == "generate_until":
            return self.count([sample.answer for sample in samples])
        # lm-eval scores the tokens that follow those of the prompt alone; where they begin, the prompt's end decides.
        ends = [sample.prompt[-200:].partition(" ")[2] or sample.prompt for sample in samples]
        prompts = self.count(ends)
        whole = self.count([end + sample.answer for end, sample in zip(ends, samples, strict=True)])
        return [tokens - before for tokens, before in zip(whole, prompts, strict=True)]
