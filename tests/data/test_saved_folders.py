"""Folders of save_to_disk that somebody else made: no file but their own is read, and nothing is decoded."""

import datasets
import pytest

from flytune.data import readers
from flytune.errors import DataError
from flytune.recipe import Source
from tests.support.spoiled import change

_STRUCT = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}


def rows(path):
    return [row for row, _ in readers.strict(readers.read(Source(path=str(path))))]


@pytest.fixture
def folder(tmp_path):
    datasets.Dataset.from_dict({"text": ["other"]}).save_to_disk(tmp_path / "other")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("field", ["_data_files", "_indices_data_files"])
@pytest.mark.parametrize("name", ["../other/data-00000-of-00001.arrow", "/dev/zero", "s3://bucket/x.arrow"])
def test_a_saved_data_set_names_no_file_elsewhere(folder, field, name):
    assert rows(folder) == [{"text": "a"}, {"text": "b"}]
    change(folder / "state.json", **{field: [{"filename": name}]})
    with pytest.raises(DataError, match="saved: names a file that is not in it: the name "):
        rows(folder)


def test_nor_do_several_splits(tmp_path, folder):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        tmp_path / "several"
    )
    assert rows(tmp_path / "several") == [{"text": "a"}]
    change(tmp_path / "several" / "dataset_dict.json", splits=["train", "../other"])
    with pytest.raises(
        DataError, match="several: names a file that is not in it: the name '../other' leads out"
    ):
        rows(tmp_path / "several")


@pytest.mark.parametrize("form", ["numpy", "torch", "pandas", "arrow"])
def test_a_format_that_it_was_saved_with_changes_no_row(tmp_path, form):
    row = {"messages": [{"role": "user", "content": "a"}], "label": True}
    datasets.Dataset.from_list([row]).with_format(form, columns=["label"]).save_to_disk(tmp_path / "saved")
    assert rows(tmp_path / "saved") == [row]


@pytest.mark.parametrize("values", [{"_data_files": 5}, {"_data_files": [{}]}, {"_data_files": ["x"]}])
def test_a_record_of_another_form_is_refused(folder, values):
    change(folder / "state.json", **values)
    with pytest.raises(DataError, match=r"saved: looks like datasets.save_to_disk but cannot be read: "):
        rows(folder)


def test_no_file_is_opened_that_a_row_names(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("private")
    features = datasets.Features({"text": datasets.Value("string"), "image": _STRUCT})
    named = [{"path": str(secret), "bytes": None}]
    datasets.Dataset.from_dict({"text": ["a"], "image": named}, features=features).save_to_disk(
        tmp_path / "saved"
    )
    info = tmp_path / "saved" / "dataset_info.json"
    kinds = {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
    change(info, features=kinds)
    assert rows(tmp_path / "saved") == [{"text": "a", "image": {"path": str(secret)}}]
