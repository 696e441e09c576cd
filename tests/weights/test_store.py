"""The weight store: content, versions, torn files, slow readers, orphans."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cauce.errors import WeightsError
from cauce.models.weights_hash import checksum
from cauce.weights import store as store_module
from cauce.weights.store import WeightStore, choose_folder, sweep_orphans


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}


def test_what_is_published_is_what_is_pulled(tmp_path) -> None:
    store = WeightStore(tmp_path / "w", keep=2)
    digest = store.publish(tensors(1), version=1, lineage="0")
    got = WeightStore(tmp_path / "w", keep=2).pull(1)
    assert (got.version, got.lineage, got.checksum) == (1, "0", digest)
    for name, tensor in tensors(1).items():
        assert torch.equal(got.tensors[name], tensor)


def test_tensors_of_many_pieces_and_odd_shapes_are_a_file_that_the_library_reads(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {
        "large": torch.randn(3, 300_001, generator=generator),
        "turned": torch.randn(40, 50, generator=generator).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(13, dtype=torch.uint8),
    }
    digest = WeightStore(tmp_path, keep=1).publish(given, version=3, lineage="1")
    assert digest == checksum(given)
    with safe_open(tmp_path / "version_000003.safetensors", framework="pt") as file:
        assert file.metadata() == {"version": "3", "lineage": "1", "checksum": digest}
        assert set(file.keys()) == set(given)
        for name, tensor in given.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_dtype_that_is_not_written_is_named(tmp_path) -> None:
    with pytest.raises(WeightsError, match=r"phase is torch.complex64; weights are published as one of"):
        WeightStore(tmp_path, keep=1).publish({"phase": torch.zeros(2, dtype=torch.complex64)}, version=1, lineage="0")
    assert not list(tmp_path.iterdir())


def test_the_newest_versions_stay_in_numeric_order(tmp_path) -> None:
    store = WeightStore(tmp_path, keep=2)
    for version in (8, 9, 10, 11):
        store.publish(tensors(version), version=version, lineage="0")
    assert store.versions() == [10, 11]
    with pytest.raises(WeightsError, match=r"version 8 is not in .*\[10, 11\]"):
        store.pull(8)


def test_a_flipped_bit_is_found_by_content(tmp_path) -> None:
    store = WeightStore(tmp_path, keep=1)
    store.publish(tensors(1), version=1, lineage="0")
    path = next(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="torn or foreign"):
        store.pull(1)


def test_a_counter_that_moves_without_content_is_found(tmp_path) -> None:
    """D3: version 2 claims to be there, and holds version 1's content."""
    store = WeightStore(tmp_path, keep=3)
    store.publish(tensors(1), version=1, lineage="0")
    os.rename(tmp_path / "version_000001.safetensors", tmp_path / "version_000002.safetensors")
    with pytest.raises(WeightsError, match="does not hold what was published"):
        store.pull(2)


def test_a_foreign_file_is_refused(tmp_path) -> None:
    save_file(tensors(1), tmp_path / "version_000001.safetensors")
    with pytest.raises(WeightsError, match="torn or foreign"):
        WeightStore(tmp_path, keep=1).pull(1)


def test_a_reader_with_an_open_map_survives_later_publications(tmp_path) -> None:
    """D6: the file is unlinked, not overwritten."""
    store = WeightStore(tmp_path, keep=1)
    store.publish(tensors(1), version=1, lineage="0")
    with safe_open(tmp_path / "version_000001.safetensors", framework="pt") as reader:
        for version in (2, 3, 4):
            store.publish(tensors(version), version=version, lineage="0")
        assert torch.equal(reader.get_tensor("a"), tensors(1)["a"])
    assert store.versions() == [4]


def test_a_failed_publication_leaves_no_version_behind(tmp_path) -> None:
    store = WeightStore(tmp_path, keep=2)
    store.publish(tensors(1), version=1, lineage="0")
    (tmp_path / "version_000002.safetensors").mkdir()  # a rename onto a folder fails, like a full disk would
    with pytest.raises(WeightsError, match="cannot publish version 2"):
        store.publish(tensors(2), version=2, lineage="0")
    assert list(tmp_path.glob(".writing*")) == []
    assert store.pull(1).version == 1


def test_orphans_of_dead_owners_are_swept_and_living_ones_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "SHARED_MEMORY", tmp_path)
    dead, alive, other = tmp_path / "cauce-x-999999999", tmp_path / f"cauce-y-{os.getpid()}", tmp_path / "else-1"
    for folder in (dead, alive, other):
        folder.mkdir()
    assert sweep_orphans() == [dead]
    assert alive.exists()
    assert other.exists()


def test_weights_that_do_not_fit_into_shared_memory_go_to_the_run_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "SHARED_MEMORY", tmp_path)
    assert choose_folder(tmp_path / "run", run_id="a", bytes_needed=10).name.startswith("cauce-a-")
    on_disk = tmp_path / "run" / f"weights-{os.getpid()}"
    assert choose_folder(tmp_path / "run", run_id="a", bytes_needed=2**60) == on_disk
