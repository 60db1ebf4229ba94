"""The rules of operations, one family in each file. Importing this package registers them all."""

from shardc.sbp.rules import elementwise as _elementwise

__all__: list[str] = []
del _elementwise
