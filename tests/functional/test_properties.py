"""Properties of attention that hold for any input.

`pytest tests/functional/test_properties.py --hypothesis-profile=long` tries more inputs.
"""

from itertools import pairwise

from any_call import calls, part_of
from hypothesis import given
from hypothesis import strategies as st
from oracle import check, expect

import fastattn


def attention(*args, **arguments):
    return fastattn.attention(*args, **arguments, return_lse=True)


@given(call=calls())
def test_any_call_is_within_the_bound(call, implementation):
    q, k, v, arguments = call
    check(attention(q, k, v, **arguments), expect(q, k, v, **arguments), telling=False)


@given(call=calls(), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_splitting_keys_and_merging_gives_the_whole(call, cuts, implementation):
    q, k, v, arguments = call
    len_q, len_k = q.shape[-2], k.shape[-2]
    edges = [0, *sorted(int(cut * len_k) for cut in cuts), len_k]
    parts = []
    for begin, end in pairwise(edges):
        part = part_of(arguments, begin, end, len_q, len_k)
        if parts:
            part.pop("sinks", None)  # one of the parts carries them
        parts.append(attention(q, k[..., begin:end, :], v[..., begin:end, :], **part))
    got = fastattn.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    check(got, expect(q, k, v, **arguments), telling=False)
