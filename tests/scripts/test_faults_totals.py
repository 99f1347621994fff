"""The page of totals counts what tests that passed say they did, and names those that did not."""

from pathlib import Path

from support.scripts import load_script

faults = load_script("benchmark/faults")

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" time="12.5">
<testcase classname="tests.faults.test_a" name="test_kills[one]" time="2.0">
  <properties><property name="kills" value="40"/><property name="full disks" value="1"/></properties></testcase>
<testcase classname="tests.faults.test_a" name="test_kills[two]" time="3.0">
  <properties><property name="kills" value="1000"/></properties></testcase>
<testcase classname="tests.faults.test_a" name="test_kills[three]" time="1.0">
  <properties><property name="kills" value="7"/></properties><failure message="lost"/></testcase>
<testcase classname="tests.faults.test_b" name="test_mount" time="0.1"><skipped message="no kernel"/></testcase>
</testsuite></testsuites>
"""


def test_write_page_counts_what_passed(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT, encoding="utf-8")
    outcome = faults.read_reports([path, path])
    page = "\n".join(faults.write_page(outcome))
    assert "the tests took 25 s" in page
    assert "| kills | 2,080 |" in page
    assert "| full disks | 2 |" in page
    assert "| committed checkpoints lost | see the failed tests |" in page
    assert "| `faults/test_a.py::test_kills` | 4 | 2 full disks, 2,080 kills | 10 |" in page
    assert "Failed: faults/test_a.py::test_kills[three]; faults/test_a.py::test_kills[three]." in page
    assert "Skipped: faults/test_b.py::test_mount: no kernel (2)." in page
