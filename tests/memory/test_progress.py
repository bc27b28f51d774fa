from trl.memory.progress import Activity, begin, finish, report_progress_to


def test_watchers_hear_of_phases_and_rows():
    seen, other = [], []
    begin("scoring")
    with report_progress_to(seen.append):
        begin("generation", 3)
        finish(1)
        finish(0)
        with report_progress_to(other.append):
            finish(5)  # rows that were computed twice
    begin("rewards")
    assert seen == [Activity("generation", 3, done) for done in (0, 1, 3)]
    assert other == seen[-1:]
