"""Headway: one exact prefix cache for hybrid language models.

`headway.cache` is the cache itself and needs numpy alone. `headway.errors` holds every exception that this
package raises on purpose. What runs models is in `headway.runtime`, `headway.engine` and `headway.server`,
and needs the extra `serve`. Importing `headway` imports none of them, so that it costs nothing.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
