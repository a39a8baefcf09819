"""Arbitrary Python objects, by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.binary(max_size=4),
        st.text(st.characters(), max_size=4),
        st.builds(object),
        st.just("\ud800"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=4,
)
