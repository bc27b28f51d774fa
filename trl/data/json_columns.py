"""Rows of Arrow tables as Python objects, with JSON columns decoded as datasets decodes them."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from datasets import Json

from .formats import Row

Decode = Callable[[Any], Any]


def to_rows(table: pa.Table) -> list[Row]:
    """Turn a table into rows; columns of the feature `Json`, and those that contain it, decoded.

    Arrow keeps such values as text. Other columns cost nothing more than `to_pylist`.
    """
    rows: list[Row] = table.to_pylist()
    for field in table.schema:
        if (decode := json_decoder(field.type)) is not None:
            for row in rows:
                row[field.name] = decode(row[field.name])
    return rows


def json_decoder(data_type: pa.DataType) -> Decode | None:
    """Return a function that decodes the JSON in values of an Arrow type; None if it has none."""
    if isinstance(data_type, pa.JsonType):
        decode: Decode = Json().decode_example
        return decode
    if isinstance(data_type, pa.BaseExtensionType):  # such as the arrays of datasets
        return None
    if pa.types.is_struct(data_type):
        return _struct_decoder(data_type)
    if (
        pa.types.is_nested(data_type)
        and data_type.num_fields == 1
        and hasattr(data_type, "value_type")
    ):
        return _list_decoder(json_decoder(data_type.value_type))
    return None


def _struct_decoder(struct: pa.StructType) -> Decode | None:
    decoders = {field.name: json_decoder(field.type) for field in struct}
    by_name = {name: decode for name, decode in decoders.items() if decode is not None}

    def decode_struct(value: Row | None) -> Row | None:
        if value is None:
            return None
        return value | {name: decode(value[name]) for name, decode in by_name.items()}

    return decode_struct if by_name else None


def _list_decoder(decode: Decode | None) -> Decode | None:
    if decode is None:
        return None
    return lambda values: None if values is None else [decode(value) for value in values]
