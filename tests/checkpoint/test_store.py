import pytest

from checkpoint.store import Store, StoreError


@pytest.mark.parametrize("url", ["{tmp}/deep/folder", "memory://store-test"])
def test_objects_round_trip(url, tmp_path):
    store = Store(url.format(tmp=tmp_path))
    assert store.read("a/b") is None
    store.write("a/b", b"one")
    store.write("a/b", b"two")
    assert store.read("a/b") == b"two"
    store.delete("a/b")
    store.delete("a/b")
    assert store.read("a/b") is None


def test_a_new_reader_sees_an_object_written_after_it_looked(tmp_path):
    reader, writer = Store(str(tmp_path / "s")), Store(str(tmp_path / "s"))
    assert reader.read("x") is None
    writer.write("x", b"1")
    assert reader.read("x") == b"1"


def test_what_cannot_be_reached_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(f"{tmp_path}/file/below").write("x", b"1")
    with pytest.raises(StoreError, match="nosuch"):
        Store("nosuch://bucket")
