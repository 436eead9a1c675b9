"""What documents say of the kinds is what the code says."""

import pytest

from tests import tables


@pytest.mark.parametrize("name", tables.FILES)
def test_tables_of_kinds(name):
    """After a change of DIVERGENCES: make tables."""
    assert tables.rendered(name) == (tables.ROOT / name).read_text(encoding="utf-8")
