"""Where text comes from: folders of text or code, JSON lines, Parquet, Python's own library.

Every record is either a document with its origin or a rejection with its reason.
"""

from nmoe_data.sources.listing import (
    PYTHON_STDLIB,
    Source,
    SourceFile,
    list_files,
    listing_hash,
    place_of,
    source_list,
)
from nmoe_data.sources.record import PAST_ALL, Record
from nmoe_data.sources.stream import (
    Cursor,
    Document,
    Rejection,
    document_id,
    read_documents,
    read_records,
    sample_texts,
)

__all__ = [
    "PAST_ALL",
    "PYTHON_STDLIB",
    "Cursor",
    "Document",
    "Record",
    "Rejection",
    "Source",
    "SourceFile",
    "document_id",
    "list_files",
    "listing_hash",
    "place_of",
    "read_documents",
    "read_records",
    "sample_texts",
    "source_list",
]
