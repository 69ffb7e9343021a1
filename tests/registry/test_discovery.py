"""Entry points are read without an import; what does not fit is put aside with a reason."""

from __future__ import annotations

import pytest
from qiao.registry import allowed_plugins, discover
from qiao.registry.discovery import core_version

from tests.support.plugins import good_source

BOOM = "raise RuntimeError('this module must not be imported')"


def record(name, **options):
    found = discover(**options).named(name)
    assert found is not None
    return found


def test_names_are_read_without_importing(site):
    site.install("acme", BOOM)
    found = record("acme")
    assert (found.status, found.distribution, found.version, found.group) == ("found", "qiao-acme", "1.2.3", "qiao.v1")
    assert site.imported() == []


def test_another_contract_version_is_put_aside_unimported(site):
    site.install("acme", BOOM, group="qiao.v2")
    found = record("acme")
    assert found.status == "quarantined"
    assert "qiao.v2" in found.reason and "qiao.v1" in found.reason and "qiao-acme" in found.reason
    assert site.imported() == []


def test_foreign_groups_are_none_of_ours(site):
    site.install("acme", BOOM, group="qiaoish.v1")
    assert discover().named("acme") is None


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("qiao>=0.1", True),
        ("Qiao >=0.1,<99", True),
        ("qiao>=99", False),
        ("qiao<0.0.1", False),
        ("qiao>=99; extra == 'gpu'", True),
        ("qiao>=99; python_version < '3'", True),
        ("qiao-tools>=99", True),
        ("not a requirement !!", True),
    ],
)
def test_the_declared_range_is_checked_before_the_import(site, requires, fits):
    site.install("acme", BOOM, requires=["numpy", requires])
    found = record("acme")
    assert found.status == ("found" if fits else "quarantined")
    if not fits:
        assert requires.removeprefix("qiao") in found.reason  # the declared range
        assert core_version() in found.reason
    assert site.imported() == []


def test_one_name_from_two_distributions_names_both(site):
    site.install("acme", BOOM, distribution="qiao-acme")
    site.install("acme", BOOM, distribution="acme-for-qiao", version="4.0")
    records = [r for r in discover().records if r.name == "acme"]
    assert [r.status for r in records] == ["quarantined"] * 2
    for r in records:
        assert "qiao-acme 1.2.3" in r.reason and "acme-for-qiao 4.0" in r.reason


def test_nobody_takes_the_name_of_the_last_resort(site):
    site.install("reference", BOOM, distribution="evil")
    found = record("reference")
    assert (found.distribution, found.status) == ("qiao", "found")
    assert [r.status for r in discover().records if r.distribution == "evil"] == ["quarantined"]


def test_the_allow_list(site):
    site.install("acme", good_source("acme"))
    site.install("other", good_source("other"))
    allowed = allowed_plugins({"QIAO_PLUGINS": " acme , "})
    assert allowed == ("acme",)
    assert record("acme", allowed=allowed).status == "found"
    assert record("other", allowed=allowed).status == "ignored"
    assert "QIAO_PLUGINS=acme" in record("other", allowed=allowed).reason
    assert record("reference", allowed=allowed).status == "found"  # the last resort always may
    assert allowed_plugins({}) is None and allowed_plugins({"QIAO_PLUGINS": ""}) is None


def test_metadata_that_cannot_be_read_harms_nobody(site):
    site.install("acme", good_source("acme"))
    broken = site.folder / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(b"\xff\xfe[[[")
    assert record("acme").status == "found"


def test_an_older_copy_further_down_the_path_does_not_count(site, tmp_path_factory, monkeypatch):
    from tests.support.plugins import Site

    older = Site(tmp_path_factory.mktemp("older"))
    older.install("acme", BOOM, version="0.9")
    site.install("acme", BOOM, version="1.0")
    monkeypatch.setattr("sys.path", [str(site.folder), str(older.folder), *__import__("sys").path])
    assert [r.version for r in discover().records if r.name == "acme"] == ["1.0"]
