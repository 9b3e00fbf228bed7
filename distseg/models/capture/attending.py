"""Attention in which the number of queries or of keys does not grow with the image.

If keys are parameters or vectors of the image, each position attends to them independently of the
other positions. If a fixed number of queries attends to all positions, the attention weights are a
softmax over the image, and the result is a sum over the image. Attention between all positions is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.models.axes import Axes, Axis, places_of
from distseg.models.capture.arranging import turned
from distseg.models.capture.reader import Reader
from distseg.models.capture.reducing import product, softmax
from distseg.models.capture.trace import IN_ATTENTION
from distseg.models.capture.values import Value

ATTENTION = (
    "is attention between all positions of the image, but a part of an image does not have all of "
    "them; supported: queries or keys whose number does not grow with the image, such as "
    "parameters, means or the output of an adaptive pooling"
)


def attention(
    reader: Reader, query: Any, key: Any, value: Any, bias: Any, scale: float | None, weights: bool
) -> tuple[Value, Value | None]:
    """Add layers for scaled dot product attention; return the result and the attention weights.

    Args:
        query: (..., queries, channels).
        key: (..., keys, channels).
        value: (..., keys, channels of the result).
        bias: a tensor that is added to the scores (..., queries, keys), a bool mask that is True
            for the scores to use, or None. It must not be computed from the image.
        scale: factor of the scores; by default 1 / sqrt(channels).
        weights: True to return the attention weights; otherwise None is returned in their place.
    """
    q, k, v = (reader.axes_of(x) for x in (query, key, value))
    scale = 1 / math.sqrt(q[-1].cell) if scale is None else scale
    if (
        not all(axes[-1].of_channels for axes in (q, k, v))
        or places_of(q[-2:-1])
        and places_of(k[-2:-1])
    ):
        raise reader.refusal(ATTENTION, everywhere=True)
    _check_bias(reader, bias, q, k)
    lead = _common(reader, (q[:-2], k[:-2], v[:-2]))
    scores_axes, made_axes = (*lead, q[-2], k[-2]), (*lead, q[-2], v[-1])
    if k[-2].of_channels and v[-2].of_channels:
        score = partial(_scores, scale=scale, soft=True)
        shares = (
            reader.applied(score, (query, key, bias), "weights", scores_axes) if weights else None
        )
        attend = partial(_attended, scale=scale)
        return reader.applied(attend, (query, key, value, bias), "", made_axes), shares
    if k[-2] != v[-2] or k[-2] != Axis(places=tuple(range(reader.dims))) or not q[-2].of_channels:
        raise reader.refusal(ATTENTION, everywhere=True)
    if v[:-2] != lead or not isinstance(value, Value):
        raise reader.refusal(
            "is attention whose values have another number of heads or images than its queries or "
            "keys: give queries, keys and values the same number of heads and images"
        )
    score = partial(_scores, scale=scale, soft=False)
    scores = reader.applied(score, (query, key, bias), "scores", scores_axes)
    shares = softmax(reader, scores, len(scores_axes) - 1, False)
    made = product(reader, shares, value, math.prod(axis.cell for axis in lead), made_axes)
    return made, shares if weights else None


def _common(reader: Reader, each: Sequence[Axes]) -> Axes:
    """Return the axes of the leading dims of an attention's result, such as images and heads.

    Leading dims are all but the last two. Those of queries, keys and values are broadcast.

    Args:
        each: the axes of the leading dims of queries, keys and values.

    Raises:
        CanNotCapture: the leading dims cannot be broadcast to each other.
    """
    rank = max(map(len, each))
    filled = [(*(Axis(),) * (rank - len(axes)), *axes) for axes in each]
    found = []
    for along in zip(*filled):
        kinds = {axis for axis in along if axis != Axis()} or {Axis()}
        if len(kinds) > 1:
            raise reader.refusal(
                "has queries, keys and values whose dims before the last two differ: give them the "
                "same images and heads"
            )
        found += kinds
    return tuple(found)


def _check_bias(reader: Reader, bias: Any, query: Axes, key: Axes) -> None:
    """Refuse a bias that is computed from the image or differs between positions or images.

    Args:
        bias: what user code adds to the attention scores, or a mask of the scores; None if
            there is neither.
        query, key: the axes of the queries and keys.

    Raises:
        CanNotCapture: the bias is refused.
    """
    if bias is None:
        return
    if isinstance(bias, Value):
        raise reader.refusal(
            "has a mask that is computed from the image; supported: a mask that does not depend on "
            "the image, such as a parameter or a buffer"
        )
    lengths = reversed(reader.shape_of(bias))
    for n, axis in zip(lengths, (key[-2], query[-2], *reversed(query[:-2]))):
        if n != 1 and not axis.of_channels:
            raise reader.refusal(
                "has a mask with a separate value for each position or image; supported: one mask "
                "for all of them"
            )


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, soft: bool) -> Tensor:
    scores = q * scale @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1) if soft else scores


def _attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def scaled_dot_product(
    reader: Reader,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Value:
    """Add layers for a call of ``F.scaled_dot_product_attention``, and return the result.

    The arguments are those of the call.
    """
    if dropout_p:
        raise reader.refusal(IN_ATTENTION)
    if is_causal:
        raise reader.refusal(
            "is causal (is_causal=True); supported: attention with is_causal=False"
        )
    if enable_gqa:
        raise reader.refusal(
            "shares keys among heads (enable_gqa=True); supported: keys and values for each head, "
            "with enable_gqa=False"
        )
    made, _ = attention(reader, query, key, value, attn_mask, scale, False)
    return made


def multi_head(
    reader: Reader,
    query,
    key,
    value,
    embed_dim_to_check,
    num_heads,
    in_proj_weight,
    in_proj_bias,
    bias_k,
    bias_v,
    add_zero_attn,
    dropout_p,
    out_proj_weight,
    out_proj_bias,
    training=True,
    key_padding_mask=None,
    need_weights=True,
    attn_mask=None,
    use_separate_proj_weight=False,
    q_proj_weight=None,
    k_proj_weight=None,
    v_proj_weight=None,
    static_k=None,
    static_v=None,
    average_attn_weights=True,
    is_causal=False,
) -> tuple[Value, ...]:
    """Add layers for a call of ``F.multi_head_attention_forward``, and return the results.

    The arguments are those of the call. The result is (attention's result,), or (attention's
    result, attention weights) if ``need_weights`` is True.
    """
    if dropout_p and training:
        raise reader.refusal(IN_ATTENTION)
    options = {
        "add_bias_kv": bias_k is not None or bias_v is not None,
        "add_zero_attn": add_zero_attn,
        "static_k": static_k is not None,
        "static_v": static_v is not None,
        "key_padding_mask": key_padding_mask is not None,
        "is_causal": is_causal,
    }
    if used := " and ".join(name for name, is_used in options.items() if is_used):
        raise reader.refusal(f"uses {used}; supported: attention without {used}")
    if len(reader.axes_of(query)) != 3:
        raise reader.refusal(
            "is called without a batch dim; supported: queries of shape (N, queries, channels)"
        )
    if attn_mask is not None and len(reader.shape_of(attn_mask)) != 2:
        raise reader.refusal(
            "has a mask for each image or each head; supported: one mask (queries, keys) for all"
        )
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    heads = []
    for number, x in enumerate((query, key, value)):
        weight = separate[number] if use_separate_proj_weight else in_proj_weight
        projection = _Projection(number, not use_separate_proj_weight)
        axes = (*reader.axes_of(x)[:-1], Axis(cell=embed_dim_to_check))
        made = reader.applied(projection, (x, weight, in_proj_bias), "qkv"[number], axes)
        axes = (*axes[:-1], Axis(cell=num_heads), Axis(cell=embed_dim_to_check // num_heads))
        heads.append(turned(reader, replace(made, axes=axes), (1, 2, 0, 3)))
    made, shares = attention(reader, *heads, attn_mask, None, need_weights)
    made = turned(reader, made, (2, 0, 1, 3))
    made = replace(made, axes=(*made.axes[:2], Axis(cell=embed_dim_to_check)))
    made = reader.applied(F.linear, (made, out_proj_weight, out_proj_bias), "", made.axes)
    if shares is None:
        return (made,)
    if average_attn_weights:
        axes = (shares.axes[0], *shares.axes[2:])
        shares = reader.applied(partial(torch.mean, dim=1), (shares,), "weights", axes)
    return made, shares


class _Projection:
    """Callable that computes the queries, keys or values of an attention from its input.

    It is called with the input (..., channels), a weight and a bias (3 * E,) or None. The bias
    holds the biases of queries, keys and values one after the other. The result is (..., E).

    Args:
        number: 0 for queries, 1 for keys, 2 for values.
        together: True if the weight (3 * E, channels) holds the weights of all three; False if it
            is (E, channels).
    """

    __name__ = "linear"

    def __init__(self, number: int, together: bool):
        self.number, self.together = number, together

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.chunk(3)[self.number] if self.together else weight
        return F.linear(x, weight, None if bias is None else bias.chunk(3)[self.number])
