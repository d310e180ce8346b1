"""Errors, files, folders, processes and terminals: nothing about proteins."""
