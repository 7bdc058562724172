"""Every test runs under shape and type checks: jaxtyping and beartype wrap the package as it is imported."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# As in PEP 484, an int will do where a float is expected.
check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))

install_import_hook("codmd", f"{__name__}.check_types")
