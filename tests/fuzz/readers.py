"""All readers that are fuzzed, by name."""

from tests.fuzz import binary_files, text_files

READERS = {reader.name: reader for reader in (*binary_files.READERS, *text_files.READERS)}
