"""Readers of the field's file formats, one module each."""
