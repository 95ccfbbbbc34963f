"""flash-attn's rotary layer."""

from fastattn._args.names import show_public
from fastattn.flash_attn.layers import rotary

__all__ = ["rotary"]

show_public(__name__)
