import numpy as np
import pytest
from datasets import Dataset

from trl.data.bounds import ModelBounds, RowsBeyondContext


def test_the_first_row_with_an_unknown_id_is_named():
    documents = {"input_ids": [[], [9, 1], [3, 10, 2], [12]]}
    pairs = {"prompt_ids": [[1], [0], [9], [12]], "chosen_ids": [[2], [9], [10, 4], [0]]}
    ranked = {"prompt_ids": [[], [1], [1], [2]], "answers_ids": [[], [[9]], [[1, 10], [5]], [[12]]]}
    for columns in (documents, pairs, ranked):
        table = Dataset.from_dict(columns | {"source": [7, 8, 9, 9]})
        for rows in (table, table.select([3, 2, 1, 0])):
            ModelBounds(vocabulary=13).check_ids(rows)
            ModelBounds().check_ids(rows)
        with pytest.raises(ValueError, match=r"Row 9 of the dataset has the token id 10"):
            ModelBounds(vocabulary=10).check_ids(table)


@pytest.mark.parametrize(("largest", "is_known"), [(-1, True), (9, True), (10, False)])
def test_ids_end_before_the_size_of_the_vocabulary(largest, is_known):
    assert (ModelBounds(vocabulary=10).problem_of_id(largest) is None) == is_known
    assert ModelBounds().problem_of_id(largest) is None


def test_rows_beyond_the_context_are_counted_once():
    """Row 4 has two items that are too long; a row may have just as many tokens as the context."""
    lengths, sources = np.array([5, 9, 6, 7, 3]), np.array([3, 4, 4, 4, 6])
    found = ModelBounds(context=6).rows_beyond(lengths, sources)
    assert found == RowsBeyondContext(count=1, first=4, longest=9, context=6)
    assert ModelBounds(context=9).rows_beyond(lengths, sources) is None
    assert ModelBounds().rows_beyond(lengths, sources) is None
