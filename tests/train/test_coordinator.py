"""The coordinator: hears workers through a store, by its own clock, and forms generations."""

import json
from typing import Any

import pytest
from nmoe_train.config import Config
from nmoe_train.elastic.coordinator import REFUSED_S, Coordinator
from nmoe_train.elastic.link import Beat, Control
from nmoe_train.elastic.membership import Generation

DEADLINE_S = 5.0


class Workers:
    """Workers of a coordinator whose store is a dictionary, and whose clock the test moves."""

    def __init__(self, count: int, **elastic: Any) -> None:
        moe = {"experts": 12, "top_k": 2, "expert_width": 4}
        model = {"width": 8, "layers": 2, "heads": 2, "dense_width": 8, "moe": moe}
        train = {"steps": 1, "seq_len": 8, "batch_size": 12}
        tree = {"model": model, "train": train, "parallel": {"ep": 4}}
        tree["elastic"] = {"deadline_s": DEADLINE_S, **elastic}
        self.store: dict[str, bytes] = {}
        self.now_s, self.beats, self.alive = 100.0, 0, set()
        self.steps: dict[int, tuple[int, int]] = {}
        self.coordinator = Coordinator(Config.model_validate(tree), self, count)

    def set(self, key: str, value: str) -> None:
        self.store[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.store[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.store for key in keys)

    def tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        self.store["news"] = self.store.get("news", b"") + line

    def join(self, number: int, slot: int | None = None) -> None:
        place = (1, number if slot is None else slot)
        worker = {"number": number, "place": place, "host": "h", "address": f"h:{number}"}
        self.tell("join", worker={**worker, "pid": 1000 + number})
        self.alive.add(number)

    def reach(self, number: int, others: Any) -> None:
        self.tell("reached", number=number, reached=sorted(others))

    def complain(self, number: int, others: Any, what: str = "a peer has left") -> None:
        generation = self.generation.number
        trained, finished = self.steps.get(number, (0, 0))
        step = finished if trained == generation else 0
        self.tell(
            "complaint",
            number=number,
            generation=generation,
            step=step,
            reached=sorted(others),
            what=what,
        )

    def die(self, number: int) -> None:
        """Ends a process; its launcher says so."""
        self.alive.remove(number)
        self.tell("exit", place=self.place(number), pid=1000 + number, how="was ended by SIGKILL")

    def place(self, number: int) -> Any:
        for line in self.store["news"].splitlines():
            news = json.loads(line)
            if news["kind"] == "join" and news["worker"]["number"] == number:
                return news["worker"]["place"]
        raise AssertionError(number)

    def tick(self, seconds: float = 0.1) -> None:
        """Lets time pass, in which whoever is alive beats."""
        self.now_s += seconds
        self.beats += 1
        for number in self.alive:
            self.set(f"beat/{number}", Beat(self.beats, *self.steps.get(number, (0, 0))).encode())
        self.coordinator.tick(self.now_s)

    def start(self, count: int) -> None:
        """Lets so many join, see each other, and make a step."""
        for number in range(count):
            self.join(number)
        for number in range(count):
            self.reach(number, range(count))
        self.tick()
        self.train(1)

    def train(self, step: int) -> None:
        """All members finish a step."""
        for worker in self.generation.members:
            self.steps[worker.number] = (self.generation.number, step)
        self.tick()

    @property
    def control(self) -> Control:
        return Control(**json.loads(self.store["control"]))

    @property
    def generation(self) -> Generation:
        """The newest, as workers read it."""
        return Generation.decode(self.store[f"generation/{self.control.generation}"])

    @property
    def members(self) -> list[int]:
        return [worker.number for worker in self.generation.members]


def test_it_starts_once_all_have_come_and_reach_each_other() -> None:
    workers = Workers(3)
    for number in range(3):
        workers.join(number)
        workers.reach(number, range(number + 1))
        workers.tick()
    assert workers.control.generation == 0
    for number in range(3):
        workers.reach(number, range(3))
    workers.tick()
    assert (workers.members, workers.generation.sizes["ep"]) == ([0, 1, 2], 3)


def test_it_starts_with_those_that_came_when_others_do_not() -> None:
    workers = Workers(4, join_s=30.0)
    workers.tick()
    for number in range(2):
        workers.join(number)
        workers.reach(number, range(2))
    workers.tick(29.0)
    assert workers.control.generation == 0
    workers.tick(2.0)
    assert workers.members == [0, 1]


def test_a_death_ends_the_generation_at_once_and_those_left_go_on_together() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.train(7)
    workers.die(2)
    workers.tick(0.2)
    assert (workers.control.stop, workers.control.lost) == (1, [2])
    for number in (0, 1):
        workers.complain(number, (0, 1, 3))
    workers.tick(0.2)
    assert workers.control.generation == 1, "one has not said whom it reaches"
    workers.complain(3, (0, 1, 3))
    workers.tick(0.2)
    assert workers.members == [0, 1, 3]
    (fault,) = workers.generation.faults
    assert (fault.worker, fault.rank, fault.step) == (2, 2, 7)
    assert fault.what == "rank 2 on h was ended by SIGKILL"
    assert workers.generation.step_before == 7
    assert workers.generation.fault_age_s == pytest.approx(0.6)


def test_a_silent_worker_is_counted_out_after_the_deadline_and_not_before() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.alive.remove(1)
    workers.tick(DEADLINE_S - 0.5)
    assert workers.control.stop == 0
    workers.tick(1.0)
    assert (workers.control.stop, workers.control.lost) == (1, [1])
    # It wakes up and beats again: it stays out, until it joins as another.
    workers.alive.add(1)
    for number in (0, 2, 3):
        workers.complain(number, (0, 1, 2, 3))
    workers.complain(1, (0, 1, 2, 3))
    workers.tick()
    assert workers.members == [0, 2, 3]
    assert DEADLINE_S <= workers.generation.faults[0].detected_s <= DEADLINE_S + 1


def test_one_that_does_not_leave_its_generation_is_left_behind() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.die(0)
    for number in (1, 2):
        workers.complain(number, (1, 2, 3))
    workers.tick()
    workers.tick(DEADLINE_S - 0.2)
    assert workers.control.generation == 1
    workers.tick(0.4)
    assert workers.members == [1, 2]
    assert 3 in workers.control.lost


def test_one_that_leaves_and_returns_at_once_is_another_worker() -> None:
    # Fault 25: nobody may mistake it for the one that was there, which the others wait for.
    workers = Workers(4)
    workers.start(4)
    workers.die(3)
    workers.join(9, slot=3)
    workers.reach(9, (0, 1, 2, 9))
    workers.tick()
    assert workers.control.stop == 1, "the generation ends, although its place is taken again"
    for number in (0, 1, 2):
        workers.complain(number, (0, 1, 2, 9))
    workers.tick()
    assert (workers.members, workers.generation.joined) == ([0, 1, 2, 9], (9,))
    assert workers.generation.rank_of(9) == 3
    assert [fault.worker for fault in workers.generation.faults] == [3]


def test_the_end_of_a_process_is_not_that_of_the_one_which_took_its_place() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.join(9, slot=3)
    workers.tick()
    workers.die(3)
    workers.tick()
    assert workers.control.lost == [3]
    assert "9" in workers.control.roster


def test_of_a_split_network_one_side_goes_on_and_the_other_comes_back_when_it_is_healed() -> None:
    workers = Workers(4)
    workers.start(4)
    for number in (0, 3):
        workers.complain(number, (0, 3))
    for number in (1, 2):
        workers.complain(number, (1, 2))
    workers.tick()
    assert workers.members == [0, 3]
    assert {fault.worker for fault in workers.generation.faults} == {1, 2}
    workers.train(5)
    workers.tick(2 * REFUSED_S)
    assert workers.control.resize < 2, "they still do not reach the others"
    for number in (1, 2):
        workers.reach(number, range(4))
    workers.tick()
    assert workers.control.resize == 2
    for number in (0, 3):
        workers.complain(number, range(4), what="")
    workers.tick()
    assert (workers.members, workers.generation.faults) == ([0, 1, 2, 3], ())


def test_the_side_without_the_store_is_counted_out_by_its_silence() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.alive -= {0, 1}
    for number in (2, 3):
        workers.complain(number, (2, 3))
    workers.tick(0.5)
    assert workers.control.generation == 1
    workers.tick(DEADLINE_S)
    assert workers.members == [2, 3]


def test_a_spare_is_taken_in_at_a_safe_point_if_it_makes_the_layout_larger() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.join(4)
    workers.reach(4, range(5))
    workers.tick()
    assert workers.control.resize == 0, "five do not divide a batch of twelve"
    workers.join(5)
    for number in (4, 5):
        workers.reach(number, range(6))
    workers.tick()
    assert (workers.control.resize, workers.control.stop) == (1, 0)
    for number in range(4):
        workers.complain(number, range(6), what="")
    workers.tick()
    assert len(workers.members) == 6


def test_whoever_cannot_be_reached_does_not_disturb_the_others_again_and_again() -> None:
    workers = Workers(2)
    workers.start(2)
    workers.join(2)
    workers.reach(2, range(3))
    workers.tick()
    assert workers.control.resize == 1
    for number in (0, 1):
        workers.complain(number, (0, 1), what="")
    workers.tick()
    assert workers.members == [0, 1]
    workers.train(3)
    assert workers.control.resize == 1
    workers.tick(REFUSED_S + 1)
    assert workers.control.resize == 2


def test_a_second_death_before_the_first_step_tells_of_both() -> None:
    workers = Workers(4)
    workers.start(4)
    workers.train(6)
    workers.die(0)
    for number in (1, 2, 3):
        workers.complain(number, (1, 2, 3))
    workers.tick()
    workers.die(1)
    for number in (2, 3):
        workers.complain(number, (2, 3))
    workers.tick(1.0)
    assert {fault.worker for fault in workers.generation.faults} == {0, 1}
    assert workers.generation.sizes_before is not None
    assert workers.generation.sizes_before["dp"] == 4
    assert workers.generation.step_before == 6
    assert workers.generation.fault_age_s >= 1.0


def test_all_may_die_and_whoever_returns_goes_on() -> None:
    workers = Workers(2)
    workers.start(2)
    workers.die(0)
    workers.die(1)
    workers.tick()
    workers.tick(20.0)
    assert workers.control.generation == 1
    for number, slot in ((5, 0), (6, 1)):
        workers.join(number, slot)
    for number in (5, 6):
        workers.reach(number, (5, 6))
    workers.tick()
    workers.tick(2.0)
    assert workers.members == [5, 6]


def test_the_run_ends_when_all_are_done_and_not_while_one_may_still_need_them() -> None:
    workers = Workers(2)
    workers.start(2)
    workers.tell("done", number=1, code=0, what="completed")
    workers.tick()
    assert workers.control.end is None
    # Rank 0 may not have come to close the run's record.
    workers.die(0)
    workers.tick()
    workers.reach(1, (1,))
    workers.tick()
    assert (workers.members, workers.control.end) == ([1], None)
    workers.tell("done", number=1, code=0, what="completed")
    workers.tick()
    assert workers.control.end == {"code": 0, "what": "completed"}


def test_a_problem_that_the_user_must_mend_ends_the_run_for_all() -> None:
    workers = Workers(2)
    workers.start(2)
    workers.tell("failed", number=1, code=2, what="E-NOT-FINITE: no")
    workers.tick()
    assert workers.control.end == {"code": 2, "what": "E-NOT-FINITE: no"}


def fail_together(workers: Workers, what: str = "a peer has left") -> None:
    """Ends the generation: every member complains, and nobody is lost."""
    for number in workers.members:
        workers.complain(number, workers.members, what)
    workers.tick()


def test_generations_that_end_again_and_again_before_a_new_step_end_the_run() -> None:
    # Fault: a rank that breaks in every generation, and never dies of it.
    workers = Workers(2, fruitless=4)
    workers.start(2)
    workers.train(7)
    for _ in range(3):
        fail_together(workers, "rank 1 waited in vain")
        # Steps made once more are no progress.
        workers.train(7)
    assert workers.control.end is None
    fail_together(workers, "rank 1 waited in vain")
    end = workers.control.end
    assert end is not None
    assert end["code"] == 2
    assert end["what"].startswith("E-ELASTIC-STUCK: 4 generations in a row ended before step 8")
    assert "the last because rank 1 waited in vain" in end["what"]


def test_a_new_step_between_faults_lets_the_run_go_on_for_ever() -> None:
    workers = Workers(2, fruitless=2)
    workers.start(2)
    for step in range(2, 12):
        fail_together(workers)
        workers.train(step)
    assert workers.control.end is None


def test_a_generation_that_makes_room_before_its_first_step_is_not_in_vain() -> None:
    workers = Workers(2, fruitless=2)
    workers.start(2)
    workers.die(1)
    workers.complain(0, (0,))
    workers.tick()
    workers.join(5, slot=1)
    for number in (0, 5):
        workers.reach(number, (0, 5))
    workers.tick()
    workers.complain(0, (0, 5), what="")
    workers.tick()
    assert (workers.members, workers.control.end) == ([0, 5], None)
    assert [fault.worker for fault in workers.generation.faults] == [1], "told of, once"
