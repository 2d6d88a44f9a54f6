"""The catalogue: importing this fills `findings.RULES`. One module a family; a new one here is found by itself."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
