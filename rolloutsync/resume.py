"""Partials: the request that continues a sample token by token, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rolloutsync.dialects.sampling import OFFSET
from rolloutsync.sample import Finish, Prompt, Sample, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rolloutsync.dialects.base import Vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """A partial that goes on.

    Attributes:
        base: The sample so far.
        prompt: What is sent: its tokens as the prompt, with what is left of its budget.
        penalised: It has penalties, which engines compute from the tokens of a request of its own.
    """

    base: Sample
    prompt: Prompt
    penalised: bool = False

    @property
    def fields(self) -> Mapping[str, Any]:
        """Of the request."""
        return self.prompt.fields


def resume(sample: Sample, vocabulary: Vocabulary, where: str) -> Resumed | Sample:
    """How a partial with tokens goes on; one whose budget is used up is finished, without a request.

    A stop string that begins in the tokens so far and ends in those to come is not noticed: engines look for it in
    what one request generates.

    Raises:
        ValueError: It cannot be continued exactly; names the sample and the reason.
    """
    params, done = dict(sample.prompt.sampling_params), len(sample.output_ids)
    left = int(params.get("max_new_tokens", vocabulary.default_max_new_tokens)) - done
    if left <= 0:
        return replace(sample, status=Status.TRUNCATED, finish=Finish(type="length"), error=None)
    if sample.prompt.input_ids is None:
        reason = "its prompt is text, and the engine did not tell its token ids (return_prompt_token_ids)"
        raise ValueError(f"{where}the partial of {done} tokens cannot be resumed: {reason}")
    if grammar := [key for key in vocabulary.grammars if params.get(key) is not None]:
        reason = f"the state of its grammar ({', '.join(grammar)}) is lost"
        raise ValueError(
            f"{where}the partial of {done} tokens cannot be resumed: {reason}; keep_partials=False starts it over"
        )
    if params.get(vocabulary.seed) is not None:
        params[OFFSET] = done
    params["max_new_tokens"] = left
    params |= {"min_new_tokens": max(0, int(params["min_new_tokens"]) - done)} if "min_new_tokens" in params else {}
    prompt = replace(sample.prompt, input_ids=sample.tokens, text=None, sampling_params=params, fields=_fields(sample))
    return Resumed(
        sample, prompt, penalised=any(params.get(key) not in {None, still} for key, still in vocabulary.penalties)
    )


def _fields(sample: Sample) -> Mapping[str, Any]:
    """Asks for what is missing: the rows of experts behind those that are there, logprobs of the prompt only once."""
    fields = dict(sample.prompt.fields)
    fields.pop("return_prompt_token_ids", None)
    if fields.get("return_routed_experts") and sample.routed_experts is not None:
        first = int(fields.get("routed_experts_start_len") or 0)
        fields["routed_experts_start_len"] = first + len(sample.routed_experts)
    if sample.prompt_logprobs is not None:
        fields["logprob_start_len"] = -1
    return fields
