"""What the soak on real servers reads of a server's state."""

from bench_serving.soak_servers import _ranks
from sglang_hetero.state.report import Report, State, encode
from tests.faults.servers_state import OK
from tests.faults.servers_state import State as Told


def test_figures_by_rank():
    ranks = [
        Report(
            side="decode",
            rank=f"decode TP{rank}/2",
            pid=1,
            tp_rank=rank,
            tp_size=2,
            ours={"units_free": 7 + rank},
            process={"rss_bytes": 100, "threads": 3},
        )
        for rank in range(2)
    ]
    body = encode(State(ok=True, mode="auto", side="decode", faults=[], problems=[], ranks=ranks, control=None))
    found = _ranks(Told.read(body, OK))
    assert found["TP1/2"] == {"units_free": 8, "rss_bytes": 100, "threads": 3}
    assert found["TP0/2"]["units_free"] == 7
