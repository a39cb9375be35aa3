import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ratp._core.files import CONFIG as FORM
from ratp._core.files import write_json
from ratp.errors import RunDirectoryError
from ratp.evaluation.matrix import Matrix
from ratp.runs.record import RunRecord, read_journal, read_run

CONFIG = {
    "method": "ratp",
    "preset": "official",
    "changed": {},
    "stream": "demo",
    "order": ["MT", "MM"],
    "seed": 2022,
}
ENVIRONMENT = {"ratp": "0.1.0", "device": "cpu"}
MATRIX = Matrix(("MT", "MM"), ((99.0, 60.0), (95.0, 90.0)))
JOURNAL = [
    {"event": "epoch", "stage": 0, "loss": 1.5},
    {"event": "stage_finished", "stage": 0, "seconds": 2.5},
    {"event": "probe", "stage": 1, "accuracy": [98.0, 70.0]},
    {"event": "stage_finished", "stage": 1, "seconds": 4.0},
]
LINES = [json.dumps(event) for event in JOURNAL]
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.lists(st.integers())
)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "config.json", FORM.marked(CONFIG))
    write_json(folder / "environment.json", ENVIRONMENT)
    write_json(folder / "matrix.json", MATRIX.to_json())
    (folder / "journal.jsonl").write_text("".join(line + "\n" for line in LINES))
    return folder


@pytest.fixture
def result_file(run_folder, tmp_path):
    read_run(run_folder).export(tmp_path / "result.json")
    return tmp_path / "result.json"


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestRunDirectory:
    def test_complete_run_is_read(self, run_folder):
        run = read_run(str(run_folder))
        assert (run.path, run.method, run.seed) == (run_folder, "ratp", 2022)
        assert (run.config, run.environment, run.matrix) == (CONFIG, ENVIRONMENT, MATRIX)
        assert list(run.journal) == JOURNAL
        assert run.seconds == 6.5
        assert [event["stage"] for event in run.events("stage_finished")] == [0, 1]
        assert run.events("nothing") == []

    def test_unfinished_run_is_read_up_to_now(self, run_folder):
        write_json(run_folder / "matrix.json", Matrix(("MT", "MM"), ((99.0, 60.0),)).to_json())
        (run_folder / "journal.jsonl").write_text(LINES[0] + "\n")
        run = read_run(run_folder)
        assert not run.matrix.complete
        assert run.seconds == 0

    @pytest.mark.parametrize("name", ["config.json", "environment.json", "matrix.json", "journal.jsonl"])
    def test_a_missing_file_is_named(self, run_folder, name):
        (run_folder / name).unlink()
        with pytest.raises(RunDirectoryError, match=name.replace(".", r"\.")):
            read_run(run_folder)

    @pytest.mark.parametrize("name", ["config.json", "environment.json", "matrix.json"])
    @pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00"])
    def test_a_damaged_file_is_named(self, run_folder, name, content):
        (run_folder / name).write_text(content)
        with pytest.raises(RunDirectoryError, match=rf"{name}.*damaged"):
            read_run(run_folder)

    def test_missing_folder_is_named(self, tmp_path):
        with pytest.raises(RunDirectoryError, match=r"nowhere does not exist.*ratp run"):
            read_run(tmp_path / "nowhere")

    def test_foreign_folder_is_named(self, tmp_path):
        (tmp_path / "holiday.txt").write_text("photos")
        with pytest.raises(RunDirectoryError, match="not a run directory"):
            read_run(tmp_path)

    def test_foreign_config_is_named(self, run_folder):
        write_json(run_folder / "config.json", {"compilerOptions": {"strict": True}})
        with pytest.raises(RunDirectoryError, match="not written by ratp"):
            read_run(run_folder)

    @pytest.mark.parametrize("schema", [0, 2, "1", None])
    def test_another_schema_is_refused(self, run_folder, schema):
        rewrite(run_folder / "config.json", schema=schema)
        with pytest.raises(RunDirectoryError, match="schema"):
            read_run(run_folder)

    @pytest.mark.parametrize("missing", ["method", "seed", "order", "stream"])
    def test_incomplete_config_is_refused(self, run_folder, missing):
        write_json(run_folder / "config.json", {k: v for k, v in CONFIG.items() if k != missing})
        with pytest.raises(RunDirectoryError):
            read_run(run_folder)

    @pytest.mark.parametrize("order", [["MM", "MT"], ["MT"], ["MT", "MM", "SN"], []])
    def test_matrix_and_order_must_name_the_same_domains(self, run_folder, order):
        rewrite(run_folder / "config.json", order=order)
        with pytest.raises(RunDirectoryError, match="damaged"):
            read_run(run_folder)

    @pytest.mark.parametrize("accuracy", [[[1.0]], [[1.0, 200.0]], "rows", None, [[1, 2]] * 3, [[10**400, 1]]])
    def test_invalid_matrix_is_damaged(self, run_folder, accuracy):
        (run_folder / "matrix.json").write_text(json.dumps({"domains": ["MT", "MM"], "accuracy": accuracy}))
        with pytest.raises(RunDirectoryError, match="damaged"):
            read_run(run_folder)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(key=st.sampled_from(["method", "seed", "order", "stream", "schema", "preset", "changed"]), value=PLAIN)
    @example(key="order", value=5)
    @example(key="order", value=None)
    @example(key="seed", value="many")
    @example(key="seed", value=None)
    @example(key="changed", value=[1])
    @example(key="changed", value=None)
    def test_a_config_of_the_wrong_kind_is_refused_or_usable(self, run_folder, key, value):
        write_json(run_folder / "config.json", {**CONFIG, key: value})
        try:
            run = read_run(run_folder)
        except RunDirectoryError:
            return
        assert isinstance(run.label, str)
        assert isinstance(run.seed, int)


class TestLabel:
    @pytest.mark.parametrize(
        ("changes", "label"),
        [
            ({}, "ratp"),
            ({"preset": "paper"}, "ratp (paper)"),
            ({"changed": {"pca.weight": 0.0}}, "ratp (pca.weight=0.0)"),
            (
                {"preset": "paper", "changed": {"pca.weight": 0.0, "r_con": 0.5}},
                "ratp (paper, pca.weight=0.0, r_con=0.5)",
            ),
        ],
    )
    def test_label_names_non_defaults(self, changes, label):
        assert RunRecord(Path("run"), {**CONFIG, **changes}, {}, MATRIX, ()).label == label


class TestJournal:
    def test_truncated_last_line_is_dropped(self, run_folder):
        path = run_folder / "journal.jsonl"
        whole = path.read_bytes()
        complete = len(whole) - len(LINES[-1]) - 1
        for length in range(complete, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert read_journal(path) == JOURNAL[:-1]

    def test_last_line_without_newline_is_kept(self, run_folder):
        path = run_folder / "journal.jsonl"
        path.write_bytes(path.read_bytes()[:-1])
        assert read_journal(path) == JOURNAL

    def test_line_cut_inside_a_character_is_dropped(self, run_folder):
        path = run_folder / "journal.jsonl"
        path.write_bytes(path.read_bytes() + '{"event": "画'.encode()[:-1])
        assert read_journal(path) == JOURNAL

    def test_a_damaged_line_before_the_last_is_named(self, run_folder):
        (run_folder / "journal.jsonl").write_text("\n".join([LINES[0], LINES[1][:-5], *LINES[2:]]) + "\n")
        with pytest.raises(RunDirectoryError, match=r"journal\.jsonl:2 is damaged"):
            read_journal(run_folder / "journal.jsonl")

    @pytest.mark.parametrize("line", ["5", "null", "[]", '"text"'])
    def test_non_object_line_is_named(self, run_folder, line):
        (run_folder / "journal.jsonl").write_text("\n".join([LINES[0], line, *LINES[1:]]))
        with pytest.raises(RunDirectoryError, match=r"journal\.jsonl:2 is damaged"):
            read_journal(run_folder / "journal.jsonl")

    def test_endlessly_nested_line_is_damaged(self, run_folder):
        (run_folder / "journal.jsonl").write_text("\n".join(["[" * 100_000, *LINES]))
        with pytest.raises(RunDirectoryError, match="damaged"):
            read_journal(run_folder / "journal.jsonl")

    def test_an_empty_journal_has_no_events(self, run_folder):
        (run_folder / "journal.jsonl").write_text("")
        assert read_journal(run_folder / "journal.jsonl") == []

    @given(text=st.text(min_size=1, max_size=5))
    @example(text="\u2028")
    @example(text="\x85")
    def test_events_can_hold_any_text(self, tmp_path_factory, text):
        """Only a line feed ends a line of JSON; class names may hold other separators."""
        path = tmp_path_factory.getbasetemp() / "journal.jsonl"
        event = {"event": "probe", "class": text}
        for ascii_only in (True, False):
            path.write_bytes(((json.dumps(event, ensure_ascii=ascii_only) + "\n") * 2).encode())
            assert read_journal(path) == [event, event]

    @given(st.binary(max_size=100))
    def test_any_bytes_are_events_or_damaged(self, tmp_path_factory, data):
        path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
        path.write_bytes(data)
        try:
            found = read_journal(path)
        except RunDirectoryError:
            return
        assert all(isinstance(event, dict) for event in found)


class TestResult:
    def test_result_holds_the_run_without_epochs(self, run_folder, result_file):
        run, result = read_run(run_folder), read_run(result_file)
        assert (result.config, result.environment, result.matrix) == (run.config, run.environment, run.matrix)
        assert list(result.journal) == [event for event in JOURNAL if event["event"] != "epoch"]
        assert (result.label, result.seed, result.seconds) == (run.label, run.seed, run.seconds)

    def test_exporting_a_result_gives_the_same_result(self, result_file, tmp_path):
        read_run(result_file).export(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == result_file.read_bytes()

    def test_samples_are_offered_only_if_present(self, run_folder, result_file):
        assert read_run(result_file).samples is None
        assert read_run(run_folder).samples is None
        (run_folder / "samples.safetensors").write_bytes(b"")
        assert read_run(run_folder).samples == run_folder / "samples.safetensors"

    def test_a_foreign_json_file_is_refused(self, tmp_path):
        (tmp_path / "package.json").write_text('{"name": "something"}')
        with pytest.raises(RunDirectoryError, match="not a ratp result"):
            read_run(tmp_path / "package.json")

    @pytest.mark.parametrize("schema", [0, 2, None])
    def test_another_schema_of_the_file_is_refused(self, result_file, schema):
        rewrite(result_file, schema=schema)
        with pytest.raises(RunDirectoryError, match="schema"):
            read_run(result_file)

    @pytest.mark.parametrize("key", ["config", "environment", "matrix", "journal"])
    @pytest.mark.parametrize("value", [None, 5, "text", [1], [None]])
    def test_parts_of_the_wrong_kind_are_refused(self, result_file, key, value):
        rewrite(result_file, **{key: value})
        with pytest.raises(RunDirectoryError):
            read_run(result_file)

    def test_truncated_result_is_damaged(self, result_file):
        result_file.write_bytes(result_file.read_bytes()[:-20])
        with pytest.raises(RunDirectoryError, match="damaged"):
            read_run(result_file)

    def test_unwritable_folder_is_named(self, run_folder):
        with pytest.raises(RunDirectoryError, match="cannot write"):
            read_run(run_folder).export(run_folder / "missing" / "result.json")
