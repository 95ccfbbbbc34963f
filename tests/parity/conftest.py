"""Comparisons with torch and transformers. They run where both are installed: the extra [parity]."""

import importlib.util

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("torch", "transformers"))) else ["*"]
