"""Conformance kit for Qiao plugins, and a simulated accelerator to try it on."""
