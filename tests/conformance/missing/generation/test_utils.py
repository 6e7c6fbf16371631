"""Stands in for a module that the source distribution leaves out: generation is tested in our own tests."""


class GenerationTesterMixin:
    pass
