"""A hang on many ranks is decided by a few of them, so that the store gets few requests."""

from lightning_fasttrain.guards import hang_watch
from lightning_fasttrain.guards.hang_watch import ProgressWatch
from tests.support.ranks import Ranks

PROGRAM = """
import sys, time
import torch.distributed as dist
from lightning_fasttrain.guards import hang_watch

hang_watch._READERS = 1
read = hang_watch.RankBoard.read

def telling_read(board, *args):
    print(f"rank {board.rank} reads", flush=True)
    return read(board, *args)

hang_watch.RankBoard.read = telling_read
dist.init_process_group("gloo")
with hang_watch.ProgressWatch(timeout_s=0.5, first_timeout_s=0.5) as watch:
    watch.begin_step()
    if dist.get_rank() < 2:
        watch.beat("backward")
    dist.barrier()
    time.sleep(60)
"""


def test_ranks_that_do_not_read_show_their_stacks_and_leave_the_report_to_one(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ranks = Ranks(str(script), log=tmp_path / "log", count=3)
    for process in ranks.processes:
        process.join(30)
    assert [process.exitcode for process in ranks.processes] == [1, 1, 1]
    _, said, errors = ranks.end()
    assert set(said.split("\n")) == {"rank 0 reads", ""}
    assert errors.count("HangWatch: no sign of life within the limit.") == 1
    assert "rank 2 is the furthest behind" in errors
    for rank in range(3):
        assert f"HangWatch: rank {rank} shows no sign of life. Its stacks:" in errors


def test_more_ranks_read_if_the_first_do_not_decide(monkeypatch):
    watch = ProgressWatch(timeout_s=20)
    turns = {}
    for rank in (0, 3, 4, 8, 1023):
        watch.rank = rank
        turns[rank] = [watch._is_my_turn(overdue * watch._silent_s) for overdue in (0, 1, 2, 4)]
    assert turns[0] == turns[3] == [True] * 4
    assert turns[4] == [False, False, True, True]
    assert turns[8] == [False, False, False, True]
    assert hang_watch._READERS == 4
    assert turns[1023] == [False] * 4
