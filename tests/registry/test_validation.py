"""One plugin at a time: what is wrong with it is said in full, and nothing else suffers."""

from __future__ import annotations

import inspect

import pytest
import torch
from qiao.contract import CATALOG, SPECS, DeviceInfo, hookimpl
from qiao.errors import PluginError
from qiao.registry import discover, survey
from qiao.registry.manager import load, load_object

from tests.support.plugins import good_source, module_with


def rejected(**functions):
    with pytest.raises(PluginError) as caught:
        load_object(module_with(**functions), "fake")
    return str(caught.value)


def surveyed(name):
    return next(item for item in survey(discover((name,))) if item.record.name == name)


def test_the_catalog_has_the_arguments_of_the_specifications():
    """The check below is against the catalog, so the two must say the same."""
    for spec in SPECS:
        for name, function in vars(spec).items():
            if not name.startswith("_"):
                arguments = list(inspect.signature(function).parameters)[1:]
                assert [operand.name for operand in CATALOG[name].args] == arguments, name


def test_an_unknown_hook_gets_a_suggestion():
    text = rejected(atention=lambda query: query)
    assert "unknown hook 'atention'" in text and "Did you mean 'attention'?" in text


def test_a_hook_of_a_newer_minor_version_may_be_marked_optional():
    module = module_with()
    module.paged_mla = hookimpl(optionalhook=True)(lambda query: query)
    assert "paged_mla" not in load_object(module, "fake").hooks


def test_wrong_arguments_are_named():
    text = rejected(sample=lambda logit, params: logit)
    assert "sample: unknown argument 'logit'" in text and "Did you mean 'logits'?" in text


def test_defaults_are_forbidden():
    def sample(logits, params=None):
        return logits

    assert "sample: argument 'params' must not have a default" in rejected(sample=sample)


def test_catch_all_arguments_are_forbidden():
    assert "must be an ordinary positional argument" in rejected(sample=lambda *args: args[0])
    assert "must be an ordinary positional argument" in rejected(sample=lambda logits, **rest: logits)


@pytest.mark.parametrize("hook", ["probe_devices", "capabilities", "memory_info", "synchronize"])
def test_required_hooks(hook):
    module = module_with()
    delattr(module, hook)
    with pytest.raises(PluginError, match=f"required hook '{hook}' is missing"):
        load_object(module, "fake")


def test_wrappers_are_refused():
    module = module_with()

    @hookimpl(wrapper=True)
    def sample(logits, params):
        return (yield)

    module.sample = sample
    with pytest.raises(PluginError, match="sample: hook wrappers"):
        load_object(module, "fake")


def test_all_faults_are_told_at_once():
    text = rejected(atention=lambda query: query, sample=lambda logit: logit)
    assert "atention" in text and "'logit'" in text


def test_a_subset_or_another_order_of_arguments_is_called_by_position():
    hooks = load_object(
        module_with(
            sample=lambda params, logits: (logits, params),
            write_kv=lambda slot_mapping, key: (key, slot_mapping),
            matmul=lambda x, weight, bias: (x, weight, bias),
        ),
        "fake",
    ).hooks
    assert hooks["sample"]("logits", "params") == ("logits", "params")
    assert hooks["write_kv"]("key", "value", "cache", "slots") == ("key", "slots")
    assert hooks["matmul"](1, 2, 3) == (1, 2, 3)


def test_a_specname_lets_a_vendor_name_its_functions():
    module = module_with()
    module.acme_sample = hookimpl(specname="sample")(lambda logits, params: logits)
    assert load_object(module, "fake").hooks["sample"](1, 2) == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch_fake", "'torch_fake' is missing"),
        ("from qiao.engine.platform_of_tomorrow import Platform", "made for another version of the core"),
        ("from qiao.contract import no_such_thing", "made for another version of the core"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError('driver 1.0 is too old')", "ValueError: driver 1.0 is too old"),
        ("def broken(:", "SyntaxError"),
        ("class Weird(BaseException): pass\nraise Weird('x')", "Weird: x"),
    ],
)
def test_an_import_that_fails_becomes_the_reason(site, source, said):
    site.install("acme", source, requires=["qiao>=0.1,<9"])
    site.install("fine", good_source("fine"))
    item = surveyed("acme")
    assert item.record.status == "quarantined" and item.devices == ()
    assert said in item.record.reason
    assert "qiao-acme 1.2.3" in item.record.reason
    assert "qiao<9,>=0.1" in item.record.reason and discover().core_version in item.record.reason
    assert surveyed("fine").record.status == "ready"


def test_a_missing_entry_point_object_is_an_import_failure(site):
    site.install("acme", "x = 1")
    (next(site.folder.glob("qiao_acme*")) / "entry_points.txt").write_text(
        f"[qiao.v1]\nacme = {site.modules[0]}:Plugin.instance\n"
    )
    assert "import failed" in surveyed("acme").record.reason


def test_a_class_is_refused(site):
    site.install("acme", "class Plugin: pass")
    (next(site.folder.glob("qiao_acme*")) / "entry_points.txt").write_text(
        f"[qiao.v1]\nacme = {site.modules[0]}:Plugin\n"
    )
    assert "name a module or an instance" in surveyed("acme").record.reason


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ("raise OSError('no /dev/acme0')", "probe failed: OSError: no /dev/acme0"),
        ("raise SystemExit(1)", "probe failed: SystemExit: 1"),
        ("return None", "probe failed: TypeError"),
        ("return ['acme:0']", "probe failed: returned a str"),
        ("return [DeviceInfo('acme:0', '', 'c', 1, 'e')]", "no valid torch device, got ''"),
        ("return [DeviceInfo('other:0', 'cpu', 'c', 1, 'e')]", "expected 'acme:INDEX'"),
    ],
)
def test_a_probe_that_fails_becomes_the_reason(site, probe, said):
    site.install("acme", good_source("acme", extra=f"\n@hookimpl\ndef probe_devices():\n    {probe}\n"))
    item = surveyed("acme")
    assert item.record.status == "quarantined" and said in item.record.reason
    assert item.usable == ()


def test_capabilities_that_fail_become_the_reason(site):
    site.install("acme", good_source("acme", extra="\n@hookimpl\ndef capabilities(chip):\n    return {}\n"))
    assert "capabilities failed: returned dict" in surveyed("acme").record.reason


def test_a_good_plugin_reports_hooks_and_devices(site):
    site.install("acme", good_source("acme", count=2))
    item = surveyed("acme")
    assert item.record.status == "ready" and item.verdict == ""
    assert item.record.hooks == ("capabilities", "memory_info", "probe_devices", "synchronize")
    assert [d.name for d in item.usable] == ["acme:0", "acme:1"]
    assert isinstance(item.usable[0], DeviceInfo) and torch.device(item.usable[0].torch_device).type == "meta"


def test_no_module_is_run_twice(site):
    site.install("acme", good_source("acme"))
    discovery = discover()
    one, two = (load(discovery.named("acme"), discovery.core_version) for _ in range(2))
    assert one.hooks["synchronize"] is two.hooks["synchronize"]
