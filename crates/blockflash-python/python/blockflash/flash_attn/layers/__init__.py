"""Layers of flash-attn: `rotary` alone."""
