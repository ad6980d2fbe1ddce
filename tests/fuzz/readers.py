"""All readers that are fuzzed, by name."""

from tests.fuzz import binary_files, checkpoint_files, text_files

_READERS = (*binary_files.READERS, *checkpoint_files.READERS, *text_files.READERS)
READERS = {reader.name: reader for reader in _READERS}
