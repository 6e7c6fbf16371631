"""Who sees whom in a dual-stream model (arXiv 2607.01218): one rule, for every mode.

Each of T tokens has two slots: its *state*, which reads the token, and its *prediction*, which does not and gives the
logits. Written one after the other, slot 2i is state i and slot 2i + 1 prediction i. A slot sees no slot after it, and:

- dual: all states, and the predictions of the last `window` pairs;
- double_memory: everything;
- delayed_state, reverse: all predictions, and the states of the last `window` pairs;
- query_only: states alone; predictions have no keys;
- standard: there are no predictions.
"""

import torch


def may_see(
    mode: str,
    window: int,
    query_pair: torch.Tensor,
    query_is_prediction: torch.Tensor,
    key_pair: torch.Tensor,
    key_is_prediction: torch.Tensor,
) -> torch.Tensor:
    """Whether each query slot sees each key slot, within one document; shapes broadcast.

    Args:
        mode: a `stream_mode` of [`DualStreamConfig`].
        window: w, how many pairs back the windowed stream is visible.
        query_pair, key_pair: numbers of the pairs, counted over real tokens.
        query_is_prediction, key_is_prediction: which slot of the pair.
    """
    # A state comes before its own prediction.
    is_past = (key_pair < query_pair) | ((key_pair == query_pair) & (query_is_prediction | ~key_is_prediction))
    if mode in ("standard", "query_only"):
        return is_past & ~key_is_prediction
    if mode == "double_memory":
        return is_past
    is_windowed = key_is_prediction if mode == "dual" else ~key_is_prediction
    return is_past & (~is_windowed | (query_pair - key_pair <= window))
