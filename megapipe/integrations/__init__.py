"""Ties to other frameworks. Importing one of these modules does not import the framework: they look whether it is
loaded already."""

from . import megatron as megatron
