"""How the sanitizer lane reads and judges the tool's output: records, summaries, five facts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from verify.sanitizers.exceptions import Waiver
from verify.sanitizers.facts import CaseResult, Facts, collect, judge
from verify.sanitizers.records import (
    NotUnderstood,
    Record,
    Summary,
    complaints,
    read_records,
    read_summary,
)
from verify.sanitizers.results import unused
from verify.sanitizers.tool import ERROR_EXIT, PRINT_LIMIT

# What the tool writes.

PRECISE = """
<record>
  <kind>Precise</kind><level>Error</level>
  <who><threadIdx><x>3</x><y>0</y><z>0</z></threadIdx><blockIdx><x>126</x><y>0</y><z>0</z></blockIdx></who>
  <what>
    <text>Invalid __global__ write of size 4 bytes
      Access at 0x7f00 is out of bounds</text>
    <space>__global__</space><size>4</size><direction>write</direction>
    <error>out of bounds</error><address>32512</address>
  </what>
  <where><func>planted_overrun</func><path>tiny.cu</path><line>19</line><pc>0x1c0</pc></where>
  <hostStack><saveLocation>kernel launch time</saveLocation>
    <frame><func>main</func><path>/usr/bin/python</path><line>1</line><module>python</module><pc>0x1</pc></frame></hostStack>
</record>
"""
RACE = """
<record>
  <kind>Analysis</kind><level>Error</level>
  <what><text>Race reported between Write access at split_q+0x1230 in split_q.cu:104
  and Read access at split_q+0x2340 in ptx.cuh:88 [4096 hazards]</text></what>
</record>
"""


def xml(*records: str) -> str:
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f"<ComputeSanitizerOutput>{''.join(records)}</ComputeSanitizerOutput>\n"
    )


def test_a_memory_record_is_read_whole() -> None:
    (record,) = read_records(xml(PRECISE), "memcheck")
    assert "main /usr/bin/python 1 python" in record.words
    assert replace(record, words="") == Record(
        tool="memcheck",
        kind="Precise",
        level="Error",
        text="Invalid __global__ write of size 4 bytes Access at 0x7f00 is out of bounds",
        kernel="planted_overrun",
        source="tiny.cu:19",
        thread="(3, 0, 0)",
        block="(126, 0, 0)",
        address="0x7f00",
        size="4",
    )
    assert (
        record.place
        == "planted_overrun, at tiny.cu:19, thread (3, 0, 0), block (126, 0, 0), address 0x7f00"
    )


def test_a_race_names_its_kernel_in_its_text() -> None:
    (record,) = read_records(xml(RACE), "racecheck")
    assert (record.kind, record.level, record.kernel, record.unknown) == (
        "Analysis",
        "Error",
        "split_q",
        (),
    )


def test_a_stack_frame_is_not_the_place() -> None:
    nowhere = re.sub(r"<where>.*</where>", "<where><pc>0x1c0</pc></where>", PRECISE)
    assert read_records(xml(nowhere), "memcheck")[0].source == ""


def test_a_document_without_records_holds_none() -> None:
    assert read_records(xml(), "memcheck") == ()
    assert read_records("<ComputeSanitizerOutput/>", "memcheck") == ()


def test_an_element_that_nobody_knows_is_told() -> None:
    strange = PRECISE.replace("</record>", "<colour>red</colour></record>")
    assert read_records(xml(strange), "memcheck")[0].unknown == ("colour",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not parse"),
        (xml(PRECISE)[:-40], "does not parse"),
        ("<Other/>", "root"),
        (xml("<finding/>"), "finding"),
        (xml("<record><level>Error</level></record>"), "no kind"),
        ("<!DOCTYPE a><ComputeSanitizerOutput/>", "document type"),
    ],
)
def test_what_is_no_report_is_not_understood(text: str, says: str) -> None:
    with pytest.raises(NotUnderstood, match=says):
        read_records(text, "memcheck")


def memcheck_log(errors: int) -> str:
    return (
        f"========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: {errors}"
        f" error{'s' * (errors != 1)}\n"
    )


def racecheck_log(errors: int, warnings: int = 0) -> str:
    return (
        f"========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: {errors + warnings}"
        f" hazard{'s' * (errors + warnings != 1)} displayed ({errors} error{'s' * (errors != 1)},"
        f" {warnings} warning{'s' * (warnings != 1)})\n"
    )


def test_summaries_are_read() -> None:
    for count in (0, 1, 2, 133):
        assert read_summary(memcheck_log(count), "memcheck") == Summary(count)
        assert read_summary(racecheck_log(count, 1), "racecheck") == Summary(count, 1)
    limited = (
        "========= ERROR SUMMARY: 33 errors were not printed. Use --print-limit option to adjust"
        " the number\n"
    )
    assert read_summary(memcheck_log(133) + limited, "memcheck") == Summary(133)


@pytest.mark.parametrize(
    ("log", "tool"),
    [
        ("", "memcheck"),
        (racecheck_log(0), "memcheck"),  # another tool's
        (memcheck_log(0), "racecheck"),
        (memcheck_log(0) * 2, "memcheck"),
        ("========= LEAK SUMMARY: 0 bytes leaked in 0 allocations\n", "memcheck"),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 1 warning)\n", "racecheck"),
    ],
)
def test_a_log_without_one_summary_is_not_understood(log: str, tool: str) -> None:
    with pytest.raises(NotUnderstood):
        read_summary(log, tool)


def test_the_tools_own_complaints_are_heard() -> None:
    log = (
        "========= COMPUTE-SANITIZER\n========= Internal Sanitizer Error: The Sanitizer encountered"
        " an error while running. Errors might go undetected\n========= Error: Target application"
        " terminated before first instrumented API call\n" + memcheck_log(0)
    )
    assert len(complaints(log)) == 2
    assert complaints(memcheck_log(3)) == ()


# What the facts say together.

CASE = "variant:default:sanitizer:problem"
WRITE = "Invalid __global__ write"
FAULTY_RECORD = Record(tool="memcheck", kind="Precise", text=WRITE, kernel="kernel", words=WRITE)
CLEAN_FACTS = Facts(
    tool="memcheck",
    exit_code=0,
    summary=Summary(0),
    records=(),
    results=(CaseResult(CASE, "ok"), CaseResult(CASE, "ok")),
    expected_cases=2,
)
FAULTY_FACTS = replace(
    CLEAN_FACTS,
    exit_code=ERROR_EXIT,
    summary=Summary(1),
    records=(FAULTY_RECORD,),
    results=(CaseResult(CASE, "raised", "error 719"),),
)


def test_five_facts_that_agree() -> None:
    assert judge(CLEAN_FACTS).outcome == "clean"
    judgement = judge(FAULTY_FACTS)
    assert (judgement.outcome, judgement.records, judgement.total, judgement.reasons) == (
        "faulty",
        (FAULTY_RECORD,),
        1,
        (),
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"exit_code": ERROR_EXIT}, "ended with exit code 86"),
        ({"exit_code": 1}, "exit code 1"),
        ({"exit_code": 255}, "exit code 255"),
        ({"exit_code": None}, "a kill"),
        ({"exit_code": -11}, "exit code -11"),
        ({"summary": Summary(1)}, "counts 1, the XML holds 0"),
        ({"summary": None}, "nothing readable"),
        ({"records": (FAULTY_RECORD,)}, "counts 0, the XML holds 1"),
        ({"records": None}, "nothing readable"),
        ({"results": (CaseResult(CASE, "ok"),)}, "1 of 2 cases"),
        ({"results": (CaseResult(CASE, "ok"), CaseResult(CASE, "raised", "why"))}, "raised: why"),
        (
            {"results": (CaseResult(CASE, "ok"), CaseResult(CASE, "ok", "leaves 3 of 4 elements"))},
            "prove a launch",
        ),
        ({"results": (), "expected_cases": 0}, "no case"),
        ({"doubts": ("Internal Sanitizer Error",)}, "Internal"),
    ],
)
def test_one_fact_that_disagrees_makes_a_clean_process_inconclusive(
    change: dict[str, object], says: str
) -> None:
    judgement = judge(replace(CLEAN_FACTS, **change))  # type: ignore[arg-type]
    assert judgement.outcome == "inconclusive"
    assert says in "; ".join(judgement.reasons)


def test_a_fault_that_two_facts_show_is_a_fault_whatever_else_is_in_doubt() -> None:
    for change in (
        {"exit_code": 0},
        {"exit_code": -6},
        {"doubts": ("Internal Sanitizer Error",)},
        {"summary": Summary(7)},
    ):
        judgement = judge(replace(FAULTY_FACTS, **change))  # type: ignore[arg-type]
        assert judgement.outcome == "faulty"
        assert judgement.reasons


def test_one_fact_alone_shows_no_fault_and_no_absence_of_one() -> None:
    assert judge(replace(FAULTY_FACTS, summary=Summary(0))).outcome == "inconclusive"
    assert judge(replace(FAULTY_FACTS, records=())).outcome == "inconclusive"
    assert judge(replace(FAULTY_FACTS, records=None)).outcome == "inconclusive"


def test_warnings_count_though_the_tool_ends_with_0() -> None:
    warning = replace(FAULTY_RECORD, tool="racecheck", kind="Analysis", level="Warning")
    facts = replace(CLEAN_FACTS, tool="racecheck", summary=Summary(0, 1), records=(warning,))
    assert judge(facts).outcome == "faulty"
    assert judge(facts).reasons == ()


def test_more_errors_than_are_printed_still_agree() -> None:
    many = replace(
        FAULTY_FACTS, summary=Summary(PRINT_LIMIT + 50), records=(FAULTY_RECORD,) * PRINT_LIMIT
    )
    assert (judge(many).outcome, judge(many).total, judge(many).reasons) == (
        "faulty",
        PRINT_LIMIT + 50,
        (),
    )


WAIVER = Waiver(
    tool="memcheck",
    kind="Precise",
    kernel="^kernel$",
    words="write",
    source="",
    reason="known",
    evidence="read",
    version="2025.3.1.0",
)


def test_a_waived_record_counts_as_none() -> None:
    facts = replace(FAULTY_FACTS, results=CLEAN_FACTS.results)
    judgement = judge(facts, (WAIVER,))
    assert (judgement.outcome, judgement.waived) == ("clean", (WAIVER,))
    # the other facts must still agree
    assert judge(replace(facts, exit_code=0), (WAIVER,)).outcome == "inconclusive"
    # nor does it excuse a case that raised
    assert judge(FAULTY_FACTS, (WAIVER,)).outcome == "inconclusive"
    both = replace(
        facts, summary=Summary(2), records=(FAULTY_RECORD, replace(FAULTY_RECORD, words="a read"))
    )
    assert [record.words for record in judge(both, (WAIVER,)).records] == ["a read"]


def test_a_waiver_covers_nothing_unseen_or_unknown() -> None:
    facts = replace(FAULTY_FACTS, results=CLEAN_FACTS.results)
    beyond = replace(
        facts, summary=Summary(PRINT_LIMIT + 1), records=(FAULTY_RECORD,) * PRINT_LIMIT
    )
    assert judge(beyond, (WAIVER,)).outcome == "inconclusive"
    strange = replace(facts, records=(replace(FAULTY_RECORD, unknown=("colour",)),))
    assert judge(strange, (WAIVER,)).outcome == "faulty"
    for other in (
        {"kind": "Imprecise"},
        {"kernel": "others"},
        {"words": "read"},
        {"tool": "racecheck"},
    ):
        assert judge(facts, (replace(WAIVER, **other),)).outcome == "faulty"


def test_a_waiver_can_name_the_text_of_the_source_line(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("int i;\n  o[i] = 0;\n")
    record = replace(FAULTY_RECORD, source=f"{tmp_path}/a.cu:2")
    waiver = replace(WAIVER, source=r"^o\[i\] = 0;$")
    assert waiver.covers(record)
    for place in (f"{tmp_path}/a.cu:1", f"{tmp_path}/a.cu:3", f"{tmp_path}/b.cu:2", "", "a.cu:x"):
        assert not waiver.covers(replace(record, source=place))


def test_unknown_elements_are_told() -> None:
    strange = replace(FAULTY_RECORD, unknown=("colour",))
    judgement = judge(replace(FAULTY_FACTS, records=(strange,)))
    assert judgement.reasons == ("a Precise record holds unknown elements: colour",)


def test_a_waiver_that_nothing_needs_is_dead() -> None:
    assert unused([WAIVER], [], []) == [WAIVER]


def test_a_process_that_left_nothing_is_inconclusive(tmp_path: Path) -> None:
    judgement = judge(collect("memcheck", tmp_path, 0, CLEAN_FACTS.results, 2))
    assert judgement.outcome == "inconclusive"
    assert "left no" in "; ".join(judgement.reasons)
